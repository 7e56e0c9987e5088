"""What a daemon tells of the load of experts: read from the ranks' memory, sent when it changed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from elasticep.device import Device
from elasticep.group import Launch
from elasticep.native.convert import geometry_struct, timeouts_struct
from elasticep.native.region import header_loads_offset, layout, loads_offset
from elasticep.proto import controller_pb2
from elasticep.runtime import loads
from elasticep.runtime.loads import LoadReporter
from elasticep.runtime.regions.memory import SeatMemory
from elasticep.runtime.seats import SeatState
from elasticep.testing.membership import group_config

LAYERS, EXPERTS = 2, 8


class Node:
    """A daemon's parts that a reporter looks at, with one attached rank."""

    def __init__(self, memory: SeatMemory) -> None:
        self.config = group_config()
        self.memory = memory
        self.sent: list[controller_pb2.LoadReport] = []
        self.session = SimpleNamespace(connected=True, connections=1)
        group = SimpleNamespace(name="g", config=self.config, geometry=geometry_struct(self.config))
        self.keeper = SimpleNamespace(
            group=group,
            rank=3,
            memory=memory,
            seat=SimpleNamespace(state=SeatState.ATTACHED, incarnation=1),
        )
        node: Any = SimpleNamespace(send=lambda message: self.sent.append(message.load))
        registry: Any = SimpleNamespace(keepers=lambda: [self.keeper])
        self.reporter = LoadReporter(node, registry, self.session)

    def count(self, layer: int, expert: int, tokens: int) -> None:
        """What the kernels do when a step completes."""
        on_gpu = self.config.device is Device.CUDA
        where = header_loads_offset if on_gpu else loads_offset
        offset = where(self.keeper.group.geometry) + 8 * (layer * EXPERTS + expert)
        memory = self.memory.header_fd if on_gpu else self.memory.data_fd
        os.pwrite(memory, tokens.to_bytes(8, "little"), offset)

    def report(self) -> list[tuple[int, list[list[int]]]]:
        self.sent.clear()
        self.reporter.report()
        return [
            (m.first_layer, np.frombuffer(m.counters, "<i8").reshape(-1, EXPERTS).tolist())
            for m in self.sent
        ]


@contextmanager
def attached(device: Device = Device.CPU) -> Iterator[Node]:
    changes = {"launch": Launch.INLINE} if device is Device.CUDA else {}
    config = group_config(device=device, **changes)
    geometry = geometry_struct(config)
    memory = SeatMemory.create("g", 3, geometry, layout(geometry), timeouts_struct(config.timeouts))
    try:
        yield Node(memory)
    finally:
        memory.close()


ZEROS = [0] * EXPERTS


@pytest.mark.parametrize("device", list(Device))
def test_everything_at_first_and_then_what_changed(device: Device) -> None:
    """Memory on a GPU cannot be read here: its rank keeps a copy in the header."""
    with attached(device) as node:
        assert node.report() == [(0, [ZEROS, ZEROS])]
        (first,) = node.sent
        assert (first.group, first.rank, first.incarnation) == ("g", 3, 1)
        assert first.memory == node.memory.identity[1]
        assert node.report() == []
        node.count(1, 5, 77)
        assert node.report() == [(1, [[0, 0, 0, 0, 0, 77, 0, 0]])]
        assert node.report() == []


def test_whoever_is_new_at_the_other_end_is_told_everything() -> None:
    with attached() as node:
        node.count(0, 0, 5)
        node.report()
        node.session.connected = False
        node.count(0, 0, 6)
        assert node.report() == []
        node.session.connected, node.session.connections = True, 2
        assert node.report() == [(0, [[6, *ZEROS[1:]], ZEROS])]


def test_another_incarnation_is_told_everything() -> None:
    with attached() as node:
        node.report()
        node.keeper.seat.incarnation = 2
        assert len(node.report()) == 1
        assert node.sent[0].incarnation == 2


def test_a_rank_without_an_engine_is_not_read() -> None:
    with attached() as node:
        node.keeper.seat.state = SeatState.READY
        assert node.report() == []


def test_messages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "MESSAGE_BYTES", EXPERTS * 8)
    with attached() as node:
        assert node.report() == [(0, [ZEROS]), (1, [ZEROS])]
