"""The daemon's side of the mover: hands it arenas and copies. Copying is outside the daemon's
process, so that nothing that it does delays the loop.

Copies are sent a few at a time, urgent ones first, and in turn for each arena, so that no seat
waits for all of another's. Into one slot there is one copy at a time: what is to follow is sent
when the one before has ended.
"""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from structlog.typing import FilteringBoundLogger

from elasticep.config import DaemonConfig
from elasticep.errors import ElasticEPError
from elasticep.runtime.limits import Limits
from elasticep.runtime.weights import messages
from elasticep.runtime.weights.memory import ArenaMemory, Target
from elasticep.runtime.weights.messages import (
    MAX_TEXT,
    Cancel,
    Copy,
    Drop,
    Ended,
    Failure,
    Hurry,
    Kind,
    Moved,
    Source,
    Started,
    Use,
    Used,
)
from elasticep.runtime.weights.metrics import WeightsMetrics
from elasticep.runtime.weights.process import MoverProcess, Told
from elasticep.weights import ArenaLayout

_DEPTH: Final = 6  # copies that the mover knows of: enough that it never waits for the daemon
_PACED: Final = 3  # of these that are held back: what is urgent always finds room
_COLD: Final = 4.0  # times as long may a read from disk be silent: an index, a cold file


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
    urgent: bool
    future: "asyncio.Future[bytes]"
    moved: Callable[[int], None]
    done: int = 0

    @property
    def place(self) -> tuple[int, int, int]:
        """The slot."""
        return self.copy.arena, self.copy.layer, self.copy.slot


@dataclass(slots=True)
class _Lent:
    """An arena that the mover has."""

    memory: ArenaMemory | None  # None: a peer's, of which only the descriptor is here
    fd: int
    use: Use
    used: Callable[[], None]
    sent: bool = field(default=False)


class MoverDriver:
    """One node's mover. Nothing runs until an arena is lent to it.

    Args:
        config: the daemon's section: rate, TLS, and the directory that names the process.
        limits: `mover_stall_s`.
        log: events.
        metrics: of all that concerns weights on this node.

    Attributes:
        headway: grows with everything that is copied on this node.
    """

    def __init__(
        self,
        config: DaemonConfig,
        limits: Limits,
        log: FilteringBoundLogger,
        metrics: WeightsMetrics,
    ) -> None:
        self._log = log
        self.metrics = metrics
        self.headway = 0
        self._arenas: dict[int, _Lent] = {}
        self._numbers: dict[tuple[int, int], int] = {}  # identity -> arena number
        self._waiting: dict[int, _Job] = {}  # by number, which grows
        self._running: dict[int, _Job] = {}  # in the order in which they were sent
        self._unsaid: list[messages.Message] = []
        self._next = 1
        self._active = 0
        self._turn = 0
        self._served: dict[int, int] = {}  # arena -> when a copy was last sent for it
        self._closed = False
        told = Told(
            began=self._began,
            heard=self._take,
            ended=self._ended,
            hopeless=self._fail_all,
            doing=lambda: str(self._now.copy.source) if self._now is not None else "",
            patience=self._patience,
        )
        self._process = MoverProcess(config, limits, log, metrics, told)

    @property
    def pid(self) -> int:
        """Of the mover; 0 when none runs."""
        return self._process.pid

    @property
    def _now(self) -> _Job | None:
        """The job that is being worked on."""
        return self._running.get(self._active)

    def _patience(self) -> float:
        cold = self._now is not None and self._now.copy.source.kind is Kind.CHECKPOINT
        return _COLD if cold else 1.0

    # ---- arenas

    def lend(self, memory: ArenaMemory, used: Callable[[], None] = lambda: None) -> int:
        """Let the mover write into an arena of this node; its number.

        Args:
            memory: the arena.
            used: called when a mover has it, and no other process writes into it any more.
        """
        return self._lend(memory, memory.fd, memory.layout, used, write=True)

    def lend_peer(self, fd: int, layout: ArenaLayout) -> int:
        """Let it read a peer's arena; its number. `fd` is taken over."""
        return self._lend(None, fd, layout, lambda: None, write=False)

    def _lend(
        self,
        memory: ArenaMemory | None,
        fd: int,
        layout: ArenaLayout,
        used: Callable[[], None],
        *,
        write: bool,
    ) -> int:
        number, self._next = self._next, self._next + 1
        use = Use(number, layout.layers, layout.slots, layout.spec.to_dict(), write)
        self._arenas[number] = _Lent(memory, fd, use, used)
        if memory is not None:
            self._numbers[memory.identity] = number
        self._pump()
        return number

    def take_back(self, number: int) -> None:
        """The mover lets go of an arena."""
        lent = self._arenas.pop(number, None)
        if lent is None:
            return
        self._served.pop(number, None)
        if lent.memory is None:
            os.close(lent.fd)
        else:
            self._numbers.pop(lent.memory.identity, None)
        if lent.sent:
            self._say(Drop(number))

    def give_up(self, memory: ArenaMemory) -> None:
        """Nobody writes into an arena of this node any more; it is about to be closed."""
        number = self._numbers.get(memory.identity)
        if number is not None:
            self.take_back(number)

    def places(self, memory: ArenaMemory) -> set[tuple[int, int]]:
        """(layer, slot) of an arena that are to be filled, or are."""
        jobs = (*self._waiting.values(), *self._running.values())
        return {entry.place[1:] for entry in jobs if entry.memory is memory}

    def filling(self, memory: ArenaMemory) -> int:
        """Slots of an arena that are to be filled, or are."""
        return len(self.places(memory))

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
        if memory.closed or memory.identity not in self._numbers:
            raise CopyFailed(Failure.CANCELLED, f"the arena of {memory.name} was taken back")
        job, self._next = self._next, self._next + 1
        copy = Copy(
            job, self.number_of(memory), layer, slot, expert, checksum.hex(), source, urgent
        )
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        entry = _Job(memory, copy, urgent, future, moved)
        memory.forget(layer, slot)
        self._waiting[job] = entry
        self._pump()
        try:
            return await future
        except asyncio.CancelledError:
            self._call_off(entry)
            raise

    def hurry(self, target: Target) -> None:
        """What is being put into a slot has become urgent."""
        for entry in (*self._waiting.values(), *self._running.values()):
            same = (entry.memory, *entry.place[1:]) == (target.memory, target.layer, target.slot)
            if same and not entry.urgent:
                entry.urgent = True
                if entry.copy.job in self._running:
                    self._say(Hurry(entry.copy.job))
        self._pump()

    def cancel_from(self, dead: Callable[[Source], bool]) -> None:
        """Call off copies out of sources that are dead now: `CopyFailed` says they are gone."""
        for entry in [*self._waiting.values(), *self._running.values()]:
            if dead(entry.copy.source) and not entry.future.done():
                text = f"{entry.copy.source} died while it was copied from"
                entry.future.set_exception(CopyFailed(Failure.GONE, text))
                self._call_off(entry)

    def _call_off(self, entry: _Job) -> None:
        if self._waiting.pop(entry.copy.job, None) is not None:
            self._settle(entry)  # nothing was changed
        elif entry.copy.job in self._running:
            self._say(Cancel(entry.copy.job))

    def _settle(self, entry: _Job) -> None:
        """What lies in a slot into which nothing is copied any more."""
        others = (*self._waiting.values(), *self._running.values())
        if not entry.memory.closed and all(other.place != entry.place for other in others):
            entry.memory.read_label(entry.copy.layer, entry.copy.slot)

    def _pump(self) -> None:
        """Send what the mover has room for; have it started if it is needed."""
        if self._closed:
            return
        if not self._process.running:
            self._process.want()
            return
        while self._unsaid and self._process.send(self._unsaid[0]):
            self._unsaid.pop(0)
        for lent in self._arenas.values():
            if not lent.sent and self._process.send(lent.use, (lent.fd,)):
                lent.sent = True
        while len(self._running) < _DEPTH and (entry := self._pick()) is not None:
            try:
                if not self._process.send(replace(entry.copy, urgent=entry.urgent)):
                    return
            except messages.BadMoverMessage as error:
                del self._waiting[entry.copy.job]
                self._settle(entry)
                self._fail(entry, CopyFailed(Failure.FAILED, str(error)))
                continue
            del self._waiting[entry.copy.job]
            self._running[entry.copy.job] = entry
            self._turn += 1
            self._served[entry.copy.arena] = self._turn

    def _pick(self) -> _Job | None:
        """The next copy: of the urgent ones if there are any, for the arena that has waited
        longest; into each slot in their order.
        """
        taken = {entry.place for entry in self._running.values()}
        paced = sum(not entry.urgent for entry in self._running.values())
        free: list[_Job] = []
        for entry in self._waiting.values():
            if entry.place not in taken:
                taken.add(entry.place)
                if entry.urgent or paced < _PACED:
                    free.append(entry)
        order = self._served
        return min(
            free, key=lambda entry: (not entry.urgent, order.get(entry.copy.arena, 0)), default=None
        )

    def _say(self, message: messages.Message) -> None:
        """What must not be lost: it is said as soon as it can be, or the mover is gone."""
        if self._process.running:
            self._unsaid.append(message)
            self._pump()

    # ---- what it says

    def _take(self, message: messages.Message) -> None:
        match message:
            case Started():
                self._active = message.job
                if (entry := self._running.get(message.job)) is not None:
                    self._tell("weights.copying", entry)
            case Moved():
                entry = self._running.get(message.job)
                if entry is not None:
                    self._count(entry, message.done)
            case Used():
                lent = self._arenas.get(message.arena)
                if lent is not None:
                    lent.used()
            case Ended():
                self._process.worked()
                self._end(message)
        self._pump()

    def _count(self, entry: _Job, done: int) -> None:
        more, entry.done = done - entry.done, done
        if more > 0:
            self.headway += more
            self.metrics.bytes.labels(entry.copy.source.kind.value).inc(more)
            if not entry.future.done():
                entry.moved(more)

    def _end(self, ended: Ended) -> None:
        entry = self._running.pop(ended.job, None)
        self._active = 0
        if entry is None:
            return
        self._count(entry, ended.done)
        if ended.failure:
            self._fail(entry, CopyFailed(Failure(ended.failure), ended.text[:MAX_TEXT]))
            return
        self._tell("weights.copied", entry)
        checksum = bytes.fromhex(ended.checksum)
        copy, others = entry.copy, (*self._waiting.values(), *self._running.values())
        last = all(other.place != entry.place for other in others)  # else the next one has it
        if copy.expert >= 0 and last and not entry.memory.closed:
            entry.memory.note(copy.layer, copy.slot, copy.expert, checksum)
        if not entry.future.done():
            entry.future.set_result(checksum)

    def _tell(self, event: str, entry: _Job) -> None:
        copy = entry.copy
        self._log.debug(
            event,
            into=entry.memory.name,
            layer=copy.layer,
            expert=copy.expert,
            source=str(copy.source),
            kind=copy.source.kind.value,
        )

    def _fail(self, entry: _Job, error: CopyFailed) -> None:
        if error.failure is not Failure.CANCELLED:
            kind = entry.copy.source.kind.value
            self.metrics.failures.labels(kind, error.failure.value).inc()
        if not entry.future.done():
            entry.future.set_exception(error)

    # ---- its life

    def _began(self) -> None:
        self._unsaid.clear()
        for lent in self._arenas.values():
            lent.sent = False
        self._pump()

    def _ended(self, how: str) -> None:
        # Only what it had begun may have been its end; the others are sent to the next one.
        entry = self._running.pop(self._active, None)
        again = {job: other for job, other in self._running.items() if not other.future.done()}
        self._running.clear()
        self._active = 0
        for other in again.values():
            other.done = 0
        self._waiting = dict(sorted({**self._waiting, **again}.items()))
        if entry is not None:
            text = f"the mover ended while it copied from {entry.copy.source}: {how}"
            self._fail(entry, CopyFailed(Failure.MOVER, text))

    def _fail_all(self, text: str) -> None:
        """Nothing can be copied; whoever waits hears of it, and may ask again."""
        waiting = list(self._waiting.values())
        self._waiting.clear()
        for entry in waiting:
            self._settle(entry)
        for entry in (*waiting, *self._running.values()):
            self._fail(entry, CopyFailed(Failure.MOVER, text))

    def close(self) -> None:
        """End the mover; arenas are not touched."""
        self._closed = True
        self._process.close()
        for number in list(self._arenas):
            self.take_back(number)
