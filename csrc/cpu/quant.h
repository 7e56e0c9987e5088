// Quantised rows. With amax the largest absolute value of a block (NaN left out), a block's scale is
//   fp8     1 x 128, fp32:  amax / 448, or with `powers` the smallest power of two that is not less
//   mxfp8   1 x 32, UE8M0:  the smallest power of two >= amax / 448, as its biased exponent
//   nvfp4   1 x 16, e4m3:   amax / 6 / global_scale rounded to e4m3 (at most 448)
// and an element is value * (1 / scale) rounded to nearest even, at most the format's largest. A scale below 2^-126 (a
// block of zeros) is 1 instead. NaN stays NaN and infinity makes its block NaN; in nvfp4, which has no NaN, both make their
// block's scale NaN. No block depends on another.
#pragma once
#include "common/layout.h"

namespace ep {

struct QuantFormat {
  u32 dtype;
  bool powers;         // fp8: scales are powers of two
  float global_scale;  // nvfp4
};

void quantise_row(const QuantFormat& format, const float* row, u64 hidden, u8* out, u8* scales);

}  // namespace ep
