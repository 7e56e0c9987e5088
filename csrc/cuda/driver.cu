#include "driver.h"

#include <cstdio>
#include <mutex>
#include <type_traits>

#include "../common/errors.h"

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

}  // namespace epc
