#include <algorithm>
#include <map>
#include <thread>

#include "device.h"

namespace epe {

namespace {

std::mutex& all_mutex() {
  static auto m = new std::mutex;
  return *m;
}
std::vector<Stream*>& all_streams() {
  static auto v = new std::vector<Stream*>;
  return *v;
}
thread_local int chosen = 0;
thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

Stream* make(int device, bool blocking) {
  auto s = new Stream(device, blocking);
  std::lock_guard<std::mutex> guard(all_mutex());
  all_streams().push_back(s);
  return s;
}

}  // namespace

Stream::Stream(int on, bool blocks) : device(on), blocking(blocks) {
  std::thread([this] { serve(); }).detach();
}

void Stream::serve() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !operations_.empty() || over_; });
    if (operations_.empty()) break;
    Operation op = std::move(operations_.front());
    operations_.pop_front();
    busy_ = true;
    lock.unlock();
    op();
    op = nullptr;
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
  lock.unlock();
  delete this;
}

void Stream::push(Operation op) {
  if (captured) {
    captured->push_back(std::move(op));
    return;
  }
  std::lock_guard<std::mutex> guard(mutex_);
  operations_.push_back(std::move(op));
  changed_.notify_all();
}

void Stream::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return operations_.empty() && !busy_; });
}

bool Stream::idle() {
  std::lock_guard<std::mutex> guard(mutex_);
  return operations_.empty() && !busy_;
}

void Stream::finish() {
  std::lock_guard<std::mutex> guard(mutex_);
  over_ = true;
  changed_.notify_all();
}

int current_device() { return chosen; }

Stream& stream_of(cudaStream_t stream) {
  if (stream) return *reinterpret_cast<Stream*>(stream);
  static auto defaults = new std::map<int, Stream*>;
  static auto mutex = new std::mutex;
  std::lock_guard<std::mutex> guard(*mutex);
  Stream*& s = (*defaults)[chosen];
  if (!s) s = make(chosen, true);
  return *s;
}

cudaStream_t new_stream(bool blocking) { return reinterpret_cast<cudaStream_t>(make(chosen, blocking)); }

cudaError_t end_stream(cudaStream_t stream) {
  auto s = reinterpret_cast<Stream*>(stream);
  {
    std::lock_guard<std::mutex> guard(all_mutex());
    auto at = std::find(all_streams().begin(), all_streams().end(), s);
    if (at == all_streams().end()) return cudaErrorInvalidResourceHandle;
    all_streams().erase(at);
  }
  s->finish();
  return cudaSuccess;
}

void wait_for_device(int device) {
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> guard(all_mutex());
    all = all_streams();
  }
  for (Stream* s : all)
    if (s->device == device) s->wait();
}

bool allowed_in_capture() {
  if (mode == cudaStreamCaptureModeRelaxed) return true;
  std::lock_guard<std::mutex> guard(all_mutex());
  bool allowed = true;
  for (Stream* s : all_streams())
    if (s->captured) s->spoilt = true, allowed = false;
  return allowed;
}

cudaError_t begin_capture(cudaStream_t stream) {
  Stream& s = stream_of(stream);
  std::lock_guard<std::mutex> guard(all_mutex());
  if (s.captured) return cudaErrorIllegalState;
  s.captured = std::make_shared<std::vector<Operation>>();
  s.spoilt = false;
  return cudaSuccess;
}

cudaError_t end_capture(cudaStream_t stream, std::shared_ptr<std::vector<Operation>>* out) {
  Stream& s = stream_of(stream);
  std::lock_guard<std::mutex> guard(all_mutex());
  if (!s.captured) return cudaErrorIllegalState;
  *out = std::move(s.captured);
  s.captured = nullptr;
  return s.spoilt ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
}

}  // namespace epe

extern "C" {

cudaError_t CUDARTAPI cudaSetDevice(int device) {
  if (device < 0 || uint32_t(device) >= epe::settings().devices) return cudaErrorInvalidDevice;
  epe::chosen = device;
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, epe::mode);
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
  *out = epe::new_stream(!(flags & cudaStreamNonBlocking));
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaStreamDestroy(cudaStream_t stream) { return epe::end_stream(stream); }
cudaError_t CUDARTAPI cudaStreamSynchronize(cudaStream_t stream) {
  if (!epe::allowed_in_capture()) return cudaErrorStreamCaptureUnsupported;
  epe::stream_of(stream).wait();
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaStreamQuery(cudaStream_t stream) {
  if (!epe::allowed_in_capture()) return cudaErrorStreamCaptureUnsupported;
  return epe::stream_of(stream).idle() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t CUDARTAPI cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* out) {
  const epe::Stream& s = epe::stream_of(stream);
  *out = !s.captured ? cudaStreamCaptureStatusNone : s.spoilt ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaDeviceSynchronize() {
  if (!epe::allowed_in_capture()) return cudaErrorStreamCaptureUnsupported;
  epe::wait_for_device(epe::current_device());
  return cudaSuccess;
}

}  // extern "C"
