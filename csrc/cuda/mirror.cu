#include "mirror.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>
#include <thread>

#include "../common/quiet.h"
#include "../common/sys.h"
#include "context.h"

using namespace epc;

namespace {
constexpr u64 kBufferBytes = 8u << 20;          // long enough for the link's rate, and a later view does not wait for more
constexpr u32 kLeastLanes = 2, kMostLanes = 4;  // one core copies within the host's memory slower than a link carries
constexpr u32 kTries = 3;
constexpr u64 kLabelBytes = 128, kRecordBytes = 64, kRecordBody = 56;
constexpr u32 kLabelTries = 10'000;
constexpr u32 kEmpty = 0, kFilling = 1, kValid = 2;

u64 read64(const u8* at) {
  u64 v;
  memcpy(&v, at, sizeof v);
  return v;
}
u64 folded(u64 a, u64 b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return u64(product) ^ u64(product >> 64);
}
// XXH3-64 of a record's body, by the published algorithm for inputs of 33 to 64 bytes.
u64 checksum_of(const u8* body) {
  static const u64 secret[8] = {0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
                                0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0};
  auto mix = [](const u8* at, const u64* with) { return folded(read64(at) ^ with[0], read64(at + 8) ^ with[1]); };
  u64 sum = kRecordBody * 0x9E3779B185EBCA87ull;
  sum += mix(body + 16, secret + 4) + mix(body + kRecordBody - 32, secret + 6);
  sum += mix(body, secret) + mix(body + kRecordBody - 16, secret + 2);
  sum = (sum ^ sum >> 37) * 0x165667919E3779F9ull;
  return sum ^ sum >> 32;
}

bool read_record(const u8* record, Label* out) {
  if (checksum_of(record) != read64(record + kRecordBody)) return false;
  memcpy(&out->sequence, record, 8);
  memcpy(&out->expert, record + 8, 4);
  memcpy(&out->state, record + 12, 4);
  memcpy(out->checksum.data(), record + 16, 16);
  return out->state <= kValid;
}

// The newer record of a label that is whole; false while neither is. What is copied between two looks is read after the first and
// before the second, also where the host's memory is weakly ordered; what else the mover writes meanwhile, it writes after a
// label that says so (elasticep/arena.py). The bytes themselves may be torn, but then that label is seen and they are not used.
bool read_label(const u8* at, Label* out) {
  u64 words[kLabelBytes / 8];
  std::atomic_thread_fence(std::memory_order_acquire);
  for (u32 i = 0; i < kLabelBytes / 8; ++i) words[i] = __atomic_load_n(reinterpret_cast<const u64*>(at) + i, __ATOMIC_RELAXED);
  std::atomic_thread_fence(std::memory_order_acquire);
  const u8* raw = reinterpret_cast<const u8*>(words);
  Label second;
  const bool one = read_record(raw, out), other = read_record(raw + kRecordBytes, &second);
  if (other && (!one || second.sequence > out->sequence)) *out = second;
  return one || other;
}

}  // namespace

bool Label::holds(int wanted) const { return state == kValid && expert == wanted; }

WeightsMirror::~WeightsMirror() {
  if (device_set_) cudaSetDevice(int(device_));
  for (Lane& lane : lanes_)
    for (u32 i = 0; i < 2; ++i) {
      if (lane.stream[i]) cudaStreamSynchronize(lane.stream[i]), cudaStreamDestroy(lane.stream[i]);
      if (lane.buffer[i]) cudaFreeHost(lane.buffer[i]);
    }
  if (base_) cudaFree(base_);
  if (arena_) munmap(const_cast<u8*>(arena_), weights_.total_bytes);
  cudaGetLastError();
}

int WeightsMirror::open(const epc_weights& weights, u32 rank, u32 device) {
  rank_ = rank;
  device_ = device;
  if (!weights.layers || !weights.slots || !weights.tensors || weights.tensors > EPC_MAX_TENSORS)
    return ep::fail(EP_EINVAL, "expert weights of %u tensors in %u layers of %u slots; an expert has 1 to %d tensors", weights.tensors, weights.layers,
                    weights.slots, EPC_MAX_TENSORS);
  if (int bad = map(weights)) return bad;
  held_.resize(u64(weights_.layers) * weights_.slots);
  return allocate();
}

int WeightsMirror::map(const epc_weights& weights) {
  struct stat found {};
  if (fstat(weights.arena_fd, &found)) return ep::fail(-errno, "the arena of rank %u: %s", rank_, strerror(errno));
  if (u64(found.st_size) < weights.total_bytes)
    return ep::fail(EP_EMISMATCH, "the arena that the daemon handed over has %llu bytes, this group's config makes it %llu; install one version everywhere",
                    wide(u64(found.st_size)), wide(weights.total_bytes));
  void* at = mmap(nullptr, weights.total_bytes, PROT_READ, MAP_SHARED, weights.arena_fd, 0);
  if (at == MAP_FAILED) return ep::fail(-errno, "mapping the arena of rank %u: %s", rank_, strerror(errno));
  weights_ = weights;
  arena_ = static_cast<const u8*>(at);
  if (memcmp(arena_, "EEPARENA", 8) || read64(arena_ + 40) != weights_.digest)
    return ep::fail(EP_EMISMATCH, "the arena of rank %u is laid out in another way than this group's config says; install one version everywhere", rank_);
  return 0;
}

int WeightsMirror::allocate() {
  const u64 bytes = weights_.layers * weights_.layer_bytes;
  RelaxedCapture relaxed;
  if (int bad = use_device(device_)) return bad;
  device_set_ = true;
  void* at = nullptr;
  if (int bad = allocate_on(device_, bytes, Words("the expert weights of rank %u", rank_), &at)) return bad;
  base_ = static_cast<u8*>(at);
  const u32 cores = std::thread::hardware_concurrency();
  lanes_.resize(std::clamp(cores / 2, kLeastLanes, kMostLanes));
  const Words what("the buffers through which the expert weights of rank %u come", rank_);
  for (Lane& lane : lanes_)
    for (u32 i = 0; i < 2; ++i) {
      EPC_TRY(cudaStreamCreateWithFlags(&lane.stream[i], cudaStreamNonBlocking));
      if (int bad = allocate_pinned(kBufferBytes, lanes_.size() * 2 * kBufferBytes, what, reinterpret_cast<void**>(&lane.buffer[i]))) return bad;
    }
  EPC_TRY(cudaMemsetAsync(base_, 0, bytes, lanes_[0].stream[0]));  // a slot that is empty holds no NaN
  EPC_TRY(cudaStreamSynchronize(lanes_[0].stream[0]));
  return 0;
}

// ---- what lies where

int WeightsMirror::look(u32 layer, u32 slot, int expert, Label* out) const {
  const u8* at = arena_ + weights_.labels_offset + index(layer, slot) * kLabelBytes;
  bool whole = false;
  for (u32 i = 0; i < kLabelTries && !(whole = read_label(at, out)); ++i) sched_yield();
  if (!whole)
    return ep::fail(EP_EMISMATCH, "the label of layer %u slot %u of rank %u is broken; restart this node's daemon, which fills the slot anew", layer, slot, rank_);
  if (out->holds(expert)) return 0;
  char holds[64];
  if (out->state == kEmpty) snprintf(holds, sizeof holds, "is empty");
  else snprintf(holds, sizeof holds, "%s expert %d", out->state == kFilling ? "is being filled with" : "holds", out->expert);
  return ep::fail(EP_EUSAGE, "layer %u slot %u of rank %u %s, not expert %d; its weights must be in place before the view that names them is staged", layer,
                  slot, rank_, holds, expert);
}

void WeightsMirror::held(u32 layer, int* experts) const {
  std::lock_guard<std::mutex> guard(mutex_);
  for (u32 slot = 0; slot < weights_.slots; ++slot) experts[slot] = held_[index(layer, slot)].expert;
}

void WeightsMirror::set(const Task& task, int expert, const std::array<u8, 16>& checksum) {
  std::lock_guard<std::mutex> guard(mutex_);
  held_[index(task.layer, task.slot)] = {expert, checksum};
}

epc_copied WeightsMirror::copied() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return copied_;
}

WeightsMirror::Headway WeightsMirror::headway() const {
  std::lock_guard<std::mutex> guard(mutex_);
  Headway told = headway_;
  told.done = std::min(told.done, told.total);  // a slot that was filled anew meanwhile is copied twice
  return told;
}

// ---- copying

// What has to be copied. A slot that the rank computes from, or may after the next barrier, stays as it is.
int WeightsMirror::plan(const Order& order, std::vector<Task>* out) const {
  for (u32 layer = 0; layer < weights_.layers; ++layer)
    for (u32 slot = 0; slot < weights_.slots; ++slot) {
      const int expert = order.experts[index(layer, slot)];
      if (expert < 0) continue;
      Label label;
      if (int bad = look(layer, slot, expert, &label)) return bad;
      const Held& here = held_[index(layer, slot)];
      if (here.expert == expert && here.checksum == label.checksum) continue;
      if (const u64 user = order.named_by(layer, slot))
        return ep::fail(EP_EUSAGE, "layer %u slot %u of rank %u is used by view %llu and holds other bytes than view %llu wants; start the engine anew if it stays so",
                        layer, slot, rank_, wide(user), wide(order.epoch));
      out->push_back({layer, slot, expert});
    }
  return 0;
}

struct WeightsMirror::Run {
  const Order& order;
  const std::vector<Task>& tasks;
  std::atomic<size_t> next{0};
  std::atomic<int> status{0};
  std::mutex mutex;
  std::string text;  // of the first error

  Run(const Order& of, const std::vector<Task>& all) : order(of), tasks(all) {}
};

int WeightsMirror::fill(const Order& order) {
  std::vector<Task> tasks;
  if (int bad = plan(order, &tasks)) return bad;
  if (tasks.empty()) return 0;
  const u64 began = ep::now_ns();
  u64 unit = 0;
  for (u32 t = 0; t < weights_.tensors; ++t) unit += weights_.bytes[t];
  {
    std::lock_guard<std::mutex> guard(mutex_);
    headway_ = {order.epoch, 0, tasks.size() * unit};
  }
  Run run(order, tasks);
  auto work_in = [&](size_t lane) {
    if (const int bad = work(run, lanes_[lane])) {
      std::lock_guard<std::mutex> guard(run.mutex);
      if (run.status) return;
      run.text = ep_last_error();
      run.status = bad;
    }
  };
  std::vector<std::thread> helpers;
  const size_t lanes = std::min(lanes_.size(), tasks.size());
  try {
    for (size_t lane = 1; lane < lanes; ++lane) helpers.push_back(ep::quiet_thread([&work_in, lane] { work_in(lane); }));
  } catch (const std::system_error&) {  // fewer threads, then
  }
  work_in(0);
  for (std::thread& helper : helpers) helper.join();
  {
    std::lock_guard<std::mutex> guard(mutex_);
    copied_.ns += ep::now_ns() - began;
    headway_ = {};
  }
  return run.status ? ep::fail(run.status, "%s", run.text.c_str()) : 0;
}

int WeightsMirror::work(Run& run, Lane& lane) {
  RelaxedCapture relaxed;
  if (int bad = use_device(device_)) return bad;
  for (size_t i; !run.status && (i = run.next++) < run.tasks.size();)
    if (int bad = copy(run.order, run.tasks[i], lane)) {
      for (u32 buffer = 0; buffer < 2; ++buffer) {  // nothing is written any more when this is answered
        cudaStreamSynchronize(lane.stream[buffer]);
        lane.sent[buffer] = 0;
      }
      return bad;
    }
  return 0;
}

int WeightsMirror::copy(const Order& order, const Task& task, Lane& lane) {
  for (u32 tried = 0; tried < kTries; ++tried) {
    Label before, after;
    if (int bad = look(task.layer, task.slot, task.expert, &before)) return bad;
    set(task, -1, {});
    u64 bytes = 0;
    for (u32 t = 0; t < weights_.tensors; ++t) {
      const u64 begin = task.layer * weights_.layer_bytes + weights_.offset[t] + task.slot * weights_.bytes[t];
      if (int bad = send(order, begin, weights_.bytes[t], lane)) return bad;
      bytes += weights_.bytes[t];
    }
    for (u32 i = 0; i < 2; ++i)
      if (int bad = arrived(lane, i)) return bad;
    if (int bad = look(task.layer, task.slot, task.expert, &after)) return bad;
    if (after.sequence != before.sequence) continue;
    set(task, task.expert, before.checksum);
    std::lock_guard<std::mutex> guard(mutex_);
    ++copied_.slots;
    copied_.bytes += bytes;
    return 0;
  }
  return ep::fail(EP_EUSAGE, "layer %u slot %u of rank %u was filled anew again and again while it was copied to the GPU", task.layer, task.slot, rank_);
}

// `at` is counted from the begin of the first layer's tensors, here and there.
int WeightsMirror::send(const Order& order, u64 at, u64 bytes, Lane& lane) {
  for (u64 done = 0; done < bytes;) {
    if (const u64 later = order.overtaken_by())
      return ep::fail(EP_EUSAGE, "view %llu is overtaken by view %llu: what only it wants is not copied to the GPU any more", wide(order.epoch), wide(later));
    const u64 part = std::min(bytes - done, kBufferBytes);
    const u32 i = lane.next;
    lane.next ^= 1;
    if (int bad = arrived(lane, i)) return bad;
    memcpy(lane.buffer[i], arena_ + weights_.data_offset + at + done, part);
    EPC_TRY(cudaMemcpyAsync(base_ + at + done, lane.buffer[i], part, cudaMemcpyHostToDevice, lane.stream[i]));
    lane.sent[i] = part;
    done += part;
  }
  return 0;
}

// Waits until a buffer is free; only then is what it carried headway.
int WeightsMirror::arrived(Lane& lane, u32 i) {
  EPC_TRY(cudaStreamSynchronize(lane.stream[i]));
  std::lock_guard<std::mutex> guard(mutex_);
  headway_.done += lane.sent[i];
  lane.sent[i] = 0;
  return 0;
}
