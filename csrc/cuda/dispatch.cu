// Dispatch: every source pushes its rows into [source][row] of the ranks that need them, then one word per chunk that
// says which rows came. No counts are exchanged, no slots are handed out, no block waits for another of its grid.
#include "kernels.h"
#include "quantise.cuh"
#include "routing.cuh"

namespace epc {

namespace {

constexpr u32 kRouteRows = kChunkRows;

struct ChunkTargets {
  Mask mask[kRouteRows];
  u64 bits[kMaxRanks];
};

struct Chunk {
  u32 index, rows, first, stride;  // row i is first + i * stride
  __device__ __forceinline__ u32 row(u32 i) const { return first + i * stride; }
};

__device__ __forceinline__ Chunk chunk_of(u32 index, u32 chunks, u32 rows) {
  return {index, rows > index ? (rows - index + chunks - 1) / chunks : 0, index, chunks};
}

// A warp per row: who serves its experts, where they are noted for combine, and the tails to every target.
__device__ __forceinline__ void route_chunk(const DispatchArgs& a, const Now& now, const Chunk& c, ChunkTargets& out) {
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  const u32 lane = threadIdx.x % 32, warps = blockDim.x / 32, k = d.topk;
  for (u32 i = threadIdx.x / 32; i < c.rows; i += warps) {
    const u32 row = c.row(i), token = row / x.rows_per_token, only = row % x.rows_per_token;
    u32 served = kNobody;
    float weight = 0.f;
    bool lost = false;
    if (lane < k) {
      const u64 at = u64(token) * k + lane;
      const long long id = a.ids_wide ? static_cast<const long long*>(a.ids)[at] : static_cast<const int*>(a.ids)[at];
      weight = a.weights ? a.weights[at] : 1.f;
      if (id >= 0 && id < d.experts) {
        served = serve(d, now, a.layer, u32(id), token);
        lost = served == kNobody;
        if (d.count_loads && (x.rows_per_token == 1 || only == 0)) atomicAdd(d.pending + u64(a.layer) * d.experts + id, 1u);
      }
      if (x.rows_per_token == 1 || only == 0) {
        x.route[at] = served;
        x.route_weights[at] = weight;
      }
    }
    const bool any_lost = __any_sync(~0u, lost);
    if (a.lost && lane == 0) a.lost[token] = any_lost;
    if (x.rows_per_token > 1 && lane != only) served = kNobody;
    Mask m = gather_mask(served, d.ranks);
    if (x.copies == EP_COPIES_ALL)
      for (u32 w = 0; w < kMaskWords; ++w) m.word[w] = d.state->mask[w];
    if (lane == 0) out.mask[i] = m;
    const u64 tail = (u64(d.me) * x.at.source_rows + row) * k + lane;
    if (lane < k)
      m.each([&](u32 g) {
        u8* region = d.region(g);
        reinterpret_cast<int*>(region + x.at.tail_slots)[tail] = served != kNobody && served >> 16 == g ? int(served & 0xffff) : -1;
        reinterpret_cast<float*>(region + x.at.tail_weights)[tail] = weight;
      });
  }
}

// All rows of a chunk, 16 bytes per thread and step; the next load is in flight while this one is stored.
struct RawRows {
  static constexpr u32 kMaxThreads = 1024;
  static __device__ __forceinline__ void begin(const DispatchArgs&, u8*) {}

  int4 ahead;
  __device__ __forceinline__ void prefetch(const DispatchArgs& a, const Chunk& c) {
    if (c.rows && threadIdx.x * 16 < a.row_bytes)
      ahead = load_stream(a.x + u64(c.row(0) / a.exchange.rows_per_token) * a.row_bytes + threadIdx.x * 16);
  }
  __device__ __forceinline__ void push(const DispatchArgs& a, const Chunk& c, const ChunkTargets& t) {
    const Domain& d = a.domain;
    const ep::ChannelLayout& l = a.exchange.at;
    const u32 vectors = a.row_bytes / 16, per = a.exchange.rows_per_token;
    u32 i = threadIdx.x < vectors ? 0 : c.rows, v = threadIdx.x;
    while (i < c.rows) {
      const int4 value = ahead;
      const u32 row = c.row(i), at = v;
      const Mask m = t.mask[i];
      v += blockDim.x;
      if (v >= vectors) v = threadIdx.x, ++i;
      if (i < c.rows) ahead = load_stream(a.x + u64(c.row(i) / per) * a.row_bytes + v * 16);
      const u64 offset = l.rows + (u64(d.me) * l.source_rows + row) * a.row_bytes + at * 16;
      m.each([&](u32 g) { store_stream(d.region(g) + offset, value); });
    }
    if (a.x_scales) push_scales(a, c, t);
  }
  // Scales of rows that the engine quantised itself.
  static __device__ void push_scales(const DispatchArgs& a, const Chunk& c, const ChunkTargets& t) {
    const Domain& d = a.domain;
    const ep::ChannelLayout& l = a.exchange.at;
    const u32 words = u32(l.scale_bytes / 4);
    for (u32 i = 0; i < c.rows; ++i) {
      const u32 row = c.row(i);
      for (u32 w = threadIdx.x; w < words; w += blockDim.x) {
        const u32 s = reinterpret_cast<const u32*>(a.x_scales)[u64(row / a.exchange.rows_per_token) * words + w];
        const u64 offset = l.scales + (u64(d.me) * l.source_rows + row) * l.scale_bytes + w * 4;
        t.mask[i].each([&](u32 g) { *reinterpret_cast<u32*>(d.region(g) + offset) = s; });
      }
    }
  }
};

// The same through shared memory by the copy engine of the SM: one thread of each warp moves whole pieces of rows, so
// few SMs fill the link and no register holds a row.
struct BulkRows {
  static constexpr u32 kMaxThreads = kBulkWarps * 32;
  u8* ring;
  u64* full;
  u32 taken;  // pieces this warp has loaded so far

  static __device__ __forceinline__ void begin(const DispatchArgs&, u8* shared) {
    u64* full = reinterpret_cast<u64*>(shared);
    if (threadIdx.x < kBulkWarps * kPushStages) barrier_init(full + threadIdx.x, 1);
    barrier_fence_init();
  }
  __device__ __forceinline__ void prefetch(const DispatchArgs&, const Chunk&) {}
  __device__ __forceinline__ void attach(u8* shared) {
    const u32 warp = threadIdx.x / 32;
    full = reinterpret_cast<u64*>(shared) + warp * kPushStages;
    ring = shared + kBulkBarrierBytes + warp * kPushStages * kPushPiece;
    taken = 0;
  }
  __device__ __forceinline__ void push(const DispatchArgs& a, const Chunk& c, const ChunkTargets& t) {
    if (threadIdx.x % 32 == 0) push_pieces(a, c, t);
    if (a.x_scales) RawRows::push_scales(a, c, t);
  }
  __device__ void push_pieces(const DispatchArgs& a, const Chunk& c, const ChunkTargets& t) {
    const Domain& d = a.domain;
    const ep::ChannelLayout& l = a.exchange.at;
    const u32 per_row = (a.row_bytes + kPushPiece - 1) / kPushPiece;
    const u32 bytes = ((a.row_bytes + per_row - 1) / per_row + 15) / 16 * 16;
    const u32 total = c.rows * per_row, step = kBulkWarps;
    auto size = [&](u32 p) { return min(bytes, a.row_bytes - p * bytes); };
    auto load = [&](u32 item, u32 n) {
      const u32 i = item / per_row, p = item % per_row, stage = n % kPushStages;
      barrier_expect(full + stage, size(p));
      bulk_load(ring + stage * kPushPiece, a.x + u64(c.row(i) / a.exchange.rows_per_token) * a.row_bytes + p * bytes, size(p),
                full + stage);
    };
    u32 next = threadIdx.x / 32, loaded = taken;
    for (u32 s = 0; s < kPushStages - 1 && next < total; ++s, next += step) load(next, loaded++);
    for (u32 item = threadIdx.x / 32; item < total; item += step, ++taken) {
      const u32 i = item / per_row, p = item % per_row, stage = taken % kPushStages;
      barrier_wait(full + stage, taken / kPushStages & 1);
      const u64 offset = l.rows + (u64(d.me) * l.source_rows + c.row(i)) * a.row_bytes + p * bytes;
      t.mask[i].each([&](u32 g) { bulk_store(d.region(g) + offset, ring + stage * kPushPiece, size(p)); });
      bulk_commit();
      if (next < total) {
        bulk_wait_read<1>();  // the stage that is loaded next was stored one piece ago
        load(next, loaded++);
        next += step;
      }
    }
    bulk_wait_done();
  }
};

// Quantised on the way: a lane holds 16 elements; 8, 2 or 1 lanes share a scale.
template <class T>
struct QuantisedRows {
  static constexpr u32 kMaxThreads = 512;
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

// One word per member: the rows of this chunk that came to it. Fenced, so that whoever reads it has the rows too.
__device__ __forceinline__ void announce(const DispatchArgs& a, const Now& now, const Chunk& c, const ChunkTargets& t, u64 where) {
  const Domain& d = a.domain;
  if (threadIdx.x >= now.members) return;
  const u32 g = now.peer;
  u64 bits = 0;
  for (u32 i = 0; i < c.rows; ++i) bits |= u64(t.mask[i].has(g)) << i;
  fence_system();
  auto cell = reinterpret_cast<TaggedWord*>(d.region(g) + where) + u64(d.me) * a.exchange.gpu.chunks + c.index;
  store_relaxed(cell, {now.tag, bits});
}

// Waits for this chunk of every member and writes the ids and weights of its rows; what an absent or unknown row says
// is never believed.
__device__ __forceinline__ bool receive_chunk(const DispatchArgs& a, const Now& now, u32 chunk, u64 where, ChunkTargets& t) {
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  u8* own = d.region(d.me);
  for (u32 r = threadIdx.x; r < d.ranks; r += blockDim.x) t.bits[r] = 0;
  __syncthreads();
  bool ok = true;
  if (threadIdx.x < now.members) {
    const u32 source = now.peer;
    auto cell = reinterpret_cast<const TaggedWord*>(own + where) + u64(source) * x.gpu.chunks + chunk;
    TaggedWord got;
    ok = wait_for(d, cell, now.tag, source, kPhaseDispatch, x.index, &got);
    if (ok) t.bits[source] = got.word;
  }
  if (__syncthreads_or(!ok)) return false;
  const u32 rows = u32(x.at.source_rows), k = d.topk;
  const u32 per = rows > chunk ? (rows - chunk + x.gpu.chunks - 1) / x.gpu.chunks : 0;
  for (u32 item = threadIdx.x; item < d.ranks * per * k; item += blockDim.x) {
    const u32 slot_index = item % k, rest = item / k, i = rest % per, source = rest / per;
    const u64 at = (u64(source) * rows + chunk + u64(i) * x.gpu.chunks) * k + slot_index;
    int slot = -1;
    float weight = 0.f;
    if (t.bits[source] >> i & 1) {
      slot = reinterpret_cast<const volatile int*>(own + x.at.tail_slots)[at];
      weight = reinterpret_cast<const volatile float*>(own + x.at.tail_weights)[at];
      if (u32(slot) >= d.slots) slot = -1;
    }
    reinterpret_cast<int*>(own + x.at.recv_ids)[at] = slot;
    reinterpret_cast<float*>(own + x.at.recv_weights)[at] = slot < 0 ? 0.f : weight;
  }
  return true;
}

__device__ __forceinline__ void attach(BulkRows& rows, u8* shared) { rows.attach(shared); }
template <class P>
__device__ __forceinline__ void attach(P&, u8*) {}

template <class Payload>
__global__ void __launch_bounds__(Payload::kMaxThreads) dispatch_kernel(const __grid_constant__ DispatchArgs a) {
  extern __shared__ __align__(128) u8 shared[];
  __shared__ ChunkTargets targets;
  const Exchange& x = a.exchange;
  const u32 rows = a.tokens * x.rows_per_token;
  Payload payload;
  Payload::begin(a, shared);
  attach(payload, shared);
  wait_for_previous_kernel();
  Chunk c = chunk_of(blockIdx.x, x.gpu.chunks, rows);
  if (a.half & kSend) payload.prefetch(a, c);
  const Now now = read_now(a.domain, x);
  if (__syncthreads_or(now.torn)) return;
  if (a.half & kSend) {
    if (blockIdx.x == 0 && threadIdx.x == 0) a.domain.state->opened[x.channel] = now.sequence + 1;
    for (;;) {
      route_chunk(a, now, c, targets);
      __syncthreads();
      payload.push(a, c, targets);
      __syncthreads();
      announce(a, now, c, targets, x.gpu.arrival);
      const u32 following = c.index + gridDim.x;
      if (following >= x.gpu.chunks) break;
      c = chunk_of(following, x.gpu.chunks, rows);
      payload.prefetch(a, c);
      __syncthreads();
    }
  }
  let_next_kernel_start();
  if (a.half & kReceive)
    for (u32 chunk = blockIdx.x; chunk < x.gpu.chunks; chunk += gridDim.x) {
      __syncthreads();
      if (!receive_chunk(a, now, chunk, x.gpu.arrival, targets)) return;
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
    case Payload::kFromFp32: return start<QuantisedRows<float>>(a, shape, stream);
    case Payload::kFromFp16: return start<QuantisedRows<__half>>(a, shape, stream);
    case Payload::kFromBf16: return start<QuantisedRows<__nv_bfloat16>>(a, shape, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t load_dispatch() {
  return first_of({load(dispatch_kernel<RawRows>), load(dispatch_kernel<BulkRows>, kPushShared), load(dispatch_kernel<QuantisedRows<float>>),
                   load(dispatch_kernel<QuantisedRows<__half>>), load(dispatch_kernel<QuantisedRows<__nv_bfloat16>>)});
}

}  // namespace epc
