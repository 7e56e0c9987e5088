// Dispatch and combine on the host: arguments are checked here, and which kernels do it is chosen here.
#include "../common/errors.h"
#include "../common/sys.h"
#include "shapes.h"

using namespace epc;

namespace {

int find(epc_context* c, u32 exchange, u32 channel, Exchange** out) {
  const ep_geometry& g = c->config.geometry;
  if (exchange >= g.exchanges) return ep::fail(EP_EINVAL, "exchange %u; the group has %u", exchange, g.exchanges);
  if (channel >= g.exchange[exchange].channels)
    return ep::fail(EP_EINVAL, "channel %u; exchange %u has %u", channel, exchange, g.exchange[exchange].channels);
  *out = &c->exchange[exchange][channel];
  return 0;
}

// Lanes of a warp, of 16 elements each, that share a scale.
u32 lanes_of(u32 dtype) { return dtype == EP_FP8 ? 8 : dtype == EP_MXFP8 ? 2 : 1; }

int payload_for(const epc_context& c, const epc_dispatch_args& a, const Exchange& x, Payload* out) {
  if (a.x_dtype == x.dispatch_dtype) {
    // An empty tensor has no address.
    if (x.at.scale_bytes && !a.x_scales && a.tokens) return ep::fail(EP_EINVAL, "x is quantised already; give its scales too");
    *out = wants_bulk(c, u64(a.tokens) * x.at.row_bytes) ? Payload::kBulk : Payload::kRaw;
    return 0;
  }
  if (!x.at.scale_bytes)
    return ep::fail(EP_EINVAL, "x has dtype %u, exchange %u sends dtype %u; convert x, or let the exchange quantise", a.x_dtype, a.exchange,
                    x.dispatch_dtype);
  switch (a.x_dtype) {
    case EP_FP32: *out = Payload::kFromFp32; return 0;
    case EP_FP16: *out = Payload::kFromFp16; return 0;
    case EP_BF16: *out = Payload::kFromBf16; return 0;
    default: return ep::fail(EP_EINVAL, "x has dtype %u; use fp32, fp16 or bf16", a.x_dtype);
  }
}

int check_dispatch(const epc_context& c, const epc_dispatch_args& a, const Exchange& x) {
  if (a.tokens > x.cap)
    return ep::fail(EP_ECAP, "%u tokens for exchange %u, whose max_tokens is %u; split the batch or raise max_tokens", a.tokens, a.exchange, x.cap);
  if (a.layer >= c.domain.layers) return ep::fail(EP_EINVAL, "layer %u; the group has %u", a.layer, c.domain.layers);
  if (a.ids_bytes != 4 && a.ids_bytes != 8) return ep::fail(EP_EINVAL, "ids of %u bytes; use int32 or int64", a.ids_bytes);
  if (reinterpret_cast<uintptr_t>(a.x) % 16) return ep::fail(EP_EINVAL, "x is not aligned to 16 bytes");
  if (a.global_scale < 0.f || !(a.global_scale < 1e38f))
    return ep::fail(EP_EINVAL, "the global scale is %g; it must be above 0 and finite", double(a.global_scale));
  return 0;
}

DispatchArgs dispatch_args(const epc_context& c, const epc_dispatch_args& from, const Exchange& x, u32 half) {
  DispatchArgs a{};
  a.domain = c.domain;
  a.exchange = x;
  a.x = static_cast<const u8*>(from.x);
  a.x_scales = from.x_dtype == x.dispatch_dtype ? static_cast<const u8*>(from.x_scales) : nullptr;
  a.ids = from.ids;
  a.weights = from.weights;
  a.lost = from.lost;
  a.tokens = from.tokens;
  a.layer = from.layer;
  a.ids_wide = from.ids_bytes == 8;
  a.half = half;
  a.row_bytes = u32(x.at.row_bytes);
  a.block_lanes = lanes_of(x.dispatch_dtype);
  a.global_scale = from.global_scale > 0.f ? from.global_scale : 1.f;
  return a;
}

// Tails and words for all rows, before the rows: where they go is known when they land. Coarser chunks than the rows'.
int send_tails(const epc_context& c, DispatchArgs a, cudaStream_t s) {
  a.exchange.gpu.chunks = a.exchange.gpu.early_chunks;
  a.exchange.gpu.arrival = a.exchange.gpu.early;
  EPC_TRY(launch_dispatch(a, Payload::kNone, dispatch_shape(c, a.exchange, Payload::kNone), s));
  return 0;
}

// Rows are placed and copied while the link brings others.
int dispatch_overlapped(epc_context* c, const DispatchArgs& a, ExpandArgs e, cudaStream_t s) {
  // A quarter of the SMs fills the link.
  const u32 budget = sm_budget(*c), pushers = share_of(budget, c->config.pinned_plan >> EPC_TUNE_PUSHERS & 0xff, 64);
  if (!(c->config.pinned_plan & EPC_TUNE_VIA_REGION)) e.own = a.x;
  if (int bad = send_tails(*c, a, s)) return bad;
  EPC_TRY(launch_place(e, budget, s));
  EPC_TRY(launch_push_and_expand({a, e, pushers}, {budget, 0, 0, c->early}, s));
  return 0;
}

// Has the exact count of this dispatch written for the host; a graph has nobody who would wait for it.
int count_rows(epc_context* c, const Exchange& x, cudaStream_t s) {
  if (!x.at.expanded_rows || !c->config.geometry.exchange[x.index].cpu_sync) return 0;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  EPC_TRY(cudaStreamIsCapturing(s, &capture));
  u64& ticket = c->counted[x.index][x.channel];
  if (capture != cudaStreamCaptureStatusNone) {
    ticket = 0;
    return 0;
  }
  const u64 next = ++c->tickets;
  EPC_TRY(launch_count({c->domain, x, next, &c->domain.record->counts[x.index][x.channel]}, s));
  ticket = next;
  c->count_stream = s;
  return 0;
}

int dispatch(epc_context* c, const epc_dispatch_args* args, u32 half, void* stream) {
  Exchange* x = nullptr;
  if (int bad = find(c, args->exchange, args->channel, &x)) return bad;
  if (int bad = check_dispatch(*c, *args, *x)) return bad;
  Payload payload = Payload::kRaw;
  if (half & kSend)
    if (int bad = payload_for(*c, *args, *x, &payload)) return bad;
  const DispatchArgs a = dispatch_args(*c, *args, *x, half);
  ExpandArgs e = c->expand[args->exchange][args->channel];
  e.layer = args->layer;
  auto s = static_cast<cudaStream_t>(stream);
  const bool receives = half & kReceive, fused = x->gpu.fused && receives && !(c->config.pinned_plan & EPC_TUNE_UNFUSED);
  if (x->replicated) {
    EPC_TRY(launch_replicated(a, sm_budget(*c), c->early, s));
  } else if (x->gpu.overlap && half == (kSend | kReceive) && sm_budget(*c) > 1) {
    if (int bad = dispatch_overlapped(c, a, e, s)) return bad;
  } else if (fused) {
    if (payload == Payload::kBulk) payload = Payload::kRaw;
    EPC_TRY(launch_fused_dispatch({a, e}, payload, dispatch_shape(*c, *x, payload), s));
  } else {
    DispatchArgs rest = a;
    if (x->gpu.overlap && half & kSend) {  // others may take the whole kernel's way, which begins with the tails
      DispatchArgs tails = a;
      tails.half = kSend;
      if (int bad = send_tails(*c, tails, s)) return bad;
      rest.domain.count_loads = 0;  // counted with the tails
    }
    EPC_TRY(launch_dispatch(rest, payload, dispatch_shape(*c, *x, payload), s));
    if (receives && x->at.expanded_rows) EPC_TRY(launch_expand(e, sm_budget(*c), s));
  }
  return receives ? count_rows(c, *x, s) : 0;
}

int combine(epc_context* c, u32 exchange, u32 channel, u32 tokens, void* out, u32 out_dtype, u32 half, void* stream) {
  Exchange* x = nullptr;
  if (int bad = find(c, exchange, channel, &x)) return bad;
  if (tokens > x->cap) return ep::fail(EP_ECAP, "%u tokens for exchange %u, whose max_tokens is %u", tokens, exchange, x->cap);
  if (out_dtype > EP_BF16) return ep::fail(EP_EINVAL, "out has dtype %u; use fp32, fp16 or bf16", out_dtype);
  if (reinterpret_cast<uintptr_t>(out) % 16) return ep::fail(EP_EINVAL, "out is not aligned to 16 bytes");
  auto s = static_cast<cudaStream_t>(stream);
  const ExpandArgs& e = c->expand[exchange][channel];
  CombineArgs a{};
  a.domain = c->domain;
  a.exchange = *x;
  a.out = static_cast<u8*>(out);
  a.tokens = tokens;
  a.half = half;
  a.out_dtype = out_dtype;
  a.row_bytes = u32(x->at.y_row_bytes);
  const bool both = half == (kSend | kReceive), sums = x->expands() && x->reduce == EP_REDUCE_PER_RANK;
  if (x->gpu.sums_overlap && both && sm_budget(*c) > 1) {
    a.parts = 1;
    const u32 pullers = share_of(sm_budget(*c), c->config.pinned_plan >> EPC_TUNE_PULLERS, 150);
    EPC_TRY(launch_reduce_and_pull({a, e, pullers}, {sm_budget(*c), 0, 0, c->early}, s));
    return 0;
  }
  if (x->gpu.fused && x->gpu.sum_chunks && both && !(c->config.pinned_plan & EPC_TUNE_UNFUSED)) {
    a.parts = x->gpu.sum_parts;
    EPC_TRY(launch_fused_combine({a, e}, sum_shape(*c, *x), s));
    return 0;
  }
  // Others may pull by units, which are told of with the outputs as a whole only where nothing is received with it.
  const bool split = both && sums && x->gpu.sum_chunks;
  if (half & kSend && sums) EPC_TRY(launch_reduce(e, sm_budget(*c), s));
  if (half & kSend && !sums && x->combine_dtype == EP_FP8) EPC_TRY(launch_quantise(e, sm_budget(*c), s));
  if (split) {
    a.half = kSend;
    EPC_TRY(launch_combine(a, false, pull_shape(*c, a, false), s));
    a.half = kReceive;
  }
  const u64 bytes = u64(tokens) * a.row_bytes;
  const bool pull_bulk = plan_of(*c) ? plan_of(*c) == 2 : bytes >= kBulkPullBytes && bytes <= kBulkPullMost;
  const bool bulk = half & kReceive && pull_bulk && x->combine_dtype != EP_FP8;
  EPC_TRY(launch_combine(a, bulk, pull_shape(*c, a, bulk), s));
  return 0;
}

}  // namespace

int epc_dispatch(epc_context* c, const epc_dispatch_args* a, void* stream) { return dispatch(c, a, kSend | kReceive, stream); }
int epc_dispatch_send(epc_context* c, const epc_dispatch_args* a, void* stream) { return dispatch(c, a, kSend, stream); }
int epc_dispatch_recv(epc_context* c, const epc_dispatch_args* a, void* stream) { return dispatch(c, a, kReceive, stream); }
int epc_combine(epc_context* c, uint32_t exchange, uint32_t channel, uint32_t tokens, void* out, uint32_t out_dtype, void* stream) {
  return combine(c, exchange, channel, tokens, out, out_dtype, kSend | kReceive, stream);
}
int epc_combine_send(epc_context* c, uint32_t exchange, uint32_t channel, void* stream) {
  return combine(c, exchange, channel, 0, nullptr, EP_FP32, kSend, stream);
}
int epc_combine_recv(epc_context* c, uint32_t exchange, uint32_t channel, uint32_t tokens, void* out, uint32_t out_dtype, void* stream) {
  return combine(c, exchange, channel, tokens, out, out_dtype, kReceive, stream);
}

int epc_received_of(epc_context* c, uint32_t exchange, uint32_t channel, epc_received* out) {
  Exchange* x = nullptr;
  if (int bad = find(c, exchange, channel, &x)) return bad;
  const ep::ChannelLayout& l = x->at;
  u8* own = c->domain.region(c->domain.me);
  const ExpandArgs& e = c->expand[exchange][channel];
  const bool expanded = l.expanded_rows != 0;
  *out = {};
  out->rows = own + (expanded ? l.expanded : l.rows);
  out->scales = l.scale_bytes ? own + (expanded ? l.expanded_scales : l.scales) : nullptr;
  out->ids = e.compact_ids ? e.compact_ids : reinterpret_cast<int32_t*>(own + l.recv_ids);
  out->weights = e.compact_weights ? e.compact_weights : reinterpret_cast<float*>(own + l.recv_weights);
  out->slot_counts = expanded ? reinterpret_cast<int32_t*>(own + l.slot_counts) : nullptr;
  out->slot_offsets = x->layout == EP_LAYOUT_CONTIGUOUS ? reinterpret_cast<int32_t*>(own + l.slot_offsets) : nullptr;
  const bool quantised = x->combine_dtype == EP_FP8, by_expert = x->expands();
  out->out = own + (quantised ? l.y_full : l.y);
  out->out_dtype = quantised ? u32(EP_BF16) : x->combine_dtype;
  out->rows_count = expanded ? l.expanded_rows : l.sources * l.source_rows;
  out->id_rows = expanded && !by_expert ? l.expanded_rows : l.sources * l.source_rows;
  out->places = by_expert ? reinterpret_cast<int32_t*>(own + l.expanded_of) : nullptr;
  out->row_slots = x->layout == EP_LAYOUT_CONTIGUOUS ? reinterpret_cast<int32_t*>(own + l.row_slots) : nullptr;
  out->arrivals = own + l.arrival;
  out->scale_lead = l.scale_lead;
  out->scale_columns = u32(l.scale_columns);
  out->source_rows = l.source_rows;
  out->row_bytes = l.row_bytes;
  out->scale_bytes = l.scale_bytes;
  out->out_rows = l.y_rows;
  out->out_row_bytes = quantised ? u64(c->domain.hidden) * 2 : l.y_row_bytes;
  return 0;
}

int epc_count_slots(epc_context* c, uint32_t exchange, uint32_t channel, int32_t* counts, void* stream) {
  Exchange* x = nullptr;
  if (int bad = find(c, exchange, channel, &x)) return bad;
  const Domain& d = c->domain;
  const auto ids = reinterpret_cast<const int*>(d.region(d.me) + x->at.recv_ids);
  const SlotCountArgs a{ids, counts, x->at.sources * x->at.source_rows * d.topk, d.slots};
  EPC_TRY(launch_count_slots(a, sm_budget(*c), static_cast<cudaStream_t>(stream)));
  return 0;
}

int epc_wait_counts(epc_context* c, uint32_t exchange, uint32_t channel, epc_counts* out) {
  Exchange* x = nullptr;
  if (int bad = find(c, exchange, channel, &x)) return bad;
  const u64 ticket = c->counted[exchange][channel];
  if (!ticket)
    return ep::fail(EP_EUSAGE, "exchange %u has no count to wait for: it needs cpu_sync and a dispatch that was not captured in a graph", exchange);
  const HostCounts& seen = c->record->counts[exchange][channel];
  // The kernels before it end by arrival or by tearing; a device that has failed shows in the stream. The ticket is released by
  // the kernel that writes the counts before it.
  for (u64 asked = ep::now_ns(); __atomic_load_n(&seen.ticket, __ATOMIC_ACQUIRE) < ticket;) {
    const u64 now = ep::now_ns();
    if (now - asked < 1'000'000) continue;
    asked = now;
    const cudaError_t status = cudaStreamQuery(c->count_stream);
    if (status != cudaSuccess && status != cudaErrorNotReady) return check(status, "waiting for the count of a dispatch");
  }
  *out = {seen.rows, seen.arrived, u32(seen.torn), 0};
  return 0;
}
