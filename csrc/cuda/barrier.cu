// The step barrier and the end-of-step check (design: protocol, sections 3 and 4). One block each.
#include <utility>

#include "cells.cuh"
#include "kernels.h"

namespace epc {

namespace {

constexpr u32 kUndecided = ~0u, kAtAnother = ~1u;  // beside epc_step_status; the latter: cells for a number that was taken on
constexpr u64 kNothing = ~0ull;

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

// The number after `step`. This rank's region may name numbers beyond a younger group's: flags and marks of these would tear
// every step. So it is ahead of them at once, and the others, who wait for it, follow. By an even number: cells of the barrier
// before stay until all are past it.
__device__ u64 past_floor(const State* s, u64 step) { return step > s->floor ? step : step + (s->floor - step) / 2 * 2 + 2; }

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

__device__ void publish(const Domain& d, const Barrier& b, u32 status) {
  Record* record = d.record;
  const Rules rules{d, const_cast<Barrier&>(b)};
  const u32* incarnation = status == EPC_STEP_RUN || status == EPC_STEP_DOOMED ? d.state->incarnations : b.running.incarnation;
  for (u32 r = threadIdx.x; r < d.ranks; r += kThreads) {
    const Seen* c = rules.seen(r);
    record->info.incarnation[r] = incarnation ? incarnation[r] : 0;
    // A joiner that enters a step without a cell has announced nothing: all must see the same tokens.
    if (r == d.me) record->info.tokens[r] = b.running.epoch ? b.tokens : 0;
    else record->info.tokens[r] = c->valid && c->step == b.step ? c->tokens : 0;
  }
  if (threadIdx.x == 0) {
    record->info.epoch = d.state->epoch;
    record->info.step = b.step;
    record->info.digest = d.state->digest;
    record->info.barrier_ns = wall_ns() - b.began;
    record->info.status = status;
    record->info.members = d.state->members;
    record->info.complete = 0;
    record->info.ended = 0;
    *reinterpret_cast<volatile u64*>(&d.header->step) = b.step;
    *reinterpret_cast<volatile u64*>(&d.header->epoch) = d.state->epoch;
    *reinterpret_cast<volatile u64*>(&d.header->progress) = wall_ns();
    *reinterpret_cast<volatile u32*>(&d.header->wait.phase) = kPhaseNone;
    store_relaxed(&record->at, wall_ns());
  }
  __syncthreads();
  if (threadIdx.x) return;
  fence_system();
  store_relaxed(&record->begun, ++d.state->begun);
}

// Marks for an earlier incarnation stay for good and have only the low bits of their epoch: each is remembered before it could
// look like one of a view to come.
__device__ u64 leave_mark(const Domain& d, u32 rank) {
  return load_relaxed(reinterpret_cast<const u64*>(d.region(d.me) + d.leave + rank * sizeof(ep::Flag)));
}
__device__ int epochs_ahead(u64 mark, u64 epoch) { return short(u16(mark >> 8) - u16(epoch)); }

// Thread 0: the state of the decided step.
__device__ void adopt(const Domain& d, const Barrier& b) {
  State* s = d.state;
  const Staged* view = d.staged + b.epoch % EP_BANKS;
  const bool changes = b.epoch != b.running.epoch;
  // Between the running view and this one there may have been another. A joiner leaves nobody behind.
  const Staged* between = d.staged + b.base % EP_BANKS;
  const u32* base = b.running.epoch && b.base != b.running.epoch && b.base != b.epoch && between->epoch == b.base ? between->incarnation : nullptr;
  u32 n = 0;
  for (u32 w = 0; w < kMaskWords; ++w) s->mask[w] = 0;
  for (u32 r = 0; r < d.ranks; ++r) {
    const u32 inc = view->incarnation[r];
    u64* leave = reinterpret_cast<u64*>(d.region(r) + d.leave + d.me * sizeof(ep::Flag));
    // Those whom this view leaves behind learn it before anyone goes on.
    for (const u32* old : {base, b.running.incarnation})
      if (changes && old && old[r] && old[r] != inc && r != d.me) store_relaxed(leave, ep::make_leave(b.step, b.epoch, ep::kLeaveExpelled));
    if (changes)
      if (const u64 mark = leave_mark(d, r); epochs_ahead(mark, b.epoch) <= 0) s->past_marks[r] = mark;
    s->incarnations[r] = inc;
    if (!inc) continue;
    s->mask[r / 32] |= 1u << (r % 32);
    s->member[n++] = r;
    if (b.doomed && r != d.me) store_relaxed(leave, ep::make_leave(b.step, b.epoch, ep::kLeaveDoomed));
  }
  fence_system();
  s->members = n;
  s->step = b.step;
  s->barrier = past_floor(s, b.step + 1);
  s->epoch = b.epoch;
  s->bank = u32(b.epoch % EP_BANKS);
  s->digest = view->digest;
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

// Whether somebody went on in a later view without this rank. Marks of earlier epochs were for an earlier incarnation, and so
// was one of an epoch whose view is staged here, with this incarnation in it.
__device__ bool left_behind(const Domain& d, const Barrier& b) {
  if (!b.running.epoch) return false;
  for (u32 r = 0; r < d.ranks; ++r) {
    const u64 mark = leave_mark(d, r);
    u64& past = d.state->past_marks[r];
    if ((mark & 0xff) != ep::kLeaveExpelled || mark == past) continue;
    const int ahead = epochs_ahead(mark, b.running.epoch);
    const Known* view = ahead > 0 ? Rules{d, const_cast<Barrier&>(b)}.staged(b.running.epoch + u64(ahead)) : nullptr;
    if (ahead > 0 && !(view && view->incarnation[d.me] == d.state->incarnation)) return true;
    past = mark;
  }
  return false;
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
  for (u32 i = threadIdx.x; i < d.ranks; i += kThreads) b.dead[i] = load_relaxed(reinterpret_cast<const u32*>(&d.header->dead[i]));
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
  for (u32 r = threadIdx.x; ready && r < d.ranks; r += kThreads) ready = plain(d, b, rules.seen(r), r);
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
  for (u32 i = threadIdx.x; i < 2 * d.ranks; i += kThreads) {
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

// Thread 0: what was decided becomes this rank's state.
__device__ void conclude(const Domain& d, Barrier& b, u32 status) {
  State* s = d.state;
  const bool settled = status == EPC_STEP_RUN || status == EPC_STEP_DOOMED;
  if (settled) adopt(d, b);
  b.adopted = settled && b.epoch != s->mapped;
  if (b.adopted) s->mapped = b.epoch;
  if (status == EPC_STEP_RUN) {
    // All run the work after the least; who is ahead undoes its last one.
    const u64 least = Rules{d, b}.least_done(s->incarnations);
    if (d.agreed && least < s->done) s->done = least;
    d.record->info.work = d.agreed ? s->done + 1 : 0;
    d.record->info.settled = d.agreed ? s->done : 0;
    s->torn = 0;
  } else {
    // Kernels that follow all the same, as in a graph, send nothing: a combine says that its outputs are ready before it looks
    // whether the step is torn, and the numbers here are of the last step that ran, in which a peer may still be.
    s->members = 0;
  }
  if (status == EPC_STEP_DOOMED || status == EPC_STEP_EXPELLED) {
    const bool doomed = status == EPC_STEP_DOOMED;
    d.record->fault = {b.step, s->epoch, u32(doomed ? EPC_WHY_PEER_DEAD : EPC_WHY_FENCED), kPhaseBarrier, 0, doomed ? b.who : d.me, 0, 0, 0, 0, 0, 0};
  }
}

// The tables of the adopted view to their one place; whether some expert has no copy.
__device__ bool take_tables(const Domain& d, u64 epoch) {
  const u32 entries = d.layers * d.experts, held = d.layers * d.slots;
  const int4* from = reinterpret_cast<const int4*>(d.maps + epoch % EP_BANKS * entries);
  bool lacks = false;
  for (u32 i = threadIdx.x; i < entries; i += kThreads) {
    const int4 copies = __ldcg(from + i);
    reinterpret_cast<int4*>(d.active)[i] = copies;
    lacks |= copies.w == 0;  // Copies::count
  }
  for (u32 i = threadIdx.x; i < held; i += kThreads) d.slot_experts[i] = __ldcg(d.slot_banks + epoch % EP_BANKS * held + i);
  return __syncthreads_or(lacks);
}

__global__ void __launch_bounds__(kThreads) step_begin_kernel(const __grid_constant__ Domain d, u32 tokens) {
  __shared__ Barrier b;
  wait_for_previous_kernel();
  read_dead(d, b);
  for (u32 i = threadIdx.x; d.count_loads && i < d.layers * d.experts; i += kThreads) d.pending[i] = 0;
  if (threadIdx.x == 0) open_barrier(d, b, tokens);
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

// The last act of a step: it counts only if nothing was torn and nobody has left it.
__global__ void __launch_bounds__(1024) step_end_kernel(const __grid_constant__ Domain d, u32* complete_flag) {
  wait_for_previous_kernel();
  State* s = d.state;
  __shared__ u32 left;  // the first rank that has left this step
  if (threadIdx.x == 0) left = kNobody;
  __syncthreads();
  const bool torn = load_relaxed(&s->torn) != 0;
  bool whole = !torn;
  fence_system();
  if (threadIdx.x < EP_MAX_CHANNELS) whole = whole && s->opened[threadIdx.x] == s->sequence[threadIdx.x];
  if (threadIdx.x < d.ranks && threadIdx.x != d.me) {
    const u8* leave = d.region(d.me) + d.leave + threadIdx.x * sizeof(ep::Flag);
    if (ep::leave_step(load_relaxed(reinterpret_cast<const u64*>(leave))) >= s->step) {
      whole = false;
      atomicMin(&left, threadIdx.x);
    }
  }
  const bool complete = __syncthreads_and(whole);
  if (complete && d.count_loads) {
    u64* loads = reinterpret_cast<u64*>(d.region(d.me) + d.loads);
    for (u32 i = threadIdx.x; i < d.layers * d.experts; i += blockDim.x)
      if (d.pending[i]) loads[i] += d.pending[i];
  }
  if (threadIdx.x) return;
  // No wait of ours met it, so nobody has said so yet: a peer may be waiting for the exchange that was left open here.
  if (!torn && !complete) {
    if (left != kNobody) tear(d, kPhaseNone, 0, EPC_WHY_PEER_LEFT, left);
    else tear(d, kPhaseNone, 0, EPC_WHY_ENGINE, d.me);
  }
  *complete_flag = complete;
  d.record->info.complete = complete;
  d.record->info.ended = 1;
  volatile u64* counter = reinterpret_cast<volatile u64*>(complete ? &d.header->complete_steps : &d.header->torn_steps);
  *counter = *counter + 1;
  *reinterpret_cast<volatile u64*>(&d.header->progress) = wall_ns();
  if (complete) d.record->complete_step = s->step;
  // A step without exchanges is no work: it only settles the last one.
  bool exchanged = false;
  for (u32 c = 0; c < EP_MAX_CHANNELS; ++c) exchanged |= s->opened[c] != 0;
  if (complete && d.agreed && exchanged) ++s->done;
  s->torn = 1;  // until the next barrier
  store_relaxed(&d.record->at, wall_ns());
  fence_system();
  store_relaxed(&d.record->ended, ++s->ended);
}

__global__ void tear_kernel(const __grid_constant__ Domain d) {
  wait_for_previous_kernel();
  if (load_relaxed(&d.state->torn) == 0) tear(d, kPhaseNone, 0, EPC_WHY_ENGINE, d.me);
}

// One block. The answer is about this launch: the thread's last error may be of somebody else's call.
template <class... Parameters, class... Arguments>
cudaError_t launch_alone(void (*kernel)(Parameters...), u32 threads, cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(threads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

}  // namespace

u64 barrier_scratch_bytes(u32 ranks) { return ranks * (sizeof(Seen) + ep::kCellViews * ranks * 4); }

cudaError_t load_barrier() { return first_of({load(step_begin_kernel), load(step_end_kernel), load(tear_kernel)}); }

cudaError_t launch_step_begin(const Domain& d, u32 tokens, cudaStream_t stream) {
  return launch_alone(step_begin_kernel, kThreads, stream, d, tokens);
}
cudaError_t launch_step_end(const Domain& d, u32* complete_flag, cudaStream_t stream) {
  return launch_alone(step_end_kernel, 1024, stream, d, complete_flag);
}
cudaError_t launch_tear(const Domain& d, cudaStream_t stream) {
  return launch_alone(tear_kernel, 1, stream, d);
}

}  // namespace epc
