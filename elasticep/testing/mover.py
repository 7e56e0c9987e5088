"""A mover and what fills arenas, without daemons, for tests.

with mover_driver(folder) as mover:
    mover.lend(memory)
    await mover.copy(Target(memory, 0, 0, 1), b"", source, urgent=True)
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import numpy as np
import structlog

from elasticep.config import DaemonConfig
from elasticep.runtime.limits import Limits
from elasticep.runtime.weights.driver import MoverDriver
from elasticep.runtime.weights.fill import Filler
from elasticep.runtime.weights.finder import Place
from elasticep.runtime.weights.ledger import Ledger, Ref
from elasticep.runtime.weights.memory import ArenaMemory
from elasticep.runtime.weights.messages import Kind, Source
from elasticep.runtime.weights.metrics import WeightsMetrics
from elasticep.runtime.weights.seat import SeatWeights
from elasticep.runtime.weights.views import ViewBook, ViewTable
from elasticep.testing.checkpoints import write_checkpoint
from elasticep.testing.weights import one_tensor
from elasticep.weights import ArenaLayout, TensorSpec, WeightSpec

UNIT_BYTES: Final = 4096 * 64
LAYOUT: Final = ArenaLayout(2, 3, WeightSpec((TensorSpec.of("w2", "int8", (4096, 64)),)))
"""Two layers of three slots."""


@contextlib.contextmanager
def mover_driver(
    folder: Path, rate: int = 0, limits: Limits | None = None
) -> Iterator[MoverDriver]:
    """The daemon's side of a mover."""
    config = DaemonConfig(node="n0", socket_dir=str(folder), weights_rate=rate)
    limits = limits or Limits(mover_stall_s=20.0)
    made = MoverDriver(config, limits, structlog.get_logger(), WeightsMetrics())
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def arena_memory() -> Iterator[ArenaMemory]:
    """An arena of `LAYOUT`."""
    memory = ArenaMemory.create(LAYOUT, 0, "rank 0")
    try:
        yield memory
    finally:
        memory.close()


def checkpoint(folder: Path, experts: int = 3) -> Source:
    """A checkpoint whose units fit `LAYOUT`, as a source."""
    written = write_checkpoint(
        folder / "checkpoint", one_tensor(UNIT_BYTES), layers=2, experts=experts, shards=1
    )
    return Source(kind=Kind.CHECKPOINT, path=str(written.path))


async def until(condition: Callable[[], object]) -> None:
    """Wait until it holds, with a deadline."""
    loop = asyncio.get_running_loop()
    end = loop.time() + 60
    while not condition():
        assert loop.time() < end
        await asyncio.wait({loop.create_future()}, timeout=0.005)


class Node:
    """What `Filler` and `Supply` need of a daemon: one seat of rank 0, and a finder that finds what
    it is told.

    Args:
        mover: copies.
        memory: the seat's arena.
        sources: where every expert can be had.
        checkpoint: the group's, "" for none.

    Attributes:
        places: what is found of each expert, if anything special.
        finds: the experts of each search.
    """

    def __init__(
        self, mover: MoverDriver, memory: ArenaMemory, sources: list[Source], checkpoint: str = ""
    ) -> None:
        self.config = DaemonConfig(node="n0")
        self.log = structlog.get_logger()
        self.mover = mover
        self.name, self.checkpoint = "g", checkpoint
        self.unit_bytes = UNIT_BYTES
        self.metrics = mover.metrics
        self.ledger = Ledger()
        self.views = ViewBook()
        self.finder = self.reach = self
        self.given = sources
        self.places: dict[Ref, Place] = {}
        self.finds: list[list[Ref]] = []
        self.epoch = 1
        keeper = SimpleNamespace(
            rank=0, node=self, status=lambda: SimpleNamespace(epoch=self.epoch)
        )
        self.seat = SeatWeights(cast(Any, keeper), self.views)
        self.seat.memory = memory
        self.filler = Filler(cast(Any, self), cast(Any, self))
        mover.lend(memory)

    def view(self, epoch: int, slots: Sequence[Sequence[int]], previous: int = 1) -> ViewTable:
        """A view that gives rank 0 these experts in each layer."""
        table = np.array(slots, np.int32).reshape(LAYOUT.layers, 1, LAYOUT.slots)
        made = ViewTable(epoch, previous, {0: (1, "n0")}, table)
        self.views.add(made, 1)
        return made

    def ready(
        self, view: ViewTable, wanted: Callable[[], bool] = lambda: True
    ) -> "asyncio.Task[None]":
        """`Filler.ready` for the seat."""
        return asyncio.create_task(self.filler.ready(self.seat, view, wanted))

    def is_dead(self, rank: int, incarnation: int) -> bool:
        """Nobody is."""
        return False

    async def find(self, refs: Sequence[Ref], *, patient: bool = False) -> dict[Ref, Place]:
        """As `Finder.find`."""
        self.finds.append(list(refs))
        return {ref: self.places.get(ref) or Place() for ref in refs}

    async def sources(self, ref: Ref, place: Place, dead: object) -> list[Source]:
        """As `Reach.sources`."""
        return list(self.given)

    def streamed(self, source: Source) -> Source | None:
        """As `Reach.streamed`."""
        return None
