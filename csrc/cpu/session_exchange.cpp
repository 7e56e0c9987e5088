// Dispatch and combine as an engine calls them: checks, and what is handed to a worker and back.
#include <cstring>

#include "kernels.h"
#include "session.h"

namespace {

// Between an engine's memory and its region; a large batch goes past the caches, as its rows do.
void hand_over(void* to, const void* from, u64 bytes) {
  u8* d = static_cast<u8*>(to);
  const u8* f = static_cast<const u8*>(from);
  if (d == f) return;  // the engine worked in the region itself
  if (f < d + bytes && d < f + bytes) {
    memmove(d, f, bytes);
    return;
  }
  if (streams(bytes)) {
    const u64 head = -reinterpret_cast<u64>(d) % 64, body = (bytes - head) / 64 * 64;
    memcpy(d, f, head);
    u8* aligned = d + head;
    kernels.spread(&aligned, 1, f + head, body, true);
    stream_fence();
    d += head + body, f += head + body, bytes -= head + body;
  }
  memcpy(d, f, bytes);
}

// Rows that are quantised already: scales must be there and fit what the exchange hands on.
int check_scales(ep_session* s, u32 exchange, const ep_rows& rows, u32 tokens) {
  const auto& x = s->geometry.exchange[exchange];
  if (!(rows.global_scale > 0 && rows.global_scale < 1e38f)) return fail(EP_EINVAL, "the global scale is %g; it must be above 0 and finite", double(rows.global_scale));
  if (!block_of(rows.x_dtype) || !tokens) return 0;
  if (!rows.scales) return fail(EP_EINVAL, "rows of dtype %u come without scales", rows.x_dtype);
  if (x.scale_layout != EP_SCALES_PACKED || rows.x_dtype != EP_FP8) return 0;
  const u64 blocks = s->geometry.hidden / 128;
  for (u64 i = 0; i < tokens * blocks; ++i) {
    u32 bits;
    memcpy(&bits, static_cast<const u8*>(rows.scales) + i * 4, 4);
    if (bits & 0x807fffff)
      return fail(EP_EINVAL, "token %llu has a scale that is not a power of two, which packed UE8M0 scales need; use another scale layout or round scales up", (unsigned long long)(i / blocks));
  }
  return 0;
}

int send_dispatch(ep_session* s, u32 op, u32 exchange, u32 channel, u32 layer, ep_rows rows, const void* ids, u32 ids_bytes, const float* weights, u32 tokens) {
  if (int bad = s->check_exchange(exchange, channel, rows.x_dtype, true)) return bad;
  const auto& spec = s->geometry.exchange[exchange];
  if (tokens > spec.max_tokens) return fail(EP_ECAP, "%u tokens are more than the cap of %u; raise max_tokens or split the batch", tokens, spec.max_tokens);
  if (layer >= s->geometry.layers) return fail(EP_EINVAL, "layer %u is not below %u", layer, s->geometry.layers);
  if (ids_bytes != 4 && ids_bytes != 8) return fail(EP_EINVAL, "ids have %u bytes each; they must be int32 or int64", ids_bytes);
  if (s->sequence[channel] >= kMaxSequence) return fail(EP_EUSAGE, "more than %llu exchanges on a channel in a step", (unsigned long long)kMaxSequence);
  if (rows.global_scale == 0.0f) rows.global_scale = 1.0f;
  if (int bad = check_scales(s, exchange, rows, tokens)) return bad;
  const ChannelLayout& l = s->layout.channel[exchange][channel];
  const u64 pairs = u64(tokens) * s->geometry.topk;
  u8* d = s->data();
  if (s->flying[channel]) return fail(EP_EUSAGE, "dispatch on channel %u before the combine of its last exchange", channel);
  if (!s->runner) s->drain(channel);
  if (int bad = s->take_ids(ids, ids_bytes, pairs, reinterpret_cast<int32_t*>(d + l.in_ids))) return bad;
  s->tokens[channel] = tokens;
  if (s->runner) {
    const int bad = s->runner->dispatch_send({exchange, channel, layer, tokens, s->sequence[channel]++, rows.x_dtype, rows.x, reinterpret_cast<int32_t*>(d + l.in_ids),
                                              weights, d + l.in_lost, rows.scales, rows.global_scale});
    s->flying[channel] = !bad;
    return bad;
  }
  const Staging at = staging(s->geometry, s->layout, exchange, channel, s->link.rank, rows.x_dtype, d);
  hand_over(at.rows, rows.x, tokens * row_payload_bytes(rows.x_dtype, s->geometry.hidden));
  if (block_of(rows.x_dtype)) hand_over(at.scales, rows.scales, tokens * l.scale_bytes);
  memcpy(d + l.in_weights, weights, pairs * 4);
  Command& c = s->header().command[channel];
  c.exchange = exchange;
  c.layer = layer;
  c.tokens = tokens;
  c.x_dtype = rows.x_dtype;
  c.global_scale = rows.global_scale;
  c.sequence = s->sequence[channel]++;
  s->post(channel, op);
  s->flying[channel] = true;
  return 0;
}

u64 exchange_limit(ep_session* s) { return 2 * s->header().timeouts.exchange_timeout_ns; }

int finish_dispatch(ep_session* s, u32 exchange, u32 channel, ep_received* out, uint8_t* lost) {
  const Command& c = s->header().command[channel];
  out->arrived = c.arrived;
  s->fill_received(exchange, channel, out);
  memcpy(out->tokens, c.source_tokens, sizeof out->tokens);
  if (lost) memcpy(lost, s->data() + s->layout.channel[exchange][channel].in_lost, s->tokens[channel]);
  return 0;
}

void take_result(ep_session* s, u32 exchange, u32 channel, void* out, u32 out_dtype) {
  s->flying[channel] = false;
  hand_over(out, s->data() + s->layout.channel[exchange][channel].out, u64(s->tokens[channel]) * s->geometry.hidden * element_bytes(out_dtype));
}

}  // namespace

int ep_dispatch_send(ep_session* s, uint32_t exchange, uint32_t channel, uint32_t layer, const void* x, uint32_t x_dtype, const void* ids,
                     uint32_t ids_bytes, const float* weights, uint32_t tokens) {
  // The worker takes the inputs on its own time: the answer is read by dispatch_recv.
  return send_dispatch(s, kOpDispatch, exchange, channel, layer, {x, nullptr, x_dtype, 1.0f}, ids, ids_bytes, weights, tokens);
}

int ep_dispatch_send_rows(ep_session* s, uint32_t exchange, uint32_t channel, uint32_t layer, const ep_rows* rows, const void* ids, uint32_t ids_bytes,
                          const float* weights, uint32_t tokens) {
  return send_dispatch(s, kOpDispatch, exchange, channel, layer, *rows, ids, ids_bytes, weights, tokens);
}

int ep_dispatch_recv(ep_session* s, uint32_t exchange, uint32_t channel, ep_received* out, uint8_t* lost) {
  if (int bad = s->check_exchange(exchange, channel, EP_FP32)) return bad;
  Command& c = s->header().command[channel];
  if (s->runner) {
    memset(c.source_tokens, 0, sizeof c.source_tokens);
    if (int bad = s->runner->dispatch_recv(exchange, channel, &c.arrived, c.source_tokens)) return s->inline_answer(channel, kOpDispatch, bad);
    s->interrupted[channel] = {};
  } else if (int bad = s->answer(channel, exchange_limit(s))) {
    if (bad != EP_EINTR) s->flying[channel] = false;  // nothing was sent, or the step is torn
    return bad;
  }
  return finish_dispatch(s, exchange, channel, out, lost);
}

int ep_dispatch(ep_session* s, uint32_t exchange, uint32_t channel, uint32_t layer, const void* x, uint32_t x_dtype, const void* ids,
                uint32_t ids_bytes, const float* weights, uint32_t tokens, ep_received* out, uint8_t* lost) {
  if (int bad = ep_dispatch_send(s, exchange, channel, layer, x, x_dtype, ids, ids_bytes, weights, tokens)) return bad;
  int status;
  while ((status = ep_dispatch_recv(s, exchange, channel, out, lost)) == EP_EINTR) {
  }
  return status;
}

int ep_combine_send(ep_session* s, uint32_t exchange, uint32_t channel) {
  if (int bad = s->check_exchange(exchange, channel, EP_FP32)) return bad;
  if (s->runner) return s->runner->combine_send(exchange, channel);
  Command& c = s->header().command[channel];
  c.exchange = exchange;
  return s->call(channel, kOpCombineSend, exchange_limit(s));
}

int ep_combine_recv(ep_session* s, uint32_t exchange, uint32_t channel, void* out, uint32_t out_dtype) {
  if (int bad = s->check_exchange(exchange, channel, out_dtype)) return bad;
  if (s->runner) {
    const int bad = s->inline_answer(channel, kOpCombine, s->runner->combine_recv(exchange, channel, out, out_dtype));
    if (!bad) s->flying[channel] = false;
    return bad;
  }
  Command& c = s->header().command[channel];
  c.exchange = exchange;
  c.out_dtype = out_dtype;
  if (int bad = s->call(channel, kOpCombineRecv, exchange_limit(s))) return bad;
  take_result(s, exchange, channel, out, out_dtype);
  return 0;
}

int ep_combine(ep_session* s, uint32_t exchange, uint32_t channel, void* out, uint32_t out_dtype) {
  if (int bad = s->check_exchange(exchange, channel, out_dtype)) return bad;
  if (s->runner) {
    if (s->interrupted[channel].op != kOpCombine)
      if (int bad = s->runner->combine_send(exchange, channel)) return bad;
    return ep_combine_recv(s, exchange, channel, out, out_dtype);
  }
  Command& c = s->header().command[channel];
  c.exchange = exchange;
  c.out_dtype = out_dtype;
  if (int bad = s->call(channel, kOpCombine, exchange_limit(s))) return bad;
  take_result(s, exchange, channel, out, out_dtype);
  return 0;
}

int ep_exchange_buffers(ep_session* s, uint32_t exchange, uint32_t channel, uint32_t x_dtype, void** in, void** out) {
  if (int bad = s->check_fork()) return bad;
  if (int bad = s->check_names(exchange, channel, x_dtype, true)) return bad;
  *in = staging(s->geometry, s->layout, exchange, channel, s->link.rank, x_dtype, s->data()).rows;
  *out = s->runner ? nullptr : s->data() + s->layout.channel[exchange][channel].out;
  return 0;
}
