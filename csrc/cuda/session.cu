// A session's threads: one stages views as the daemon sends them, also while the engine captures a graph; another takes what the
// daemon says meanwhile, and a third tells it what was adopted.
#include "session.h"

#include <sys/stat.h>

#include <chrono>
#include <cstring>
#include <string>

#include "../common/memory.h"
#include "../common/quiet.h"

using namespace epc;

namespace {
constexpr u64 kReplaceLimit = 2000 * kMs;  // until the views that use a rank's former memory are over
constexpr u64 kEager = 5000 * kMs;         // after a view was staged its adoption is looked for every millisecond
constexpr u64 kLoads = 500 * kMs;          // between two copies of the load counters for the daemon
constexpr u64 kHeadway = 400 * kMs;        // at least, between two words to it of how far a view's copies are
}  // namespace

int epc_session::open(const char* socket_path, const char* ticket, u32 timeout_ms, u32 num_sms, const epc_weights* from) {
  if (int bad = need_driver()) return bad;
  ep::Received welcome;
  if (int bad = link.open(socket_path, EP_ROLE_ENGINE, ticket, timeout_ms, &welcome)) return bad;
  memcpy(&geometry, welcome.body.data(), sizeof geometry);
  ep::Layout layout;
  if (int bad = ep::make_layout(geometry, &layout)) return bad;
  if (welcome.head.c && welcome.head.c != layout.digest)
    return ep::fail(EP_EMISMATCH, "layout digest %016llx of the daemon differs from ours, %016llx; install one version everywhere",
                    wide(welcome.head.c), wide(layout.digest));
  auto c = std::make_unique<epc_context>();
  c->config.geometry = geometry;
  c->config.rank = link.rank;
  c->config.incarnation = link.incarnation;
  c->config.ranks_on_device = u32(welcome.head.d);
  c->config.num_sms = num_sms;
  c->config.count_loads = 1;
  if (int bad = region_device(welcome.fds[1], &c->config.device)) return bad;
  if (from) {
    if (from->layers != geometry.layers || from->slots != geometry.slots)
      return ep::fail(EP_EMISMATCH, "an arena of %u layers and %u slots for a group with %u and %u", from->layers, from->slots, geometry.layers, geometry.slots);
    weights = std::make_unique<WeightsMirror>();
    if (int bad = weights->open(*from, link.rank, c->config.device)) return bad;
  }
  if (int bad = c->open(welcome.fds[1], welcome.fds[0], true)) return bad;
  context = std::move(c);
  if (int bad = engine_hold.take(header().engine, link.incarnation)) return bad;
  reporter = ep::quiet_thread([this] { report(); });
  stager = ep::quiet_thread([this] { stage_in_turn(); });
  link.start([this](ep::Received& m) { on_message(m); }, {welcome.take(0), welcome.take(1)});
  return 0;
}

void epc_session::tell(u32 type, u64 a, u64 b, int status, const char* text) {
  ep_message m{};
  m.magic = EP_MSG_MAGIC;
  m.type = type;
  m.rank = link.rank;
  m.status = status;
  m.a = a;
  m.b = b;
  strncpy(m.text, text, EP_TEXT - 1);
  link.send(m);
}

// The link goes on while a view is staged: a later one may call off what an earlier one has copied.
void epc_session::on_message(ep::Received& message) {
  if (ep::refused(message.head, header(), link.incarnation) || message.head.type != EP_MSG_STAGE) return;
  auto kept = std::make_unique<ep::Received>();
  kept->head = message.head;
  kept->body.swap(message.body);
  kept->fds.swap(message.fds);
  if (kept->head.a > newest) newest = kept->head.a;
  std::lock_guard<std::mutex> guard(mutex);
  handed.push_back(std::move(kept));
  handed_changed.notify_one();
}

void epc_session::stage_in_turn() {
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) {
    handed_changed.wait(lock, [this] { return stop || !handed.empty(); });
    if (stop) return;
    const std::unique_ptr<ep::Received> message = std::move(handed.front());
    handed.pop_front();
    lock.unlock();
    answer(*message);
    lock.lock();
  }
}

void epc_session::answer(const ep::Received& message) {
  std::vector<u32> ranks(message.body.size() / 4);
  memcpy(ranks.data(), message.body.data(), ranks.size() * 4);
  const int status = stage(message.head.a, ranks, message.fds);
  if (status == 0) {
    std::lock_guard<std::mutex> guard(mutex);
    if (message.head.a > staged) staged = message.head.a;
    staged_at = ep::now_ns();
    changed.notify_all();
  }
  if (status && stop) return;  // the end of the session has called it off, and is told otherwise
  tell(EP_MSG_STAGED, message.head.a, 0, status, status ? ep_last_error() : "");
}

int epc_session::stage(u64 epoch, const std::vector<u32>& ranks, const std::vector<int>& fds) {
  const auto shown = wide(epoch);
  if (fds.size() != 1 + 2 * ranks.size())
    return ep::fail(EP_EINVAL, "stage of epoch %llu came with %zu descriptors for %zu peers", shown, fds.size(), ranks.size());
  const u64 bytes = context->layout.base.bank_bytes;
  std::vector<u64> image((bytes + 7) / 8);
  if (pread(fds[0], image.data(), bytes, 0) != ssize_t(bytes))
    return ep::fail(EP_EMISMATCH, "the tables of epoch %llu are not of %llu bytes", shown, wide(bytes));
  const ep::BankTables view(context->layout.base, reinterpret_cast<const u8*>(image.data()));
  if (view.head->epoch != epoch)
    return ep::fail(EP_EINVAL, "stage of epoch %llu came with the tables of epoch %llu", shown, wide(view.head->epoch));
  const u64 running = header().epoch.load();
  bool again;
  {
    std::lock_guard<std::mutex> guard(mutex);
    again = tables[epoch % EP_BANKS].epoch == epoch;
  }
  // Said again, as after a restart of the daemon, also of the view that runs by now: nothing is done, if it is the same one.
  if (again && epoch >= running) return context->stage(reinterpret_cast<const u8*>(image.data()));
  if (running && (epoch <= running || epoch >= running + EP_BANKS))
    return ep::fail(EP_EINVAL, "epoch %llu cannot be staged while this rank runs epoch %llu: only the next %d have a bank", shown,
                    wide(running), EP_BANKS - 1);
  RelaxedCapture relaxed;
  if (int bad = use_device(context->config.device)) return bad;
  for (size_t i = 0; i < ranks.size(); ++i)
    if (int bad = take_region(ranks[i], fds[1 + 2 * i], fds[2 + 2 * i])) return bad;
  if (int bad = take_weights(view)) return bad;
  if (int bad = context->stage(reinterpret_cast<const u8*>(image.data()))) return bad;
  std::lock_guard<std::mutex> guard(mutex);
  for (u32 r = 0; r < geometry.max_ranks; ++r)
    if (view.head->incarnation[r] && epoch > peer[r].used_by) peer[r].used_by = epoch;
  Tables& kept = tables[epoch % EP_BANKS];
  kept.epoch = epoch;
  kept.slots.assign(view.slots, view.slots + u64(geometry.layers) * geometry.max_ranks * geometry.slots);
  return 0;
}

// Copies the experts that this view gives the rank and that its GPU does not hold yet.
int epc_session::take_weights(const ep::BankTables& view) {
  if (!weights) return 0;
  const u64 epoch = view.head->epoch, per_layer = u64(geometry.max_ranks) * geometry.slots;
  std::vector<int> experts(u64(geometry.layers) * geometry.slots);
  for (u32 layer = 0; layer < geometry.layers; ++layer)
    memcpy(experts.data() + u64(layer) * geometry.slots, view.slots + layer * per_layer + u64(link.rank) * geometry.slots, geometry.slots * sizeof(int));
  auto overtaken_by = [&] { return stop ? ~u64(0) : newest > epoch ? newest.load() : 0; };
  auto named_by = [&](u32 layer, u32 slot) { return view_naming(layer, slot, epoch); };
  return weights->fill({epoch, experts.data(), overtaken_by, named_by});
}

// A view that this rank runs, or may still switch to, with an expert in this slot of its own; 0: none.
u64 epc_session::view_naming(u32 layer, u32 slot, u64 but) {
  std::lock_guard<std::mutex> guard(mutex);
  const u64 running = header().epoch.load();
  for (const Tables& t : tables)
    if (t.epoch && t.epoch >= running && t.epoch != but && t.slots[(u64(layer) * geometry.max_ranks + link.rank) * geometry.slots + slot] >= 0) return t.epoch;
  return 0;
}

// A rank's address never changes, so its former memory must be out of use before another one is mapped there.
int epc_session::take_region(u32 rank, int header_fd, int data_fd) {
  if (rank >= geometry.max_ranks || rank == link.rank) return ep::fail(EP_EINVAL, "stage names peer %u", rank);
  struct stat name {};
  if (fstat(header_fd, &name)) return ep::fail(-errno, "the header of rank %u: %s", rank, strerror(errno));
  Peer& p = peer[rank];
  if (p.mapped && p.device == name.st_dev && p.inode == name.st_ino) return 0;
  if (p.mapped) {
    std::unique_lock<std::mutex> lock(mutex);
    const u64 deadline = ep::now_ns() + kReplaceLimit;
    while (p.used_by && header().epoch.load() <= p.used_by && !stop) {
      if (ep::now_ns() > deadline)
        return ep::fail(EP_EUSAGE, "rank %u comes with other memory, and its former one is still used by view %llu; a view without the rank must run first",
                        rank, wide(p.used_by));
      changed.wait_for(lock, std::chrono::milliseconds(1));
    }
    if (stop) return ep::fail(EP_EGONE, "the session is being closed");  // its kernels may still use the former one
    lock.unlock();
    if (int bad = context->regions.drop(rank)) return bad;
    p.mapped = false;
  }
  if (int bad = context->regions.map(rank, data_fd)) return bad;
  p.device = name.st_dev;
  p.inode = name.st_ino;
  p.mapped = true;
  return 0;
}

// Kernels adopt views, and graphs are replayed without a word to the host: the header is looked at. What they count the
// daemon cannot read on a GPU.
void epc_session::report() {
  u64 told = 0, copied = 0, copied_at = ep::now_ns(), said_at = copied_at;
  WeightsMirror::Headway said;
  std::unique_lock<std::mutex> lock(mutex);
  while (!stop) {
    const bool eager = ep::now_ns() - staged_at < kEager;
    changed.wait_for(lock, std::chrono::nanoseconds(told >= staged ? kLoads : eager ? kMs : 20 * kMs));
    if (stop) break;
    if (const u64 now = ep::now_ns(); now - said_at >= kHeadway) {
      said_at = now;
      lock.unlock();
      tell_headway(&said);
      lock.lock();
    }
    if (const u64 now = ep::now_ns(), steps = header().complete_steps.load(); steps != copied && now - copied_at >= kLoads) {
      copied = steps;
      copied_at = now;
      lock.unlock();
      context->copy_loads();  // a device that fails is found out by whoever waits for it
      lock.lock();
    }
    const u64 epoch = header().epoch.load();
    if (epoch <= told || stop) continue;
    told = epoch;
    lock.unlock();
    tell(EP_MSG_ADOPTED, epoch, header().step.load(), 0, "");
    lock.lock();
  }
}

// Not by the threads that copy: they never wait for the daemon.
void epc_session::tell_headway(WeightsMirror::Headway* told) {
  if (!weights || !link.takes(EP_TAKES_HEADWAY)) return;
  const WeightsMirror::Headway now = weights->headway();
  if (!now.epoch || (now.epoch == told->epoch && now.done == told->done)) return;
  *told = now;
  ep_message m{};
  m.magic = EP_MSG_MAGIC;
  m.type = EP_MSG_HEADWAY;
  m.rank = link.rank;
  m.a = now.epoch;
  m.b = now.done;
  m.c = now.total;
  link.send_if_room(m);
}

void epc_session::close() {
  {
    std::lock_guard<std::mutex> guard(mutex);
    stop = true;
    changed.notify_all();
    handed_changed.notify_all();
  }
  link.close();
  if (stager.joinable()) stager.join();
  if (reporter.joinable()) reporter.join();
  engine_hold.release();
  context.reset();  // waits for the device, then lets go of the runner's lock
  weights.reset();
}
