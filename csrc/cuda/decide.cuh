// The decision of a step barrier on the device: what ep::decide (barrier.h) decides, from the same cells.
#pragma once
#include "../common/barrier.h"
#include "wait.cuh"

namespace epc {

using ep::BarrierDecision;

constexpr u32 kBarrierThreads = 256;
constexpr u64 kNothing = ~0ull;

// A consistent copy of a peer's cell, in scratch memory.
struct Seen {
  u64 step, views, done;
  ep::CellView view[ep::kCellViews];
  u32 incarnation, tokens, valid, pad;
  __device__ const u32* members(u32 i, u32 ranks) const { return reinterpret_cast<const u32*>(this + 1) + i * ranks; }
  __device__ u32* members(u32 i, u32 ranks) { return reinterpret_cast<u32*>(this + 1) + i * ranks; }
  __device__ u64 epoch() const { return views ? view[0].epoch : 0; }
  __device__ bool has(u64 e) const {
    if (views && view[0].epoch >= e) return true;
    for (u32 i = 1; i < views; ++i)
      if (view[i].epoch == e) return true;
    return false;
  }
};

struct Known {
  u64 epoch, digest;
  const u32* incarnation;
};

struct Barrier {
  u64 step, began, deadline, version;
  Known running;
  Known staged[EP_BANKS], mine[EP_BANKS];  // staged by now; as written in my cell
  u32 staged_count, mine_count;
  u32 tokens, fresh;      // what my cell announces; whether it has to be written
  u64 higher;             // a later barrier's number
  u32 unheard, again;     // a live member has written for no such number yet; the last look found that this one is left
  u64 newest[2];          // joiner: the highest numbers that members have written, by parity
  u32 dead[kMaxRanks];
  BarrierDecision::Kind kind;
  u64 epoch, base;
  u32 doomed, who, adopted, status;
};

__host__ __device__ inline u64 seen_bytes(u32 ranks) { return sizeof(Seen) + ep::kCellViews * ranks * 4; }

struct Rules {
  const Domain& d;
  Barrier& b;

  __device__ Seen* seen(u32 r) const { return reinterpret_cast<Seen*>(d.scratch + r * seen_bytes(d.ranks)); }
  __device__ bool dead(u32 rank, u32 inc) const { return b.dead[rank] >= inc; }
  __device__ const Seen* cell(u32 rank, u32 inc) const {
    const Seen* c = seen(rank);
    return c->valid && c->step == b.step && c->incarnation == inc ? c : nullptr;
  }
  __device__ const Known* staged(u64 epoch) const {
    for (u32 i = 0; i < b.staged_count; ++i)
      if (b.staged[i].epoch == epoch) return &b.staged[i];
    return nullptr;
  }
  __device__ bool in_my_cell(u64 epoch) const {
    for (u32 i = 0; i < b.mine_count; ++i)
      if (b.mine[i].epoch == epoch) return true;
    return false;
  }
  __device__ bool contains_me(const u32* members) const { return members[d.me] == d.state->incarnation; }
  __device__ const u32* members_of(u64 epoch) const {
    if (epoch == b.running.epoch) return b.running.incarnation;
    if (const Known* v = staged(epoch)) return v->incarnation;
    for (u32 r = 0; r < d.ranks; ++r) {
      const Seen* c = seen(r);
      if (r == d.me || !c->valid || c->step != b.step) continue;
      for (u32 i = 0; i < c->views; ++i)
        if (c->view[i].epoch == epoch) return c->members(i, d.ranks);
    }
    return nullptr;
  }
  __device__ u64 next_lower(u64 below, u64 base) const {
    u64 best = base;
    auto offer = [&](u64 e) {
      if (e < below && e > best) best = e;
    };
    for (u32 i = 0; i < b.staged_count; ++i) offer(b.staged[i].epoch);
    for (u32 r = 0; r < d.ranks; ++r) {
      const Seen* c = seen(r);
      if (r == d.me || !c->valid || c->step != b.step) continue;
      for (u32 i = 0; i < c->views; ++i) offer(c->view[i].epoch);
    }
    return best;
  }
  __device__ void settle(BarrierDecision::Kind kind, u64 epoch, u64 base) {
    b.kind = kind;
    b.epoch = epoch;
    b.base = base;
  }
  __device__ void run(u64 epoch, u64 base, const u32* members) {
    settle(BarrierDecision::kRun, epoch, base);
    for (u32 r = 0; r < d.ranks; ++r)
      if (r != d.me && members[r] && dead(r, members[r])) b.doomed = 1, b.who = r;
  }
  // Agreed completion: the least number of works complete on the members of `members` whose cells count; kNothing: none does.
  __device__ u64 least_done(const u32* members) const {
    u64 least = kNothing;
    for (u32 r = 0; r < d.ranks; ++r)
      if (const Seen* c = r != d.me && members[r] ? cell(r, members[r]) : nullptr; c && c->views && c->done < least) least = c->done;
    return least;
  }
  // Whether all members of both the base and this view have staged it.
  __device__ bool staged_by_all(u64 v, const u32* base_members, const u32* members, bool joiner) const {
    bool any = false;
    for (u32 r = 0; r < d.ranks; ++r) {
      const u32 inc = base_members[r];
      if (!inc || members[r] != inc) continue;
      if (r == d.me) {
        if (!joiner && !in_my_cell(v)) return false;
        any = true;
      } else if (const Seen* c = cell(r, inc)) {
        if (!c->has(v)) return false;
        any = true;
      } else if (!dead(r, inc)) {
        return false;
      }
    }
    return any;
  }

  // The decision of ep::decide, from the same cells.
  __device__ void decide() {
    settle(BarrierDecision::kWait, 0, 0);
    b.doomed = 0;
    const bool joiner = b.running.epoch == 0;
    u64 base = b.running.epoch;
    for (u32 r = 0; r < d.ranks; ++r) {
      const Seen* c = seen(r);
      if (r == d.me || !c->valid || c->step != b.step || c->epoch() <= base || dead(r, c->incarnation)) continue;
      if (joiner) {
        bool known = false;
        for (u32 i = 0; i < b.staged_count; ++i) known |= b.staged[i].incarnation[r] == c->incarnation;
        if (known) base = c->epoch();
      } else if (staged(c->epoch())) {
        base = c->epoch();
      } else if (const u32* m = members_of(c->epoch()); m && !contains_me(m)) {
        return settle(BarrierDecision::kExpelled, c->epoch(), base);
      }
    }
    const u32* base_members = base ? members_of(base) : nullptr;
    if (!base_members) return;
    if (!joiner)
      for (u32 r = 0; r < d.ranks; ++r) {
        const u32 inc = base_members[r];
        if (r == d.me || !inc || cell(r, inc) || dead(r, inc)) continue;
        b.who = r;
        return;
      }
    for (u64 v = next_lower(~0ull, base); v > base; v = next_lower(v, base)) {
      const u32* members = members_of(v);
      if (!members || !staged_by_all(v, base_members, members, joiner)) continue;
      if (!contains_me(members)) return settle(joiner ? BarrierDecision::kWait : BarrierDecision::kExpelled, v, base);
      if (joiner && !staged(v)) continue;
      return run(v, base, members);
    }
    if (joiner) {
      if (contains_me(base_members) && staged(base)) run(base, base, base_members);
      return;
    }
    if (!contains_me(base_members)) return settle(BarrierDecision::kExpelled, base, base);
    run(base, b.running.epoch, base_members);
  }
};

}  // namespace epc
