// The step barrier and the end-of-step check (design: protocol, sections 3 and 4). One block each.
#include <utility>

#include "decide.cuh"
#include "kernels.h"

namespace epc {

namespace {

constexpr u32 kThreads = 256;
constexpr u32 kDoneWord = 4 + 2 * ep::kCellViews;  // Cell::done
constexpr u32 kUndecided = ~0u, kFollow = ~1u;  // beside epc_step_status
static_assert(sizeof(ep::Cell) == 8 * (kDoneWord + 1), "cells are written word by word");

__device__ ep::Cell* cell_at(const Domain& d, u32 on, u32 from, u64 step) {
  return reinterpret_cast<ep::Cell*>(d.region(on) + d.cells + ((step & 1) * d.ranks + from) * d.cell_bytes);
}

// Thread 0: a version for the cells that are written next. The clock may stand still for a microsecond, longer than it takes
// to join a later barrier.
__device__ void new_version(const Domain& d, Barrier& b) {
  const u64 now = wall_ns() << 1, next = d.state->written + 2;
  d.state->written = b.version = now > next ? now : next;
}

// A warp writes one cell. Its version is odd meanwhile, and never repeats.
__device__ void write_cell(const Domain& d, const Barrier& b, u32 to, u32 tokens) {
  const u32 lane = threadIdx.x % 32;
  u64* cell = reinterpret_cast<u64*>(cell_at(d, to, d.me, b.step));
  if (lane == 0) {
    store_relaxed(cell, b.version | 1);
    fence_system();
    store_relaxed(cell + 1, b.step);
    store_relaxed(cell + 2, u64(d.state->incarnation) | u64(tokens) << 32);
    const u32 first = b.running.epoch ? 1 : 0;
    store_relaxed(cell + 3, u64(first + b.mine_count));
    store_relaxed(cell + kDoneWord, first ? d.state->done : ~0ull);  // a joiner takes the others' word
    for (u32 i = 0; i < first + b.mine_count; ++i) {
      const Known& v = first && i == 0 ? b.running : b.mine[i - first];
      store_relaxed(cell + 4 + 2 * i, v.epoch);
      store_relaxed(cell + 5 + 2 * i, v.digest);
    }
  }
  u32* members = reinterpret_cast<u32*>(reinterpret_cast<ep::Cell*>(cell) + 1);
  const u32 first = b.running.epoch ? 1 : 0;
  for (u32 i = 0; i < first + b.mine_count; ++i) {
    const Known& v = first && i == 0 ? b.running : b.mine[i - first];
    for (u32 r = lane; r < d.ranks; r += 32) store_relaxed(members + i * d.ranks + r, v.incarnation[r]);
  }
  __syncwarp();
  if (lane == 0) {
    fence_system();
    store_relaxed(cell, b.version + 2);
  }
}

// A warp reads one cell into scratch.
__device__ void read_cell(const Domain& d, u32 from, u64 step, Seen* out) {
  const u32 lane = threadIdx.x % 32;
  const u64* cell = reinterpret_cast<const u64*>(cell_at(d, d.me, from, step));
  u64 version = lane == 0 ? load_acquire(cell) : 0;
  version = __shfl_sync(~0u, version, 0);
  bool ok = version != 0 && !(version & 1);
  if (ok) {
    const u64 views = load_relaxed(cell + 3);
    ok = views <= ep::kCellViews;
    if (ok) {
      const u64 words = load_relaxed(cell + 2);
      if (lane == 0) {
        out->step = load_relaxed(cell + 1);
        out->views = views;
        out->done = load_relaxed(cell + kDoneWord);
        out->incarnation = u32(words);
        out->tokens = u32(words >> 32);
        for (u32 i = 0; i < views; ++i) out->view[i] = {load_relaxed(cell + 4 + 2 * i), load_relaxed(cell + 5 + 2 * i)};
      }
      const u32* members = reinterpret_cast<const u32*>(reinterpret_cast<const ep::Cell*>(cell) + 1);
      for (u32 i = lane; i < views * d.ranks; i += 32) out->members(0, d.ranks)[i] = load_relaxed(members + i);
      fence_system();
      ok = __all_sync(~0u, load_relaxed(cell) == version);
    }
  }
  if (lane == 0) out->valid = ok;
  __syncwarp();
}

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
    s->epoch = epoch;
    s->bank = i;
    s->digest = v->digest;
  }
}

// What my cell says; a barrier that is tried again (it timed out) says the same as before.
__device__ void snapshot(State* s, Barrier& b) {
  const bool again = s->tried_step == b.step;
  b.mine_count = 0;
  for (u32 i = 0; i < b.staged_count; ++i)
    if (!again || b.staged[i].epoch <= s->tried_highest) b.mine[b.mine_count++] = b.staged[i];
  s->tried_step = b.step;
  s->tried_highest = b.mine_count ? b.mine[b.mine_count - 1].epoch : 0;
}

__device__ void send_cells(const Domain& d, const Barrier& b, u32 tokens) {
  for (u32 r = threadIdx.x / 32; r < d.ranks; r += kThreads / 32) {
    if (r == d.me) continue;
    bool to = b.running.epoch && b.running.incarnation[r];
    for (u32 i = 0; i < b.mine_count; ++i) to |= b.mine[i].incarnation[r] != 0;
    if (to) write_cell(d, b, r, tokens);
  }
}

// Notes the number of a later barrier, if whoever wrote it is known and alive.
__device__ void note_later(const Domain& d, Barrier& b, u32 rank, u64 step, u32 inc) {
  if (step <= b.step || threadIdx.x % 32 || b.dead[rank] >= inc) return;
  bool known = b.running.epoch && b.running.incarnation[rank] == inc;
  for (u32 i = 0; i < b.staged_count; ++i) known |= b.staged[i].incarnation[rank] == inc;
  if (known) atomicMax(reinterpret_cast<unsigned long long*>(&b.higher), static_cast<unsigned long long>(step));
}

// Reads the cells for this barrier and looks for a later one.
__device__ void read_cells(const Domain& d, Barrier& b, bool both) {
  const Rules rules{d, b};
  for (u32 r = threadIdx.x / 32; r < d.ranks; r += kThreads / 32) {
    Seen* seen = rules.seen(r);
    if (r == d.me) {
      if (threadIdx.x % 32 == 0) seen->valid = 0;
      continue;
    }
    read_cell(d, r, b.step, seen);
    if (seen->valid) note_later(d, b, r, seen->step, seen->incarnation);
    if (both) {
      // The other parity may hold the next barrier's cell.
      const u64* other = reinterpret_cast<const u64*>(cell_at(d, d.me, r, b.step + 1));
      const u64 version = load_acquire(other), step = load_relaxed(other + 1);
      const u32 inc = u32(load_relaxed(other + 2));
      if (version && !(version & 1)) note_later(d, b, r, step, inc);
    }
  }
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
    if (r != d.me) record->info.tokens[r] = c->valid && c->step == b.step ? c->tokens : 0;
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

// Thread 0: the state of the decided step.
__device__ void adopt(const Domain& d, const Barrier& b) {
  State* s = d.state;
  const Staged* view = d.staged + b.epoch % EP_BANKS;
  const u32* base = b.base == b.running.epoch ? b.running.incarnation : nullptr;
  if (b.base != b.epoch && b.base != b.running.epoch) base = d.staged[b.base % EP_BANKS].incarnation;
  u32 n = 0;
  for (u32 w = 0; w < kMaskWords; ++w) s->mask[w] = 0;
  for (u32 r = 0; r < d.ranks; ++r) {
    const u32 inc = view->incarnation[r];
    u64* leave = reinterpret_cast<u64*>(d.region(r) + d.leave + d.me * sizeof(ep::Flag));
    // Those whom this view leaves behind learn it before anyone goes on.
    for (const u32* old : {base, b.running.incarnation})
      if (b.epoch != b.running.epoch && old && old[r] && old[r] != inc && r != d.me)
        store_relaxed(leave, ep::make_leave(b.step, b.epoch, ep::kLeaveExpelled));
    s->incarnations[r] = inc;
    if (!inc) continue;
    s->mask[r / 32] |= 1u << (r % 32);
    s->member[n++] = r;
    if (b.doomed && r != d.me) store_relaxed(leave, ep::make_leave(b.step, b.epoch, ep::kLeaveDoomed));
  }
  fence_system();
  s->members = n;
  s->step = s->barrier = b.step;
  s->epoch = b.epoch;
  s->bank = u32(b.epoch % EP_BANKS);
  s->digest = view->digest;
}

// Thread 0: the number of this barrier, and what its cells say.
__device__ void open_barrier(const Domain& d, Barrier& b, u32 tokens) {
  State* s = d.state;
  b.step = s->barrier + 1;
  b.began = wall_ns();
  b.deadline = b.began + d.step_timeout_ns;
  b.higher = 0;
  b.doomed = b.adopted = 0;
  if (!s->epoch) found(d, s);
  const Staged* v = d.staged + s->bank;
  b.running = s->epoch ? Known{s->epoch, v->digest, v->incarnation} : Known{0, 0, nullptr};
  b.staged_count = later_views(d, s->epoch, b.staged);
  snapshot(s, b);
  new_version(d, b);
  d.record->info.tokens[d.me] = tokens;
  s->torn = 1;
  s->tearing = 0;
  for (u32 c = 0; c < EP_MAX_CHANNELS; ++c) s->sequence[c] = s->opened[c] = s->readers[c] = s->summed[c] = 0;
  // The daemon shows a view with joiners to others when each of them has come to its first barrier.
  if (!b.running.epoch) Waiter{d, kPhaseBarrier, 0, d.me, b.began}.record_wait();
  fence_system();
}

// Whether somebody went on in a later view without this rank. Marks of earlier epochs were for an earlier incarnation.
__device__ bool left_behind(const Domain& d, u64 epoch) {
  const u8* leave = d.region(d.me) + d.leave;
  for (u32 r = 0; r < d.ranks; ++r) {
    const u64 mark = load_relaxed(reinterpret_cast<const u64*>(leave + r * sizeof(ep::Flag)));
    if ((mark & 0xff) == ep::kLeaveExpelled && epoch && short(u16(mark >> 8) - u16(epoch)) > 0) return true;
  }
  return false;
}

// Thread 0, now and then while nothing is decided: what else ends the wait.
__device__ u32 look_around(const Domain& d, const Barrier& b) {
  const State* s = d.state;
  if (load_relaxed(reinterpret_cast<const u32*>(&d.header->fenced)) >= s->incarnation || left_behind(d, b.running.epoch)) return EPC_STEP_EXPELLED;
  const u64 now = wall_ns();
  if (now > b.deadline) return EPC_STEP_TIMEOUT;
  if (now - b.began > d.suspect_ns) Waiter{d, kPhaseBarrier, 0, b.who, b.began}.record_wait();
  return kUndecided;
}

// One look at the cells: kUndecided, kFollow, or how the barrier ends.
__device__ u32 try_decide(const Domain& d, Barrier& b, bool slow, bool both) {
  Rules rules{d, b};
  read_cells(d, b, both);
  if (slow)
    for (u32 i = threadIdx.x; i < d.ranks; i += kThreads) b.dead[i] = load_relaxed(reinterpret_cast<const u32*>(&d.header->dead[i]));
  __syncthreads();
  bool ready = b.running.epoch && !b.staged_count;
  for (u32 r = threadIdx.x; ready && r < d.ranks; r += kThreads) ready = plain(d, b, rules.seen(r), r);
  const bool run = __syncthreads_and(ready);
  if (threadIdx.x == 0) {
    if (run) {
      rules.settle(BarrierDecision::kRun, b.running.epoch, b.running.epoch);
    } else {
      b.staged_count = later_views(d, d.state->epoch, b.staged);
      rules.decide();
    }
    b.status = b.kind == BarrierDecision::kRun ? (b.doomed ? EPC_STEP_DOOMED : EPC_STEP_RUN) : b.kind == BarrierDecision::kExpelled ? EPC_STEP_EXPELLED : kUndecided;
    if (b.status == kUndecided && b.higher > b.step) b.status = kFollow;
    if (b.status == kUndecided && slow) b.status = look_around(d, b);
  }
  __syncthreads();
  return b.status;
}

// A later barrier is joined only where this one cannot be decided: a rank that is merely slower than others, in steps
// without exchanges, must not skip it.
__device__ void follow(const Domain& d, Barrier& b, u32 tokens) {
  if (threadIdx.x == 0) {
    b.step = b.higher;
    b.staged_count = later_views(d, d.state->epoch, b.staged);
    snapshot(d.state, b);
    new_version(d, b);
  }
  __syncthreads();
  send_cells(d, b, tokens);
}

// Thread 0: what was decided becomes this rank's state.
__device__ void conclude(const Domain& d, Barrier& b, u32 status) {
  State* s = d.state;
  const bool settled = status == EPC_STEP_RUN || status == EPC_STEP_DOOMED;
  if (settled) adopt(d, b);
  b.adopted = settled && b.epoch != s->mapped;
  if (b.adopted) s->mapped = b.epoch;
  if (status == EPC_STEP_RUN) {
    const u64 least = Rules{d, b}.least_done(s->incarnations);
    // All run the work after the least; who is ahead undoes its last one, and a joiner takes the others' word.
    if (d.agreed && least != ~0ull && (least < s->done || !b.running.epoch)) s->done = least;
    d.record->info.work = d.agreed ? s->done + 1 : 0;
    d.record->info.settled = d.agreed ? s->done : 0;
    s->torn = 0;
  }
  if (status == EPC_STEP_DOOMED || status == EPC_STEP_EXPELLED) {
    const bool doomed = status == EPC_STEP_DOOMED;
    d.record->fault = {b.step, s->epoch, u32(doomed ? EPC_WHY_PEER_DEAD : EPC_WHY_FENCED), kPhaseBarrier, 0, doomed ? b.who : d.me, 0, 0, 0, 0, 0, 0};
  }
}

// The tables of the adopted view to their one place.
__device__ void take_tables(const Domain& d, u64 epoch) {
  const u32 entries = d.layers * d.experts, held = d.layers * d.slots;
  const int4* from = reinterpret_cast<const int4*>(d.maps + epoch % EP_BANKS * entries);
  for (u32 i = threadIdx.x; i < entries; i += kThreads) reinterpret_cast<int4*>(d.active)[i] = __ldcg(from + i);
  for (u32 i = threadIdx.x; i < held; i += kThreads) d.slot_experts[i] = __ldcg(d.slot_banks + epoch % EP_BANKS * held + i);
}

__global__ void __launch_bounds__(kThreads) step_begin_kernel(const __grid_constant__ Domain d, u32 tokens) {
  __shared__ Barrier b;
  wait_for_previous_kernel();
  for (u32 i = threadIdx.x; i < d.ranks; i += kThreads) b.dead[i] = load_relaxed(reinterpret_cast<const u32*>(&d.header->dead[i]));
  for (u32 i = threadIdx.x; d.count_loads && i < d.layers * d.experts; i += kThreads) d.pending[i] = 0;
  if (threadIdx.x == 0) open_barrier(d, b, tokens);
  __syncthreads();
  u32 status = b.running.epoch || b.staged_count ? kUndecided : EPC_STEP_NO_VIEW;
  // A joiner has no barrier of its own until it has seen one; alone in its view it opens the first.
  if (status == kUndecided) send_cells(d, b, tokens);
  for (u32 polls = 1; status == kUndecided || status == kFollow; ++polls) {
    __syncthreads();
    const bool slow = polls % 64 == 0;
    status = try_decide(d, b, slow, slow || polls == 1);
    if (status == kFollow) follow(d, b, tokens);
  }
  __syncthreads();
  if (threadIdx.x == 0) conclude(d, b, status);
  __syncthreads();
  if (b.adopted) take_tables(d, b.epoch);
  publish(d, b, status);
}

// The last act of a step: it counts only if nothing was torn and nobody has left it.
__global__ void __launch_bounds__(1024) step_end_kernel(const __grid_constant__ Domain d, u32* complete_flag) {
  wait_for_previous_kernel();
  State* s = d.state;
  __shared__ u32 left;  // the first rank that has left this step
  if (threadIdx.x == 0) left = kNobody;
  __syncthreads();
  bool whole = load_relaxed(&s->torn) == 0;
  const bool torn = !whole;
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
  // No wait of ours met it, so nobody has written down why yet.
  if (!torn && left != kNobody) d.record->fault = {s->step, s->epoch, EPC_WHY_PEER_LEFT, kPhaseNone, 0, left};
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
