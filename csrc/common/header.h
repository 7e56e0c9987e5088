// A rank's header: one memfd, mapped by its daemon, its runner, its engine and every peer of the domain.
#pragma once
#include <atomic>

#include "layout.h"

namespace ep {

constexpr u64 kHeaderMagic = 0x31504549545341ull;  // "ASTIEP1"

template <class T>
using Atomic = std::atomic<T>;
static_assert(Atomic<u64>::is_always_lock_free && Atomic<u32>::is_always_lock_free);

// A robust futex. `next` belongs to the holder's thread (the kernel walks it when that thread dies).
struct alignas(64) RobustLock {
  void* next;
  Atomic<u32> word;  // 0 free, tid | FUTEX_WAITERS held, FUTEX_OWNER_DIED after a death
  Atomic<u32> inc;   // incarnation of the holder
  Atomic<u32> pid;   // process of the holder
};

// Where a test may stop or kill a runner (ep_header_failpoint); 0 = nowhere.
struct Failpoint {
  Atomic<u32> site, action, countdown, hits;
};

struct WaitRecord {
  Atomic<u32> phase, exchange, rank;
  Atomic<u32> owner;  // 1 + the channel whose wait this is, 0 = none; another that waits too has its turn after it
  Atomic<u64> since_ns;
};

enum Op : u32 {
  kOpNone, kOpBarrier, kOpStepEnd, kOpTear, kOpDispatchSend, kOpDispatchRecv, kOpDispatch, kOpCombineSend, kOpCombineRecv, kOpCombine
};

// Service launch: one command at a time per channel. The engine fills the arguments and raises `posted`; the worker
// fills the results and raises `done` to the same number. Both are doorbells that the other side sleeps on.
struct alignas(64) Command {
  Atomic<u64> posted;
  u32 op, exchange, layer, tokens, x_dtype, out_dtype, timeout_ms, sequence;
  float global_scale;
  Atomic<u64> cancelled;  // = posted: the engine gives this command up; a wait of it ends at once
  alignas(64) Atomic<u64> done;
  int32_t status;
  u32 complete;
  u64 arrived;
  char text[EP_TEXT];
  u32 source_tokens[EP_MAX_RANKS];
};

static_assert(offsetof(Command, done) == 64);

struct Header {
  u64 magic;
  u32 abi, rank;
  u64 digest;
  ep_timeouts timeouts;
  Atomic<u32> incarnation;  // the present one; set by the daemon
  Atomic<u32> warmup;
  Atomic<u32> policy;       // EP_POLICY_*: what is done about lost experts now; the daemon's

  RobustLock runner, engine;

  // Anyone bumps a wake word; its owner sleeps on it. `asleep` says for what, so that flags wake no one in vain.
  // The runner has one per channel (barriers use the first).
  alignas(64) Atomic<u32> runner_wake[EP_MAX_CHANNELS];
  Atomic<u32> runner_asleep[EP_MAX_CHANNELS];
  alignas(64) Atomic<u32> engine_wake;
  Atomic<u32> engine_asleep;

  alignas(64) Atomic<u64> progress, epoch, step, torn_steps, complete_steps;
  Atomic<u64> staged[EP_BANKS];
  WaitRecord wait;
  Failpoint failpoint;
  ep_step_info step_info;  // result of the last barrier (service launch)

  alignas(64) Atomic<u32> fenced;  // highest fenced incarnation; the daemon's
  Atomic<u64> fenced_epoch;
  char fenced_text[EP_TEXT];
  alignas(64) Atomic<u32> dead[EP_MAX_RANKS];  // highest dead or expelled incarnation; the daemon's, never cleared

  Command command[EP_MAX_CHANNELS];
};

inline void raise_to(Atomic<u32>& word, u32 value) {
  u32 old = word.load(std::memory_order_relaxed);
  while (old < value && !word.compare_exchange_weak(old, value)) {
  }
}

void failpoint_hit(Failpoint& failpoint);
// One relaxed load where nothing is armed.
inline void failpoint(Header& h, u32 site) {
  if (kFaultChecks && __builtin_expect(h.failpoint.site.load(std::memory_order_relaxed) == site, 0)) failpoint_hit(h.failpoint);
}

// Wakes whoever sleeps on any word of this header, so that it looks at dead/fenced again.
void wake_all(Header& header);
inline bool is_fenced(const Header& h) {
  return h.fenced.load(std::memory_order_acquire) >= h.incarnation.load(std::memory_order_relaxed);
}

}  // namespace ep
