"""A mover and what fills arenas, without daemons, for tests.

with mover_driver(folder) as mover:
    mover.lend(memory)
    await mover.copy(Target(memory, 0, 0, 1), b"", source, urgent=True)
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import structlog

from elasticep.config import DaemonConfig
from elasticep.runtime.limits import Limits
from elasticep.runtime.weights.driver import MoverDriver
from elasticep.runtime.weights.memory import ArenaMemory
from elasticep.runtime.weights.messages import Kind, Source
from elasticep.runtime.weights.metrics import WeightsMetrics
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
    limits = limits or Limits(mover_stall_s=1.0)
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
    end = loop.time() + 20
    while not condition():
        assert loop.time() < end
        await asyncio.wait({loop.create_future()}, timeout=0.005)
