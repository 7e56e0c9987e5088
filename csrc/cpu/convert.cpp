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
    default: return kernels.add_fp8(acc, a.row + at, reinterpret_cast<const float*>(a.row + whole) + at / 128, a.weight, n);
  }
}

// What the addends of one rank came to joins the rest, rounded as if it had travelled.
void move(float* acc, float* part, u32 dtype, u64 n) {
  if (dtype == EP_FP16) return kernels.move_half(acc, part, n);
  kernels.add_float(acc, part, 1.0f, n);
  memset(part, 0, n * 4);
}

// Elements at .. at + n of the sum.
void sum_piece(float* acc, const Addend* addends, u32 count, u32 dtype, u64 at, u64 n, u64 whole) {
  if (dtype == EP_BF16) return kernels.sum_bf16(acc, addends, count, at, n);
  alignas(64) float part[kPiece];
  const u64 bytes = element_bytes(dtype);
  const bool by_rank = count && addends[count - 1].last_of_rank;
  memset(acc, 0, n * 4);
  if (by_rank) memset(part, 0, n * 4);
  for (u32 i = 0; i < count; ++i) {
    // The row's next piece is fetched meanwhile: more rows are read at once than the hardware follows.
    const u8* ahead = addends[i].row + (at + kPiece) * bytes;
    for (u64 line = 0; line < kPiece * bytes; line += 64) __builtin_prefetch(ahead + line);
    add(by_rank ? part : acc, addends[i], dtype, at, n, whole);
    if (addends[i].last_of_rank) move(acc, part, dtype, n);
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
  for (u64 at = 0; at < n; at += kPiece) {
    const u64 here = n - at < kPiece ? n - at : kPiece;
    sum_piece(acc, addends, count, dtype, at, here, n);
    from_float(static_cast<u8*>(out) + at * element_bytes(out_dtype), out_dtype, acc, here);
  }
}

}  // namespace ep
