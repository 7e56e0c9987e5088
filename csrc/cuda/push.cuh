// Pushing the rows of a chunk to the ranks that need them, and saying so.
#pragma once
#include "kernels.h"
#include "routing.cuh"

namespace epc {

struct ChunkTargets {
  Mask mask[kChunkRows];
  u64 bits[kMaxRanks];
};

struct Chunk {
  u32 index, rows, first, stride;  // row i is first + i * stride
  __device__ __forceinline__ u32 row(u32 i) const { return first + i * stride; }
};

__device__ __forceinline__ Chunk chunk_of(u32 index, u32 chunks, u32 rows) {
  const u32 more = rows > index ? rows - index : 0;  // mostly at most one row: a division would take longer than the rest
  return {index, more <= chunks ? more != 0 : (more + chunks - 1) / chunks, index, chunks};
}

// All rows of a chunk, 16 bytes per thread and step; the next two loads are in flight while one is stored.
struct RawRows {
  static constexpr bool kRoutesLast = false;
  static constexpr u32 kMinBlocks = 0;
  static constexpr u32 kMaxThreads = kMostRawThreads;  // 80 registers for each
  static __device__ __forceinline__ void begin(u8*) {}
  __device__ __forceinline__ void attach(u8*) {}
  __device__ __forceinline__ void prepare(const DispatchArgs&, const Chunk&) {}
  __device__ __forceinline__ void abandon() {}

  // A thread's place in the chunk: row i, vector v of it.
  struct Cursor {
    u32 i, v;
    __device__ __forceinline__ void advance(u32 vectors) {
      v += blockDim.x;
      if (v >= vectors) v = threadIdx.x, ++i;
    }
  };
  int4 ahead[2];
  Cursor issue;

  __device__ __forceinline__ void load(const DispatchArgs& a, const Chunk& c, int4& into) {
    if (issue.i >= c.rows) return;
    into = load_stream(a.x + u64(a.exchange.token_of(c.row(issue.i))) * a.row_bytes + issue.v * 16);
    issue.advance(a.row_bytes / 16);
  }
  __device__ __forceinline__ void prefetch(const DispatchArgs& a, const Chunk& c) {
    issue = {threadIdx.x < a.row_bytes / 16 ? 0 : c.rows, threadIdx.x};
    load(a, c, ahead[0]);
    load(a, c, ahead[1]);
  }
  __device__ __forceinline__ void push(const DispatchArgs& a, const Chunk& c, const ChunkTargets& t) {
    const Domain& d = a.domain;
    const ep::ChannelLayout& l = a.exchange.at;
    const u32 vectors = a.row_bytes / 16;
    for (Cursor at{threadIdx.x < vectors ? 0 : c.rows, threadIdx.x}; at.i < c.rows; at.advance(vectors)) {
      const int4 value = ahead[0];
      ahead[0] = ahead[1];
      load(a, c, ahead[1]);
      const u64 offset = l.rows + (u64(d.me) * l.source_rows + c.row(at.i)) * a.row_bytes + at.v * 16;
      t.mask[at.i].each([&](u32 g) { store_stream(d.region(g) + offset, value); });
    }
    if (a.x_scales) push_scales(a, c, t);
  }
  // Scales of rows that the engine quantised itself. Rows of scales need not be whole words: hidden 2880 in mxfp8 has 90 bytes.
  static __device__ void push_scales(const DispatchArgs& a, const Chunk& c, const ChunkTargets& t) {
    if ((reinterpret_cast<u64>(a.x_scales) | a.exchange.at.scale_bytes) % 4) push_scales_as<u8>(a, c, t);
    else push_scales_as<u32>(a, c, t);
  }
  template <class Unit>
  static __device__ void push_scales_as(const DispatchArgs& a, const Chunk& c, const ChunkTargets& t) {
    const Domain& d = a.domain;
    const ep::ChannelLayout& l = a.exchange.at;
    const u32 units = u32(l.scale_bytes / sizeof(Unit));
    const bool powers = sizeof(Unit) == 4 && a.exchange.scale_layout == EP_SCALES_PACKED && a.exchange.dispatch_dtype == EP_FP8;
    for (u32 i = 0; i < c.rows; ++i) {
      const u32 row = c.row(i);
      for (u32 u = threadIdx.x; u < units; u += blockDim.x) {
        const Unit s = reinterpret_cast<const Unit*>(a.x_scales)[u64(a.exchange.token_of(row)) * units + u];
        if (powers && (s & 0x807fffffu)) tear(d, kPhaseDispatch, a.exchange.index, EPC_WHY_SCALES, d.me, a.layer, 0, 0, a.exchange.token_of(row));
        const u64 offset = l.scales + (u64(d.me) * l.source_rows + row) * l.scale_bytes + u * sizeof(Unit);
        t.mask[i].each([&](u32 g) { *reinterpret_cast<Unit*>(d.region(g) + offset) = s; });
      }
    }
  }
};

// The same through shared memory by the copy engine of the SM: one thread of each warp moves whole pieces of rows, so
// few SMs fill the link and no register holds a row.
struct BulkRows {
  static constexpr bool kRoutesLast = false;
  static constexpr u32 kMinBlocks = 0;
  static constexpr u32 kMaxThreads = kMostPushThreads;  // the first kBulkWarps warps move rows, all route them
  u8* ring;
  u64* full;
  u32 taken, loaded, next;  // pieces this warp has stored and asked for so far; the next one of its chunk

  static __device__ __forceinline__ void begin(u8* shared) {
    u64* full = reinterpret_cast<u64*>(shared);
    if (threadIdx.x < kBulkWarps * kPushStages) barrier_init(full + threadIdx.x, 1);
    barrier_fence_init();
    __syncthreads();
  }
  __device__ __forceinline__ void attach(u8* shared) {
    const u32 warp = threadIdx.x / 32;
    full = reinterpret_cast<u64*>(shared) + warp * kPushStages;
    ring = shared + kBulkBarrierBytes + warp * kPushStages * kPushPiece;
    taken = loaded = 0;
  }
  static __device__ __forceinline__ bool moves() { return threadIdx.x % 32 == 0 && threadIdx.x < kBulkWarps * 32; }
  static __device__ __forceinline__ u32 pieces(const DispatchArgs& a) { return (a.row_bytes + kPushPiece - 1) / kPushPiece; }
  static __device__ __forceinline__ u32 piece_bytes(const DispatchArgs& a) { return ((a.row_bytes + pieces(a) - 1) / pieces(a) + 15) / 16 * 16; }

  // The first pieces are on their way while the rows are still being routed.
  __device__ __forceinline__ void prefetch(const DispatchArgs& a, const Chunk& c) {
    next = threadIdx.x / 32;
    if (moves())
      while (loaded < taken + kPushStages - 1 && next < c.rows * pieces(a)) load(a, c);
  }
  __device__ __forceinline__ void load(const DispatchArgs& a, const Chunk& c) {
    const u32 i = next / pieces(a), p = next % pieces(a), stage = loaded % kPushStages, bytes = piece_bytes(a);
    const u32 size = min(bytes, a.row_bytes - p * bytes);
    barrier_expect(full + stage, size);
    bulk_load(ring + stage * kPushPiece, a.x + u64(a.exchange.token_of(c.row(i))) * a.row_bytes + p * bytes, size, full + stage);
    ++loaded;
    next += kBulkWarps;
  }
  __device__ __forceinline__ void prepare(const DispatchArgs&, const Chunk&) {}
  // A block must not end while pieces are on their way to it.
  __device__ __forceinline__ void abandon() {
    if (moves())
      for (; taken < loaded; ++taken) barrier_wait(full + taken % kPushStages, taken / kPushStages & 1);
  }
  __device__ __forceinline__ void push(const DispatchArgs& a, const Chunk& c, const ChunkTargets& t) {
    if (moves()) push_pieces(a, c, t);
    if (a.x_scales) RawRows::push_scales(a, c, t);
  }
  __device__ void push_pieces(const DispatchArgs& a, const Chunk& c, const ChunkTargets& t) {
    const Domain& d = a.domain;
    const ep::ChannelLayout& l = a.exchange.at;
    const u32 per_row = pieces(a), bytes = piece_bytes(a), total = c.rows * per_row;
    for (u32 item = threadIdx.x / 32; item < total; item += kBulkWarps, ++taken) {
      const u32 i = item / per_row, p = item % per_row, stage = taken % kPushStages;
      barrier_wait(full + stage, taken / kPushStages & 1);
      const u32 size = min(bytes, a.row_bytes - p * bytes);
      const u64 offset = l.rows + (u64(d.me) * l.source_rows + c.row(i)) * a.row_bytes + p * bytes;
      t.mask[i].each([&](u32 g) { bulk_store(d.region(g) + offset, ring + stage * kPushPiece, size); });
      bulk_commit();
      if (next < total) {
        bulk_wait_read<1>();  // the stage that is loaded next was stored one piece ago
        load(a, c);
      }
    }
    bulk_wait_done();
  }
};

// What a source says of its whole dispatch: global scale, layer, tokens.
__device__ __forceinline__ u64 make_head(const DispatchArgs& a) {
  return u64(__float_as_uint(a.global_scale)) << 32 | u64(a.layer) << 18 | a.tokens;
}
__device__ __forceinline__ u32 head_tokens(u64 head) { return u32(head) & 0x3ffff; }
__device__ __forceinline__ u32 head_layer(u64 head) { return u32(head) >> 18; }

// One word per member: the rows of this chunk that came to it. Fenced, so that whoever reads it has the rows too.
__device__ __forceinline__ void announce(const DispatchArgs& a, const Now& now, const Chunk& c, const ChunkTargets& t, bool head) {
  const Domain& d = a.domain;
  if (threadIdx.x >= now.members) return;
  const u32 g = now.peer;
  u64 bits = 0;
  for (u32 i = 0; i < c.rows; ++i) bits |= u64(t.mask[i].has(g)) << i;
  if (c.index == 0 && head) store_relaxed(reinterpret_cast<TaggedWord*>(d.region(g) + a.exchange.gpu.heads) + d.me, {now.tag, make_head(a)});
  fence_system();
  const u64 at = (u64(d.me) * a.exchange.gpu.chunks + c.index) * sizeof(TaggedWord);
  store_relaxed(reinterpret_cast<TaggedWord*>(d.region(g) + a.exchange.gpu.arrival + at), {now.tag, bits});
}

}  // namespace epc
