#include "convert.h"

#include <cstring>

#include "kernels.h"

namespace ep {

namespace {

constexpr u64 kPiece = 512;  // elements whose sum stays in the first cache while every row is added; a multiple of 128

void add(float* acc, const Addend& a, u32 dtype, u64 at, u64 n, u64 whole) {
  switch (dtype) {
    case EP_FP32: return kernels.add_float(acc, reinterpret_cast<const float*>(a.row) + at, a.weight, n);
    case EP_FP16: return kernels.add_half(acc, reinterpret_cast<const u16*>(a.row) + at, a.weight, n);
    case EP_BF16: return kernels.add_bf16(acc, reinterpret_cast<const u16*>(a.row) + at, a.weight, n);
    default: return kernels.add_fp8(acc, a.row + at, reinterpret_cast<const float*>(a.row + whole) + at / 128, a.weight, n);
  }
}

}  // namespace

void to_float(float* dst, const void* src, u32 dtype, u64 n) {
  if (dtype == EP_FP32) memcpy(dst, src, n * 4);
  else if (dtype == EP_FP16) kernels.half_to_float(dst, static_cast<const u16*>(src), n);
  else kernels.bf16_to_float(dst, static_cast<const u16*>(src), n);
}

void from_float(void* dst, u32 dtype, const float* src, u64 n) {
  if (dtype == EP_FP32) memcpy(dst, src, n * 4);
  else if (dtype == EP_FP16) kernels.float_to_half(static_cast<u16*>(dst), src, n);
  else kernels.float_to_bf16(static_cast<u16*>(dst), src, n);
}

void sum_rows(void* out, u32 out_dtype, const Addend* addends, u32 count, u32 dtype, u64 n) {
  alignas(64) float acc[kPiece];
  const u64 bytes = element_bytes(dtype);
  for (u64 at = 0; at < n; at += kPiece) {
    const u64 here = n - at < kPiece ? n - at : kPiece;
    memset(acc, 0, here * 4);
    for (u32 i = 0; i < count; ++i) {
      // The row's next piece is fetched meanwhile: more rows are read at once than the hardware follows.
      const u8* ahead = addends[i].row + (at + kPiece) * bytes;
      for (u64 line = 0; line < kPiece * bytes; line += 64) __builtin_prefetch(ahead + line);
      add(acc, addends[i], dtype, at, here, n);
    }
    from_float(static_cast<u8*>(out) + at * element_bytes(out_dtype), out_dtype, acc, here);
  }
}

}  // namespace ep
