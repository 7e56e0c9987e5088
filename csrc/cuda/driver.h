// Entry points of the CUDA driver, looked up at run time: the library loads on hosts without one and then says so.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include "../common/errors.h"

namespace epc {

#define EPC_DRIVER_CALLS(X)                                                                                     \
  X(cuMemCreate) X(cuMemRelease) X(cuMemExportToShareableHandle) X(cuMemImportFromShareableHandle)              \
  X(cuMemAddressReserve) X(cuMemAddressFree) X(cuMemMap) X(cuMemUnmap) X(cuMemSetAccess)                        \
  X(cuMemGetAllocationGranularity) X(cuMemGetAllocationPropertiesFromHandle) X(cuGetErrorString)

struct Driver {
#define EPC_MEMBER(name) decltype(&::name) name = nullptr;
  EPC_DRIVER_CALLS(EPC_MEMBER)
#undef EPC_MEMBER
};

// The loaded driver, or nullptr with the reason in ep_last_error().
const Driver* driver();

// Whether this error ends the context.
bool broken(cudaError_t status);
// 0, or EP_EUSAGE with a sentence that names the call; -EIO when the context is over.
int check(cudaError_t status, const char* what);
int check(CUresult status, const char* what);

}  // namespace epc

#define EPC_TRY(call)                          \
  do {                                         \
    if (int bad_ = epc::check(call, #call)) return bad_; \
  } while (0)
