"""What every part of a daemon shares, handed in when it is made."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from structlog.typing import FilteringBoundLogger

from elasticep.config import DaemonConfig
from elasticep.native.watcher import Watcher
from elasticep.proto import controller_pb2
from elasticep.runtime.limits import Limits
from elasticep.runtime.metrics import Metrics
from elasticep.runtime.regions.keep import FdStore
from elasticep.runtime.tickets import TicketOffice

if TYPE_CHECKING:
    from elasticep.runtime.keeper import SeatKeeper
    from elasticep.runtime.weights.driver import MoverDriver


@dataclass(slots=True)
class Node:
    """One daemon's shared parts.

    Attributes:
        config: the daemon's section.
        limits: deadlines and bounds.
        log: events with keys.
        metrics: counters.
        watcher: native thread on the robust futexes.
        tickets: for workers and engines.
        fd_store: systemd's descriptor store.
        send: a message to the controller; dropped while there is none, because the next hello
            says everything that still holds.
        save: write the state file soon.
        announce: tell the other daemons of a group that (rank, incarnation) is dead, and why.
        mover: copies expert weights.
        reserving: held while memory for weights is reserved.
        stopping: the daemon ends for good; engines are asked to let go, and not killed, since
            nobody will use their memory again.
    """

    config: DaemonConfig
    limits: Limits
    log: FilteringBoundLogger
    metrics: Metrics
    watcher: Watcher
    tickets: "TicketOffice[SeatKeeper]"
    fd_store: FdStore
    send: Callable[[controller_pb2.NodeMessage], None]
    save: Callable[[], None]
    announce: Callable[[str, int, int, str], None]
    mover: "MoverDriver"
    reserving: asyncio.Lock = field(default_factory=asyncio.Lock)
    stopping: bool = False


class Signal:
    """Wakes whoever waits for a change; conditions are looked at again after every one."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Something changed."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until the condition holds; False when it does not within the time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not condition():
            left = deadline - loop.time()
            if left <= 0:
                return False
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.add(waiter)
            try:
                await asyncio.wait_for(waiter, left)
            except TimeoutError:
                return condition()
            finally:
                self._waiters.discard(waiter)
        return True
