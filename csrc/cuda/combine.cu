// Combine: one ready flag per peer, then every home rank reads the rows that its own routing says are owed, where the
// experts wrote them, and sums them in fp32 in ascending order of rank (or top-k). Nothing else is ever read.
#include "pull.cuh"

namespace epc {

namespace {

__device__ __forceinline__ void announce(const CombineArgs& a, const NowReader& reader) {
  if (blockIdx.x || threadIdx.x >= reader.now.members) return;
  const Domain& d = a.domain;
  fence_system();
  const u64 ready = a.exchange.at.ready + d.me * sizeof(ep::Flag);
  store_relaxed(reinterpret_cast<u64*>(d.region(reader.now.peer) + ready), reader.tag(a.exchange));
}

// Everything is summed already: whoever waits for single units of it has them, too.
__device__ __forceinline__ void announce_units(const CombineArgs& a, const Now& now) {
  const Domain& d = a.domain;
  const u32 units = a.exchange.gpu.sum_chunks * a.exchange.gpu.sum_parts;
  if (blockIdx.x || a.half & kReceive) return;
  for (u32 i = threadIdx.x; i < units * now.members; i += blockDim.x) {
    const u32 g = d.state->member[i / units];
    fence_system();
    store_relaxed(reinterpret_cast<u64*>(d.region(g) + a.exchange.gpu.reduced) + u64(d.me) * units + i % units, now.tag);
  }
}

__device__ __forceinline__ bool wait_ready(const CombineArgs& a, const Now& now) {
  const Domain& d = a.domain;
  bool ok = true;
  if (threadIdx.x < now.members) {
    u64 got;
    ok = wait_for(d, reinterpret_cast<const u64*>(d.region(d.me) + a.exchange.at.ready + now.peer * sizeof(ep::Flag)), now.tag, now.peer,
                  kPhaseCombine, a.exchange.index, &got);
  }
  return !__syncthreads_or(!ok);
}

template <class Pull>
__global__ void __launch_bounds__(Pull::kMaxThreads, Pull::kMinBlocks) combine_kernel(const __grid_constant__ CombineArgs a) {
  extern __shared__ __align__(128) u8 shared[];
  __shared__ Owed owed;
  __shared__ NowShared shared_now;
  const Exchange& x = a.exchange;
  Pull rows;
  Pull::begin(shared);
  rows.attach(shared);
  // Step, view and number of this exchange stand since its dispatch began, and that had begun before this kernel could.
  // Only `torn` may still change.
  NowReader reader(a.domain, x, blockIdx.x == 0 && threadIdx.x < a.domain.ranks);
  wait_for_previous_kernel();
  // A step that is torn here has left a cell with everyone: a flag of it does no harm, and a healthy one goes out sooner.
  if (a.half & kSend) announce(a, reader);
  reader.look(a.domain);
  const Now& now = reader.settle(x, shared_now);
  if (a.half & kSend) announce_units(a, now);
  if (a.half & kReceive) count_exchange(a, now);
  if (now.torn) return;
  if (!(a.half & kReceive)) return;
  // Part p of every token: small batches spread one row over several blocks.
  const u32 part = blockIdx.x % a.parts, block = blockIdx.x / a.parts, stride = gridDim.x / a.parts;
  const bool lookup = x.at.expanded_rows && !(x.reduce == EP_REDUCE_PER_RANK && x.layout != EP_LAYOUT_ARRIVAL);
  bool waited = false;
  for (u32 first = block; first < a.tokens || !waited; first += kBatch * stride) {
    const u32 n = first < a.tokens ? min(kBatch, (a.tokens - first + stride - 1) / stride) : 0;
    // Rows that are looked up at the peer wait for its flag; the others are listed while it is on its way.
    if (waited || !lookup) list_owed(a, first, n, stride, owed);
    if (!waited) {
      if (!wait_ready(a, now)) return;
      if constexpr (Pull::kBulk) fence_bulk();
      waited = true;
      if (lookup) list_owed(a, first, n, stride, owed);
    }
    __syncthreads();
    rows.pull(a, first, n, stride, part, owed);
    __syncthreads();
  }
  let_next_kernel_start();
}

template <class Element>
cudaError_t start(const CombineArgs& a, bool bulk, const Shape& shape, cudaStream_t stream) {
  return bulk ? launch(combine_kernel<BulkPull<Element>>, a, shape, stream) : launch(combine_kernel<PullRows<Element>>, a, shape, stream);
}

}  // namespace

cudaError_t load_combine() {
  return first_of({load(combine_kernel<PullRows<Fp32>>), load(combine_kernel<PullRows<Fp16>>), load(combine_kernel<PullRows<Bf16>>),
                   load(combine_kernel<PullRows<Fp8>>),
                   load(combine_kernel<BulkPull<Fp32>>, kPullShared), load(combine_kernel<BulkPull<Fp16>>, kPullShared),
                   load(combine_kernel<BulkPull<Bf16>>, kPullShared)});
}

cudaError_t launch_combine(const CombineArgs& a, bool bulk, const Shape& shape, cudaStream_t stream) {
  switch (a.exchange.combine_dtype) {
    case EP_FP32: return start<Fp32>(a, bulk, shape, stream);
    case EP_FP16: return start<Fp16>(a, bulk, shape, stream);
    case EP_BF16: return start<Bf16>(a, bulk, shape, stream);
    case EP_FP8: return launch(combine_kernel<PullRows<Fp8>>, a, shape, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace epc
