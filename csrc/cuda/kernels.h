// Launch functions of the kernels, one per file that compiles them.
#pragma once
#include <cuda_runtime.h>

#include <initializer_list>
#include <utility>

#include "device.h"
#include "gpu_layout.h"

namespace epc {

// Threads of a block, at most: of one that pushes rows as they are, of others that push, of one that pulls.
constexpr u32 kMostRawThreads = 768, kMostPushThreads = 512, kMostPullThreads = 1024;
constexpr u32 kBulkWarps = 8;
constexpr u32 kBulkBarrierBytes = 1024;
constexpr u32 kPushStages = 3, kPushPiece = 8192;   // dispatch: pieces of a row in flight per warp
constexpr u32 kPullStages = 8, kPullPiece = 2048;   // combine: a piece is summed in registers
constexpr u32 kPushShared = kBulkBarrierBytes + kBulkWarps * kPushStages * kPushPiece;
constexpr u32 kPullShared = kBulkBarrierBytes + kBulkWarps * kPullStages * kPullPiece;

enum class Payload { kNone, kRaw, kBulk, kFromFp32, kFromFp16, kFromBf16 };

struct Shape {
  u32 grid, threads, shared;
  bool early;  // programmatic dependent launch
};

// The step barrier (barrier.cu).
u64 barrier_scratch_bytes(u32 ranks);
cudaError_t load_barrier();
cudaError_t launch_step_begin(const Domain& d, u32 tokens, u64 ticket, cudaStream_t stream);
// The end of a step, and tearing it (step_end.cu).
cudaError_t load_step_end();
cudaError_t launch_step_end(const Domain& d, u32* complete_flag, cudaStream_t stream);
cudaError_t launch_tear(const Domain& d, cudaStream_t stream);
// Rows to the ranks that need them, and back, summed (dispatch.cu, combine.cu).
cudaError_t load_dispatch();
cudaError_t launch_dispatch(const DispatchArgs& a, Payload payload, const Shape& shape, cudaStream_t stream);
cudaError_t load_combine();
cudaError_t launch_combine(const CombineArgs& a, bool bulk, const Shape& shape, cudaStream_t stream);
// Input that every rank has (replicated.cu).
cudaError_t load_replicated();
cudaError_t launch_replicated(const DispatchArgs& a, u32 grid, bool early, cudaStream_t stream);
// Rows from arrival order into the layout of the expert kernel, or only their places; the outputs' sums per token; fp8 outputs of
// rows that are not summed here; the exact count for the host (expand.cu).
cudaError_t load_expand();
cudaError_t launch_expand(const ExpandArgs& a, u32 grid, cudaStream_t stream);
cudaError_t launch_place(const ExpandArgs& a, u32 grid, cudaStream_t stream);
cudaError_t launch_reduce(const ExpandArgs& a, u32 grid, cudaStream_t stream);
cudaError_t launch_quantise(const ExpandArgs& a, u32 grid, cudaStream_t stream);
cudaError_t launch_count(const CountArgs& a, cudaStream_t stream);
// Rows per slot where no kernel of an exchange counts them (counts.cu).
cudaError_t load_count_slots();
cudaError_t launch_count_slots(const SlotCountArgs& a, u32 grid, cudaStream_t stream);
// Small expanded batches in one kernel each way (fused.cu).
cudaError_t load_fused();
cudaError_t launch_fused_dispatch(const FusedArgs& a, Payload payload, const Shape& shape, cudaStream_t stream);
cudaError_t launch_fused_combine(const FusedCombineArgs& a, const Shape& shape, cudaStream_t stream);
// The same for large batches, with the link busy all the while (overlap.cu).
struct PushArgs {
  DispatchArgs dispatch;
  ExpandArgs expand;
  u32 pushers;
};
struct PullArgs {
  CombineArgs combine;
  ExpandArgs expand;
  u32 pullers;
};
cudaError_t load_overlap();
cudaError_t launch_push_and_expand(const PushArgs& a, const Shape& shape, cudaStream_t stream);
cudaError_t launch_reduce_and_pull(const PullArgs& a, const Shape& shape, cudaStream_t stream);

template <class Args>
cudaError_t launch(void (*kernel)(const Args), const Args& args, const Shape& shape, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.grid);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared;
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = shape.early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args);
}

// One block. The answer is about this launch: the thread's last error may be of somebody else's call.
template <class... Parameters, class... Arguments>
cudaError_t launch_block(void (*kernel)(Parameters...), u32 threads, cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(threads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

// Loads a kernel now: a first launch that loads code could wait for a kernel that waits for its peer.
template <class Kernel>
cudaError_t load(Kernel kernel, u32 shared = 0) {
  cudaFuncAttributes ignored;
  cudaError_t bad = cudaFuncGetAttributes(&ignored, kernel);
  if (bad == cudaSuccess && shared > 48 * 1024)
    bad = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
  return bad;
}

// The first error of several calls.
inline cudaError_t first_of(std::initializer_list<cudaError_t> all) {
  for (cudaError_t e : all)
    if (e != cudaSuccess) return e;
  return cudaSuccess;
}

}  // namespace epc
