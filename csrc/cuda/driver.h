// Entry points of the CUDA driver, looked up at run time: the library loads on hosts without one and then says so.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

namespace epc {

#define EPC_DRIVER_CALLS(X)                                                                        \
  X(cuMemCreate) X(cuMemRelease) X(cuMemExportToShareableHandle) X(cuMemImportFromShareableHandle) \
  X(cuMemAddressReserve) X(cuMemAddressFree) X(cuMemMap) X(cuMemUnmap) X(cuMemSetAccess)           \
  X(cuMemGetAllocationPropertiesFromHandle)

struct Driver {
#define EPC_MEMBER(name) decltype(&::name) name = nullptr;
  EPC_DRIVER_CALLS(EPC_MEMBER)
#undef EPC_MEMBER
};

// 0 if the driver can be used: looked for once.
int need_driver();
const Driver& driver();  // then

}  // namespace epc
