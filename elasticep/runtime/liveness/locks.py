"""From the native watcher's queue to the seats: what happened to whose lock."""

import asyncio
from typing import Final

from elasticep.native.abi import EventKind
from elasticep.native.watcher import LockEvent
from elasticep.runtime import seats
from elasticep.runtime.group import Registry
from elasticep.runtime.keeper import SeatKeeper
from elasticep.runtime.node import Node

_NS: Final = 1e-9
_KINDS: Final[dict[EventKind, type[seats.Held | seats.Died | seats.Released]]] = {
    EventKind.HELD: seats.Held,
    EventKind.DIED: seats.Died,
    EventKind.RELEASED: seats.Released,
}


class Locks:
    """Reads the watcher's eventfd on the event loop.

    Args:
        node: the daemon's shared parts.
        registry: its groups.
    """

    def __init__(self, node: Node, registry: Registry) -> None:
        self._node = node
        self._registry = registry
        self._measured: dict[int, int] = {}

    def start(self) -> None:
        """Begin to read."""
        asyncio.get_running_loop().add_reader(self._node.watcher.fd, self._drain)

    def close(self) -> None:
        """Read no more; the watcher itself goes on."""
        asyncio.get_running_loop().remove_reader(self._node.watcher.fd)

    def _drain(self) -> None:
        keepers = {keeper.key: keeper for keeper in self._registry.keepers()}
        for event in self._node.watcher.events():
            keeper = keepers.get(event.key)
            if keeper is not None:
                self._take(keeper, event)

    def _take(self, keeper: SeatKeeper, event: LockEvent) -> None:
        incarnation = event.incarnation
        if not incarnation:
            # The holder writes its incarnation just after it took the lock; this is that moment.
            # Otherwise the lock was granted anew before the watcher came to look at it.
            if event.kind is EventKind.RELEASED:
                return
            incarnation = keeper.seat.incarnation
        keeper.apply(_KINDS[event.kind](event.holder, incarnation))
        if event.kind is EventKind.DIED and incarnation == keeper.seat.incarnation:
            self._measure(keeper, event.at_ns)

    def _measure(self, keeper: SeatKeeper, died_ns: int) -> None:
        """How quick the first death of an incarnation was seen and told."""
        if self._measured.get(keeper.key) == keeper.seat.incarnation:
            return
        self._measured[keeper.key] = keeper.seat.incarnation
        # The process's exit may have been told of first, when the machine is busy.
        self._node.metrics.report.observe(max(0.0, (keeper.ended_ns - died_ns) * _NS))
        if keeper.killed_ns:
            detect_ns = max(0, died_ns - keeper.killed_ns)
            self._node.metrics.detect.observe(detect_ns * _NS)
            keeper.log.info("fault.detected", detect_ms=round(detect_ns * 1e-6, 3))
            keeper.killed_ns = 0
