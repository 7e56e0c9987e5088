// Holding a robust futex: the kernel marks it as the first act of the holder's death, long before sockets close.
#pragma once
#include <atomic>
#include <thread>

#include "header.h"

namespace ep {

class RobustHold {
 public:
  RobustHold() = default;
  RobustHold(const RobustHold&) = delete;
  RobustHold& operator=(const RobustHold&) = delete;
  ~RobustHold() { release(); }

  // A native thread of its own takes the lock. EP_EUSAGE when another live process holds it.
  int take(RobustLock& lock, u32 inc);
  void release();

 private:
  std::thread thread_;
  std::atomic<u32> stop_{0};
};

}  // namespace ep
