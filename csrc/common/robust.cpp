#include "robust.h"

#include <stddef.h>
#include <unistd.h>

#include <future>

#include "errors.h"
#include "quiet.h"
#include "sys.h"

namespace ep {

namespace {
// What the kernel walks at a thread's exit (linux/futex.h: robust_list_head), with our lock as the only entry.
struct ListHead {
  void* first;
  long futex_offset;
  void* pending;
};

// The thread's list of before (glibc's, of robust mutexes) is its list again when this goes: a thread ends long after its
// last function has returned, and the kernel reads the list then.
struct ListInPlace {
  void* before = nullptr;
  size_t size = sizeof(ListHead);
  bool set = false;

  explicit ListInPlace(ListHead& head) {
    if (syscall(SYS_get_robust_list, 0, &before, &size)) before = nullptr, size = sizeof head;
    set = !syscall(SYS_set_robust_list, &head, sizeof head);
  }
  ~ListInPlace() {
    if (set) syscall(SYS_set_robust_list, before, size);
  }
  ListInPlace(const ListInPlace&) = delete;
};
}  // namespace

int RobustHold::take(RobustLock& lock, u32 inc) {
  std::promise<u32> taken;
  auto result = taken.get_future();
  stop_.store(0);
  thread_ = quiet_thread([this, &lock, inc, &taken] {
    ListHead head;
    head.first = &head;
    head.futex_offset = long(offsetof(RobustLock, word)) - long(offsetof(RobustLock, next));
    head.pending = &lock.next;
    const ListInPlace list(head);
    if (!list.set) {
      taken.set_value(~0u);
      return;
    }
    u32 tid = u32(syscall(SYS_gettid)), expected = 0;
    if (!lock.word.compare_exchange_strong(expected, tid)) {
      head.pending = nullptr;
      taken.set_value(expected);
      return;
    }
    lock.next = &head;  // not before: until here it is another holder's
    lock.inc.store(inc);
    lock.pid.store(u32(getpid()));
    head.first = &lock.next;
    head.pending = nullptr;
    futex_wake(lock.word);
    taken.set_value(0);
    while (!stop_.load()) futex_wait(stop_, 0, 3600ull * 1000000000ull);
    head.pending = &lock.next;
    head.first = &head;
    lock.pid.store(0);
    lock.word.exchange(0);
    futex_wake(lock.word);
    head.pending = nullptr;
  });
  u32 holder = result.get();
  if (holder == 0) return 0;
  thread_.join();
  thread_ = std::thread();
  if (holder == ~0u) return fail(EP_EUSAGE, "set_robust_list failed; elasticep needs a Linux kernel with robust futexes");
  if (holder & FUTEX_OWNER_DIED) return fail(EP_EFENCED, "the seat's last holder died and the daemon has not granted it anew");
  return fail(EP_EUSAGE, "the seat is held by process %u", lock.pid.load());
}

void RobustHold::release() {
  if (!thread_.joinable()) return;
  stop_.store(1);
  futex_wake(stop_);
  thread_.join();
  thread_ = std::thread();
}

}  // namespace ep
