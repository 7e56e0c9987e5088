// Between the element types of rows. Every function rounds to nearest even, and gives the same bits on every CPU.
#pragma once
#include "common/layout.h"

namespace ep {

// dst[i] = float(src[i]), of fp32, fp16 or bf16
void to_float(float* dst, const void* src, u32 src_dtype, u64 n);
// dst[i] = round(src[i]), to fp32, fp16 or bf16
void from_float(void* dst, u32 dst_dtype, const float* src, u64 n);

// One addend of a sum of rows. Rows of fp8 have their scales behind them.
struct Addend {
  const u8* row;
  float weight;
  bool last_of_rank = false;  // what came since the last such one is rounded to the rows' own type before it is added
};
// out = sum of weight * float(row), in order, in fp32: every product and every sum is rounded (no fused multiply-add).
// With weight 1 a plain sum; without addends zeros. out is fp32, fp16 or bf16.
void sum_rows(void* out, u32 out_dtype, const Addend* addends, u32 count, u32 dtype, u64 n);

}  // namespace ep
