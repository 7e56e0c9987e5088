"""Fleets of ranks on emulated GPUs, in children that the tests share."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Final

from elasticep.bench.fleet_cuda import Fleet, FleetSpec
from elasticep.bench.fleet_cuda_pool import FleetPool
from elasticep.testing import emulated_cuda

# CI's machine is slow and shared: nothing but a fault may run into these.
PATIENCE: Final[dict[str, Any]] = {
    "exchange_timeout_ms": 60_000,
    "step_timeout_ms": 60_000,
    "finish_s": 180.0,
}
SET_SEED: Final = "tests.emulated.programs:set_seed"


@functools.cache
def pool() -> FleetPool:
    return FleetPool(emulated_cuda.environment())


def spread(ranks: int, processes: int) -> dict[str, Any]:
    """Ranks over so many processes, and those over two devices in turn."""
    seats = tuple(tuple(r for r in range(ranks) if r % processes == p) for p in range(processes))
    return {"seats": seats, "devices": tuple(p % 2 for p in range(processes))}


@contextlib.contextmanager
def fleet(
    shape: bytes, ranks: int, processes: int = 2, seed: int = 0, **options: Any
) -> Iterator[Fleet]:
    """A fleet whose kernels follow `seed`."""
    spec = FleetSpec(geometry=shape, **spread(ranks, processes), **{**PATIENCE, **options})
    with Fleet(spec, pool()) as opened:
        if seed:
            opened.run(SET_SEED, seed=seed)
        yield opened
        if seed:
            opened.run(SET_SEED, seed=0)
