"""Geometries and exchanges that the GPU tests use, and the children that run them."""

import os
from typing import Any, Final

from elasticep.bench.fleet_cuda_pool import FleetPool
from elasticep.native import abi, cuda_library

SHARED: Final = FleetPool()
"""For tests in which no process is killed or stopped, and none measures what a process takes."""

D, L, C, R = abi.Dtype, abi.RowLayout, abi.Copies, abi.Reduce
S = abi.ScaleLayout


def gpus() -> int:
    """How many GPUs tests take: two where there are two, unless ELASTICEP_GPUS says one."""
    return min(2, cuda_library.device_count(), int(os.environ.get("ELASTICEP_GPUS", "2")))


def places(ranks: int) -> dict[str, Any]:
    """Ranks spread over the GPUs that are there; ranks of one GPU share a process."""
    used = min(gpus(), ranks)
    seats = tuple(tuple(r for r in range(ranks) if r % used == p) for p in range(used))
    return {"devices": tuple(range(used)), "seats": seats}


def places_apart(ranks: int) -> dict[str, Any]:
    """A process for each rank; rank 0 has a GPU of its own if there are two.

    Of the others on the second GPU one is meant to run at a time.
    """
    other = gpus() - 1
    return {
        "devices": (0, *[other] * (ranks - 1)),
        "seats": tuple((r,) for r in range(ranks)),
        "ranks_on_device": 1 if other else min(2, ranks),
    }


def exchange(
    cap: int,
    copies: abi.Copies = C.PER_RANK,
    layout: abi.RowLayout = L.ROUTED,
    dispatch: abi.Dtype = D.BF16,
    combine: abi.Dtype | None = None,
    reduce: abi.Reduce = R.PER_RANK,
    cpu_sync: bool = False,
    replicated: bool = False,
    scales: abi.ScaleLayout = S.ROWS,
    masked_room: int = 0,
    channels: int = 1,
) -> abi.ExchangeConfig:
    """One exchange; the combine dtype follows the dispatch dtype where that is a float."""
    back = combine if combine is not None else dispatch if dispatch <= D.BF16 else D.BF16
    return abi.ExchangeConfig(
        copies=int(copies),
        layout=int(layout),
        dispatch_dtype=int(dispatch),
        combine_dtype=int(back),
        reduce=int(reduce),
        cpu_sync=int(cpu_sync),
        max_tokens=cap,
        channels=channels,
        masked_room=masked_room,
        replicated=int(replicated),
        scale_layout=int(scales),
    )


def geometry(
    ranks: int,
    exchanges: list[abi.ExchangeConfig],
    hidden: int = 512,
    experts: int = 32,
    topk: int = 4,
    layers: int = 2,
    slots: int = 0,
    **options: int,
) -> bytes:
    """A group for `ranks` seats; slots default to one copy of every expert and two spare."""
    g = abi.Geometry(
        layers=layers,
        experts=experts,
        topk=topk,
        hidden=hidden,
        slots=slots or -(-experts // ranks) + 2,
        max_ranks=ranks,
        exchanges=len(exchanges),
        launch=int(abi.Launch.INLINE),
        **options,
    )
    for i, x in enumerate(exchanges):
        g.exchange[i] = x
    return bytes(g)


PRESETS = {
    "allgather": {"copies": C.ALL, "layout": L.ARRIVAL},
    "routed": {},
    "low_latency": {"copies": C.PER_EXPERT, "layout": L.MASKED},
    "expand_masked": {"layout": L.MASKED},
    "expand_sync": {"layout": L.CONTIGUOUS, "cpu_sync": True},
    "normal": {"layout": L.ARRIVAL, "cpu_sync": True},
    "routed_per_expert": {"reduce": R.PER_EXPERT},
    "expand_per_expert": {"layout": L.CONTIGUOUS, "reduce": R.PER_EXPERT},
}
