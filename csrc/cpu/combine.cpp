// Outputs: made ready where the experts are, pulled and summed at home.
#include <cstring>

#include "common/errors.h"
#include "kernels.h"
#include "quant.h"
#include "runner.h"

namespace ep {

namespace {

constexpr QuantFormat kOutputFormat{EP_FP8, false, 1.0f};

bool expands(const ep_exchange_config& x) { return x.layout == EP_LAYOUT_CONTIGUOUS || x.layout == EP_LAYOUT_MASKED; }

// Outputs that travel quantised: what the expert kernel wrote, in bf16, and what home ranks read.
struct Outputs {
  const ep_geometry& g;
  const ep_exchange_config& x;
  const ChannelLayout& l;
  u8* data;
  Flight& f;

  const u8* written(u64 row) const { return data + l.y_full + row * g.hidden * 2; }

  void quantise(u64 row) const {
    to_float(f.wide.data(), written(row), EP_BF16, g.hidden);
    u8* to = data + l.y + row * l.y_row_bytes;
    quantise_row(kOutputFormat, f.wide.data(), g.hidden, to, to + g.hidden);
  }
  void reduce(u64 to_row, const Addend* addends, u32 count) const {
    u8* to = data + l.y_reduced + to_row * l.y_row_bytes;
    sum_rows(f.wide.data(), EP_FP32, addends, count, EP_BF16, g.hidden);
    quantise_row(kOutputFormat, f.wide.data(), g.hidden, to, to + g.hidden);
  }
};

// Layouts by expert, one quantised row per rank: the weighted sum of each token's outputs here, in top-k order.
void reduce_tokens(const Outputs& o, u32 ranks, const Landing& landing) {
  auto ids = reinterpret_cast<const int32_t*>(o.data + o.l.recv_ids), places = reinterpret_cast<const int32_t*>(o.data + o.l.expanded_of);
  auto weights = reinterpret_cast<const float*>(o.data + o.l.recv_weights);
  const u64 k = o.g.topk, per_token = o.x.copies == EP_COPIES_PER_EXPERT ? k : 1;
  Addend addends[EP_MAX_TOPK];
  for (u32 source = 0; source < ranks; ++source)
    for (u64 t = 0; t < landing.filled[source] / per_token; ++t) {
      u32 count = 0;
      for (u64 i = 0; i < k; ++i) {
        const u64 pair = (source * o.l.source_rows + t * per_token + (per_token > 1 ? i : 0)) * k + i;
        const u64 place = u64(int64_t(read_once(places[pair])));
        if (ids[pair] >= 0 && place < o.l.expanded_rows) addends[count++] = {o.written(place), weights[pair]};
      }
      if (count) o.reduce(source * o.x.max_tokens + t, addends, count);
    }
}

// All outputs that are owed to somebody, quantised.
void quantise_all(const Outputs& o, u32 ranks, const Landing& landing) {
  if (expands(o.x)) {
    for (u32 s = 0; s < o.g.slots; ++s)
      for (u64 row = landing.starts[s], end = row + u64(landing.tally[1 + s]); row < end; ++row) o.quantise(row);
    return;
  }
  auto ids = reinterpret_cast<const int32_t*>(o.data + o.l.recv_ids);
  const u64 k = o.g.topk;
  const bool per_expert = o.x.reduce == EP_REDUCE_PER_EXPERT;
  auto range = [&](u64 first, u64 rows) {
    for (u64 row = first; row < first + rows; ++row) {
      bool any = false;
      for (u64 i = 0; i < k; ++i) {
        if (ids[row * k + i] < 0) continue;
        any = true;
        if (per_expert) o.quantise(row * k + i);
      }
      if (any && !per_expert) o.quantise(row);
    }
  };
  if (o.l.expanded_rows) return range(0, landing.arrived);
  for (u32 source = 0; source < o.l.sources && source < ranks; ++source) range(source * o.l.source_rows, landing.filled[source]);
}

}  // namespace

void Runner::finish_outputs(Flight& f, u32 channel) {
  const Outputs o{g_, g_.exchange[f.exchange], layout_.channel[f.exchange][channel], own_.data, f};
  const Landing& landing = landings_[f.exchange][channel];
  if (!block_of(o.x.combine_dtype)) return;  // home ranks read what the kernel wrote
  if (expands(o.x) && o.x.reduce == EP_REDUCE_PER_RANK) reduce_tokens(o, g_.max_ranks, landing);
  else quantise_all(o, g_.max_ranks, landing);
}

// The outputs that are owed to a token, in the order in which they are added. An output without a place at its owner, as
// a step that is about to tear may show it, is nullptr.
u32 Runner::addends_of(const Flight& f, const ChannelLayout& l, u32 t, Addend* out) const {
  const auto& x = g_.exchange[f.exchange];
  const u64 k = g_.topk, first = (x.replicated ? 0 : u64(me_) * l.source_rows);
  const bool by_expert = expands(x), exact = !by_expert && l.expanded_rows, per_expert = x.reduce == EP_REDUCE_PER_EXPERT;
  const bool reduced = by_expert && !per_expert && block_of(x.combine_dtype);
  const bool copies_per_expert = x.copies == EP_COPIES_PER_EXPERT;
  u32 count = 0;
  // The output of one choice, or of the whole row where choice is K.
  auto add = [&](u32 rank, u64 choice, float weight) {
    const u8* data = data_of(rank);
    if (reduced) {
      out[count++] = {data + l.y_reduced + (u64(me_) * x.max_tokens + t) * l.y_row_bytes, weight};
      return;
    }
    u64 row = first + (copies_per_expert ? t * k + choice : t);
    if (by_expert || exact) {
      const u64 entry = row * k + (by_expert ? choice : 0);
      row = u64(int64_t(reinterpret_cast<const int32_t*>(data + l.expanded_of)[entry]));
      if (row >= l.expanded_rows) {
        out[count++] = {nullptr, 0.0f};
        return;
      }
    }
    if (!by_expert && per_expert) row = row * k + choice;
    out[count++] = {data + l.y + row * l.y_row_bytes, weight};
  };
  const Route* routes = f.routes.data() + t * k;
  if (per_expert) {
    for (u64 i = 0; i < k; ++i)
      if (routes[i].rank >= 0) add(u32(routes[i].rank), i, f.weights[t * k + i]);
    return count;
  }
  for (u32 half = 0; half < 2; ++half)
    for (u64 owed = f.owed[u64(t) * 2 + half]; owed; owed &= owed - 1) {
      const u32 rank = half * 64 + u32(__builtin_ctzll(owed));
      if (reduced || !(copies_per_expert || by_expert)) {
        add(rank, k, 1.0f);
        continue;
      }
      // By expert there is one memory here for owner and home: the rank's sum is taken at home and rounded like a row.
      for (u64 i = 0; i < k; ++i)
        if (routes[i].rank == int32_t(rank)) add(rank, i, by_expert ? f.weights[t * k + i] : 1.0f);
      if (by_expert) out[count - 1].last_of_rank = true;
    }
  return count;
}

int Runner::sum_outputs(const Flight& f, u32 channel, void* out, u32 out_dtype) {
  const ChannelLayout& l = layout_.channel[f.exchange][channel];
  const u64 out_bytes = u64(g_.hidden) * element_bytes(out_dtype);
  Addend addends[2][EP_MAX_TOPK];
  u32 count[2] = {0, 0};
  if (f.tokens) count[0] = addends_of(f, l, 0, addends[0]);
  for (u32 t = 0; t < f.tokens; ++t) {
    failpoint(*own_.header, EP_FAIL_PULL);
    const u32 now = t % 2, next = 1 - now;
    if (t + 1 < f.tokens) {
      count[next] = addends_of(f, l, t + 1, addends[next]);
      for (u32 i = 0; i < count[next]; ++i)
        for (u32 line = 0; line < 4; ++line) __builtin_prefetch(addends[next][i].row + line * 64);
    }
    for (u32 i = 0; i < count[now]; ++i)
      if (!addends[now][i].row) {
        tear("an output that is owed to this rank has no place at its owner");
        return torn_status();
      }
    sum_rows(static_cast<u8*>(out) + t * out_bytes, out_dtype, addends[now], count[now], g_.exchange[f.exchange].combine_dtype, g_.hidden);
  }
  return 0;
}

}  // namespace ep
