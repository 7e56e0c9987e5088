"""Plain placements for tests and benchmarks: copies in a row, equal weights; ranks to plan for."""

from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from elasticep.control.placement import Plan, RankInfo
from elasticep.native import abi


def equal_weights(
    slot_expert: npt.NDArray[np.int32], members: Sequence[int]
) -> npt.NDArray[np.uint32]:
    """Dispatch weights that split every expert equally over its copies on `members`.

    Args:
        slot_expert: int32 [layers, max_ranks, slots], -1 = empty.
        members: ranks that count.

    Returns:
        uint32 of the same shape; the weights of an expert's copies sum to 65536.
    """
    weights = np.zeros(slot_expert.shape, np.uint32)
    live = np.zeros(slot_expert.shape[1], bool)
    live[list(members)] = True
    for layer in range(slot_expert.shape[0]):
        copies: dict[int, list[tuple[int, int]]] = {}
        for rank, slot in np.argwhere(slot_expert[layer] >= 0):
            if live[rank]:
                copies.setdefault(int(slot_expert[layer, rank, slot]), []).append((rank, slot))
        for places in copies.values():
            share, rest = divmod(65536, len(places))
            for i, (rank, slot) in enumerate(places):
                weights[layer, rank, slot] = share + (rest if i == 0 else 0)
    return weights


def spread(
    geometry: abi.Geometry, members: Sequence[int], *, copies: int = 1
) -> npt.NDArray[np.int32]:
    """A plain placement: copy c of expert e on the (e + c)-th member, in the next free slot.

    Returns:
        int32 [layers, max_ranks, slots], -1 = empty.

    Raises:
        ValueError: the members have too few slots.
    """
    table = np.full((geometry.layers, geometry.max_ranks, geometry.slots), -1, np.int32)
    used = dict.fromkeys(members, 0)
    for copy in range(copies):
        for expert in range(geometry.experts):
            rank = members[(expert + copy) % len(members)]
            if used[rank] >= geometry.slots:
                raise ValueError(f"rank {rank} has {geometry.slots} slots, too few for this spread")
            table[:, rank, used[rank]] = expert
            used[rank] += 1
    return table


def cluster(
    ranks: int, slots: int, nodes: int = 1, draining: Collection[int] = ()
) -> list[RankInfo]:
    """Ranks to plan for, node by node; each node is a domain of its own."""
    per_node = -(-ranks // nodes)
    return [
        RankInfo(r, f"n{r // per_node}", f"n{r // per_node}", slots, r in draining)
        for r in range(ranks)
    ]


def check_plan(result: Plan, ranks: Sequence[RankInfo], *, allow_lost: bool = False) -> Plan:
    """The plan itself; raises when its placement breaks a rule on these ranks."""
    placed = result.placement
    sizes = SimpleNamespace(  # the planner takes more ranks than a group may have
        layers=placed.layers,
        experts=placed.experts,
        slots_per_rank=placed.slots_per_rank,
        max_ranks=placed.max_ranks,
    )
    placed.validate(cast(Any, sizes), [info.rank for info in ranks], allow_lost=allow_lost)
    return result
