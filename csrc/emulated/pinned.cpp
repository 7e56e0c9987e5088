// Pinned host memory: what is copied from it is read when the stream comes to the copy, not when the call is made. Tests
// may hold such copies back.
#include <map>

#include "device.h"

namespace {

struct Gate {
  std::mutex mutex;
  std::condition_variable changed;
  bool shut = false;
  uint32_t waiting = 0;
  uint32_t let = 0;  // may pass although it is shut
  std::map<uintptr_t, size_t> pinned;
};

Gate& gate() {
  static auto g = new Gate;
  return *g;
}

}  // namespace

namespace epe {

void note_pinned(const void* p, size_t bytes) {
  std::lock_guard<std::mutex> guard(gate().mutex);
  gate().pinned[reinterpret_cast<uintptr_t>(p)] = bytes;
}

void forget_pinned(const void* p) {
  std::lock_guard<std::mutex> guard(gate().mutex);
  gate().pinned.erase(reinterpret_cast<uintptr_t>(p));
}

bool is_pinned(const void* p, size_t bytes) {
  const auto at = reinterpret_cast<uintptr_t>(p);
  std::lock_guard<std::mutex> guard(gate().mutex);
  auto next = gate().pinned.upper_bound(at);
  if (next == gate().pinned.begin()) return false;
  --next;
  return at + bytes <= next->first + next->second;
}

void pass_gate() {
  Gate& g = gate();
  std::unique_lock<std::mutex> lock(g.mutex);
  ++g.waiting;
  g.changed.notify_all();
  g.changed.wait(lock, [&] { return !g.shut || g.let; });
  if (g.shut) --g.let;
  --g.waiting;
}

void hold_copies(bool shut) {
  std::lock_guard<std::mutex> guard(gate().mutex);
  gate().shut = shut;
  gate().let = 0;
  gate().changed.notify_all();
}

void let_copies(uint32_t count) {
  std::lock_guard<std::mutex> guard(gate().mutex);
  if (gate().shut) gate().let += count;
  gate().changed.notify_all();
}

uint32_t held_copies() {
  std::lock_guard<std::mutex> guard(gate().mutex);
  return gate().shut ? gate().waiting : 0;
}

}  // namespace epe
