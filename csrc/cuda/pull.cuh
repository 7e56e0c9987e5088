// Reading the rows that are owed to home tokens, and summing them.
#pragma once
#include "kernels.h"
#include "routing.cuh"
#include "rows.cuh"

namespace epc {

constexpr u32 kBatch = 32;  // tokens of a block that are prepared together

// The rows owed to the tokens of a batch, in the order in which they are summed.
struct Owed {
  u32 count[kBatch];
  const u8* row[kBatch][EP_MAX_TOPK];
  float weight[kBatch][EP_MAX_TOPK];
};

// Row of `y` on rank g for our token. kNobody when the other side names none.
__device__ __forceinline__ u32 output_row(const CombineArgs& a, u32 g, u32 token, u32 k) {
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  const bool per_expert = x.reduce == EP_REDUCE_PER_EXPERT;
  const u64 source_row = (x.replicated ? 0 : u64(d.me) * x.at.source_rows) + u64(token) * x.rows_per_token + (x.rows_per_token > 1 ? k : 0);
  if (!x.at.expanded_rows) return u32(per_expert ? source_row * d.topk + k : source_row);
  const bool expands = x.expands();
  if (expands && !per_expert) return u32(u64(d.me) * x.cap + token);
  const u32 at = load_relaxed(reinterpret_cast<const u32*>(d.region(g) + x.at.expanded_of) + source_row * d.topk + (expands ? k : 0));
  if (at >= x.at.expanded_rows) return kNobody;
  return !expands && per_expert ? at * d.topk + k : at;
}

// The same for an output of this rank itself that is not summed before.
__device__ __forceinline__ u32 own_place(const CombineArgs& a, u32 token, u32 k) {
  const Domain& d = a.domain;
  const u64 at = (u64(d.me) * a.exchange.at.source_rows + token) * d.topk + k;
  const u32 place = reinterpret_cast<const u32*>(d.region(d.me) + a.exchange.at.expanded_of)[at];
  return place < a.exchange.at.expanded_rows ? place : kNobody;
}

// A warp per token. kOwnSingly: this rank's own outputs are not summed before, but listed one by one (by expert, sums per
// rank).
template <bool kOwnSingly = false>
__device__ __forceinline__ void list_owed(const CombineArgs& a, u32 first, u32 n, u32 stride, Owed& owed) {
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  const u32 lane = threadIdx.x % 32, k = d.topk;
  const bool per_expert = x.reduce == EP_REDUCE_PER_EXPERT;
  const bool expands = x.expands();
  // With copies per expert and sums in the expert's kernel every copy is a row of its own.
  const bool each = per_expert || (x.rows_per_token > 1 && !expands);
  const u64 y = expands && !per_expert ? x.at.y_reduced : x.at.y;
  for (u32 i = threadIdx.x / 32; i < n; i += blockDim.x / 32) {
    const u32 token = first + i * stride;
    const u32 served = lane < k ? x.route[u64(token) * k + lane] : kNobody;
    const u32 rank = served >> 16;
    bool owes = served != kNobody;
    const bool single = kOwnSingly && owes && rank == d.me;
    const float weight = (per_expert || single) && lane < k ? x.route_weights[u64(token) * k + lane] : 1.f;
    u32 place;
    if (each) {
      place = __popc(__ballot_sync(~0u, owes) & ((1u << lane) - 1));
    } else {
      const Mask m = gather_mask(served, d.ranks);
      const u32 same = __match_any_sync(~0u, owes ? rank : 0x10000u + lane);
      const u32 singles = kOwnSingly ? __ballot_sync(~0u, single) : 0;
      owes = single || (owes && u32(__ffs(same)) == lane + 1);
      place = owes ? m.below(rank) : 0;
      if (single) place += __popc(singles & ((1u << lane) - 1));
      else if (singles && d.me < rank) place += __popc(singles) - 1;
    }
    u32 row = kNobody;
    if (owes) row = single ? own_place(a, token, lane) : output_row(a, rank, token, lane);
    const u32 total = __popc(__ballot_sync(~0u, owes));
    if (owes) {
      owed.row[i][place] = row == kNobody ? nullptr : d.region(rank) + (single ? x.at.y : y) + u64(row) * a.row_bytes;
      owed.weight[i][place] = weight;
    }
    if (lane == 0) owed.count[i] = total;
  }
}

// After a block's last unit: whoever is the last of `blocks` says that all outputs are ready, for those who wait for that.
// One thread of the last warp, which has nothing else to do while words are on their way.
__device__ __forceinline__ void announce_summed(const CombineArgs& a, const Now& now, u32 blocks) {
  if (threadIdx.x != blockDim.x - 32) return;
  const Domain& d = a.domain;
  State* s = d.state;
  fence_system();
  if (atomicAdd(&s->summed[a.exchange.channel], 1u) != blocks - 1) return;
  s->summed[a.exchange.channel] = 0;
  fence_system();
  for (u32 i = 0; i < now.members; ++i)
    store_relaxed(reinterpret_cast<u64*>(d.region(s->member[i]) + a.exchange.at.ready + d.me * sizeof(ep::Flag)), now.tag);
}

// Every block has read this exchange's number; the next kernel sees the next one. Behind a barrier of the block: whichever of its
// threads asked for the number (NowReader) has it then.
__device__ __forceinline__ void count_exchange(const CombineArgs& a, const Now& now) {
  if (threadIdx.x) return;
  State* s = a.domain.state;
  const u32 channel = a.exchange.channel;
  if (atomicAdd(&s->readers[channel], 1u) == gridDim.x - 1) {
    s->readers[channel] = 0;
    s->sequence[channel] = now.sequence + 1;
  }
}

// 16 bytes per thread, `kItems` of them at once, two rows of each in flight.
template <class Element>
struct PullRows {
  static constexpr u32 kMaxThreads = kMostPullThreads, kMinBlocks = 1, kItems = Element::kScaled ? 1 : 2;
  static constexpr bool kBulk = false;
  static __device__ __forceinline__ void begin(u8*) {}
  __device__ __forceinline__ void attach(u8*) {}

  __device__ void pull(const CombineArgs& a, u32 first, u32 n, u32 stride, u32 part, const Owed& owed) {
    constexpr u32 kE = Element::kElements;
    const u32 vectors = Element::kScaled ? a.domain.hidden / 16 : a.row_bytes / 16;
    const u32 begin = vectors * part / a.parts, width = vectors * (part + 1) / a.parts - begin;
    const u32 total = n * width;
    const u32 out_bytes = a.domain.hidden * (a.out_dtype == EP_FP32 ? 4 : 2);
    for (u32 base = threadIdx.x; base < total; base += blockDim.x * kItems) {
      float acc[kItems][kE] = {};
      u32 token[kItems], at[kItems], count[kItems], most = 0;
#pragma unroll
      for (u32 u = 0; u < kItems; ++u) {
        const u32 item = base + u * blockDim.x;
        token[u] = item < total && n > 1 ? item / width : 0;
        at[u] = begin + (item < total ? item - token[u] * width : 0);
        count[u] = item < total ? owed.count[token[u]] : 0;
        most = max(most, count[u]);
      }
      for (u32 j = 0; j < most; j += 2) {
        int4 raw[kItems][2];
        float weight[kItems][2], scale[kItems][2];
#pragma unroll
        for (u32 u = 0; u < kItems; ++u)
#pragma unroll
          for (u32 e = 0; e < 2; ++e) {
            const u8* row = j + e < count[u] ? owed.row[token[u]][j + e] : nullptr;
            weight[u][e] = row ? owed.weight[token[u]][j + e] : 0.f;
            raw[u][e] = row ? load_stream(row + at[u] * 16) : make_int4(0, 0, 0, 0);
            if constexpr (Element::kScaled) scale[u][e] = row ? *reinterpret_cast<const volatile float*>(row + a.domain.hidden + at[u] / 8 * 4) : 0.f;
          }
#pragma unroll
        for (u32 u = 0; u < kItems; ++u)
#pragma unroll
          for (u32 e = 0; e < 2; ++e) {
            if constexpr (Element::kScaled) Element::add(raw[u][e], weight[u][e], scale[u][e], acc[u]);
            else Element::add(raw[u][e], weight[u][e], acc[u]);
          }
      }
#pragma unroll
      for (u32 u = 0; u < kItems; ++u)
        if (base + u * blockDim.x < total)
          store_sums<kE>(a.out + u64(first + token[u] * stride) * out_bytes, at[u] * kE, acc[u], a.out_dtype);
    }
  }
};

// Pieces of rows come by the SM's copy engine; a warp keeps several in flight and sums one per lane slice.
template <class Element>
struct BulkPull {
  static constexpr u32 kMaxThreads = kBulkWarps * 32, kMinBlocks = 1;
  static constexpr bool kBulk = true;
  u8* ring;
  u64* full;
  u32 taken, loaded;

  static __device__ __forceinline__ void begin(u8* shared) {
    if (threadIdx.x < kBulkWarps * kPullStages) barrier_init(reinterpret_cast<u64*>(shared) + threadIdx.x, 1);
    barrier_fence_init();
  }
  __device__ __forceinline__ void attach(u8* shared) {
    const u32 warp = threadIdx.x / 32;
    full = reinterpret_cast<u64*>(shared) + warp * kPullStages;
    ring = shared + kBulkBarrierBytes + warp * kPullStages * kPullPiece;
    taken = loaded = 0;
  }

  // Where the warp is in its list of (token, piece, row).
  struct Cursor {
    u32 item, entry;
  };

  __device__ void pull(const CombineArgs& a, u32 first, u32 n, u32 stride, u32, const Owed& owed) {
    constexpr u32 kE = Element::kElements, kVectors = kPullPiece / 16 / 32;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 pieces = (a.row_bytes + kPullPiece - 1) / kPullPiece, total = n * pieces;
    const u32 out_bytes = a.domain.hidden * (a.out_dtype == EP_FP32 ? 4 : 2);
    auto bytes_of = [&](u32 piece) { return min(kPullPiece, a.row_bytes - piece * kPullPiece); };
    Cursor next{warp, 0};
    auto load_one = [&]() {
      while (next.item < total && next.entry >= owed.count[next.item / pieces]) next = {next.item + kBulkWarps, 0};
      if (next.item >= total) return false;
      const u32 token = next.item / pieces, piece = next.item % pieces, stage = loaded % kPullStages;
      const u8* row = owed.row[token][next.entry];
      if (lane == 0) {
        if (row) {
          barrier_expect(full + stage, bytes_of(piece));
          bulk_load(ring + stage * kPullPiece, row + piece * kPullPiece, bytes_of(piece), full + stage);
        } else {
          barrier_expect(full + stage, 0);
        }
      }
      ++loaded;
      ++next.entry;
      return true;
    };
    for (u32 s = 0; s < kPullStages; ++s)
      if (!load_one()) break;
    for (u32 item = warp; item < total; item += kBulkWarps) {
      const u32 token = item / pieces, piece = item % pieces, vectors = bytes_of(piece) / 16;
      float acc[kVectors][kE] = {};
      for (u32 j = 0; j < owed.count[token]; ++j) {
        const u32 stage = taken % kPullStages;
        barrier_wait(full + stage, taken / kPullStages & 1);
        ++taken;
        const int4* from = reinterpret_cast<const int4*>(ring + stage * kPullPiece);
        const float weight = owed.weight[token][j];
        if (owed.row[token][j])
#pragma unroll
          for (u32 v = 0; v < kVectors; ++v)
            if (v * 32 + lane < vectors) Element::add(from[v * 32 + lane], weight, acc[v]);
        __syncwarp();
        load_one();
      }
      u8* out = a.out + u64(first + token * stride) * out_bytes;
#pragma unroll
      for (u32 v = 0; v < kVectors; ++v)
        if (v * 32 + lane < vectors) store_sums<kE>(out, (piece * (kPullPiece / 16) + v * 32 + lane) * kE, acc[v], a.out_dtype);
    }
  }
};

}  // namespace epc
