// The functions of the CUDA runtime that csrc/cuda calls, but for those of streams. A pointer means the same on the host
// and on a device.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <map>

#include "builtins.h"
#include "device.h"
#include "driver.h"

namespace {

thread_local cudaError_t last = cudaSuccess;

cudaError_t noted(cudaError_t status) {
  if (status != cudaSuccess) last = status;
  return status;
}

std::mutex& mutex() {
  static auto m = new std::mutex;
  return *m;
}
std::map<const void*, int>& shared_limits() {
  static auto m = new std::map<const void*, int>;
  return *m;
}

cudaError_t allocate(const char* call, void** out, size_t bytes) {
  if (!epe::allowed_in_capture()) return noted(cudaErrorStreamCaptureUnsupported);
  if (const cudaError_t bad = epe::failing(call); bad != cudaSuccess) return noted(bad);
  *out = aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (!*out) return noted(cudaErrorMemoryAllocation);
  memset(*out, 0xa5, bytes);
  return cudaSuccess;
}

constexpr int kUsualShared = 48 * 1024, kMostShared = 227 * 1024;

}  // namespace

namespace epe {

cudaError_t allow_shared(const void* kernel, int bytes) {
  if (bytes < 0 || bytes > kMostShared) return noted(cudaErrorInvalidValue);
  std::lock_guard<std::mutex> guard(mutex());
  shared_limits()[kernel] = bytes;
  return cudaSuccess;
}

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, void* (*shared)(), size_t shared_bytes, std::function<void()> body) {
  const size_t bytes = config.dynamicSmemBytes;
  int limit = kUsualShared;
  {
    std::lock_guard<std::mutex> guard(mutex());
    auto at = shared_limits().find(kernel);
    if (at != shared_limits().end() && at->second > limit) limit = at->second;
  }
  if (!config.gridDim.x || !config.blockDim.x || config.blockDim.x > kMostThreads) return noted(cudaErrorInvalidConfiguration);
  if (bytes > size_t(limit) || bytes > shared_bytes) return noted(cudaErrorInvalidValue);
  const auto stream = stream_of(config.stream);
  if (!stream || stream->device != current_device()) return noted(cudaErrorInvalidResourceHandle);
  auto k = std::make_shared<Kernel>(Kernel{config.gridDim.x, config.blockDim.x, bytes, shared, std::move(body)});
  return noted(stream->push([k, device = stream->device] { Device::of(device).run(*k); }));
}

}  // namespace epe

extern "C" {

cudaError_t CUDARTAPI cudaGetLastError() {
  const cudaError_t was = last;
  last = cudaSuccess;
  return was;
}
const char* CUDARTAPI cudaGetErrorString(cudaError_t status) {
  switch (status) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorNoKernelImageForDevice: return "no kernel image is available for execution on the device";
    case cudaErrorOperatingSystem: return "OS call failed or operation not supported on this OS";
    case cudaErrorECCUncorrectable: return "uncorrectable ECC error encountered";
    case cudaErrorNvlinkUncorrectable: return "uncorrectable NVLink error detected during the execution";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    default: return "another error of the emulated GPU";
  }
}

cudaError_t CUDARTAPI cudaGetDeviceCount(int* out) {
  if (const cudaError_t bad = epe::failing("cudaGetDeviceCount"); bad != cudaSuccess) return noted(bad);
  *out = __builtin_cpu_supports("avx") ? int(epe::settings().devices) : 0;  // TaggedWord must be read and written whole
  return *out ? cudaSuccess : noted(cudaErrorNoDevice);
}
cudaError_t CUDARTAPI cudaDeviceGetAttribute(int* out, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *out = int(epe::settings().sms); return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: *out = 9; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *out = 0; return cudaSuccess;
    default: return noted(cudaErrorInvalidValue);
  }
}
cudaError_t CUDARTAPI cudaDeviceCanAccessPeer(int* out, int, int) {
  *out = epe::failing("cudaDeviceCanAccessPeer") == cudaSuccess;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaMemGetInfo(size_t* free, size_t* total) {
  if (const cudaError_t bad = epe::failing("cudaMemGetInfo"); bad != cudaSuccess) return noted(bad);
  *free = *total = size_t(epe::settings().free_bytes);
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaMalloc(void** out, size_t bytes) { return allocate("cudaMalloc", out, bytes); }
cudaError_t CUDARTAPI cudaFree(void* p) {
  if (!epe::allowed_in_capture()) return noted(cudaErrorStreamCaptureUnsupported);
  if (p) epe::wait_for_device(epe::current_device());
  free(p);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaHostAlloc(void** out, size_t bytes, unsigned) {
  const cudaError_t bad = allocate("cudaHostAlloc", out, bytes);
  if (bad == cudaSuccess) epe::note_pinned(*out, bytes);
  return bad;
}
cudaError_t CUDARTAPI cudaFreeHost(void* p) {
  if (!epe::allowed_in_capture()) return noted(cudaErrorStreamCaptureUnsupported);
  epe::forget_pinned(p);  // before it can be another's
  return cudaFree(p);
}
cudaError_t CUDARTAPI cudaHostRegister(void*, size_t, unsigned) { return noted(epe::failing("cudaHostRegister")); }
cudaError_t CUDARTAPI cudaHostUnregister(void*) { return cudaSuccess; }
cudaError_t CUDARTAPI cudaHostGetDevicePointer(void** out, void* p, unsigned) {
  *out = p;
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaMemset(void* p, int value, size_t bytes) {
  if (const cudaError_t bad = epe::failing("cudaMemset"); bad != cudaSuccess) return noted(bad);
  if (!epe::allowed_in_capture()) return noted(cudaErrorStreamCaptureUnsupported);
  memset(p, value, bytes);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  if (!epe::allowed_in_capture()) return noted(cudaErrorStreamCaptureUnsupported);
  memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
  if (const cudaError_t bad = epe::failing("cudaMemsetAsync"); bad != cudaSuccess) return noted(bad);
  return noted(epe::push(stream, [=] { memset(p, value, bytes); }));
}
// What lies in ordinary host memory is read before the call returns, as the real one reads what is not pinned.
cudaError_t CUDARTAPI cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  if (kind != cudaMemcpyHostToDevice) return noted(epe::push(stream, [=] { memcpy(to, from, bytes); }));
  if (epe::is_pinned(from, bytes))
    return noted(epe::push(stream, [=] {
      epe::pass_gate();
      memcpy(to, from, bytes);
    }));
  const auto begin = static_cast<const uint8_t*>(from);
  return noted(epe::push(stream, [to, copied = std::vector<uint8_t>(begin, begin + bytes)] { memcpy(to, copied.data(), copied.size()); }));
}

// Has C linkage and another signature in CUDA's headers from one version to the next; csrc/cuda asks by name.
cudaError_t CUDARTAPI cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned, unsigned long long,
                                                       cudaDriverEntryPointQueryResult* result) {
  *entry = nullptr;
  if (const cudaError_t bad = epe::failing("cudaGetDriverEntryPointByVersion"); bad != cudaSuccess) return noted(bad);
  *entry = epe::driver_entry(name);
  if (result) *result = *entry ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // extern "C"
