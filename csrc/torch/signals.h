// Python's handlers of signals, run from inside an operator that waits.
#pragma once
#include "elasticep_ops.h"

namespace ept {

// Nothing of Python is linked: its functions, all of its stable ABI, come as addresses.
class Signals {
 public:
  explicit Signals(const ept_python* python) : python_(python ? *python : ept_python{}) {}
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  // Runs the handlers of signals that have come; whether one raised. What it raised is kept.
  bool raised();
  // Raises that in the caller's thread, which holds the interpreter's lock. False: there is nothing.
  bool raise();

 private:
  const ept_python python_;
  // What nobody raises goes with the process: whoever ends an exchange need not hold the interpreter's lock.
  void *kind_ = nullptr, *error_ = nullptr, *trace_ = nullptr;
};

}  // namespace ept
