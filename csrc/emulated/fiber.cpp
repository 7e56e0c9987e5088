#include "fiber.h"

#include <sys/mman.h>
#include <time.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#ifndef __x86_64__
#error "the emulated GPU needs an x86-64 host"
#endif

// Saves what a call must keep on the stack, and goes on where another fiber has done the same.
asm(R"(
.text
.p2align 4
.hidden epe_switch
.globl epe_switch
.type epe_switch,@function
epe_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size epe_switch,.-epe_switch
)");
extern "C" void epe_switch(void** save, void* to);

namespace epe {

namespace {

constexpr uint64_t kCanary = 0x57ac4e4d0f57ac4eull;
constexpr long kNapNs = 20'000;

// Stacks of a host thread, used again for each of its blocks. Untouched pages take no memory.
struct Stacks {
  uint8_t* base;
  Stacks() {
    const size_t bytes = size_t(kMostThreads + 1) * kStackBytes;
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
      perror("emulated GPU: stacks");
      abort();
    }
    base = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(p) + kStackBytes - 1) & ~(kStackBytes - 1));
  }
};

void entry() {
  Fiber* f = here();
  (*f->block->body)();
  f->block->leave(f);
}

void nap(long ns = kNapNs) {
  timespec t{0, ns};
  nanosleep(&t, nullptr);
}

}  // namespace

void Block::run() {
  static thread_local Stacks stacks;
  const uint32_t threads = dim.x;
  alive = threads;
  warps.assign((threads + 31) / 32, Warp{});
  fibers.clear();
  ready.clear();
  first = 0;
  for (uint32_t i = 0; i < threads; ++i) {
    uint8_t* stack = stacks.base + i * kStackBytes;
    auto f = new (stack) Fiber{};
    f->block = this;
    f->thread = {i, 0, 0};
    f->number = i;
    f->lane = i % 32;
    f->warp = i / 32;
    warps[f->warp].alive |= 1u << f->lane;
    memcpy(stack + sizeof(Fiber), &kCanary, sizeof kCanary);
    // Stacks begin at different lines of the cache, or all of them would share a few.
    auto top = reinterpret_cast<void**>(stack + kStackBytes - (i * 5 % 64) * 64 - 64);
    *--top = nullptr;  // a function begins with the stack 8 off a multiple of 16
    *--top = reinterpret_cast<void*>(&entry);
    for (int r = 0; r < 6; ++r) *--top = nullptr;
    f->sp = top;
    fibers.push_back(f);
    ready.push_back(f);
  }
  resume_next(nullptr);
  if (alive) stuck("no thread can go on");
  while (!held.empty()) take_held(0);
  if (!bulk.empty()) stuck("it ended while bulk copies were on their way to it");
  for (Fiber* f : fibers)
    if (memcmp(reinterpret_cast<uint8_t*>(f) + sizeof(Fiber), &kCanary, sizeof kCanary)) stuck("a thread's stack overflowed");
}

// To the next that is ready; to the host's thread when there is none.
void Block::resume_next(Fiber* from) {
  void* next = main;
  if (first < ready.size()) {
    if (shuffled) std::swap(ready[first], ready[first + dice.below(uint32_t(ready.size() - first))]);
    Fiber* f = ready[first++];
    if (first > 4096) {
      ready.erase(ready.begin(), ready.begin() + long(first));
      first = 0;
    }
    if (f == from) return;
    next = f->sp;
  }
  epe_switch(from ? &from->sp : &main, next);
}

void Block::give_way(Fiber* f) {
  ready.push_back(f);
  resume_next(f);
}

void Block::maybe_pause(Fiber* f) {
  if (!shuffled || dice.below(8)) return;
  if (!bulk.empty() && dice.below(2)) take_bulk(dice.below(uint32_t(bulk.size())));
  if (!held.empty() && dice.below(2)) take_held(dice.below(uint32_t(held.size())));
  if (!dice.below(256)) nap();
  if (!dice.below(1024)) nap(100 * kNapNs);  // as when ranks share a GPU in turn
  give_way(f);
}

// Whoever looks at a word in vain gives way; when all do so, the host's other threads and processes get the time.
void Block::look(Fiber* f, const void* at, uint64_t value) {
  if (f->polled != at || f->held != value) {
    f->polled = at;
    f->held = value;
    f->idle = idle = 0;
    return maybe_pause(f);
  }
  ++f->idle;
  const size_t others = ready.size() - first;
  if (++idle > 2 * others + 32 || (others == 0 && f->idle > 32)) nap();
  if (!bulk.empty()) take_bulk(0);
  give_way(f);
}

void Block::meet(Fiber* f, uint64_t value, Place where) {
  if (come == 0) at = where, sum = any = 0, all = 1;
  f->waits = where;
  if (!(at == where)) stuck("threads of a block have come to different barriers");
  sum += value, any |= value != 0, all &= value != 0;
  if (++come == alive) {
    f->waits = {};
    close_meeting();
    return maybe_pause(f);
  }
  resume_next(f);
}

void Block::close_meeting() {
  last_sum = sum, last_any = any, last_all = all;
  ++meetings;
  come = 0;
  idle = 0;
  for (Fiber* f : fibers)
    if (f->waits.line && f->waits == at) {
      f->waits = {};
      ready.push_back(f);
    }
}

void Block::meet_warp(Fiber* f, uint64_t value, Place where) {
  Warp& w = warps[f->warp];
  if (w.come == 0) w.at = where;
  f->waits = where;
  f->brought = value;
  if (!(w.at == where)) stuck("lanes of a warp have come to different places");
  w.come |= 1u << f->lane;
  if (w.come == w.alive) {
    f->waits = {};
    return close_warp(f->warp);
  }
  resume_next(f);
}

void Block::close_warp(uint32_t warp) {
  Warp& w = warps[warp];
  idle = 0;
  for (uint32_t lane = 0; lane < 32; ++lane) {
    if (!(w.come >> lane & 1)) {
      w.values[lane] = 0;
      continue;
    }
    Fiber* f = fibers[warp * 32 + lane];
    w.values[lane] = f->brought;
    if (f->waits.line) {
      f->waits = {};
      ready.push_back(f);
    }
  }
  w.come = 0;
  ++w.meetings;
}

// The end of a thread: those who wait at a meeting wait for one less.
void Block::leave(Fiber* f) {
  for (const Bulk& b : bulk)
    if (b.issuer == f && !b.barrier) stuck("a thread ended with bulk stores that it did not wait for");
  Warp& w = warps[f->warp];
  w.alive &= ~(1u << f->lane);
  --alive;
  idle = 0;
  if (w.come) stuck("a thread ended that others of its warp wait for");
  if (alive && come == alive) close_meeting();
  resume_next(f);
  __builtin_unreachable();
}

void Block::take_bulk(size_t i) {
  const Bulk b = bulk[i];
  bulk.erase(bulk.begin() + long(i));
  memcpy(b.to, b.from, b.bytes);
  if (!b.barrier) return;
  b.barrier->bytes -= int32_t(b.bytes);
  b.barrier->turn();
}

namespace {
void check_bulk(const void* to, const void* from, uint32_t bytes) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % 16)
    fail("a bulk copy is not aligned to 16 bytes", __FILE__, __LINE__);
}
}  // namespace

// Loads come at once, or when the dice say so, or somebody waits; stores when they are waited for, or earlier.
void Block::load_bulk(Fiber* f, void* to, const void* from, uint32_t bytes, BulkBarrier* barrier) {
  check_bulk(to, from, bytes);
  bulk.push_back({to, from, bytes, barrier, f, 0});
  if (!shuffled) take_bulk(bulk.size() - 1);
}
void Block::store_bulk(Fiber* f, void* to, const void* from, uint32_t bytes) {
  check_bulk(to, from, bytes);
  bulk.push_back({to, from, bytes, nullptr, f, f->groups});
}
void Block::await_bulk(Fiber* f, uint32_t keep) {
  for (size_t i = 0; i < bulk.size();)
    if (!bulk[i].barrier && bulk[i].issuer == f && bulk[i].group + keep < f->groups) take_bulk(i);
    else ++i;
}

void fail(const char* why, const char* file, int line) {
  fprintf(stderr, "emulated GPU: %s (%s:%d)\n", why, file, line);
  abort();
}

void Block::stuck(const char* why) const {
  fprintf(stderr, "emulated GPU: block %u of %u, %u threads: %s\n", index.x, grid.x, dim.x, why);
  Place last{};
  for (uint32_t i = 0; i < fibers.size(); ++i) {
    const Fiber* f = fibers[i];
    if (!f->waits.line || f->waits == last) continue;
    last = f->waits;
    fprintf(stderr, "  thread %u waits at %s:%d\n", i, last.file, last.line);
  }
  abort();
}

}  // namespace epe
