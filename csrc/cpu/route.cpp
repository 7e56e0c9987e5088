// From logical experts to the copies that serve them, and the memory that exchanges need.
#include "common/errors.h"
#include "kernels.h"
#include "runner.h"

namespace ep {

void Runner::prepare() {
  u64 cap[EP_MAX_CHANNELS] = {}, words[EP_MAX_CHANNELS] = {}, wire = 0;
  for (u32 i = 0; i < g_.exchanges; ++i) {
    const auto& x = g_.exchange[i];
    for (u32 c = 0; c < x.channels; ++c) {
      const ChannelLayout& l = layout_.channel[i][c];
      cap[c] = std::max<u64>(cap[c], x.max_tokens);
      words[c] = std::max(words[c], l.bitmap_words);
      wire = std::max(wire, l.row_bytes + l.scale_bytes);
      Landing& landing = landings_[i][c];
      landing.filled.assign(g_.max_ranks, u32(l.source_rows));  // whatever an earlier runner left in the region
      landing.tally.resize(1 + g_.slots);
      landing.starts.resize(1 + g_.slots);
      landing.next.resize(g_.slots);
      if (x.layout != EP_LAYOUT_CONTIGUOUS) continue;
      landing.written.assign((l.expanded_rows + 63) / 64, ~0ull);
      landing.labelled = l.expanded_rows;
    }
  }
  for (u32 c = 0; c < EP_MAX_CHANNELS; ++c) {
    Flight& f = flights_[c];
    f.ids.resize(cap[c] * g_.topk);
    f.routes.resize(cap[c] * g_.topk);
    f.weights.resize(cap[c] * g_.topk);
    f.owed.resize(cap[c] * 2);
    f.bitmaps.resize(words[c] * g_.max_ranks);
    f.wide.resize(g_.hidden);
    f.wire.resize(wire);
  }
}

// The weights of a token's lost experts go to those that are left, in proportion.
static void renormalise(const int32_t* ids, const Route* routes, float* weights, u32 k) {
  float all = 0, left = 0;
  for (u32 i = 0; i < k; ++i) {
    if (ids[i] < 0) continue;
    all += weights[i];
    if (routes[i].rank >= 0) left += weights[i];
  }
  if (left == 0) return;
  for (u32 i = 0; i < k; ++i)
    if (routes[i].rank >= 0) weights[i] *= all / left;
}

// Step 1: logical experts to copies, by the bank of this step's view.
int Runner::route(const Dispatch& d, Flight& f) {
  const u64 pairs = u64(d.tokens) * g_.topk;
  std::copy_n(d.ids, pairs, f.ids.begin());
  for (u64 i = 0; i < pairs; ++i)
    if (f.ids[i] < -1 || f.ids[i] >= int32_t(g_.experts))
      return fail(EP_EINVAL, "token %llu names expert %d; ids must be -1 (none) or 0..%u", (unsigned long long)(i / g_.topk), f.ids[i], g_.experts - 1);
  std::copy_n(d.weights, pairs, f.weights.begin());
  const u32 policy = own_.header->policy.load(std::memory_order_relaxed);
  std::fill_n(f.owed.begin(), u64(d.tokens) * 2, 0);
  // With replicated input every rank routes every token: all must choose alike, and each pair counts once.
  const bool replicated = g_.exchange[d.exchange].replicated;
  const u32* members = view_->tables.head->incarnation;
  u32 first = 0;
  while (!members[first]) ++first;
  std::lock_guard<std::mutex> guard(load_mutex_);
  load_touched_[d.layer] = 1;
  u32* load = load_.data() + u64(d.layer) * g_.experts;
  for (u32 t = 0; t < d.tokens; ++t) {
    const u32 point = split_point(t, replicated ? 0 : me_, d.layer, step_);
    u8 lost = 0;
    for (u32 k = 0; k < g_.topk; ++k) {
      const u64 i = u64(t) * g_.topk + k;
      f.routes[i] = {-1, -1};
      if (f.ids[i] < 0) continue;
      const Replica* r = choose_replica(view_->tables, g_, d.layer, u32(f.ids[i]), point);
      load[f.ids[i]] += !replicated || me_ == (r ? r->rank : first);
      if (!r) {
        lost = 1;
        continue;
      }
      f.routes[i] = {r->rank, r->slot};
      f.owed[u64(t) * 2 + r->rank / 64] |= 1ull << (r->rank % 64);
    }
    if (d.lost) d.lost[t] = lost;
    if (lost && policy & EP_POLICY_RENORMALISE) renormalise(f.ids.data() + u64(t) * g_.topk, f.routes.data() + u64(t) * g_.topk, f.weights.data() + u64(t) * g_.topk, g_.topk);
    if (lost && !(policy & EP_POLICY_SERVE)) return fail(EP_ELOST, "token %u needs an expert of layer %u that no member holds", t, d.layer);
  }
  return 0;
}

}  // namespace ep
