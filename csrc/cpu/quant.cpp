#include "quant.h"

#include <vector>

#include "common/errors.h"
#include "convert.h"
#include "kernels.h"

namespace ep {

namespace {

void quantise(const Kernels& k, const QuantFormat& f, const float* row, u64 hidden, u8* out, u8* scales) {
  switch (f.dtype) {
    case EP_FP8: return k.to_fp8(out, reinterpret_cast<float*>(scales), row, hidden, f.powers);
    case EP_MXFP8: return k.to_mxfp8(out, scales, row, hidden);
    default: return k.to_nvfp4(out, scales, row, hidden, f.global_scale);
  }
}

int check(u32 level, u32 dtype, u64 hidden, float global_scale) {
  const u32 block = block_of(dtype);
  if (!block) return fail(EP_EINVAL, "dtype %u has no scales; it must be fp8 (3), mxfp8 (4) or nvfp4 (5)", dtype);
  if (hidden % block) return fail(EP_EINVAL, "hidden is %llu, which is not a multiple of the %u elements that share a scale", (unsigned long long)hidden, block);
  if (!kernels_of(level)) return fail(EP_EINVAL, "this host has no vector level %u; its highest is %u", level, vector_level());
  if (!(global_scale > 0 && global_scale < 1e38f)) return fail(EP_EINVAL, "the global scale is %g; it must be above 0 and finite", double(global_scale));
  return 0;
}

}  // namespace

void quantise_row(const QuantFormat& format, const float* row, u64 hidden, u8* out, u8* scales) {
  quantise(kernels, format, row, hidden, out, scales);
}

}  // namespace ep

using namespace ep;

uint32_t ep_vector_level(void) { return vector_level(); }

int ep_quantise(uint32_t level, uint32_t dtype, uint32_t powers, const void* x, uint32_t x_dtype, uint64_t rows, uint64_t hidden,
                float global_scale, void* out, void* scales) {
  if (int bad = check(level, dtype, hidden, global_scale)) return bad;
  if (x_dtype > EP_BF16) return fail(EP_EINVAL, "dtype %u cannot be quantised; it must be fp32 (0), fp16 (1) or bf16 (2)", x_dtype);
  std::vector<float> row(hidden);
  for (u64 i = 0; i < rows; ++i) {
    to_float(row.data(), static_cast<const u8*>(x) + i * hidden * element_bytes(x_dtype), x_dtype, hidden);
    quantise(*kernels_of(level), {dtype, powers != 0, global_scale}, row.data(), hidden, static_cast<u8*>(out) + i * row_payload_bytes(dtype, hidden),
             static_cast<u8*>(scales) + i * row_scale_bytes(dtype, hidden));
  }
  return 0;
}

int ep_dequantise(uint32_t level, uint32_t dtype, const void* x, const void* scales, uint64_t rows, uint64_t hidden, float global_scale, float* out) {
  if (int bad = check(level, dtype, hidden, global_scale)) return bad;
  const Kernels& k = *kernels_of(level);
  for (u64 i = 0; i < rows; ++i) {
    const u8* from = static_cast<const u8*>(x) + i * row_payload_bytes(dtype, hidden);
    const u8* s = static_cast<const u8*>(scales) + i * row_scale_bytes(dtype, hidden);
    float* to = out + i * hidden;
    if (dtype == EP_FP8) k.from_fp8(to, from, reinterpret_cast<const float*>(s), hidden);
    else if (dtype == EP_MXFP8) k.from_mxfp8(to, from, s, hidden);
    else k.from_nvfp4(to, from, s, hidden, global_scale);
  }
  return 0;
}
