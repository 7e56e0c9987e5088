#include "service.h"

#include <pthread.h>
#include <signal.h>

#include <cstdlib>
#include <cstring>
#include <thread>

#include "common/errors.h"
#include "common/link.h"
#include "common/sys.h"

namespace ep {

namespace {

constexpr u64 kIdleLook = 100'000'000;                  // how often an idle worker looks at stop and fenced
constexpr u64 kOrphanAfterMs = 60'000;                  // without daemon and engine

u64 orphan_after_ms() {
  const char* text = getenv("ELASTICEP_ORPHAN_AFTER_MS");
  u64 value = text ? strtoull(text, nullptr, 10) : 0;
  return value ? value : kOrphanAfterMs;
}

// What the engine wrote, read once: it may be anything, and may change while the command runs.
struct Arguments {
  u32 op, exchange, layer, tokens, x_dtype, out_dtype, timeout_ms, sequence;
  float global_scale;
  explicit Arguments(const volatile Command& c)
      : op(c.op), exchange(c.exchange), layer(c.layer), tokens(c.tokens), x_dtype(c.x_dtype), out_dtype(c.out_dtype), timeout_ms(c.timeout_ms), sequence(c.sequence), global_scale(c.global_scale) {}
};

// The runner looks at layer, tokens and the order of calls itself.
int check(const ep_geometry& g, u32 channel, const Arguments& a) {
  if (a.op < kOpDispatchSend || a.op > kOpCombine) return 0;
  if (a.exchange >= g.exchanges || channel >= g.exchange[a.exchange].channels)
    return fail(EP_EINVAL, "exchange %u channel %u does not exist; the group has %u exchanges", a.exchange, channel, g.exchanges);
  const bool sends = a.op == kOpDispatchSend || a.op == kOpDispatch, sums = a.op == kOpCombineRecv || a.op == kOpCombine;
  if (sends && a.x_dtype > EP_BF16 && a.x_dtype != g.exchange[a.exchange].dispatch_dtype) return fail(EP_EINVAL, "rows of dtype %u do not fit exchange %u", a.x_dtype, a.exchange);
  if (sums && a.out_dtype > EP_BF16) return fail(EP_EINVAL, "results of dtype %u; it must be fp32 (0), fp16 (1) or bf16 (2)", a.out_dtype);
  return 0;
}

int execute(Runner& r, u32 channel, Command& command) {
  const Arguments c(command);
  if (int bad = check(r.geometry(), channel, c)) return bad;
  const auto& l = r.layout().channel[c.exchange < EP_MAX_EXCHANGES ? c.exchange : 0][channel];
  u8* data = r.data();
  auto send = [&] {
    const Staging at = r.staging(c.exchange, channel, c.x_dtype);
    return r.dispatch_send({c.exchange, channel, c.layer, c.tokens, c.sequence, c.x_dtype, at.rows, reinterpret_cast<int32_t*>(data + l.in_ids),
                            reinterpret_cast<float*>(data + l.in_weights), data + l.in_lost, at.scales, c.global_scale});
  };
  auto receive = [&] {
    // Counts that are used on the way do not lie where the engine can write.
    u64 arrived = 0;
    u32 source_tokens[EP_MAX_RANKS] = {};
    if (int bad = r.dispatch_recv(c.exchange, channel, &arrived, source_tokens)) return bad;
    command.arrived = arrived;
    memcpy(command.source_tokens, source_tokens, sizeof source_tokens);
    return 0;
  };
  auto sum = [&] { return r.combine_recv(c.exchange, channel, data + l.out, c.out_dtype); };
  switch (c.op) {
    case kOpBarrier: return r.barrier(c.tokens, u64(c.timeout_ms) * 1'000'000, &r.header().step_info);
    case kOpStepEnd: return r.end_step(&command.complete);
    case kOpTear: r.tear("the engine tore it"); return 0;
    case kOpDispatchSend: return send();
    case kOpDispatchRecv: return receive();
    case kOpDispatch: {
      int status = send();
      return status ? status : receive();
    }
    case kOpCombineSend: return r.combine_send(c.exchange, channel);
    case kOpCombineRecv: return sum();
    case kOpCombine: {
      int status = r.combine_send(c.exchange, channel);
      return status ? status : sum();
    }
    default: return fail(EP_EMISMATCH, "unknown command %u; engine and worker are of different versions", c.op);
  }
}

}  // namespace

void serve_channel(Runner& runner, u32 channel, const std::atomic<bool>& stop) {
  Header& h = runner.header();
  Command& c = h.command[channel];
  while (!stop.load()) {
    u32 seen = h.runner_wake[channel].load();
    h.runner_asleep[channel].store(kForCommand);
    const u64 posted = c.posted.load(std::memory_order_acquire);
    if (posted == c.done.load(std::memory_order_relaxed)) {
      futex_wait(h.runner_wake[channel], seen, kIdleLook);
      continue;
    }
    h.runner_asleep[channel].store(kAwake);
    c.text[0] = 0;
    c.status = execute(runner, channel, c);
    if (c.status) strncpy(c.text, ep_last_error(), EP_TEXT - 1);
    c.done.store(posted, std::memory_order_seq_cst);
    ring(h.engine_wake, h.engine_asleep);
  }
}

void handle_stage(Runner& runner, Link& link, Received& message) {
  if (refused(message.head, runner.header(), link.incarnation) || message.head.type != EP_MSG_STAGE) return;
  ep_message answer{};
  answer.magic = EP_MSG_MAGIC;
  answer.type = EP_MSG_STAGED;
  answer.rank = runner.rank();
  answer.a = message.head.a;
  std::vector<u32> ranks(message.body.size() / 4);
  memcpy(ranks.data(), message.body.data(), ranks.size() * 4);
  // Descriptors stay the message's: mappings outlive them.
  answer.status = message.cut ? cut_short(message) : runner.stage(message.head.a, ranks, message.fds);
  if (answer.status) strncpy(answer.text, ep_last_error(), EP_TEXT - 1);
  link.send(answer);
}

}  // namespace ep

using namespace ep;

int ep_worker_run(const char* socket_path, const char* ticket) {
  Link link;
  Received welcome;
  if (int bad = link.open(socket_path, EP_ROLE_WORKER, ticket, 10000, &welcome)) return bad;
  ep_geometry geometry;
  memcpy(&geometry, welcome.body.data(), sizeof geometry);
  Runner runner;
  runner.serves = true;
  if (int bad = runner.open(geometry, link.rank, link.incarnation, welcome.fds[0], welcome.fds[1])) return bad;
  RobustHold hold;
  if (int bad = hold.take(runner.header().runner, link.incarnation)) return bad;
  runner.on_adopted = [&](u64 epoch, u64 step) {
    ep_message m{};
    m.magic = EP_MSG_MAGIC;
    m.type = EP_MSG_ADOPTED;
    m.rank = link.rank;
    m.a = epoch;
    m.b = step;
    link.send(m);
  };
  link.start([&](Received& m) { handle_stage(runner, link, m); }, {welcome.take(0), welcome.take(1)});

  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  u32 channels = 1;
  for (u32 i = 0; i < geometry.exchanges; ++i)
    if (geometry.exchange[i].channels > channels) channels = geometry.exchange[i].channels;
  for (u32 c = 0; c < channels; ++c) threads.emplace_back([&, c] { serve_channel(runner, c, stop); });

  Header& h = runner.header();
  const u64 orphan_after = orphan_after_ms();
  int status = 0;
  for (;;) {
    if (link.quit()) break;
    if (is_fenced(h) || h.incarnation.load() != link.incarnation) {
      status = fail(EP_EFENCED, "rank %u incarnation %u was fenced: %s", link.rank, link.incarnation, h.fenced_text);
      break;
    }
    u32 engine = h.engine.word.load();
    bool engine_gone = engine == 0 || engine & FUTEX_OWNER_DIED;
    if (engine_gone && link.away_ns() > orphan_after * 1'000'000) {
      status = fail(EP_EGONE, "no daemon and no engine for %llu ms", (unsigned long long)orphan_after);
      break;
    }
    // engine_wake is rung by fences too; the short sleep bounds how late a quit is seen.
    u32 seen = h.engine_wake.load();
    if (!is_fenced(h) && !link.quit()) futex_wait(h.engine_wake, seen, 50'000'000);
  }
  stop.store(true);
  runner.wake();
  for (auto& t : threads) t.join();
  link.close();
  hold.release();
  return status;
}
