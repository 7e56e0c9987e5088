// How a step ends: the check that makes it complete, and tearing it on the engine's word (design: protocol, section 3).
#include "kernels.h"
#include "wait.cuh"

namespace epc {

namespace {

constexpr u32 kEndThreads = 1024;

// The last act of a step: it counts only if nothing was torn and nobody has left it.
__global__ void __launch_bounds__(kEndThreads) step_end_kernel(const __grid_constant__ Domain d, u32* complete_flag) {
  wait_for_previous_kernel();
  State* s = d.state;
  __shared__ u32 left;  // the first rank that has left this step
  if (threadIdx.x == 0) left = kNobody;
  __syncthreads();
  const bool torn = load_relaxed(&s->torn) != 0;
  bool whole = !torn;
  fence_system();
  if (threadIdx.x < EP_MAX_CHANNELS) whole = whole && s->opened[threadIdx.x] == s->sequence[threadIdx.x];
  if (threadIdx.x < d.ranks && threadIdx.x != d.me) {
    const u8* leave = d.region(d.me) + d.leave + threadIdx.x * sizeof(ep::Flag);
    if (ep::leave_step(load_relaxed(reinterpret_cast<const u64*>(leave))) >= s->step) {
      whole = false;
      atomicMin(&left, threadIdx.x);
    }
  }
  const bool complete = __syncthreads_and(whole);
  if (complete && d.count_loads) {
    u64* loads = reinterpret_cast<u64*>(d.region(d.me) + d.loads);
    for (u32 i = threadIdx.x; i < d.layers * d.experts; i += blockDim.x)
      if (d.pending[i]) loads[i] += d.pending[i];
  }
  if (threadIdx.x) return;
  // No wait of ours met it, so nobody has said so yet: a peer may be waiting for the exchange that was left open here.
  if (!torn && !complete) {
    if (left != kNobody) tear(d, kPhaseNone, 0, why_without(d, left, EPC_WHY_PEER_LEFT), left);
    else tear(d, kPhaseNone, 0, EPC_WHY_ENGINE, d.me);
  }
  *complete_flag = complete;
  d.record->info.complete = complete;
  d.record->info.ended = 1;
  volatile u64* counter = reinterpret_cast<volatile u64*>(complete ? &d.header->complete_steps : &d.header->torn_steps);
  *counter = *counter + 1;
  *reinterpret_cast<volatile u64*>(&d.header->progress) = wall_ns();
  // A step without exchanges is no work: it only settles the last one.
  bool exchanged = false;
  for (u32 c = 0; c < EP_MAX_CHANNELS; ++c) exchanged |= s->opened[c] != 0;
  if (complete && d.agreed && exchanged) ++s->done;
  s->torn = 1;  // until the next barrier
  store_relaxed(&d.record->at, wall_ns());
  fence_system();
  store_relaxed(&d.record->ended, ++s->ended);
}

__global__ void tear_kernel(const __grid_constant__ Domain d) {
  wait_for_previous_kernel();
  if (load_relaxed(&d.state->torn) == 0) tear(d, kPhaseNone, 0, EPC_WHY_ENGINE, d.me);
}

}  // namespace

cudaError_t load_step_end() { return first_of({load(step_end_kernel), load(tear_kernel)}); }

cudaError_t launch_step_end(const Domain& d, u32* complete_flag, cudaStream_t stream) {
  return launch_block(step_end_kernel, kEndThreads, stream, d, complete_flag);
}
cudaError_t launch_tear(const Domain& d, cudaStream_t stream) { return launch_block(tear_kernel, 1, stream, d); }

}  // namespace epc
