// Placing rows in the expert kernel's layout and summing its outputs, one warp's share at a time.
#pragma once
#include "kernels.h"
#include "routing.cuh"
#include "rows.cuh"

namespace epc {

constexpr u32 kPartVectors = 128;  // 16-byte words of a row that a warp moves at once
constexpr u32 kReduceVectors = 64;
constexpr u32 kPerThread = 8;    // entries that a thread looks at in one round
constexpr u32 kAlignment = 128;  // rows; runs of the contiguous layout are padded to it

__device__ __forceinline__ u64 total_rows(const Domain& d, const Exchange& x) { return u64(d.ranks) * x.at.source_rows; }

// Runs of a kernel: slots, or a single one for arrival order.
__device__ __forceinline__ u32 runs_of(const Domain& d, const Exchange& x) { return x.layout == EP_LAYOUT_ARRIVAL ? 1 : d.slots; }

// Where each run begins, for every block anew: at most some hundred numbers.
__device__ inline void run_offsets(const Domain& d, const Exchange& x, u32* offsets) {
  const int* counts = reinterpret_cast<const int*>(d.region(d.me) + x.at.slot_counts);
  const u32 runs = runs_of(d, x);
  if (threadIdx.x < 32) {
    u32 base = 0;
    for (u32 first = 0; first < runs; first += 32) {
      const u32 run = first + threadIdx.x;
      u32 n = run < runs ? u32(counts[run]) : 0;
      if (x.layout == EP_LAYOUT_CONTIGUOUS) n = (n + kAlignment - 1) / kAlignment * kAlignment;
      if (x.layout == EP_LAYOUT_MASKED) n = run < runs ? x.masked_room : 0;
      u32 sum = n;
      for (u32 step = 1; step < 32; step *= 2) {
        const u32 left = __shfl_up_sync(~0u, sum, step);
        if (threadIdx.x >= step) sum += left;
      }
      if (run < runs) offsets[run] = base + sum - n;
      base += __shfl_sync(~0u, sum, 31);
    }
    if (threadIdx.x == 0) offsets[runs] = base;
  }
  __syncthreads();
}

// A warp moves one part of an arrived row: read once, written to each of its places.
__device__ __forceinline__ void copy_part(const ExpandArgs& a, u64 row, u32 part, const u32* offsets) {
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  u8* own = d.region(d.me);
  const u32 k = d.topk, lane = threadIdx.x % 32, vectors = a.row_bytes / 16;
  const bool arrival = x.layout == EP_LAYOUT_ARRIVAL;
      const int id = lane < k ? reinterpret_cast<const int*>(own + x.at.recv_ids)[row * k + lane] : -1;
      const u32 have = __ballot_sync(~0u, id >= 0);
      int to = -1;
      if (arrival) {
        const int place = have ? a.relative[row * k] : -1;
        if (lane == 0) to = place;
        if (lane < k && part == 0) {
          reinterpret_cast<int*>(own + x.at.expanded_of)[row * k + lane] = lane == 0 ? place : -1;
          if (have) {
            a.compact_ids[u64(place) * k + lane] = id;
            a.compact_weights[u64(place) * k + lane] = reinterpret_cast<const float*>(own + x.at.recv_weights)[row * k + lane];
          }
        }
      } else if (lane < k) {
        if (id >= 0) {
          const int place = a.relative[row * k + lane];
          const bool fits = x.layout != EP_LAYOUT_MASKED || u32(place) < x.masked_room;
          if (fits) to = int(offsets[id]) + place;
          if (to >= int(x.at.expanded_rows)) to = -1;
        }
        if (part == 0) reinterpret_cast<int*>(own + x.at.expanded_of)[row * k + lane] = to;
      }
      u32 targets = __ballot_sync(~0u, to >= 0);
      if (!targets) return;
      const u8* from = own + x.at.rows + row * a.row_bytes;
      u8* rows = own + x.at.expanded;
      const u32 v = part * kPartVectors + lane;
      int4 value[4];
  #pragma unroll
      for (u32 u = 0; u < 4; ++u)
        if (v + u * 32 < vectors) value[u] = load_stream(from + (v + u * 32) * 16);
      for (u32 bits = targets; bits; bits &= bits - 1) {
        const u32 place = __shfl_sync(~0u, u32(to), __ffs(bits) - 1);
  #pragma unroll
        for (u32 u = 0; u < 4; ++u)
          if (v + u * 32 < vectors) store_stream(rows + u64(place) * a.row_bytes + (v + u * 32) * 16, value[u]);
      }
      if (a.scale_bytes && part == 0)
        for (u32 bits = targets; bits; bits &= bits - 1) {
          const u32 place = __shfl_sync(~0u, u32(to), __ffs(bits) - 1);
          for (u32 s = lane; s < a.scale_bytes; s += 32)
            (own + x.at.expanded_scales)[u64(place) * a.scale_bytes + s] = (own + x.at.scales)[row * a.scale_bytes + s];
        }
}

// A warp's part of the weighted sum of a token's outputs here, in top-k order. token: source * cap + index.
template <class Element>
__device__ __forceinline__ void reduce_part(const ExpandArgs& a, u32 token, u32 begin) {
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  u8* own = d.region(d.me);
  constexpr u32 kE = Element::kElements;
  const u32 lane = threadIdx.x % 32, k = d.topk, per = x.rows_per_token, vectors = u32(x.at.y_row_bytes / 16);
      const u32 source = token / x.cap;
    
      int at = -1;
      float weight = 0.f;
      if (lane < k) {
        const u64 row = u64(source) * x.at.source_rows + u64(token % x.cap) * per + (per > 1 ? lane : 0);
        if (reinterpret_cast<const int*>(own + x.at.recv_ids)[row * k + lane] >= 0) {
          at = reinterpret_cast<const int*>(own + x.at.expanded_of)[row * k + lane];
          weight = reinterpret_cast<const float*>(own + x.at.recv_weights)[row * k + lane];
        }
      }
      const u32 have = __ballot_sync(~0u, at >= 0);
      if (!have) return;
      for (u32 v = begin + lane; v < begin + kReduceVectors; v += 32) {
        float acc[kE] = {};
        for (u32 bits = have; bits;) {
          int4 raw[4];
          float w[4];
  #pragma unroll
          for (u32 u = 0; u < 4; ++u) {
            w[u] = 0.f;
            raw[u] = make_int4(0, 0, 0, 0);
            if (!bits) continue;
            const u32 from = __ffs(bits) - 1;
            bits &= bits - 1;
            const u32 place = __shfl_sync(~0u, u32(at), from);
            w[u] = __shfl_sync(~0u, weight, from);
            if (v < vectors) raw[u] = load_stream(own + x.at.y + u64(place) * x.at.y_row_bytes + v * 16);
          }
  #pragma unroll
          for (u32 u = 0; u < 4; ++u) Element::add(raw[u], w[u], acc);
        }
        if (v < vectors) store_sums<kE>(own + x.at.y_reduced + u64(token) * x.at.y_row_bytes, v * kE, acc, x.combine_dtype);
      }
}

}  // namespace epc
