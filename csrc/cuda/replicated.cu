// Input that every rank has, as under tensor-parallel attention: nothing is sent. Every rank routes every token, keeps
// the choices that it holds, and says how many tokens it has; combine then pulls and sums as ever.
#include "send.cuh"

namespace epc {

namespace {

constexpr u32 kThreads = 512;

// A warp per token. False: torn.
__device__ __forceinline__ bool keep_token(const DispatchArgs& a, const Now& now, const Copies* map, u32 token) {
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  u8* own = d.region(d.me);
  const u32 lane = threadIdx.x % 32, k = d.topk;
  bool lost = false, bad = false;
  if (token < a.tokens) {
    Ahead mine = read_routing(a, Chunk{0, a.tokens, 0, 1}, token);
    const long long id = id_of(a, mine);
    const u32 served = serve_lane(a, now, id, map, token, 0, lost, bad);  // all choose alike
    if (d.count_loads && (served != kNobody || lost) && d.me == (lost ? d.state->member[0] : served >> 16))
      atomicAdd(d.pending + u64(a.layer) * d.experts + u32(id), 1u);
    const bool any_lost = __any_sync(~0u, lost);
    if (any_lost) mine.weight = spread_lost(d, served != kNobody || lost, served != kNobody, mine.weight);
    const bool here = served != kNobody && served >> 16 == d.me;
    const u64 at = u64(token) * k + lane;
    if (lane < k) {
      x.route[at] = served;
      x.route_weights[at] = mine.weight;
      reinterpret_cast<int*>(own + x.at.recv_ids)[at] = here ? int(served & 0xffff) : -1;
      reinterpret_cast<float*>(own + x.at.recv_weights)[at] = here ? mine.weight : 0.f;
    }
    if (a.lost && lane == 0) a.lost[token] = any_lost;
    u8* to = own + x.at.rows + u64(token) * a.row_bytes;
    for (u32 v = lane; v < a.row_bytes / 16; v += 32) store_stream(to + v * 16, load_stream(a.x + u64(token) * a.row_bytes + v * 16));
  } else if (lane < k) {
    reinterpret_cast<int*>(own + x.at.recv_ids)[u64(token) * k + lane] = -1;
    reinterpret_cast<float*>(own + x.at.recv_weights)[u64(token) * k + lane] = 0.f;
  }
  return !__any_sync(~0u, bad);
}

__device__ __forceinline__ void say_tokens(const DispatchArgs& a, const Now& now) {
  const Domain& d = a.domain;
  if (threadIdx.x >= now.members) return;
  u8* region = d.region(now.peer);
  store_relaxed(reinterpret_cast<TaggedWord*>(region + a.exchange.gpu.heads) + d.me, {now.tag, make_head(a)});
  fence_system();
  store_relaxed(reinterpret_cast<TaggedWord*>(region + a.exchange.gpu.arrival) + u64(d.me) * a.exchange.gpu.chunks, {now.tag, a.tokens});
}

__device__ __forceinline__ void await_tokens(const DispatchArgs& a, const Now& now) {
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  for (u32 r = threadIdx.x; r < d.ranks; r += blockDim.x)
    if (!d.state->has(r)) write_arrival(a, r, 0, 0, 0.f);
  if (threadIdx.x >= now.members) return;
  auto cell = reinterpret_cast<const TaggedWord*>(d.region(d.me) + x.gpu.arrival) + u64(now.peer) * x.gpu.chunks;
  TaggedWord got;
  if (!wait_for(d, cell, now.tag, now.peer, kPhaseDispatch, x.index, &got) || !note_head(a, now, now.peer, TaggedWord{})) return;
  if (got.word != a.tokens) tear(d, kPhaseDispatch, x.index, EPC_WHY_DISAGREE, now.peer, a.layer, 0, 0, u32(got.word), a.tokens);
}

__global__ void __launch_bounds__(kThreads) replicated_kernel(const __grid_constant__ DispatchArgs a) {
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  const Copies* map = d.active + u64(a.layer) * d.experts;
  wait_for_previous_kernel();
  const Now now = read_now(d, x);
  if (now.torn || out_of_numbers(a, now)) return;
  const u32 warps = gridDim.x * (blockDim.x / 32);
  if (a.half & kSend) {
    if (blockIdx.x == 0 && threadIdx.x == 0) d.state->opened[x.channel] = now.sequence + 1;
    if (blockIdx.x == 0) say_tokens(a, now);
    bool ok = true;
    for (u32 token = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; token < x.at.source_rows && ok; token += warps)
      ok = keep_token(a, now, map, token);
  }
  let_next_kernel_start();
  if (a.half & kReceive && blockIdx.x == 0) await_tokens(a, now);
}

}  // namespace

cudaError_t load_replicated() { return load(replicated_kernel); }

cudaError_t launch_replicated(const DispatchArgs& a, u32 grid, bool early, cudaStream_t stream) {
  const u32 wanted = (u32(a.exchange.at.source_rows) + kThreads / 32 - 1) / (kThreads / 32);
  return launch(replicated_kernel, a, Shape{wanted < grid ? wanted : grid, kThreads, 0, early}, stream);
}

}  // namespace epc
