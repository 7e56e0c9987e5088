// Stores to other ranks' memory under a seed: the hardware may show them there late and in any order, until a fence.
#include <emmintrin.h>

#include <atomic>
#include <cstring>
#include <mutex>

#include "fiber.h"

namespace epe {

namespace {

constexpr size_t kMostHeld = 256, kMostRanges = 256;

// Never changed or freed once it is in `ranges`: kernels look there while others reserve and forget.
struct Range {
  uintptr_t base, end, own, own_end;
};
std::atomic<const Range*> ranges[kMostRanges];  // null: free
std::atomic<size_t> used{0};
std::mutex& mutex() {
  static auto m = new std::mutex;
  return *m;
}

void carry_out(void* to, const void* from, uint32_t bytes) {
  if (bytes == 4) {
    uint32_t v;
    memcpy(&v, from, sizeof v);
    __atomic_store_n(static_cast<uint32_t*>(to), v, __ATOMIC_RELAXED);
  } else if (bytes == 8) {
    uint64_t v;
    memcpy(&v, from, sizeof v);
    __atomic_store_n(static_cast<uint64_t*>(to), v, __ATOMIC_RELAXED);
  } else {
    const __m128i v = _mm_loadu_si128(static_cast<const __m128i*>(from));
    asm volatile("movdqa %1,%0" : "=m"(*static_cast<__m128i*>(to)) : "x"(v) : "memory");
  }
}

}  // namespace

void reserve_regions(uintptr_t base, size_t bytes) {
  std::lock_guard<std::mutex> guard(mutex());
  size_t i = 0;
  while (i < used && ranges[i].load()) ++i;
  if (i == kMostRanges) fail("too many reserved address ranges", __FILE__, __LINE__);
  ranges[i] = new Range{base, base + bytes, 0, 0};
  if (i == used) ++used;
}
void map_region(uintptr_t at, size_t bytes) {
  std::lock_guard<std::mutex> guard(mutex());
  for (size_t i = 0; i < used; ++i) {
    const Range* r = ranges[i];
    if (r && at >= r->base && at < r->end && !r->own) ranges[i] = new Range{r->base, r->end, at, at + bytes};
  }
}
void forget_regions(uintptr_t base) {
  std::lock_guard<std::mutex> guard(mutex());
  for (size_t i = 0; i < used; ++i)
    if (const Range* r = ranges[i]; r && r->base == base) ranges[i] = nullptr;
}
bool of_a_peer(const void* p) {
  const auto at = reinterpret_cast<uintptr_t>(p);
  for (size_t i = 0, n = used; i < n; ++i)
    if (const Range* r = ranges[i]; r && at >= r->base && at < r->end) return at < r->own || at >= r->own_end;
  return false;
}

void Block::store(Fiber* f, void* to, const void* from, uint32_t bytes) {
  maybe_pause(f);
  if (!shuffled || !of_a_peer(to)) return carry_out(to, from, bytes);
  if (held.size() == kMostHeld) take_held(dice.below(kMostHeld));
  Held h{to, {}, bytes, f, meetings, warps[f->warp].meetings};
  memcpy(h.bytes, from, bytes);
  held.push_back(h);
}

// What a thread stores to one place comes there in order.
void Block::take_held(size_t i) {
  for (size_t j = 0; j < i; ++j) {
    const auto at = reinterpret_cast<uintptr_t>(held[i].to);
    const auto other = reinterpret_cast<uintptr_t>(held[j].to);
    if (other < at + held[i].size && at < other + held[j].size) {
      i = j;
      j = size_t(-1);  // that one may have to come behind another
    }
  }
  const Held h = held[i];
  held.erase(held.begin() + long(i));
  carry_out(h.to, h.bytes, h.size);
}

// All that this thread wrote, and what others wrote before they met it.
void Block::fence(Fiber* f) {
  maybe_pause(f);
  for (size_t i = 0; i < held.size();) {
    const Held& h = held[i];
    const bool met = h.block_meetings < meetings || (h.writer->warp == f->warp && h.warp_meetings < warps[f->warp].meetings);
    if (h.writer != f && !met) {
      ++i;
      continue;
    }
    carry_out(h.to, h.bytes, h.size);
    held.erase(held.begin() + long(i));
  }
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

}  // namespace epe
