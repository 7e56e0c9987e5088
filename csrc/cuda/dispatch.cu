// Dispatch: every source pushes its rows into [source][row] of the ranks that need them, then one word per chunk that
// says which rows came. No counts are exchanged, no slots are handed out, no block waits for another of its grid.
#include "send.cuh"

namespace epc {

namespace {

// A chunk of one row per source: a thread per (member, k) looks at flag and tail together.
__device__ __forceinline__ bool receive_row(const DispatchArgs& a, const Now& now, u32 chunk) {
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  u8* own = d.region(d.me);
  const u32 k = d.topk;
  bool ok = true;
  for (u32 item = threadIdx.x; item < d.ranks * k && ok; item += blockDim.x) {
    const u32 source = item / k;
    const bool speaks = chunk == 0 && item % k == 0;  // of the whole source
    const u64 at = (u64(source) * x.at.source_rows + chunk) * k + item % k;
    auto tail_at = reinterpret_cast<const TaggedWord*>(own + x.gpu.tails) + at;
    TaggedWord tail{}, head{}, got{};
    if (d.state->has(source)) {
      auto cell = reinterpret_cast<const TaggedWord*>(own + x.gpu.arrival) + u64(source) * x.gpu.chunks + chunk;
      ok = wait_for(d, cell, now.tag, source, kPhaseDispatch, x.index, &got, [&] {
        tail = load_relaxed(tail_at);
        if (speaks) head = load_relaxed(head_of(a, source));
      });
      if (got.word & 1 && tail.tag != now.tag) tail = load_relaxed(tail_at);
      if (ok && speaks) ok = note_head(a, now, source, head);
    } else if (speaks) {
      write_arrival(a, source, 0, 0, 0.f);
    }
    note_tail(a, at, ok && got.word & 1, tail);
  }
  return ok;
}

// Waits for this chunk of every member and writes the ids and weights of its rows.
__device__ __forceinline__ bool receive_chunk(const DispatchArgs& a, const Now& now, u32 chunk, ChunkTargets& t) {
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  const u32 rows = u32(x.at.source_rows), k = d.topk;
  const u32 per = rows > chunk ? (rows - chunk + x.gpu.chunks - 1) / x.gpu.chunks : 0;
  if (per == 1) return !__syncthreads_or(!receive_row(a, now, chunk));
  u8* own = d.region(d.me);
  for (u32 r = threadIdx.x; r < d.ranks; r += blockDim.x) {
    t.bits[r] = 0;
    if (chunk == 0 && !d.state->has(r)) write_arrival(a, r, 0, 0, 0.f);
  }
  __syncthreads();
  bool ok = true;
  if (threadIdx.x < now.members) {
    auto cell = reinterpret_cast<const TaggedWord*>(own + x.gpu.arrival) + u64(now.peer) * x.gpu.chunks + chunk;
    TaggedWord got;
    ok = wait_for(d, cell, now.tag, now.peer, kPhaseDispatch, x.index, &got);
    if (ok) t.bits[now.peer] = got.word;
    if (ok && chunk == 0) ok = note_head(a, now, now.peer, TaggedWord{});
  }
  if (__syncthreads_or(!ok)) return false;
  for (u32 item = threadIdx.x; item < d.ranks * per * k; item += blockDim.x) {
    const u32 rest = item / k, i = rest % per, source = rest / per;
    const u64 at = (u64(source) * rows + chunk + u64(i) * x.gpu.chunks) * k + item % k;
    const bool here = t.bits[source] >> i & 1;
    note_tail(a, at, here, here ? load_relaxed(reinterpret_cast<const TaggedWord*>(own + x.gpu.tails) + at) : TaggedWord{});
  }
  return true;
}

template <class Payload>
__global__ void __launch_bounds__(Payload::kMaxThreads, Payload::kMinBlocks) dispatch_kernel(const __grid_constant__ DispatchArgs a) {
  extern __shared__ __align__(128) u8 shared[];
  __shared__ SendShared s;
  const Exchange& x = a.exchange;
  Now now;
  if (!send_rows<Payload>(a, shared, s, now)) return;
  let_next_kernel_start();
  if (a.half & kReceive)
    for (u32 chunk = blockIdx.x; chunk < x.gpu.chunks; chunk += gridDim.x) {
      __syncthreads();
      if (!receive_chunk(a, now, chunk, s.targets)) return;
    }
}

template <class Payload>
cudaError_t start(const DispatchArgs& a, const Shape& shape, cudaStream_t stream) {
  return launch(dispatch_kernel<Payload>, a, shape, stream);
}

// A block that quantises several rows asks for the next ones meanwhile. One that has a single row is small, so that the kernel
// behind it fits beside it.
template <class T>
cudaError_t start_quantised(const DispatchArgs& a, Shape shape, cudaStream_t stream) {
  const Exchange& x = a.exchange;
  if (a.tokens * x.rows_per_token <= x.gpu.chunks) return start<QuantisedRows<T, false>>(a, shape, stream);
  if (shape.threads + 32 <= QuantisedRows<T, true>::kMaxThreads) shape.threads += 32;  // a warp that routes while the others quantise
  return start<QuantisedRows<T, true>>(a, shape, stream);
}
template <class T>
cudaError_t load_quantised() {
  return first_of({load(dispatch_kernel<QuantisedRows<T, false>>), load(dispatch_kernel<QuantisedRows<T, true>>)});
}

}  // namespace

cudaError_t launch_dispatch(const DispatchArgs& a, Payload payload, const Shape& shape, cudaStream_t stream) {
  switch (payload) {
    case Payload::kRaw: return start<RawRows>(a, shape, stream);
    case Payload::kBulk: return start<BulkRows>(a, shape, stream);
    case Payload::kNone: return start<NoRows>(a, shape, stream);
    case Payload::kFromFp32: return start_quantised<float>(a, shape, stream);
    case Payload::kFromFp16: return start_quantised<__half>(a, shape, stream);
    case Payload::kFromBf16: return start_quantised<__nv_bfloat16>(a, shape, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t load_dispatch() {
  return first_of({load(dispatch_kernel<RawRows>), load(dispatch_kernel<BulkRows>, kPushShared), load(dispatch_kernel<NoRows>),
                   load_quantised<float>(), load_quantised<__half>(), load_quantised<__nv_bfloat16>()});
}

}  // namespace epc
