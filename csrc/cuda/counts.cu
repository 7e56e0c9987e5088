// Rows per slot where no kernel of an exchange counts them: an engine that wants to know asks once more, in stream order.
// What is counted is what the ids say now, so that an expert kernel finds both in agreement, in torn steps too.
#include "kernels.h"

namespace epc {

namespace {

constexpr u32 kThreads = 1024;
constexpr u32 kSlots = 4096;          // that a block counts at once
constexpr u64 kAlone = 16384;         // entries that one block counts, with no need of zeros before it
constexpr u64 kEntries = 8192;        // of a block among several

__device__ __forceinline__ void note(u32* counts, u32 first, u32 n, int id) {
  const u32 slot = u32(id) - first;  // -1 is beyond all of them
  if (slot < n) atomicAdd(counts + slot, 1u);
}

__global__ void __launch_bounds__(kThreads) count_slots_kernel(const __grid_constant__ SlotCountArgs a) {
  __shared__ u32 counts[kSlots];
  const u64 vectors = a.entries / 4, share = (vectors + gridDim.x - 1) / gridDim.x;
  const u64 begin = blockIdx.x * share, end = begin + share < vectors ? begin + share : vectors;
  for (u32 first = 0; first < a.slots; first += kSlots) {
    const u32 n = a.slots - first < kSlots ? a.slots - first : kSlots;
    for (u32 s = threadIdx.x; s < n; s += blockDim.x) counts[s] = 0;
    __syncthreads();
    for (u64 v = begin + threadIdx.x; v < end; v += blockDim.x) {
      const int4 four = reinterpret_cast<const int4*>(a.ids)[v];
      note(counts, first, n, four.x);
      note(counts, first, n, four.y);
      note(counts, first, n, four.z);
      note(counts, first, n, four.w);
    }
    const u64 last = vectors * 4 + threadIdx.x;
    if (blockIdx.x == 0 && last < a.entries) note(counts, first, n, a.ids[last]);
    __syncthreads();
    for (u32 s = threadIdx.x; s < n; s += blockDim.x) {
      if (gridDim.x == 1)
        a.counts[first + s] = int(counts[s]);
      else if (counts[s])
        atomicAdd(a.counts + first + s, int(counts[s]));
    }
    __syncthreads();
  }
}

}  // namespace

cudaError_t load_count_slots() { return load(count_slots_kernel); }

cudaError_t launch_count_slots(const SlotCountArgs& a, u32 grid, cudaStream_t stream) {
  const u64 wanted = a.entries <= kAlone ? 1 : (a.entries + kEntries - 1) / kEntries;
  const u32 blocks = wanted < grid ? u32(wanted) : grid;
  if (blocks > 1)
    if (const cudaError_t bad = cudaMemsetAsync(a.counts, 0, u64(a.slots) * sizeof(int), stream); bad != cudaSuccess) return bad;
  return launch(count_slots_kernel, a, Shape{blocks, kThreads, 0, false}, stream);
}

}  // namespace epc
