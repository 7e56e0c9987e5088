// What CUDA C++ has built in, for a host compiler. Every source of csrc/cuda is compiled behind this header.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cmath>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include <cuda.h>
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp4.h>
#include <cuda_fp8.h>

#include "fiber.h"

// A block is run by one thread of the host, so what is its own is what a block shares.
#undef __shared__
#define __shared__ thread_local
#ifndef __noinline__
#define __noinline__ __attribute__((noinline))
#endif

#undef __launch_bounds__
#define __launch_bounds__(...)

// Read of the fiber that runs. Objects, not macros: launch configurations have members of these names.
constexpr struct {
  struct {
    operator unsigned() const { return epe::here()->thread.x; }
  } x{};
} threadIdx{};
constexpr struct {
  struct {
    operator unsigned() const { return epe::here()->block->index.x; }
  } x{};
} blockIdx{};
constexpr struct {
  struct {
    operator unsigned() const { return epe::here()->block->dim.x; }
  } x{};
} blockDim{};
constexpr struct {
  struct {
    operator unsigned() const { return epe::here()->block->grid.x; }
  } x{};
} gridDim{};

#define EPE_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(EPE_PLACE) { epe::here()->block->meet(epe::here(), 0, {file, line}); }
inline int __syncthreads_or(int value, EPE_PLACE) {
  epe::here()->block->meet(epe::here(), value != 0, {file, line});
  return int(epe::here()->block->last_any);
}
inline int __syncthreads_and(int value, EPE_PLACE) {
  epe::here()->block->meet(epe::here(), value != 0, {file, line});
  return int(epe::here()->block->last_all);
}

namespace epe {

// All lanes of the warp bring a value; what they brought.
inline const uint64_t* together(unsigned mask, uint64_t value, const char* file, int line) {
  Fiber* f = here();
  if (mask != ~0u) fail("only whole warps are emulated", file, line);
  f->block->meet_warp(f, value, {file, line});
  return f->block->warps[f->warp].values;
}
template <class T>
uint64_t bits_of(T value) {
  static_assert(sizeof(T) <= 8, "a value of a register or two");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  return bits;
}
template <class T>
T value_of(uint64_t bits) {
  T value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace epe

inline void __syncwarp(unsigned mask = ~0u, EPE_PLACE) { epe::together(mask, 0, file, line); }
template <class T>
T __shfl_sync(unsigned mask, T value, int from, int = 32, EPE_PLACE) {
  return epe::value_of<T>(epe::together(mask, epe::bits_of(value), file, line)[from & 31]);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int = 32, EPE_PLACE) {
  const uint32_t lane = epe::here()->lane;
  return epe::value_of<T>(epe::together(mask, epe::bits_of(value), file, line)[lane < by ? lane : lane - by]);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int by, int = 32, EPE_PLACE) {
  const uint32_t lane = epe::here()->lane;
  return epe::value_of<T>(epe::together(mask, epe::bits_of(value), file, line)[(lane ^ unsigned(by)) & 31]);
}
inline unsigned __ballot_sync(unsigned mask, int value, EPE_PLACE) {
  const uint64_t* all = epe::together(mask, value != 0, file, line);
  unsigned bits = 0;
  for (unsigned i = 0; i < 32; ++i) bits |= unsigned(all[i]) << i;
  return bits;
}
inline int __any_sync(unsigned mask, int value, EPE_PLACE) { return __ballot_sync(mask, value, file, line) != 0; }
inline int __all_sync(unsigned mask, int value, EPE_PLACE) { return __ballot_sync(mask, !value, file, line) == 0; }
template <class T>
unsigned __match_any_sync(unsigned mask, T value, EPE_PLACE) {
  const uint64_t* all = epe::together(mask, epe::bits_of(value), file, line);
  unsigned bits = 0;
  for (unsigned i = 0; i < 32; ++i) bits |= unsigned(all[i] == epe::bits_of(value)) << i;
  return bits;
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value, EPE_PLACE) {
  const uint64_t* all = epe::together(mask, value, file, line);
  unsigned bits = 0;
  for (unsigned i = 0; i < 32; ++i) bits |= unsigned(all[i]);
  return bits;
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value, EPE_PLACE) {
  const uint64_t* all = epe::together(mask, value, file, line);
  unsigned sum = 0;
  for (unsigned i = 0; i < 32; ++i) sum += unsigned(all[i]);
  return sum;
}

template <class T, class V>
T atomicAdd(T* p, V value) {
  epe::here()->block->maybe_pause(epe::here());
  return __atomic_fetch_add(p, T(value), __ATOMIC_RELAXED);
}
template <class T, class V>
T atomicExch(T* p, V value) {
  epe::here()->block->maybe_pause(epe::here());
  return __atomic_exchange_n(p, T(value), __ATOMIC_RELAXED);
}
template <class T, class V, class F>
T epe_update(T* p, V value, F better) {
  epe::here()->block->maybe_pause(epe::here());
  T old = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (better(T(value), old) && !__atomic_compare_exchange_n(p, &old, T(value), true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}
template <class T, class V>
T atomicMax(T* p, V value) {
  return epe_update(p, value, [](T a, T b) { return a > b; });
}
template <class T, class V>
T atomicMin(T* p, V value) {
  return epe_update(p, value, [](T a, T b) { return a < b; });
}

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline unsigned __float_as_uint(float v) { return epe::value_of<unsigned>(epe::bits_of(v)); }
inline int __float_as_int(float v) { return epe::value_of<int>(epe::bits_of(v)); }
inline float __uint_as_float(unsigned v) { return epe::value_of<float>(epe::bits_of(v)); }
inline float __int_as_float(int v) { return epe::value_of<float>(epe::bits_of(v)); }
inline unsigned __vcmpeq2(unsigned a, unsigned b) {
  const unsigned differ = a ^ b;
  return (differ & 0xffffu ? 0u : 0xffffu) | (differ >> 16 ? 0u : 0xffff0000u);
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}

namespace epe {

// A kernel that is to run: `body` is what each of its threads does.
cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, void* (*shared)(), size_t shared_bytes, std::function<void()> body);
cudaError_t allow_shared(const void* kernel, int bytes);
cudaError_t failing(const char* call);  // device.h

}  // namespace epe

// Dynamic shared memory, of the sources that have any: `extern __shared__ u8 shared[]`, `offsets` in expand.cu.
namespace epc {
namespace {
#if defined(EPC_DYNAMIC_SHARED)
constexpr size_t kDynamicBytes = 227 * 1024;
alignas(128) thread_local uint8_t shared[kDynamicBytes];
inline void* dynamic_shared() { return shared; }
#elif defined(EPC_DYNAMIC_OFFSETS)
constexpr size_t kDynamicBytes = 64 * 1024;
alignas(128) thread_local uint32_t offsets[kDynamicBytes / 4];
inline void* dynamic_shared() { return offsets; }
#else
constexpr size_t kDynamicBytes = 0;
inline void* dynamic_shared() { return nullptr; }
#endif
}  // namespace
}  // namespace epc

namespace epe {

template <class... Parameters, class... Arguments>
cudaError_t launch_kernel(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments&&... arguments) {
  std::tuple<std::decay_t<Parameters>...> copied(std::forward<Arguments>(arguments)...);
  return launch(*config, reinterpret_cast<const void*>(kernel), &epc::dynamic_shared, epc::kDynamicBytes, [kernel, copied] { std::apply(kernel, copied); });
}

}  // namespace epe

#define cudaLaunchKernelEx epe::launch_kernel
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, Kernel* kernel) {
  *out = {};
  if (const cudaError_t bad = epe::failing("cudaFuncGetAttributes"); bad != cudaSuccess) return bad;
  return kernel ? cudaSuccess : cudaErrorInvalidDeviceFunction;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaErrorInvalidValue;
  return epe::allow_shared(reinterpret_cast<const void*>(kernel), value);
}
