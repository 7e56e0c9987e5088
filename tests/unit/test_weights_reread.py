"""A source that is filled anew while it is read: both ways out look at the label again."""

import asyncio
import mmap
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elasticep.arena import Arena
from elasticep.errors import Unavailable
from elasticep.proto import node_pb2
from elasticep.runtime.weights.ledger import Ledger
from elasticep.runtime.weights.memory import ArenaMemory
from elasticep.runtime.weights.messages import Failure
from elasticep.runtime.weights.serve import WeightsService
from elasticep.runtime.weights.sources import CHUNK_BYTES, SourceFailed, copy_arena
from elasticep.testing.mover import LAYOUT, UNIT_BYTES

OLD, NEW = bytes([1]) * UNIT_BYTES, bytes([2]) * UNIT_BYTES


def arena() -> Arena:
    return Arena.format(bytearray(LAYOUT.total_bytes), LAYOUT, 0)


@pytest.mark.parametrize("expert", [0, 1], ids=["the same expert", "another one"])
def test_a_slot_that_is_filled_anew_while_it_is_copied_is_gone_and_did_not_lie(expert: int) -> None:
    source, target = arena(), arena()
    source.write(0, 0, 0, OLD)
    went: list[int] = []

    def refill(size: int) -> None:
        went.append(size)
        if len(went) == 1:
            source.write(0, 0, expert, NEW)

    with pytest.raises(SourceFailed, match="slot 0 was filled anew") as raised:
        copy_arena(source, 0, target.fill(0, 1, 0), UNIT_BYTES // 4, refill)
    assert raised.value.failure is Failure.GONE
    assert sum(went) == UNIT_BYTES


def test_a_slot_that_is_filled_anew_while_it_is_sent_ends_the_stream_with_an_error() -> None:
    memory = ArenaMemory.create(LAYOUT, 0, "rank 0")
    whole = mmap.mmap(memory.fd, LAYOUT.total_bytes)  # as the mover has it
    mover = Arena(whole, LAYOUT)
    mover.write(0, 0, 0, OLD)
    memory.read_label(0, 0)
    weights = SimpleNamespace(
        layout=LAYOUT,
        experts=3,
        unit_bytes=UNIT_BYTES,
        ledger=Ledger(),
        live=lambda: [(0, 1, memory)],
    )
    registry = SimpleNamespace(groups={"g": SimpleNamespace(weights=weights)})
    service = WeightsService("n0", cast(Any, registry))
    request = node_pb2.ReadExpertRequest(group="g", layer=0, expert=0, rank=0, incarnation=1)
    sent: list[int] = []

    async def read() -> None:
        async for chunk in service.read(request):
            sent.append(len(chunk.data))
            if len(sent) == 1:
                mover.write(0, 0, 0, NEW)

    try:
        with pytest.raises(Unavailable, match="slot 0 of rank 0 was filled anew meanwhile"):
            asyncio.run(read())
    finally:
        mover.release()
        whole.close()
        memory.close()
    assert sent == [CHUNK_BYTES] * (UNIT_BYTES // CHUNK_BYTES)
