#include <map>
#include <thread>

#include "device.h"

namespace epe {

namespace {

using Streams = std::map<const Stream*, std::shared_ptr<Stream>>;

// Never destroyed: streams may run until the process ends.
struct Registry {
  std::mutex mutex;
  Streams open;     // that calls may name
  Streams running;  // these, and those that were ended and have something left to run
  std::map<int, std::shared_ptr<Stream>> usual;  // the default one of each device
};
Registry& registry() {
  static auto all = new Registry;
  return *all;
}
thread_local int chosen = 0;
thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

// The registry's mutex is held.
std::shared_ptr<Stream> make(int device) {
  auto s = std::make_shared<Stream>(device);
  registry().open[s.get()] = registry().running[s.get()] = s;
  std::thread([s] {
    s->serve();
    std::lock_guard<std::mutex> guard(registry().mutex);
    registry().running.erase(s.get());
  }).detach();
  return s;
}

}  // namespace

void Stream::serve() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !operations_.empty() || closed_; });
    if (operations_.empty()) return;
    Operation op = std::move(operations_.front());
    operations_.pop_front();
    lock.unlock();
    op();
    op = nullptr;
    lock.lock();
    ++done_;
    changed_.notify_all();
  }
}

cudaError_t Stream::push(Operation op) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (closed_) return cudaErrorInvalidResourceHandle;
  if (captured_) {
    captured_->push_back(std::move(op));
    return cudaSuccess;
  }
  operations_.push_back(std::move(op));
  ++given_;
  changed_.notify_all();
  return cudaSuccess;
}

void Stream::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this, all = given_] { return done_ >= all; });
}

bool Stream::idle() {
  std::lock_guard<std::mutex> guard(mutex_);
  return done_ == given_;
}

void Stream::close() {
  std::lock_guard<std::mutex> guard(mutex_);
  closed_ = true;
  changed_.notify_all();
}

cudaError_t Stream::begin_capture() {
  std::lock_guard<std::mutex> guard(mutex_);
  if (captured_) return cudaErrorIllegalState;
  captured_ = std::make_shared<Operations>();
  spoilt_ = false;
  return cudaSuccess;
}

cudaError_t Stream::end_capture(std::shared_ptr<Operations>* out) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (!captured_) return cudaErrorIllegalState;
  *out = std::move(captured_);
  return spoilt_ ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
}

cudaStreamCaptureStatus Stream::capture_status() {
  std::lock_guard<std::mutex> guard(mutex_);
  if (!captured_) return cudaStreamCaptureStatusNone;
  return spoilt_ ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

bool Stream::spoil() {
  std::lock_guard<std::mutex> guard(mutex_);
  if (captured_) spoilt_ = true;
  return captured_ != nullptr;
}

int current_device() { return chosen; }

std::shared_ptr<Stream> stream_of(cudaStream_t stream) {
  std::lock_guard<std::mutex> guard(registry().mutex);
  if (!stream) {
    std::shared_ptr<Stream>& s = registry().usual[chosen];
    if (!s) s = make(chosen);
    return s;
  }
  const auto at = registry().open.find(reinterpret_cast<Stream*>(stream));
  return at == registry().open.end() ? nullptr : at->second;
}

cudaError_t push(cudaStream_t stream, Operation op) {
  const auto s = stream_of(stream);
  return s ? s->push(std::move(op)) : cudaErrorInvalidResourceHandle;
}

cudaError_t wait_for_stream(cudaStream_t stream) {
  const auto s = stream_of(stream);
  if (!s) return cudaErrorInvalidResourceHandle;
  s->wait();
  return cudaSuccess;
}

cudaStream_t new_stream() {
  std::lock_guard<std::mutex> guard(registry().mutex);
  return reinterpret_cast<cudaStream_t>(make(chosen).get());
}

cudaError_t end_stream(cudaStream_t stream) {
  std::shared_ptr<Stream> s;
  {
    std::lock_guard<std::mutex> guard(registry().mutex);
    const auto at = registry().open.find(reinterpret_cast<Stream*>(stream));
    if (at == registry().open.end()) return cudaErrorInvalidResourceHandle;
    s = std::move(at->second);
    registry().open.erase(at);
  }
  s->close();
  return cudaSuccess;
}

void wait_for_device(int device) {
  std::vector<std::shared_ptr<Stream>> all;
  {
    std::lock_guard<std::mutex> guard(registry().mutex);
    for (const auto& [_, s] : registry().running)
      if (s->device == device) all.push_back(s);
  }
  for (const auto& s : all) s->wait();
}

bool allowed_in_capture() {
  if (mode == cudaStreamCaptureModeRelaxed) return true;
  std::lock_guard<std::mutex> guard(registry().mutex);
  bool captured = false;
  for (const auto& [_, s] : registry().open) captured |= s->spoil();
  return !captured;
}

}  // namespace epe

extern "C" {

cudaError_t CUDARTAPI cudaSetDevice(int device) {
  if (device < 0 || uint32_t(device) >= epe::settings().devices) return cudaErrorInvalidDevice;
  if (const cudaError_t bad = epe::failing("cudaSetDevice"); bad != cudaSuccess) return bad;
  epe::chosen = device;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaGetDevice(int* out) {
  *out = epe::chosen;
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, epe::mode);
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaStreamCreateWithFlags(cudaStream_t* out, unsigned) {
  *out = epe::new_stream();
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaStreamDestroy(cudaStream_t stream) { return epe::end_stream(stream); }
cudaError_t CUDARTAPI cudaStreamSynchronize(cudaStream_t stream) {
  return epe::allowed_in_capture() ? epe::wait_for_stream(stream) : cudaErrorStreamCaptureUnsupported;
}
cudaError_t CUDARTAPI cudaStreamQuery(cudaStream_t stream) {
  if (!epe::allowed_in_capture()) return cudaErrorStreamCaptureUnsupported;
  const auto s = epe::stream_of(stream);
  if (!s) return cudaErrorInvalidResourceHandle;
  return s->idle() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t CUDARTAPI cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* out) {
  const auto s = epe::stream_of(stream);
  if (!s) return cudaErrorInvalidResourceHandle;
  *out = s->capture_status();
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaDeviceSynchronize() {
  if (!epe::allowed_in_capture()) return cudaErrorStreamCaptureUnsupported;
  epe::wait_for_device(epe::current_device());
  return cudaSuccess;
}

}  // extern "C"
