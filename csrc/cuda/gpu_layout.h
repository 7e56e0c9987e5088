// Offsets of the GPU parts of a region: they follow ep::Layout, from the same geometry, and are computed only here.
#pragma once
#include "device.h"

namespace epc {

struct GpuLayout {
  ep::Layout base;
  GpuChannel channel[EP_MAX_EXCHANGES][EP_MAX_CHANNELS];
  u64 data_bytes;
};

inline u32 chunks_of(u64 source_rows) {
  const u64 needed = (source_rows + kChunkRows - 1) / kChunkRows;
  const u64 usual = source_rows < kChunks ? source_rows : kChunks;
  return u32(needed > usual ? needed : usual);
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
      l.chunks = chunks_of(out->base.channel[i][c].source_rows);
      l.arrival = take(u64(g.max_ranks) * l.chunks * 16);
      l.tails = take(u64(g.max_ranks) * l.chunks * 16);
      l.reduced = take(u64(g.max_ranks) * l.chunks * 8);
    }
  out->data_bytes = at;
  return 0;
}

}  // namespace epc
