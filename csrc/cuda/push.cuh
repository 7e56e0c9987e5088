// Pushing the rows of a chunk to the ranks that need them, and saying so.
#pragma once
#include "kernels.h"
#include "routing.cuh"

namespace epc {

constexpr u32 kRouteRows = kChunkRows;

struct ChunkTargets {
  Mask mask[kRouteRows];
  u64 bits[kMaxRanks];
};

struct Chunk {
  u32 index, rows, first, stride;  // row i is first + i * stride
  __device__ __forceinline__ u32 row(u32 i) const { return first + i * stride; }
};

__device__ __forceinline__ Chunk chunk_of(u32 index, u32 chunks, u32 rows) {
  return {index, rows > index ? (rows - index + chunks - 1) / chunks : 0, index, chunks};
}

// All rows of a chunk, 16 bytes per thread and step; the next load is in flight while this one is stored.
struct RawRows {
  static constexpr u32 kMaxThreads = 1024;
  static constexpr bool kEarly = false;
  static __device__ __forceinline__ void begin(const DispatchArgs&, u8*) {}

  int4 ahead;
  __device__ __forceinline__ void prefetch(const DispatchArgs& a, const Chunk& c) {
    if (c.rows && threadIdx.x * 16 < a.row_bytes)
      ahead = load_stream(a.x + u64(c.row(0) / a.exchange.rows_per_token) * a.row_bytes + threadIdx.x * 16);
  }
  __device__ __forceinline__ void push(const DispatchArgs& a, const Chunk& c, const ChunkTargets& t) {
    const Domain& d = a.domain;
    const ep::ChannelLayout& l = a.exchange.at;
    const u32 vectors = a.row_bytes / 16, per = a.exchange.rows_per_token;
    u32 i = threadIdx.x < vectors ? 0 : c.rows, v = threadIdx.x;
    while (i < c.rows) {
      const int4 value = ahead;
      const u32 row = c.row(i), at = v;
      const Mask m = t.mask[i];
      v += blockDim.x;
      if (v >= vectors) v = threadIdx.x, ++i;
      if (i < c.rows) ahead = load_stream(a.x + u64(c.row(i) / per) * a.row_bytes + v * 16);
      const u64 offset = l.rows + (u64(d.me) * l.source_rows + row) * a.row_bytes + at * 16;
      m.each([&](u32 g) { store_stream(d.region(g) + offset, value); });
    }
    if (a.x_scales) push_scales(a, c, t);
  }
  // Scales of rows that the engine quantised itself.
  static __device__ void push_scales(const DispatchArgs& a, const Chunk& c, const ChunkTargets& t) {
    const Domain& d = a.domain;
    const ep::ChannelLayout& l = a.exchange.at;
    const u32 words = u32(l.scale_bytes / 4);
    for (u32 i = 0; i < c.rows; ++i) {
      const u32 row = c.row(i);
      for (u32 w = threadIdx.x; w < words; w += blockDim.x) {
        const u32 s = reinterpret_cast<const u32*>(a.x_scales)[u64(row / a.exchange.rows_per_token) * words + w];
        const u64 offset = l.scales + (u64(d.me) * l.source_rows + row) * l.scale_bytes + w * 4;
        t.mask[i].each([&](u32 g) { *reinterpret_cast<u32*>(d.region(g) + offset) = s; });
      }
    }
  }
};

// The same through shared memory by the copy engine of the SM: one thread of each warp moves whole pieces of rows, so
// few SMs fill the link and no register holds a row.
struct BulkRows {
  static constexpr u32 kMaxThreads = 512;  // the first kBulkWarps warps move rows, all route them
  static constexpr bool kEarly = false;
  u8* ring;
  u64* full;
  u32 taken;  // pieces this warp has loaded so far

  static __device__ __forceinline__ void begin(const DispatchArgs&, u8* shared) {
    u64* full = reinterpret_cast<u64*>(shared);
    if (threadIdx.x < kBulkWarps * kPushStages) barrier_init(full + threadIdx.x, 1);
    barrier_fence_init();
  }
  __device__ __forceinline__ void prefetch(const DispatchArgs&, const Chunk&) {}
  __device__ __forceinline__ void attach(u8* shared) {
    const u32 warp = threadIdx.x / 32;
    full = reinterpret_cast<u64*>(shared) + warp * kPushStages;
    ring = shared + kBulkBarrierBytes + warp * kPushStages * kPushPiece;
    taken = 0;
  }
  __device__ __forceinline__ void push(const DispatchArgs& a, const Chunk& c, const ChunkTargets& t) {
    if (threadIdx.x % 32 == 0 && threadIdx.x < kBulkWarps * 32) push_pieces(a, c, t);
    if (a.x_scales) RawRows::push_scales(a, c, t);
  }
  __device__ void push_pieces(const DispatchArgs& a, const Chunk& c, const ChunkTargets& t) {
    const Domain& d = a.domain;
    const ep::ChannelLayout& l = a.exchange.at;
    const u32 per_row = (a.row_bytes + kPushPiece - 1) / kPushPiece;
    const u32 bytes = ((a.row_bytes + per_row - 1) / per_row + 15) / 16 * 16;
    const u32 total = c.rows * per_row, step = kBulkWarps;
    auto size = [&](u32 p) { return min(bytes, a.row_bytes - p * bytes); };
    auto load = [&](u32 item, u32 n) {
      const u32 i = item / per_row, p = item % per_row, stage = n % kPushStages;
      barrier_expect(full + stage, size(p));
      bulk_load(ring + stage * kPushPiece, a.x + u64(c.row(i) / a.exchange.rows_per_token) * a.row_bytes + p * bytes, size(p),
                full + stage);
    };
    u32 next = threadIdx.x / 32, loaded = taken;
    for (u32 s = 0; s < kPushStages - 1 && next < total; ++s, next += step) load(next, loaded++);
    for (u32 item = threadIdx.x / 32; item < total; item += step, ++taken) {
      const u32 i = item / per_row, p = item % per_row, stage = taken % kPushStages;
      barrier_wait(full + stage, taken / kPushStages & 1);
      const u64 offset = l.rows + (u64(d.me) * l.source_rows + c.row(i)) * a.row_bytes + p * bytes;
      t.mask[i].each([&](u32 g) { bulk_store(d.region(g) + offset, ring + stage * kPushPiece, size(p)); });
      bulk_commit();
      if (next < total) {
        bulk_wait_read<1>();  // the stage that is loaded next was stored one piece ago
        load(next, loaded++);
        next += step;
      }
    }
    bulk_wait_done();
  }
};

// One word per member: the rows of this chunk that came to it. Fenced, so that whoever reads it has the rows too.
__device__ __forceinline__ void announce(const DispatchArgs& a, const Now& now, const Chunk& c, const ChunkTargets& t, u64 cells) {
  const Domain& d = a.domain;
  if (threadIdx.x >= now.members) return;
  const u32 g = now.peer;
  u64 bits = 0;
  for (u32 i = 0; i < c.rows; ++i) bits |= u64(t.mask[i].has(g)) << i;
  fence_system();
  auto cell = reinterpret_cast<TaggedWord*>(d.region(g) + cells) + u64(d.me) * a.exchange.gpu.chunks + c.index;
  store_relaxed(cell, {now.tag, bits});
}

}  // namespace epc
