"""A small group with any exchanges, for tests of what exchanges do."""

import threading
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from elasticep.native import abi
from elasticep.testing.world import Batch, World, exchange_config

LAYERS: Final = 2
EXPERTS: Final = 12
TOPK: Final = 3
HIDDEN: Final = 128
CAP: Final = 16
LAYOUTS: Final = list(abi.RowLayout)
_DEADLINE_S: Final = 60.0


def exchange(**changes: Any) -> abi.ExchangeConfig:
    """`exchange_config` with the small cap."""
    return exchange_config(**{"max_tokens": CAP, **changes})


def all_layouts(**changes: Any) -> list[abi.ExchangeConfig]:
    """An exchange for each layout."""
    return [exchange(layout=layout, **changes) for layout in LAYOUTS]


def geometry(ranks: int, *exchanges: abi.ExchangeConfig, **changes: Any) -> abi.Geometry:
    """Ranks with a slot for every expert, under inline launch, with these fields changed."""
    sizes = {
        "layers": LAYERS,
        "experts": EXPERTS,
        "topk": TOPK,
        "hidden": HIDDEN,
        "slots": EXPERTS,
        "launch": abi.Launch.INLINE,
    }
    g = abi.Geometry(**{**sizes, **changes}, max_ranks=ranks, exchanges=len(exchanges))
    for number, spec in enumerate(exchanges):
        g.exchange[number] = spec
    return g


def until(condition: Callable[[], bool], what: str, deadline_s: float = _DEADLINE_S) -> None:
    """Wait for a condition; raises TimeoutError with `what` after a minute."""
    tick, end = threading.Event(), time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {deadline_s} s")
        tick.wait(0.0005)


def agrees(world: World, number: int, brought: dict[int, Batch], layer: int = 0) -> None:
    """One exchange on all ranks gives what it must, to the bit."""
    results, step = world.round_trip(number, brought, layer)
    for rank, batch in brought.items():
        expected = world.expected(number, batch, rank, layer, step)
        np.testing.assert_array_equal(results[rank], expected, f"rank {rank}")
