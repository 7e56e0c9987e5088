"""What the kernel finds when a thread that held a robust futex ends."""

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

CSRC: Final = Path(__file__).parents[2] / "csrc"
# `syscall` is this program's own, so that it can look at each thread's list: as it was before, and
# in a destructor, which runs when the thread's function has returned and its frame is gone.
PROGRAM: Final = r"""
#include <dlfcn.h>
#include <cstdarg>
#include <cstdio>
#include <sys/syscall.h>
#include "common/robust.h"

static long real(long number, long a, long b, long c, long d, long e, long f) {
  static auto next = reinterpret_cast<long (*)(long, ...)>(dlsym(RTLD_NEXT, "syscall"));
  return next(number, a, b, c, d, e, f);
}
static void* list_of_thread() {
  void* head = nullptr;
  size_t size = 0;
  real(SYS_get_robust_list, 0, long(&head), long(&size), 0, 0, 0);
  return head;
}
static std::atomic<int> ended{0}, left_behind{0};
struct Witness {
  void* before = nullptr;
  ~Witness() {
    if (!before) return;
    if (list_of_thread() != before) ++left_behind;
    ++ended;
  }
};
static thread_local Witness witness;

extern "C" long syscall(long number, ...) {
  va_list args;
  va_start(args, number);
  long a[6];
  for (long& each : a) each = va_arg(args, long);
  va_end(args);
  if (number == SYS_set_robust_list && !witness.before) witness.before = list_of_thread();
  return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

int main() {
  ep::RobustLock lock{};
  ep::RobustHold holder, other;
  const int took = holder.take(lock, 1);
  void* const linked = lock.next;
  const int refused = other.take(lock, 2);
  const bool untouched = lock.next == linked && linked;
  holder.release();
  printf("took %d refused %d untouched %d ended %d left_behind %d\n", took == 0, refused != 0,
         untouched, ended.load(), left_behind.load());
}
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_the_kernel_finds_no_list_in_a_frame_that_is_gone(tmp_path: Path) -> None:
    """Neither a holder's nor that of one that was refused, which leaves the holder's as it is."""
    source, program = tmp_path / "main.cpp", tmp_path / "main"
    source.write_text(PROGRAM)
    parts = [str(CSRC / "common" / name) for name in ("robust.cpp", "errors.cpp")]
    options = ["-std=c++17", "-O1", f"-I{CSRC}", "-pthread", "-ldl"]
    build = ["c++", str(source), *parts, *options, "-o", str(program)]
    subprocess.run(build, check=True, timeout=120)
    said = subprocess.run([program], check=True, timeout=60, capture_output=True, text=True).stdout
    assert said == "took 1 refused 1 untouched 1 ended 2 left_behind 0\n"
