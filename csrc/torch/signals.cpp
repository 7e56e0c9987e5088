#include "signals.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <initializer_list>

namespace ept {

bool Signals::raised() {
  // Python runs handlers on its first thread alone; no other has to take the lock for nothing.
  if (!python_.check_signals || syscall(SYS_gettid) != getpid()) return false;
  const int state = python_.ensure();
  const bool bad = python_.check_signals() != 0;
  if (bad) {
    for (void* old : {kind_, error_, trace_}) python_.drop(old);
    python_.fetch(&kind_, &error_, &trace_);
  }
  python_.release(state);
  return bad;
}

bool Signals::raise() {
  if (!kind_) return false;
  python_.restore(kind_, error_, trace_);
  kind_ = error_ = trace_ = nullptr;
  return true;
}

}  // namespace ept
