// What an engine holds: the same calls under both launches.
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>

#include "common/errors.h"
#include "common/link.h"
#include "common/robust.h"
#include "common/sys.h"
#include "kernels.h"
#include "runner.h"
#include "service.h"

using namespace ep;

namespace {
constexpr u64 kWorkerGrace = 5'000'000'000;  // beyond the worker's own deadline
constexpr u64 kLook = 20'000'000;
constexpr char kUnfinished[] = "the engine left a call that a signal interrupted";
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

}  // namespace

struct ep_session {
  Link link;
  RobustHold engine_hold, runner_hold;
  ep_geometry geometry{};
  Layout layout{};
  Region own;                 // service
  std::unique_ptr<Runner> runner;  // inline
  std::vector<int32_t> ids;   // inline: converted ids
  u32 sequence[EP_MAX_CHANNELS] = {};  // exchanges begun in this step; the order of calls holds within a channel only
  u32 tokens[EP_MAX_CHANNELS] = {};  // of the channel's exchange
  bool flying[EP_MAX_CHANNELS] = {};  // between dispatch and combine others may read the rows handed over
  bool in_step = false;
  bool interrupts = false;
  // A call that answered EP_EINTR and has not been called again. Service: its command, which the worker goes on with.
  struct Interrupted {
    u32 op = 0;
    u64 deadline = 0;
  } interrupted[EP_MAX_CHANNELS];
  pid_t pid = getpid();

  // Nothing may be unmapped while somebody still writes there.
  ~ep_session() {
    link.close();
    engine_hold.release();
    runner_hold.release();
  }

  Header& header() { return runner ? runner->header() : *own.header; }
  u8* data() { return runner ? runner->data() : own.data; }

  int check_fork() const {
    return getpid() == pid ? 0 : fail(EP_EUSAGE, "this session belongs to process %d; attach again in the forked process %d", pid, getpid());
  }
  int check_fenced() {
    Header& h = header();
    return kFaultChecks && (is_fenced(h) || h.incarnation.load() != link.incarnation)
               ? fail(EP_EFENCED, "rank %u incarnation %u was expelled: %s", link.rank, link.incarnation, h.fenced_text)
               : 0;
  }

  void set_interrupts(bool on) {
    interrupts = on;
    if (runner) runner->interrupts.store(on);
  }

  // Gives an unfinished command of this channel up, so that its arguments may be overwritten; what it answered.
  int drain(u32 channel) {
    Header& h = header();
    Command& c = h.command[channel];
    const u64 posted = c.posted.load(std::memory_order_relaxed);
    const bool finished = c.done.load(std::memory_order_acquire) == posted;
    if (finished && !interrupted[channel].op) return 0;
    if (!finished) {
      c.cancelled.store(posted, std::memory_order_seq_cst);
      ring(h.runner_wake[channel], h.runner_asleep[channel]);
    }
    interrupted[channel] = {};
    return wait_through(channel, 2 * h.timeouts.exchange_timeout_ns);
  }

  void post(u32 channel, u32 op) {
    Header& h = header();
    Command& c = h.command[channel];
    c.op = op;
    c.posted.fetch_add(1, std::memory_order_seq_cst);
    ring(h.runner_wake[channel], h.runner_asleep[channel]);
  }

  // Waits for the worker's answer; `limit` is the worker's own deadline.
  int answer(u32 channel, u64 limit) {
    Header& h = header();
    Command& c = h.command[channel];
    const u64 begin = now_ns();
    bool signalled = false;
    Interrupted& before = interrupted[channel];
    const Interrupted now{c.op, before.op ? before.deadline : begin + limit + kWorkerGrace};
    before = {};
    for (;;) {
      u32 seen = h.engine_wake.load();
      h.engine_asleep.store(1);
      if (c.done.load(std::memory_order_acquire) == c.posted.load(std::memory_order_relaxed)) break;
      if (check_fenced()) {
        h.engine_asleep.store(kAwake);
        return EP_EFENCED;
      }
      const u64 time = now_ns();
      if (interrupts && (signalled || time - begin >= kSignalLook)) {
        h.engine_asleep.store(kAwake);
        before = now;
        return fail(EP_EINTR, "a wait for the worker of rank %u was interrupted by a signal; call again", link.rank);
      }
      if (time > now.deadline) {
        h.engine_asleep.store(kAwake);
        return fail(EP_EGONE, "the worker of rank %u did not answer within %llu ms of its deadline; see the daemon's log", link.rank, (unsigned long long)(kWorkerGrace / 1'000'000));
      }
      signalled = futex_wait(h.engine_wake, seen, kLook);
    }
    h.engine_asleep.store(kAwake);
    return c.status ? fail(c.status, "%s", c.text) : 0;
  }

  // The same call after an EP_EINTR waits for the command that is under way.
  int call(u32 channel, u32 op, u64 limit) {
    if (interrupted[channel].op != op) {
      if (interrupted[channel].op) drain(channel);
      post(channel, op);
    }
    return answer(channel, limit);
  }

  // Without EP_EINTR: what ends or tears a step waits for no peer.
  int wait_through(u32 channel, u64 limit) {
    const bool before = interrupts;
    interrupts = false;
    const int status = answer(channel, limit);
    interrupts = before;
    return status;
  }
  int call_through(u32 channel, u32 op) {
    post(channel, op);
    return wait_through(channel, header().timeouts.exchange_timeout_ns);
  }

  // Inline launch: notes whether this call is to be called again.
  int inline_answer(u32 channel, u32 op, int status) {
    interrupted[channel] = {status == EP_EINTR ? op : 0u, 0};
    return status;
  }

  int check_names(u32 exchange, u32 channel, u32 dtype, bool sending) const {
    if (exchange >= geometry.exchanges || channel >= geometry.exchange[exchange].channels)
      return fail(EP_EINVAL, "exchange %u channel %u does not exist; the group has %u exchanges", exchange, channel, geometry.exchanges);
    if (dtype > EP_BF16 && !(sending && dtype == geometry.exchange[exchange].dispatch_dtype))
      return fail(EP_EINVAL, "dtype %u cannot be used here; it must be fp32 (0), fp16 (1) or bf16 (2), or for rows that are quantised already the exchange's own", dtype);
    return 0;
  }

  int check_exchange(u32 exchange, u32 channel, u32 dtype, bool sending = false) {
    if (int bad = check_fork()) return bad;
    if (int bad = check_names(exchange, channel, dtype, sending)) return bad;
    return in_step ? check_fenced() : fail(EP_EUSAGE, "exchange outside a step; open one with step_begin");
  }

  // out->arrived is set.
  void fill_received(u32 exchange, u32 channel, ep_received* out) {
    const ChannelLayout& l = layout.channel[exchange][channel];
    const auto& x = geometry.exchange[exchange];
    u8* d = data();
    const bool by_expert = x.layout == EP_LAYOUT_CONTIGUOUS || x.layout == EP_LAYOUT_MASKED, contiguous = x.layout == EP_LAYOUT_CONTIGUOUS;
    const u64 sent = l.sources * l.source_rows;
    out->rows = d + (l.expanded_rows ? l.expanded : l.rows);
    out->scales = !l.scale_bytes ? nullptr : d + (l.expanded_rows ? l.expanded_scales : l.scales);
    out->ids = reinterpret_cast<int32_t*>(d + l.recv_ids);
    out->weights = reinterpret_cast<float*>(d + l.recv_weights);
    out->slot_counts = reinterpret_cast<int32_t*>(d + l.slot_counts);
    out->slot_offsets = contiguous ? reinterpret_cast<int32_t*>(d + l.slot_offsets) : nullptr;
    out->row_slots = contiguous ? reinterpret_cast<int32_t*>(d + l.row_slots) : nullptr;
    out->places = by_expert ? reinterpret_cast<int32_t*>(d + l.expanded_of) : nullptr;
    const bool quantised = block_of(x.combine_dtype);
    out->out = d + (quantised ? l.y_full : l.y);
    out->out_dtype = quantised ? u32(EP_BF16) : x.combine_dtype;
    out->row_dtype = x.dispatch_dtype;
    out->rows_count = l.expanded_rows ? l.expanded_rows : sent;
    if (x.cpu_sync && contiguous) out->rows_count = u64(out->slot_offsets[geometry.slots]);
    if (x.cpu_sync && !by_expert) out->rows_count = out->arrived;
    out->id_rows = by_expert ? sent : out->rows_count;
    out->scale_lead = l.scale_lead;
    out->scale_columns = u32(l.scale_columns);
    out->pad = 0;
    auto arrivals = reinterpret_cast<const Arrival*>(d + l.arrival);
    for (u32 r = 0; r < EP_MAX_RANKS; ++r) out->global_scale[r] = r < geometry.max_ranks ? arrivals[r].global_scale : 0.0f;
  }

  int take_ids(const void* from, u32 bytes, u64 n, int32_t* to) {
    for (u64 i = 0; i < n; ++i) {
      int64_t id = bytes == 8 ? static_cast<const int64_t*>(from)[i] : static_cast<const int32_t*>(from)[i];
      if (id < -1 || id >= int64_t(geometry.experts))
        return fail(EP_EINVAL, "token %llu names expert %lld; ids must be -1 (none) or 0..%u", (unsigned long long)(i / geometry.topk), (long long)id, geometry.experts - 1);
      to[i] = int32_t(id);
    }
    return 0;
  }
};

namespace {
int open_session(const char* socket_path, const char* ticket, uint32_t timeout_ms, ep_session** out) {
  auto s = std::make_unique<ep_session>();
  Received welcome;
  if (int bad = s->link.open(socket_path, EP_ROLE_ENGINE, ticket, timeout_ms, &welcome)) return bad;
  memcpy(&s->geometry, welcome.body.data(), sizeof s->geometry);
  if (int bad = make_layout(s->geometry, &s->layout)) return bad;
  if (welcome.head.c && welcome.head.c != s->layout.digest)
    return fail(EP_EMISMATCH, "layout digest %016llx of the daemon differs from ours, %016llx; install one version everywhere", (unsigned long long)welcome.head.c, (unsigned long long)s->layout.digest);
  const u32 inc = s->link.incarnation;
  if (s->geometry.launch == EP_LAUNCH_INLINE) {
    s->runner = std::make_unique<Runner>();
    if (int bad = s->runner->open(s->geometry, s->link.rank, inc, welcome.fds[0], welcome.fds[1])) return bad;
    if (int bad = s->runner_hold.take(s->runner->header().runner, inc)) return bad;
    ep_session* raw = s.get();
    s->runner->on_adopted = [raw](u64 epoch, u64 step) {
      ep_message m{};
      m.magic = EP_MSG_MAGIC;
      m.type = EP_MSG_ADOPTED;
      m.rank = raw->link.rank;
      m.a = epoch;
      m.b = step;
      raw->link.send(m);
    };
  } else {
    if (int bad = s->own.open(s->layout, welcome.fds[0], welcome.fds[1])) return bad;
  }
  if (int bad = s->engine_hold.take(s->header().engine, inc)) return bad;
  ep_session* raw = s.get();
  s->link.start([raw](Received& m) {
    if (raw->runner) handle_stage(*raw->runner, raw->link, m);
  }, {welcome.take(0), welcome.take(1)});
  *out = s.release();
  return 0;
}
}  // namespace

int ep_session_open(const char* socket_path, const char* ticket, uint32_t timeout_ms, ep_session** out) {
  try {
    return open_session(socket_path, ticket, timeout_ms, out);
  } catch (const std::exception& error) {
    return fail(EP_ESHORT, "this process cannot have another thread or its memory (%s); look at its limits (ulimit -u, -v) and its cgroup's", error.what());
  }
}

void ep_session_close(ep_session* s) {
  if (!s) return;
  if (getpid() != s->pid) return;  // a forked child has neither the threads nor the seat
  if (s->interrupted[0].op == kOpBarrier) ep_step_cancel(s);
  if (s->in_step) ep_step_tear(s);
  delete s;
}

int ep_session_interrupts(ep_session* s, uint32_t on) {
  if (int bad = s->check_fork()) return bad;
  s->set_interrupts(on != 0);
  return 0;
}

int ep_session_geometry(ep_session* s, ep_geometry* out) {
  *out = s->geometry;
  return 0;
}

int ep_session_status(ep_session* s, ep_status* out) {
  if (int bad = s->check_fork()) return bad;
  snapshot(s->header(), out);
  out->incarnation = s->link.incarnation;  // the header's may be a successor's
  return 0;
}

int ep_session_fenced(ep_session* s, uint64_t* epoch, char* text, uint64_t text_size) {
  if (!s->check_fenced()) return 0;
  *epoch = s->header().fenced_epoch.load();
  snprintf(text, text_size, "%s", s->header().fenced_text);
  return 1;
}

int ep_session_warmup(ep_session* s, uint32_t on) {
  if (int bad = s->check_fork()) return bad;
  s->header().warmup.store(on ? 1 : 0);
  return 0;
}

int ep_session_slots(ep_session* s, uint64_t epoch, int32_t* slot_expert) {
  if (int bad = s->check_fork()) return bad;
  BankTables tables(s->layout, s->data() + s->layout.banks + epoch % EP_BANKS * s->layout.bank_bytes);
  if (epoch == 0 || tables.head->epoch != epoch)
    return fail(EP_EINVAL, "the tables of epoch %llu are gone; only the running and staged views are kept", (unsigned long long)epoch);
  memcpy(slot_expert, tables.slots, u64(s->geometry.layers) * s->geometry.max_ranks * s->geometry.slots * 4);
  return 0;
}

int ep_session_loads(ep_session* s, uint64_t* loads) {
  if (int bad = s->check_fork()) return bad;
  auto from = reinterpret_cast<const std::atomic<u64>*>(s->data() + s->layout.loads);
  for (u64 i = 0; i < u64(s->geometry.layers) * s->geometry.experts; ++i) loads[i] = from[i].load(std::memory_order_relaxed);
  return 0;
}

int ep_step_begin(ep_session* s, uint32_t tokens, uint32_t timeout_ms, ep_step_info* out) {
  if (int bad = s->check_fork()) return bad;
  if (s->in_step) return fail(EP_EUSAGE, "step_begin inside a step; end the step first");
  if (int bad = s->check_fenced()) return bad;
  Header& h = s->header();
  const u64 limit = timeout_ms ? u64(timeout_ms) * 1'000'000 : h.timeouts.step_timeout_ns;
  int status;
  if (s->runner) {
    const u64 now = now_ns();
    const u64 deadline = s->interrupted[0].op ? s->interrupted[0].deadline : now + limit;
    status = s->runner->barrier(tokens, deadline > now ? deadline - now : 1, out);
    s->interrupted[0] = {};
    if (status == EP_EINTR) s->interrupted[0] = {kOpBarrier, deadline};
  } else {
    h.command[0].tokens = tokens;
    h.command[0].timeout_ms = timeout_ms;
    status = s->call(0, kOpBarrier, limit);
    if (!status) *out = h.step_info;
  }
  if (status) return status;
  s->in_step = true;
  for (u32 c = 0; c < EP_MAX_CHANNELS; ++c) {
    s->sequence[c] = 0;
    s->flying[c] = false;
  }
  return 0;
}

int ep_step_end(ep_session* s, uint32_t* complete) {
  if (int bad = s->check_fork()) return bad;
  if (!s->in_step) return fail(EP_EUSAGE, "step_end without a step");
  s->in_step = false;
  *complete = 0;
  bool unfinished = false;  // what an interrupted call would have delivered was not
  for (const auto& call : s->interrupted) unfinished |= call.op != 0;
  if (s->runner) {
    if (unfinished) s->runner->tear(kUnfinished);
    for (auto& call : s->interrupted) call = {};
    return s->runner->end_step(complete);
  }
  if (int bad = s->check_fenced()) return bad;
  for (u32 c = 0; c < EP_MAX_CHANNELS; ++c) s->drain(c);
  if (unfinished)
    if (int bad = s->call_through(0, kOpTear)) return bad;
  if (int bad = s->call_through(0, kOpStepEnd)) return bad;
  *complete = s->header().command[0].complete;
  return 0;
}

int ep_step_tear(ep_session* s) {
  if (int bad = s->check_fork()) return bad;
  if (!s->in_step) return fail(EP_EUSAGE, "step_tear without a step");
  if (s->runner) {
    s->runner->tear("the engine tore it");
    return 0;
  }
  if (int bad = s->check_fenced()) return bad;
  for (u32 c = 0; c < EP_MAX_CHANNELS; ++c) s->drain(c);
  return s->call_through(0, kOpTear);
}

int ep_step_cancel(ep_session* s) {
  if (int bad = s->check_fork()) return bad;
  if (s->interrupted[0].op == kOpBarrier) {
    if (s->runner) {
      s->interrupted[0] = {};
      s->runner->leave_barrier();
    } else {
      const int status = s->drain(0);
      s->in_step = !status;
      if (status) return status == EP_EINTR || status == EP_ETIMEOUT ? 0 : status;
    }
  }
  if (!s->in_step) return 0;
  u32 complete = 0;
  const int bad = ep_step_tear(s), end = ep_step_end(s, &complete);
  return bad ? bad : end;
}

namespace {

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

uint32_t ep_abi_version(void) { return EP_ABI_VERSION; }

uint64_t ep_struct_size(const char* name) {
  struct {
    const char* name;
    uint64_t size;
  } sizes[] = {{"geometry", sizeof(ep_geometry)}, {"view", sizeof(ep_view)},         {"status", sizeof(ep_status)},
               {"message", sizeof(ep_message)},   {"event", sizeof(ep_event)},       {"received", sizeof(ep_received)},
               {"step_info", sizeof(ep_step_info)}, {"timeouts", sizeof(ep_timeouts)}, {"rows", sizeof(ep_rows)}};
  for (auto& s : sizes)
    if (!strcmp(name, s.name)) return s.size;
  return 0;
}
