#include "layout.h"

#include <cstring>
#include <initializer_list>

#include "bank.h"
#include "barrier.h"
#include "errors.h"
#include "header.h"

namespace ep {

namespace {

u64 aligned(u64 offset) { return (offset + kAlign - 1) / kAlign * kAlign; }

u64 fnv(u64 hash, const void* bytes, size_t size) {
  auto p = static_cast<const u8*>(bytes);
  for (size_t i = 0; i < size; ++i) hash = (hash ^ p[i]) * 1099511628211ull;
  return hash;
}

struct Cursor {
  u64 at;
  u64 take(u64 bytes) {
    u64 here = at;
    at = aligned(at + bytes);
    return here;
  }
};

u64 packed_scale_words(const ep_exchange_config& x, u64 hidden) {
  if (x.scale_layout == EP_SCALES_COLUMNS) return row_scale_bytes(x.dispatch_dtype, hidden) / 4;
  return (hidden / block_of(x.dispatch_dtype) + 3) / 4;
}

// Rows in the order of the expert kernel, where that is not the order in which they were sent.
void size_expanded(const ep_geometry& g, const ep_exchange_config& x, ChannelLayout& l) {
  const u64 arriving = u64(g.max_ranks) * x.max_tokens;
  if (x.layout == EP_LAYOUT_MASKED) {
    l.room = x.masked_room ? x.masked_room : arriving;
    l.expanded_rows = g.slots * l.room;
  } else if (x.layout == EP_LAYOUT_CONTIGUOUS) {
    // every (token, expert) pair once, and each slot's run padded to 128 rows
    const u64 pairs_per_token = g.topk < g.slots ? g.topk : g.slots;
    l.expanded_rows = (arriving * pairs_per_token + g.slots * 127 + 127) / 128 * 128;
  } else {
    l.expanded_rows = x.cpu_sync ? u64(g.max_ranks) * l.source_rows : 0;
  }
  if (x.scale_layout == EP_SCALES_ROWS) return;
  l.scale_columns = packed_scale_words(x, g.hidden);
  l.scale_lead = ((x.layout == EP_LAYOUT_MASKED ? l.room : l.expanded_rows) + 3) / 4 * 4;
}

void place_channel(const ep_geometry& g, const ep_exchange_config& x, Cursor& c, ChannelLayout& l) {
  const u64 ranks = g.max_ranks, cap = x.max_tokens, k = g.topk, hidden = g.hidden;
  const bool expands = x.layout == EP_LAYOUT_CONTIGUOUS || x.layout == EP_LAYOUT_MASKED;
  const bool per_rank = x.reduce == EP_REDUCE_PER_RANK, y_quantised = row_scale_bytes(x.combine_dtype, hidden) > 0;
  l.source_rows = x.copies == EP_COPIES_PER_EXPERT ? cap * k : cap;
  l.sources = x.replicated ? 1 : ranks;
  l.row_bytes = row_payload_bytes(x.dispatch_dtype, hidden);
  l.scale_bytes = row_scale_bytes(x.dispatch_dtype, hidden);
  l.bitmap_words = (l.source_rows + 63) / 64;
  const u64 all = l.sources * l.source_rows;
  size_expanded(g, x, l);
  l.y_rows = expands ? l.expanded_rows : all * (per_rank ? 1 : k);
  l.y_row_bytes = row_payload_bytes(x.combine_dtype, hidden) + row_scale_bytes(x.combine_dtype, hidden);

  l.rows = c.take(all * l.row_bytes);
  l.scales = c.take(all * l.scale_bytes);
  l.tail_slots = c.take(all * k * 4);
  l.tail_weights = c.take(all * k * 4);
  l.bitmap = c.take(ranks * l.bitmap_words * 8);
  l.arrival = c.take(ranks * sizeof(Arrival));
  l.ready = c.take(ranks * sizeof(Flag));
  l.recv_ids = c.take(all * k * 4);
  l.recv_weights = c.take(all * k * 4);
  l.slot_counts = c.take(g.slots * 4);
  l.slot_offsets = c.take((g.slots + 1) * 4);
  l.expanded = c.take(l.expanded_rows * l.row_bytes);
  const u64 blocks_of_scales = x.layout == EP_LAYOUT_MASKED ? g.slots : 1;
  l.expanded_scales = c.take(l.scale_lead ? blocks_of_scales * l.scale_columns * l.scale_lead * 4 : l.expanded_rows * l.scale_bytes);
  l.expanded_of = c.take(l.expanded_rows ? all * k * 4 : 0);
  l.row_slots = c.take(x.layout == EP_LAYOUT_CONTIGUOUS ? l.expanded_rows * 4 : 0);
  // Where outputs are summed before they are quantised, only the sums travel.
  l.y = c.take(expands && per_rank && y_quantised ? 0 : l.y_rows * l.y_row_bytes);
  l.y_full = c.take(y_quantised ? l.y_rows * hidden * 2 : 0);
  l.y_reduced = c.take(expands && per_rank ? ranks * cap * l.y_row_bytes : 0);
  const bool service = g.launch == EP_LAUNCH_SERVICE;
  l.in_x = c.take(service ? cap * hidden * 4 : 0);
  l.in_ids = c.take(cap * k * 4);
  l.in_weights = c.take(cap * k * 4);
  l.in_lost = c.take(cap);
  l.out = c.take(service ? cap * hidden * 4 : 0);
  l.end = c.at;
}

int check_exchange(const ep_geometry& g, u32 i) {
  const auto& x = g.exchange[i];
  if (x.copies > EP_COPIES_PER_RANK || x.layout > EP_LAYOUT_ROUTED || x.dispatch_dtype > EP_NVFP4 ||
      x.combine_dtype > EP_FP8 || x.reduce > EP_REDUCE_PER_EXPERT || x.scale_layout > EP_SCALES_PACKED)
    return fail(EP_EINVAL, "exchange %u has an unknown copies, layout, dtype, reduce or scale layout", i);
  if (x.max_tokens < 1 || x.max_tokens > 65536)
    return fail(EP_EINVAL, "exchange %u has max_tokens %u; it must be 1..65536", i, x.max_tokens);
  if (x.channels < 1 || x.channels > EP_MAX_CHANNELS)
    return fail(EP_EINVAL, "exchange %u has %u channels; it must be 1..%d", i, x.channels, EP_MAX_CHANNELS);
  for (u32 block : {block_of(x.dispatch_dtype), block_of(x.combine_dtype)})
    if (block && g.hidden % block)
      return fail(EP_EINVAL, "exchange %u quantises in blocks of %u, which do not divide hidden %u", i, block, g.hidden);
  const bool expands = x.layout == EP_LAYOUT_CONTIGUOUS || x.layout == EP_LAYOUT_MASKED;
  if (x.scale_layout && (!expands || !(x.dispatch_dtype == EP_FP8 || (x.dispatch_dtype == EP_MXFP8 && x.scale_layout == EP_SCALES_PACKED))))
    return fail(EP_EINVAL, "exchange %u has scale layout %u; columns need fp8 rows, packed fp8 or mxfp8 ones, both in the contiguous or masked layout", i, x.scale_layout);
  if (x.replicated && (x.copies != EP_COPIES_ALL || x.layout != EP_LAYOUT_ARRIVAL || x.cpu_sync || block_of(x.dispatch_dtype)))
    return fail(EP_EINVAL, "exchange %u has replicated input, which sends nothing; it needs copies all, layout arrival, no cpu_sync and fp32, fp16 or bf16 rows", i);
  const u64 arriving = u64(g.max_ranks) * x.max_tokens;
  if (x.masked_room && (x.layout != EP_LAYOUT_MASKED || x.masked_room > arriving))
    return fail(EP_EINVAL, "exchange %u has masked_room %u; it is for the masked layout and at most max_ranks x max_tokens = %llu", i, x.masked_room, (unsigned long long)arriving);
  ChannelLayout l{};
  l.source_rows = x.copies == EP_COPIES_PER_EXPERT ? u64(x.max_tokens) * g.topk : x.max_tokens;
  size_expanded(g, x, l);
  const u64 sent = g.max_ranks * l.source_rows, rows = l.expanded_rows > sent ? l.expanded_rows : sent;
  if (rows > INT32_MAX)
    return fail(EP_EINVAL, "exchange %u needs room for %llu rows, the limit is %d; lower max_tokens, slots_per_rank or max_ranks, or set masked_room", i, (unsigned long long)rows, INT32_MAX);
  return 0;
}

}  // namespace

u32 element_bytes(u32 dtype) {
  switch (dtype) {
    case EP_FP32: return 4;
    case EP_FP16:
    case EP_BF16: return 2;
    case EP_FP8:
    case EP_MXFP8: return 1;
    default: return 0;
  }
}

u64 row_payload_bytes(u32 dtype, u64 hidden) { return dtype == EP_NVFP4 ? hidden / 2 : hidden * element_bytes(dtype); }

u64 row_scale_bytes(u32 dtype, u64 hidden) {
  switch (dtype) {
    case EP_FP8: return hidden / 128 * 4;   // fp32 per 128
    case EP_MXFP8: return hidden / 32;      // UE8M0 per 32
    case EP_NVFP4: return hidden / 16;      // e4m3 per 16
    default: return 0;
  }
}

u32 block_of(u32 dtype) {
  switch (dtype) {
    case EP_FP8: return 128;
    case EP_MXFP8: return 32;
    case EP_NVFP4: return 16;
    default: return 0;
  }
}

int check_geometry(const ep_geometry& g) {
  if (g.max_ranks < 1 || g.max_ranks > EP_MAX_RANKS)
    return fail(EP_EINVAL, "max_ranks is %u; it must be 1..%d", g.max_ranks, EP_MAX_RANKS);
  if (g.topk < 1 || g.topk > EP_MAX_TOPK) return fail(EP_EINVAL, "topk is %u; it must be 1..%d", g.topk, EP_MAX_TOPK);
  if (g.layers < 1 || g.layers > 4096) return fail(EP_EINVAL, "layers is %u; it must be 1..4096", g.layers);
  if (g.experts < 1 || g.experts > 65535) return fail(EP_EINVAL, "experts is %u; it must be 1..65535", g.experts);
  if (g.slots < 1 || g.slots > 65535) return fail(EP_EINVAL, "slots_per_rank is %u; it must be 1..65535", g.slots);
  if (g.hidden < 8 || g.hidden % 8 || g.hidden > 65536)
    return fail(EP_EINVAL, "hidden is %u; it must be a multiple of 8 up to 65536", g.hidden);
  if (u64(g.slots) * g.max_ranks < g.experts)
    return fail(EP_EINVAL, "%u ranks with %u slots hold %llu experts of %u; raise slots_per_rank or max_ranks", g.max_ranks,
                g.slots, (unsigned long long)(u64(g.slots) * g.max_ranks), g.experts);
  if (g.exchanges < 1 || g.exchanges > EP_MAX_EXCHANGES)
    return fail(EP_EINVAL, "the group has %u exchanges; it must be 1..%d", g.exchanges, EP_MAX_EXCHANGES);
  if (g.launch != EP_LAUNCH_SERVICE && g.launch != EP_LAUNCH_INLINE)
    return fail(EP_EINVAL, "launch is %u; it must be service (1) or inline (2)", g.launch);
  for (u32 i = 0; i < g.exchanges; ++i)
    if (int bad = check_exchange(g, i)) return bad;
  return 0;
}

int make_layout(const ep_geometry& g, Layout* out) {
  if (int bad = check_geometry(g)) return bad;
  Layout l{};
  const u64 ranks = g.max_ranks;
  Cursor bank{sizeof(Bank)};
  l.bank_replica_offsets = bank.take(u64(g.layers) * (g.experts + 1) * 4);
  l.bank_replicas = bank.take(u64(g.layers) * ranks * g.slots * sizeof(Replica));
  l.bank_slots = bank.take(u64(g.layers) * ranks * g.slots * 4);
  l.bank_bytes = bank.at;

  Cursor data{0};
  l.banks = data.take(l.bank_bytes * EP_BANKS);
  l.cell_bytes = (sizeof(Cell) + kCellViews * ranks * 4 + 63) / 64 * 64;
  l.cells = data.take(2 * ranks * l.cell_bytes);
  l.leave = data.take(ranks * sizeof(Flag));
  l.loads = data.take(u64(g.layers) * g.experts * 8);
  for (u32 i = 0; i < g.exchanges; ++i)
    for (u32 c = 0; c < g.exchange[i].channels; ++c) place_channel(g, g.exchange[i], data, l.channel[i][c]);
  l.data_bytes = (data.at + 4095) / 4096 * 4096;
  l.header_loads = l.header_bytes = (sizeof(Header) + 4095) / 4096 * 4096;
  if (g.launch == EP_LAUNCH_INLINE) l.header_bytes += (u64(g.layers) * g.experts * 8 + 4095) / 4096 * 4096;

  const u32 version = EP_ABI_VERSION;
  l.digest = fnv(14695981039346656037ull, &version, sizeof version);
  l.digest = fnv(l.digest, &g, offsetof(ep_geometry, exchange) + g.exchanges * sizeof(ep_exchange_config));
  l.digest = fnv(l.digest, &l, sizeof l);
  *out = l;
  return 0;
}

}  // namespace ep

int ep_layout(const ep_geometry* geometry, ep_layout_info* out) {
  ep::Layout l;
  if (int bad = ep::make_layout(*geometry, &l)) return bad;
  *out = {l.digest, l.header_bytes, l.data_bytes, l.bank_bytes};
  return 0;
}

int ep_layout_loads(const ep_geometry* geometry, uint64_t* offset) {
  ep::Layout l;
  if (int bad = ep::make_layout(*geometry, &l)) return bad;
  *offset = l.loads;
  return 0;
}

int ep_layout_header_loads(const ep_geometry* geometry, uint64_t* offset) {
  ep::Layout l;
  if (int bad = ep::make_layout(*geometry, &l)) return bad;
  if (l.header_loads == l.header_bytes) return ep::fail(EP_EINVAL, "headers hold loads under inline launch only");
  *offset = l.header_loads;
  return 0;
}
