#include "memory.h"

#include <unistd.h>

namespace epc {

namespace {
constexpr u64 kGranule = 2u << 20;

CUmemAllocationProp properties(u32 device) {
  CUmemAllocationProp p{};
  p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  p.location.id = int(device);
  p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return p;
}

int map_at(const Driver& d, CUdeviceptr at, u64 bytes, CUmemGenericAllocationHandle handle, u32 device) {
  EPC_TRY(d.cuMemMap(at, bytes, 0, handle, 0));
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = int(device);
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  if (int bad = check(d.cuMemSetAccess(at, bytes, &access, 1), "cuMemSetAccess")) {
    d.cuMemUnmap(at, bytes);
    return bad;
  }
  return 0;
}
}  // namespace

u64 granular(u64 bytes) { return (bytes + kGranule - 1) / kGranule * kGranule; }

int region_device(int fd, u32* device) {
  const Driver* d = driver();
  if (!d) return EP_EUSAGE;
  int count = 0;
  EPC_TRY(cudaGetDeviceCount(&count));
  CUmemGenericAllocationHandle handle;
  EPC_TRY(d->cuMemImportFromShareableHandle(&handle, reinterpret_cast<void*>(static_cast<uintptr_t>(fd)),
                                            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  CUmemAllocationProp p{};
  const int bad = check(d->cuMemGetAllocationPropertiesFromHandle(&p, handle), "cuMemGetAllocationPropertiesFromHandle");
  d->cuMemRelease(handle);
  if (bad) return bad;
  if (p.location.type != CU_MEM_LOCATION_TYPE_DEVICE || p.location.id < 0 || p.location.id >= count)
    return ep::fail(EP_EUSAGE, "the rank's memory is on device %d, and this process sees %d; let CUDA_VISIBLE_DEVICES include its GPU", p.location.id, count);
  *device = u32(p.location.id);
  return 0;
}

int allocate_on(u32 device, u64 bytes, const char* what, void** out) {
  size_t free_bytes = 0, total_bytes = 0;
  EPC_TRY(cudaMemGetInfo(&free_bytes, &total_bytes));
  const cudaError_t made = bytes > free_bytes ? cudaErrorMemoryAllocation : cudaMalloc(out, bytes);
  if (made != cudaErrorMemoryAllocation) return check(made, "cudaMalloc");
  cudaGetLastError();
  return ep::fail(EP_ESHORT, "%s need %llu bytes and device %u has %llu free; lower slots_per_rank or max_tokens, or leave the GPU to fewer processes", what,
                  static_cast<unsigned long long>(bytes), device, static_cast<unsigned long long>(free_bytes));
}

RegionMap::~RegionMap() {
  if (!base_) return;
  for (u32 r = 0; r < ranks_; ++r)
    if (mapped_[r]) drop(r);
  driver()->cuMemAddressFree(base_, stride_ * ranks_);
}

int RegionMap::reserve(u32 device, u32 ranks, u64 bytes) {
  const Driver* d = driver();
  if (!d) return EP_EUSAGE;
  device_ = device;
  ranks_ = ranks;
  bytes_ = stride_ = granular(bytes);
  EPC_TRY(d->cuMemAddressReserve(&base_, stride_ * ranks, kGranule, 0, 0));
  return 0;
}

int RegionMap::map(u32 rank, int fd) {
  const Driver* d = driver();
  if (rank >= ranks_) return ep::fail(EP_EINVAL, "rank %u is not below max_ranks %u", rank, ranks_);
  if (mapped_[rank]) return ep::fail(EP_EUSAGE, "rank %u is mapped already; drop it first", rank);
  CUmemGenericAllocationHandle handle;
  EPC_TRY(d->cuMemImportFromShareableHandle(&handle, reinterpret_cast<void*>(static_cast<uintptr_t>(fd)),
                                            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  const int bad = map_at(*d, base_ + rank * stride_, bytes_, handle, device_);
  d->cuMemRelease(handle);  // the mapping keeps the memory
  mapped_[rank] = bad == 0;
  return bad;
}

int RegionMap::drop(u32 rank) {
  if (rank >= ranks_ || !mapped_[rank]) return ep::fail(EP_EINVAL, "rank %u is not mapped", rank);
  EPC_TRY(driver()->cuMemUnmap(base_ + rank * stride_, bytes_));
  mapped_[rank] = false;
  return 0;
}

}  // namespace epc

using namespace epc;

int epc_region_bytes(const ep_geometry* geometry, uint64_t* bytes) {
  GpuLayout layout;
  if (int bad = make_gpu_layout(*geometry, &layout)) return bad;
  *bytes = granular(layout.data_bytes);
  return 0;
}

int epc_region_create(const ep_geometry* geometry, uint32_t device) {
  u64 bytes;
  if (int bad = epc_region_bytes(geometry, &bytes)) return bad;
  const Driver* d = driver();
  if (!d) return EP_EUSAGE;
  EPC_TRY(cudaSetDevice(int(device)));
  EPC_TRY(cudaFree(nullptr));
  size_t free_bytes = 0, total_bytes = 0;
  EPC_TRY(cudaMemGetInfo(&free_bytes, &total_bytes));
  if (bytes > free_bytes)
    return ep::fail(EP_ESHORT, "a region needs %llu bytes and device %u has %llu free; lower max_tokens, max_ranks or slots_per_rank",
                    static_cast<unsigned long long>(bytes), device, static_cast<unsigned long long>(free_bytes));
  const CUmemAllocationProp p = properties(device);
  CUmemGenericAllocationHandle handle;
  EPC_TRY(d->cuMemCreate(&handle, bytes, &p, 0));
  int fd = -1;
  int bad = check(d->cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0), "cuMemExportToShareableHandle");
  CUdeviceptr at = 0;
  if (!bad) bad = check(d->cuMemAddressReserve(&at, bytes, kGranule, 0, 0), "cuMemAddressReserve");
  if (!bad) {
    bad = map_at(*d, at, bytes, handle, device);
    if (!bad) {
      bad = check(cudaMemset(reinterpret_cast<void*>(at), 0, bytes), "cudaMemset");
      if (!bad) bad = check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      d->cuMemUnmap(at, bytes);
    }
    d->cuMemAddressFree(at, bytes);
  }
  d->cuMemRelease(handle);
  if (bad && fd >= 0) close(fd);
  return bad ? bad : fd;
}
