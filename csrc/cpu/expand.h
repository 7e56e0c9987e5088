// Rows from where their senders have them into the order of the expert kernel, always by source, token and top-k.
#pragma once
#include "runner.h"

namespace ep {

// One channel's expanded rows in its own region.
class Expansion {
 public:
  Expansion(const ep_geometry& geometry, const ep_exchange_config& exchange, const ChannelLayout& layout, u8* data, Landing& landing);

  // From the tally to counts and runs. Returns the slot that has more rows than room, or -1.
  int plan();
  // Row `row` (of all sources' rows) to each of its places here.
  void take(u64 row, const u8* from, const u8* scales);
  // Exact arrival: row `row` becomes row `place` of a tensor without gaps.
  void append(u64 row, u64 place, const u8* from, const u8* scales);
  // Contiguous: zeros where a run was padded, labels for all rows.
  void finish();

 private:
  void put_scales(u64 place, const u8* from);
  void put_zeros(u64 place);
  void mark(u64 place) { landing_.written[place / 64] |= 1ull << (place % 64); }

  const ep_geometry& g_;
  const ep_exchange_config& x_;
  const ChannelLayout& l_;
  Landing& landing_;
  u8 *expanded_, *expanded_scales_;
  int32_t *ids_, *places_, *counts_, *offsets_, *row_slots_;
  bool contiguous_, stream_;
};

}  // namespace ep
