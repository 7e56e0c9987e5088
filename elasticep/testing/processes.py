"""Other processes, as a test sees them."""

import os
import signal
from contextlib import suppress
from pathlib import Path

from elasticep.testing.small import until


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    return any(state not in "ZX" for state in _states(pid))


def descriptors(pid: int) -> list[str]:
    """What each descriptor of a process refers to, as proc(5) has it; one may be closed meanwhile.

    Raises:
        FileNotFoundError: there is no such process.
    """
    held = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            held.append(os.readlink(path))
    return held


def stop(pid: int) -> None:
    """SIGSTOP, and wait until no thread of the process runs.

    The signal alone leaves all of them running until the one that is to take it is scheduled, which
    on a busy machine is long enough to answer a request.

    Raises:
        ProcessLookupError: there is no such process.
        TimeoutError: it runs after a minute.
    """
    os.kill(pid, signal.SIGSTOP)
    until(lambda: all(state in "TtZX" for state in _states(pid)), f"process {pid} to stop")


def _states(pid: int) -> list[str]:
    """Of each thread, as proc(5) has it; empty when there is no such process."""
    found = []
    for stat in Path("/proc").glob(f"{pid}/task/[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # this thread has ended
            found.append(stat.read_text().rpartition(")")[2].split()[0])
    return found
