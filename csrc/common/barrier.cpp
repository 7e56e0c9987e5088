#include "barrier.h"

#include <cstring>
#include <vector>

#include "errors.h"

namespace ep {

bool CellCopy::has(u64 epoch) const {
  if (!views) return false;
  if (view[0].epoch >= epoch) return true;
  for (u32 i = 1; i < views; ++i)
    if (view[i].epoch == epoch) return true;
  return false;
}

const u32* CellCopy::members_of(u64 epoch) const {
  for (u32 i = 0; i < views; ++i)
    if (view[i].epoch == epoch) return members[i];
  return nullptr;
}

namespace {

struct Decider {
  const BarrierInput& in;

  bool dead(u32 rank, u32 inc) const { return kFaultChecks && in.dead[rank].load(std::memory_order_acquire) >= inc; }
  // The cell of exactly this incarnation.
  const CellCopy* cell(u32 rank, u32 inc) const {
    const CellCopy& c = in.cells[rank];
    return c.valid && c.step == in.step && c.incarnation == inc ? &c : nullptr;
  }
  const KnownView* staged(u64 epoch) const {
    for (u32 i = 0; i < in.staged_count; ++i)
      if (in.staged_now[i].epoch == epoch) return &in.staged_now[i];
    return nullptr;
  }
  bool in_my_cell(u64 epoch) const {
    for (u32 i = 0; i < in.snapshot; ++i)
      if (in.staged[i].epoch == epoch) return true;
    return false;
  }
  bool contains_me(const u32* members) const { return members[in.me] == in.my_incarnation; }

  // Whose word counts: members of the running view, or (joiner) of the highest view named by anyone's cell.
  const u32* members_of(u64 epoch) const {
    if (epoch == in.running.epoch) return in.running.incarnation;
    if (const KnownView* v = staged(epoch)) return v->incarnation;
    for (u32 r = 0; r < in.ranks; ++r)
      if (r != in.me && in.cells[r].valid && in.cells[r].step == in.step)
        if (const u32* m = in.cells[r].members_of(epoch)) return m;
    return nullptr;
  }

  BarrierDecision run() const {
    BarrierDecision d;
    const bool joiner = in.running.epoch == 0;
    u64 base = in.running.epoch;
    for (u32 r = 0; r < in.ranks; ++r) {
      const CellCopy& c = in.cells[r];
      if (r == in.me || !c.valid || c.step != in.step || c.epoch() <= base) continue;
      if (dead(r, c.incarnation)) continue;
      if (joiner) {
        // Only a rank of a view that I was given may tell a joiner where the group is.
        bool known = false;
        for (u32 i = 0; i < in.staged_count; ++i) known |= in.staged_now[i].incarnation[r] == c.incarnation;
        if (known) base = c.epoch();
      } else if (staged(c.epoch())) {
        base = c.epoch();
      } else if (const u32* m = c.members_of(c.epoch()); m && !contains_me(m)) {
        d.kind = BarrierDecision::kExpelled;
        d.epoch = c.epoch();
        d.base = base;
        return d;
      }
    }
    if (!base) return d;
    const u32* base_members = members_of(base);
    if (!base_members) return d;
    if (!joiner) {
      for (u32 r = 0; r < in.ranks; ++r) {
        u32 inc = base_members[r];
        if (r == in.me || !inc || cell(r, inc) || dead(r, inc)) continue;
        d.waits_for = r;
        return d;
      }
    }
    // Later views, highest first. A view that I know only from cells is one that I am not in, or not yet able to run.
    u64 v = ~0ull;
    while ((v = next_lower(v, base)) > base) {
      const u32* members = members_of(v);
      if (!members) continue;
      bool all = true, any = false;
      for (u32 r = 0; r < in.ranks && all; ++r) {
        u32 inc = base_members[r];
        if (!inc || members[r] != inc) continue;  // not in both
        if (r == in.me) {
          if (joiner || in_my_cell(v)) any = true;
          else all = false;
        } else if (const CellCopy* c = cell(r, inc)) {
          if (c->has(v)) any = true;
          else all = false;
        } else if (joiner || !dead(r, inc)) {
          all = dead(r, inc);
        }
      }
      if (!all || !any) continue;
      if (!contains_me(members)) {
        d.kind = joiner ? BarrierDecision::kWait : BarrierDecision::kExpelled;
        d.epoch = v;
        d.base = base;
        return d;
      }
      if (joiner && !staged(v)) continue;
      return decided(v, base, members);
    }
    if (joiner) {
      // The group already runs a view that I am in.
      if (!contains_me(base_members) || !staged(base)) return d;
      return decided(base, base, base_members);
    }
    if (!contains_me(base_members)) {
      d.kind = BarrierDecision::kExpelled;
      d.epoch = d.base = base;
      return d;
    }
    return decided(base, in.running.epoch, base_members);
  }

  BarrierDecision decided(u64 epoch, u64 base, const u32* members) const {
    BarrierDecision d;
    d.kind = BarrierDecision::kRun;
    d.epoch = epoch;
    d.base = base;
    for (u32 r = 0; r < in.ranks; ++r)
      if (r != in.me && members[r] && dead(r, members[r])) d.doomed = true;
    return d;
  }

  u64 next_lower(u64 below, u64 base) const {
    u64 best = base;
    auto offer = [&](u64 e) {
      if (e < below && e > best) best = e;
    };
    for (u32 i = 0; i < in.staged_count; ++i) offer(in.staged_now[i].epoch);
    for (u32 r = 0; r < in.ranks; ++r) {
      const CellCopy& c = in.cells[r];
      if (r == in.me || !c.valid || c.step != in.step) continue;
      for (u32 i = 0; i < c.views; ++i) offer(c.view[i].epoch);
    }
    return best;
  }
};

}  // namespace

BarrierDecision decide(const BarrierInput& in) { return Decider{in}.run(); }

namespace {
u32* cell_members(Cell* cell) { return reinterpret_cast<u32*>(cell + 1); }
const u32* cell_members(const Cell* cell) { return reinterpret_cast<const u32*>(cell + 1); }

// What lies between two looks at a version is read while it may be written: word by word, as the memory model asks for. The
// fences order it: a reader that saw one word of the writer's sees, behind its fence, the odd version of before that word.
template <class T>
T word_of(const T& at) {
  return __atomic_load_n(&at, __ATOMIC_RELAXED);
}
template <class T>
void put_word(T& at, T value) {
  __atomic_store_n(&at, value, __ATOMIC_RELAXED);
}
}  // namespace

void write_cell(Cell* cell, u32 ranks, u64 step, u32 incarnation, u32 tokens, u64 done, const KnownView* views, u32 count) {
  u64 version = cell->version.load(std::memory_order_relaxed) | 1;
  cell->version.store(version, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  put_word(cell->step, step);
  put_word(cell->incarnation, incarnation);
  put_word(cell->tokens, tokens);
  put_word(cell->done, done);
  put_word(cell->views, u64(count));
  for (u32 i = 0; i < count; ++i) {
    put_word(cell->view[i].epoch, views[i].epoch);
    put_word(cell->view[i].digest, views[i].digest);
    for (u32 r = 0; r < ranks; ++r) put_word(cell_members(cell)[u64(i) * ranks + r], views[i].incarnation[r]);
  }
  cell->version.store(version + 1, std::memory_order_release);
}

bool read_cell(const Cell* cell, u32 ranks, CellCopy* out) {
  out->valid = false;
  for (int tries = 0; tries < 4; ++tries) {
    u64 before = cell->version.load(std::memory_order_acquire);
    if (before == 0 || before & 1) return false;
    out->step = word_of(cell->step);
    out->incarnation = word_of(cell->incarnation);
    out->tokens = word_of(cell->tokens);
    out->done = word_of(cell->done);
    u64 views = word_of(cell->views);
    if (views > kCellViews) continue;  // torn read
    out->views = u32(views);
    for (u32 i = 0; i < views; ++i) {
      out->view[i] = {word_of(cell->view[i].epoch), word_of(cell->view[i].digest)};
      for (u32 r = 0; r < ranks; ++r) out->members[i][r] = word_of(cell_members(cell)[u64(i) * ranks + r]);
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    if (cell->version.load(std::memory_order_relaxed) != before) continue;
    out->valid = true;
    return true;
  }
  return false;
}

}  // namespace ep

// The decision on cells that somebody made up: the simulator's ranks decide with this very code.
int ep_barrier_decide(uint32_t ranks, uint32_t me, uint32_t inc, uint64_t step, const uint64_t* epochs, const uint32_t* members,
                      const int32_t* mine, const uint64_t* cells, const uint32_t* dead, uint64_t* out) {
  using namespace ep;
  if (ranks == 0 || ranks > EP_MAX_RANKS || me >= ranks) return fail(EP_EINVAL, "rank %u of %u ranks", me, ranks);
  static thread_local std::vector<CellCopy> copies(EP_MAX_RANKS);
  static thread_local std::vector<std::atomic<u32>> words(EP_MAX_RANKS);
  auto known = [&](int32_t index) { return KnownView{epochs[index], 0, 0, members + u64(index) * ranks}; };
  for (u32 r = 0; r < ranks; ++r) {
    words[r].store(dead[r], std::memory_order_relaxed);
    const u64* cell = cells + u64(r) * EP_CELL_WORDS;
    CellCopy& copy = copies[r];
    copy.step = cell[0];
    copy.incarnation = u32(cell[1]);
    copy.views = u32(cell[2]);
    if (copy.views > kCellViews) return fail(EP_EINVAL, "a cell of rank %u with %u views", r, copy.views);
    copy.valid = copy.views > 0;
    for (u32 i = 0; i < copy.views; ++i) {
      copy.view[i] = {epochs[cell[3 + i]], 0};
      memcpy(copy.members[i], members + cell[3 + i] * ranks, ranks * 4);
    }
  }
  BarrierInput in{};
  in.ranks = ranks;
  in.me = me;
  in.my_incarnation = inc;
  in.step = step;
  if (mine[0] >= 0) in.running = known(mine[0]);
  for (u32 i = 0; i < EP_BANKS; ++i) {
    if (mine[1 + i] >= 0) in.staged[in.snapshot++] = known(mine[1 + i]);
    if (mine[1 + EP_BANKS + i] >= 0) in.staged_now[in.staged_count++] = known(mine[1 + EP_BANKS + i]);
  }
  in.cells = copies.data();
  in.dead = words.data();
  const BarrierDecision d = decide(in);
  const u64 found[] = {u64(d.kind), d.epoch, d.base, d.waits_for, u64(d.doomed)};
  memcpy(out, found, sizeof found);
  return 0;
}
