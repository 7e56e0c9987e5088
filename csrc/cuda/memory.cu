#include "memory.h"

#include <unistd.h>

namespace epc {

namespace {
constexpr u64 kGranule = 2u << 20;
constexpr char kMustBeSeen[] = "CUDA_VISIBLE_DEVICES, and a container's devices, must include the GPU that holds it";

CUmemAllocationProp properties(u32 device) {
  CUmemAllocationProp p{};
  p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  p.location.id = int(device);
  p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return p;
}

int import(const Driver& d, int fd, const char* what, CUmemGenericAllocationHandle* out) {
  return check(d.cuMemImportFromShareableHandle(out, reinterpret_cast<void*>(static_cast<uintptr_t>(fd)), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
               Words("opening %s", what), kMustBeSeen);
}

// Why a device may not use memory: mostly because it cannot reach the one that holds it.
int no_access(const Driver& d, CUresult status, CUmemGenericAllocationHandle handle, u32 device, const char* what) {
  CUmemAllocationProp p{};
  int can = 1;
  if (d.cuMemGetAllocationPropertiesFromHandle(&p, handle) == CUDA_SUCCESS && p.location.id != int(device) &&
      cudaDeviceCanAccessPeer(&can, int(device), p.location.id) == cudaSuccess && !can)
    return ep::fail(EP_EUSAGE,
                    "%s is on device %d, which device %u cannot access; the GPUs of a group's ranks on one host need peer access to each other "
                    "(nvidia-smi topo -p2p rw): let daemon.devices name such",
                    what, p.location.id, device);
  return check(status, Words("access of device %u to %s", device, what));
}

int map_at(const Driver& d, CUdeviceptr at, u64 bytes, CUmemGenericAllocationHandle handle, u32 device, const char* what) {
  if (int bad = check(d.cuMemMap(at, bytes, 0, handle, 0), Words("mapping %s", what))) return bad;
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = int(device);
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  const CUresult status = d.cuMemSetAccess(at, bytes, &access, 1);
  if (status == CUDA_SUCCESS) return 0;
  d.cuMemUnmap(at, bytes);
  return no_access(d, status, handle, device, what);
}

int reserve_addresses(const Driver& d, u64 bytes, const char* what, CUdeviceptr* out) {
  const CUresult status = d.cuMemAddressReserve(out, bytes, kGranule, 0, 0);
  if (status != CUDA_ERROR_OUT_OF_MEMORY) return check(status, Words("address space for %s", what));
  return ep::fail(EP_ESHORT,
                  "%s: %llu bytes of address space are needed, more than this process has left; raise its limit (ulimit -v), or lower max_tokens or "
                  "max_ranks",
                  what, wide(bytes));
}
}  // namespace

u64 granular(u64 bytes) { return (bytes + kGranule - 1) / kGranule * kGranule; }

int region_device(int fd, u32* device) {
  if (int bad = need_driver()) return bad;
  const Driver& d = driver();
  int count = 0;
  EPC_TRY(cudaGetDeviceCount(&count));
  CUmemGenericAllocationHandle handle;
  if (int bad = import(d, fd, "the rank's memory", &handle)) return bad;
  CUmemAllocationProp p{};
  const int bad = check(d.cuMemGetAllocationPropertiesFromHandle(&p, handle), "asking for the device of the rank's memory");
  d.cuMemRelease(handle);
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
  return made == cudaErrorMemoryAllocation ? short_on_device(device, bytes, what) : check(made, what);
}

int allocate_pinned(u64 bytes, u64 all, const char* what, void** out) {
  const cudaError_t made = cudaHostAlloc(out, bytes, cudaHostAllocMapped);
  return made == cudaErrorMemoryAllocation ? short_on_host(all, what) : check(made, Words("pinned host memory for %s", what));
}

int pin(void* memory, u64 bytes, const char* what) {
  const cudaError_t made = cudaHostRegister(memory, bytes, cudaHostRegisterMapped);
  return made == cudaErrorMemoryAllocation ? short_on_host(bytes, what) : check(made, Words("pinning %s", what));
}

RegionMap::~RegionMap() {
  if (!base_) return;
  for (u32 r = 0; r < ranks_; ++r)
    if (mapped_[r]) drop(r);
  driver().cuMemAddressFree(base_, stride_ * ranks_);
}

int RegionMap::reserve(u32 device, u32 ranks, u64 bytes) {
  if (int bad = need_driver()) return bad;
  const Driver& d = driver();
  device_ = device;
  ranks_ = ranks;
  bytes_ = stride_ = granular(bytes);
  return reserve_addresses(d, stride_ * ranks, Words("the regions of %u ranks", ranks), &base_);
}

int RegionMap::map(u32 rank, int fd) {
  const Driver& d = driver();
  if (rank >= ranks_) return ep::fail(EP_EINVAL, "rank %u is not below max_ranks %u", rank, ranks_);
  if (mapped_[rank]) return ep::fail(EP_EUSAGE, "rank %u is mapped already; drop it first", rank);
  CUmemGenericAllocationHandle handle;
  const Words what("the memory of rank %u", rank);
  if (int bad = import(d, fd, what, &handle)) return bad;
  const int bad = map_at(d, base_ + rank * stride_, bytes_, handle, device_, what);
  d.cuMemRelease(handle);  // the mapping keeps the memory
  mapped_[rank] = bad == 0;
  return bad;
}

int RegionMap::drop(u32 rank) {
  if (rank >= ranks_ || !mapped_[rank]) return ep::fail(EP_EINVAL, "rank %u is not mapped", rank);
  if (int bad = check(driver().cuMemUnmap(base_ + rank * stride_, bytes_), Words("unmapping the memory of rank %u", rank))) return bad;
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
  if (int bad = use_device(device)) return bad;
  if (int bad = need_driver()) return bad;
  const Driver& d = driver();
  EPC_TRY(cudaFree(nullptr));  // there is a context now, of which cudaMemGetInfo speaks
  size_t free_bytes = 0, total_bytes = 0;
  EPC_TRY(cudaMemGetInfo(&free_bytes, &total_bytes));
  constexpr char kWhat[] = "a rank's rows and outputs";
  const CUmemAllocationProp p = properties(device);
  CUmemGenericAllocationHandle handle;
  const CUresult made = bytes > free_bytes ? CUDA_ERROR_OUT_OF_MEMORY : d.cuMemCreate(&handle, bytes, &p, 0);
  if (made == CUDA_ERROR_OUT_OF_MEMORY) return short_on_device(device, bytes, kWhat);
  if (int bad = check(made, Words("memory of device %u", device))) return bad;
  int fd = -1;
  int bad = check(d.cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0), "a descriptor of GPU memory");
  CUdeviceptr at = 0;
  if (!bad) bad = reserve_addresses(d, bytes, kWhat, &at);
  if (!bad) {
    bad = map_at(d, at, bytes, handle, device, kWhat);
    if (!bad) {
      bad = check(cudaMemset(reinterpret_cast<void*>(at), 0, bytes), "clearing GPU memory");
      if (!bad) bad = check(cudaDeviceSynchronize(), "clearing GPU memory");
      d.cuMemUnmap(at, bytes);
    }
    d.cuMemAddressFree(at, bytes);
  }
  d.cuMemRelease(handle);
  if (bad && fd >= 0) close(fd);
  return bad ? bad : fd;
}
