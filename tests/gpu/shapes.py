"""Geometries and exchanges that the GPU tests use, and the children that run them."""

from typing import Final

from elasticep.bench.fleet_cuda_pool import FleetPool
from elasticep.native import abi

SHARED: Final = FleetPool()
"""For tests in which no process is killed or stopped, and none measures what a process takes."""

D, L, C, R = abi.Dtype, abi.RowLayout, abi.Copies, abi.Reduce
S = abi.ScaleLayout


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
