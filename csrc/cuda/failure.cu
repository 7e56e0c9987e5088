#include "failure.h"

#include <sys/resource.h>

#include <cctype>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "../common/cgroup.h"
#include "../common/memory.h"

namespace epc {

namespace {

// What to do where the call alone does not tell.
const char* usual_remedy(cudaError_t status) {
  switch (int(status)) {
    case cudaErrorMemoryAllocation: return "leave the GPU and the host to fewer processes, or make the group smaller";
    case cudaErrorInitializationError: return "look for an Xid of a GPU in the kernel's log; and a process forked from one that has used CUDA cannot use it";
    case cudaErrorInvalidDevice:
    case cudaErrorNoDevice: return "CUDA_VISIBLE_DEVICES, and a container's devices, must include the GPU";
    case cudaErrorInsufficientDriver:
    case cudaErrorCallRequiresNewerDriver:
    case cudaErrorCompatNotSupportedOnDevice: return "install a driver for CUDA 13.0 or newer";
    case cudaErrorStubLibrary: return "the loader found CUDA's stub of libcuda.so; take its folder out of LD_LIBRARY_PATH";
    case cudaErrorSystemDriverMismatch: return "the kernel's driver and its library are of different versions; restart the host after an update";
    case cudaErrorSystemNotReady: return "on a host with NVSwitch start nvidia-fabricmanager, of the driver's version";
    case cudaErrorDevicesUnavailable: return "another process has the GPU for itself; set its compute mode to DEFAULT (nvidia-smi -c 0), or use MPS";
    case cudaErrorMpsConnectionFailed:
    case cudaErrorMpsServerNotReady:
    case cudaErrorMpsRpcFailure: return "look after the MPS daemon (nvidia-cuda-mps-control), or run without one";
    case cudaErrorMpsMaxClientsReached:
    case cudaErrorMpsMaxConnectionsReached: return "MPS has no place for another process; end some";
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion: return "build the CUDA library for this GPU (-DELASTICEP_CUDA_ARCHS=...)";
    case cudaErrorPeerAccessUnsupported: return "take GPUs with peer access to each other (nvidia-smi topo -p2p rw)";
    case cudaErrorOperatingSystem: return "look at the process's limits (ulimit -n, -l) and at the kernel's log";
    case cudaErrorNotSupported: return "this GPU, its driver or its virtualisation cannot do this";
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureWrongThread: return "it was called while a graph was captured";
    default: return nullptr;
  }
}

}  // namespace

// After these the context is over, and every call fails, whoever makes it.
bool broken(cudaError_t status) {
  switch (int(status)) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContained:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorTensorMemoryLeak:
    case cudaErrorMpsClientTerminated:
    case cudaErrorUnknown: return true;
    default: return false;
  }
}

Words::Words(const char* format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
}

int device_failed(int device, cudaError_t status, const char* what) {
  return ep::fail(EP_EDEVICE,
                  "%s: device %d failed: %s; this process has lost it. If the next one does, too, look for an Xid in the kernel's log, and reset the GPU "
                  "(nvidia-smi --gpu-reset) or take it out of daemon.devices",
                  what, device, cudaGetErrorString(status));
}

int check(cudaError_t status, const char* what, const char* remedy) {
  if (status == cudaSuccess) return 0;
  cudaGetLastError();
  const char* why = cudaGetErrorString(status);
  if (broken(status)) {
    int device = 0;
    cudaGetDevice(&device);
    return device_failed(device, status, what);
  }
  if (!remedy) remedy = usual_remedy(status);
  return ep::fail(status == cudaErrorMemoryAllocation ? EP_ESHORT : EP_EUSAGE, "%s: %s%s%s", what, why, remedy ? "; " : "", remedy ? remedy : "");
}

int check_call(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return 0;
  const char* end = strchr(call, '(');
  if (!end) end = call + strlen(call);
  const char* begin = end;
  while (begin > call && (isalnum(begin[-1]) || begin[-1] == '_')) --begin;
  return check(status, Words("%.*s", int(end - begin), begin));
}

int use_device(ep::u32 device) {
  const cudaError_t status = cudaSetDevice(int(device));
  if (broken(status)) return device_failed(int(device), status, "choosing it");
  if (status != cudaErrorInvalidDevice) return check(status, Words("device %u", device));
  int count = 0;
  cudaGetDeviceCount(&count);
  return check(status, Words("device %u, where this process sees %d", device, count));
}

int short_on_device(ep::u32 device, ep::u64 bytes, const char* what) {
  size_t free_bytes = 0, total_bytes = 0;
  cudaMemGetInfo(&free_bytes, &total_bytes);
  cudaGetLastError();
  return ep::fail(EP_ESHORT,
                  "%s: %llu bytes are needed and device %u has %llu free; lower slots_per_rank, max_tokens or max_ranks, or leave the GPU to fewer "
                  "processes",
                  what, wide(bytes), device, wide(free_bytes));
}

int short_on_host(ep::u64 bytes, const char* what) {
  cudaGetLastError();
  const ep::u64 available = ep::available_bytes(), room = ep::cgroup_room_bytes();
  const bool bounded = room < available;
  char lock[64] = "";
  rlimit limit{};
  if (!getrlimit(RLIMIT_MEMLOCK, &limit) && limit.rlim_cur != RLIM_INFINITY)
    snprintf(lock, sizeof lock, ", of which a process may lock %llu", wide(limit.rlim_cur));
  return ep::fail(EP_ESHORT, "%s: %llu bytes of pinned host memory are needed and %llu are available%s%s; leave the host to fewer processes%s%s", what, wide(bytes),
                  wide(bounded ? room : available), bounded ? " within the limit of its cgroup" : "", lock, bounded ? ", raise the cgroup's limit" : "",
                  lock[0] ? ", or raise that of locked memory (ulimit -l, LimitMEMLOCK)" : "");
}

}  // namespace epc
