// Placing rows in the expert kernel's layout and summing its outputs, one warp's share at a time.
#pragma once
#include "kernels.h"
#include "routing.cuh"
#include "rows.cuh"

namespace epc {

constexpr u32 kPartVectors = 128;  // 16-byte words of a row that a warp moves at once
constexpr u32 kReduceVectors = 64;
constexpr u32 kPerThread = 8;    // entries that a thread looks at in one round
constexpr u16 kNoSlot = 0xffff;
constexpr u32 kAlignment = 128;  // rows; runs of the contiguous layout are padded to it

__device__ __forceinline__ u64 total_rows(const Domain& d, const Exchange& x) { return u64(d.ranks) * x.at.source_rows; }

// Entries before `e` with the same slot; a warp.
__device__ __forceinline__ u32 place_of(const u16* ids, u32 e) {
  const u32 lane = threadIdx.x % 32, both = u32(ids[e]) * 0x10001u;
  u32 n = 0;
  for (u32 group = lane; group * 8 < e; group += 32) {
    const uint4 words = *reinterpret_cast<const uint4*>(ids + group * 8);
    const u32 left = e - group * 8;
    u32 hits = (__vcmpeq2(words.x, both) & 0x00010001u) | (__vcmpeq2(words.y, both) & 0x00010001u) << 1 |
               (__vcmpeq2(words.z, both) & 0x00010001u) << 2 | (__vcmpeq2(words.w, both) & 0x00010001u) << 3;
    // Bit i of a half: entry 2 * i (low half) or 2 * i + 1.
    if (left < 8) hits &= ((1u << (left + 1) / 2) - 1) | ((1u << left / 2) - 1) << 16;
    n += __popc(hits);
  }
  return __reduce_add_sync(~0u, n);
}

// Where each run begins, and the end of the last, for every block anew: at most some hundred numbers.
inline u32 run_offsets_bytes(const Domain& d, const Exchange& x) { return (runs_of(d, x) + 1) * 4; }
__device__ inline void run_offsets(const Domain& d, const Exchange& x, const int* counts, u32* offsets) {
  const u32 runs = runs_of(d, x);
  if (threadIdx.x < 32) {
    u32 base = 0;
    for (u32 first = 0; first < runs; first += 32) {
      const u32 run = first + threadIdx.x;
      u32 n = run < runs ? u32(counts[run]) : 0;
      if (x.layout == EP_LAYOUT_CONTIGUOUS) n = (n + kAlignment - 1) / kAlignment * kAlignment;
      if (x.layout == EP_LAYOUT_MASKED) n = run < runs ? x.masked_room : 0;
      u32 sum = n;
      for (u32 step = 1; step < 32; step *= 2) {
        const u32 left = __shfl_up_sync(~0u, sum, step);
        if (threadIdx.x >= step) sum += left;
      }
      if (run < runs) offsets[run] = base + sum - n;
      base += __shfl_sync(~0u, sum, 31);
    }
    if (threadIdx.x == 0) offsets[runs] = base;
  }
  __syncthreads();
}
__device__ inline int* slot_counts(const Domain& d, const Exchange& x) { return reinterpret_cast<int*>(d.region(d.me) + x.at.slot_counts); }

// Counts that an expert kernel may trust: in a step that is torn for want of room those of an earlier exchange stay.
__device__ inline void publish_counts(const ExpandArgs& a) {
  for (u32 run = threadIdx.x; run < runs_of(a.domain, a.exchange); run += blockDim.x)
    slot_counts(a.domain, a.exchange)[run] = a.totals[run];
}

// Whether every run has room. If not, one block tears the step for all: no row is ever dropped.
__device__ inline bool runs_fit(const ExpandArgs& a, const int* counts, const u32* offsets, bool speaks) {
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  if (x.layout == EP_LAYOUT_ARRIVAL) return true;
  const bool masked = x.layout == EP_LAYOUT_MASKED;
  const u32 rows = u32(x.at.expanded_rows);
  bool fits = true;
  for (u32 s = threadIdx.x; s < d.slots; s += blockDim.x) {
    // Contiguous: the first run that does not fit; those behind it are beyond the end whatever they hold.
    const bool full = masked ? u32(counts[s]) > x.masked_room : offsets[s] <= rows && offsets[s + 1] > rows;
    fits = fits && !full;
    if (full && speaks)
      tear(d, kPhaseDispatch, x.index, EPC_WHY_ROOM, d.me, a.layer, 0, s, u32(counts[s]), masked ? x.masked_room : rows - offsets[s]);
  }
  return !__syncthreads_or(!fits);
}

// Four UE8M0 bytes; missing ones at the end of a row are zero.
__device__ __forceinline__ u32 packed_scales(u32 dtype, const u8* from, u32 first, u32 blocks) {
  u32 word = 0;
  for (u32 i = 0; i < 4 && first + i < blocks; ++i) {
    const u32 power = dtype == EP_MXFP8 ? from[first + i] : reinterpret_cast<const u32*>(from)[first + i] >> 23 & 0xff;
    word |= power << (8 * i);
  }
  return word;
}

// A warp writes the scales of one row of the layout; from null: zeros.
static __device__ __noinline__ void put_scales(const ExpandArgs& a, u64 place, const u8* from) {
  const Exchange& x = a.exchange;
  u8* to = a.domain.region(a.domain.me) + x.at.expanded_scales;
  const u32 lane = threadIdx.x % 32;
  if (!x.at.scale_lead) {
    for (u32 s = lane; s < a.scale_bytes; s += 32) to[place * a.scale_bytes + s] = from ? from[s] : 0;
    return;
  }
  u32* words = reinterpret_cast<u32*>(to) + place;
  if (x.at.room) words += place / x.at.room * (x.at.scale_columns * x.at.scale_lead - x.at.room);
  const u32 block = x.dispatch_dtype == EP_MXFP8 ? 32 : 128, blocks = a.domain.hidden / block;
  for (u32 c = lane; c < x.at.scale_columns; c += 32) {
    const u32 packed = x.scale_layout == EP_SCALES_PACKED;
    words[c * x.at.scale_lead] = !from ? 0 : packed ? packed_scales(x.dispatch_dtype, from, c * 4, blocks) : reinterpret_cast<const u32*>(from)[c];
  }
}

// Where the row of this lane's choice goes, by its place inside its run; -1: nowhere.
__device__ __forceinline__ int row_place(const Exchange& x, int id, int place, const u32* offsets) {
  if (id < 0 || (x.layout == EP_LAYOUT_MASKED && u32(place) >= x.masked_room)) return -1;
  const int to = int(offsets[id]) + place;
  return to < int(x.at.expanded_rows) ? to : -1;
}

// One part of a row in a warp's registers.
struct Part {
  int4 value[kPartVectors / 32];

  __device__ __forceinline__ void load(const ExpandArgs& a, const u8* from, u32 part) {
    const u32 v = part * kPartVectors + threadIdx.x % 32, vectors = a.row_bytes / 16;
#pragma unroll
    for (u32 u = 0; u < kPartVectors / 32; ++u)
      if (v + u * 32 < vectors) value[u] = load_stream(from + (v + u * 32) * 16);
  }
  // To each of the row's places, one per lane; with the first part go the scales.
  __device__ __forceinline__ void store(const ExpandArgs& a, const u8* scales, int to, u32 part) const {
    const u32 v = part * kPartVectors + threadIdx.x % 32, vectors = a.row_bytes / 16;
    u8* rows = a.domain.region(a.domain.me) + a.exchange.at.expanded;
    for (u32 bits = __ballot_sync(~0u, to >= 0); bits; bits &= bits - 1) {
      const u32 place = __shfl_sync(~0u, u32(to), __ffs(bits) - 1);
#pragma unroll
      for (u32 u = 0; u < kPartVectors / 32; ++u)
        if (v + u * 32 < vectors) store_stream(rows + u64(place) * a.row_bytes + (v + u * 32) * 16, value[u]);
    }
    if (!a.scale_bytes || part) return;
    for (u32 bits = __ballot_sync(~0u, to >= 0); bits; bits &= bits - 1) put_scales(a, __shfl_sync(~0u, u32(to), __ffs(bits) - 1), scales);
  }
};

// The same for an arrived row whose places inside the runs are known. own: where this rank's rows lie, see ExpandArgs.
__device__ __forceinline__ void copy_part(const ExpandArgs& a, u64 row, u32 part, const u32* offsets) {
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  u8* own = d.region(d.me);
  const u32 k = d.topk, lane = threadIdx.x % 32;
  const int id = lane < k ? reinterpret_cast<const int*>(own + x.at.recv_ids)[row * k + lane] : -1;
  int to = -1;
  if (x.layout == EP_LAYOUT_ARRIVAL) {
    const u32 have = __ballot_sync(~0u, id >= 0);
    const int place = have ? a.relative[row * k] : -1;
    if (lane == 0) to = place;
    if (lane < k && part == 0) {
      reinterpret_cast<int*>(own + x.at.expanded_of)[row * k + lane] = lane == 0 ? place : -1;
      if (have) {
        a.compact_ids[u64(place) * k + lane] = id;
        a.compact_weights[u64(place) * k + lane] = reinterpret_cast<const float*>(own + x.at.recv_weights)[row * k + lane];
      }
    }
  } else if (lane < k) {
    if (id >= 0) to = row_place(x, id, a.relative[row * k + lane], offsets);
    if (part == 0) reinterpret_cast<int*>(own + x.at.expanded_of)[row * k + lane] = to;
  }
  const u64 mine = row - u64(d.me) * x.at.source_rows;
  const u8* from = a.own && mine < x.at.source_rows ? a.own + mine * a.row_bytes : own + x.at.rows + row * a.row_bytes;
  if (!__any_sync(~0u, to >= 0)) return;
  Part p;
  p.load(a, from, part);
  p.store(a, own + x.at.scales + row * a.scale_bytes, to, part);
}

// Contiguous: the slot of each row, -1 where a run was padded; what pads it is zero. Warp `worker` of `workers`.
__device__ __forceinline__ void label_rows(const ExpandArgs& a, const int* counts, const u32* offsets, u32 worker, u32 workers) {
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  u8* own = d.region(d.me);
  const u32 lane = threadIdx.x % 32, end = offsets[d.slots], vectors = a.row_bytes / 16;
  for (u32 base = worker * 32; base < x.at.expanded_rows; base += workers * 32) {
    const u32 row = base + lane;
    u32 low = 0, high = d.slots;  // the last run that begins at or before `row`; those before it are empty or end there
    while (high - low > 1) {
      const u32 middle = (low + high) / 2;
      (offsets[middle] <= row ? low : high) = middle;
    }
    const bool run = row < end, filled = run && row < offsets[low] + u32(counts[low]);
    bool clear = false;
    if (row < x.at.expanded_rows) {
      reinterpret_cast<int*>(own + x.at.row_slots)[row] = filled ? int(low) : -1;
      clear = run && !filled && a.dirty[row];
      if (filled) a.dirty[row] = 1;
      if (clear) a.dirty[row] = 0;
    }
    for (u32 bits = __ballot_sync(~0u, clear); bits; bits &= bits - 1) {
      const u64 at = base + __ffs(bits) - 1;
      for (u32 v = lane; v < vectors; v += 32) store_stream(own + x.at.expanded + at * a.row_bytes + v * 16, make_int4(0, 0, 0, 0));
      if (a.scale_bytes) put_scales(a, at, nullptr);
    }
  }
}

// For a block that leaves a step which is torn, before it has labelled its share: others may have filled rows of it, which only
// their share's labels would have noted. Rows that pad a run later must not show what they left.
__device__ __noinline__ inline void spoil_rows(const ExpandArgs& a, u32 worker, u32 workers) {
  if (a.exchange.layout != EP_LAYOUT_CONTIGUOUS) return;
  for (u32 row = worker * 32 + threadIdx.x % 32; row < a.exchange.at.expanded_rows; row += workers * 32) a.dirty[row] = 1;
}

// The outputs of a token of any source that this rank owes: row and weight per lane, in top-k order. token: source * cap + index.
struct TokenOutputs {
  int place;     // -1: none
  float weight;
};
__device__ __forceinline__ TokenOutputs outputs_of(const ExpandArgs& a, u32 token) {
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  u8* own = d.region(d.me);
  const u32 lane = threadIdx.x % 32, k = d.topk, per = x.rows_per_token;
  TokenOutputs t{-1, 0.f};
  if (lane >= k) return t;
  const u64 row = u64(token / x.cap) * x.at.source_rows + u64(token % x.cap) * per + (per > 1 ? lane : 0);
  const int id = reinterpret_cast<const int*>(own + x.at.recv_ids)[row * k + lane];
  const int place = reinterpret_cast<const int*>(own + x.at.expanded_of)[row * k + lane];
  const float weight = reinterpret_cast<const float*>(own + x.at.recv_weights)[row * k + lane];
  if (id >= 0) t = {place, weight};
  return t;
}

// A warp's part of the weighted sum of a token's outputs here, in top-k order.
template <class Element>
__device__ __forceinline__ void reduce_part(const ExpandArgs& a, u32 token, u32 begin) {
  const Exchange& x = a.exchange;
  u8* own = a.domain.region(a.domain.me);
  constexpr u32 kE = Element::kElements;
  const u32 lane = threadIdx.x % 32, vectors = u32(x.at.y_row_bytes / 16);
  const TokenOutputs t = outputs_of(a, token);
  const u32 have = __ballot_sync(~0u, t.place >= 0);
  if (!have) return;
  for (u32 v = begin + lane; v < begin + kReduceVectors; v += 32) {
    float acc[kE] = {};
    for (u32 bits = have; bits;) {
      int4 raw[4];
      float w[4];
#pragma unroll
      for (u32 u = 0; u < 4; ++u) {
        w[u] = 0.f;
        raw[u] = make_int4(0, 0, 0, 0);
        if (!bits) continue;
        const u32 from = __ffs(bits) - 1;
        bits &= bits - 1;
        const u32 place = __shfl_sync(~0u, u32(t.place), from);
        w[u] = __shfl_sync(~0u, t.weight, from);
        if (v < vectors) raw[u] = load_stream(own + x.at.y + u64(place) * x.at.y_row_bytes + v * 16);
      }
#pragma unroll
      for (u32 u = 0; u < 4; ++u) Element::add(raw[u], w[u], acc);
    }
    if (v < vectors) store_sums<kE>(own + x.at.y_reduced + u64(token) * x.at.y_row_bytes, v * kE, acc, x.combine_dtype);
  }
}

}  // namespace epc
