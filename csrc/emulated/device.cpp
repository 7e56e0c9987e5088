#include "device.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <thread>

#include "fiber.h"

namespace epe {

namespace {

uint64_t number_from(const char* name, uint64_t usual) {
  const char* text = getenv(name);
  return text && *text ? strtoull(text, nullptr, 0) : usual;
}

}  // namespace

Settings& settings() {
  static Settings read{uint32_t(number_from("ELASTICEP_EMULATED_DEVICES", 2)), uint32_t(number_from("ELASTICEP_EMULATED_SMS", 4)),
                       {number_from("ELASTICEP_EMULATED_SEED", 0)}};
  return read;
}

// Never destroyed: kernels may wait for others until the process ends.
Device& Device::of(int index) {
  static Device* all = new Device[settings().devices];
  return all[index];
}

bool Device::room(const Kernel& k) const {
  return threads_ + k.threads <= settings().sms * kThreadsPerSm && shared_ + k.shared_bytes <= size_t(settings().sms) * kSharedPerSm;
}

void Device::run(const Kernel& kernel) {
  Grid grid{&kernel, 0};
  std::unique_lock<std::mutex> lock(mutex_);
  grid.number = ++grids_;
  waiting_.push_back(&grid);
  blocks_ += kernel.grid;
  // Kernels wait for each other: a host thread for every block that an SM has room for.
  while (idle_ < blocks_ && workers_ < settings().sms * kBlocksPerSm) {
    ++idle_, ++workers_;
    std::thread([this] { work(); }).detach();
  }
  work_.notify_all();
  done_.wait(lock, [&] { return grid.done == kernel.grid; });
}

void Device::work() {
  prctl(PR_SET_TIMERSLACK, 1000);
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    work_.wait(lock, [&] { return !waiting_.empty() && room(*waiting_.front()->kernel); });
    Grid* grid = waiting_.front();
    const Kernel& k = *grid->kernel;
    const uint32_t index = grid->next++;
    if (grid->next == k.grid) waiting_.pop_front();
    threads_ += k.threads;
    shared_ += k.shared_bytes;
    --idle_, --blocks_;
    lock.unlock();
    run_block(k, index, grid->number);
    lock.lock();
    ++idle_;
    threads_ -= k.threads;
    shared_ -= k.shared_bytes;
    if (++grid->done == k.grid) done_.notify_all();
    if (!waiting_.empty()) work_.notify_all();
  }
}

void Device::hold_blocks(uint32_t skip, uint32_t from) {
  std::lock_guard<std::mutex> guard(mutex_);
  late_.number = grids_ + skip + 1;
  late_.from = from;
}
void Device::let_blocks_begin() {
  std::lock_guard<std::mutex> guard(mutex_);
  late_.number = 0;
  begin_.notify_all();
}
uint32_t Device::held_blocks() {
  std::lock_guard<std::mutex> guard(mutex_);
  return late_.waiting;
}
void Device::begin_late(uint32_t index, uint64_t number) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (number != late_.number || index < late_.from) return;
  ++late_.waiting;
  begin_.wait(lock, [&] { return number != late_.number; });
  --late_.waiting;
}

void Device::run_block(const Kernel& k, uint32_t index, uint64_t number) {
  begin_late(index, number);
  static thread_local Block block;
  if (k.shared_bytes) memset(k.shared(), 0xa5, k.shared_bytes);  // nobody may count on what it holds
  block.grid = dim3(k.grid);
  block.dim = dim3(k.threads);
  block.index = {index, 0, 0};
  block.body = &k.body;
  const uint64_t seed = settings().seed;
  block.shuffled = seed != 0;
  block.dice = {seed * 0x2545F4914F6CDD1Dull + uint64_t(getpid()) * 0x9E3779B97F4A7C15ull + number * 1000003 + index};
  if (block.shuffled && block.dice.below(4) == 0) usleep(block.dice.below(300));
  block.run();
}

}  // namespace epe
