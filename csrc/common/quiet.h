// Threads of the library in a process that is not ours.
#pragma once
#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace ep {

// Starts a thread that takes no signals: those belong to the engine's own. Throws std::system_error when there is none to
// be had; the caller's mask is its own again either way.
template <class F>
std::thread quiet_thread(F&& run) {
  struct Mask {
    sigset_t old;
    Mask() {
      sigset_t all;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &old);
    }
    ~Mask() { pthread_sigmask(SIG_SETMASK, &old, nullptr); }
  } mask;
  return std::thread(std::forward<F>(run));
}

}  // namespace ep
