// Waiting for a peer, and tearing the step when that can come to nothing (design: protocol, sections 2 and 3).
#pragma once
#include "../common/barrier.h"
#include "device.h"
#include "ptx.cuh"

#ifndef EPC_FAULT_CHECKS
#define EPC_FAULT_CHECKS 1  // 0 only to measure what they cost
#endif

namespace epc {

constexpr u32 kPollsPerCheck = 256;  // about 0.2 ms between looks at the slow words

// This kernel's place in time.
struct Now {
  u64 step, epoch, tag;
  u32 torn, bank, members, sequence;
  u32 peer;  // the member that this thread speaks to, when its index is below `members`
};

struct NowShared {
  u32 torn, sequence;
};

// How a block learns it. What changes between the kernels of a step is read by one thread for all of them, past L1. If every warp
// asked, a grid's thousands of requests for one line would queue up at one slice of L2, and the last of them might be answered
// after the exchange has been counted: a rank then spoke with the number of the next one. Behind the barrier no such load is under
// way. In two parts, so that other loads can be under way with these.
struct NowReader {
  Now now;
  u32 torn = 0, sequence = 0;

  // asks: threads that need the number before the block has met, besides the first.
  __device__ __forceinline__ explicit NowReader(const Domain& d, const Exchange& x, bool asks = false) {
    const State* s = d.state;
    if (asks || threadIdx.x == 0) sequence = *reinterpret_cast<const volatile u32*>(&s->sequence[x.channel]);
    look(d);
    now.step = s->step;
    now.epoch = s->epoch;
    now.bank = s->bank;
    now.members = s->members;
    now.peer = s->member[threadIdx.x % kMaxRanks];
  }
  // Whether the step is torn by now; also again, by a kernel that began before the one before it had ended.
  __device__ __forceinline__ void look(const Domain& d) {
    if (threadIdx.x == 0) torn = *reinterpret_cast<const volatile u32*>(&d.state->torn);
  }
  __device__ __forceinline__ u64 tag(const Exchange& x) const { return ep::make_tag(now.step, now.epoch, sequence + 1, x.index); }
  // The block meets: everything of `now` stands but `torn`, which only the first thread need have yet.
  __device__ __forceinline__ void number(const Exchange& x, NowShared& s) {
    if (threadIdx.x == 0) s.sequence = sequence;
    __syncthreads();
    now.sequence = sequence = s.sequence;
    now.tag = tag(x);
    now.torn = torn;
  }
  // The block meets: all of it stands.
  __device__ __forceinline__ const Now& settle(const Exchange& x, NowShared& s) {
    if (threadIdx.x == 0) s.torn = torn;
    number(x, s);
    now.torn = s.torn;
    return now;
  }
};

// A block's first look at a step.
__device__ __forceinline__ Now read_now(const Domain& d, const Exchange& x) {
  __shared__ NowShared s;
  return NowReader(d, x).settle(x, s);
}

// A flag that this exchange can never turn into `want`: its writer is in a later step, in this step under another
// view, or further in it than a rank that waits for us can be.
__device__ __forceinline__ bool passed_by(u64 seen, u64 want) {
  const u64 seen_step = ep::tag_step(seen), want_step = ep::tag_step(want);
  if (seen_step != want_step) return seen_step > want_step;
  if (ep::tag_epoch(seen) != ep::tag_epoch(want)) return true;
  const u64 mask = ep::kMaxSequence;
  const u64 seen_sequence = seen >> ep::kTagSequenceShift & mask, want_sequence = want >> ep::kTagSequenceShift & mask;
  return seen_sequence > want_sequence || (seen_sequence == want_sequence && seen != want);
}

// Leave cells first, then a fence, then our own word: peers must learn of it before anything can look finished here.
static __device__ __noinline__ void tear(const Domain& d, u32 phase, u32 exchange, u32 why, u32 rank, u32 layer = 0, u32 expert = 0,
                                         u32 slot = 0, u32 rows = 0, u32 room = 0) {
  State* s = d.state;
  if (atomicExch(&s->tearing, 1u) != 0) return;
  const u64 step = s->step;
  epc_fault* f = &d.record->fault;
  f->step = step;
  f->epoch = s->epoch;
  f->phase = phase;
  f->exchange = exchange;
  f->why = why;
  f->rank = rank;
  f->layer = layer;
  f->expert = expert;
  f->slot = slot;
  f->rows = rows;
  f->room = room;
  const u64 mark = ep::make_leave(step, s->epoch, ep::kLeaveTorn);
  for (u32 i = 0; i < s->members; ++i) {
    const u32 r = s->member[i];
    if (r != d.me) store_relaxed(reinterpret_cast<u64*>(d.region(r) + d.leave + d.me * sizeof(ep::Flag)), mark);
  }
  fence_system();
  store_relaxed(&s->torn, 1u);
}

// Whether any rank has left this step or a later one.
__device__ __forceinline__ u32 who_left(const Domain& d, u64 step) {
  const u8* leave = d.region(d.me) + d.leave;
  for (u32 r = 0; r < d.ranks; ++r)
    if (r != d.me && ep::leave_step(load_relaxed(reinterpret_cast<const u64*>(leave + r * sizeof(ep::Flag)))) >= step) return r;
  return kNobody;
}

__device__ __forceinline__ bool is_dead(const Domain& d, u32 member) {
  return load_relaxed(reinterpret_cast<const u32*>(&d.header->dead[member])) >= d.state->incarnations[member];
}

// Why a step is torn that `rank` has left or passed by. The kernels of a process that was killed run on until its context is
// taken down, which takes half a second: they find themselves fenced and say that they leave, while the rank is dead.
__device__ __forceinline__ u32 why_without(const Domain& d, u32 rank, u32 said) {
  return d.state->incarnations[rank] && is_dead(d, rank) ? EPC_WHY_PEER_DEAD : said;
}

// The cell that `from` writes to `on` for a barrier.
__device__ __forceinline__ ep::Cell* cell_at(const Domain& d, u32 on, u32 from, u64 step) {
  return reinterpret_cast<ep::Cell*>(d.region(on) + d.cells + ((step & 1) * d.ranks + from) * d.cell_bytes);
}

// Whether a member has come to a barrier after this step. What it said in the step it said before its cell: flags that are
// read after this are all there will be. Numbers up to the floor may be an earlier group's. The cell need not be whole: one
// incarnation's number never falls, and whoever took the seat over says so with a leave mark or a dead word.
__device__ __forceinline__ bool came_to_a_later_barrier(const Domain& d, u32 member) {
  const State* s = d.state;
  const u64 past = s->step > s->floor ? s->step : s->floor;
  for (u32 parity = 0; parity < 2; ++parity) {
    const u64* words = reinterpret_cast<const u64*>(cell_at(d, d.me, member, parity));
    if (load_acquire(words + 1) > past && u32(load_relaxed(words + 2)) == s->incarnations[member]) return true;
  }
  return false;
}

struct Waiter {
  const Domain& d;
  u32 phase, exchange, source;
  u64 since = 0;
  bool recorded = false;
  bool without = false;  // `source` was at a later barrier when it was looked for last

  // The slow path. 0, or why the wait is over.
  __device__ __noinline__ u32 check(u64 seen, u64 want, u32* who) {
    State* s = d.state;
    *who = source;
    if (load_relaxed(&s->torn)) return EPC_WHY_TORN_HERE;
    if (passed_by(seen, want)) return why_without(d, source, EPC_WHY_PASSED_BY);
    const u32 left = who_left(d, ep::tag_step(want));
    if (left != kNobody) {
      *who = left;
      return why_without(d, left, EPC_WHY_PEER_LEFT);
    }
    const ep::Header* h = d.header;
    if (is_dead(d, source)) return EPC_WHY_PEER_DEAD;
    if (load_relaxed(reinterpret_cast<const u32*>(&h->fenced)) >= s->incarnation) {
      *who = d.me;
      return EPC_WHY_FENCED;
    }
    if (s->ticket && load_relaxed(&d.record->called_off) == s->ticket) {
      *who = d.me;
      return EPC_WHY_ENGINE;
    }
    if (without) return EPC_WHY_ENDED;  // and since then its flag has not come
    without = came_to_a_later_barrier(d, source);
    const u64 now = wall_ns();
    if (!since) since = now;
    if (now - since > d.exchange_timeout_ns) return EPC_WHY_TIMEOUT;
    if (now - since > d.suspect_ns && speaks()) record_wait();
    return 0;
  }

  // In some kernels the first blocks only push, so the last one tells of waits, too.
  __device__ __forceinline__ bool speaks() const { return blockIdx.x == 0 || blockIdx.x + 1 == gridDim.x; }

  // For the daemon, so that a hung rank can be told from a slow one. There is one record for the threads and channels that
  // wait: it is one wait's until that is over, never parts of two, nor withdrawn by the end of another's.
  __device__ void record_wait() {
    if (!recorded && atomicExch(&d.state->waiting, 1u) != 0) return;
    recorded = true;
    write_wait();
  }
  __device__ void write_wait() {
    ep::WaitRecord* w = &d.header->wait;
    store_relaxed(reinterpret_cast<u32*>(&w->exchange), exchange);
    store_relaxed(reinterpret_cast<u32*>(&w->rank), source);
    store_relaxed(reinterpret_cast<u64*>(&w->since_ns), since + load_relaxed(&d.record->offset));
    store_relaxed(reinterpret_cast<u32*>(&w->phase), phase);
  }

  __device__ __forceinline__ void done() {
    if (recorded) withdraw();
  }
  __device__ __noinline__ void withdraw() {
    store_relaxed(reinterpret_cast<u32*>(&d.header->wait.phase), kPhaseNone);
    fence_system();
    atomicExch(&d.state->waiting, 0u);
    recorded = false;
  }
};

__device__ __forceinline__ u64 tag_of(u64 v) { return v; }
__device__ __forceinline__ u64 tag_of(const TaggedWord& v) { return v.tag; }

// Polls until the flag carries `want` (true, with what it vouches for) or the step is torn (false). `meanwhile` is called
// before each look: loads that it issues are on their way together with the flag's.
template <class T, class F>
__device__ __forceinline__ bool wait_for(const Domain& d, const T* flag, u64 want, u32 source, u32 phase, u32 exchange, T* got, F meanwhile) {
  meanwhile();
  T v = load_acquire(flag);
  if (tag_of(v) == want) {
    *got = v;
    return true;
  }
  Waiter waiter{d, phase, exchange, source};
  for (u32 polls = 1;; ++polls) {
    meanwhile();
    v = load_acquire(flag);
    if (tag_of(v) == want) break;
#if EPC_FAULT_CHECKS
    if (polls % kPollsPerCheck == 0) {
      u32 who;
      const u32 why = waiter.check(tag_of(v), want, &who);
      if (why) {
        waiter.done();
        tear(d, phase, exchange, why, who);
        return false;
      }
    }
#endif
  }
#if EPC_FAULT_CHECKS
  waiter.done();
#endif
  *got = v;
  return true;
}
template <class T>
__device__ __forceinline__ bool wait_for(const Domain& d, const T* flag, u64 want, u32 source, u32 phase, u32 exchange, T* got) {
  return wait_for(d, flag, want, source, phase, exchange, got, [] {});
}

}  // namespace epc
