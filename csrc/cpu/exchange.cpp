// One exchange on the CPU: dispatch pushes rows, combine pulls outputs (design: protocol, section 2).
#include <cstdio>
#include <cstring>

#include "common/errors.h"
#include "common/sys.h"
#include "convert.h"
#include "runner.h"

namespace ep {

namespace {

constexpr u64 kLook = 5'000'000;  // how long to sleep before looking at dead, fenced and leave words unasked

std::atomic<u64>& word(u64& w) { return *reinterpret_cast<std::atomic<u64>*>(&w); }

bool bit(const u64* bits, u32 i) { return bits[i / 64] >> (i % 64) & 1; }

}  // namespace

// What a rank waits for: the same flag of every member.
struct Runner::Wait {
  u32 channel, exchange, phase;  // phase as in ep_status
  u64 tag;
  u8* base;      // flags in my own region, one per source
  u64 stride;
  std::atomic<u64>& flag(u32 source) const { return word(*reinterpret_cast<u64*>(base + source * stride)); }
};

int Runner::torn_status() {
  return fail(EP_ETORN, "step %llu is torn: %s; it must be repeated", (unsigned long long)step_, tear_reason().c_str());
}

int Runner::wait_flags(const Wait& w) {
  Header& h = *own_.header;
  const u32* members = view_->tables.head->incarnation;
  const u64 begin = now_ns();
  bool recorded = false;
  auto done = [&](int status) {
    h.runner_asleep[w.channel].store(kAwake);
    if (recorded) h.wait.phase.store(0);
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
    if (is_fenced(h)) return torn("this rank was fenced");
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
    u64 now = now_ns();
    if (now - begin >= h.timeouts.exchange_timeout_ns) {
      snprintf(text, sizeof text, "rank %u did not answer within %llu ms", missing, (unsigned long long)(h.timeouts.exchange_timeout_ns / 1000000));
      return torn(text);
    }
    if (!recorded || h.wait.rank.load() != missing) {
      recorded = true;
      h.wait.exchange.store(w.exchange);
      h.wait.rank.store(missing);
      h.wait.since_ns.store(begin);
      h.wait.phase.store(w.phase);
    }
    u64 left = h.timeouts.exchange_timeout_ns - (now - begin);
    futex_wait(h.runner_wake[w.channel], wake_seen, left < kLook ? left : kLook);
  }
}

// Step 1: logical experts to copies, by the bank of this step's view.
int Runner::route(const Dispatch& d, Flight& f) {
  const u64 pairs = u64(d.tokens) * g_.topk;
  f.routes.resize(pairs);
  f.weights.assign(d.weights, d.weights + pairs);
  f.owed.assign(u64(d.tokens) * 2, 0);
  for (u64 i = 0; i < pairs; ++i)
    if (d.ids[i] < -1 || d.ids[i] >= int32_t(g_.experts))
      return fail(EP_EINVAL, "token %llu names expert %d; ids must be -1 (none) or 0..%u", (unsigned long long)(i / g_.topk), d.ids[i], g_.experts - 1);
  std::lock_guard<std::mutex> guard(load_mutex_);
  load_touched_[d.layer] = 1;
  u32* load = load_.data() + u64(d.layer) * g_.experts;
  for (u32 t = 0; t < d.tokens; ++t) {
    const u32 point = split_point(t, me_, d.layer, step_);
    u8 lost = 0;
    for (u32 k = 0; k < g_.topk; ++k) {
      const u64 i = u64(t) * g_.topk + k;
      f.routes[i] = {-1, -1};
      if (d.ids[i] < 0) continue;
      ++load[d.ids[i]];
      const Replica* r = choose_replica(view_->tables, g_, d.layer, u32(d.ids[i]), point);
      if (!r) {
        lost = 1;
        continue;
      }
      f.routes[i] = {r->rank, r->slot};
      f.owed[u64(t) * 2 + r->rank / 64] |= 1ull << (r->rank % 64);
    }
    if (d.lost) d.lost[t] = lost;
    if (lost && !g_.serve_lost) return fail(EP_ELOST, "token %u needs an expert of layer %u that no member holds", t, d.layer);
  }
  return 0;
}

void Runner::convert_rows(const Dispatch& d, Flight& f) {
  const auto& x = g_.exchange[d.exchange];
  const u64 elements = u64(d.tokens) * g_.hidden;
  f.wire.resize(elements * element_bytes(x.dispatch_dtype));
  std::vector<float> row(g_.hidden);
  const u64 in_bytes = u64(g_.hidden) * element_bytes(d.x_dtype), out_bytes = row_payload_bytes(x.dispatch_dtype, g_.hidden);
  for (u32 t = 0; t < d.tokens; ++t) {
    to_float(row.data(), static_cast<const u8*>(d.x) + t * in_bytes, d.x_dtype, g_.hidden);
    from_float(f.wire.data() + t * out_bytes, x.dispatch_dtype, row.data(), g_.hidden);
  }
}

// Step 2, for one reader: rows with their tails, then the bitmap, then the flag.
void Runner::push(u32 to, const Dispatch& d, const Flight& f) {
  const auto& x = g_.exchange[d.exchange];
  const ChannelLayout& l = layout_.channel[d.exchange][d.channel];
  const u64 k = g_.topk;
  u8* data = data_of(to);
  u8* rows = data + l.rows + u64(me_) * l.source_rows * l.row_bytes;
  auto slots = reinterpret_cast<int32_t*>(data + l.tail_slots) + u64(me_) * l.source_rows * k;
  auto weights = reinterpret_cast<float*>(data + l.tail_weights) + u64(me_) * l.source_rows * k;
  u64* bits = reinterpret_cast<u64*>(data + l.bitmap) + me_ * l.bitmap_words;
  const u8* from = x.dispatch_dtype == d.x_dtype ? static_cast<const u8*>(d.x) : f.wire.data();
  u64 pending = 0;
  failpoint(*own_.header, EP_FAIL_ROWS);
  for (u32 t = 0; t < d.tokens; ++t) {
    const bool goes = x.copies == EP_COPIES_ALL || (f.owed[u64(t) * 2 + to / 64] >> (to % 64) & 1);
    if (goes) {
      pending |= 1ull << (t % 64);
      memcpy(rows + t * l.row_bytes, from + t * l.row_bytes, l.row_bytes);
      for (u64 i = 0; i < k; ++i) {
        const Route& r = f.routes[t * k + i];
        slots[t * k + i] = r.rank == int32_t(to) ? r.slot : -1;
        weights[t * k + i] = f.weights[t * k + i];
      }
    }
    if (t % 64 == 63 || t + 1 == d.tokens) {
      failpoint(*own_.header, EP_FAIL_BITMAP);
      bits[t / 64] = pending;
      pending = 0;
    }
  }
  auto& arrival = reinterpret_cast<Arrival*>(data + l.arrival)[me_];
  arrival.tokens = d.tokens;
  arrival.layer = d.layer;
  failpoint(*own_.header, EP_FAIL_FLAG);
  word(arrival.tag).store(f.tag, std::memory_order_seq_cst);
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
  if (x.dispatch_dtype != d.x_dtype) convert_rows(d, f);
  const ChannelLayout& l = layout_.channel[d.exchange][d.channel];
  const u32* members = view_->tables.head->incarnation;
  for (u32 n = 1; n <= g_.max_ranks; ++n) {
    const u32 to = (me_ + n) % g_.max_ranks;  // everyone starts with another reader
    if (!members[to]) continue;
    push(to, d, f);
    if (to != me_ && all_there(data_of(to) + l.arrival, sizeof(Arrival), f.tag, members, g_.max_ranks, to)) ring_peer(*view_, to, d.channel);
  }
  f.phase = Flight::kSent;
  failpoint(*own_.header, EP_FAIL_SENT);
  return 0;
}

int Runner::dispatch_recv(u32 exchange, u32 channel, u64* arrived, u32* source_tokens) {
  if (!in_step_ || channel >= EP_MAX_CHANNELS) return fail(EP_EUSAGE, "dispatch_recv outside a step");
  if (torn_.load()) return torn_status();
  Flight& f = flights_[channel];
  if (f.phase != Flight::kSent || f.exchange != exchange) return fail(EP_EUSAGE, "dispatch_recv without its dispatch_send on channel %u", channel);
  const ChannelLayout& l = layout_.channel[exchange][channel];
  const auto& x = g_.exchange[exchange];
  u8* data = own_.data;
  auto arrivals = reinterpret_cast<Arrival*>(data + l.arrival);
  if (int bad = wait_flags({channel, exchange, 2, f.tag, data + l.arrival, sizeof(Arrival)})) return bad;

  const u32 k = g_.topk;
  const u32* members = view_->tables.head->incarnation;
  auto ids = reinterpret_cast<int32_t*>(data + l.recv_ids);
  auto weights = reinterpret_cast<float*>(data + l.recv_weights);
  auto counts = reinterpret_cast<int32_t*>(data + l.slot_counts);
  memset(counts, 0, g_.slots * 4);
  *arrived = 0;
  auto& filled = filled_[exchange][channel];
  for (u32 source = 0; source < g_.max_ranks; ++source) {
    u32 tokens = 0;
    const u64 at = u64(source) * l.source_rows;
    if (members[source]) {
      tokens = arrivals[source].tokens;
      if (tokens > x.max_tokens || arrivals[source].layer != f.layer) {
        char text[128];
        snprintf(text, sizeof text, "rank %u is at layer %u with %u tokens, this rank at layer %u", source, arrivals[source].layer, tokens, f.layer);
        tear(text);
        return torn_status();
      }
      const u64* bits = reinterpret_cast<u64*>(data + l.bitmap) + source * l.bitmap_words;
      auto tail_slots = reinterpret_cast<int32_t*>(data + l.tail_slots) + at * k;
      auto tail_weights = reinterpret_cast<float*>(data + l.tail_weights) + at * k;
      for (u32 t = 0; t < tokens; ++t) {
        const bool came = bit(bits, t);
        *arrived += came;
        for (u32 i = 0; i < k; ++i) {
          int32_t slot = came ? tail_slots[t * k + i] : -1;
          if (slot < 0 || slot >= int32_t(g_.slots)) slot = -1;  // in a step about to tear it may be anything
          else ++counts[slot];
          ids[(at + t) * k + i] = slot;
          weights[(at + t) * k + i] = slot < 0 ? 0.0f : tail_weights[t * k + i];
        }
      }
    }
    const u32 stale = filled[source] < l.source_rows ? filled[source] : u32(l.source_rows);
    for (u64 i = (at + tokens) * k; i < (at + stale) * k; ++i) ids[i] = -1, weights[i] = 0.0f;
    filled[source] = tokens;
    source_tokens[source] = tokens;
  }
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
  const auto& x = g_.exchange[exchange];
  if (int bad = wait_flags({channel, exchange, 3, f.tag, own_.data + l.ready, sizeof(Flag)})) return bad;

  const u64 hidden = g_.hidden, k = g_.topk, cap = x.max_tokens, out_bytes = hidden * element_bytes(out_dtype);
  std::vector<float> sum(hidden);
  for (u32 t = 0; t < f.tokens; ++t) {
    failpoint(*own_.header, EP_FAIL_PULL);
    std::fill(sum.begin(), sum.end(), 0.0f);
    if (x.reduce == EP_REDUCE_PER_EXPERT) {
      for (u64 i = 0; i < k; ++i) {
        const Route& r = f.routes[t * k + i];
        if (r.rank < 0) continue;
        const u8* y = data_of(u32(r.rank)) + l.y + ((me_ * cap + t) * k + i) * l.y_row_bytes;
        accumulate(sum.data(), y, x.combine_dtype, f.weights[t * k + i], hidden);
      }
    } else {
      for (u32 half = 0; half < 2; ++half)
        for (u64 owed = f.owed[u64(t) * 2 + half]; owed; owed &= owed - 1) {
          const u32 r = half * 64 + u32(__builtin_ctzll(owed));
          const u8* y = data_of(r) + l.y + (me_ * cap + t) * l.y_row_bytes;
          accumulate(sum.data(), y, x.combine_dtype, 1.0f, hidden);
        }
    }
    from_float(static_cast<u8*>(out) + t * out_bytes, out_dtype, sum.data(), hidden);
  }
  f.phase = Flight::kIdle;
  failpoint(*own_.header, EP_FAIL_PULLED);
  return 0;
}

}  // namespace ep
