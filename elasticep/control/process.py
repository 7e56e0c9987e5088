"""Which process holds something, so that another on the same host can tell that it is gone."""

import os
from pathlib import Path


def identity(pid: int | None = None) -> str:
    """A name for a process that no other one ever has: boot, pid namespace, pid, start time."""
    number = os.getpid() if pid is None else pid
    return f"{_place()}:{number}:{_started(number)}"


def is_local(name: str) -> bool:
    """Whether a process of this name would be seen from here."""
    place = _place()
    return bool(place) and name.rpartition(":")[0].rpartition(":")[0] == place


def is_gone(name: str) -> bool:
    """Whether the process of this name is certainly gone. False for other hosts, for "", and for
    one of another user that is hidden from this one (systemd's ProtectProc, hidepid).
    """
    if not is_local(name):
        return False
    _, pid, started = name.rsplit(":", 2)
    if not pid.isdigit():
        return True
    seen = _started(int(pid))
    return seen != started and (bool(seen) or not _is_hidden(int(pid)))


def _is_hidden(pid: int) -> bool:
    """Whether there is such a process, and /proc does not show it."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return False  # of this user, so it would be shown: it is a zombie


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""  # without /proc nothing is known of anybody


def _started(pid: int) -> str:
    """Start time in clock ticks since boot; empty: there is no such process, or a zombie."""
    try:
        # The name in parentheses may hold anything; state is the 3rd field, start time the 22nd.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
