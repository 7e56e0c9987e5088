// What an engine holds: the same calls under both launches. Attaching, steps and what a session says of its rank.
#include "session.h"

#include <cstdio>
#include <cstring>
#include <exception>

namespace {
constexpr char kUnfinished[] = "the engine left a call that a signal interrupted";

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
    else refused(m.head, raw->header(), raw->link.incarnation);
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
