// The step barrier, view adoption, tearing and the end-of-step check (design: protocol, sections 3 and 4).
#include <cstdio>
#include <cstring>

#include "common/errors.h"
#include "common/sys.h"
#include "runner.h"

namespace ep {

namespace {
constexpr u64 kLook = 5'000'000;        // how long to sleep before looking at dead and fenced words unasked
constexpr u64 kWordOfDaemon = 1'000'000'000;  // a rank that was left behind waits so long to hear why
constexpr u64 kDoomedPause = 2'000'000;  // before the next barrier while a member of the view is dead

u64 min_ns(u64 a, u64 b) { return a < b ? a : b; }
}  // namespace

// Takes what is staged by now; [0] is the running view.
void Runner::post_cells(u32 tokens) {
  snapshot_.clear();
  KnownView views[kCellViews];
  std::shared_ptr<Region> targets[EP_MAX_RANKS];
  {
    std::lock_guard<std::mutex> guard(views_mutex_);
    auto take = [&](const StagedView& v) {
      Known k;
      k.view = {v.epoch, v.tables.head->previous_epoch, v.tables.head->digest, nullptr};
      memcpy(k.incarnation, v.tables.head->incarnation, sizeof k.incarnation);
      snapshot_.push_back(k);
      for (u32 r = 0; r < g_.max_ranks; ++r)
        if (v.peer[r] && !targets[r]) targets[r] = v.peer[r];
    };
    take(*view_);
    for (u64 e = view_->epoch + 1; e < view_->epoch + EP_BANKS; ++e)
      if (views_[e % EP_BANKS].epoch == e) take(views_[e % EP_BANKS]);
  }
  for (size_t i = 0; i < snapshot_.size(); ++i) {
    snapshot_[i].view.incarnation = snapshot_[i].incarnation;
    views[i] = snapshot_[i].view;
  }
  for (u32 n = 0; n < g_.max_ranks; ++n) {
    u32 r = (me_ + n) % g_.max_ranks;
    if (!targets[r]) continue;
    failpoint(*own_.header, EP_FAIL_CELLS);
    write_cell(cell(targets[r]->data, step_, me_), g_.max_ranks, step_, inc_, tokens, done_, views, u32(snapshot_.size()));
    std::atomic_thread_fence(std::memory_order_seq_cst);
    // Only the last cell of a barrier needs to wake its reader; a cell may also carry news, so any staged view does too.
    bool last = snapshot_.size() > 1;
    if (!last) {
      last = true;
      const Cell* theirs = cell(targets[r]->data, step_, 0);
      for (u32 m = 0; m < g_.max_ranks && last; ++m) {
        if (!view_->tables.head->incarnation[m] || m == r || is_dead(m, view_->tables.head->incarnation[m])) continue;
        auto c = reinterpret_cast<const Cell*>(reinterpret_cast<const u8*>(theirs) + m * layout_.cell_bytes);
        last = read_once(c->step) == step_;
      }
    }
    if (last) ring(targets[r]->header->runner_wake[0], targets[r]->header->runner_asleep[0]);
  }
  cells_posted_ = true;
  announced_ = tokens;
  failpoint(*own_.header, EP_FAIL_CELLS_SENT);
}

void Runner::read_cells(u64 step) {
  for (u32 r = 0; r < g_.max_ranks; ++r) {
    cells_[r].valid = false;
    if (r != me_ && read_once(cell(own_.data, step, r)->step) == step) read_cell(cell(own_.data, step, r), g_.max_ranks, &cells_[r]);
  }
}

// The number of a later barrier that a known peer has already written, or 0.
u64 Runner::higher_barrier() {
  u64 highest = 0;
  CellCopy copy;
  for (u32 parity = 0; parity < 2; ++parity)
    for (u32 r = 0; r < g_.max_ranks; ++r) {
      const Cell* c = cell(own_.data, parity, r);
      const u64 named = read_once(c->step);
      if (r == me_ || named <= step_ || named <= highest || !read_cell(c, g_.max_ranks, &copy) || copy.step <= step_) continue;
      if (is_dead(r, copy.incarnation)) continue;
      bool known = false;
      std::lock_guard<std::mutex> guard(views_mutex_);
      for (auto& v : views_) known |= v.epoch && v.tables.head->incarnation[r] == copy.incarnation;
      // Of a view that I have not staged, only its own members can tell me; that is how an expelled rank learns it.
      if (known && copy.step > highest) highest = copy.step;
    }
  return highest;
}

// Whether every live member of the running view has written to me for this barrier or a later one. Only then nothing can
// come for this one any more: whoever passed it did not need a cell that is still on its way to me.
bool Runner::heard_all() {
  CellCopy copy;
  for (u32 r = 0; r < g_.max_ranks; ++r) {
    const u32 incarnation = view_->tables.head->incarnation[r];
    if (!incarnation || r == me_ || is_dead(r, incarnation)) continue;
    bool heard = false;
    for (u32 parity = 0; parity < 2; ++parity)
      heard |= read_cell(cell(own_.data, parity, r), g_.max_ranks, &copy) && copy.incarnation == incarnation && copy.step >= step_;
    if (!heard) return false;
  }
  return true;
}

void Runner::adopt(const BarrierDecision& d) {
  StagedView* old = view_;
  {
    std::lock_guard<std::mutex> guard(views_mutex_);
    view_ = &views_[d.epoch % EP_BANKS];
  }
  if (old && old != view_) {
    // Those left behind hear of it before anyone goes on, so that nothing they finish can count.
    for (u32 r = 0; r < g_.max_ranks; ++r)
      if (old->peer[r] && old->tables.head->incarnation[r] != view_->tables.head->incarnation[r]) leave(*old, r, d.epoch, kLeaveExpelled);
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  own_.header->epoch.store(d.epoch);
  if (on_adopted) on_adopted(d.epoch, step_);
}

void Runner::fill_info(ep_step_info* out) const {
  *out = {};
  const Bank& bank = *view_->tables.head;
  out->epoch = bank.epoch;
  out->step = step_;
  out->digest = bank.digest;
  for (u32 r = 0; r < g_.max_ranks; ++r) {
    if (!bank.incarnation[r]) continue;
    ++out->members;
    out->incarnation[r] = bank.incarnation[r];
    if (r != me_ && cells_[r].valid && cells_[r].step == step_) out->tokens[r] = cells_[r].tokens;
  }
}

// The least number of works complete on those whose cells count: members of `epoch` that wrote one for this barrier.
u64 Runner::least_done(u64 epoch) {
  std::lock_guard<std::mutex> guard(views_mutex_);
  const u32* members = views_[epoch % EP_BANKS].tables.head->incarnation;
  u64 least = ~0ull;
  for (u32 r = 0; r < g_.max_ranks; ++r) {
    const CellCopy& c = cells_[r];
    if (r != me_ && c.valid && c.step == step_ && members[r] == c.incarnation && c.views && c.done < least) least = c.done;
  }
  return least;
}

// Agreed completion: all run the work after the least `done` of the members of both the old and the new view. Who is
// ahead undoes its last one; a joiner takes the others' word.
void Runner::agree(const BarrierDecision& d, ep_step_info* out) {
  if (!g_.agreed) return;
  const u64 least = least_done(d.epoch);
  if (least < done_) done_ = least;  // none, ~0, changes nothing
  out->work = done_ + 1;
  out->settled = done_;
}

static int interrupted() { return fail(EP_EINTR, "the barrier was interrupted by a signal; call again"); }

// The others went on without this rank. Why, its daemon hears from the controller when they have said so.
int Runner::expelled(const BarrierDecision& d) {
  Header& h = *own_.header;
  const u64 begin = now_ns();
  if (!word_by_) word_by_ = begin + kWordOfDaemon;
  bool signalled = false;
  for (u64 now = begin; !is_fenced(h) && now < word_by_ && !called_off(0); now = now_ns()) {
    if (signals_wait(signalled, begin, now)) return interrupted();
    const u32 seen = h.runner_wake[0].load();
    h.runner_asleep[0].store(kForFlags);
    if (!is_fenced(h)) signalled = futex_wait(h.runner_wake[0], seen, min_ns(kLook, word_by_ - now));
  }
  if (!is_fenced(h)) {
    char text[EP_TEXT];
    snprintf(text, sizeof text, "the other ranks went on without it in epoch %llu, and its daemon has not said why; see `elasticep status`", (unsigned long long)d.epoch);
    fence(h, inc_, d.epoch, text);
  }
  return fail(EP_EFENCED, "rank %u incarnation %u was expelled: %s", me_, inc_, h.fenced_text);
}

int Runner::barrier(u32 tokens, u64 timeout_ns, ep_step_info* out) {
  if (in_step_) return fail(EP_EUSAGE, "step_begin inside a step; end the step first");
  Header& h = *own_.header;
  const u64 begin = now_ns(), deadline = begin + (timeout_ns ? timeout_ns : h.timeouts.step_timeout_ns);
  bool waiting = barrier_shown_, signalled = false;
  barrier_shown_ = false;
  auto done = [&](int status) {
    barrier_shown_ = waiting && status == EP_EINTR && !serves;
    if (waiting && !barrier_shown_) h.wait.phase.store(0);
    h.runner_asleep[0].store(kAwake);
    return status;
  };
  for (;;) {
    if (kFaultChecks && is_fenced(h)) return done(fail(EP_EFENCED, "rank %u incarnation %u was expelled: %s", me_, inc_, h.fenced_text));
    if (view_)
      if (u64 epoch = left_behind()) {
        BarrierDecision gone;
        gone.epoch = epoch;
        return done(expelled(gone));
      }
    if (view_ && !cells_posted_) post_cells(tokens);
    u32 wake_seen = h.runner_wake[0].load();
    h.runner_asleep[0].store(kForFlags);
    u64 staged_seen = staged_version_.load();

    Known now[EP_BANKS];
    BarrierInput in{};
    in.ranks = g_.max_ranks;
    in.me = me_;
    in.my_incarnation = inc_;
    {
      std::lock_guard<std::mutex> guard(views_mutex_);
      u64 from = view_ ? view_->epoch : 0;
      for (u64 floor = from;;) {
        StagedView* next = nullptr;
        for (auto& v : views_)
          if (v.epoch > floor && (!next || v.epoch < next->epoch)) next = &v;
        if (!next) break;
        floor = next->epoch;
        Known& k = now[in.staged_count];
        memcpy(k.incarnation, next->tables.head->incarnation, sizeof k.incarnation);
        in.staged_now[in.staged_count++] = {next->epoch, next->tables.head->previous_epoch, next->tables.head->digest, k.incarnation};
      }
    }
    in.dead = h.dead;
    in.cells = cells_.data();
    BarrierDecision d;
    if (view_) {
      read_cells(step_);
      in.step = step_;
      in.running = snapshot_[0].view;
      in.running.incarnation = snapshot_[0].incarnation;
      for (size_t i = 1; i < snapshot_.size(); ++i) in.staged[in.snapshot++] = snapshot_[i].view;
      d = decide(in);
      // A later barrier is joined only where this one cannot be decided: a rank that is merely slower than others, in
      // steps without exchanges, must not skip it.
      if (d.kind == BarrierDecision::kWait && higher_barrier() && heard_all()) {
        // They may have written their cells since these were read, and have passed.
        read_cells(step_);
        d = decide(in);
        u64 higher = d.kind == BarrierDecision::kWait ? higher_barrier() : 0;
        if (higher) {
          step_ = higher;
          cells_posted_ = false;
          continue;
        }
      }
    } else if (join(in, &d)) {
      continue;  // became a member, or entered a barrier as one
    }
    if (d.kind == BarrierDecision::kExpelled) return done(expelled(d));
    if (d.kind == BarrierDecision::kRun) {
      // All must see the same tokens: those of the cell, which a call after a time-out did not write anew. A joiner that
      // enters without one has announced nothing.
      const u32 announced = view_ ? announced_ : 0;
      if (!view_ || d.epoch != view_->epoch) adopt(d);
      h.progress.fetch_add(1);
      if (!d.doomed) {
        h.step.store(step_);
        fill_info(out);
        agree(d, out);
        out->tokens[me_] = announced;
        torn_.store(0);
        exchanged_.store(0);
        for (auto& f : flights_) f.phase = Flight::kIdle;
        in_step_ = true;
        return done(0);
      }
      for (u32 r = 0; r < g_.max_ranks; ++r)
        if (view_->peer[r]) leave(*view_, r, view_->epoch, kLeaveDoomed);
      next_barrier();
      u64 pause_until = now_ns() + kDoomedPause;
      while (now_ns() < pause_until && staged_version_.load() == staged_seen && !is_fenced(h)) {
        u32 seen = h.runner_wake[0].load();
        if (staged_version_.load() == staged_seen) futex_wait(h.runner_wake[0], seen, kDoomedPause);
      }
      if (called_off(0) || signals_wait(false, begin, now_ns())) return done(interrupted());
      if (now_ns() >= deadline) return done(fail(EP_ETIMEOUT, "a member of epoch %llu is dead and no later view was staged in time; see `elasticep status`", (unsigned long long)view_->epoch));
      continue;
    }
    u64 now_time = now_ns();
    if (now_time >= deadline) {
      if (!view_) return done(fail(EP_ETIMEOUT, "no view with rank %u incarnation %u was adopted in time; see `elasticep status` for what the controller waits for", me_, inc_));
      return done(fail(EP_ETIMEOUT, "rank %u did not reach barrier %llu in time", d.waits_for, (unsigned long long)step_));
    }
    if (kFaultChecks && (!waiting || h.wait.rank.load() != d.waits_for)) {
      waiting = true;
      h.wait.rank.store(view_ ? d.waits_for : me_);
      h.wait.exchange.store(0);
      if (barrier_wait_.step != step_ || barrier_wait_.rank != d.waits_for) barrier_wait_ = {step_, now_time, d.waits_for};
      h.wait.since_ns.store(barrier_wait_.since_ns);
      h.wait.phase.store(view_ ? 1u : 4u);
    }
    if (called_off(0) || signals_wait(signalled, begin, now_time)) return done(interrupted());
    signalled = futex_wait(h.runner_wake[0], wake_seen, min_ns(kLook, deadline - now_time));
  }
}

void Runner::leave_barrier() {
  if (barrier_shown_) own_.header->wait.phase.store(0);
  barrier_shown_ = false;
}

// A rank without a view. 1: it now has one and the barrier goes on as a member. 0: *decision says run or wait.
int Runner::join(BarrierInput& in, BarrierDecision* decision) {
  for (u32 i = 0; i < in.staged_count; ++i) {
    const KnownView& v = in.staged_now[i];
    if (v.previous_epoch || v.incarnation[me_] != inc_) continue;
    BarrierDecision first;
    first.epoch = v.epoch;
    adopt(first);
    return 1;
  }
  // Barriers that members have written to me, newest first. An earlier group may have left cells of higher ones.
  u64 steps[2] = {0, 0};
  CellCopy copy;
  for (u32 parity = 0; parity < 2; ++parity)
    for (u32 r = 0; r < g_.max_ranks; ++r) {
      const Cell* c = cell(own_.data, parity, r);
      if (r == me_ || c->step <= steps[parity] || !read_cell(c, g_.max_ranks, &copy) || copy.step <= steps[parity]) continue;
      bool known = false;
      for (u32 i = 0; i < in.staged_count; ++i) known |= in.staged_now[i].incarnation[r] == copy.incarnation;
      if (known) steps[parity] = copy.step;
    }
  if (steps[1] > steps[0]) std::swap(steps[0], steps[1]);
  for (u64 step : steps) {
    if (!step) continue;
    in.step = step;
    read_cells(step);
    BarrierDecision d = decide(in);
    if (d.kind != BarrierDecision::kRun) continue;
    step_ = step;
    if (const u64 least = least_done(d.epoch); least != ~0ull) done_ = least;
    bool already = false;
    for (u32 r = 0; r < g_.max_ranks; ++r) already |= r != me_ && cells_[r].valid && cells_[r].step == step && cells_[r].epoch() >= d.epoch;
    if (already) {
      pass_floor();
      adopt(d);
      cells_posted_ = false;
      return 1;
    }
    *decision = d;
    return 0;
  }
  return 0;
}

std::string Runner::tear_reason() {
  std::lock_guard<std::mutex> guard(tear_mutex_);
  return tear_reason_;
}

void Runner::tear(const char* why) {
  std::lock_guard<std::mutex> guard(tear_mutex_);
  if (!in_step_ || torn_.load()) return;
  for (u32 r = 0; r < g_.max_ranks; ++r)
    if (view_->peer[r]) leave(*view_, r, view_->epoch, kLeaveTorn);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  torn_.store(1);
  tear_reason_ = why;
  own_.header->torn_steps.fetch_add(1);
  wake();
}

int Runner::end_step(u32* complete) {
  if (!in_step_) return fail(EP_EUSAGE, "step_end without a step");
  Header& h = *own_.header;
  failpoint(h, EP_FAIL_END);
  std::atomic_thread_fence(std::memory_order_acquire);
  for (auto& f : flights_)
    if (!torn_.load() && f.phase != Flight::kIdle) tear("the engine ended the step inside an exchange");
  u32 by = 0;
  if (!torn_.load() && left_by(&by) >= step_) {
    char text[96];
    snprintf(text, sizeof text, "rank %u left step %llu", by, (unsigned long long)step_);
    tear(text);
  }
  if (kFaultChecks && !torn_.load() && is_fenced(h)) tear("this rank was fenced");
  *complete = torn_.load() ? 0 : 1;
  {
    std::lock_guard<std::mutex> guard(load_mutex_);
    auto loads = reinterpret_cast<u64*>(own_.data + layout_.loads);
    for (u32 layer = 0; layer < g_.layers; ++layer) {
      if (!load_touched_[layer]) continue;
      for (u64 i = u64(layer) * g_.experts; i < u64(layer + 1) * g_.experts; ++i) {
        if (*complete) reinterpret_cast<std::atomic<u64>*>(loads + i)->fetch_add(load_[i], std::memory_order_relaxed);
        load_[i] = 0;
      }
      load_touched_[layer] = 0;
    }
  }
  if (*complete) {
    h.complete_steps.fetch_add(1);
    if (g_.agreed && exchanged_.load()) ++done_;
  }
  for (u32 c = 0; c < EP_MAX_CHANNELS; ++c) forget_wait(c);
  in_step_ = false;
  next_barrier();
  h.progress.fetch_add(1);
  return 0;
}

}  // namespace ep
