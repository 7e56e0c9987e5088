#include "driver.h"

#include <type_traits>

#include "failure.h"

namespace epc {

namespace {

struct Found {
  Driver calls;
  const char* missing = nullptr;  // the first call that is not there
  cudaError_t why = cudaSuccess;  // success: this driver has none of that name
};

Found look() {
  Found found;
  auto find = [&](const char* name, auto& into) {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result{};
    found.why = cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &result);
    into = reinterpret_cast<std::remove_reference_t<decltype(into)>>(entry);
    if (found.why == cudaSuccess && result == cudaDriverEntryPointSuccess && entry) return true;
    found.missing = name;
    cudaGetLastError();
    return false;
  };
#define EPC_FIND(name) &&find(#name, found.calls.name)
  (void)(true EPC_DRIVER_CALLS(EPC_FIND));
#undef EPC_FIND
  return found;
}

const Found& found() {
  static const Found once = look();
  return once;
}

}  // namespace

int need_driver() {
  const Found& f = found();
  if (!f.missing) return 0;
  if (f.why != cudaSuccess) return check(f.why, Words("the CUDA driver cannot be used: %s", f.missing));
  return ep::fail(EP_EUSAGE, "the CUDA driver cannot be used: it has no %s; install a driver for CUDA 13.0 or newer", f.missing);
}

const Driver& driver() { return found().calls; }

}  // namespace epc
