// Offsets of the GPU parts of a region: they follow ep::Layout, from the same geometry, and are computed only here.
#pragma once
#include "device.h"

namespace epc {

struct GpuLayout {
  ep::Layout base;
  GpuChannel channel[EP_MAX_EXCHANGES][EP_MAX_CHANNELS];
  u64 data_bytes;
};

// Large batches whose outputs are summed where the experts are. Decided by the cap, as all of this, so that all ranks decide alike.
inline bool sums_overlap(const ep_exchange_config& x, const ep::ChannelLayout& l) {
  return (x.layout == EP_LAYOUT_CONTIGUOUS || x.layout == EP_LAYOUT_MASKED) && x.copies == EP_COPIES_PER_RANK &&
         x.reduce == EP_REDUCE_PER_RANK && x.combine_dtype <= EP_BF16 && !x.replicated && l.source_rows * l.y_row_bytes >= kOverlapBytes;
}
// Of those, the ones whose rows are not quantised on the way: they are expanded while others arrive.
inline bool overlaps(const ep_exchange_config& x, const ep::ChannelLayout& l) {
  return sums_overlap(x, l) && x.dispatch_dtype <= EP_BF16 && l.source_rows * l.row_bytes >= kOverlapBytes;
}

inline u32 chunks_of(u64 source_rows, bool fine) {
  const u64 needed = (source_rows + kChunkRows - 1) / kChunkRows;
  if (fine) return u32((source_rows + kFineRows - 1) / kFineRows);
  const u64 usual = source_rows < kChunks ? source_rows : kChunks;
  return u32(needed > usual ? needed : usual);
}

// Small batches: the places of all rows are found by every block for itself, from a table in shared memory.
constexpr u64 kFusedEntries = 16384, kFusedCells = 2048, kFusedSlots = 1024;
constexpr u32 kSumUnits = 128;
inline bool fuses(const ep_geometry& g, const ep_exchange_config& x, const ep::ChannelLayout& l) {
  const u64 entries = u64(g.max_ranks) * l.source_rows * (x.copies == EP_COPIES_PER_EXPERT ? 1 : g.topk);
  return (x.layout == EP_LAYOUT_CONTIGUOUS || x.layout == EP_LAYOUT_MASKED) && !x.replicated && entries <= kFusedEntries &&
         g.max_ranks * chunks_of(l.source_rows, false) <= kFusedCells && g.slots <= kFusedSlots;
}

inline int make_gpu_layout(const ep_geometry& g, GpuLayout* out) {
  if (int bad = ep::make_layout(g, &out->base)) return bad;
  u64 at = out->base.data_bytes;
  auto take = [&at](u64 bytes) {
    const u64 here = at;
    at = (at + bytes + ep::kAlign - 1) / ep::kAlign * ep::kAlign;
    return here;
  };
  for (u32 i = 0; i < g.exchanges; ++i)
    for (u32 c = 0; c < g.exchange[i].channels; ++c) {
      GpuChannel& l = out->channel[i][c];
      const ep_exchange_config& x = g.exchange[i];
      l.overlap = overlaps(x, out->base.channel[i][c]);
      l.chunks = chunks_of(out->base.channel[i][c].source_rows, l.overlap);
      l.early_chunks = l.overlap ? chunks_of(out->base.channel[i][c].source_rows, false) : 0;
      l.fused = !l.overlap && fuses(g, x, out->base.channel[i][c]);
      l.sums_overlap = !l.fused && sums_overlap(x, out->base.channel[i][c]);
      const bool sums = x.reduce == EP_REDUCE_PER_RANK && x.combine_dtype <= EP_BF16 && (l.sums_overlap || l.fused);
      l.sum_parts = l.fused && x.max_tokens > 1 ? 2 : 1;
      l.sum_chunks = !sums ? 0 : l.sums_overlap ? chunks_of(x.max_tokens, true) : x.max_tokens < kSumUnits / l.sum_parts ? x.max_tokens : kSumUnits / l.sum_parts;
      l.arrival = take(u64(g.max_ranks) * l.chunks * 16);
      l.early = take(u64(g.max_ranks) * l.early_chunks * 16);
      l.reduced = take(u64(g.max_ranks) * l.sum_chunks * l.sum_parts * 8);
      l.heads = take(u64(g.max_ranks) * 16);
      l.tails = take(u64(g.max_ranks) * out->base.channel[i][c].source_rows * g.topk * 16);
    }
  out->data_bytes = at;
  return 0;
}

}  // namespace epc
