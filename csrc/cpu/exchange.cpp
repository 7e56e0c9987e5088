// One exchange on the CPU: dispatch pushes rows, combine pulls outputs (design: protocol, section 2).
#include <cstdio>
#include <cstring>

#include "common/errors.h"
#include "common/sys.h"
#include "runner.h"

namespace ep {

namespace {

constexpr u64 kLook = 5'000'000;  // how long to sleep before looking at dead, fenced and leave words unasked

std::atomic<u64>& word(u64& w) { return *reinterpret_cast<std::atomic<u64>*>(&w); }

}  // namespace

// What a rank waits for: the same flag of every member.
struct Runner::Wait {
  u32 channel, exchange, phase;  // phase as in ep_status
  u64 tag;
  u8* base;      // flags in my own region, one per source
  u64 stride;
  u64& since;    // where an interrupted wait keeps its beginning
  std::atomic<u64>& flag(u32 source) const { return word(*reinterpret_cast<u64*>(base + source * stride)); }
};

int Runner::torn_status() {
  return fail(EP_ETORN, "step %llu is torn: %s; it must be repeated", (unsigned long long)step_, tear_reason().c_str());
}

int Runner::wait_flags(const Wait& w) {
  Header& h = *own_.header;
  const u32* members = view_->tables.head->incarnation;
  const u64 resumed = now_ns(), begin = w.since ? w.since : resumed;
  bool recorded = w.since && h.wait.owner.load() == w.channel + 1, signalled = false;
  w.since = 0;
  auto done = [&](int status) {
    h.runner_asleep[w.channel].store(kAwake);
    if (recorded) {
      h.wait.phase.store(0);
      h.wait.owner.store(0);
    }
    h.progress.fetch_add(1, std::memory_order_relaxed);
    return status;
  };
  auto torn = [&](const char* why) {
    tear(why);
    return done(torn_status());
  };
  char text[160];
  for (u32 polls = 0;; ++polls) {
    u32 wake_seen = h.runner_wake[w.channel].load();
    if (polls >= spins_) h.runner_asleep[w.channel].store(kForFlags);
    u32 missing = ~0u;
    for (u32 m = 0; m < g_.max_ranks; ++m) {
      if (!members[m] || m == me_) continue;
      u64 f = w.flag(m).load(std::memory_order_acquire);
      if (f == w.tag) continue;
      if (missing == ~0u) missing = m;
      u64 step = tag_step(f);
      bool same_step = step == step_;
      if (step > step_ || (same_step && tag_epoch(f) != tag_epoch(w.tag)) || (same_step && (f ^ w.tag) && f > w.tag)) {
        snprintf(text, sizeof text, "rank %u went on to step %llu or disagrees on the exchange", m, (unsigned long long)step);
        return torn(text);
      }
    }
    if (missing == ~0u) return done(0);
    if (polls < spins_) continue;
    if (torn_.load()) return done(torn_status());
    if (kFaultChecks && is_fenced(h)) return torn("this rank was fenced");
    for (u32 m = 0; m < g_.max_ranks; ++m)
      if (members[m] && m != me_ && is_dead(m, members[m])) {
        snprintf(text, sizeof text, "rank %u incarnation %u is dead", m, members[m]);
        return torn(text);
      }
    u32 by = 0;
    if (left_by(&by) >= step_) {
      snprintf(text, sizeof text, "rank %u left step %llu", by, (unsigned long long)step_);
      return torn(text);
    }
    for (u32 m = missing; m < g_.max_ranks; ++m)
      if (members[m] && m != me_ && came_to_a_later_barrier(m) && w.flag(m).load(std::memory_order_acquire) != w.tag) {
        snprintf(text, sizeof text, "rank %u ended step %llu without this exchange", m, (unsigned long long)step_);
        return torn(text);
      }
    if (called_off(w.channel)) return torn("the engine tore it");
    u64 now = now_ns();
    if (now - begin >= h.timeouts.exchange_timeout_ns) {
      snprintf(text, sizeof text, "rank %u did not answer within %llu ms", missing, (unsigned long long)(h.timeouts.exchange_timeout_ns / 1000000));
      return torn(text);
    }
    u32 nobody = 0;
    const bool first = kFaultChecks && !recorded && h.wait.owner.compare_exchange_strong(nobody, w.channel + 1);
    recorded = recorded || first;
    if (first || (recorded && h.wait.rank.load() != missing)) {
      h.wait.exchange.store(w.exchange);
      h.wait.rank.store(missing);
      h.wait.since_ns.store(begin);
      h.wait.phase.store(w.phase);
    }
    if (signals_wait(signalled, resumed, now)) {
      h.runner_asleep[w.channel].store(kAwake);
      w.since = begin;
      return fail(EP_EINTR, "a wait for rank %u was interrupted by a signal; call again", missing);
    }
    u64 left = h.timeouts.exchange_timeout_ns - (now - begin);
    signalled = futex_wait(h.runner_wake[w.channel], wake_seen, left < kLook ? left : kLook);
  }
}

// What a member said in this step it said before its cell: flags that are read after this are all there will be.
bool Runner::came_to_a_later_barrier(u32 rank) {
  CellCopy copy;
  for (u32 parity = 0; parity < 2; ++parity) {
    const Cell* c = cell(own_.data, parity, rank);
    if (read_once(c->step) > step_ && read_cell(c, g_.max_ranks, &copy) && copy.step > step_ && copy.incarnation == view_->tables.head->incarnation[rank]) return true;
  }
  return false;
}

// The record of a wait that was interrupted and will not go on.
void Runner::forget_wait(u32 channel) {
  Header& h = *own_.header;
  if (!flights_[channel].waits_since) return;
  flights_[channel].waits_since = 0;
  if (h.wait.owner.load() != channel + 1) return;
  h.wait.phase.store(0);
  h.wait.owner.store(0);
}

// True when `to` has the flag of every member, so that mine was the last it waits for.
static bool all_there(const u8* flags, u64 stride, u64 tag, const u32* members, u32 ranks, u32 to) {
  for (u32 m = 0; m < ranks; ++m)
    if (members[m] && m != to && reinterpret_cast<const std::atomic<u64>*>(flags + m * stride)->load() != tag) return false;
  return true;
}

int Runner::dispatch_send(const Dispatch& d) {
  if (!in_step_) return fail(EP_EUSAGE, "dispatch outside a step; open one with step_begin");
  if (d.exchange >= g_.exchanges || d.channel >= g_.exchange[d.exchange].channels)
    return fail(EP_EINVAL, "exchange %u channel %u does not exist; the group has %u exchanges", d.exchange, d.channel, g_.exchanges);
  if (d.layer >= g_.layers) return fail(EP_EINVAL, "layer %u is not below %u", d.layer, g_.layers);
  const auto& x = g_.exchange[d.exchange];
  if (d.tokens > x.max_tokens) return fail(EP_ECAP, "%u tokens are more than the cap of %u; raise max_tokens or split the batch", d.tokens, x.max_tokens);
  Flight& f = flights_[d.channel];
  if (torn_.load()) return torn_status();
  if (f.phase != Flight::kIdle) return fail(EP_EUSAGE, "dispatch on channel %u before the combine of its last exchange", d.channel);
  if (int bad = route(d, f)) return bad;
  f.exchange = d.exchange;
  f.layer = d.layer;
  f.tokens = d.tokens;
  f.tag = make_tag(step_, view_->epoch, d.sequence, d.exchange);
  x.replicated ? keep_rows(d, f) : push_rows(d, f);
  const ChannelLayout& l = layout_.channel[d.exchange][d.channel];
  const u32* members = view_->tables.head->incarnation;
  for (u32 n = 1; n <= g_.max_ranks; ++n) {
    const u32 to = (me_ + n) % g_.max_ranks;  // everyone starts with another reader
    if (!members[to]) continue;
    announce(to, d, f);
    if (to != me_ && all_there(data_of(to) + l.arrival, sizeof(Arrival), f.tag, members, g_.max_ranks, to)) ring_peer(*view_, to, d.channel);
  }
  f.phase = Flight::kSent;
  exchanged_.store(1, std::memory_order_relaxed);
  failpoint(*own_.header, EP_FAIL_SENT);
  return 0;
}

int Runner::dispatch_recv(u32 exchange, u32 channel, u64* arrived, u32* source_tokens) {
  if (!in_step_ || channel >= EP_MAX_CHANNELS) return fail(EP_EUSAGE, "dispatch_recv outside a step");
  if (torn_.load()) return torn_status();
  Flight& f = flights_[channel];
  if (f.phase != Flight::kSent || f.exchange != exchange) return fail(EP_EUSAGE, "dispatch_recv without its dispatch_send on channel %u", channel);
  u8* arrivals = own_.data + layout_.channel[exchange][channel].arrival;
  if (int bad = wait_flags({channel, exchange, 2, f.tag, arrivals, sizeof(Arrival), f.waits_since})) return bad;
  if (int bad = take_rows(f, channel, arrived, source_tokens)) return bad;
  f.phase = Flight::kReceived;
  failpoint(*own_.header, EP_FAIL_RECEIVED);
  return 0;
}

int Runner::combine_send(u32 exchange, u32 channel) {
  if (!in_step_ || channel >= EP_MAX_CHANNELS) return fail(EP_EUSAGE, "combine outside a step");
  if (torn_.load()) return torn_status();
  Flight& f = flights_[channel];
  if (f.phase != Flight::kReceived || f.exchange != exchange) return fail(EP_EUSAGE, "combine without its dispatch on channel %u", channel);
  const ChannelLayout& l = layout_.channel[exchange][channel];
  const u32* members = view_->tables.head->incarnation;
  finish_outputs(f, channel);
  for (u32 n = 1; n < g_.max_ranks; ++n) {
    const u32 to = (me_ + n) % g_.max_ranks;
    if (!members[to]) continue;
    u8* flags = data_of(to) + l.ready;
    failpoint(*own_.header, EP_FAIL_READY);
    word(reinterpret_cast<Flag*>(flags)[me_].word).store(f.tag, std::memory_order_seq_cst);
    if (all_there(flags, sizeof(Flag), f.tag, members, g_.max_ranks, to)) ring_peer(*view_, to, channel);
  }
  f.phase = Flight::kReady;
  failpoint(*own_.header, EP_FAIL_READY_SENT);
  return 0;
}

int Runner::combine_recv(u32 exchange, u32 channel, void* out, u32 out_dtype) {
  if (!in_step_ || channel >= EP_MAX_CHANNELS) return fail(EP_EUSAGE, "combine outside a step");
  if (torn_.load()) return torn_status();
  Flight& f = flights_[channel];
  if (f.phase != Flight::kReady || f.exchange != exchange) return fail(EP_EUSAGE, "combine_recv without its combine_send on channel %u", channel);
  const ChannelLayout& l = layout_.channel[exchange][channel];
  if (int bad = wait_flags({channel, exchange, 3, f.tag, own_.data + l.ready, sizeof(Flag), f.waits_since})) return bad;

  if (int bad = sum_outputs(f, channel, out, out_dtype)) return bad;
  f.phase = Flight::kIdle;
  failpoint(*own_.header, EP_FAIL_PULLED);
  return 0;
}

}  // namespace ep
