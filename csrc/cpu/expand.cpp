#include "expand.h"

#include <cstring>

#include "kernels.h"

namespace ep {

namespace {

constexpr u32 kAlignment = 128;  // rows; what grouped matrix products want of a run

// Four UE8M0 bytes; missing ones at the end of a row are zero.
u32 pack_scales(u32 dtype, const u8* from, u64 first, u64 blocks) {
  u32 word = 0;
  for (u64 i = 0; i < 4 && first + i < blocks; ++i) {
    u32 power;
    if (dtype == EP_MXFP8) {
      power = from[first + i];
    } else {
      memcpy(&power, from + (first + i) * 4, 4);
      power = power >> 23 & 0xff;
    }
    word |= power << (8 * i);
  }
  return word;
}

}  // namespace

Expansion::Expansion(const ep_geometry& g, const ep_exchange_config& x, const ChannelLayout& l, u8* data, Landing& landing)
    : g_(g), x_(x), l_(l), landing_(landing), expanded_(data + l.expanded), expanded_scales_(data + l.expanded_scales),
      ids_(reinterpret_cast<int32_t*>(data + l.recv_ids)),
      places_(reinterpret_cast<int32_t*>(data + l.expanded_of)), counts_(reinterpret_cast<int32_t*>(data + l.slot_counts)),
      offsets_(reinterpret_cast<int32_t*>(data + l.slot_offsets)), row_slots_(reinterpret_cast<int32_t*>(data + l.row_slots)),
      contiguous_(x.layout == EP_LAYOUT_CONTIGUOUS), stream_(streams(landing.arrived * l.row_bytes)) {}

int Expansion::plan() {
  u64 at = 0, rows = 0;
  const int32_t* tally = landing_.tally.data() + 1;
  for (u32 s = 0; s < g_.slots; ++s) {
    const u32 n = u32(tally[s]);
    if (!contiguous_ && n > l_.room) return int(s);
    landing_.starts[s] = landing_.next[s] = u32(at);
    if (contiguous_) offsets_[s] = int32_t(at);
    at += contiguous_ ? (n + kAlignment - 1) / kAlignment * kAlignment : l_.room;
    // Room is for distinct experts in a token; the same one named again may need more.
    if (at > l_.expanded_rows) return int(s);
    rows += n;
  }
  if (contiguous_) offsets_[g_.slots] = int32_t(at);
  landing_.starts[g_.slots] = u32(at);
  stream_ = streams(rows * l_.row_bytes);
  return -1;
}

void Expansion::take(u64 row, const u8* from, const u8* scales) {
  u8* to[EP_MAX_TOPK];
  u32 count = 0;
  const u64 k = g_.topk;
  for (u64 i = row * k; i < (row + 1) * k; ++i) {
    // Checked when they were counted; but the engine can write here, so nothing is stored where they may have changed.
    const u32 slot = u32(read_once(ids_[i]));
    const u64 place = slot < g_.slots ? landing_.next[slot]++ : l_.expanded_rows;
    if (place >= l_.expanded_rows) {
      places_[i] = -1;
      continue;
    }
    places_[i] = int32_t(place);
    if (contiguous_) mark(place);
    to[count++] = expanded_ + place * l_.row_bytes;
    if (l_.scale_bytes) put_scales(place, scales);
  }
  kernels.spread(to, count, from, l_.row_bytes, stream_);
}

void Expansion::append(u64 row, u64 place, const u8* from, const u8* scales) {
  places_[row * g_.topk] = int32_t(place);
  u8* to = expanded_ + place * l_.row_bytes;
  kernels.spread(&to, 1, from, l_.row_bytes, stream_);
  if (l_.scale_bytes) put_scales(place, scales);
}

void Expansion::put_scales(u64 place, const u8* from) {
  if (!l_.scale_lead) {
    memcpy(expanded_scales_ + place * l_.scale_bytes, from, l_.scale_bytes);
    return;
  }
  u32* to = reinterpret_cast<u32*>(expanded_scales_) + place;
  if (l_.room) to += place / l_.room * (l_.scale_columns * l_.scale_lead - l_.room);
  if (x_.scale_layout == EP_SCALES_COLUMNS) {
    for (u64 c = 0; c < l_.scale_columns; ++c) memcpy(to + c * l_.scale_lead, from + c * 4, 4);
  } else {
    const u64 blocks = g_.hidden / block_of(x_.dispatch_dtype);
    for (u64 c = 0; c < l_.scale_columns; ++c) to[c * l_.scale_lead] = pack_scales(x_.dispatch_dtype, from, c * 4, blocks);
  }
}

void Expansion::put_zeros(u64 place) {
  memset(expanded_ + place * l_.row_bytes, 0, l_.row_bytes);
  if (!l_.scale_lead) memset(expanded_scales_ + place * l_.scale_bytes, 0, l_.scale_bytes);
  else
    for (u64 c = 0; c < l_.scale_columns; ++c) reinterpret_cast<u32*>(expanded_scales_)[c * l_.scale_lead + place] = 0;
}

void Expansion::finish() {
  if (stream_) stream_fence();
  if (!contiguous_) return;
  for (u32 s = 0; s < g_.slots; ++s) {
    const u64 end = landing_.starts[s + 1], last = landing_.starts[s] + u64(landing_.tally[1 + s]);
    u64 row = landing_.starts[s];
    for (; row < last; ++row) row_slots_[row] = int32_t(s);
    for (; row < end; ++row) {
      row_slots_[row] = -1;
      u64& bits = landing_.written[row / 64];
      if (!(bits >> (row % 64) & 1)) continue;  // zero since some earlier exchange
      put_zeros(row);
      bits &= ~(1ull << (row % 64));
    }
  }
  const u64 end = landing_.starts[g_.slots];
  for (u64 row = end; row < landing_.labelled; ++row) row_slots_[row] = -1;
  landing_.labelled = end;
}

}  // namespace ep
