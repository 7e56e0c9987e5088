// From logical experts to the copies that serve them, and from a token's experts to the ranks that get its row.
#pragma once
#include "wait.cuh"

namespace epc {

// The same sequence as ep::split_point (bank.h), which is host code.
__device__ __forceinline__ u32 split_point(u32 token, u32 rank, u32 layer, u64 step) {
  u64 shift = (u64(rank) << 40) ^ (u64(layer) << 20) ^ step;
  shift = (shift ^ shift >> 31) * 0x9E3779B97F4A7C15ull;
  shift = (shift ^ shift >> 29) * 0xBF58476D1CE4E5B9ull;
  return (token * 2654435769u + u32(shift >> 32)) >> 16;
}

// rank << 16 | slot of the copy that serves `expert` of this token of rank `who`, or kNobody.
__device__ __forceinline__ u32 serve(const Domain& d, const Now& now, const Copies& c, u32 layer, u32 expert, u32 token, u32 who) {
  if (c.count <= 1) return c.count ? c.first : kNobody;
  const u32 point = split_point(token, who, layer, now.step);
  if (c.count == 2) return point < c.upto ? c.first : c.second;
  const u64 row = u64(now.bank) * d.layers + layer;
  const ep::Replica* list = d.replicas + row * d.ranks * d.slots + d.lists[row * d.experts + expert];
  for (u32 i = 0; i < c.count; ++i) {
    const ep::Replica r = list[i];
    if (point < r.upto) return u32(r.rank) << 16 | r.slot;
  }
  return kNobody;
}

// A set of ranks.
struct Mask {
  u32 word[kMaskWords];

  __device__ __forceinline__ bool has(u32 rank) const { return word[rank / 32] >> (rank % 32) & 1; }
  // Ranks below `rank` in the set.
  __device__ __forceinline__ u32 below(u32 rank) const {
    u32 n = 0;
#pragma unroll
    for (u32 w = 0; w < kMaskWords; ++w) {
      const u32 bits = w < rank / 32 ? word[w] : w == rank / 32 ? word[w] & ((1u << (rank % 32)) - 1) : 0;
      n += __popc(bits);
    }
    return n;
  }
  __device__ __forceinline__ u32 count() const {
    u32 n = 0;
#pragma unroll
    for (u32 w = 0; w < kMaskWords; ++w) n += __popc(word[w]);
    return n;
  }
  template <class F>
  __device__ __forceinline__ void each(F f) const {
#pragma unroll
    for (u32 w = 0; w < kMaskWords; ++w)
      for (u32 bits = word[w]; bits; bits &= bits - 1) f(w * 32 + __ffs(bits) - 1);
  }
};

// The ranks of a warp's lanes as a set; lanes with kNobody add none.
__device__ __forceinline__ Mask gather_mask(u32 rank_slot, u32 ranks) {
  Mask m;
  const u32 rank = rank_slot >> 16;
#pragma unroll
  for (u32 w = 0; w < kMaskWords; ++w)
    m.word[w] = w * 32 < ranks ? __reduce_or_sync(~0u, rank_slot != kNobody && rank / 32 == w ? 1u << (rank % 32) : 0u) : 0u;
  return m;
}

}  // namespace epc
