"""Keeps one seat: carries out what the seat's state machine asks for.

The machine (`runtime.seats`) decides; this class owns the memory, the two processes and their
connections, runs the timers, and turns what happens to them into events.
"""

import asyncio
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from elasticep.errors import ElasticEPError, UsageError
from elasticep.native.region import HeaderStatus
from elasticep.native.structs import Holder, Launch, MessageType, Role
from elasticep.proto import controller_pb2, types_pb2
from elasticep.runtime import seats
from elasticep.runtime.allocation import Allocation
from elasticep.runtime.liveness.exits import ExitGate
from elasticep.runtime.liveness.process import Process
from elasticep.runtime.liveness.spawn import spawn_worker
from elasticep.runtime.node import Node, Signal
from elasticep.runtime.regions.keep import KeptProcess, KeptSeat
from elasticep.runtime.regions.memory import SeatMemory
from elasticep.runtime.seats import OVER, Half, SeatState
from elasticep.runtime.start_failure import StartFailure
from elasticep.runtime.transport.connection import Connection
from elasticep.runtime.transport.messages import Message

if TYPE_CHECKING:
    from elasticep.runtime.group import Group

_REPORTED: Final = {
    SeatState.EMPTY: types_pb2.SEAT_STATE_EMPTY,
    SeatState.STARTING: types_pb2.SEAT_STATE_EMPTY,
    SeatState.READY: types_pb2.SEAT_STATE_READY,
    SeatState.ATTACHED: types_pb2.SEAT_STATE_ATTACHED,
    SeatState.ENDING: types_pb2.SEAT_STATE_DEAD,
}
# Causes that are words of a metric; any other is somebody's sentence.
_KNOWN_CAUSES: Final = ("worker died", "engine died", "worker left", "detached")


class SeatKeeper:
    """One rank of one group on this node.

    Attributes:
        seat: the present state; only `apply` changes it.
        memory: header and data, None before the first grant.
        worker, engine: their processes, None when there is none.
        runner_link: connection of whoever runs the kernels.
        engine_link: connection of the engine.
        allocation: who makes the memory, on a GPU.
        failure: why the last start came to nothing.
        changed: notified after every event.
        granted_ns: CLOCK_MONOTONIC of the last grant.
    """

    def __init__(self, node: Node, group: "Group", rank: int, key: int) -> None:
        self.node = node
        self.group = group
        self.rank = rank
        self.key = key
        self.seat = seats.Seat(launch=Launch[group.config.launch.name])
        self.memory: SeatMemory | None = None
        self.worker: Process | None = None
        self.engine: Process | None = None
        self.runner_link: Connection | None = None
        self.engine_link: Connection | None = None
        self.changed = Signal()
        self.granted_ns = 0
        self.reserved_pid = 0
        self.killed_ns = 0  # when a fault was injected
        self.ended_ns = 0  # when the last incarnation was expelled
        self.allocation = Allocation(self)
        self.failure = StartFailure()
        self._gate = ExitGate()
        self._events: deque[seats.Event] = deque()
        self._running = False
        self._held_back = False  # EMPTY is not reported yet: the worker failed to start
        self._timers: set[asyncio.TimerHandle] = set()
        self.log = node.log.bind(group=group.name, rank=rank)

    # ---- events in

    def apply(self, event: seats.Event) -> None:
        """Take one event and carry out what follows; events that this causes come after it.

        Raises:
            UsageError: a grant that cannot be followed.
        """
        self._events.append(event)
        if self._running:
            return
        self._running = True
        try:
            while self._events:
                self._step(self._events.popleft())
        finally:
            self._running = False
            self._events.clear()
        self.changed.notify()
        self.node.save()
        self.group.look()

    def _step(self, event: seats.Event) -> None:
        before = self.seat
        if isinstance(event, seats.Granted) or event.incarnation == before.incarnation:
            self._events.extend(self._gate.follow(event))
        self.seat, effects = seats.advance(before, event)
        if self.seat.state is not before.state:
            self.log.info(
                f"seat.{self.seat.state}",
                incarnation=self.seat.incarnation,
                was=str(before.state),
                cause=self.seat.cause or None,
            )
        for effect in effects:
            if not self._carry_out(effect):
                break  # what failed is an event now

    def _exited(self, holder: Holder, incarnation: int, process: Process) -> None:
        event = seats.Exited(holder, incarnation, process.how)
        inline = self.seat.launch is Launch.INLINE
        locks = frozenset((Holder.RUNNER, Holder.ENGINE) if inline else (holder,))
        if incarnation == self.seat.incarnation and self._gate.hold_back(locks, event):
            self.later(self.node.limits.lock_echo_s, lambda _: self.apply(event), incarnation)
        else:
            self.apply(event)

    def _carry_out(self, effect: seats.Effect) -> bool:
        match effect:
            case seats.Start():
                return self._start(effect.incarnation)
            case seats.Expel():
                self._expel(effect)
            case seats.Report():
                self._report(effect)
            case seats.Kill():
                self.kill(effect.holder)
            case seats.LetGo():
                self._let_go(effect.incarnation)
        return True

    # ---- effects

    def _start(self, incarnation: int) -> bool:
        self._forget_processes()
        self._held_back = False
        self.reserved_pid = 0
        if self.group.weights is not None:
            self.group.weights.open(self)
        try:
            memory = self.memory
            if memory is None and self.group.on_gpu:
                self.granted_ns = time.monotonic_ns()
                self.allocation.start(incarnation)
                return True
            if memory is None:
                memory = self.group.create_memory(self.rank)
                self.take_memory(memory)
            self.granted_ns = time.monotonic_ns()
            memory.header.grant(incarnation)
            if self.seat.launch is Launch.SERVICE:
                self._spawn(incarnation)
        except (ElasticEPError, OSError) as error:
            self._events.append(self.start_failed(error))
            if self.seat.launch is Launch.SERVICE and self.worker is None:
                self._events.append(seats.Exited(Holder.RUNNER, incarnation))
            return False
        return True

    def start_failed(self, error: ElasticEPError | OSError) -> seats.Ended:
        """The present incarnation cannot come up; the event that ends it."""
        ended = self.failure.note(self.seat, error)
        self.log.error("seat.start_failed", incarnation=self.seat.incarnation, error=ended.cause)
        return ended

    def _spawn(self, incarnation: int) -> None:
        ticket = self.node.tickets.issue(self, Role.WORKER, incarnation)
        self.set_process(
            Holder.RUNNER,
            spawn_worker(
                self.node.config.fd_socket,
                ticket,
                f"{self.group.name}/{self.rank}",
                self.node.limits.orphan_after_s,
            ),
        )
        self.node.metrics.workers.inc()
        self.later(self.node.limits.worker_start_s, self._start_over, incarnation)

    def _start_over(self, incarnation: int) -> None:
        if self.seat.state is SeatState.STARTING:
            limit = self.node.limits.worker_start_s
            self.apply(seats.Ended(incarnation, f"the worker was not up within {limit:g} s"))

    def _expel(self, effect: seats.Expel) -> None:
        self.group.mark_dead(self.rank, effect.incarnation)
        if self.memory is not None:
            self.memory.header.fence(effect.incarnation, effect.epoch, effect.cause)
        self.ended_ns = time.monotonic_ns()
        kind = effect.cause if effect.cause in _KNOWN_CAUSES else "ended"
        self.node.metrics.deaths.labels(self.group.name, kind).inc()
        self.log.warning(
            "rank.dead",
            incarnation=effect.incarnation,
            epoch=effect.epoch,
            cause=effect.cause,
        )
        self.node.announce(self.group.name, self.rank, effect.incarnation, effect.cause)

    def _report(self, effect: seats.Report) -> None:
        if effect.backoff and effect.state is SeatState.EMPTY:
            limits = self.node.limits
            wait_s = limits.restart_backoff_s * 2 ** (effect.backoff - 1)
            self._held_back = True
            self.later(
                min(wait_s, limits.restart_backoff_max_s), self._report_empty, self.seat.incarnation
            )
            return
        self.node.send(controller_pb2.NodeMessage(seat=self.message(effect.state)))

    def _report_empty(self, _: int) -> None:
        self._held_back = False
        self.node.send(controller_pb2.NodeMessage(seat=self.message()))

    def kill(self, holder: Holder) -> None:
        """SIGKILL one half, if its process is there."""
        process = self.worker if holder is Holder.RUNNER else self.engine
        if process is not None and not process.exited:
            self.log.info("process.kill", role=holder.name.lower(), pid=process.pid)
            self.node.metrics.killed.labels(holder.name.lower()).inc()
            process.kill()

    def _let_go(self, incarnation: int) -> None:
        if self.engine_link is not None:
            self.engine_link.send(
                Message(kind=MessageType.QUIT, rank=self.rank, text=self.seat.cause)
            )
        if not self.node.stopping:
            self.later(
                self.node.limits.engine_grace_s,
                lambda over: self.apply(seats.GraceOver(over)),
                incarnation,
            )

    # ---- memory, processes, connections

    def take_memory(self, memory: SeatMemory) -> None:
        """Own this memory: watch its locks, let it take dead words, keep it over a restart.

        Raises:
            ConfigError: the watcher has no room for another seat; the memory is closed.
        """
        try:
            self.node.watcher.watch(self.key, self.group.key, memory.header)
        except ElasticEPError:
            memory.close()
            raise
        self.memory = memory
        self.node.watcher.peer_add(self.group.key, memory.header)
        self.node.fd_store.put(self.group.name, self.rank, memory.fds)

    def drop_memory(self) -> None:
        """Let it be freed: this node needs it no more."""
        self.node.fd_store.remove(self.group.name, self.rank)
        self._drop_memory()

    def _drop_memory(self) -> None:
        if self.memory is None:
            return
        self.node.watcher.unwatch(self.key)
        self.node.watcher.peer_remove(self.group.key, self.memory.header)
        self.memory.close()
        self.memory = None

    def set_process(self, holder: Holder, process: Process) -> None:
        """One half's process; its exit becomes an event of the present incarnation."""
        incarnation = self.seat.incarnation
        old = self.worker if holder is Holder.RUNNER else self.engine
        if old is not None:
            old.close()
        if holder is Holder.RUNNER:
            self.worker = process
        else:
            self.engine = process
        process.watch(lambda gone: self._exited(holder, incarnation, gone))

    def _forget_processes(self) -> None:
        for process in (self.worker, self.engine):
            if process is not None:
                process.close()
        self.worker = self.engine = None

    def link(self, connection: Connection, role: Role) -> None:
        """A worker or engine of the present incarnation is connected."""
        runs = role is Role.WORKER or self.seat.launch is Launch.INLINE
        for name, mine in (("runner_link", runs), ("engine_link", role is Role.ENGINE)):
            if not mine:
                continue
            old: Connection | None = getattr(self, name)
            setattr(self, name, connection)
            if old is not None and old is not connection:
                old.close("it connected again")
        if runs:
            self.group.stager.runner_linked(self)
        self.changed.notify()

    def unlink(self, connection: Connection) -> None:
        """A connection is over; who dies is told by locks and processes, not by this."""
        self.node.watcher.look()  # a process's locks are marked before its sockets close
        if self.runner_link is connection:
            self.runner_link = None
        if self.engine_link is connection:
            self.engine_link = None
            self.apply(seats.Disconnected(self.seat.incarnation))

    # ---- questions

    def status(self) -> HeaderStatus | None:
        """What the header says now; None without memory."""
        return None if self.memory is None else self.memory.header.status()

    def message(self, state: SeatState | None = None) -> types_pb2.Seat:
        """The seat as the controller sees it, now or in a state that it has just been in."""
        status = self.status()
        state = state or self.seat.state
        held_back = self._held_back and state is SeatState.EMPTY
        return types_pb2.Seat(
            group=self.group.name,
            rank=self.rank,
            incarnation=self.seat.incarnation,
            state=types_pb2.SEAT_STATE_DEAD if held_back else _REPORTED[state],
            epoch=status.epoch if status is not None and self.seat.live else 0,
            cause=self.seat.cause,
        )

    def kept(self) -> KeptSeat:
        """What the next daemon has to know of this seat."""
        worker, engine = self.worker, self.engine
        return KeptSeat(
            rank=self.rank,
            incarnation=self.seat.incarnation,
            ready=self.seat.state in (SeatState.READY, SeatState.ATTACHED),
            granted_ns=self.granted_ns,
            worker=_kept(worker if self.seat.runner not in OVER else None),
            engine=_kept(engine if self.seat.engine not in OVER else None),
        )

    def free(self, pid: int) -> bool:
        """Whether an engine may take the seat now; `pid` asks."""
        status = self.status()
        return (
            self.seat.state is SeatState.READY
            and self.seat.engine is Half.GONE
            and status is not None
            and status.fenced < self.seat.incarnation
            and not self._reserved_for_another(pid)
            and (self.group.weights is None or self.group.weights.opened(self.rank))
        )

    def taken(self, pid: int) -> bool:
        """Whether another engine has the seat, and does not look as if it were leaving."""
        status = self.status()
        if status is None or status.fenced >= self.seat.incarnation:
            return False
        if self.seat.state is SeatState.ATTACHED:
            return status.engine_pid != 0
        return self.seat.state is SeatState.READY and (
            self.seat.engine is not Half.GONE or self._reserved_for_another(pid)
        )

    def _reserved_for_another(self, pid: int) -> bool:
        mine = self.seat.incarnation
        if self.reserved_pid == pid or not self.node.tickets.outstanding(self, Role.ENGINE, mine):
            return False
        try:
            os.kill(self.reserved_pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def reserve(self, pid: int) -> str:
        """A ticket for the engine that may take the seat."""
        self.reserved_pid = pid
        return self.node.tickets.issue(self, Role.ENGINE, self.seat.incarnation)

    def inject(self, fault: str) -> int:
        """Do harm on purpose; the pid that was hit.

        Raises:
            UsageError: no such fault, or nobody there to take it.
        """
        faults = {
            "kill-worker": (Holder.RUNNER, signal.SIGKILL),
            "kill-engine": (Holder.ENGINE, signal.SIGKILL),
            "stop-worker": (Holder.RUNNER, signal.SIGSTOP),
            "continue-worker": (Holder.RUNNER, signal.SIGCONT),
        }
        if fault not in faults:
            raise UsageError(f"there is no fault {fault!r}; use one of {', '.join(faults)}")
        holder, number = faults[fault]
        process = self.worker if holder is Holder.RUNNER else self.engine
        self.killed_ns = time.monotonic_ns() if number is signal.SIGKILL else 0
        if process is None or not process.signal(number):
            self.killed_ns = 0
            who = "worker" if holder is Holder.RUNNER else "engine"
            raise UsageError(
                f"rank {self.rank} of group {self.group.name!r} has no {who} now "
                f"({self.seat.state}, {self.seat.launch.name.lower()} launch)"
            )
        self.log.warning("fault.injected", fault=fault, pid=process.pid)
        return process.pid

    # ---- the end

    def close(self) -> None:
        """Let go of everything but what systemd keeps; processes are not touched."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self.allocation.stop()
        self._forget_processes()
        self._drop_memory()

    def later(self, delay_s: float, action: Callable[[int], None], inc: int) -> None:
        """Run `action(inc)` after a while, unless another incarnation has come."""

        def run() -> None:
            self._timers.discard(timer)
            if inc == self.seat.incarnation:
                action(inc)

        timer = asyncio.get_running_loop().call_later(delay_s, run)
        self._timers.add(timer)


def _kept(process: Process | None) -> KeptProcess | None:
    if process is None or process.exited:
        return None
    return KeptProcess(process.pid, process.started)
