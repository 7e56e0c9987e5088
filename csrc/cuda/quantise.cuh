// Rows quantised in registers: a lane holds 16 elements, and the lanes of a block share a scale.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"  // in the header itself
#include <cuda_fp4.h>
#pragma GCC diagnostic pop
#include <cuda_fp8.h>

#include "rows.cuh"

namespace epc {

// 16 elements as they lie in memory.
template <class T>
struct Raw16 {
  int4 part[sizeof(T)];

  __device__ __forceinline__ void load(const T* p) {
#pragma unroll
    for (u32 j = 0; j < sizeof(T); ++j) part[j] = load_stream(reinterpret_cast<const int4*>(p) + j);
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (u32 j = 0; j < sizeof(T); ++j) part[j] = make_int4(0, 0, 0, 0);
  }
};

template <class T2, class T>
__device__ __forceinline__ void widen_pairs(const Raw16<T>& raw, float (&v)[16]) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const T2* pair = reinterpret_cast<const T2*>(&raw.part[j]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 f = widen(pair[i]);
      v[8 * j + 2 * i] = f.x, v[8 * j + 2 * i + 1] = f.y;
    }
  }
}
__device__ __forceinline__ void widen16(const Raw16<__half>& raw, float (&v)[16]) { widen_pairs<__half2>(raw, v); }
__device__ __forceinline__ void widen16(const Raw16<__nv_bfloat16>& raw, float (&v)[16]) { widen_pairs<__nv_bfloat162>(raw, v); }
__device__ __forceinline__ void widen16(const Raw16<float>& raw, float (&v)[16]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    v[4 * j] = __int_as_float(raw.part[j].x), v[4 * j + 1] = __int_as_float(raw.part[j].y);
    v[4 * j + 2] = __int_as_float(raw.part[j].z), v[4 * j + 3] = __int_as_float(raw.part[j].w);
  }
}
template <class T>
__device__ __forceinline__ void load16(const T* p, float (&v)[16]) {
  Raw16<T> raw;
  raw.load(p);
  widen16(raw, v);
}

struct Quantised {
  u32 data[4];  // 16 bytes of e4m3, or 8 bytes of e2m1
  u32 scale;    // bits of the scale: fp32, UE8M0 or e4m3
};

__device__ __forceinline__ u32 pack_e4m3(const float* v, float by) {
  const __nv_fp8x2_storage_t low = __nv_cvt_float2_to_fp8x2(make_float2(v[0] * by, v[1] * by), __NV_SATFINITE, __NV_E4M3);
  const __nv_fp8x2_storage_t high = __nv_cvt_float2_to_fp8x2(make_float2(v[2] * by, v[3] * by), __NV_SATFINITE, __NV_E4M3);
  return u32(low) | u32(high) << 16;
}

struct QuantFormat {
  u32 dtype, lanes;    // lanes that share a scale
  bool powers;         // fp8: scales are powers of two
  float global_scale;  // nvfp4
};

// The largest absolute value of a block, as bits, which order like values. NaN counts as nothing, or in nvfp4 as most.
__device__ __forceinline__ u32 largest_of(const float (&v)[16], const QuantFormat& f) {
  u32 most = 0;
#pragma unroll
  for (float e : v) {
    const u32 bits = __float_as_uint(e) & 0x7fffffff;
    if (f.dtype == EP_NVFP4 || bits <= 0x7f800000) most = max(most, bits);
  }
  for (u32 step = f.lanes / 2; step; step /= 2) most = max(most, __shfl_xor_sync(~0u, most, step));
  return most;
}

// What cpu/quant.h says, in the same operations: every element and scale has the same bits as there.
__device__ __forceinline__ Quantised quantise16(const float (&v)[16], const QuantFormat& f) {
  const u32 most = largest_of(v, f);
  Quantised q{};
  if (f.dtype == EP_NVFP4) {
    const bool finite = most < 0x7f800000;
    const float wanted = most ? __uint_as_float(most) / 6.f / f.global_scale : 1.f;
    // The format has no NaN of its own: the scale's makes a block with any value that is not finite NaN.
    q.scale = finite ? u32(__nv_cvt_float_to_fp8(wanted, __NV_SATFINITE, __NV_E4M3)) : 0x7fu;
    const float full = __half2float(__half(__nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t(q.scale), __NV_E4M3))) * f.global_scale;
    const float by = full > 0.f ? 1.f / full : 0.f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const u32 two = __nv_cvt_float2_to_fp4x2(make_float2(v[2 * j] * by, v[2 * j + 1] * by), __NV_E2M1, cudaRoundNearest);
      q.data[j / 4] |= (finite ? two & 0xff : 0u) << (j % 4 * 8);
    }
    return q;
  }
  float scale = __uint_as_float(most) / 448.f;
  if (!(scale >= 0x1p-126f)) scale = 1.f;  // zeros, and values whose inverse scale would overflow
  if (f.powers || f.dtype == EP_MXFP8) scale = __uint_as_float((__float_as_uint(scale) + 0x7fffff) >> 23 << 23);
  q.scale = f.dtype == EP_MXFP8 ? __float_as_uint(scale) >> 23 : __float_as_uint(scale);
  const float by = 1.f / scale;
#pragma unroll
  for (int j = 0; j < 4; ++j) q.data[j] = pack_e4m3(v + 4 * j, by);
  return q;
}

__device__ __forceinline__ void store_quantised(u8* row, u8* scales, u32 unit, const Quantised& q, const QuantFormat& f) {
  if (f.dtype == EP_NVFP4) {
    *reinterpret_cast<uint2*>(row + unit * 8) = make_uint2(q.data[0], q.data[1]);
    scales[unit] = u8(q.scale);
    return;
  }
  store_stream(row + unit * 16, make_int4(int(q.data[0]), int(q.data[1]), int(q.data[2]), int(q.data[3])));
  if (unit % f.lanes) return;
  if (f.dtype == EP_FP8)
    reinterpret_cast<u32*>(scales)[unit / f.lanes] = q.scale;
  else
    scales[unit / f.lanes] = u8(q.scale);
}

}  // namespace epc
