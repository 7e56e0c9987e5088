// Small batches in the expert kernel's layout, in one kernel each way. Dispatch: every block pushes its chunks, waits for
// all of everyone's, finds the places of its own chunks' rows from the tails by itself, and copies them. Combine: every
// block sums its units' outputs for the others, says so, and pulls its own tokens. No block waits for another of its grid.
#include "expand.cuh"
#include "pull.cuh"
#include "send.cuh"

namespace epc {

namespace {

constexpr u32 kFusedThreads = 1024;

struct Places {
  u32 offsets[kFusedSlots + 1];
  int counts[kFusedSlots];
};
struct FusedShared {
  SendShared send;
  Places places;
};
static_assert(sizeof(SendShared::map) >= kFusedCells * 8, "the words of all chunks lie where the map was");

// How the rows of all sources are numbered: `width` choices each, one where every copy has a row of its own.
struct Table {
  u32 rows, width, entries;
  __host__ __device__ __forceinline__ Table(const Domain& d, const Exchange& x)
      : rows(u32(x.at.source_rows)), width(x.rows_per_token > 1 ? 1 : d.topk), entries(d.ranks * rows * width) {}
  // Bytes of the slots of all entries, in whole words of 16, as place_of reads them.
  __host__ __device__ __forceinline__ u32 slot_bytes() const { return (entries + 7) / 8 * 16; }
  // Rows of a chunk, at most.
  __host__ __device__ __forceinline__ u32 per_chunk(const Exchange& x) const { return (rows + x.gpu.chunks - 1) / x.gpu.chunks; }
  // Which of a row's K choices entry `e` is.
  __device__ __forceinline__ u32 choice(const Domain& d, u32 e) const { return width == 1 ? e % rows % d.topk : e % width; }
};

// All words of all sources, in bits[source * chunks + chunk]. False: torn.
__device__ __forceinline__ bool await_all(const DispatchArgs& a, const Now& now, u64* bits) {
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  const u8* own = d.region(d.me);
  bool ok = true;
  for (u32 item = threadIdx.x; item < d.ranks * x.gpu.chunks && ok; item += blockDim.x) {
    const u32 source = item / x.gpu.chunks, chunk = item % x.gpu.chunks;
    const bool speaks = blockIdx.x == 0 && chunk == 0;
    TaggedWord got{}, head{};
    if (d.state->has(source)) {
      auto cell = reinterpret_cast<const TaggedWord*>(own + x.gpu.arrival) + item;
      ok = wait_for(d, cell, now.tag, source, kPhaseDispatch, x.index, &got, [&] {
        if (speaks) head = load_relaxed(head_of(a, source));
      });
      if (ok && speaks) ok = note_head(a, now, source, head);
    } else if (speaks) {
      write_arrival(a, source, 0, 0, 0.f);
    }
    bits[item] = got.word;
  }
  return !__syncthreads_or(!ok);
}

// The slot of every entry, in ids, and how many each slot has.
__device__ __forceinline__ void read_table(const DispatchArgs& a, const Table& t, const u64* bits, u16* ids, int* counts, bool count) {
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  const u8* own = d.region(d.me);
  for (u32 s = threadIdx.x; s < d.slots; s += blockDim.x) counts[s] = 0;
  __syncthreads();
  constexpr u32 kFlight = 4;  // tails asked for at once
  for (u32 first = threadIdx.x; first < t.entries; first += blockDim.x * kFlight) {
    const TaggedWord* at[kFlight];
    u32 word[kFlight];
#pragma unroll
    for (u32 u = 0; u < kFlight; ++u) {
      const u32 e = first + u * blockDim.x, row = e / t.width, source = row / t.rows, r = row % t.rows;
      const bool here = e < t.entries && bits[source * x.gpu.chunks + r % x.gpu.chunks] >> (r / x.gpu.chunks) & 1;
      at[u] = here ? reinterpret_cast<const TaggedWord*>(own + x.gpu.tails) + u64(row) * d.topk + t.choice(d, e) : nullptr;
    }
#pragma unroll
    for (u32 u = 0; u < kFlight; ++u) word[u] = at[u] ? load_relaxed(reinterpret_cast<const u32*>(&at[u]->word)) : kNobody;
#pragma unroll
    for (u32 u = 0; u < kFlight; ++u) {
      const u32 e = first + u * blockDim.x;
      if (e >= t.entries) break;
      ids[e] = word[u] < d.slots ? u16(word[u]) : kNoSlot;
      if (count && word[u] < d.slots) atomicAdd(counts + word[u], 1);
    }
  }
  for (u32 e = t.entries + threadIdx.x; e < (t.entries + 7) / 8 * 8; e += blockDim.x) ids[e] = kNoSlot;
  __syncthreads();
}

// A share of every source's rows: their places and copies, ids and weights. Of each source another chunk, so that few rows
// spread over all blocks.
__device__ __forceinline__ void expand_chunk(const FusedArgs& p, const Table& t, u32 share, const u64* bits, const u16* ids, const u32* offsets,
                                             int* places) {
  const DispatchArgs& a = p.dispatch;
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  u8* own = d.region(d.me);
  const u32 lane = threadIdx.x % 32, warps = blockDim.x / 32, k = d.topk;
  const u32 chunks = x.gpu.chunks, per = t.per_chunk(x), n = d.ranks * per;
  // kNobody: there is no such row.
  auto row_of = [&](u32 i) {
    const u32 source = i / per, r = (share + source * chunks / d.ranks) % chunks + i % per * chunks;
    return r < t.rows ? source * t.rows + r : kNobody;
  };
  for (u32 item = threadIdx.x / 32; item < n * t.width; item += warps) {
    const u32 row = row_of(item / t.width), e = row * t.width + item % t.width;
    int to = -1;
    if (row != kNobody && ids[e] != kNoSlot) to = row_place(x, ids[e], int(place_of(ids, e)), offsets);
    if (lane == 0) places[item] = to;
  }
  __syncthreads();
  const u32 parts = (p.expand.row_bytes / 16 + kPartVectors - 1) / kPartVectors;
  for (u32 item = threadIdx.x / 32; item < n * parts; item += warps) {
    const u32 i = item / parts, row = row_of(i);
    if (row == kNobody) continue;
    const u32 only = row % t.rows % k;  // where every copy has a row of its own
    const bool mine = t.width == 1 ? lane == only : lane < k;
    const int to = mine ? places[t.width == 1 ? i : i * k + lane] : -1;
    if (lane < k && item % parts == 0) reinterpret_cast<int*>(own + x.at.expanded_of)[u64(row) * k + lane] = to;
    if (!__any_sync(~0u, to >= 0)) continue;
    Part moved;
    moved.load(p.expand, own + x.at.rows + u64(row) * p.expand.row_bytes, item % parts);
    moved.store(p.expand, own + x.at.scales + u64(row) * p.expand.scale_bytes, to, item % parts);
  }
  for (u32 item = threadIdx.x; item < n * k; item += blockDim.x) {
    const u32 row = row_of(item / k);
    if (row == kNobody) continue;
    const u64 at = u64(row) * k + item % k;
    const bool here = bits[row / t.rows * x.gpu.chunks + row % t.rows % x.gpu.chunks] >> (row % t.rows / x.gpu.chunks) & 1;
    note_tail(a, at, here, here ? load_relaxed(reinterpret_cast<const TaggedWord*>(own + x.gpu.tails) + at) : TaggedWord{});
  }
  __syncthreads();
}

template <class Payload>
__global__ void __launch_bounds__(Payload::kMaxThreads, Payload::kMinBlocks) fused_dispatch_kernel(const __grid_constant__ FusedArgs p) {
  extern __shared__ __align__(128) u8 shared[];
  __shared__ FusedShared s;
  const DispatchArgs& a = p.dispatch;
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  // A warp's share of the labels: the last warps have the fewest rows to move.
  auto worker = [] { return (blockIdx.x + 1) * (blockDim.x / 32) - 1 - threadIdx.x / 32; };
  auto workers = [] { return gridDim.x * (blockDim.x / 32); };
  Now now;
  if (!send_rows<Payload>(a, nullptr, s.send, now)) return spoil_rows(p.expand, worker(), workers());
  let_next_kernel_start();
  __syncthreads();
  const Table t(d, x);
  u64* bits = reinterpret_cast<u64*>(s.send.map);
  u16* ids = reinterpret_cast<u16*>(shared);
  int* places = reinterpret_cast<int*>(shared + t.slot_bytes());
  if (!await_all(a, now, bits)) return spoil_rows(p.expand, worker(), workers());
  // A masked block has its place whatever the others have: only one thread block needs the counts.
  const bool contiguous = x.layout == EP_LAYOUT_CONTIGUOUS, counts = contiguous || blockIdx.x == 0;
  read_table(a, t, bits, ids, s.places.counts, counts);
  if (contiguous)
    run_offsets(d, x, s.places.counts, s.places.offsets);
  else
    for (u32 i = threadIdx.x; i <= d.slots; i += blockDim.x) s.places.offsets[i] = i * x.masked_room;
  if (counts && !runs_fit(p.expand, s.places.counts, s.places.offsets, blockIdx.x == 0)) return;
  if (!counts) __syncthreads();
  for (u32 i = threadIdx.x; blockIdx.x == 0 && i <= d.slots; i += blockDim.x) {
    if (i < d.slots) slot_counts(d, x)[i] = s.places.counts[i];
    if (contiguous) reinterpret_cast<int*>(d.region(d.me) + x.at.slot_offsets)[i] = int(s.places.offsets[i]);
  }
  if (contiguous) label_rows(p.expand, s.places.counts, s.places.offsets, worker(), workers());
  for (u32 chunk = blockIdx.x; chunk < x.gpu.chunks; chunk += gridDim.x)
    expand_chunk(p, t, chunk, bits, ids, s.places.offsets, places);
}

// What a unit sums for one token: the outputs here, in top-k order.
struct Sum {
  u32 count, token;
  const u8* row[EP_MAX_TOPK];
  float weight[EP_MAX_TOPK];
};

// Rows that are summed here, in shared memory: those of other homes, and behind all of theirs the own ones.
struct SumShared {
  NowShared now;
  Owed owed;
  u32 others, own;
};

// Notes what a unit sums, from the ids and places of its tokens. Rows of tokens that are there lie close together: in
// small batches most are not.
__device__ __forceinline__ void list_sums(const FusedCombineArgs& p, u32 unit, Sum* sums, SumShared& s) {
  const Domain& d = p.combine.domain;
  const Exchange& x = p.combine.exchange;
  const u8* own = d.region(d.me);
  const u32 lane = threadIdx.x % 32, chunk = unit / x.gpu.sum_parts, stride = x.gpu.sum_chunks;
  const u32 per = (x.cap - chunk + stride - 1) / stride, n = d.ranks * per, behind = n - per;
  if (threadIdx.x == 0) s.others = s.own = 0;
  __syncthreads();
  for (u32 i = threadIdx.x / 32; i < n; i += blockDim.x / 32) {
    const u32 source = (d.me + 1 + i / per) % d.ranks, token = source * x.cap + chunk + i % per * stride;
    const TokenOutputs t = outputs_of(p.expand, token);
    const bool owed = t.place >= 0 && d.state->has(source);
    const u32 have = __ballot_sync(~0u, owed);
    if (!have) continue;
    u32 to = 0;
    if (lane == 0) to = source == d.me ? behind + atomicAdd(&s.own, 1u) : atomicAdd(&s.others, 1u);
    to = __shfl_sync(~0u, to, 0);
    if (owed) {
      const u32 at = __popc(have & ((1u << lane) - 1));
      sums[to].row[at] = own + x.at.y + u64(t.place) * x.at.y_row_bytes;
      sums[to].weight[at] = t.weight;
    }
    if (lane == 0) sums[to].count = __popc(have), sums[to].token = token;
  }
}

// Sums `rows` of them, this unit's part.
template <class Element>
__device__ __forceinline__ void sum_rows(const FusedCombineArgs& p, u32 unit, const Sum* sums, u32 rows) {
  const Exchange& x = p.combine.exchange;
  u8* own = p.combine.domain.region(p.combine.domain.me);
  constexpr u32 kE = Element::kElements, kFlight = 8;  // rows asked for at once
  const u32 part = unit % x.gpu.sum_parts, vectors = u32(x.at.y_row_bytes / 16);
  const u32 begin = vectors * part / x.gpu.sum_parts, width = vectors * (part + 1) / x.gpu.sum_parts - begin;
  for (u32 item = threadIdx.x; item < rows * width; item += blockDim.x) {
    const Sum& s = sums[item / width];
    const u32 v = begin + item % width;
    float acc[kE] = {};
    for (u32 j = 0; j < s.count; j += kFlight) {
      int4 raw[kFlight];
#pragma unroll
      for (u32 u = 0; u < kFlight; ++u) raw[u] = j + u < s.count ? load_stream(s.row[j + u] + v * 16) : make_int4(0, 0, 0, 0);
#pragma unroll
      for (u32 u = 0; u < kFlight; ++u)
        if (j + u < s.count) Element::add(raw[u], s.weight[j + u], acc);
    }
    store_sums<kE>(own + x.at.y_reduced + u64(s.token) * x.at.y_row_bytes, v * kE, acc, x.combine_dtype);
  }
}

// Sums a unit: first for the others, who are told, then for this rank's own tokens while the words travel. False: torn.
template <class Element>
__device__ __forceinline__ bool sum_unit(const FusedCombineArgs& p, const Now& now, u32 unit, Sum* sums, SumShared& s) {
  const Domain& d = p.combine.domain;
  const Exchange& x = p.combine.exchange;
  list_sums(p, unit, sums, s);
  if (__syncthreads_or(now.torn)) return false;
  sum_rows<Element>(p, unit, sums, s.others);
  __syncthreads();
  if (threadIdx.x < now.members) {
    fence_system();
    const u32 units = x.gpu.sum_chunks * x.gpu.sum_parts;
    store_relaxed(reinterpret_cast<u64*>(d.region(now.peer) + x.gpu.reduced) + u64(d.me) * units + unit, now.tag);
  }
  const u32 chunk = unit / x.gpu.sum_parts, per = (x.cap - chunk + x.gpu.sum_chunks - 1) / x.gpu.sum_chunks;
  sum_rows<Element>(p, unit, sums + (d.ranks - 1) * per, s.own);
  __syncthreads();
  return true;
}

// Pulls one part of the own tokens of a chunk. False: torn.
template <class Element>
__device__ __forceinline__ bool pull_unit(const CombineArgs& a, const Now& now, u32 unit, Owed& owed) {
  const Domain& d = a.domain;
  const Exchange& x = a.exchange;
  const u32 chunk = unit / x.gpu.sum_parts, part = unit % x.gpu.sum_parts, stride = x.gpu.sum_chunks, units = stride * x.gpu.sum_parts;
  bool waited = false;
  for (u32 first = chunk; first < a.tokens || !waited; first += kBatch * stride) {
    const u32 n = first < a.tokens ? min(kBatch, (a.tokens - first + stride - 1) / stride) : 0;
    list_owed(a, first, n, stride, owed);
    bool ok = true;
    if (!waited && threadIdx.x < now.members && now.peer != d.me) {
      u64 got;
      auto flag = reinterpret_cast<const u64*>(d.region(d.me) + x.gpu.reduced) + u64(now.peer) * units + unit;
      ok = wait_for(d, flag, now.tag, now.peer, kPhaseCombine, x.index, &got);
    }
    if (__syncthreads_or(!ok)) return false;
    waited = true;
    PullRows<Element>().pull(a, first, n, stride, part, owed);
    __syncthreads();
  }
  return true;
}

template <class Element>
__global__ void __launch_bounds__(kFusedThreads, 1) fused_combine_kernel(const __grid_constant__ FusedCombineArgs p) {
  extern __shared__ __align__(128) u8 shared[];
  __shared__ SumShared s;
  const CombineArgs& a = p.combine;
  const Exchange& x = a.exchange;
  NowReader reader(a.domain, x);  // as in combine_kernel
  wait_for_previous_kernel();
  reader.look(a.domain);
  reader.number(x, s.now);
  const Now& now = reader.now;
  count_exchange(a, now);
  const u32 units = x.gpu.sum_chunks * x.gpu.sum_parts;
  Sum* sums = reinterpret_cast<Sum*>(shared);
  for (u32 unit = blockIdx.x; unit < units; unit += gridDim.x)
    if (!sum_unit<Element>(p, now, unit, sums, s)) return;
  announce_summed(a, now, gridDim.x);
  for (u32 unit = blockIdx.x; unit < units; unit += gridDim.x)
    if (!pull_unit<Element>(a, now, unit, s.owed)) return;
  let_next_kernel_start();
}

u32 dispatch_shared(const FusedArgs& p) {
  const Exchange& x = p.dispatch.exchange;
  const Table t(p.dispatch.domain, x);
  return t.slot_bytes() + p.dispatch.domain.ranks * t.per_chunk(x) * t.width * 4;  // and the places of a chunk's entries
}
u32 combine_shared(const FusedCombineArgs& p) {
  const Exchange& x = p.combine.exchange;
  return p.combine.domain.ranks * ((x.cap + x.gpu.sum_chunks - 1) / x.gpu.sum_chunks) * u32(sizeof(Sum));
}

constexpr u32 kDispatchShared = kFusedEntries * 2 + kFusedEntries * 4, kCombineShared = 160 * 1024;

template <class Payload>
cudaError_t start(const FusedArgs& a, Shape shape, cudaStream_t stream) {
  shape.shared = dispatch_shared(a);
  return launch(fused_dispatch_kernel<Payload>, a, shape, stream);
}

}  // namespace

cudaError_t load_fused() {
  return first_of({load(fused_dispatch_kernel<RawRows>, kDispatchShared), load(fused_dispatch_kernel<QuantisedRows<float, false>>, kDispatchShared),
                   load(fused_dispatch_kernel<QuantisedRows<__half, false>>, kDispatchShared),
                   load(fused_dispatch_kernel<QuantisedRows<__nv_bfloat16, false>>, kDispatchShared), load(fused_combine_kernel<Fp32>, kCombineShared),
                   load(fused_combine_kernel<Fp16>, kCombineShared), load(fused_combine_kernel<Bf16>, kCombineShared)});
}

cudaError_t launch_fused_dispatch(const FusedArgs& a, Payload payload, const Shape& shape, cudaStream_t stream) {
  switch (payload) {
    case Payload::kFromFp32: return start<QuantisedRows<float, false>>(a, shape, stream);
    case Payload::kFromFp16: return start<QuantisedRows<__half, false>>(a, shape, stream);
    case Payload::kFromBf16: return start<QuantisedRows<__nv_bfloat16, false>>(a, shape, stream);
    default: return start<RawRows>(a, shape, stream);
  }
}

cudaError_t launch_fused_combine(const FusedCombineArgs& a, const Shape& shape, cudaStream_t stream) {
  Shape s = shape;
  s.shared = combine_shared(a);
  switch (a.combine.exchange.combine_dtype) {
    case EP_FP32: return launch(fused_combine_kernel<Fp32>, a, s, stream);
    case EP_FP16: return launch(fused_combine_kernel<Fp16>, a, s, stream);
    case EP_BF16: return launch(fused_combine_kernel<Bf16>, a, s, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace epc
