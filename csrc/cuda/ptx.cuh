// The few PTX instructions that CUDA C++ has no plain spelling for.
#pragma once
#include <cuda_runtime.h>

#include "../common/layout.h"

namespace epc {

using ep::u16;
using ep::u32;
using ep::u64;
using ep::u8;

// Two words that are read and written as one: a tag and what it vouches for.
struct __align__(16) TaggedWord {
  u64 tag, word;
};

}  // namespace epc

#ifdef EPC_EMULATED
#include "../emulated/ptx.h"  // the same functions for a host compiler
#else

namespace epc {

__device__ __forceinline__ u64 load_acquire(const u64* p) {
  u64 v;
  asm volatile("ld.acquire.sys.global.u64 %0,[%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u64 load_relaxed(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.sys.global.u64 %0,[%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u32 load_relaxed(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.sys.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_relaxed(u64* p, u64 v) {
  asm volatile("st.relaxed.sys.global.u64 [%0],%1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void store_relaxed(u32* p, u32 v) {
  asm volatile("st.relaxed.sys.global.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ TaggedWord load_acquire(const TaggedWord* p) {
  TaggedWord v;
  asm volatile(
      "{.reg .b128 t; ld.acquire.sys.global.b128 t,[%2]; mov.b128 {%0,%1},t;}"
      : "=l"(v.tag), "=l"(v.word)
      : "l"(p)
      : "memory");
  return v;
}
__device__ __forceinline__ TaggedWord load_relaxed(const TaggedWord* p) {
  TaggedWord v;
  asm volatile(
      "{.reg .b128 t; ld.relaxed.sys.global.b128 t,[%2]; mov.b128 {%0,%1},t;}"
      : "=l"(v.tag), "=l"(v.word)
      : "l"(p)
      : "memory");
  return v;
}
__device__ __forceinline__ void store_relaxed(TaggedWord* p, TaggedWord v) {
  asm volatile("{.reg .b128 t; mov.b128 t,{%1,%2}; st.relaxed.sys.global.b128 [%0],t;}" ::"l"(p), "l"(v.tag),
               "l"(v.word)
               : "memory");
}

__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Nanoseconds of wall time; it goes on while a process is stopped, unlike clock64.
__device__ __forceinline__ u64 wall_ns() {
  u64 t;
  asm volatile("mov.u64 %0,%globaltimer;" : "=l"(t));
  return t;
}

// Rows stream through: they must not push anything out of L1, and are read once.
__device__ __forceinline__ int4 load_stream(const void* p) {
  int4 v;
  asm volatile("ld.global.L1::no_allocate.v4.s32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_stream(void* p, int4 v) {
  asm volatile("st.global.L1::no_allocate.v4.s32 [%0],{%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// Programmatic dependent launch: no effect unless the launch asked for it.
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// --- bulk copies (one thread issues, an mbarrier or a bulk group completes) ---
__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ void barrier_init(u64* b, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_expect(u64* b, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u64* b, u32 phase) {
  asm volatile(
      "{.reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p,[%0],%1; @p bra D; bra W; D:}" ::"r"(shared_address(b)),
      "r"(phase)
      : "memory");
}
__device__ __forceinline__ void bulk_load(void* to_shared, const void* from, u32 bytes, u64* b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(
                   shared_address(to_shared)),
               "l"(from), "r"(bytes), "r"(shared_address(b))
               : "memory");
}
__device__ __forceinline__ void bulk_store(void* to, const void* from_shared, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0],[%1],%2;" ::"l"(to), "r"(shared_address(from_shared)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void bulk_wait_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Between data that other threads wrote or will write with ordinary instructions and bulk copies of it.
__device__ __forceinline__ void fence_bulk() { asm volatile("fence.proxy.async;" ::: "memory"); }

}  // namespace epc

#endif
