// Rows to the ranks that hold their experts: read once, stored to every place where they are wanted. Readers that lay rows
// out themselves are told which rows are theirs and take them from this rank's own rows.
#include <cstring>

#include "kernels.h"
#include "quant.h"
#include "runner.h"

namespace ep {

namespace {

std::atomic<u64>& word(u64& w) { return *reinterpret_cast<std::atomic<u64>*>(&w); }

// The part of a reader's region that this rank writes.
struct Reader {
  u8 *rows, *scales;
  int32_t* slots;
  float* weights;
};

// Rows in the dispatch dtype: the engine's own, or converted one by one. With `own` all of them are put there.
class WireRows {
 public:
  WireRows(const Runner::Dispatch& d, const ep_geometry& g, const ChannelLayout& l, Flight& f, Reader own)
      : x_(static_cast<const u8*>(d.x)), scales_(static_cast<const u8*>(d.scales)), own_(own), hidden_(g.hidden), x_dtype_(d.x_dtype), l_(l), f_(f) {
    const auto& x = g.exchange[d.exchange];
    format_ = {x.dispatch_dtype, x.scale_layout == EP_SCALES_PACKED, d.global_scale};
    as_is_ = d.x_dtype == x.dispatch_dtype;
    x_bytes_ = as_is_ ? l.row_bytes : hidden_ * element_bytes(d.x_dtype);
    stream_ = streams(u64(d.tokens) * l.row_bytes);
  }
  void take(u32 token) {
    const u8* from = x_ + token * x_bytes_;
    if (as_is_) {
      row = from;
      scales = l_.scale_bytes ? scales_ + token * l_.scale_bytes : nullptr;
      if (own_.rows) keep(token);
      return;
    }
    u8* to = own_.rows ? own_.rows + token * l_.row_bytes : f_.wire.data();
    u8* scales_to = own_.rows ? own_.scales + token * l_.scale_bytes : to + l_.row_bytes;
    row = to;
    scales = scales_to;
    const float* wide = reinterpret_cast<const float*>(from);
    if (x_dtype_ != EP_FP32) {
      to_float(f_.wide.data(), from, x_dtype_, hidden_);
      wide = f_.wide.data();
    }
    if (l_.scale_bytes) quantise_row(format_, wide, hidden_, to, scales_to);
    else from_float(to, format_.dtype, wide, hidden_);
  }
  // Before rows are announced.
  void finish() const {
    if (own_.rows && as_is_ && stream_) stream_fence();
  }
  const u8 *row = nullptr, *scales = nullptr;

 private:
  void keep(u32 token) {
    u8 *to = own_.rows + token * l_.row_bytes, *scales_to = own_.scales + token * l_.scale_bytes;
    if (to != row) kernels.spread(&to, 1, row, l_.row_bytes, stream_);
    if (l_.scale_bytes && scales_to != scales) memcpy(scales_to, scales, l_.scale_bytes);
  }

  const u8 *x_, *scales_;
  Reader own_;
  u64 hidden_, x_bytes_;
  u32 x_dtype_;
  bool as_is_, stream_;
  QuantFormat format_;
  const ChannelLayout& l_;
  Flight& f_;
};

}  // namespace

Staging staging(const ep_geometry& g, const Layout& layout, u32 exchange, u32 channel, u32 rank, u32 x_dtype, u8* data) {
  const auto& x = g.exchange[exchange];
  const ChannelLayout& l = layout.channel[exchange][channel];
  const bool by_token = pulls(l) || x.copies != EP_COPIES_PER_EXPERT;  // token t's row is the t-th
  if (x_dtype == x.dispatch_dtype && by_token) {
    const u64 first = x.replicated ? 0 : rank * l.source_rows;
    return {data + l.rows + first * l.row_bytes, data + l.scales + first * l.scale_bytes};
  }
  if (g.launch != EP_LAUNCH_SERVICE) return {nullptr, nullptr};
  return {data + l.in_x, data + l.in_x + x.max_tokens * l.row_bytes};
}

// Step 2: rows with their tails. Bitmaps and flags follow when every row is stored.
void Runner::push_rows(const Dispatch& d, Flight& f) {
  const auto& x = g_.exchange[d.exchange];
  const ChannelLayout& l = layout_.channel[d.exchange][d.channel];
  const u32* members = view_->tables.head->incarnation;
  const u64 k = g_.topk, mine = u64(me_) * l.source_rows;
  Reader readers[EP_MAX_RANKS];
  u64 everyone[2] = {0, 0}, stored = 0;
  for (u32 r = 0; r < g_.max_ranks; ++r) {
    if (!members[r]) continue;
    u8* data = data_of(r);
    everyone[r / 64] |= 1ull << (r % 64);
    readers[r] = {data + l.rows + mine * l.row_bytes, data + l.scales + mine * l.scale_bytes,
                  reinterpret_cast<int32_t*>(data + l.tail_slots) + mine * k, reinterpret_cast<float*>(data + l.tail_weights) + mine * k};
  }
  std::fill_n(f.bitmaps.begin(), g_.max_ranks * l.bitmap_words, 0);
  const bool pull = pulls(l), per_expert = x.copies == EP_COPIES_PER_EXPERT;
  WireRows rows(d, g_, l, f, pull ? readers[me_] : Reader{});
  u8 *to[EP_MAX_RANKS], *scales_to[EP_MAX_RANKS];
  const bool stream = streams(u64(d.tokens) * k * l.row_bytes);
  for (u32 t = 0; t < d.tokens; ++t) {
    failpoint(*own_.header, EP_FAIL_ROWS);
    rows.take(t);
    const Route* routes = f.routes.data() + t * k;
    const float* weights = f.weights.data() + t * k;
    u32 places = 0, scale_places = 0;
    // `only` is the one choice that this copy is for, or K.
    auto place = [&](u32 rank, u64 row, u64 only) {
      const Reader& reader = readers[rank];
      f.bitmaps[rank * l.bitmap_words + row / 64] |= 1ull << (row % 64);
      u8* there = reader.rows + row * l.row_bytes;
      if (!pull) {
        scales_to[scale_places++] = reader.scales + row * l.scale_bytes;
        if (there != rows.row) to[places++] = there;
      }
      for (u64 i = 0; i < k; ++i) {
        const bool served = routes[i].rank == int32_t(rank) && (only == k || only == i);
        reader.slots[row * k + i] = served ? routes[i].slot : -1;
        reader.weights[row * k + i] = weights[i];
      }
    };
    if (per_expert) {
      for (u64 i = 0; i < k; ++i)
        if (routes[i].rank >= 0) place(u32(routes[i].rank), t * k + i, i);
    } else {
      const u64* readers_of = x.copies == EP_COPIES_ALL ? everyone : &f.owed[u64(t) * 2];
      for (u32 half = 0; half < 2; ++half)
        for (u64 left = readers_of[half]; left; left &= left - 1) place(half * 64 + u32(__builtin_ctzll(left)), t, k);
    }
    kernels.spread(to, places, rows.row, l.row_bytes, stream);
    if (l.scale_bytes)
      for (u32 i = 0; i < scale_places; ++i)
        if (scales_to[i] != rows.scales) memcpy(scales_to[i], rows.scales, l.scale_bytes);
    stored += places;
  }
  if (stream && stored) stream_fence();
  rows.finish();
}

// Replicated input: the rows are here already; the expert kernel finds them where it finds others.
void Runner::keep_rows(const Dispatch& d, Flight& f) {
  const ChannelLayout& l = layout_.channel[d.exchange][d.channel];
  WireRows rows(d, g_, l, f, {own_.data + l.rows, nullptr, nullptr, nullptr});
  for (u32 t = 0; t < d.tokens; ++t) rows.take(t);
  rows.finish();
}

// The bitmap of the rows that came to `to`, then the flag.
void Runner::announce(u32 to, const Dispatch& d, const Flight& f) {
  const auto& x = g_.exchange[d.exchange];
  const ChannelLayout& l = layout_.channel[d.exchange][d.channel];
  const u64 rows = u64(d.tokens) * (x.copies == EP_COPIES_PER_EXPERT ? g_.topk : 1);
  u8* data = data_of(to);
  failpoint(*own_.header, EP_FAIL_BITMAP);
  if (!x.replicated)
    memcpy(reinterpret_cast<u64*>(data + l.bitmap) + me_ * l.bitmap_words, f.bitmaps.data() + to * l.bitmap_words, (rows + 63) / 64 * 8);
  auto& arrival = reinterpret_cast<Arrival*>(data + l.arrival)[me_];
  arrival.tokens = d.tokens;
  arrival.layer = d.layer;
  arrival.global_scale = d.global_scale;
  failpoint(*own_.header, EP_FAIL_FLAG);
  word(arrival.tag).store(f.tag, std::memory_order_seq_cst);
}

}  // namespace ep
