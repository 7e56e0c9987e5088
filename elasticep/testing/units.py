"""Processes kept the way systemd keeps services: readiness, restarts, a store for descriptors.

A daemon's regions outlive the daemon because their descriptors lie with the service manager
(`FDSTORE=1` over `NOTIFY_SOCKET`, given back as `LISTEN_FDS`). Where there is no systemd (the demo,
tests, containers) `Unit` does that part. See sd_notify(3) and sd_listen_fds(3) for the protocol.
"""

import array
import ctypes
import fcntl
import os
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from elasticep.errors import ConfigError

FIRST_PASSED_FD: Final = 3
MAX_STORED_FDS: Final = 4096
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_MAX_MESSAGE_BYTES: Final = 4096
_FDS_PER_MESSAGE: Final = 253  # SCM_MAX_FD
_LOG_TAIL_BYTES: Final = 3000
# More starts than this within the window, and a unit is given up, as systemd does.
_START_LIMIT: Final = 5
_START_WINDOW_S: Final = 10.0


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise ConfigError(f"prctl({option}) failed: {os.strerror(ctypes.get_errno())}")


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send `number` to this process when its parent's thread ends.

    Args:
        parent: process id of the parent; if it is gone already, this process ends at once.
        number: the signal.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(pid: int) -> list[int]:
    """Process ids of all living descendants of `pid`, children before grandchildren."""
    found: list[int] = []
    todo = [pid]
    while todo:
        for task in _tasks(todo.pop(0)):
            with suppress(OSError):
                children = [int(child) for child in (task / "children").read_text().split()]
                found += children
                todo += children
    return found


def _tasks(pid: int) -> list[Path]:
    with suppress(OSError):
        return list(Path(f"/proc/{pid}/task").iterdir())
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    """What to run.

    Attributes:
        name: in events, and of the log file.
        argv: the command, argv[0] an absolute path.
        env: added to this process's environment.
        restart: whether to start it again when it ends.
        log: file that gets its standard output and error.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    restart: bool = True
    log: Path


class Unit:
    """One supervised process.

    Args:
        spec: what to run.
        notify_path: where its `NOTIFY_SOCKET` shall lie.
    """

    def __init__(self, spec: UnitSpec, notify_path: Path) -> None:
        self.spec = spec
        self.pid = 0
        self.pidfd = -1
        self.ready = False
        self.stopping = False
        self._starts: list[float] = []
        self._stored: list[tuple[str, int]] = []
        self._notify_path = str(notify_path)
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.notify.bind(self._notify_path)

    @property
    def stored(self) -> tuple[str, ...]:
        """Names of the descriptors in the store, oldest first."""
        return tuple(name for name, _ in self._stored)

    def may_start(self, now: float) -> bool:
        """Whether the start limit leaves room for another start."""
        return sum(now - at < _START_WINDOW_S for at in self._starts) < _START_LIMIT

    def start(self) -> None:
        """Fork and execute. The child dies with this process."""
        self._starts.append(time.monotonic())
        self.ready = False
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._become(parent)
            except BaseException as error:  # nothing may run on in the child
                os.write(2, f"{self.spec.argv[0]}: {error}\n".encode())
            finally:
                os._exit(127)
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)

    def _become(self, parent: int) -> None:
        os.setsid()
        die_with_parent(parent)
        log = os.open(self.spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for number, source in enumerate((null, log, log)):
            os.dup2(source, number)
        env = {**os.environ, **self.spec.env, "NOTIFY_SOCKET": self._notify_path}
        env |= self._pass_stored()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.execve(self.spec.argv[0], self.spec.argv, env)  # noqa: S606

    def _pass_stored(self) -> dict[str, str]:
        if not self._stored:
            return {}
        # Out of the way first: a target number may be the source of another one.
        above = FIRST_PASSED_FD + len(self._stored)
        moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for _, fd in self._stored]
        for offset, fd in enumerate(moved):
            os.dup2(fd, FIRST_PASSED_FD + offset, inheritable=True)
        return {
            "LISTEN_PID": str(os.getpid()),
            "LISTEN_FDS": str(len(moved)),
            "LISTEN_FDNAMES": ":".join(self.stored),
        }

    def signal(self, number: int) -> bool:
        """Send a signal; False if it does not run."""
        if self.pidfd < 0:
            return False
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)
            return True
        return False

    def reap(self) -> int:
        """Take the exit status of a process that ended: >= 0, or minus a signal's number."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        self.pid, self.pidfd, self.ready = 0, -1, False
        return os.waitstatus_to_exitcode(status)

    def read_notify(self) -> bool:
        """Handle what the process told its manager; True when it just became ready."""
        became_ready = False
        while True:
            fds = array.array("i")
            try:
                data, ancillary, _, _ = self.notify.recvmsg(
                    _MAX_MESSAGE_BYTES,
                    socket.CMSG_LEN(_FDS_PER_MESSAGE * fds.itemsize),
                    socket.MSG_CMSG_CLOEXEC,
                )
            except BlockingIOError:
                return became_ready
            for level, kind, content in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds.frombytes(content[: len(content) // fds.itemsize * fds.itemsize])
            lines = data.decode("utf-8", "replace").splitlines()
            fields = dict(line.split("=", 1) for line in lines if "=" in line)
            name = fields.get("FDNAME", "stored")
            if fields.get("FDSTOREREMOVE") == "1":
                self._forget(name)
            self._keep(name, list(fds), wanted=fields.get("FDSTORE") == "1")
            if fields.get("READY") == "1" and not self.ready:
                self.ready = became_ready = True

    def _keep(self, name: str, fds: list[int], *, wanted: bool) -> None:
        known = {(held, os.fstat(fd).st_ino) for held, fd in self._stored}
        for fd in fds:
            full = len(self._stored) >= MAX_STORED_FDS
            if not wanted or full or (name, os.fstat(fd).st_ino) in known:
                os.close(fd)
            else:
                self._stored.append((name, fd))

    def _forget(self, name: str) -> None:
        for held, fd in self._stored:
            if held == name:
                os.close(fd)
        self._stored = [(held, fd) for held, fd in self._stored if held != name]

    def log_tail(self) -> str:
        """The end of what the process printed."""
        with suppress(OSError):
            return self.spec.log.read_bytes()[-_LOG_TAIL_BYTES:].decode("utf-8", "replace")
        return ""

    def close(self) -> None:
        """Empty the store and remove the notification socket. The process must be reaped."""
        for _, fd in self._stored:
            os.close(fd)
        self._stored.clear()
        self.notify.close()
        with suppress(FileNotFoundError):
            os.unlink(self._notify_path)
