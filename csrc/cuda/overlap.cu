// Large batches in the expert kernel's layout. Some blocks keep the link busy, the others do the local work behind it:
// rows are placed as their chunks arrive, outputs are summed chunk by chunk as they are pulled. The tails have come
// before (NoRows), so every row's place is known when it lands. No block waits for another of its own grid.
#include "expand.cuh"
#include "pull.cuh"
#include "push.cuh"

namespace epc {

namespace {

constexpr u32 kThreads = 1024;

// The targets of a chunk's rows as they were noted when the tails were sent.
__device__ __forceinline__ void recall_targets(const DispatchArgs& a, const Chunk& c, bool skip_own, ChunkTargets& out) {
  const Domain& d = a.domain;
  const u32 lane = threadIdx.x % 32;
  for (u32 i = threadIdx.x / 32; i < c.rows; i += blockDim.x / 32) {
    u32 served = lane < d.topk ? a.exchange.route[u64(c.row(i)) * d.topk + lane] : kNobody;
    if (skip_own && served >> 16 == d.me) served = kNobody;
    const Mask m = gather_mask(served, d.ranks);
    if (lane == 0) out.mask[i] = m;
  }
}

__device__ __forceinline__ void push_chunks(const PushArgs& p, const Now& now, u8* shared, ChunkTargets& targets) {
  const DispatchArgs& a = p.dispatch;
  BulkRows rows;
  rows.attach(shared);
  for (u32 index = blockIdx.x; index < a.exchange.gpu.chunks; index += p.pushers) {
    const Chunk c = chunk_of(index, a.exchange.gpu.chunks, a.tokens);
    rows.prefetch(a, c);
    recall_targets(a, c, p.expand.own != nullptr, targets);
    __syncthreads();
    rows.push(a, c, targets);
    __syncthreads();
    announce(a, now, c, targets, false);
    __syncthreads();
  }
}

// Every part of some sources' rows of a chunk to its places. Of the others the first `skip` ranks after this one are left out.
__device__ __forceinline__ void copy_chunk(const ExpandArgs& a, u32 chunk, u32 skip, u32 sources, const u32* offsets) {
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  const u32 rows = u32(x.at.source_rows), per = (rows - chunk + x.gpu.chunks - 1) / x.gpu.chunks;
  const u32 parts = (a.row_bytes / 16 + kPartVectors - 1) / kPartVectors, warps = blockDim.x / 32;
  for (u32 item = threadIdx.x / 32; item < sources * per * parts; item += warps) {
    const u32 part = item % parts, i = item / parts % per, source = (d.me + skip + item / parts / per) % d.ranks;
    copy_part(a, u64(source) * rows + chunk + u64(i) * x.gpu.chunks, part, offsets);
  }
}

__device__ __forceinline__ void expand_chunks(const PushArgs& p, const Now& now, u32* offsets) {
  const Domain& d = p.dispatch.domain;
  const Exchange& x = p.dispatch.exchange;
  u8* own = d.region(d.me);
  const u32 block = blockIdx.x - p.pushers, blocks = gridDim.x - p.pushers, warps = blockDim.x / 32;
  const int* counts = p.expand.totals;
  run_offsets(d, x, counts, offsets);
  if (!runs_fit(p.expand, counts, offsets, block == 0)) return;
  if (block == 0) publish_counts(p.expand);
  if (x.layout == EP_LAYOUT_CONTIGUOUS) {
    for (u32 run = threadIdx.x; block == 0 && run <= d.slots; run += blockDim.x) reinterpret_cast<int*>(own + x.at.slot_offsets)[run] = int(offsets[run]);
    label_rows(p.expand, counts, offsets, block * warps + threadIdx.x / 32, blocks * warps);
  }
  // Own rows need no link: they fill the time until the others' come.
  const u32 skip = p.expand.own ? 1 : 0;
  for (u32 chunk = block; chunk < x.gpu.chunks; chunk += blocks) {
    if (skip) copy_chunk(p.expand, chunk, 0, 1, offsets);
    bool ok = true;
    if (threadIdx.x < now.members) {
      TaggedWord got;
      auto cell = reinterpret_cast<const TaggedWord*>(own + x.gpu.arrival) + u64(now.peer) * x.gpu.chunks + chunk;
      ok = wait_for(d, cell, now.tag, now.peer, kPhaseDispatch, x.index, &got);
    }
    if (__syncthreads_or(!ok)) return;
    copy_chunk(p.expand, chunk, skip, d.ranks - skip, offsets);
  }
}

__global__ void __launch_bounds__(kThreads, 1) push_and_expand_kernel(const __grid_constant__ PushArgs p) {
  extern __shared__ __align__(128) u8 shared[];
  __shared__ ChunkTargets targets;
  BulkRows::begin(shared);
  wait_for_previous_kernel();
  const Now now = read_now(p.dispatch.domain, p.dispatch.exchange);
  if (now.torn) {
    const u32 warps = blockDim.x / 32, block = blockIdx.x - p.pushers;
    if (blockIdx.x >= p.pushers) spoil_rows(p.expand, block * warps + threadIdx.x / 32, (gridDim.x - p.pushers) * warps);
    return;
  }
  if (blockIdx.x < p.pushers)
    push_chunks(p, now, shared, targets);
  else
    expand_chunks(p, now, reinterpret_cast<u32*>(shared + kBulkBarrierBytes));
  let_next_kernel_start();
}

// Sums this rank's outputs of every chunk for the other ranks, and tells them. Its own it adds when it pulls.
template <class Element>
__device__ __forceinline__ void reduce_chunks(const PullArgs& p, const Now& now) {
  const Domain& d = p.combine.domain;
  const Exchange& x = p.combine.exchange;
  const u32 block = blockIdx.x - p.pullers, blocks = gridDim.x - p.pullers, warps = blockDim.x / 32;
  const u32 parts = (u32(x.at.y_row_bytes / 16) + kReduceVectors - 1) / kReduceVectors;
  for (u32 chunk = block; chunk < x.gpu.sum_chunks; chunk += blocks) {
    const u32 per = (x.cap - chunk + x.gpu.sum_chunks - 1) / x.gpu.sum_chunks;
    for (u32 item = threadIdx.x / 32; item < (d.ranks - 1) * per * parts; item += warps) {
      const u32 part = item % parts, i = item / parts % per, source = (d.me + 1 + item / parts / per) % d.ranks;
      if (d.state->has(source))
        reduce_part<Element>(p.expand, source * x.cap + chunk + i * x.gpu.sum_chunks, part * kReduceVectors);
    }
    __syncthreads();
    if (threadIdx.x < now.members) {
      fence_system();
      store_relaxed(reinterpret_cast<u64*>(d.region(now.peer) + x.gpu.reduced) + u64(d.me) * x.gpu.sum_chunks + chunk, now.tag);
    }
  }
  announce_summed(p.combine, now, blocks);
}

template <class Element>
__device__ __forceinline__ void pull_chunks(const PullArgs& p, const Now& now, u8* shared, Owed& owed) {
  const CombineArgs& a = p.combine;
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  BulkPull<Element> rows;
  rows.attach(shared);
  for (u32 chunk = blockIdx.x; chunk < x.gpu.sum_chunks; chunk += p.pullers) {
    const u32 n = a.tokens > chunk ? (a.tokens - chunk + x.gpu.sum_chunks - 1) / x.gpu.sum_chunks : 0;
    list_owed<true>(a, chunk, n, x.gpu.sum_chunks, owed);
    bool ok = true;
    if (threadIdx.x < now.members && now.peer != d.me) {
      u64 got;
      auto flag = reinterpret_cast<const u64*>(d.region(d.me) + x.gpu.reduced) + u64(now.peer) * x.gpu.sum_chunks + chunk;
      ok = wait_for(d, flag, now.tag, now.peer, kPhaseCombine, x.index, &got);
    }
    if (__syncthreads_or(!ok)) return;
    fence_bulk();
    if (threadIdx.x < kBulkWarps * 32) rows.pull(a, chunk, n, x.gpu.sum_chunks, 0, owed);
    __syncthreads();
  }
}

template <class Element>
__global__ void __launch_bounds__(kThreads, 1) reduce_and_pull_kernel(const __grid_constant__ PullArgs p) {
  extern __shared__ __align__(128) u8 shared[];
  __shared__ Owed owed;
  BulkPull<Element>::begin(shared);
  wait_for_previous_kernel();
  const Now now = read_now(p.combine.domain, p.combine.exchange);
  count_exchange(p.combine, now);
  if (now.torn) return;
  if (blockIdx.x < p.pullers)
    pull_chunks<Element>(p, now, shared, owed);
  else
    reduce_chunks<Element>(p, now);
  let_next_kernel_start();
}

}  // namespace

cudaError_t load_overlap() {
  return first_of({load(push_and_expand_kernel, kPushShared), load(reduce_and_pull_kernel<Fp32>, kPullShared),
                   load(reduce_and_pull_kernel<Fp16>, kPullShared), load(reduce_and_pull_kernel<Bf16>, kPullShared)});
}

cudaError_t launch_push_and_expand(const PushArgs& a, const Shape& shape, cudaStream_t stream) {
  return launch(push_and_expand_kernel, a, {shape.grid, kThreads, kPushShared, shape.early}, stream);
}

cudaError_t launch_reduce_and_pull(const PullArgs& a, const Shape& shape, cudaStream_t stream) {
  const Shape s{shape.grid, kThreads, kPullShared, shape.early};
  switch (a.combine.exchange.combine_dtype) {
    case EP_FP32: return launch(reduce_and_pull_kernel<Fp32>, a, s, stream);
    case EP_FP16: return launch(reduce_and_pull_kernel<Fp16>, a, s, stream);
    case EP_BF16: return launch(reduce_and_pull_kernel<Bf16>, a, s, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace epc
