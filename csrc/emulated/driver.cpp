// Device memory that processes share: an allocation is a memfd, whose name tells the device.
#include "driver.h"

#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "device.h"
#include "fiber.h"

namespace {

constexpr size_t kGranule = 2u << 20;
constexpr char kName[] = "/memfd:emulated-device-";

CUmemGenericAllocationHandle handle_of(int fd) { return static_cast<CUmemGenericAllocationHandle>(fd) + 1; }
int fd_of(CUmemGenericAllocationHandle handle) { return int(handle) - 1; }

bool device_of(int fd, int* device) {
  char path[64], name[128];
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  const ssize_t n = readlink(path, name, sizeof name - 1);
  if (n < 0) return false;
  name[n] = 0;
  return sscanf(name, "/memfd:emulated-device-%d", device) == 1;
}

CUresult failing(const char* call) { return CUresult(epe::failing(call)); }

CUresult create(CUmemGenericAllocationHandle* out, size_t bytes, const CUmemAllocationProp* p, unsigned long long) {
  if (const CUresult bad = failing("cuMemCreate")) return bad;
  if (!bytes || bytes % kGranule) return CUDA_ERROR_INVALID_VALUE;
  char name[64];
  snprintf(name, sizeof name, "%s%d", kName + strlen("/memfd:"), p->location.id);
  const int fd = memfd_create(name, MFD_CLOEXEC);
  if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  if (ftruncate(fd, off_t(bytes))) {
    close(fd);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *out = handle_of(fd);
  return CUDA_SUCCESS;
}
CUresult release(CUmemGenericAllocationHandle handle) { return close(fd_of(handle)) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }

CUresult duplicate(int from, int* to) {
  *to = fcntl(from, F_DUPFD_CLOEXEC, 0);
  return *to < 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult export_handle(void* out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType, unsigned long long) {
  if (const CUresult bad = failing("cuMemExportToShareableHandle")) return bad;
  return duplicate(fd_of(handle), static_cast<int*>(out));
}
CUresult import_handle(CUmemGenericAllocationHandle* out, void* os_handle, CUmemAllocationHandleType) {
  if (const CUresult bad = failing("cuMemImportFromShareableHandle")) return bad;
  int device, fd;
  if (!device_of(int(reinterpret_cast<uintptr_t>(os_handle)), &device)) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult bad = duplicate(int(reinterpret_cast<uintptr_t>(os_handle)), &fd)) return bad;
  *out = handle_of(fd);
  return CUDA_SUCCESS;
}

CUresult reserve(CUdeviceptr* out, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  if (const CUresult bad = failing("cuMemAddressReserve")) return bad;
  void* p = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = reinterpret_cast<CUdeviceptr>(p);
  epe::reserve_regions(*out, bytes);
  return CUDA_SUCCESS;
}
CUresult free_address(CUdeviceptr at, size_t bytes) {
  epe::forget_regions(at);
  return munmap(reinterpret_cast<void*>(at), bytes) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult map(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long) {
  if (const CUresult bad = failing("cuMemMap")) return bad;
  struct stat s;
  if (fstat(fd_of(handle), &s) || offset + bytes > size_t(s.st_size)) return CUDA_ERROR_INVALID_VALUE;
  void* p = mmap(reinterpret_cast<void*>(at), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, fd_of(handle), off_t(offset));
  if (p == MAP_FAILED) return CUDA_ERROR_INVALID_VALUE;
  epe::map_region(at, bytes);
  return CUDA_SUCCESS;
}
CUresult unmap(CUdeviceptr at, size_t bytes) {
  void* p = mmap(reinterpret_cast<void*>(at), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return p == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult set_access(CUdeviceptr at, size_t bytes, const CUmemAccessDesc*, size_t) {
  if (const CUresult bad = failing("cuMemSetAccess")) return bad;
  return mprotect(reinterpret_cast<void*>(at), bytes, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult properties(CUmemAllocationProp* out, CUmemGenericAllocationHandle handle) {
  *out = {};
  out->type = CU_MEM_ALLOCATION_TYPE_PINNED;
  out->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  return device_of(fd_of(handle), &out->location.id) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
template <class F>
void* as(F* ours, F* theirs) {  // one type: what is called through the table fits
  (void)theirs;
  return reinterpret_cast<void*>(ours);
}
#define EPE_ENTRY(theirs, ours) \
  { #theirs, as(&ours, decltype(&theirs)(nullptr)) }
const struct {
  const char* name;
  void* entry;
} kEntries[] = {
    EPE_ENTRY(cuMemCreate, create),
    EPE_ENTRY(cuMemRelease, release),
    EPE_ENTRY(cuMemExportToShareableHandle, export_handle),
    EPE_ENTRY(cuMemImportFromShareableHandle, import_handle),
    EPE_ENTRY(cuMemAddressReserve, reserve),
    EPE_ENTRY(cuMemAddressFree, free_address),
    EPE_ENTRY(cuMemMap, map),
    EPE_ENTRY(cuMemUnmap, unmap),
    EPE_ENTRY(cuMemSetAccess, set_access),
    EPE_ENTRY(cuMemGetAllocationPropertiesFromHandle, properties),
};

}  // namespace

void* epe::driver_entry(const char* name) {
  for (const auto& e : kEntries)
    if (!strcmp(e.name, name)) return e.entry;
  return nullptr;
}
