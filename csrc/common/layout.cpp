#include "layout.h"

#include <cstring>

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

void place_channel(const ep_geometry& g, const ep_exchange_config& x, Cursor& c, ChannelLayout& l) {
  const u64 ranks = g.max_ranks, cap = x.max_tokens, k = g.topk, hidden = g.hidden;
  const bool expands = x.layout == EP_LAYOUT_CONTIGUOUS || x.layout == EP_LAYOUT_MASKED;
  l.source_rows = x.copies == EP_COPIES_PER_EXPERT ? cap * k : cap;
  l.row_bytes = row_payload_bytes(x.dispatch_dtype, hidden);
  l.scale_bytes = row_scale_bytes(x.dispatch_dtype, hidden);
  l.bitmap_words = (l.source_rows + 63) / 64;
  const u64 all = ranks * l.source_rows;
  const u64 pairs_per_token = k < g.slots ? k : g.slots;
  if (x.layout == EP_LAYOUT_MASKED) {
    l.expanded_rows = g.slots * (x.masked_room ? x.masked_room : ranks * cap);
  } else if (x.layout == EP_LAYOUT_CONTIGUOUS) {
    // every (token, expert) pair once, and each slot's run padded to 128 rows
    l.expanded_rows = (ranks * cap * pairs_per_token + g.slots * 127 + 127) / 128 * 128;
  } else {
    l.expanded_rows = x.cpu_sync ? all : 0;
  }
  l.y_rows = expands ? l.expanded_rows : all * (x.reduce == EP_REDUCE_PER_EXPERT ? k : 1);
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
  l.expanded_scales = c.take(l.expanded_rows * l.scale_bytes);
  l.expanded_of = c.take(l.expanded_rows ? all * k * 4 : 0);
  l.y = c.take(l.y_rows * l.y_row_bytes);
  l.y_reduced = c.take(expands && x.reduce == EP_REDUCE_PER_RANK ? ranks * cap * l.y_row_bytes : 0);
  const bool service = g.launch == EP_LAUNCH_SERVICE;
  l.in_x = c.take(service ? cap * hidden * 4 : 0);
  l.in_ids = c.take(cap * k * 4);
  l.in_weights = c.take(cap * k * 4);
  l.in_lost = c.take(cap);
  l.out = c.take(service ? cap * hidden * 4 : 0);
  l.end = c.at;
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
  for (u32 i = 0; i < g.exchanges; ++i) {
    const auto& x = g.exchange[i];
    if (x.copies > EP_COPIES_PER_RANK || x.layout > EP_LAYOUT_ROUTED || x.dispatch_dtype > EP_NVFP4 ||
        x.combine_dtype > EP_FP8 || x.reduce > EP_REDUCE_PER_EXPERT)
      return fail(EP_EINVAL, "exchange %u has an unknown copies, layout, dtype or reduce", i);
    if (x.max_tokens < 1 || x.max_tokens > 65536)
      return fail(EP_EINVAL, "exchange %u has max_tokens %u; it must be 1..65536", i, x.max_tokens);
    if (x.channels < 1 || x.channels > EP_MAX_CHANNELS)
      return fail(EP_EINVAL, "exchange %u has %u channels; it must be 1..%d", i, x.channels, EP_MAX_CHANNELS);
    const u32 block = x.dispatch_dtype == EP_FP8 || x.combine_dtype == EP_FP8 ? 128
                      : x.dispatch_dtype == EP_MXFP8                         ? 32
                      : x.dispatch_dtype == EP_NVFP4                         ? 16
                                                                             : 8;
    if (g.hidden % block)
      return fail(EP_EINVAL, "exchange %u quantises in blocks of %u, which do not divide hidden %u", i, block, g.hidden);
  }
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
  l.header_bytes = (sizeof(Header) + 4095) / 4096 * 4096;

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
