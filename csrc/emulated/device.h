// An emulated GPU of this process: SMs that run thread blocks, each by a thread of the host, and streams that bring them.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace epe {

constexpr uint32_t kThreadsPerSm = 2048, kBlocksPerSm = 4, kSharedPerSm = 228 * 1024;

// Set by environment variables, read once: ELASTICEP_EMULATED_DEVICES, _SMS, _SEED.
struct Settings {
  uint32_t devices, sms;
  std::atomic<uint64_t> seed;  // 0: threads and blocks in order; else in an order that follows from it
  std::atomic<uint64_t> free_bytes{uint64_t(8) << 30};  // what cudaMemGetInfo says
};
Settings& settings();

struct Kernel {
  uint32_t grid, threads;
  size_t shared_bytes;
  void* (*shared)();            // dynamic shared memory of the calling host thread
  std::function<void()> body;
};

class Device {
 public:
  // Runs a kernel to its end. Its blocks wait for room behind those of kernels that came before, as on a GPU.
  void run(const Kernel& kernel);
  static Device& of(int index);
  // Of the kernel after the next `skip` ones, blocks from index `from` on begin late: when `let_blocks_begin` is called.
  void hold_blocks(uint32_t skip, uint32_t from);
  void let_blocks_begin();
  uint32_t held_blocks();  // how many wait

 private:
  struct Grid {
    const Kernel* kernel;
    uint64_t number;
    uint32_t next = 0, done = 0;
  };
  void work();
  bool room(const Kernel& k) const;
  void run_block(const Kernel& k, uint32_t index, uint64_t number);
  void begin_late(uint32_t index, uint64_t number);

  std::mutex mutex_;
  std::condition_variable work_, done_, begin_;
  std::deque<Grid*> waiting_;    // grids of which blocks have not begun
  uint64_t grids_ = 0;
  uint32_t threads_ = 0, idle_ = 0, workers_ = 0, blocks_ = 0;  // blocks that have not begun
  size_t shared_ = 0;
  struct {
    uint64_t number = 0;  // of the kernel; 0: of none
    uint32_t from = 0, waiting = 0;
  } late_;
};

using Operation = std::function<void()>;
using Operations = std::vector<Operation>;

// Operations run one after another on a thread of the stream, or are noted while it is captured. Its thread and whoever uses it
// own it together: it may be destroyed while others wait for it, and runs what it has.
class Stream {
 public:
  explicit Stream(int on) : device(on) {}
  cudaError_t push(Operation op);
  void wait();  // for what it has been given so far
  bool idle();
  void serve();  // its thread, which ends when it is closed and has nothing left to run
  void close();
  cudaError_t begin_capture();
  cudaError_t end_capture(std::shared_ptr<Operations>* out);
  cudaStreamCaptureStatus capture_status();
  bool spoil();  // by a call that a capture does not allow; whether there is one

  const int device;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Operation> operations_;
  uint64_t given_ = 0, done_ = 0;
  bool closed_ = false;
  std::shared_ptr<Operations> captured_;  // not null: being captured
  bool spoilt_ = false;
};

// Null for one that was destroyed or never was. A null handle: the default stream of the current device.
std::shared_ptr<Stream> stream_of(cudaStream_t stream);
cudaError_t push(cudaStream_t stream, Operation op);
cudaError_t wait_for_stream(cudaStream_t stream);
cudaStream_t new_stream();
cudaError_t end_stream(cudaStream_t stream);  // it runs what it has
void wait_for_device(int device);             // also for streams that were ended
int current_device();

// Memory of cudaHostAlloc, and copies from it to a device, which may be held back (pinned.cpp).
void note_pinned(const void* p, size_t bytes);
void forget_pinned(const void* p);
bool is_pinned(const void* p, size_t bytes);
void pass_gate();
void hold_copies(bool shut);
void let_copies(uint32_t count);  // while they are held back
uint32_t held_copies();  // how many streams wait with one

// Calls that fail because a test said so (failing.cpp): what this one answers, by its name. cudaSuccess: it does not.
cudaError_t failing(const char* call);
// All calls of this name after the next `skip` ones fail with this error, until it is cudaSuccess.
void fail_call(const char* call, cudaError_t status, uint32_t skip);

// Whether this thread may make a call that a capture in global mode forbids; if not, the capture is spoilt.
bool allowed_in_capture();

}  // namespace epe
