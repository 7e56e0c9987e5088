// One thread of the daemon waits on every robust futex of its ranks and writes the dead words before any Python runs.
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "errors.h"
#include "memory.h"
#include "quiet.h"
#include "sys.h"

using namespace ep;

namespace {

// struct futex_waitv of linux/futex.h (5.16), spelled out so that older headers compile.
struct WaitEntry {
  u64 value, address;
  u32 flags, reserved;
};
constexpr u32 kFutex32Shared = 2;
constexpr size_t kMaxEntries = 127;  // the system call takes 128; one is the doorbell
constexpr long kFutexWaitv = 449;

struct Watch {
  u64 key, group;
  Header* header;
  u32 holder;          // ep_holder
  u32 seen = 0;        // last word handled
  bool held = false;
  u32 inc = 0;         // incarnation that the lock named then
  RobustLock& lock() const { return holder == EP_HOLDER_RUNNER ? header->runner : header->engine; }
};

struct PeerHeader {
  u64 group;
  Header* header;
};

}  // namespace

struct ep_watcher {
  std::mutex mutex;
  std::vector<Watch> watches;
  std::vector<PeerHeader> peers;
  std::deque<ep_event> events;
  std::atomic<u32> doorbell{0};
  std::atomic<bool> stop{false};
  int event_fd = -1;
  std::thread thread;

  void ring_bell() {
    doorbell.fetch_add(1);
    futex_wake(doorbell);
  }

  void emit(const Watch& w, u32 kind, u32 pid, u32 inc) {
    if (events.size() < 4096) events.push_back({w.key, kind, w.holder, pid, inc, now_ns()});
    u64 one = 1;
    if (write(event_fd, &one, sizeof one) < 0) {  // the counter is full: it is readable anyway
    }
  }

  void died(Watch& w, u32 inc) {
    Header& own = *w.header;
    for (auto& p : peers) {
      if (p.group != w.group || p.header == &own) continue;
      raise_to(p.header->dead[own.rank], inc);
      wake_all(*p.header);
    }
    fence(own, inc, 0, w.holder == EP_HOLDER_RUNNER ? "its worker process died" : "its engine process died");
  }

  // Looks at one word; returns the value to sleep on.
  u32 look(Watch& w) {
    RobustLock& lock = w.lock();
    u32 present = w.header->incarnation.load();
    u32 word = lock.word.load();
    for (;;) {
      if (word == 0) {
        if (w.held) {
          w.held = false;
          emit(w, EP_EVENT_RELEASED, 0, lock.inc.load());
        }
        return w.seen = word;
      }
      if (word & FUTEX_OWNER_DIED) {
        if (w.seen != word || w.held || w.inc != lock.inc.load()) {
          u32 inc = lock.inc.load(), pid = lock.pid.load();
          w.inc = inc;
          if (!inc) {
            // It died before it wrote its number. A grant in between clears the word before it raises the incarnation: what
            // was read is of `present` only if that still stands, and the next one must not be taken for dead.
            const u32 after = w.header->incarnation.load();
            if (after != present) {
              present = after;
              word = lock.word.load();
              continue;
            }
            inc = present;
          }
          w.held = false;
          died(w, inc);
          emit(w, EP_EVENT_DIED, pid, inc);
        }
        return w.seen = word;
      }
      if (!(word & FUTEX_WAITERS) && !lock.word.compare_exchange_weak(word, word | FUTEX_WAITERS)) continue;
      word |= FUTEX_WAITERS;
      const u32 inc = lock.inc.load();
      if (w.held && w.inc && w.inc != inc) {  // let go, and taken under the next incarnation, between two looks
        w.held = false;
        emit(w, EP_EVENT_RELEASED, 0, w.inc);
      }
      w.inc = inc;
      if (!w.held) {
        w.held = true;
        emit(w, EP_EVENT_HELD, lock.pid.load(), inc);
      }
      return w.seen = word;
    }
  }

  void run() {
    std::vector<WaitEntry> entries;
    while (!stop.load()) {
      u32 bell = doorbell.load();
      entries.clear();
      {
        std::lock_guard<std::mutex> guard(mutex);
        for (auto& w : watches) {
          u32 value = look(w);
          entries.push_back({value, reinterpret_cast<u64>(&w.lock().word), kFutex32Shared, 0});
        }
      }
      entries.push_back({bell, reinterpret_cast<u64>(&doorbell), kFutex32Shared, 0});
      timespec deadline;
      clock_gettime(CLOCK_MONOTONIC, &deadline);
      deadline.tv_sec += 1;  // a lost wake-up costs a second at most
      syscall(kFutexWaitv, entries.data(), unsigned(entries.size()), 0, &deadline, CLOCK_MONOTONIC);
    }
  }
};

ep_watcher* ep_watcher_new(void) {
  if (syscall(kFutexWaitv, nullptr, 0, 0, nullptr, 0) < 0 && errno == ENOSYS) {
    fail(EP_EUSAGE, "this kernel has no futex_waitv; elasticep daemons need Linux 5.16 or newer");
    return nullptr;
  }
  int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (fd < 0) {
    fail(-errno, "eventfd: %s", strerror(errno));
    return nullptr;
  }
  auto w = new ep_watcher;
  w->event_fd = fd;
  w->thread = quiet_thread([w] { w->run(); });
  return w;
}

int ep_watcher_fd(ep_watcher* watcher) { return watcher->event_fd; }

int ep_watcher_next(ep_watcher* watcher, ep_event* out) {
  std::lock_guard<std::mutex> guard(watcher->mutex);
  if (watcher->events.empty()) {
    u64 drained;
    if (read(watcher->event_fd, &drained, sizeof drained) < 0) {  // was not readable
    }
    return 0;
  }
  *out = watcher->events.front();
  watcher->events.pop_front();
  return 1;
}

int ep_watcher_watch(ep_watcher* watcher, uint64_t key, uint64_t group_key, ep_header_map* header) {
  {
    std::lock_guard<std::mutex> guard(watcher->mutex);
    for (auto& w : watcher->watches)
      if (w.key == key) return fail(EP_EINVAL, "key %llu is watched already", (unsigned long long)key);
    if (watcher->watches.size() + 2 > kMaxEntries)
      return fail(EP_EINVAL, "a daemon watches at most %zu seats; use more daemons on this node", kMaxEntries / 2);
    for (u32 holder : {u32(EP_HOLDER_RUNNER), u32(EP_HOLDER_ENGINE)})
      watcher->watches.push_back({key, group_key, header_of(header), holder});
  }
  watcher->ring_bell();
  return 0;
}

int ep_watcher_unwatch(ep_watcher* watcher, uint64_t key) {
  {
    std::lock_guard<std::mutex> guard(watcher->mutex);
    auto& w = watcher->watches;
    w.erase(std::remove_if(w.begin(), w.end(), [key](const Watch& x) { return x.key == key; }), w.end());
  }
  watcher->ring_bell();
  return 0;
}

int ep_watcher_peer_add(ep_watcher* watcher, uint64_t group_key, ep_header_map* header) {
  std::lock_guard<std::mutex> guard(watcher->mutex);
  watcher->peers.push_back({group_key, header_of(header)});
  return 0;
}

int ep_watcher_peer_remove(ep_watcher* watcher, uint64_t group_key, ep_header_map* header) {
  std::lock_guard<std::mutex> guard(watcher->mutex);
  auto& p = watcher->peers;
  Header* h = header_of(header);
  p.erase(std::remove_if(p.begin(), p.end(), [=](const PeerHeader& x) { return x.group == group_key && x.header == h; }), p.end());
  return 0;
}

void ep_watcher_look(ep_watcher* watcher) {
  std::lock_guard<std::mutex> guard(watcher->mutex);
  for (auto& w : watcher->watches) watcher->look(w);
}

void ep_watcher_free(ep_watcher* watcher) {
  watcher->stop.store(true);
  watcher->ring_bell();
  watcher->thread.join();
  close(watcher->event_fd);
  delete watcher;
}
