"""Processes by pidfd: told when they exit, killed without a race on the pid."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

_STARTTIME_FIELD = 19  # of /proc/<pid>/stat behind the command's name: field 22 there


def start_time(pid: int) -> int:
    """Ticks after boot at which the process started, 0 when it is gone: pid and this name one
    process for good.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    return int(stat.rpartition(b")")[2].split()[_STARTTIME_FIELD])


class Process:
    """A worker or an engine.

    Args:
        pid: process id in this process's namespace.
        pidfd: owned from now on.
        child: set when this daemon started it, so that it can be reaped.
    """

    def __init__(
        self, pid: int, pidfd: int, child: "subprocess.Popen[bytes] | None" = None
    ) -> None:
        self.pid = pid
        self.started = start_time(pid)
        self.exited = False
        self.how = ""
        self._pidfd = pidfd
        self._child = child
        self._on_exit: Callable[[Process], None] | None = None

    @classmethod
    def open(cls, pid: int, child: "subprocess.Popen[bytes] | None" = None) -> "Process":
        """By pid. Raises `ProcessLookupError` when it is gone."""
        return cls(pid, os.pidfd_open(pid), child)

    @classmethod
    def find(cls, pid: int, started: int) -> "Process | None":
        """The process with this pid and start time, or None when it is gone."""
        try:
            process = cls.open(pid)
        except OSError:
            return None
        if process.started != started or not started:
            process.close()
            return None
        return process

    def watch(self, on_exit: "Callable[[Process], None]") -> None:
        """Call once, on the event loop, when the process is gone with all its threads."""
        self._on_exit = on_exit
        asyncio.get_running_loop().add_reader(self._pidfd, self._gone)

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal; False when the process is gone."""
        if self._pidfd < 0:
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL, which a stopped process cannot put off either."""
        self.signal(signal.SIGKILL)

    def close(self) -> None:
        """Forget the process; it is not touched."""
        if self._pidfd < 0:
            return
        with contextlib.suppress(RuntimeError):  # no loop runs any more
            asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        if self._child is not None and not self.exited:
            self._child.returncode = 0  # it is meant to live on: not a forgotten child

    def _gone(self) -> None:
        self.exited = True
        if self._child is not None:
            self.how = _how(self._child.wait())
        self.close()
        if self._on_exit is not None:
            self._on_exit(self)


def _how(returncode: int) -> str:
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    return f"exit status {returncode}"
