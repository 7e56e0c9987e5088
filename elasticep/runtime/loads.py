"""Load of experts: each attached rank's counters, read from its memory and sent when they changed.

The counters are the kernels' (a rank counts its own routing, once, when a step completes); the
daemon reads them through a descriptor, without mapping the memory. A rank whose data is on a GPU
keeps a copy in its header, not older than half a second.
"""

import asyncio
import os
from collections.abc import Iterator
from typing import Final, Protocol

from elasticep.device import Device
from elasticep.native.region import header_loads_offset, loads_offset
from elasticep.proto import controller_pb2
from elasticep.runtime.group import Group, Registry
from elasticep.runtime.keeper import SeatKeeper
from elasticep.runtime.node import Node
from elasticep.runtime.seats import SeatState

_WORD: Final = 8
MESSAGE_BYTES: Final = 256 << 10  # of counters, unless one layer has more


class Connection(Protocol):
    """What is asked of the stream to the controller."""

    @property
    def connections(self) -> int:
        """Made so far."""

    @property
    def connected(self) -> bool:
        """Whether somebody listens."""


class LoadReporter:
    """Tells the controller how many tokens went to each expert.

    Args:
        node: the daemon's shared parts.
        registry: its groups.
        session: the stream; whoever is new at its other end is told everything.
    """

    def __init__(self, node: Node, registry: Registry, session: Connection) -> None:
        self._node = node
        self._registry = registry
        self._session = session
        self._connection = 0
        self._told: dict[tuple[str, int], tuple[int, int, bytes]] = {}
        self._offsets: dict[str, tuple[Group, int]] = {}

    async def run(self) -> None:
        """Look at all seats on an interval, for good."""
        while True:
            await asyncio.sleep(self._node.config.load_interval_ms / 1_000)
            self.report()

    def report(self) -> None:
        """Send what changed since the last report on this connection."""
        if not self._session.connected:
            return
        if self._session.connections != self._connection:
            self._connection = self._session.connections
            self._told.clear()
        for keeper in self._registry.keepers():
            if keeper.seat.state is SeatState.ATTACHED and keeper.memory is not None:
                for message in self._changes(keeper):
                    self._node.send(controller_pb2.NodeMessage(load=message))

    def _changes(self, keeper: SeatKeeper) -> Iterator[controller_pb2.LoadReport]:
        memory, group = keeper.memory, keeper.group
        if memory is None or memory.closed:
            return
        on_gpu = group.config.device is Device.CUDA
        geometry = group.config.geometry
        row = geometry.experts * _WORD
        where = memory.header_fd if on_gpu else memory.data_fd
        now = os.pread(where, geometry.layers * row, self._offset(group))
        incarnation, inode = keeper.seat.incarnation, memory.identity[1]
        key = (group.name, keeper.rank)
        known = self._told.get(key)
        old = known[2] if known is not None and known[:2] == (incarnation, inode) else b""
        self._told[key] = (incarnation, inode, now)
        for first, last in _runs(old, now, row, max(1, MESSAGE_BYTES // row)):
            yield controller_pb2.LoadReport(
                group=group.name,
                rank=keeper.rank,
                incarnation=incarnation,
                memory=inode,
                first_layer=first,
                counters=now[first * row : last * row],
            )

    def _offset(self, group: Group) -> int:
        known = self._offsets.get(group.name)
        if known is None or known[0] is not group:
            where = header_loads_offset if group.config.device is Device.CUDA else loads_offset
            known = self._offsets[group.name] = (group, where(group.geometry))
        return known[1]


def _runs(old: bytes, now: bytes, row: int, most: int) -> Iterator[tuple[int, int]]:
    """(first, one past last) of runs of rows that differ, `most` rows in each at most."""
    layers = len(now) // row
    first = 0
    while first < layers:
        if old[first * row : (first + 1) * row] == now[first * row : (first + 1) * row]:
            first += 1
            continue
        last = first + 1
        while (
            last < min(layers, first + most)
            and old[last * row : (last + 1) * row] != now[last * row : (last + 1) * row]
        ):
            last += 1
        yield first, last
        first = last
