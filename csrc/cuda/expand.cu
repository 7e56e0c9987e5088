// Rows from the order in which they were pushed into the layout that the expert kernel wants, and back: two kernels that
// place and copy after dispatch, one that sums a token's outputs before combine. All order is by (source, token, k), so
// the same rows always land in the same places.
#include "kernels.h"
#include "routing.cuh"
#include "rows.cuh"

namespace epc {

namespace {

constexpr u32 kPlaceThreads = 1024;
constexpr u32 kAlignment = 128;  // rows; runs of the contiguous layout are padded to it

__device__ __forceinline__ u64 total_rows(const Domain& d, const Exchange& x) { return u64(d.ranks) * x.at.source_rows; }

// Runs of a kernel: slots, or a single one for arrival order.
__device__ __forceinline__ u32 runs_of(const Domain& d, const Exchange& x) { return x.layout == EP_LAYOUT_ARRIVAL ? 1 : d.slots; }

// Sum over the block of flags before this thread, and of all.
__device__ __forceinline__ u32 ordered_place(bool mine, u32* warp_sums, u32* total) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 votes = __ballot_sync(~0u, mine);
  if (lane == 0) warp_sums[warp] = __popc(votes);
  __syncthreads();
  if (warp == 0) {
    u32 v = lane < blockDim.x / 32 ? warp_sums[lane] : 0, sum = v;
    for (u32 step = 1; step < 32; step *= 2) {
      const u32 left = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += left;
    }
    warp_sums[lane] = sum - v;
    if (lane == 31) warp_sums[32] = sum;
  }
  __syncthreads();
  *total = warp_sums[32];
  const u32 place = warp_sums[warp] + __popc(votes & ((1u << lane) - 1));
  __syncthreads();
  return place;
}

// A block per run gives every row of it its place, in order.
__global__ void __launch_bounds__(kPlaceThreads) place_kernel(const __grid_constant__ ExpandArgs a) {
  __shared__ u32 warp_sums[33];
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  wait_for_previous_kernel();
  const Now now = read_now(d, x);
  if (__syncthreads_or(now.torn)) return;
  u8* own = d.region(d.me);
  const int* ids = reinterpret_cast<const int*>(own + x.at.recv_ids);
  const u32 k = d.topk;
  const bool arrival = x.layout == EP_LAYOUT_ARRIVAL;
  const u64 entries = arrival ? total_rows(d, x) : total_rows(d, x) * k;
  for (u32 run = blockIdx.x; run < runs_of(d, x); run += gridDim.x) {
    u32 base = 0;
    for (u64 first = 0; first < entries; first += blockDim.x) {
      const u64 e = first + threadIdx.x;
      bool mine = false;
      if (e < entries) {
        if (arrival)
          for (u32 j = 0; j < k; ++j) mine |= ids[e * k + j] >= 0;
        else
          mine = ids[e] == int(run);
      }
      u32 count;
      const u32 place = base + ordered_place(mine, warp_sums, &count);
      base += count;
      if (mine) a.relative[arrival ? e * k : e] = int(place);
    }
    if (threadIdx.x == 0) reinterpret_cast<int*>(own + x.at.slot_counts)[run] = int(base);
  }
  let_next_kernel_start();
}

// Where each run begins, for every block anew: at most some hundred numbers.
__device__ void run_offsets(const Domain& d, const Exchange& x, u32* offsets) {
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

// A warp per arrived row: read once, written to each of its places.
__global__ void __launch_bounds__(512) copy_kernel(const __grid_constant__ ExpandArgs a) {
  extern __shared__ u32 offsets[];
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  wait_for_previous_kernel();
  const Now now = read_now(d, x);
  if (__syncthreads_or(now.torn)) return;
  u8* own = d.region(d.me);
  run_offsets(d, x, offsets);
  const u32 runs = runs_of(d, x), k = d.topk, lane = threadIdx.x % 32;
  if (blockIdx.x == 0 && x.layout == EP_LAYOUT_CONTIGUOUS)
    for (u32 run = threadIdx.x; run <= runs; run += blockDim.x) reinterpret_cast<int*>(own + x.at.slot_offsets)[run] = int(offsets[run]);
  const bool arrival = x.layout == EP_LAYOUT_ARRIVAL;
  const u32 warps = gridDim.x * (blockDim.x / 32);
  for (u64 row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; row < total_rows(d, x); row += warps) {
    const int id = lane < k ? reinterpret_cast<const int*>(own + x.at.recv_ids)[row * k + lane] : -1;
    const u32 have = __ballot_sync(~0u, id >= 0);
    int to = -1;
    if (arrival) {
      const int place = have ? a.relative[row * k] : -1;
      if (lane == 0) to = place;
      if (lane < k) {
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
      reinterpret_cast<int*>(own + x.at.expanded_of)[row * k + lane] = to;
    }
    u32 targets = __ballot_sync(~0u, to >= 0);
    if (!targets) continue;
    const u8* from = own + x.at.rows + row * a.row_bytes;
    u8* rows = own + x.at.expanded;
    const u32 vectors = a.row_bytes / 16;
    for (u32 first = 0; first < vectors; first += 32 * 4) {
      const u32 v = first + lane;
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
    }
    if (a.scale_bytes)
      for (u32 bits = targets; bits; bits &= bits - 1) {
        const u32 place = __shfl_sync(~0u, u32(to), __ffs(bits) - 1);
        for (u32 s = lane; s < a.scale_bytes; s += 32)
          (own + x.at.expanded_scales)[u64(place) * a.scale_bytes + s] = (own + x.at.scales)[row * a.scale_bytes + s];
      }
  }
  let_next_kernel_start();
}

// A warp per token of every source: the weighted sum of its outputs here, in top-k order.
template <class Element>
__global__ void __launch_bounds__(512) reduce_kernel(const __grid_constant__ ExpandArgs a) {
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  wait_for_previous_kernel();
  const Now now = read_now(d, x);
  if (__syncthreads_or(now.torn)) return;
  u8* own = d.region(d.me);
  constexpr u32 kE = Element::kElements;
  const u32 lane = threadIdx.x % 32, k = d.topk, per = x.rows_per_token, vectors = u32(x.at.y_row_bytes / 16);
  const u32 warps = gridDim.x * (blockDim.x / 32);
  for (u32 token = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; token < d.ranks * x.cap; token += warps) {
    const u32 source = token / x.cap;
    if (!(d.state->mask[source / 32] >> (source % 32) & 1)) continue;
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
    if (!have) continue;
    const u32 whole = (vectors + 31) / 32 * 32;
    for (u32 v = lane; v < whole; v += 32) {
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
  let_next_kernel_start();
}

}  // namespace

cudaError_t load_expand() {
  return first_of({load(place_kernel), load(copy_kernel), load(reduce_kernel<Fp32>), load(reduce_kernel<Fp16>), load(reduce_kernel<Bf16>)});
}

cudaError_t launch_expand(const ExpandArgs& a, u32 grid, cudaStream_t stream) {
  const u32 runs = a.exchange.layout == EP_LAYOUT_ARRIVAL ? 1 : a.domain.slots;
  cudaError_t bad = launch(place_kernel, a, Shape{runs < grid ? runs : grid, kPlaceThreads, 0, a.early != 0}, stream);
  if (bad != cudaSuccess) return bad;
  return launch(copy_kernel, a, Shape{grid, 512, (a.domain.slots + 2) * 4, a.early != 0}, stream);
}

cudaError_t launch_reduce(const ExpandArgs& a, u32 grid, cudaStream_t stream) {
  const Shape shape{grid, 512, 0, a.early != 0};
  switch (a.exchange.combine_dtype) {
    case EP_FP32: return launch(reduce_kernel<Fp32>, a, shape, stream);
    case EP_FP16: return launch(reduce_kernel<Fp16>, a, shape, stream);
    case EP_BF16: return launch(reduce_kernel<Bf16>, a, shape, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace epc
