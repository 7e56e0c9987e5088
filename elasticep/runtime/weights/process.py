"""The mover's process as the daemon sees it: started when needed, heard, watched, replaced."""

import asyncio
import contextlib
import dataclasses
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from structlog.typing import FilteringBoundLogger

from elasticep.config import DaemonConfig
from elasticep.runtime.limits import Limits
from elasticep.runtime.liveness.process import Process
from elasticep.runtime.weights import messages
from elasticep.runtime.weights.metrics import WeightsMetrics
from elasticep.runtime.weights.mover import TLS_VARIABLE

_RESTART_S: Final = 0.1
_RESTART_MAX_S: Final = 5.0
_WATCH_S: Final = 0.25
_CLOSE_S: Final = 2.0  # for a killed one to be gone; one that the kernel holds is left behind
_PACKETS: Final = 32  # read before others get their turn
STARTS: Final = 5
"""Movers in a row that may end without copying before whoever waits is told."""


@dataclass(frozen=True, slots=True)
class Told:
    """What the owner of a mover is told.

    Attributes:
        began: a mover runs and has not been told anything yet.
        heard: it said this.
        ended: it is gone; how.
        hopeless: nothing will be copied for a while, and why: movers end one after the other, or
            one was killed and does not go away.
        doing: what it does, for an event when it hangs; "" for nothing.
        patience: how many times longer than usual it may be silent, for what it does.
    """

    began: Callable[[], None]
    heard: Callable[[messages.Message], None]
    ended: Callable[[str], None]
    hopeless: Callable[[str], None]
    doing: Callable[[], str]
    patience: Callable[[], float]


class MoverProcess:
    """At most one mover at a time.

    Args:
        config: the daemon's section: rate, TLS, and the directory that names the process.
        limits: `mover_stall_s`, `worker_start_s`.
        log: events.
        metrics: its ends are counted there.
        told: see `Told`.
    """

    def __init__(
        self,
        config: DaemonConfig,
        limits: Limits,
        log: FilteringBoundLogger,
        metrics: WeightsMetrics,
        told: Told,
    ) -> None:
        self._config = config
        self._stall_s = limits.mover_stall_s
        self._start_s = max(limits.worker_start_s, limits.mover_stall_s)
        self._log = log
        self._metrics = metrics
        self._told = told
        self._process: Process | None = None
        self._sock: socket.socket | None = None
        self._heard = 0.0
        self._said = False  # whether the present one was ever heard of
        self._killed = 0.0  # when it was last killed
        self._failed_starts = 0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        metrics.mover_age.set_function(self._age)

    @property
    def pid(self) -> int:
        """Of the mover; 0 when none runs."""
        return 0 if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        """Whether there is one that can be told something."""
        return self._sock is not None

    def want(self) -> None:
        """Have one started, if none runs or is about to."""
        if not self._closed and self._process is None and self._timer is None:
            self._start()

    def send(self, message: messages.Message, fds: tuple[int, ...] = ()) -> bool:
        """Say something; False when it cannot be said now.

        Raises:
            BadMoverMessage: it is too long.
        """
        data = messages.pack(message)
        if self._sock is None:
            return False
        try:
            socket.send_fds(self._sock, [data], list(fds))
        except BlockingIOError:  # it takes its orders at once: it is stopped, and will be found so
            return False
        except OSError:
            return False  # its end is on the way
        return True

    def worked(self) -> None:
        """It did something: its start was no failure."""
        self._failed_starts = 0

    def _readable(self) -> None:
        assert self._sock is not None
        for _ in range(_PACKETS):
            try:
                data = self._sock.recv(messages.MAX_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                return  # the process's end says the rest
            self._heard, self._said = time.monotonic(), True
            try:
                self._told.heard(messages.unpack(data))
            except messages.BadMoverMessage as error:
                self._log.error("weights.mover_message", error=str(error))

    # ---- its life

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        label = f"{self._config.socket_dir}/"  # names its daemon in process listings
        environment = {**os.environ, TLS_VARIABLE: json.dumps(dataclasses.asdict(self._config.tls))}
        for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS"):
            environment.pop(name, None)
        with theirs:
            try:
                child = subprocess.Popen(
                    [sys.executable, "-m", "elasticep.runtime.weights.mover",
                     str(theirs.fileno()), str(self._config.weights_rate), label],
                    pass_fds=(theirs.fileno(),),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )  # fmt: skip
            except OSError as error:
                ours.close()
                self._log.error("weights.mover_not_started", error=error.strerror)
                self._again()
                return
        ours.setblocking(False)
        self._sock, self._process = ours, Process.open(child.pid, child)
        self._process.watch(self._exited)
        asyncio.get_running_loop().add_reader(ours, self._readable)
        self._heard, self._said, self._killed = time.monotonic(), False, 0.0
        self._log.info("weights.mover_started", pid=child.pid)
        self._watch()
        self._told.began()

    def _watch(self) -> None:
        """Look now and then whether it still does something."""
        process = self._process
        if process is None or self._closed:
            return
        asyncio.get_running_loop().call_later(_WATCH_S, self._look, process)

    def _look(self, process: Process) -> None:
        if process is not self._process or self._closed:
            return
        now = time.monotonic()
        age_s = now - self._heard
        limit_s = self._stall_s * self._told.patience() if self._said else self._start_s
        if self._killed:
            if now - self._killed > self._stall_s:
                # It is in the kernel, which waits for a device or a file server.
                text = f"the mover {process.pid} was killed and does not go away"
                self._log.error("weights.mover_unkillable", pid=process.pid)
                self._killed = now
                self._told.hopeless(text)
        elif age_s > limit_s:
            doing = self._told.doing() or None
            self._log.error(
                "weights.mover_stuck", pid=process.pid, silent_s=round(age_s, 3), source=doing
            )
            self._metrics.mover_restarts.labels("stuck").inc()
            self._killed = now
            process.kill()
        self._watch()

    def _age(self) -> float:
        return 0.0 if self._process is None else time.monotonic() - self._heard

    def _exited(self, process: Process) -> None:
        self._readable()  # what it said last
        assert self._sock is not None
        asyncio.get_running_loop().remove_reader(self._sock)
        self._sock.close()
        self._sock = self._process = None
        self._log.warning("weights.mover_ended", pid=process.pid, how=process.how)
        self._metrics.mover_restarts.labels("ended").inc()
        self._told.ended(process.how)
        if self._failed_starts >= STARTS:
            self._told.hopeless(f"{STARTS} movers in a row ended without copying: {process.how}")
        self._again()

    def _again(self) -> None:
        if self._closed:
            return
        pause_s = min(_RESTART_S * 2**self._failed_starts, _RESTART_MAX_S)
        if not self._failed_starts:
            pause_s = 0.0
        self._failed_starts += 1

        def start() -> None:
            self._timer = None
            self.want()

        self._timer = asyncio.get_running_loop().call_later(pause_s, start)

    def close(self) -> None:
        """End it."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(ChildProcessError, ProcessLookupError):
                _reap(self._process.pid)
            self._process.close()
            self._process = None
        if self._sock is not None:
            asyncio.get_running_loop().remove_reader(self._sock)
            self._sock.close()
            self._sock = None


def _reap(pid: int) -> None:
    fd = os.pidfd_open(pid)
    try:
        select.select([fd], [], [], _CLOSE_S)
    finally:
        os.close(fd)
    os.waitpid(pid, os.WNOHANG)
