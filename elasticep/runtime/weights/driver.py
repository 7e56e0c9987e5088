"""The daemon's side of the mover: starts it, hands it arenas and copies, and notices when it dies
or hangs. Copying is thus outside the daemon's process, and nothing that it does can delay the loop.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from structlog.typing import FilteringBoundLogger

from elasticep.config import DaemonConfig
from elasticep.errors import ElasticEPError
from elasticep.runtime.limits import Limits
from elasticep.runtime.liveness.process import Process
from elasticep.runtime.weights import messages
from elasticep.runtime.weights.memory import ArenaMemory, Target
from elasticep.runtime.weights.messages import (
    Cancel,
    Copy,
    Drop,
    Ended,
    Failure,
    Moved,
    Source,
    Started,
    Use,
)
from elasticep.runtime.weights.metrics import WeightsMetrics
from elasticep.runtime.weights.mover import TLS_VARIABLE
from elasticep.weights import ArenaLayout

_DEPTH: Final = 8  # copies that the mover knows of: enough that it never waits for the daemon
_RESTART_S: Final = 0.1
_RESTART_MAX_S: Final = 5.0
_WATCH_S: Final = 0.25
_STARTS: Final = 5


class CopyFailed(ElasticEPError):
    """A copy did not come about.

    Attributes:
        failure: in which way.
    """

    reason = "COPY_FAILED"

    def __init__(self, failure: Failure, text: str) -> None:
        super().__init__(text)
        self.failure = failure


@dataclass(slots=True, eq=False)
class _Job:
    memory: ArenaMemory
    copy: Copy
    future: "asyncio.Future[bytes]"
    moved: Callable[[int], None]
    sent: bool = False
    done: int = 0


@dataclass(slots=True)
class _Lent:
    """An arena that the mover has."""

    memory: ArenaMemory | None  # None: a peer's, of which only the descriptor is here
    fd: int
    use: Use
    sent: bool = field(default=False)


class MoverDriver:
    """One node's mover. Nothing runs until an arena is lent to it.

    Args:
        config: the daemon's section: rate, TLS, and the directory that names the process.
        limits: `mover_stall_s`.
        log: events.
        metrics: of all that concerns weights on this node.
    """

    def __init__(
        self,
        config: DaemonConfig,
        limits: Limits,
        log: FilteringBoundLogger,
        metrics: WeightsMetrics,
    ) -> None:
        self._config = config
        self._stall_s = limits.mover_stall_s
        self._start_s = max(limits.worker_start_s, limits.mover_stall_s)
        self._log = log
        self.metrics = metrics
        self._process: Process | None = None
        self._sock: socket.socket | None = None
        self._arenas: dict[int, _Lent] = {}
        self._numbers: dict[tuple[int, int], int] = {}  # identity -> arena number
        self._waiting: deque[_Job] = deque()
        self._running: dict[int, _Job] = {}  # in the order in which they were sent
        self._next = 1
        self._active = 0
        self._heard = 0.0
        self._said = False  # whether the present mover was ever heard of
        self._failed_starts = 0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.metrics.mover_age.set_function(self._age)

    @property
    def pid(self) -> int:
        """Of the mover; 0 when none runs."""
        return 0 if self._process is None else self._process.pid

    # ---- arenas

    def lend(self, memory: ArenaMemory) -> int:
        """Let the mover write into an arena of this node; its number."""
        return self._lend(memory, memory.fd, memory.layout, write=True)

    def lend_peer(self, fd: int, layout: ArenaLayout) -> int:
        """Let it read a peer's arena; its number. `fd` is taken over."""
        return self._lend(None, fd, layout, write=False)

    def _lend(
        self, memory: ArenaMemory | None, fd: int, layout: ArenaLayout, *, write: bool
    ) -> int:
        number, self._next = self._next, self._next + 1
        use = Use(number, layout.layers, layout.slots, layout.spec.to_dict(), write)
        self._arenas[number] = _Lent(memory, fd, use)
        if memory is not None:
            self._numbers[memory.identity] = number
        self._pump()
        return number

    def take_back(self, number: int) -> None:
        """The mover lets go of an arena."""
        lent = self._arenas.pop(number, None)
        if lent is None:
            return
        if lent.memory is None:
            os.close(lent.fd)
        else:
            self._numbers.pop(lent.memory.identity, None)
        if lent.sent:
            self._send(Drop(number))

    def give_up(self, memory: ArenaMemory) -> None:
        """Nobody writes into an arena of this node any more; it is about to be closed."""
        number = self._numbers.get(memory.identity)
        if number is not None:
            self.take_back(number)

    def filling(self, memory: ArenaMemory) -> int:
        """Slots of an arena that are to be filled, or are."""
        jobs = (*self._waiting, *self._running.values())
        return sum(entry.memory is memory for entry in jobs)

    def number_of(self, memory: ArenaMemory) -> int:
        """The number under which an arena of this node was lent."""
        return self._numbers[memory.identity]

    # ---- copies

    async def copy(
        self,
        target: Target,
        checksum: bytes,
        source: Source,
        *,
        urgent: bool,
        moved: Callable[[int], None] = lambda _: None,
    ) -> bytes:
        """Put a unit into a slot; returns its checksum when it lies there, verified.

        The slot holds nothing from now on until then. When the caller is cancelled the copy is
        called off; a copy into the same slot that follows waits for it.

        Args:
            target: what goes where.
            checksum: what it must sum up to; b"": not known.
            source: from where.
            urgent: beyond the rate limit.
            moved: called with bytes as they arrive.

        Raises:
            CopyFailed: it did not come about; the slot is empty.
        """
        memory, layer, slot, expert = target.memory, target.layer, target.slot, target.expert
        job, self._next = self._next, self._next + 1
        copy = Copy(
            job, self.number_of(memory), layer, slot, expert, checksum.hex(), source, urgent
        )
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        entry = _Job(memory, copy, future, moved)
        memory.forget(layer, slot)
        self._waiting.append(entry)
        self._pump()
        try:
            return await future
        except asyncio.CancelledError:
            self.cancel(entry)
            raise

    def cancel(self, entry: _Job) -> None:
        """Call a copy off."""
        if entry in self._waiting:
            self._waiting.remove(entry)
            entry.memory.read_label(entry.copy.layer, entry.copy.slot)  # nothing was changed
        elif entry.copy.job in self._running:
            self._send(Cancel(entry.copy.job))

    def cancel_from(self, dead: Callable[[Source], bool]) -> None:
        """Call off copies out of sources that are dead now: `CopyFailed` says they are gone."""
        for entry in [*self._waiting, *self._running.values()]:
            if dead(entry.copy.source) and not entry.future.done():
                self.cancel(entry)
                text = f"{entry.copy.source} died while it was copied from"
                entry.future.set_exception(CopyFailed(Failure.GONE, text))

    def _pump(self) -> None:
        """Send what the mover has room for; start it if it is needed."""
        if self._closed:
            return
        if self._sock is None:
            if self._timer is None:
                self._start()
            return
        for lent in self._arenas.values():
            if not lent.sent and self._send(lent.use, (lent.fd,)):
                lent.sent = True
        while self._waiting and len(self._running) < _DEPTH:
            entry = self._waiting[0]
            if not self._send(entry.copy):
                return
            self._waiting.popleft()
            entry.sent = True
            self._running[entry.copy.job] = entry

    def _send(self, message: messages.Message, fds: tuple[int, ...] = ()) -> bool:
        if self._sock is None:
            return False
        try:
            socket.send_fds(self._sock, [messages.pack(message)], list(fds))
        except BlockingIOError:  # it takes its orders at once: it is stopped, and will be found so
            return False
        except OSError:
            return False  # its end is on the way
        return True

    # ---- what it says

    def _readable(self) -> None:
        assert self._sock is not None
        for _ in range(4 * _DEPTH):
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
                self._take(messages.unpack(data))
            except messages.BadMoverMessage as error:
                self._log.error("weights.mover_message", error=str(error))

    def _take(self, message: messages.Message) -> None:
        match message:
            case Started():
                self._active = message.job
            case Moved():
                entry = self._running.get(message.job)
                if entry is not None:
                    self._count(entry, message.done)
            case Ended():
                self._failed_starts = 0
                self._end(message)
        self._pump()

    def _count(self, entry: _Job, done: int) -> None:
        more, entry.done = done - entry.done, done
        if more > 0:
            self.metrics.bytes.labels(entry.copy.source.kind.value).inc(more)
            entry.moved(more)

    def _end(self, ended: Ended) -> None:
        entry = self._running.pop(ended.job, None)
        self._active = 0
        if entry is None:
            return
        self._count(entry, ended.done)
        copy = entry.copy
        if ended.failure:
            self._fail(entry, CopyFailed(Failure(ended.failure), ended.text))
            return
        if copy.expert >= 0:
            entry.memory.note(copy.layer, copy.slot, copy.expert, bytes.fromhex(ended.checksum))
        if not entry.future.done():
            entry.future.set_result(bytes.fromhex(ended.checksum))

    def _fail(self, entry: _Job, error: CopyFailed) -> None:
        if error.failure is not Failure.CANCELLED:
            kind = entry.copy.source.kind.value
            self.metrics.failures.labels(kind, error.failure.value).inc()
        if not entry.future.done():
            entry.future.set_exception(error)

    # ---- the process

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
        self._heard, self._said = time.monotonic(), False
        self._log.info("weights.mover_started", pid=child.pid)
        self._watch()
        self._pump()

    def _watch(self) -> None:
        """Look now and then whether it still does something."""
        process = self._process
        if process is None or self._closed:
            return
        age_s = self._age()
        if age_s > (self._stall_s if self._said else self._start_s):
            entry = self._running.get(self._active)
            self._log.error(
                "weights.mover_stuck",
                pid=process.pid,
                silent_s=round(age_s, 3),
                source=str(entry.copy.source) if entry is not None else None,
            )
            self.metrics.mover_restarts.labels("stuck").inc()
            process.kill()
            return
        asyncio.get_running_loop().call_later(_WATCH_S, self._watch)

    def _age(self) -> float:
        return 0.0 if self._process is None else time.monotonic() - self._heard

    def _exited(self, process: Process) -> None:
        self._readable()  # what it said last
        assert self._sock is not None
        asyncio.get_running_loop().remove_reader(self._sock)
        self._sock.close()
        self._sock = self._process = None
        self._log.warning("weights.mover_ended", pid=process.pid, how=process.how)
        self.metrics.mover_restarts.labels("ended").inc()
        for lent in self._arenas.values():
            lent.sent = False
        # Only what it had begun may have been its end; the others are sent to the next one.
        entry = self._running.pop(self._active, None)
        again = [other for other in self._running.values() if not other.future.done()]
        self._running.clear()
        self._active = 0
        for other in again:
            other.sent, other.done = False, 0
        self._waiting.extendleft(reversed(again))
        if entry is not None:
            text = f"the mover ended while it copied from {entry.copy.source}: {process.how}"
            self._fail(entry, CopyFailed(Failure.MOVER, text))
        if self._failed_starts >= _STARTS:
            self._fail_all(f"{_STARTS} movers in a row ended without copying: {process.how}")
        self._again()

    def _fail_all(self, text: str) -> None:
        """Nothing can be copied; whoever waits hears of it, and may ask again."""
        waiting = list(self._waiting)
        self._waiting.clear()
        for entry in waiting:
            self._fail(entry, CopyFailed(Failure.MOVER, text))

    def _again(self) -> None:
        if self._closed:
            return
        pause_s = min(_RESTART_S * 2**self._failed_starts, _RESTART_MAX_S)
        if not self._failed_starts:
            pause_s = 0.0
        self._failed_starts += 1

        def start() -> None:
            self._timer = None
            self._pump()

        self._timer = asyncio.get_running_loop().call_later(pause_s, start)

    def close(self) -> None:
        """End the mover; arenas are not touched."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._process.pid, 0)
            self._process.close()
            self._process = None
        if self._sock is not None:
            asyncio.get_running_loop().remove_reader(self._sock)
            self._sock.close()
            self._sock = None
        for number in list(self._arenas):
            self.take_back(number)
