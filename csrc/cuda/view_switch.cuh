// Switching views: what a barrier's decision makes of this rank. It writes marks to those whom the next view leaves behind, takes
// that view's tables, and says in the record how the barrier ended (design: protocol, sections 3 and 4).
#pragma once
#include "decide.cuh"

namespace epc {

namespace {

// Marks for an earlier incarnation stay for good and have only the low bits of their epoch: each is remembered before it could
// look like one of a view to come.
__device__ u64 leave_mark(const Domain& d, u32 rank) {
  return load_relaxed(reinterpret_cast<const u64*>(d.region(d.me) + d.leave + rank * sizeof(ep::Flag)));
}
__device__ int epochs_ahead(u64 mark, u64 epoch) { return short(u16(mark >> 8) - u16(epoch)); }

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

// The number after `step`. This rank's region may name numbers beyond a younger group's: flags and marks of these would tear
// every step. So it is ahead of them at once, and the others, who wait for it, follow. By an even number: cells of the barrier
// before stay until all are past it.
__device__ u64 past_floor(const State* s, u64 step) { return step > s->floor ? step : step + (s->floor - step) / 2 * 2 + 2; }

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
  if (status != EPC_STEP_RUN && status != EPC_STEP_NO_VIEW) {
    const u32 why = status == EPC_STEP_DOOMED ? EPC_WHY_PEER_DEAD : status == EPC_STEP_EXPELLED ? EPC_WHY_FENCED : EPC_WHY_TIMEOUT;
    d.record->fault = {b.step, s->epoch, why, kPhaseBarrier, 0, status == EPC_STEP_EXPELLED ? d.me : b.who, 0, 0, 0, 0, 0, 0};
  }
}

// The tables of the adopted view to their one place; whether some expert has no copy.
__device__ bool take_tables(const Domain& d, u64 epoch) {
  const u32 entries = d.layers * d.experts, held = d.layers * d.slots;
  const int4* from = reinterpret_cast<const int4*>(d.maps + epoch % EP_BANKS * entries);
  bool lacks = false;
  for (u32 i = threadIdx.x; i < entries; i += kBarrierThreads) {
    const int4 copies = __ldcg(from + i);
    reinterpret_cast<int4*>(d.active)[i] = copies;
    lacks |= copies.w == 0;  // Copies::count
  }
  for (u32 i = threadIdx.x; i < held; i += kBarrierThreads) d.slot_experts[i] = __ldcg(d.slot_banks + epoch % EP_BANKS * held + i);
  return __syncthreads_or(lacks);
}

__device__ void publish(const Domain& d, const Barrier& b, u32 status) {
  Record* record = d.record;
  const Rules rules{d, const_cast<Barrier&>(b)};
  const u32* incarnation = status == EPC_STEP_RUN || status == EPC_STEP_DOOMED ? d.state->incarnations : b.running.incarnation;
  for (u32 r = threadIdx.x; r < d.ranks; r += kBarrierThreads) {
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

}  // namespace

}  // namespace epc
