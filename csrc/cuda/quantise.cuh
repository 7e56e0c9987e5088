// Rows quantised in registers: a lane holds 16 elements, and the lanes of a block share a scale.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp4.h>
#include <cuda_fp8.h>

#include "ptx.cuh"

namespace epc {

__device__ __forceinline__ void load16(const float* p, float (&v)[16]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int4 raw = load_stream(p + 4 * j);
    v[4 * j] = __int_as_float(raw.x), v[4 * j + 1] = __int_as_float(raw.y);
    v[4 * j + 2] = __int_as_float(raw.z), v[4 * j + 3] = __int_as_float(raw.w);
  }
}
__device__ __forceinline__ float2 widen(__half2 v) { return __half22float2(v); }
__device__ __forceinline__ float2 widen(__nv_bfloat162 v) { return __bfloat1622float2(v); }
template <class T, class T2>
__device__ __forceinline__ void load16_pairs(const T* p, float (&v)[16]) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int4 raw = load_stream(p + 8 * j);
    const T2* pair = reinterpret_cast<const T2*>(&raw);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 f = widen(pair[i]);
      v[8 * j + 2 * i] = f.x, v[8 * j + 2 * i + 1] = f.y;
    }
  }
}
__device__ __forceinline__ void load16(const __half* p, float (&v)[16]) { load16_pairs<__half, __half2>(p, v); }
__device__ __forceinline__ void load16(const __nv_bfloat16* p, float (&v)[16]) {
  load16_pairs<__nv_bfloat16, __nv_bfloat162>(p, v);
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

// Scales: fp8 amax / 448 (fp32); mxfp8 the smallest power of two with amax / scale <= 448; nvfp4 amax / 6 rounded to
// e4m3. A block of zeros has scale 1,
// and so has one whose scale would be subnormal (as on the CPU).
__device__ __forceinline__ Quantised quantise16(const float (&v)[16], u32 dtype, u32 lanes) {
  float amax = 0.f;
#pragma unroll
  for (float e : v) amax = fmaxf(amax, fabsf(e));
  for (u32 step = lanes / 2; step; step /= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, step));
  Quantised q{};
  if (dtype == EP_NVFP4) {
    const __nv_fp8_storage_t s = __nv_cvt_float_to_fp8(amax > 0.f ? amax / 6.f : 1.f, __NV_SATFINITE, __NV_E4M3);
    const float scale = __half2float(__half(__nv_cvt_fp8_to_halfraw(s, __NV_E4M3)));
    const float by = scale > 0.f ? 1.f / scale : 0.f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const u32 two = __nv_cvt_float2_to_fp4x2(make_float2(v[2 * j] * by, v[2 * j + 1] * by), __NV_E2M1, cudaRoundNearest);
      q.data[j / 4] |= (two & 0xff) << (j % 4 * 8);
    }
    q.scale = s;
    return q;
  }
  float scale = amax / 448.f;
  if (!(scale >= 0x1p-126f)) scale = 1.f;  // zeros, and values whose inverse scale would overflow
  q.scale = __float_as_uint(scale);
  if (dtype == EP_MXFP8) {
    u32 exponent = q.scale >> 23;
    exponent += (q.scale & 0x7fffff) != 0;
    exponent = exponent < 1 ? 1 : exponent;
    scale = __uint_as_float(exponent << 23);
    q.scale = exponent;
  }
  const float by = 1.f / scale;
#pragma unroll
  for (int j = 0; j < 4; ++j) q.data[j] = pack_e4m3(v + 4 * j, by);
  return q;
}

__device__ __forceinline__ void store_quantised(u8* row, u8* scales, u32 unit, const Quantised& q, u32 dtype, u32 lanes) {
  if (dtype == EP_NVFP4) {
    *reinterpret_cast<uint2*>(row + unit * 8) = make_uint2(q.data[0], q.data[1]);
    scales[unit] = u8(q.scale);
    return;
  }
  store_stream(row + unit * 16, make_int4(int(q.data[0]), int(q.data[1]), int(q.data[2]), int(q.data[3])));
  if (unit % lanes) return;
  if (dtype == EP_FP8)
    reinterpret_cast<u32*>(scales)[unit / lanes] = q.scale;
  else
    scales[unit / lanes] = u8(q.scale);
}

}  // namespace epc
