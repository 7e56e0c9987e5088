// The step barrier and the end-of-step check (design: protocol, sections 3 and 4). One block each.
#include "decide.cuh"
#include "kernels.h"

namespace epc {

namespace {

constexpr u32 kThreads = 256;

__device__ ep::Cell* cell_at(const Domain& d, u32 on, u32 from, u64 step) {
  return reinterpret_cast<ep::Cell*>(d.region(on) + d.cells + ((step & 1) * d.ranks + from) * d.cell_bytes);
}

// A warp writes one cell. Its version is odd meanwhile, and never repeats.
__device__ void write_cell(const Domain& d, const Barrier& b, u32 to, u32 tokens) {
  const u32 lane = threadIdx.x % 32;
  u64* cell = reinterpret_cast<u64*>(cell_at(d, to, d.me, b.step));
  const u64 version = wall_ns() << 1;
  if (lane == 0) {
    store_relaxed(cell, version | 1);
    fence_system();
    store_relaxed(cell + 1, b.step);
    store_relaxed(cell + 2, u64(d.state->incarnation) | u64(tokens) << 32);
    const u32 first = b.running.epoch ? 1 : 0;
    store_relaxed(cell + 3, u64(first + b.mine_count));
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
    store_relaxed(cell, version + 2);
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
    bool later = seen->valid && seen->step > b.step;
    // A member decides its own barrier before it follows a later one. What a joiner finds may be a cell to its predecessor.
    const bool current = b.running.epoch && seen->valid && seen->step == b.step;
    if (!later && both && !current) {
      // The other parity may hold the next barrier's cell.
      const u64* other = reinterpret_cast<const u64*>(cell_at(d, d.me, r, b.step + 1));
      const u64 version = load_acquire(other);
      const u64 step = load_relaxed(other + 1);
      const u32 inc = u32(load_relaxed(other + 2));
      const bool known = (b.running.epoch && b.running.incarnation[r] == inc) || [&] {
        for (u32 i = 0; i < b.staged_count; ++i)
          if (b.staged[i].incarnation[r] == inc) return true;
        return false;
      }();
      if (version && !(version & 1) && step > b.step && known && threadIdx.x % 32 == 0)
        atomicMax(reinterpret_cast<unsigned long long*>(&b.higher), static_cast<unsigned long long>(step));
    } else if (later && threadIdx.x % 32 == 0) {
      atomicMax(reinterpret_cast<unsigned long long*>(&b.higher), static_cast<unsigned long long>(seen->step));
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

__device__ void publish(const Domain& d, const Barrier& b, u32 status, u64 began) {
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
    record->info.barrier_ns = wall_ns() - began;
    record->info.status = status;
    record->info.members = d.state->members;
    record->info.complete = 0;
    record->info.ended = 0;
    *reinterpret_cast<volatile u64*>(&d.header->step) = b.step;
    *reinterpret_cast<volatile u64*>(&d.header->epoch) = d.state->epoch;
    *reinterpret_cast<volatile u64*>(&d.header->progress) = wall_ns();
    *reinterpret_cast<volatile u32*>(&d.header->wait.phase) = kPhaseNone;
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

__global__ void __launch_bounds__(kThreads) step_begin_kernel(const __grid_constant__ Domain d, u32 tokens) {
  __shared__ Barrier b;
  wait_for_previous_kernel();
  State* s = d.state;
  const u64 began = wall_ns();
  for (u32 i = threadIdx.x; i < d.ranks; i += kThreads) b.dead[i] = load_relaxed(reinterpret_cast<const u32*>(&d.header->dead[i]));
  for (u32 i = threadIdx.x; d.count_loads && i < d.layers * d.experts; i += kThreads) d.pending[i] = 0;
  if (threadIdx.x == 0) {
    b.step = s->barrier + 1;
    b.deadline = began + d.step_timeout_ns;
    b.higher = 0;
    b.doomed = b.adopted = 0;
    if (!s->epoch) found(d, s);
    const Staged* v = d.staged + s->bank;
    b.running = s->epoch ? Known{s->epoch, v->digest, v->incarnation} : Known{0, 0, nullptr};
    b.staged_count = later_views(d, s->epoch, b.staged);
    snapshot(s, b);
    d.record->info.tokens[d.me] = tokens;
    s->torn = 1;
    s->tearing = 0;
    for (u32 c = 0; c < EP_MAX_CHANNELS; ++c) s->sequence[c] = s->opened[c] = s->readers[c] = 0;
    fence_system();
  }
  __syncthreads();
  Rules rules{d, b};
  u32 status = EPC_STEP_RUN;
  if (!b.running.epoch && !b.staged_count) status = EPC_STEP_NO_VIEW;
  // The daemon shows a view with joiners to others when each of them has come to its first barrier.
  if (!b.running.epoch && threadIdx.x == 0) Waiter{d, kPhaseBarrier, 0, d.me, began}.record_wait();
  // A joiner has no barrier of its own until it has seen one; alone in its view it opens the first.
  if (status == EPC_STEP_RUN) send_cells(d, b, tokens);
  for (u32 polls = 1; status == EPC_STEP_RUN; ++polls) {
    __syncthreads();
    const bool slow = polls % 64 == 0;
    read_cells(d, b, slow || polls == 1);
    if (slow)
      for (u32 i = threadIdx.x; i < d.ranks; i += kThreads) b.dead[i] = load_relaxed(reinterpret_cast<const u32*>(&d.header->dead[i]));
    __syncthreads();
    if (b.higher > b.step) {
      __syncthreads();
      if (threadIdx.x == 0) {
        b.step = b.higher;
        b.staged_count = later_views(d, s->epoch, b.staged);
        snapshot(s, b);
      }
      __syncthreads();
      send_cells(d, b, tokens);
      continue;
    }
    const bool simple = b.running.epoch && !b.staged_count;
    bool ready = simple;
    for (u32 r = threadIdx.x; simple && r < d.ranks; r += kThreads) ready = ready && plain(d, b, rules.seen(r), r);
    const bool run = __syncthreads_and(ready);
    if (threadIdx.x == 0) {
      if (run) {
        rules.settle(BarrierDecision::kRun, b.running.epoch, b.running.epoch);
      } else {
        b.staged_count = later_views(d, s->epoch, b.staged);
        rules.decide();
        if (b.kind == BarrierDecision::kWait && slow) {
          b.doomed = load_relaxed(reinterpret_cast<const u32*>(&d.header->fenced)) >= s->incarnation ? 2 : wall_ns() > b.deadline ? 3 : 0;
          if (wall_ns() - began > d.suspect_ns) Waiter{d, kPhaseBarrier, 0, b.who, began}.record_wait();
        }
      }
    }
    __syncthreads();
    if (b.kind == BarrierDecision::kRun) {
      if (b.doomed) status = EPC_STEP_DOOMED;
      break;
    }
    if (b.kind == BarrierDecision::kExpelled || b.doomed == 2) status = EPC_STEP_EXPELLED;
    if (b.doomed == 3) status = EPC_STEP_TIMEOUT;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    if (status == EPC_STEP_RUN || status == EPC_STEP_DOOMED) adopt(d, b);
    if (status == EPC_STEP_RUN) s->torn = 0;
    b.adopted = (status == EPC_STEP_RUN || status == EPC_STEP_DOOMED) && b.epoch != s->mapped;
    if (b.adopted) s->mapped = b.epoch;
    if (status == EPC_STEP_DOOMED || status == EPC_STEP_EXPELLED) {
      const u32 why = status == EPC_STEP_DOOMED ? EPC_WHY_PEER_DEAD : EPC_WHY_FENCED;
      d.record->fault = {b.step, s->epoch, why, kPhaseBarrier, 0, status == EPC_STEP_DOOMED ? b.who : d.me};
    }
  }
  __syncthreads();
  const u32 entries = d.layers * d.experts;
  const int4* from = reinterpret_cast<const int4*>(d.maps + b.epoch % EP_BANKS * entries);
  for (u32 i = threadIdx.x; b.adopted && i < entries; i += kThreads) reinterpret_cast<int4*>(d.active)[i] = __ldcg(from + i);
  const u32 held = d.layers * d.slots;
  for (u32 i = threadIdx.x; b.adopted && i < held; i += kThreads) d.slot_experts[i] = __ldcg(d.slot_banks + b.epoch % EP_BANKS * held + i);
  publish(d, b, status, began);
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
  s->torn = 1;  // until the next barrier
  fence_system();
  store_relaxed(&d.record->ended, ++s->ended);
}

__global__ void tear_kernel(const __grid_constant__ Domain d) {
  wait_for_previous_kernel();
  if (load_relaxed(&d.state->torn) == 0) tear(d, kPhaseNone, 0, EPC_WHY_ENGINE, d.me);
}

}  // namespace

u64 barrier_scratch_bytes(u32 ranks) { return ranks * (sizeof(Seen) + ep::kCellViews * ranks * 4); }

cudaError_t load_barrier() { return first_of({load(step_begin_kernel), load(step_end_kernel), load(tear_kernel)}); }

cudaError_t launch_step_begin(const Domain& d, u32 tokens, cudaStream_t stream) {
  step_begin_kernel<<<1, kThreads, 0, stream>>>(d, tokens);
  return cudaGetLastError();
}
cudaError_t launch_step_end(const Domain& d, u32* complete_flag, cudaStream_t stream) {
  step_end_kernel<<<1, 1024, 0, stream>>>(d, complete_flag);
  return cudaGetLastError();
}
cudaError_t launch_tear(const Domain& d, cudaStream_t stream) {
  tear_kernel<<<1, 1, 0, stream>>>(d);
  return cudaGetLastError();
}

}  // namespace epc
