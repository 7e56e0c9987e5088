"""Fleets of ranks on emulated GPUs, in children that several tests share."""

from typing import Any, Final

from elasticep.bench.fleet_cuda import Fleet, FleetSpec
from elasticep.bench.fleet_cuda_pool import FleetPool
from elasticep.testing import emulated_cuda

_POOLS: Final[dict[int, FleetPool]] = {}
# CI's machine is slow and shared: nothing but a fault may run into these.
PATIENCE: Final = {"exchange_timeout_ms": 60_000, "step_timeout_ms": 60_000}


def pool(seed: int = 0) -> FleetPool:
    """Children whose emulated GPUs have this seed."""
    if seed not in _POOLS:
        _POOLS[seed] = FleetPool(emulated_cuda.environment(seed=seed))
    return _POOLS[seed]


def close_pools() -> None:
    while _POOLS:
        _POOLS.popitem()[1].close()


def spread(ranks: int, processes: int) -> dict[str, Any]:
    """Ranks over so many processes, and those over two devices in turn."""
    seats = tuple(tuple(r for r in range(ranks) if r % processes == p) for p in range(processes))
    return {"seats": seats, "devices": tuple(p % 2 for p in range(processes))}


def fleet(shape: bytes, ranks: int, processes: int = 2, seed: int = 0, **options: Any) -> Fleet:
    spec = FleetSpec(geometry=shape, **spread(ranks, processes), **{**PATIENCE, **options})
    return Fleet(spec, pool(seed))
