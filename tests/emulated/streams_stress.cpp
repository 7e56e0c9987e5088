// Threads that make, use, share and destroy streams and graphs while others wait for them. test_streams.py builds it with the
// sources of csrc/emulated and a sanitiser, which ends it at the first access to what is no more, or at the first race.
#include <cuda_runtime.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

extern "C" {
void* epe_stream_create();
int epe_stream_destroy(void* stream);
int epe_stream_synchronize(void* stream);
int epe_synchronize();
int epe_copy(void* to, const void* from, uint64_t bytes, void* stream);
int epe_pause(uint64_t ns, void* stream);
int epe_call(void (*function)(), void* stream);
int epe_capture_begin(void* stream);
int epe_capture_end(void* stream, void** graph);
int epe_graph_launch(void* graph, void* stream);
void epe_graph_destroy(void* graph);
}

namespace {

constexpr int kUsers = 4, kRounds = 400;
std::atomic<uint64_t> called{0};
std::atomic<void*> shared[kUsers];  // of a user: its present stream, or one that it has destroyed
std::atomic<bool> over{false};

void require(bool holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "streams: %s\n", what);
  abort();
}

void use(int user) {
  cudaStreamCaptureMode relaxed = cudaStreamCaptureModeRelaxed;  // others go on while one captures
  cudaThreadExchangeStreamCaptureMode(&relaxed);
  std::vector<uint64_t> from(32, uint64_t(user)), to(32);
  for (int round = 0; round < kRounds; ++round) {
    void *stream = epe_stream_create(), *graph = nullptr;
    shared[user] = stream;
    require(epe_capture_begin(stream) == 0, "a capture did not begin");
    epe_call([] { ++called; }, stream);
    require(epe_capture_end(stream, &graph) == 0, "a capture did not end");
    epe_copy(to.data(), from.data(), to.size() * sizeof(uint64_t), stream);
    if (round % 3 == 0) epe_pause(20'000, stream);
    require(epe_graph_launch(graph, stream) == 0, "a graph was not launched");
    epe_graph_destroy(graph);
    if (round % 2) require(epe_stream_synchronize(stream) == 0, "a stream cannot be waited for");
    require(epe_stream_destroy(stream) == 0, "a stream was not destroyed");
    // Destroyed, it runs what it has; the memory is in use until then.
    require(epe_synchronize() == 0, "the device cannot be waited for");
    require(to == from, "the device was waited for, and a copy has not run");
  }
}

void wait() {
  cudaStreamCaptureMode relaxed = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&relaxed);
  while (!over) {
    for (auto& stream : shared)
      if (void* s = stream) {
        epe_stream_synchronize(s);
        cudaStreamQuery(static_cast<cudaStream_t>(s));
      }
    epe_synchronize();
  }
}

}  // namespace

int main() {
  std::vector<std::thread> users, waiters;
  for (int i = 0; i < 2; ++i) waiters.emplace_back(wait);
  for (int i = 0; i < kUsers; ++i) users.emplace_back(use, i);
  for (auto& t : users) t.join();
  over = true;
  for (auto& t : waiters) t.join();
  epe_synchronize();
  require(called == uint64_t(kUsers) * kRounds, "an operation did not run once");
  printf("ok\n");
}
