// What tests need of a GPU besides the data plane: streams, copies in their order, graphs. Plain C, for ctypes.
#include <cstring>
#include <thread>

#include "../elasticep.h"
#include "device.h"

namespace {
struct Graph {
  std::shared_ptr<epe::Operations> operations;  // also of the streams that are to run them
};
}  // namespace

extern "C" {

// What returns a number returns a cudaError_t, but for counts.

// Of the blocks that begin from now on.
EP_API void epe_set_seed(uint64_t seed) { epe::settings().seed = seed; }
EP_API int epe_set_device(int device) { return cudaSetDevice(device); }
EP_API void* epe_stream_create() { return epe::new_stream(); }
EP_API int epe_stream_destroy(void* stream) { return epe::end_stream(static_cast<cudaStream_t>(stream)); }
EP_API int epe_stream_synchronize(void* stream) { return cudaStreamSynchronize(static_cast<cudaStream_t>(stream)); }
EP_API int epe_synchronize() { return cudaDeviceSynchronize(); }
// In the order of the stream: a copy, a pause of some nanoseconds.
EP_API int epe_copy(void* to, const void* from, uint64_t bytes, void* stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream));
}
EP_API int epe_pause(uint64_t ns, void* stream) {
  return epe::push(static_cast<cudaStream_t>(stream), [ns] { std::this_thread::sleep_for(std::chrono::nanoseconds(ns)); });
}

// On the current device: blocks from index `from` on of the kernel after the next `skip` ones begin when they are let.
EP_API void epe_hold_blocks(uint32_t skip, uint32_t from) { epe::Device::of(epe::current_device()).hold_blocks(skip, from); }
EP_API void epe_let_blocks_begin() { epe::Device::of(epe::current_device()).let_blocks_begin(); }
EP_API uint32_t epe_held_blocks() { return epe::Device::of(epe::current_device()).held_blocks(); }

// A function of the host in the order of the stream, for what stands for a kernel of the engine.
EP_API int epe_call(void (*function)(), void* stream) { return epe::push(static_cast<cudaStream_t>(stream), function); }
// Copies from pinned memory wait while `shut`; how many do.
EP_API void epe_hold_copies(int shut) { epe::hold_copies(shut != 0); }
EP_API uint32_t epe_held_copies() { return epe::held_copies(); }
// So many of those that are held back, or come next, run.
EP_API void epe_let_copies(uint32_t count) { epe::let_copies(count); }
// Calls of this name after the next `skip` ones fail with this error; 0: they do not any more.
EP_API void epe_fail_call(const char* call, int status, uint32_t skip) { epe::fail_call(call, cudaError_t(status), skip); }
EP_API void epe_set_free_bytes(uint64_t bytes) { epe::settings().free_bytes = bytes; }

EP_API int epe_capture_begin(void* stream) {
  const auto s = epe::stream_of(static_cast<cudaStream_t>(stream));
  return s ? s->begin_capture() : cudaErrorInvalidResourceHandle;
}
EP_API int epe_capture_end(void* stream, void** graph) {
  *graph = nullptr;
  const auto s = epe::stream_of(static_cast<cudaStream_t>(stream));
  if (!s) return cudaErrorInvalidResourceHandle;
  auto g = std::make_unique<Graph>();
  const cudaError_t bad = s->end_capture(&g->operations);
  if (bad == cudaSuccess) *graph = g.release();
  return bad;
}
EP_API int epe_graph_launch(void* graph, void* stream) {
  return epe::push(static_cast<cudaStream_t>(stream), [operations = static_cast<Graph*>(graph)->operations] {
    for (const auto& op : *operations) op();
  });
}
EP_API void epe_graph_destroy(void* graph) { delete static_cast<Graph*>(graph); }

}  // extern "C"
