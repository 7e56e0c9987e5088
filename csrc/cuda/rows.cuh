// Sums of rows in fp32 and their storage in an output dtype.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "ptx.cuh"

namespace epc {

__device__ __forceinline__ float2 widen(__half2 v) { return __half22float2(v); }
__device__ __forceinline__ float2 widen(__nv_bfloat162 v) { return __bfloat1622float2(v); }

// 16 bytes of a row as floats. kElements: how many.
struct Fp32 {
  static constexpr u32 kElements = 4;
  static constexpr bool kScaled = false;
  static __device__ __forceinline__ void add(const int4& raw, float w, float* acc) {
    acc[0] = fmaf(__int_as_float(raw.x), w, acc[0]);
    acc[1] = fmaf(__int_as_float(raw.y), w, acc[1]);
    acc[2] = fmaf(__int_as_float(raw.z), w, acc[2]);
    acc[3] = fmaf(__int_as_float(raw.w), w, acc[3]);
  }
};
template <class T2>
struct Pairs {
  static constexpr u32 kElements = 8;
  static constexpr bool kScaled = false;
  static __device__ __forceinline__ void add(const int4& raw, float w, float* acc) {
    const T2* pair = reinterpret_cast<const T2*>(&raw);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 f = widen(pair[j]);
      acc[2 * j] = fmaf(f.x, w, acc[2 * j]);
      acc[2 * j + 1] = fmaf(f.y, w, acc[2 * j + 1]);
    }
  }
};
using Fp16 = Pairs<__half2>;
using Bf16 = Pairs<__nv_bfloat162>;
// e4m3 with an fp32 scale per 128 elements behind the row; `w` holds weight and `s` the scale.
struct Fp8 {
  static constexpr u32 kElements = 16;
  static constexpr bool kScaled = true;
  static __device__ __forceinline__ void add(const int4& raw, float w, float s, float* acc) {
    const __nv_fp8x2_storage_t* pair = reinterpret_cast<const __nv_fp8x2_storage_t*>(&raw);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 f = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair[j], __NV_E4M3)));
      acc[2 * j] = fmaf(f.x * s, w, acc[2 * j]);
      acc[2 * j + 1] = fmaf(f.y * s, w, acc[2 * j + 1]);
    }
  }
};

template <u32 N>
__device__ __forceinline__ void store_sums(u8* out_row, u32 element, const float* acc, u32 dtype) {
  static_assert(N % 4 == 0, "four floats are stored at once");
  if (dtype == EP_FP32) {
#pragma unroll
    for (u32 j = 0; j < N; j += 4)
      store_stream(out_row + (element + j) * 4, make_int4(__float_as_int(acc[j]), __float_as_int(acc[j + 1]),
                                                          __float_as_int(acc[j + 2]), __float_as_int(acc[j + 3])));
    return;
  }
  u32 packed[N / 2];
#pragma unroll
  for (u32 j = 0; j < N / 2; ++j) {
    if (dtype == EP_BF16) {
      const __nv_bfloat162 v = __floats2bfloat162_rn(acc[2 * j], acc[2 * j + 1]);
      packed[j] = *reinterpret_cast<const u32*>(&v);
    } else {
      const __half2 v = __floats2half2_rn(acc[2 * j], acc[2 * j + 1]);
      packed[j] = *reinterpret_cast<const u32*>(&v);
    }
  }
  if constexpr (N % 8 == 0) {
#pragma unroll
    for (u32 j = 0; j < N / 2; j += 4)
      store_stream(out_row + (element + 2 * j) * 2, make_int4(int(packed[j]), int(packed[j + 1]), int(packed[j + 2]), int(packed[j + 3])));
  } else {
#pragma unroll
    for (u32 j = 0; j < N / 2; j += 2) *reinterpret_cast<uint2*>(out_row + (element + 2 * j) * 2) = make_uint2(packed[j], packed[j + 1]);
  }
}

}  // namespace epc
