// The vector code: one table of functions per instruction set, chosen once. All give the same bits.
#pragma once
#include "common/layout.h"

namespace ep {

struct Addend;

struct Kernels {
  // Between a row and fp32, rounding to nearest even.
  void (*half_to_float)(float* dst, const u16* src, u64 n);
  void (*bf16_to_float)(float* dst, const u16* src, u64 n);
  void (*float_to_half)(u16* dst, const float* src, u64 n);
  void (*float_to_bf16)(u16* dst, const float* src, u64 n);
  // acc[i] += weight * src[i]; the product is rounded before the sum.
  void (*add_float)(float* acc, const float* src, float weight, u64 n);
  void (*add_half)(float* acc, const u16* src, float weight, u64 n);
  void (*add_fp8)(float* acc, const u8* src, const float* scales, float weight, u64 n);  // n a multiple of 128
  // acc[i] += part[i] rounded, part[i] = 0.
  void (*move_half)(float* acc, float* part, u64 n);
  // acc[i] = elements at + i of all addends, added as sum_rows (convert.h) says.
  void (*sum_bf16)(float* acc, const Addend* addends, u32 count, u64 at, u64 n);
  // Quantise a row of n fp32 elements, n a multiple of the format's block (quant.h says how).
  void (*to_fp8)(u8* dst, float* scales, const float* src, u64 n, bool powers);
  void (*to_mxfp8)(u8* dst, u8* scales, const float* src, u64 n);
  void (*to_nvfp4)(u8* dst, u8* scales, const float* src, u64 n, float global_scale);
  void (*from_fp8)(float* dst, const u8* src, const float* scales, u64 n);
  void (*from_mxfp8)(float* dst, const u8* src, const u8* scales, u64 n);
  void (*from_nvfp4)(float* dst, const u8* src, const u8* scales, u64 n, float global_scale);
  // ids[i] = slots[i] if it is one of `limit`, else -1; weights[i] = that of the slot, or 0.
  void (*take_tails)(int32_t* ids, float* weights, const int32_t* slots, const float* slot_weights, u64 n, u32 limit);
  // One row to each of `count` places; stream: past the caches.
  void (*spread)(u8* const* dst, u32 count, const u8* src, u64 bytes, bool stream);
};

// Whether this many bytes go past the caches: when they would push out more than they keep.
constexpr u64 kStreamBytes = 8 << 20;
inline bool streams(u64 bytes) { return bytes >= kStreamBytes; }
// Streamed stores are seen before anything stored after this.
inline void stream_fence() {
#ifdef __SSE2__
  __builtin_ia32_sfence();
#endif
}

enum VectorLevel : u32 { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };
u32 vector_level();                  // the highest of this host
const Kernels* kernels_of(u32 level);  // nullptr: not on this host
extern const Kernels& kernels;       // the best ones

extern const Kernels portable_kernels;
#ifdef __x86_64__
extern const Kernels avx2_kernels, avx512_kernels;
#endif

}  // namespace ep
