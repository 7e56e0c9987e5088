// The threads of one thread block as fibers of one thread of the host. What a warp or a block does together is a meeting:
// a fiber that has come to it gives way until all are there.
#pragma once
#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace epe {

constexpr size_t kStackBytes = 32768;  // of a fiber, which lies at the bottom of it
constexpr uint32_t kMostThreads = 1024;

struct Block;

// Where in the source a meeting was called for: all who come must have come to the same one.
struct Place {
  const char* file;
  int line;
  bool operator==(const Place& o) const { return line == o.line; }
};

struct Fiber {
  void* sp;
  Block* block;
  uint3 thread;
  uint32_t number, lane, warp;
  uint64_t brought;   // to a meeting
  const void* polled; // the word that it looked at last, and what it held
  uint64_t held;
  uint32_t idle;      // looks in a row that showed nothing new
  uint32_t groups;    // of bulk stores that it has closed
  Place waits;        // at a meeting; line 0: it runs or is ready
};

struct Warp {
  uint32_t alive, come;  // lanes as bits
  uint64_t meetings;
  Place at;
  uint64_t values[32];   // what all brought to the last meeting
};

// What lies in the word of a barrier of bulk copies: bytes and arrivals that are still to come in this phase, arrivals of
// every phase, and the phase.
struct BulkBarrier {
  int32_t bytes;
  uint16_t left;
  uint8_t arrivals, phase;
  void turn() {
    if (left || bytes) return;
    left = arrivals;
    phase ^= 1;
  }
};
static_assert(sizeof(BulkBarrier) == 8, "it takes the place of a word");

// A copy of the SM's copy engine that is still to be made.
struct Bulk {
  void* to;
  const void* from;
  uint32_t bytes;
  BulkBarrier* barrier; // a load says there that it is done
  Fiber* issuer;
  uint32_t group;       // of the issuer, for a store
};

// A store to memory of another rank that nobody there sees yet. It is carried out when a thread fences that has met its
// writer since, at the latest when the block ends, and not in the order of the program: whoever needs an order has to fence.
struct Held {
  void* to;
  uint8_t bytes[16];
  uint32_t size;
  const Fiber* writer;
  uint64_t block_meetings, warp_meetings;  // until then
};

// A pseudo-random choice; the same for the same seed.
struct Dice {
  uint64_t state;
  uint64_t next() {
    state += 0x9E3779B97F4A7C15ull;
    uint64_t z = state;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
  }
  uint32_t below(uint32_t n) { return uint32_t((next() >> 32) * n >> 32); }
};

struct Block {
  dim3 grid, dim;
  uint3 index;
  const std::function<void()>* body;
  bool shuffled;          // fibers run in random order, and pause where they need not
  Dice dice;
  void* main = nullptr;   // stack pointer of the host's thread
  uint32_t alive = 0, come = 0, idle = 0;
  Place at{};
  uint64_t sum = 0, any = 0, all = 0;           // of the meeting that is being held
  uint64_t last_sum = 0, last_any = 0, last_all = 0;
  std::vector<Fiber*> fibers, ready;
  size_t first = 0;       // ready[first..] wait for their turn
  std::vector<Warp> warps;
  std::vector<Bulk> bulk;
  std::vector<Held> held;
  uint64_t meetings = 0;

  void run();             // to the end of all threads
  void give_way(Fiber* f);                     // to whoever is ready
  void meet(Fiber* f, uint64_t value, Place at);       // __syncthreads*
  void meet_warp(Fiber* f, uint64_t value, Place at);  // warp primitives
  void look(Fiber* f, const void* at, uint64_t value); // a polling load has read `value`
  void maybe_pause(Fiber* f);                  // shuffled: now and then to others
  void leave(Fiber* f);
  void store(Fiber* f, void* to, const void* from, uint32_t bytes);  // 4, 8 or 16 bytes, as one
  void fence(Fiber* f);
  void store_bulk(Fiber* f, void* to, const void* from, uint32_t bytes);
  void load_bulk(Fiber* f, void* to, const void* from, uint32_t bytes, BulkBarrier* barrier);
  void await_bulk(Fiber* f, uint32_t keep);    // its stores, but for the last `keep` groups

 private:
  void take_bulk(size_t i);
  void take_held(size_t i);
  void resume_next(Fiber* from);
  void close_meeting();
  void close_warp(uint32_t warp);
  [[noreturn]] void stuck(const char* why) const;
};

// Address space that one rank reserved for the regions of all, of which the one that it mapped first is its own.
void reserve_regions(uintptr_t base, size_t bytes);
void map_region(uintptr_t at, size_t bytes);
void forget_regions(uintptr_t base);
bool of_a_peer(const void* at);

// Ends the process: what a kernel did has no meaning on a GPU either.
[[noreturn]] void fail(const char* why, const char* file, int line);

// The fiber that runs: it lies at the bottom of its stack.
inline Fiber* here() {
  uintptr_t sp;
  asm("mov %%rsp,%0" : "=r"(sp));
  return reinterpret_cast<Fiber*>(sp & ~(kStackBytes - 1));
}

}  // namespace epe
