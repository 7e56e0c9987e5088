// A rank in an engine's hands, under either launch: what session.cpp (steps) and session_exchange.cpp share.
#pragma once
#include <unistd.h>

#include <cstring>
#include <memory>

#include "common/errors.h"
#include "common/link.h"
#include "common/robust.h"
#include "common/sys.h"
#include "runner.h"
#include "service.h"

namespace ep {
inline constexpr u64 kWorkerGrace = 5'000'000'000;  // beyond the worker's own deadline
inline constexpr u64 kLook = 20'000'000;
}  // namespace ep

// A name of the C ABI, so outside of the namespace that all of its parts are in.
using namespace ep;

struct ep_session {
  Link link;
  RobustHold engine_hold, runner_hold;
  ep_geometry geometry{};
  Layout layout{};
  Region own;                      // service
  std::unique_ptr<Runner> runner;  // inline
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
