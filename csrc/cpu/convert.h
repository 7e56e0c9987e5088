// Between the element types of rows. Every function rounds to nearest even, and gives the same bits on every CPU.
#pragma once
#include "common/layout.h"

namespace ep {

// dst[i] = float(src[i])
void to_float(float* dst, const void* src, u32 src_dtype, u64 n);
// dst[i] = round(src[i])
void from_float(void* dst, u32 dst_dtype, const float* src, u64 n);
// acc[i] += weight * float(src[i]); with weight 1 a plain sum. The product is rounded before the sum (no fused multiply-add).
void accumulate(float* acc, const void* src, u32 src_dtype, float weight, u64 n);

}  // namespace ep
