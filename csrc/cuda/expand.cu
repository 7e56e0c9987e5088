// Rows from the order in which they were pushed into the layout that the expert kernel wants, and back: two kernels that
// place and copy after dispatch, one that sums a token's outputs before combine. All order is by (source, token, k), so
// the same rows always land in the same places.
#include "expand.cuh"
#include "quantise.cuh"

namespace epc {

namespace {

constexpr u32 kPlaceThreads = 1024, kRowThreads = 512, kCountThreads = 1024;

// Outputs travel as 1 x 128 fp8 with their scales behind them.
__device__ __forceinline__ QuantFormat output_format() { return {EP_FP8, 8, false, 1.f}; }

// Sum over the block of the counts before this thread, and of all.
__device__ __forceinline__ u32 ordered_place(u32 mine, u32* warp_sums, u32* total) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u32 upto = mine;
  for (u32 step = 1; step < 32; step *= 2) {
    const u32 left = __shfl_up_sync(~0u, upto, step);
    if (lane >= step) upto += left;
  }
  if (lane == 31) warp_sums[warp] = upto;
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
  const u32 place = warp_sums[warp] + upto - mine;
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
  if (now.torn) return;
  u8* own = d.region(d.me);
  const int* ids = reinterpret_cast<const int*>(own + x.at.recv_ids);
  const u32 k = d.topk;
  const bool arrival = x.layout == EP_LAYOUT_ARRIVAL;
  const u64 entries = arrival ? total_rows(d, x) : total_rows(d, x) * k;
  for (u32 run = blockIdx.x; run < runs_of(d, x); run += gridDim.x) {
    u32 base = 0;
    for (u64 first = 0; first < entries; first += blockDim.x * kPerThread) {
      const u64 begin = first + threadIdx.x * kPerThread;
      u32 mine = 0;
      if (begin < entries)
#pragma unroll
        for (u32 i = 0; i < kPerThread; ++i) {
          const u64 e = begin + i;
          if (e >= entries) continue;
          bool hit = false;
          if (arrival)
            for (u32 j = 0; j < k; ++j) hit |= ids[e * k + j] >= 0;
          else
            hit = ids[e] == int(run);
          mine |= u32(hit) << i;
        }
      u32 count, place = base + ordered_place(__popc(mine), warp_sums, &count);
      base += count;
      for (u32 bits = mine; bits; bits &= bits - 1) {
        const u64 e = begin + __ffs(bits) - 1;
        a.relative[arrival ? e * k : e] = int(place++);
      }
    }
    if (threadIdx.x == 0) a.totals[run] = int(base);
  }
  let_next_kernel_start();
}

// The run of an entry, which is a choice of a row, or in arrival order a row.
__device__ __forceinline__ u16 run_at(const ExpandArgs& a, u64 e) {
  const Domain& d = a.domain;
  const int* ids = reinterpret_cast<const int*>(d.region(d.me) + a.exchange.at.recv_ids);
  if (a.exchange.layout != EP_LAYOUT_ARRIVAL) return u16(ids[e]);  // -1 is kNoSlot
  bool come = false;
  for (u32 j = 0; j < d.topk; ++j) come |= ids[e * d.topk + j] >= 0;
  return come ? 0 : kNoSlot;
}
__device__ __forceinline__ u64 entries_of(const ExpandArgs& a) {
  return total_rows(a.domain, a.exchange) * (a.exchange.layout == EP_LAYOUT_ARRIVAL ? 1 : a.domain.topk);
}

constexpr u32 kShareThreads = 512, kTile = 1024;

// The same in two kernels where runs are few: each block has a share of the entries. First: how many of each run are in it.
__global__ void __launch_bounds__(kShareThreads) count_runs_kernel(const __grid_constant__ ExpandArgs a) {
  __shared__ u32 counts[kPlaceRuns];
  wait_for_previous_kernel();
  const Now now = read_now(a.domain, a.exchange);
  if (now.torn) return;
  const u32 runs = runs_of(a.domain, a.exchange);
  for (u32 r = threadIdx.x; r < runs; r += blockDim.x) counts[r] = 0;
  __syncthreads();
  const u64 entries = entries_of(a), share = (entries + kPlaceBlocks - 1) / kPlaceBlocks, first = blockIdx.x * share;
  for (u64 e = first + threadIdx.x; e < first + share && e < entries; e += blockDim.x)
    if (const u16 run = run_at(a, e); run < runs) atomicAdd(counts + run, 1u);
  __syncthreads();
  for (u32 r = threadIdx.x; r < runs; r += blockDim.x) a.counted[blockIdx.x * runs + r] = counts[r];
  let_next_kernel_start();
}

// Second: behind those of earlier blocks, in order.
__global__ void __launch_bounds__(kShareThreads) place_share_kernel(const __grid_constant__ ExpandArgs a) {
  __shared__ u32 base[kPlaceRuns], total[kPlaceRuns];
  __shared__ __align__(16) u16 tile[kTile];
  wait_for_previous_kernel();
  const Now now = read_now(a.domain, a.exchange);
  if (now.torn) return;
  const u32 runs = runs_of(a.domain, a.exchange), lane = threadIdx.x % 32, warps = blockDim.x / 32;
  for (u32 r = threadIdx.x; r < runs; r += blockDim.x) base[r] = total[r] = 0;
  __syncthreads();
#pragma unroll 8
  for (u32 i = threadIdx.x; i < runs * kPlaceBlocks; i += blockDim.x) {
    const u32 n = a.counted[i], r = i % runs;
    if (!n) continue;
    atomicAdd(total + r, n);
    if (i / runs < blockIdx.x) atomicAdd(base + r, n);
  }
  __syncthreads();
  for (u32 r = threadIdx.x; blockIdx.x == 0 && r < runs; r += blockDim.x) a.totals[r] = int(total[r]);
  const u32 step = a.exchange.layout == EP_LAYOUT_ARRIVAL ? a.domain.topk : 1;
  const u64 entries = entries_of(a), share = (entries + kPlaceBlocks - 1) / kPlaceBlocks;
  const u64 end = min((blockIdx.x + 1) * share, entries);
  for (u64 first = blockIdx.x * share; first < end; first += kTile) {
    const u32 n = u32(min(end - first, u64(kTile)));
    for (u32 i = threadIdx.x; i < kTile; i += blockDim.x) tile[i] = i < n ? run_at(a, first + i) : kNoSlot;
    __syncthreads();
    for (u32 i = threadIdx.x / 32; i < n; i += warps)
      if (tile[i] < runs) {
        const u32 place = base[tile[i]] + place_of(tile, i);
        if (lane == 0) a.relative[(first + i) * step] = int(place);
      }
    __syncthreads();
    for (u32 i = threadIdx.x; i < n; i += blockDim.x)
      if (tile[i] < runs) atomicAdd(base + tile[i], 1u);
    __syncthreads();
  }
  let_next_kernel_start();
}

// A warp per part of an arrived row: read once, written to each of its places.
__global__ void __launch_bounds__(kRowThreads) copy_kernel(const __grid_constant__ ExpandArgs a) {
  extern __shared__ u32 offsets[];
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  wait_for_previous_kernel();
  const Now now = read_now(d, x);
  const u32 worker = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, warps = gridDim.x * (blockDim.x / 32);
  if (now.torn) return spoil_rows(a, worker, warps);
  const int* counts = a.totals;
  run_offsets(d, x, counts, offsets);
  if (!runs_fit(a, counts, offsets, blockIdx.x == 0)) return;
  if (blockIdx.x == 0) publish_counts(a);
  const u32 vectors = a.row_bytes / 16;
  if (x.layout == EP_LAYOUT_CONTIGUOUS) {
    int* published = reinterpret_cast<int*>(d.region(d.me) + x.at.slot_offsets);
    for (u32 run = threadIdx.x; blockIdx.x == 0 && run <= d.slots; run += blockDim.x) published[run] = int(offsets[run]);
    label_rows(a, counts, offsets, worker, warps);
  }
  const u32 parts = (vectors + kPartVectors - 1) / kPartVectors;
  const u64 items = total_rows(d, x) * parts;
  for (u64 item = worker; item < items; item += warps) {
    const u64 row = item / parts;
    const u32 part = u32(item % parts);
    copy_part(a, row, part, offsets);
  }
  let_next_kernel_start();
}

// Outputs in bf16 to rows of fp8 that others read. A warp per 512 elements of a token: the sum of its outputs here.
__global__ void __launch_bounds__(kRowThreads) reduce_fp8_kernel(const __grid_constant__ ExpandArgs a) {
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  wait_for_previous_kernel();
  const Now now = read_now(d, x);
  if (now.torn) return;
  u8* own = d.region(d.me);
  const u32 lane = threadIdx.x % 32, pieces = (d.hidden + 511) / 512, warps = gridDim.x * (blockDim.x / 32);
  for (u32 item = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; item < d.ranks * x.cap * pieces; item += warps) {
    const u32 token = item / pieces, at = item % pieces * 512 + lane * 16, source = token / x.cap;
    if (!d.state->has(source)) continue;
    const TokenOutputs t = outputs_of(a, token);
    const u32 have = __ballot_sync(~0u, t.place >= 0);
    if (!have) continue;
    float acc[16] = {};
    for (u32 bits = have; bits; bits &= bits - 1) {
      const u32 from = __ffs(bits) - 1, place = __shfl_sync(~0u, u32(t.place), from);
      const float w = __shfl_sync(~0u, t.weight, from);
      if (at >= d.hidden) continue;
      float v[16];
      load16(reinterpret_cast<const __nv_bfloat16*>(own + x.at.y_full) + u64(place) * d.hidden + at, v);
#pragma unroll
      for (u32 i = 0; i < 16; ++i) acc[i] = fmaf(v[i], w, acc[i]);
    }
    const Quantised q = quantise16(acc, output_format());
    u8* to = own + x.at.y_reduced + u64(token) * x.at.y_row_bytes;
    if (at < d.hidden) store_quantised(to, to + d.hidden, at / 16, q, output_format());
  }
  let_next_kernel_start();
}

// A warp per arrived row: every output of it that is owed.
__global__ void __launch_bounds__(kRowThreads) quantise_kernel(const __grid_constant__ ExpandArgs a) {
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  wait_for_previous_kernel();
  const Now now = read_now(d, x);
  if (now.torn) return;
  u8* own = d.region(d.me);
  const u32 lane = threadIdx.x % 32, k = d.topk, warps = gridDim.x * (blockDim.x / 32);
  const bool expands = x.expands(), per_expert = x.reduce == EP_REDUCE_PER_EXPERT;
  const bool exact = !expands && x.at.expanded_rows;
  for (u64 row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; row < x.at.sources * x.at.source_rows; row += warps) {
    const int id = lane < k ? reinterpret_cast<const int*>(own + x.at.recv_ids)[row * k + lane] : -1;
    const u32 have = __ballot_sync(~0u, id >= 0);
    if (!have) continue;
    int place = -1;
    if (x.at.expanded_rows && lane < k) place = reinterpret_cast<const int*>(own + x.at.expanded_of)[row * k + (exact ? 0 : lane)];
    for (u32 bits = expands || per_expert ? have : have & -have; bits; bits &= bits - 1) {
      const u32 choice = __ffs(bits) - 1;
      u64 at = x.at.expanded_rows ? u64(u32(__shfl_sync(~0u, place, choice))) : row;
      if (x.at.expanded_rows && at >= x.at.expanded_rows) continue;
      if (!expands && per_expert) at = at * k + choice;
      const u8* from = own + x.at.y_full + at * d.hidden * 2;
      u8* to = own + x.at.y + at * x.at.y_row_bytes;
      for (u32 e = lane * 16; e < (d.hidden + 511) / 512 * 512; e += 512) {
        float v[16] = {};
        if (e < d.hidden) load16(reinterpret_cast<const __nv_bfloat16*>(from) + e, v);
        const Quantised q = quantise16(v, output_format());
        if (e < d.hidden) store_quantised(to, to + d.hidden, e / 16, q, output_format());
      }
    }
  }
  let_next_kernel_start();
}

// The exact count for the host, when all that came before has run (cpu_sync).
__global__ void __launch_bounds__(kCountThreads) count_kernel(const __grid_constant__ CountArgs c) {
  const Domain& d = c.domain;
  const Exchange& x = c.exchange;
  wait_for_previous_kernel();
  const u8* own = d.region(d.me);
  const u32 torn = load_relaxed(&d.state->torn), k = d.topk;
  __shared__ u32 arrived;
  if (threadIdx.x == 0) arrived = 0;
  __syncthreads();
  const int* ids = reinterpret_cast<const int*>(own + x.at.recv_ids);
  u32 mine = 0;
  for (u64 row = threadIdx.x; !torn && row < total_rows(d, x); row += blockDim.x) {
    bool come = false;
    for (u32 j = 0; j < k; ++j) come |= ids[row * k + j] >= 0;
    mine += come;
  }
  atomicAdd(&arrived, mine);
  __syncthreads();
  if (threadIdx.x) return;
  const bool contiguous = x.layout == EP_LAYOUT_CONTIGUOUS;
  const int rows = contiguous ? reinterpret_cast<const int*>(own + x.at.slot_offsets)[d.slots] : slot_counts(d, x)[0];
  store_relaxed(&c.out->rows, torn ? 0ull : u64(u32(rows)));
  store_relaxed(&c.out->arrived, u64(arrived));
  store_relaxed(&c.out->torn, u64(torn != 0));
  fence_system();
  store_relaxed(&c.out->ticket, c.ticket);
}

// A warp per part of a token of any source: the weighted sum of its outputs here, in top-k order.
template <class Element>
__global__ void __launch_bounds__(kRowThreads) reduce_kernel(const __grid_constant__ ExpandArgs a) {
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  wait_for_previous_kernel();
  const Now now = read_now(d, x);
  if (now.torn) return;
  const u32 vectors = u32(x.at.y_row_bytes / 16);
  const u32 warps = gridDim.x * (blockDim.x / 32);
  const u32 parts = (vectors + kReduceVectors - 1) / kReduceVectors;
  for (u32 item = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; item < d.ranks * x.cap * parts; item += warps) {
    const u32 token = item / parts, begin = item % parts * kReduceVectors;
    const u32 source = token / x.cap;
    if (d.state->has(source)) reduce_part<Element>(a, token, begin);
  }
  let_next_kernel_start();
}

}  // namespace

cudaError_t load_expand() {
  return first_of({load(place_kernel), load(count_runs_kernel), load(place_share_kernel), load(copy_kernel), load(reduce_kernel<Fp32>),
                   load(reduce_kernel<Fp16>), load(reduce_kernel<Bf16>), load(reduce_fp8_kernel), load(quantise_kernel), load(count_kernel)});
}

cudaError_t launch_place(const ExpandArgs& a, u32 grid, cudaStream_t stream) {
  const u32 runs = runs_of(a.domain, a.exchange);
  if (a.counted) {
    const Shape shape{kPlaceBlocks, kShareThreads, 0, a.early != 0};
    const cudaError_t bad = launch(count_runs_kernel, a, shape, stream);
    return bad != cudaSuccess ? bad : launch(place_share_kernel, a, shape, stream);
  }
  return launch(place_kernel, a, Shape{runs < 2 * grid ? runs : 2 * grid, kPlaceThreads, 0, a.early != 0}, stream);
}

cudaError_t launch_expand(const ExpandArgs& a, u32 grid, cudaStream_t stream) {
  cudaError_t bad = launch_place(a, grid, stream);
  if (bad != cudaSuccess) return bad;
  return launch(copy_kernel, a, Shape{grid, kRowThreads, run_offsets_bytes(a.domain, a.exchange), a.early != 0}, stream);
}

cudaError_t launch_reduce(const ExpandArgs& a, u32 grid, cudaStream_t stream) {
  const Shape shape{grid, kRowThreads, 0, a.early != 0};
  switch (a.exchange.combine_dtype) {
    case EP_FP32: return launch(reduce_kernel<Fp32>, a, shape, stream);
    case EP_FP16: return launch(reduce_kernel<Fp16>, a, shape, stream);
    case EP_BF16: return launch(reduce_kernel<Bf16>, a, shape, stream);
    case EP_FP8: return launch(reduce_fp8_kernel, a, shape, stream);
    default: return cudaErrorInvalidValue;
  }
}

cudaError_t launch_quantise(const ExpandArgs& a, u32 grid, cudaStream_t stream) {
  return launch(quantise_kernel, a, Shape{grid, kRowThreads, 0, a.early != 0}, stream);
}

cudaError_t launch_count(const CountArgs& a, cudaStream_t stream) { return launch(count_kernel, a, Shape{1, kCountThreads, 0, false}, stream); }

}  // namespace epc
