// Routing the rows of a block's chunks, pushing them, and saying so. Blocks push everything before they wait.
#pragma once
#include "push.cuh"
#include "quantise.cuh"

namespace epc {

// The layer's map of experts to copies: in shared memory when it fits.
constexpr u32 kMapEntries = 1024;

struct SendShared {
  NowShared now;
  ChunkTargets targets;
  int4 map[kMapEntries];
};

// What a warp needs to route a row; asked for before anything is known, so that one trip to memory brings the step's
// state, the ids and the map. Words as they lie in memory: to convert an id here would be to wait for it.
struct Ahead {
  u32 low, high;  // of the id; high: of a wide one
  float weight;
};

__device__ __forceinline__ long long id_of(const DispatchArgs& a, const Ahead& r) {
  return a.ids_wide ? static_cast<long long>(u64(r.high) << 32 | r.low) : static_cast<long long>(static_cast<int>(r.low));
}

__device__ __forceinline__ Ahead read_routing(const DispatchArgs& a, const Chunk& c, u32 i) {
  const u32 lane = threadIdx.x % 32;
  Ahead r{~0u, ~0u, 0.f};
  if (i >= c.rows || lane >= a.domain.topk) return r;
  const u64 at = u64(a.exchange.token_of(c.row(i))) * a.domain.topk + lane;
  // Plain loads: this kernel may have begun before the one that writes these, so they are not constant while it runs.
  const u32* id = static_cast<const u32*>(a.ids) + (at << a.ids_wide);
  r.low = id[0];
  if (a.ids_wide) r.high = id[1];
  r.weight = a.weights ? a.weights[at] : 1.f;
  return r;
}

// The next two rows of a warp.
struct AheadRows {
  Ahead first, second;
  __device__ __forceinline__ void fetch(const DispatchArgs& a, const Chunk& c, u32 warp) {
    first = read_routing(a, c, warp);
    second = read_routing(a, c, warp + blockDim.x / 32);
  }
};

// The layer's map on its way to shared memory: nobody waits for the first entries before all else has been asked for.
struct AheadMap {
  int4 entry[2];
  __device__ __forceinline__ void fetch(const int4* map, u32 experts) {
#pragma unroll
    for (u32 u = 0; u < 2; ++u)
      if (const u32 e = threadIdx.x + u * blockDim.x; e < experts) entry[u] = map[e];
  }
  __device__ __forceinline__ void store(const int4* map, u32 experts, int4* to) const {
#pragma unroll
    for (u32 u = 0; u < 2; ++u)
      if (const u32 e = threadIdx.x + u * blockDim.x; e < experts) to[e] = entry[u];
    for (u32 e = threadIdx.x + 2 * blockDim.x; e < experts; e += blockDim.x) to[e] = map[e];
  }
};

// The copy that serves this lane's expert. `bad`: the step cannot go on; its reason is in the fault record.
__device__ __forceinline__ u32 serve_lane(const DispatchArgs& a, const Now& now, long long id, const Copies* map, u32 token, u32 who, bool& lost,
                                          bool& bad) {
  const Domain& d = a.domain;
  if (id >= 0 && id < d.experts) {
    const u32 served = serve(d, now, map[u32(id)], a.layer, u32(id), token, who);
    lost = served == kNobody;
    if (lost && !(d.state->policy & EP_POLICY_SERVE)) bad = true, tear(d, kPhaseDispatch, a.exchange.index, EPC_WHY_LOST, d.me, a.layer, u32(id));
    return served;
  }
  if (id != -1) bad = true, tear(d, kPhaseDispatch, a.exchange.index, EPC_WHY_IDS, d.me, a.layer, u32(id));
  return kNobody;
}

// The weights of a token's lost experts go to those that are left, in proportion; a warp. In the order of cpu/route.cpp.
static __device__ __noinline__ float spread_lost(const Domain& d, bool named, bool left, float weight) {
  if (!(d.state->policy & EP_POLICY_RENORMALISE)) return weight;
  const u32 of = __ballot_sync(~0u, named), to = __ballot_sync(~0u, left);
  float all = 0.f, rest = 0.f;
  for (u32 i = 0; i < d.topk; ++i) {
    const float w = __shfl_sync(~0u, weight, i);
    if (of >> i & 1) all += w;
    if (to >> i & 1) rest += w;
  }
  return left && rest != 0.f ? weight * (all / rest) : weight;
}

// A warp per row: who serves its experts, where they are noted for combine, and the tails to every target. False: torn.
__device__ __forceinline__ bool route_chunk(const DispatchArgs& a, const Now& now, const Chunk& c, u32 warp, AheadRows& ahead, const Copies* map,
                                            ChunkTargets& out) {
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  const u32 lane = threadIdx.x % 32, warps = blockDim.x / 32, k = d.topk;
  bool bad = false;
  for (u32 i = warp; i < c.rows; i += warps) {
    const u32 row = c.row(i), token = x.token_of(row), only = row - token * x.rows_per_token;
    Ahead mine = ahead.first;
    ahead.first = ahead.second;
    ahead.second = read_routing(a, c, i + 2 * warps);
    const u64 at = u64(token) * k + lane;
    const long long id = id_of(a, mine);
    const bool first = x.rows_per_token == 1 || only == 0;
    bool lost = false;
    u32 served = serve_lane(a, now, id, map, token, d.me, lost, bad);
    if (d.count_loads && first && (served != kNobody || lost)) atomicAdd(d.pending + u64(a.layer) * d.experts + u32(id), 1u);
    const bool any_lost = __any_sync(~0u, lost);
    if (any_lost) mine.weight = spread_lost(d, served != kNobody || lost, served != kNobody, mine.weight);
    if (lane < k && first) {
      x.route[at] = served;
      x.route_weights[at] = mine.weight;
    }
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
        store_relaxed(reinterpret_cast<TaggedWord*>(d.region(g) + tail), {now.tag, slot | u64(__float_as_uint(mine.weight)) << 32});
      });
  }
  return !bad;
}

// Tails only: the rows follow in a kernel of their own (overlap.cu).
struct NoRows {
  static constexpr bool kRoutesLast = false;
  static constexpr u32 kMinBlocks = 0;
  static constexpr u32 kMaxThreads = kMostPushThreads;
  static __device__ __forceinline__ void begin(u8*) {}
  __device__ __forceinline__ void attach(u8*) {}
  __device__ __forceinline__ void prefetch(const DispatchArgs&, const Chunk&) {}
  __device__ __forceinline__ void prepare(const DispatchArgs&, const Chunk&) {}
  __device__ __forceinline__ void abandon() {}
  __device__ __forceinline__ void push(const DispatchArgs&, const Chunk&, const ChunkTargets&) {}
};

// Quantised on the way: a lane holds 16 elements; 8, 2 or 1 lanes share a scale. kAhead: the next elements are on their way while
// these are stored, and the first are quantised before it is known who gets the row; for registers that leave an SM no room for
// another kernel.
template <class T, bool kAhead>
struct QuantisedRows {
  static constexpr bool kRoutesLast = kAhead;
  static constexpr u32 kMinBlocks = kAhead;
  static constexpr u32 kMaxThreads = kMostPushThreads;
  static __device__ __forceinline__ void begin(u8*) {}
  __device__ __forceinline__ void attach(u8*) {}
  __device__ __forceinline__ void abandon() {}

  Raw16<T> ahead;
  Quantised ready;

  static __device__ __forceinline__ u32 units(const DispatchArgs& a) { return a.domain.hidden / 16; }
  // All lanes of a warp have a part in its scales.
  static __device__ __forceinline__ u32 whole(const DispatchArgs& a) { return (units(a) + 31) / 32 * 32; }
  // Element unit u of row i; absent ones are zero.
  __device__ __forceinline__ void load(const DispatchArgs& a, const Chunk& c, u32 i, u32 u) {
    if (i < c.rows && u < units(a))
      ahead.load(reinterpret_cast<const T*>(a.x) + u64(a.exchange.token_of(c.row(i))) * a.domain.hidden + u * 16);
    else
      ahead.clear();
  }
  static __device__ __forceinline__ QuantFormat format(const DispatchArgs& a) {
    return {a.exchange.dispatch_dtype, a.block_lanes, a.exchange.scale_layout == EP_SCALES_PACKED, a.global_scale};
  }
  __device__ __forceinline__ void quantise(const DispatchArgs& a) {
    float v[16];
    widen16(ahead, v);
    ready = quantise16(v, format(a));
  }
  static __device__ __forceinline__ void advance(const DispatchArgs& a, u32& i, u32& u) {
    u += blockDim.x;
    if (u >= whole(a)) u = threadIdx.x, ++i;
  }
  __device__ __forceinline__ void prefetch(const DispatchArgs& a, const Chunk& c) {
    if (kAhead) load(a, c, 0, threadIdx.x);
  }
  __device__ __forceinline__ void prepare(const DispatchArgs& a, const Chunk& c) {
    if (kAhead && threadIdx.x < whole(a) && c.rows) quantise(a);
  }
  __device__ __forceinline__ void push(const DispatchArgs& a, const Chunk& c, const ChunkTargets& t) {
    const Domain& d = a.domain;
    const ep::ChannelLayout& l = a.exchange.at;
    u32 next = threadIdx.x < whole(a) ? 0 : c.rows, next_unit = threadIdx.x;
    while (next < c.rows) {
      const u32 i = next, u = next_unit;
      if (!kAhead) {
        load(a, c, i, u);
        quantise(a);
      }
      advance(a, next, next_unit);
      if (kAhead) load(a, c, next, next_unit);
      const u64 at = u64(d.me) * l.source_rows + c.row(i);
      if (u < units(a))
        t.mask[i].each([&](u32 g) {
          u8* region = d.region(g);
          store_quantised(region + l.rows + at * a.row_bytes, region + l.scales + at * l.scale_bytes, u, ready, format(a));
        });
      if (kAhead && next < c.rows) quantise(a);
    }
  }
};

// Tags number the exchanges of a step on a channel: one more than they can count would look like an earlier one.
__device__ __forceinline__ bool out_of_numbers(const DispatchArgs& a, const Now& now) {
  if (now.sequence < ep::kMaxSequence) return false;
  if (!now.torn) tear(a.domain, kPhaseDispatch, a.exchange.index, EPC_WHY_SEQUENCE, a.domain.me, a.layer);
  return true;
}

// All that a block sends in a dispatch. `now` is filled. False: the step is torn.
template <class Payload>
__device__ __forceinline__ bool send_rows(const DispatchArgs& a, u8* shared, SendShared& s, Now& now) {
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  const u32 rows = a.tokens * x.rows_per_token;
  Payload payload;
  Payload::begin(shared);
  payload.attach(shared);
  Chunk c = chunk_of(blockIdx.x, x.gpu.chunks, rows);
  const Copies* map = d.active + u64(a.layer) * d.experts;
  wait_for_previous_kernel();
  AheadRows ahead;
  AheadMap ahead_map;
  // Where the first warps are busy the last ones route first.
  const u32 warp = Payload::kRoutesLast ? blockDim.x / 32 - 1 - threadIdx.x / 32 : threadIdx.x / 32;
  const int4* entries = reinterpret_cast<const int4*>(map);
  const bool maps = a.half & kSend && d.experts <= kMapEntries && c.rows;
  if (a.half & kSend) {
    ahead.fetch(a, c, warp);
    payload.prefetch(a, c);
    if (maps) ahead_map.fetch(entries, d.experts);
  }
  NowReader reader(d, x);  // last: some of it may have to be put aside as soon as it comes
  if (maps) {
    ahead_map.store(entries, d.experts, s.map);
    map = reinterpret_cast<const Copies*>(s.map);
  }
  now = reader.settle(x, s.now);
  if (now.torn || out_of_numbers(a, now)) {
    payload.abandon();
    return false;
  }
  if (!(a.half & kSend)) return true;
  if (blockIdx.x == 0 && threadIdx.x == 0) d.state->opened[x.channel] = now.sequence + 1;
  for (;;) {
    const bool routed = route_chunk(a, now, c, warp, ahead, map, s.targets);
    payload.prepare(a, c);
    if (__syncthreads_or(!routed)) {
      payload.abandon();
      return false;
    }
    payload.push(a, c, s.targets);
    __syncthreads();
    announce(a, now, c, s.targets, true);
    const u32 following = c.index + gridDim.x;
    if (following >= x.gpu.chunks) return true;
    c = chunk_of(following, x.gpu.chunks, rows);
    ahead.fetch(a, c, warp);
    payload.prefetch(a, c);
    __syncthreads();
  }
}

// What a tail says; what an absent or unknown row says is never believed.
__device__ __forceinline__ void note_tail(const DispatchArgs& a, u64 at, bool here, const TaggedWord& tail) {
  const Exchange& x = a.exchange;
  u8* own = a.domain.region(a.domain.me);
  const bool valid = here && u32(tail.word) < a.domain.slots;
  reinterpret_cast<int*>(own + x.at.recv_ids)[at] = valid ? int(u32(tail.word)) : -1;
  reinterpret_cast<float*>(own + x.at.recv_weights)[at] = valid ? __uint_as_float(u32(tail.word >> 32)) : 0.f;
}

// What a source says of its whole dispatch, beside the word of its first chunk.
__device__ __forceinline__ const TaggedWord* head_of(const DispatchArgs& a, u32 source) {
  return reinterpret_cast<const TaggedWord*>(a.domain.region(a.domain.me) + a.exchange.gpu.heads) + source;
}
__device__ __forceinline__ void write_arrival(const DispatchArgs& a, u32 source, u32 tokens, u32 layer, float global_scale) {
  auto arrival = reinterpret_cast<ep::Arrival*>(a.domain.region(a.domain.me) + a.exchange.at.arrival) + source;
  arrival->tokens = tokens;
  arrival->layer = layer;
  arrival->global_scale = global_scale;
}
// False: it is at another layer, and the step is torn.
__device__ __forceinline__ bool note_head(const DispatchArgs& a, const Now& now, u32 source, TaggedWord head) {
  if (head.tag != now.tag) head = load_relaxed(head_of(a, source));
  const u32 tokens = head_tokens(head.word), layer = head_layer(head.word);
  write_arrival(a, source, tokens, layer, __uint_as_float(u32(head.word >> 32)));
  if (layer == a.layer && tokens <= a.exchange.cap) return true;
  tear(a.domain, kPhaseDispatch, a.exchange.index, EPC_WHY_DISAGREE, source, layer, 0, 0, tokens);
  return false;
}

}  // namespace epc
