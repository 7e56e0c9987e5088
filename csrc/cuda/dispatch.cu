// Dispatch: every source pushes its rows into [source][row] of the ranks that need them, then one word per chunk that
// says which rows came. No counts are exchanged, no slots are handed out, no block waits for another of its grid.
#include "push.cuh"
#include "quantise.cuh"

namespace epc {

namespace {

// What a warp needs to route its first row of a chunk; asked for before anything is known, so that one trip to memory
// brings the step's state, the ids and the map.
struct Ahead {
  long long id;
  float weight;
};

__device__ __forceinline__ Ahead read_routing(const DispatchArgs& a, u32 row) {
  const u32 lane = threadIdx.x % 32;
  const u64 at = u64(row / a.exchange.rows_per_token) * a.domain.topk + lane;
  Ahead r{-1, 0.f};
  if (lane < a.domain.topk) {
    r.id = a.ids_wide ? __ldg(static_cast<const long long*>(a.ids) + at) : __ldg(static_cast<const int*>(a.ids) + at);
    r.weight = a.weights ? __ldg(a.weights + at) : 1.f;
  }
  return r;
}

// A warp per row: who serves its experts, where they are noted for combine, and the tails to every target.
__device__ __forceinline__ void route_chunk(const DispatchArgs& a, const Now& now, const Chunk& c, Ahead ahead, const Copies* map,
                                            ChunkTargets& out) {
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  const u32 lane = threadIdx.x % 32, warps = blockDim.x / 32, k = d.topk;
  for (u32 i = threadIdx.x / 32; i < c.rows; i += warps) {
    const u32 row = c.row(i), token = row / x.rows_per_token, only = row % x.rows_per_token;
    Ahead next{-1, 0.f};
    if (i + warps < c.rows) next = read_routing(a, c.row(i + warps));
    const u64 at = u64(token) * k + lane;
    const bool first = x.rows_per_token == 1 || only == 0;
    u32 served = kNobody;
    bool lost = false;
    if (ahead.id >= 0 && ahead.id < d.experts) {
      const u32 expert = u32(ahead.id);
      served = serve(d, now, map[expert], a.layer, expert, token);
      lost = served == kNobody;
      if (d.count_loads && first) atomicAdd(d.pending + u64(a.layer) * d.experts + expert, 1u);
    }
    if (lane < k && first) {
      x.route[at] = served;
      x.route_weights[at] = ahead.weight;
    }
    const bool any_lost = __any_sync(~0u, lost);
    if (a.lost && lane == 0) a.lost[token] = any_lost;
    if (x.rows_per_token > 1 && lane != only) served = kNobody;
    Mask m = gather_mask(served, d.ranks);
    if (x.copies == EP_COPIES_ALL)
      for (u32 w = 0; w < kMaskWords; ++w) m.word[w] = d.state->mask[w];
    if (lane == 0) out.mask[i] = m;
    const u64 tail = x.gpu.tails + ((u64(d.me) * x.at.source_rows + row) * k + lane) * sizeof(TaggedWord);
    if (lane < k)
      m.each([&](u32 g) {
        const u32 slot = served != kNobody && served >> 16 == g ? served & 0xffff : kNobody;
        store_relaxed(reinterpret_cast<TaggedWord*>(d.region(g) + tail), {now.tag, slot | u64(__float_as_uint(ahead.weight)) << 32});
      });
    ahead = next;
  }
}

// Tails only: the rows follow in a kernel of their own (overlap.cu).
struct NoRows {
  static constexpr u32 kMaxThreads = 512;
  static constexpr bool kEarly = true;
  static __device__ __forceinline__ void begin(const DispatchArgs&, u8*) {}
  __device__ __forceinline__ void prefetch(const DispatchArgs&, const Chunk&) {}
  __device__ __forceinline__ void push(const DispatchArgs&, const Chunk&, const ChunkTargets&) {}
};

// Quantised on the way: a lane holds 16 elements; 8, 2 or 1 lanes share a scale.
template <class T>
struct QuantisedRows {
  static constexpr u32 kMaxThreads = 512;
  static constexpr bool kEarly = false;
  static __device__ __forceinline__ void begin(const DispatchArgs&, u8*) {}
  __device__ __forceinline__ void prefetch(const DispatchArgs&, const Chunk&) {}
  __device__ __forceinline__ void attach(u8*) {}
  __device__ __forceinline__ void push(const DispatchArgs& a, const Chunk& c, const ChunkTargets& t) {
    const Domain& d = a.domain;
    const ep::ChannelLayout& l = a.exchange.at;
    const u32 units = d.hidden / 16, whole = (units + 31) / 32 * 32;
    for (u32 i = 0; i < c.rows; ++i) {
      const u32 row = c.row(i);
      const u64 at = u64(d.me) * l.source_rows + row;
      const Mask m = t.mask[i];
      for (u32 u = threadIdx.x; u < whole; u += blockDim.x) {
        const bool in = u < units;
        float v[16];
        if (in)
          load16(reinterpret_cast<const T*>(a.x) + u64(row / a.exchange.rows_per_token) * d.hidden + u * 16, v);
        else
          for (float& e : v) e = 0.f;
        const Quantised q = quantise16(v, a.exchange.dispatch_dtype, a.block_lanes);
        if (!in) continue;
        m.each([&](u32 g) {
          u8* region = d.region(g);
          store_quantised(region + l.rows + at * a.row_bytes, region + l.scales + at * l.scale_bytes, u, q, a.exchange.dispatch_dtype,
                          a.block_lanes);
        });
      }
    }
  }
};

// What a tail says; what an absent or unknown row says is never believed.
__device__ __forceinline__ void note_tail(const DispatchArgs& a, u64 at, bool here, const TaggedWord& tail) {
  const Exchange& x = a.exchange;
  u8* own = a.domain.region(a.domain.me);
  const bool valid = here && u32(tail.word) < a.domain.slots;
  reinterpret_cast<int*>(own + x.at.recv_ids)[at] = valid ? int(u32(tail.word)) : -1;
  reinterpret_cast<float*>(own + x.at.recv_weights)[at] = valid ? __uint_as_float(u32(tail.word >> 32)) : 0.f;
}

// A chunk of one row per source: a thread per (member, k) looks at flag and tail together.
__device__ __forceinline__ bool receive_row(const DispatchArgs& a, const Now& now, u32 chunk, u64 cells) {
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  u8* own = d.region(d.me);
  const u32 k = d.topk;
  bool ok = true;
  for (u32 item = threadIdx.x; item < d.ranks * k && ok; item += blockDim.x) {
    const u32 source = item / k;
    const u64 at = (u64(source) * x.at.source_rows + chunk) * k + item % k;
    auto tail_at = reinterpret_cast<const TaggedWord*>(own + x.gpu.tails) + at;
    TaggedWord tail{}, got{};
    if (d.state->mask[source / 32] >> (source % 32) & 1) {
      auto cell = reinterpret_cast<const TaggedWord*>(own + cells) + u64(source) * x.gpu.chunks + chunk;
      ok = wait_for(d, cell, now.tag, source, kPhaseDispatch, x.index, &got, [&] { tail = load_relaxed(tail_at); });
      if (got.word & 1 && tail.tag != now.tag) tail = load_relaxed(tail_at);
    }
    note_tail(a, at, ok && got.word & 1, tail);
  }
  return ok;
}

// Waits for this chunk of every member and writes the ids and weights of its rows.
__device__ __forceinline__ bool receive_chunk(const DispatchArgs& a, const Now& now, u32 chunk, u64 cells, ChunkTargets& t) {
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  const u32 rows = u32(x.at.source_rows), k = d.topk;
  const u32 per = rows > chunk ? (rows - chunk + x.gpu.chunks - 1) / x.gpu.chunks : 0;
  if (per == 1) return !__syncthreads_or(!receive_row(a, now, chunk, cells));
  u8* own = d.region(d.me);
  for (u32 r = threadIdx.x; r < d.ranks; r += blockDim.x) t.bits[r] = 0;
  __syncthreads();
  bool ok = true;
  if (threadIdx.x < now.members) {
    auto cell = reinterpret_cast<const TaggedWord*>(own + cells) + u64(now.peer) * x.gpu.chunks + chunk;
    TaggedWord got;
    ok = wait_for(d, cell, now.tag, now.peer, kPhaseDispatch, x.index, &got);
    if (ok) t.bits[now.peer] = got.word;
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

__device__ __forceinline__ void attach(BulkRows& rows, u8* shared) { rows.attach(shared); }
template <class P>
__device__ __forceinline__ void attach(P&, u8*) {}

// The layer's map of experts to copies: in shared memory when it fits.
constexpr u32 kMapEntries = 1024;

template <class Payload>
__global__ void __launch_bounds__(Payload::kMaxThreads) dispatch_kernel(const __grid_constant__ DispatchArgs a) {
  extern __shared__ __align__(128) u8 shared[];
  __shared__ ChunkTargets targets;
  __shared__ int4 map_copy[kMapEntries];
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  const u32 rows = a.tokens * x.rows_per_token;
  const u64 cells = Payload::kEarly ? x.gpu.early : x.gpu.arrival;
  Payload payload;
  Payload::begin(a, shared);
  attach(payload, shared);
  Chunk c = chunk_of(blockIdx.x, x.gpu.chunks, rows);
  const Copies* map = d.active + u64(a.layer) * d.experts;
  wait_for_previous_kernel();
  Ahead ahead{-1, 0.f};
  if (a.half & kSend) {
    if (threadIdx.x / 32 < c.rows) ahead = read_routing(a, c.row(threadIdx.x / 32));
    payload.prefetch(a, c);
    if (d.experts <= kMapEntries && c.rows) {
      for (u32 e = threadIdx.x; e < d.experts; e += blockDim.x) map_copy[e] = reinterpret_cast<const int4*>(map)[e];
      map = reinterpret_cast<const Copies*>(map_copy);
    }
  }
  const Now now = read_now(d, x);
  if (__syncthreads_or(now.torn)) return;
  if (a.half & kSend) {
    if (blockIdx.x == 0 && threadIdx.x == 0) d.state->opened[x.channel] = now.sequence + 1;
    for (;;) {
      route_chunk(a, now, c, ahead, map, targets);
      __syncthreads();
      payload.push(a, c, targets);
      __syncthreads();
      announce(a, now, c, targets, cells);
      const u32 following = c.index + gridDim.x;
      if (following >= x.gpu.chunks) break;
      c = chunk_of(following, x.gpu.chunks, rows);
      if (threadIdx.x / 32 < c.rows) ahead = read_routing(a, c.row(threadIdx.x / 32));
      payload.prefetch(a, c);
      __syncthreads();
    }
  }
  let_next_kernel_start();
  if (a.half & kReceive)
    for (u32 chunk = blockIdx.x; chunk < x.gpu.chunks; chunk += gridDim.x) {
      __syncthreads();
      if (!receive_chunk(a, now, chunk, cells, targets)) return;
    }
}

template <class Payload>
cudaError_t start(const DispatchArgs& a, const Shape& shape, cudaStream_t stream) {
  return launch(dispatch_kernel<Payload>, a, shape, stream);
}

}  // namespace

cudaError_t launch_dispatch(const DispatchArgs& a, Payload payload, const Shape& shape, cudaStream_t stream) {
  switch (payload) {
    case Payload::kRaw: return start<RawRows>(a, shape, stream);
    case Payload::kBulk: return start<BulkRows>(a, shape, stream);
    case Payload::kNone: return start<NoRows>(a, shape, stream);
    case Payload::kFromFp32: return start<QuantisedRows<float>>(a, shape, stream);
    case Payload::kFromFp16: return start<QuantisedRows<__half>>(a, shape, stream);
    case Payload::kFromBf16: return start<QuantisedRows<__nv_bfloat16>>(a, shape, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t load_dispatch() {
  return first_of({load(dispatch_kernel<RawRows>), load(dispatch_kernel<BulkRows>, kPushShared), load(dispatch_kernel<NoRows>), load(dispatch_kernel<QuantisedRows<float>>),
                   load(dispatch_kernel<QuantisedRows<__half>>), load(dispatch_kernel<QuantisedRows<__nv_bfloat16>>)});
}

}  // namespace epc
