// Twins of the functions of ptx.cuh. Loads that kernels poll with, and stores that others may be waiting for, are where
// threads give way to each other.
#pragma once
#include <emmintrin.h>
#include <time.h>

#include "builtins.h"

namespace epc {

inline u64 load_acquire(const u64* p) {
  epe::here()->block->maybe_pause(epe::here());
  const u64 v = __atomic_load_n(p, __ATOMIC_ACQUIRE);
  epe::here()->block->look(epe::here(), p, v);
  return v;
}
inline u64 load_relaxed(const u64* p) {
  epe::here()->block->maybe_pause(epe::here());
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}
inline u32 load_relaxed(const u32* p) {
  epe::here()->block->maybe_pause(epe::here());
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}
inline void store_relaxed(u64* p, u64 v) { epe::here()->block->store(epe::here(), p, &v, sizeof v); }
inline void store_relaxed(u32* p, u32 v) { epe::here()->block->store(epe::here(), p, &v, sizeof v); }

// Aligned 16-byte moves are single accesses on every CPU with AVX (the library refuses others).
inline TaggedWord load_whole(const TaggedWord* p) {
  __m128i v;
  asm volatile("movdqa %1,%0" : "=x"(v) : "m"(*reinterpret_cast<const __m128i*>(p)) : "memory");
  TaggedWord out;
  memcpy(&out, &v, sizeof out);
  return out;
}
inline TaggedWord load_acquire(const TaggedWord* p) {
  epe::here()->block->maybe_pause(epe::here());
  const TaggedWord v = load_whole(p);
  epe::here()->block->look(epe::here(), p, v.tag);
  return v;
}
inline TaggedWord load_relaxed(const TaggedWord* p) {
  epe::here()->block->maybe_pause(epe::here());
  return load_whole(p);
}
inline void store_relaxed(TaggedWord* p, TaggedWord v) { epe::here()->block->store(epe::here(), p, &v, sizeof v); }

inline void fence_system() { epe::here()->block->fence(epe::here()); }

// Another clock than the host's, which stands still for a microsecond, like the real one.
inline u64 wall_ns() {
  timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return (u64(t.tv_sec) * 1'000'000'000 + u64(t.tv_nsec)) / 1024 * 1024;
}

inline int4 load_stream(const void* p) {
  return *static_cast<const int4*>(p);
}
inline void store_stream(void* p, int4 v) { epe::here()->block->store(epe::here(), p, &v, sizeof v); }

// Kernels of a stream run one after another.
inline void wait_for_previous_kernel() { epe::here()->block->maybe_pause(epe::here()); }
inline void let_next_kernel_start() {}

// --- bulk copies ---
inline epe::BulkBarrier* barrier_of(u64* b) { return reinterpret_cast<epe::BulkBarrier*>(b); }
inline void barrier_init(u64* b, u32 arrivals) { *barrier_of(b) = {0, u16(arrivals), u8(arrivals), 0}; }
inline void barrier_fence_init() {}
inline void barrier_expect(u64* b, u32 bytes) {
  epe::BulkBarrier* at = barrier_of(b);
  if (!at->left) epe::fail("an arrival too many at a barrier of bulk copies", __FILE__, __LINE__);
  at->bytes += int(bytes);
  --at->left;
  at->turn();
}
inline void barrier_wait(u64* b, u32 phase) {
  while (barrier_of(b)->phase == (phase & 1)) epe::here()->block->look(epe::here(), b, 0);
}
inline void bulk_load(void* to_shared, const void* from, u32 bytes, u64* b) {
  epe::here()->block->load_bulk(epe::here(), to_shared, from, bytes, barrier_of(b));
}
inline void bulk_store(void* to, const void* from_shared, u32 bytes) { epe::here()->block->store_bulk(epe::here(), to, from_shared, bytes); }
inline void bulk_commit() { ++epe::here()->groups; }
template <int N>
void bulk_wait_read() {
  epe::here()->block->await_bulk(epe::here(), N);
}
inline void bulk_wait_done() { epe::here()->block->await_bulk(epe::here(), 0); }
inline void fence_bulk() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

}  // namespace epc
