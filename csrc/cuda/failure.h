// What is said when a call of CUDA fails: what it was for, which limit it met, and what to do about it.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include "../common/errors.h"
#include "../common/layout.h"

namespace epc {

// Whether this error ends the context.
bool broken(cudaError_t status);

// 0, or a code and a sentence that begins with `what`, the call or what it was for, and ends with `remedy`, or with the usual one
// for this error if that is null. EP_EDEVICE: the context is over; EP_ESHORT: memory ran out; else EP_EUSAGE.
int check(cudaError_t status, const char* what, const char* remedy = nullptr);
inline int check(CUresult status, const char* what, const char* remedy = nullptr) { return check(cudaError_t(status), what, remedy); }
static_assert(int(CUDA_ERROR_OUT_OF_MEMORY) == int(cudaErrorMemoryAllocation) && int(CUDA_ERROR_INVALID_DEVICE) == int(cudaErrorInvalidDevice) &&
                  int(CUDA_ERROR_ILLEGAL_ADDRESS) == int(cudaErrorIllegalAddress) && int(CUDA_ERROR_NOT_SUPPORTED) == int(cudaErrorNotSupported),
              "the driver and the runtime number errors alike");

// For EPC_TRY: `call` is its source, of which the function's name is told.
int check_call(cudaError_t status, const char* call);
inline int check_call(CUresult status, const char* call) { return check_call(cudaError_t(status), call); }

// EP_EDEVICE for a device of which `broken` holds.
int device_failed(int device, cudaError_t status, const char* what);

// Makes a device the calling thread's; EP_EUSAGE says how many this process sees.
int use_device(ep::u32 device);

// EP_ESHORT: for `what`, like "the tables of rank 3", there are no `bytes` on a device, or in host memory that a GPU can reach.
int short_on_device(ep::u32 device, ep::u64 bytes, const char* what);
int short_on_host(ep::u64 bytes, const char* what);

// For %llu.
inline unsigned long long wide(ep::u64 v) { return v; }

// A piece of a sentence.
struct Words {
  char text[128];
  explicit Words(const char* format, ...) __attribute__((format(printf, 2, 3)));
  operator const char*() const { return text; }
};

}  // namespace epc

#define EPC_TRY(call)                                          \
  do {                                                         \
    if (int bad_ = epc::check_call(call, #call)) return bad_; \
  } while (0)
