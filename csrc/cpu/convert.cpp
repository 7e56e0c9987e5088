#include "convert.h"

#include <cstring>

// One binary for every host: the compiler makes these versions and the loader picks the widest at run time.
#define EP_WIDE __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))

namespace ep {

namespace {

inline float bits_to_float(u32 bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
inline u32 float_to_bits(float f) {
  u32 bits;
  memcpy(&bits, &f, 4);
  return bits;
}

inline float half_to_float(u16 h) {
  u32 sign = u32(h & 0x8000) << 16, rest = h & 0x7fff;
  // Scaling by 2^112 moves the exponent and normalises subnormals in one exact product.
  float f = bits_to_float(rest << 13) * 0x1p112f;
  u32 bits = float_to_bits(f);
  bits = rest >= 0x7c00 ? (0x7f800000u | (rest & 0x3ff) << 13) : bits;
  return bits_to_float(bits | sign);
}

inline u16 float_to_half(float f) {
  u32 bits = float_to_bits(f), sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  u32 subnormal = float_to_bits(bits_to_float(bits) + 0.5f) - float_to_bits(0.5f);  // rounds at 2^-24
  u32 normal = (bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13;
  u32 out = bits < 0x38800000 ? subnormal : normal;
  out = bits >= 0x477ff000 ? 0x7c00 : out;  // rounds to infinity
  out = bits > 0x7f800000 ? 0x7e00 : out;   // NaN
  return u16(out | sign);
}

inline float bf16_to_float(u16 b) { return bits_to_float(u32(b) << 16); }

inline u16 float_to_bf16(float f) {
  u32 bits = float_to_bits(f);
  u32 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return u16((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16 | 0x40) : rounded);
}

EP_WIDE void half_rows(float* dst, const u16* src, u64 n) {
  for (u64 i = 0; i < n; ++i) dst[i] = half_to_float(src[i]);
}
EP_WIDE void bf16_rows(float* dst, const u16* src, u64 n) {
  for (u64 i = 0; i < n; ++i) dst[i] = bf16_to_float(src[i]);
}
EP_WIDE void rows_half(u16* dst, const float* src, u64 n) {
  for (u64 i = 0; i < n; ++i) dst[i] = float_to_half(src[i]);
}
EP_WIDE void rows_bf16(u16* dst, const float* src, u64 n) {
  for (u64 i = 0; i < n; ++i) dst[i] = float_to_bf16(src[i]);
}
EP_WIDE void add_fp32(float* acc, const float* src, float w, u64 n) {
  for (u64 i = 0; i < n; ++i) acc[i] += w * src[i];
}
EP_WIDE void add_half(float* acc, const u16* src, float w, u64 n) {
  for (u64 i = 0; i < n; ++i) acc[i] += w * half_to_float(src[i]);
}
EP_WIDE void add_bf16(float* acc, const u16* src, float w, u64 n) {
  for (u64 i = 0; i < n; ++i) acc[i] += w * bf16_to_float(src[i]);
}

}  // namespace

void to_float(float* dst, const void* src, u32 dtype, u64 n) {
  if (dtype == EP_FP32) memcpy(dst, src, n * 4);
  else if (dtype == EP_FP16) half_rows(dst, static_cast<const u16*>(src), n);
  else bf16_rows(dst, static_cast<const u16*>(src), n);
}

void from_float(void* dst, u32 dtype, const float* src, u64 n) {
  if (dtype == EP_FP32) memcpy(dst, src, n * 4);
  else if (dtype == EP_FP16) rows_half(static_cast<u16*>(dst), src, n);
  else rows_bf16(static_cast<u16*>(dst), src, n);
}

void accumulate(float* acc, const void* src, u32 dtype, float weight, u64 n) {
  if (dtype == EP_FP32) add_fp32(acc, static_cast<const float*>(src), weight, n);
  else if (dtype == EP_FP16) add_half(acc, static_cast<const u16*>(src), weight, n);
  else add_bf16(acc, static_cast<const u16*>(src), weight, n);
}

}  // namespace ep
