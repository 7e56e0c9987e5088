// The step barrier: cells go out, cells are read, and what they decide is taken (design: protocol, section 4). One block.
#include "cells.cuh"
#include "kernels.h"
#include "view_switch.cuh"

namespace epc {

namespace {

constexpr u32 kUndecided = ~0u, kAtAnother = ~1u;  // beside epc_step_status; the latter: cells for a number that was taken on

// What is staged later than the running view, ascending.
__device__ u32 later_views(const Domain& d, u64 running, Known* out) {
  u32 n = 0;
  for (u32 i = 0; i < EP_BANKS; ++i) {
    const Staged* s = d.staged + i;
    const u64 epoch = load_acquire(&s->check);
    if (epoch <= running || load_relaxed(&s->epoch) != epoch) continue;
    u32 at = n++;
    for (; at > 0 && out[at - 1].epoch > epoch; --at) out[at] = out[at - 1];
    out[at] = {epoch, s->digest, s->incarnation};
  }
  return n;
}

// A group's first view has no barrier before it: whoever is given it starts in it.
__device__ void found(const Domain& d, State* s) {
  for (u32 i = 0; i < EP_BANKS; ++i) {
    const Staged* v = d.staged + i;
    const u64 epoch = load_acquire(&v->check);
    if (!epoch || v->epoch != epoch || v->previous || v->incarnation[d.me] != s->incarnation) continue;
    if (s->epoch && s->epoch < epoch) continue;
    s->epoch = epoch;
    s->bank = i;
    s->digest = v->digest;
  }
}

// Thread 0: what this barrier's cells say. One that is tried again, after a time-out, has written them already: whoever decided
// by them decided by these tokens and views.
__device__ void say(const Domain& d, Barrier& b, u32 tokens) {
  State* s = d.state;
  b.running = Known{s->epoch, d.staged[s->bank].digest, d.staged[s->bank].incarnation};
  b.staged_count = later_views(d, s->epoch, b.staged);
  b.fresh = s->said != b.step;
  b.mine_count = 0;
  for (u32 i = 0; i < b.staged_count; ++i) {
    bool mine = b.fresh;
    for (u32 j = 0; !b.fresh && j < s->said_count; ++j) mine |= s->said_views[j] == b.staged[i].epoch;
    if (mine) b.mine[b.mine_count++] = b.staged[i];
  }
  b.higher = 0;
  b.again = b.unheard = 0;
  if (b.fresh) {
    s->said = b.step;
    s->said_tokens = tokens;
    s->said_count = b.mine_count;
    for (u32 i = 0; i < b.mine_count; ++i) s->said_views[i] = b.mine[i].epoch;
    new_version(d, b);
  }
  b.tokens = s->said_tokens;
}

// Whether this cell alone lets the step run where it is: same view, nothing staged.
__device__ bool plain(const Domain& d, const Barrier& b, const Seen* c, u32 r) {
  const u32 inc = b.running.incarnation[r];
  if (r == d.me || !inc) return true;
  return c->valid && c->step == b.step && c->incarnation == inc && c->views == 1 && c->view[0].epoch == b.running.epoch &&
         c->view[0].digest == b.running.digest && b.dead[r] < inc;
}

// Thread 0: the number of this barrier, and what its cells say.
__device__ void open_barrier(const Domain& d, Barrier& b, u32 tokens) {
  State* s = d.state;
  b.step = s->barrier;
  b.began = wall_ns();
  b.deadline = b.began + d.step_timeout_ns;
  b.doomed = b.adopted = b.fresh = b.again = 0;
  b.who = d.me;
  b.kind = BarrierDecision::kWait;
  s->waiting = 0;
  if (!s->epoch) found(d, s);
  if (s->epoch) {
    say(d, b, tokens);
  } else {
    b.running = Known{0, 0, nullptr};
    b.staged_count = later_views(d, 0, b.staged);
    // The daemon shows a view with joiners to others when each of them has come to its first barrier.
    Waiter{d, kPhaseJoin, 0, d.me, b.began}.write_wait();
  }
  s->torn = 1;
  s->tearing = 0;
  for (u32 c = 0; c < EP_MAX_CHANNELS; ++c) s->sequence[c] = s->opened[c] = s->readers[c] = s->summed[c] = 0;
  fence_system();
}

// Thread 0, now and then while nothing is decided: what else ends the wait.
__device__ __noinline__ u32 look_around(const Domain& d, const Barrier& b) {
  State* s = d.state;
  if (load_relaxed(reinterpret_cast<const u32*>(&d.header->fenced)) >= s->incarnation || left_behind(d, b)) return EPC_STEP_EXPELLED;
  const u64 now = wall_ns();
  if (now > b.deadline) return EPC_STEP_TIMEOUT;
  if (!b.running.epoch) return kUndecided;
  // Whoever tries again here after a time-out waits on.
  if (s->wait_step != b.step || s->wait_rank != b.who) s->wait_step = b.step, s->wait_rank = b.who, s->wait_since = now;
  if (now - s->wait_since > d.suspect_ns) Waiter{d, kPhaseBarrier, 0, b.who, s->wait_since}.write_wait();
  return kUndecided;
}

__device__ void read_dead(const Domain& d, Barrier& b) {
  for (u32 i = threadIdx.x; i < d.ranks; i += kBarrierThreads) b.dead[i] = load_relaxed(reinterpret_cast<const u32*>(&d.header->dead[i]));
}

__device__ u32 status_of(const Barrier& b) {
  if (b.kind == BarrierDecision::kRun) return b.doomed ? EPC_STEP_DOOMED : EPC_STEP_RUN;
  return b.kind == BarrierDecision::kExpelled ? EPC_STEP_EXPELLED : kUndecided;
}

// One look of a member at the cells: kUndecided, kAtAnother, or how the barrier ends.
__device__ u32 try_decide(const Domain& d, Barrier& b, u32 tokens, bool slow, bool look) {
  Rules rules{d, b};
  if (slow) {
    read_dead(d, b);
    if (threadIdx.x == 0) b.higher = 0, b.unheard = 0;
    __syncthreads();
  }
  read_cells(d, b, look);
  __syncthreads();
  bool ready = !b.staged_count;
  for (u32 r = threadIdx.x; ready && r < d.ranks; r += kBarrierThreads) ready = plain(d, b, rules.seen(r), r);
  const bool run = __syncthreads_and(ready);
  if (threadIdx.x == 0) {
    if (run) {
      rules.settle(BarrierDecision::kRun, b.running.epoch, b.running.epoch);
    } else {
      b.staged_count = later_views(d, d.state->epoch, b.staged);
      rules.decide();
    }
    b.status = status_of(b);
    // A later barrier is joined only where this one cannot be decided any more: a rank that is merely slower than others, in
    // steps without exchanges, must not skip it. Every live member has written for this one or a later one, so nothing for
    // it is still on its way; and as they may have written theirs since these were read, and have passed, twice.
    const bool left = b.status == kUndecided && look && b.higher > b.step && !b.unheard;
    if (left && b.again) {
      b.step = d.state->barrier = b.higher;
      say(d, b, tokens);
      b.status = kAtAnother;
    } else if (look) {
      b.again = left;
    }
    if (b.status == kUndecided && slow) b.status = look_around(d, b);
  }
  __syncthreads();
  return b.status;
}

// Thread 0: what a joiner does about a barrier that takes it in. kAtAnother: it has a view now and writes a cell like a member.
__device__ u32 enter(const Domain& d, Barrier& b, u32 tokens) {
  State* s = d.state;
  const Rules rules{d, b};
  const Known* view = rules.staged(b.epoch);
  if (const u64 least = rules.least_done(view->incarnation); least != kNothing) s->done = least;
  bool already = false;
  for (u32 r = 0; r < d.ranks; ++r) {
    const Seen* c = rules.seen(r);
    already |= r != d.me && c->valid && c->step == b.step && c->epoch() >= b.epoch;
  }
  if (!already) return status_of(b);
  s->epoch = b.epoch;
  s->bank = u32(b.epoch % EP_BANKS);
  s->digest = view->digest;
  b.step = s->barrier = past_floor(s, b.step);
  b.kind = BarrierDecision::kWait;
  b.doomed = 0;
  Waiter{d, kPhaseNone, 0, d.me, b.began}.write_wait();
  say(d, b, tokens);
  return kAtAnother;
}

// One look of a rank without a view. It writes nothing before it has one: its cell would be taken for a member's. Of each
// parity it takes the highest number that members have written; an earlier group may have left cells of higher ones.
__device__ __noinline__ u32 try_join(const Domain& d, Barrier& b, u32 tokens, bool slow) {
  Rules rules{d, b};
  if (slow) read_dead(d, b);
  if (threadIdx.x == 0) {
    b.staged_count = later_views(d, 0, b.staged);
    b.newest[0] = b.newest[1] = 0;
    b.kind = BarrierDecision::kWait;
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < 2 * d.ranks; i += kBarrierThreads) {
    u64 step;
    u32 inc;
    if (i / 2 != d.me && peek(cell_at(d, d.me, i / 2, i % 2), &step, &inc) && known(b, i / 2, inc)) raise(&b.newest[i % 2], step);
  }
  __syncthreads();
  for (u32 turn = 0; turn < 2 && b.kind != BarrierDecision::kRun; ++turn) {
    const u64 step = (b.newest[0] > b.newest[1]) == (turn == 0) ? b.newest[0] : b.newest[1];
    if (!step) continue;
    if (threadIdx.x == 0) b.step = step;
    __syncthreads();
    read_cells(d, b, false);
    __syncthreads();
    if (threadIdx.x == 0) rules.decide();
    __syncthreads();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    if (b.kind == BarrierDecision::kRun) {
      b.status = enter(d, b, tokens);
    } else {
      b.step = d.state->barrier;
      b.status = slow ? look_around(d, b) : kUndecided;
    }
  }
  __syncthreads();
  return b.status;
}

__global__ void __launch_bounds__(kBarrierThreads) step_begin_kernel(const __grid_constant__ Domain d, u32 tokens, u64 ticket) {
  __shared__ Barrier b;
  wait_for_previous_kernel();
  read_dead(d, b);
  for (u32 i = threadIdx.x; d.count_loads && i < d.layers * d.experts; i += kBarrierThreads) d.pending[i] = 0;
  if (threadIdx.x == 0) open_barrier(d, b, tokens);
  if (threadIdx.x == 0) d.state->ticket = ticket;
  __syncthreads();
  u32 status = b.running.epoch || b.staged_count ? kUndecided : EPC_STEP_NO_VIEW;
  if (b.fresh) send_cells(d, b);
  for (u32 polls = 1; status == kUndecided || status == kAtAnother; ++polls) {
    __syncthreads();
    const bool slow = polls % 64 == 0;
    status = b.running.epoch ? try_decide(d, b, tokens, slow, slow || polls == 1 || b.again) : try_join(d, b, tokens, slow);
    if (status == kAtAnother) send_cells(d, b);
  }
  __syncthreads();
  if (threadIdx.x == 0) conclude(d, b, status);
  __syncthreads();
  if (b.adopted) {
    const bool lacks = take_tables(d, b.epoch);
    if (threadIdx.x == 0) d.state->lacking = lacks;
  }
  // What is done about lost experts can change from step to step; for one step all of its kernels do the same.
  if (threadIdx.x == 0 && d.state->lacking) d.state->policy = load_relaxed(reinterpret_cast<const u32*>(&d.header->policy));
  publish(d, b, status);
}

}  // namespace

u64 barrier_scratch_bytes(u32 ranks) { return ranks * seen_bytes(ranks); }

cudaError_t load_barrier() { return load(step_begin_kernel); }

cudaError_t launch_step_begin(const Domain& d, u32 tokens, u64 ticket, cudaStream_t stream) {
  return launch_block(step_begin_kernel, kBarrierThreads, stream, d, tokens, ticket);
}

}  // namespace epc
