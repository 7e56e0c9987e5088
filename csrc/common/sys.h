// Thin wrappers over the clock and the futex system calls.
#pragma once
#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>

#include "layout.h"

namespace ep {

inline u64 now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return u64(t.tv_sec) * 1000000000ull + u64(t.tv_nsec);
}

// Sleeps while *word == value, at most `ns`. Spurious returns are fine: callers look again. True: a signal's handler ran.
inline bool futex_wait(std::atomic<u32>& word, u32 value, u64 ns) {
  timespec t{time_t(ns / 1000000000ull), long(ns % 1000000000ull)};
  return syscall(SYS_futex, reinterpret_cast<u32*>(&word), FUTEX_WAIT, value, &t, nullptr, 0) == -1 && errno == EINTR;
}

// How late an engine's wait sees a signal that came while its thread was not asleep.
constexpr u64 kSignalLook = 50'000'000;

inline void futex_wake(std::atomic<u32>& word, int count = 1 << 30) {
  syscall(SYS_futex, reinterpret_cast<u32*>(&word), FUTEX_WAKE, count, nullptr, nullptr, 0);
}

// What sleepers wait for; 0 = awake.
enum Asleep : u32 { kAwake = 0, kForFlags = 1, kForCommand = 2 };

inline void ring(std::atomic<u32>& wake, std::atomic<u32>& asleep) {
  wake.fetch_add(1);
  if (asleep.load() != kAwake) futex_wake(wake);
}

}  // namespace ep
