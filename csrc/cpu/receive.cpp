// What came: ids and weights of every row, checked, and the rows in the order of the expert kernel.
#include <cstdio>
#include <cstring>

#include "common/errors.h"
#include "expand.h"
#include "kernels.h"

namespace ep {

namespace {

// Calls f(first, count, set) for runs of equal bits among the first n.
template <class F>
void each_run(const u64* bits, u64 n, F f) {
  for (u64 at = 0; at < n;) {
    const u64 in_word = at % 64, left = n - at < 64 - in_word ? n - at : 64 - in_word;
    const u64 word = bits[at / 64] >> in_word;
    const bool set = word & 1;
    const u64 other = set ? ~word : word;
    u64 run = other ? u64(__builtin_ctzll(other)) : 64;
    if (run > left) run = left;
    f(at, run, set);
    at += run;
  }
}

void count_slot(Landing& landing, int32_t slot) {
  const u64 at = u64(int64_t(slot) + 1);
  ++landing.tally[at < landing.tally.size() ? at : 0];
}

}  // namespace

// Whether every member is at this layer with a number of tokens that can be; tears the step otherwise.
int Runner::check_arrivals(const Flight& f, u32 channel, u32* source_tokens) {
  const auto& x = g_.exchange[f.exchange];
  const u32* members = view_->tables.head->incarnation;
  auto arrivals = reinterpret_cast<Arrival*>(own_.data + layout_.channel[f.exchange][channel].arrival);
  for (u32 source = 0; source < g_.max_ranks; ++source) {
    source_tokens[source] = members[source] ? read_once(arrivals[source].tokens) : 0;
    if (!members[source]) continue;
    const bool differs = x.replicated && source_tokens[source] != f.tokens;
    if (source_tokens[source] <= x.max_tokens && arrivals[source].layer == f.layer && !differs) continue;
    char text[192];
    snprintf(text, sizeof text, "rank %u is at layer %u with %u tokens, this rank at layer %u%s", source, arrivals[source].layer, source_tokens[source],
             f.layer, differs ? " with another number of them, and input is replicated" : "");
    tear(text);
    return torn_status();
  }
  return 0;
}

// Step 4. Everything in the sources' areas is checked: in a step that is about to tear it may be anything.
int Runner::take_rows(Flight& f, u32 channel, u64* arrived, u32* source_tokens) {
  if (int bad = check_arrivals(f, channel, source_tokens)) return bad;
  const auto& x = g_.exchange[f.exchange];
  const ChannelLayout& l = layout_.channel[f.exchange][channel];
  Landing& landing = landings_[f.exchange][channel];
  std::fill(landing.tally.begin(), landing.tally.end(), 0);
  landing.arrived = 0;
  x.replicated ? take_replicated(f, l, landing) : take_tails(x, l, landing, source_tokens);
  memcpy(own_.data + l.slot_counts, landing.tally.data() + 1, g_.slots * 4);
  *arrived = landing.arrived;
  return l.expanded_rows ? lay_out(f, l, landing, source_tokens) : 0;
}

// Ids and weights of rows that came, -1 and 0 for the others, and how many rows each slot has.
void Runner::take_tails(const ep_exchange_config& x, const ChannelLayout& l, Landing& landing, const u32* source_tokens) {
  u8* data = own_.data;
  const u64 k = g_.topk, per_token = x.copies == EP_COPIES_PER_EXPERT ? k : 1;
  const bool by_expert = x.layout == EP_LAYOUT_CONTIGUOUS || x.layout == EP_LAYOUT_MASKED, exact = !by_expert && l.expanded_rows;
  auto ids = reinterpret_cast<int32_t*>(data + l.recv_ids), tail_slots = reinterpret_cast<int32_t*>(data + l.tail_slots);
  auto weights = reinterpret_cast<float*>(data + l.recv_weights), tail_weights = reinterpret_cast<float*>(data + l.tail_weights);
  auto places = reinterpret_cast<int32_t*>(data + l.expanded_of);
  auto absent = [&](u64 first, u64 count) {
    std::fill_n(ids + first * k, count * k, -1);
    std::fill_n(weights + first * k, count * k, 0.0f);
    if (by_expert) std::fill_n(places + first * k, count * k, -1);
  };
  for (u32 source = 0; source < g_.max_ranks; ++source) {
    const u64 at = u64(source) * l.source_rows, rows = source_tokens[source] * per_token;
    each_run(reinterpret_cast<u64*>(data + l.bitmap) + source * l.bitmap_words, rows, [&](u64 first, u64 count, bool set) {
      const u64 from = (at + first) * k, to = exact ? landing.arrived * k : from;
      if (set) {
        kernels.take_tails(ids + to, weights + to, tail_slots + from, tail_weights + from, count * k, g_.slots);
        for (u64 i = to; i < to + count * k; ++i) count_slot(landing, read_once(ids[i]));
        landing.arrived += count;
      } else if (!exact) {
        absent(at + first, count);
      }
    });
    if (exact) continue;
    if (rows < landing.filled[source]) absent(at + rows, landing.filled[source] - rows);
    landing.filled[source] = u32(rows);
  }
}

// Rows in the order of the expert kernel. A slot that has more of them than room tears the step: no row is dropped.
int Runner::lay_out(const Flight& f, const ChannelLayout& l, Landing& landing, const u32* source_tokens) {
  const auto& x = g_.exchange[f.exchange];
  const bool by_expert = x.layout == EP_LAYOUT_CONTIGUOUS || x.layout == EP_LAYOUT_MASKED;
  const u64 per_token = x.copies == EP_COPIES_PER_EXPERT ? g_.topk : 1;
  Expansion expansion(g_, x, l, own_.data, landing);
  const int full = by_expert ? expansion.plan() : -1;
  if (full >= 0) {
    const int32_t expert = view_->tables.slots[(u64(f.layer) * g_.max_ranks + me_) * g_.slots + u32(full)];
    char text[192];
    const int said = snprintf(text, sizeof text, "expert %d (slot %d of rank %u, layer %u) gets %d rows, ", expert, full, me_, f.layer, landing.tally[1 + full]);
    if (x.masked_room) snprintf(text + said, sizeof text - u64(said), "but masked_room is %u; raise masked_room or leave it out", x.masked_room);
    else snprintf(text + said, sizeof text - u64(said), "for which there is no room; name an expert only once in a token");
    tear(text);
    return fail(EP_ECAP, "step %llu is torn: %s", (unsigned long long)step_, text);
  }
  u64 place = 0;
  for (u32 source = 0; source < g_.max_ranks; ++source) {
    if (!source_tokens[source]) continue;
    const u64 at = u64(source) * l.source_rows;
    const u8 *rows = data_of(source) + l.rows + at * l.row_bytes, *scales = data_of(source) + l.scales + at * l.scale_bytes;
    each_run(reinterpret_cast<u64*>(own_.data + l.bitmap) + source * l.bitmap_words, source_tokens[source] * per_token, [&](u64 first, u64 count, bool set) {
      for (u64 i = first; set && i < first + count; ++i) {
        const u64 token = i / per_token;
        const u8 *from = rows + token * l.row_bytes, *from_scales = scales + token * l.scale_bytes;
        by_expert ? expansion.take(at + i, from, from_scales) : expansion.append(at + i, place++, from, from_scales);
      }
    });
  }
  expansion.finish();
  return 0;
}

// Replicated input: every pair whose copy is here.
void Runner::take_replicated(const Flight& f, const ChannelLayout& l, Landing& landing) {
  auto ids = reinterpret_cast<int32_t*>(own_.data + l.recv_ids);
  auto weights = reinterpret_cast<float*>(own_.data + l.recv_weights);
  const u64 pairs = u64(f.tokens) * g_.topk;
  for (u64 i = 0; i < pairs; ++i) {
    const bool here = f.routes[i].rank == int32_t(me_);
    ids[i] = here ? f.routes[i].slot : -1;
    weights[i] = here ? f.weights[i] : 0.0f;
    count_slot(landing, here ? f.routes[i].slot : -1);
  }
  for (u64 i = pairs; i < u64(landing.filled[0]) * g_.topk; ++i) ids[i] = -1, weights[i] = 0.0f;
  landing.filled[0] = f.tokens;
  landing.arrived = f.tokens;
}

}  // namespace ep
