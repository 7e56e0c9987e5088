#include "driver.h"

#include <cerrno>
#include <mutex>

namespace epc {

const Driver* driver() {
  static Driver loaded;
  static bool ok = false;
  static std::once_flag once;
  static char missing[128];
  std::call_once(once, [] {
    auto find = [](const char* name, auto& into) {
      void* entry = nullptr;
      cudaDriverEntryPointQueryResult found;
      const cudaError_t status = cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found);
      into = reinterpret_cast<std::remove_reference_t<decltype(into)>>(entry);
      if (status == cudaSuccess && found == cudaDriverEntryPointSuccess && entry) return true;
      snprintf(missing, sizeof missing, "%s (%s)", name, status == cudaSuccess ? "not in this driver" : cudaGetErrorString(status));
      cudaGetLastError();
      return false;
    };
#define EPC_FIND(name) &&find(#name, loaded.name)
    ok = true EPC_DRIVER_CALLS(EPC_FIND);
#undef EPC_FIND
  });
  if (ok) return &loaded;
  ep::fail(EP_EUSAGE, "the CUDA driver cannot be used: %s; install a driver for CUDA 13.0 or newer", missing);
  return nullptr;
}

// After these the context is over, and every call fails, whoever makes it.
bool broken(cudaError_t status) {
  return status == cudaErrorECCUncorrectable || (status >= cudaErrorIllegalAddress && status <= cudaErrorLaunchTimeout) ||
         (status >= cudaErrorAssert && status <= cudaErrorLaunchFailure) || status == cudaErrorUnknown;
}

int check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return 0;
  cudaGetLastError();
  if (broken(status))
    return ep::fail(-EIO, "%s found the device in an error that a kernel before it left behind: %s", what, cudaGetErrorString(status));
  return ep::fail(EP_EUSAGE, "%s: %s", what, cudaGetErrorString(status));
}

int check(CUresult status, const char* what) {
  if (status == CUDA_SUCCESS) return 0;
  const char* text = "unknown error";
  if (const Driver* d = driver()) d->cuGetErrorString(status, &text);
  return ep::fail(EP_EUSAGE, "%s: %s", what, text);
}

}  // namespace epc
