"""Placements that need no load figures: the first one of a group, and one that a death leaves."""

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from elasticep.control.tables import (
    EMPTY,
    ONE,
    GeometryLike,
    Int32Array,
    Placement,
    SlotShortage,
    Uint32Array,
)

_NEVER = np.iinfo(np.int64).max


def round_robin(
    geometry: GeometryLike,
    members: Collection[int],
    spare: int = 1,
    nodes: Mapping[int, str] | None = None,
) -> Placement:
    """A placement for a group whose loads are not known yet; the same in every layer.

    Every expert gets one copy, then, while slots allow, up to `spare` further ones on other ranks,
    in another node where one has room. An expert's copies share its tokens evenly.

    Args:
        geometry: the group's sizes.
        members: ranks that hold experts.
        spare: copies of an expert beyond its first.
        nodes: rank -> node; without it every rank counts as a node.

    Raises:
        SlotShortage: the members have fewer slots than there are experts.
    """
    ranks = sorted(members)
    slots = len(ranks) * geometry.slots_per_rank
    if slots < geometry.experts:
        raise SlotShortage(range(geometry.layers), ranks, slots, geometry.experts)
    names = [(nodes or {}).get(rank, f"rank {rank}") for rank in ranks]
    node = np.unique(names, return_inverse=True)[1]
    table = np.full((geometry.max_ranks, geometry.slots_per_rank), EMPTY, np.int32)
    used = np.zeros(len(ranks), np.int64)
    holders: list[list[int]] = [[] for _ in range(geometry.experts)]
    for copy in range(1 + spare):
        for expert, held in enumerate(holders):
            # The offset by copy number spreads the second copies of one rank's experts over all.
            start = expert + copy * (1 + expert // len(ranks))
            turn = (np.arange(len(ranks)) - start) % len(ranks)
            cost = (np.isin(node, node[held]) * geometry.slots_per_rank + used) * len(ranks) + turn
            cost[(used >= geometry.slots_per_rank)] = _NEVER
            cost[held] = _NEVER
            best = int(np.argmin(cost))
            if cost[best] == _NEVER:
                continue
            table[ranks[best], used[best]] = expert
            used[best] += 1
            held.append(best)
    slot_expert = np.repeat(table[None], geometry.layers, axis=0)
    weights = np.zeros(slot_expert.shape, np.uint32)
    return Placement(
        experts=geometry.experts,
        slot_expert=slot_expert,
        slot_weight=spread(slot_expert, weights, geometry.experts),
    )


def without(
    placement: Placement, dead_ranks: Collection[int]
) -> tuple[Placement, list[tuple[int, int]]]:
    """The placement that is left when ranks die: no byte moves, only weights change.

    Slots of the survivors stay; those of the dead become empty, and their weights go in equal
    parts to the surviving replicas (live ones of weight 0 included). With load figures at hand
    `elasticep.control.resplit` balances better.

    Returns:
        The placement, and the (layer, expert) pairs that nobody holds any more.
    """
    slot_expert = placement.slot_expert.copy()
    slot_weight = placement.slot_weight.copy()
    for rank in dead_ranks:
        slot_expert[:, rank] = EMPTY
        slot_weight[:, rank] = 0
    left = Placement(
        experts=placement.experts,
        slot_expert=slot_expert,
        slot_weight=spread(slot_expert, slot_weight, placement.experts),
    )
    missing = np.argwhere(left.copies() == 0)
    return left, [(int(layer), int(expert)) for layer, expert in missing]


def spread(slot_expert: Int32Array, slot_weight: Uint32Array, experts: int) -> Uint32Array:
    """Top the weights up so that those of each expert sum to `ONE`: what is missing goes in equal
    parts to its replicas, what does not divide to the lowest slots.

    Args:
        slot_expert: int32 [layers, ranks, slots].
        slot_weight: uint32, same shape; no expert's weights may sum to more than `ONE`.
        experts: logical experts per layer.
    """
    layers = slot_expert.shape[0]
    filled = np.flatnonzero(slot_expert.ravel() >= 0)
    layer = filled // (slot_expert.shape[1] * slot_expert.shape[2])
    key = layer * experts + slot_expert.ravel()[filled]
    weight = slot_weight.ravel()[filled].astype(np.int64)
    held = np.bincount(key, weights=weight, minlength=layers * experts).astype(np.int64)
    copies = np.bincount(key, minlength=layers * experts)
    each, rest = np.divmod(ONE - held, np.maximum(copies, 1))
    extra = each[key] + (_ordinal(key) < rest[key])
    total = np.zeros(slot_expert.size, np.uint32)
    total[filled] = weight + extra
    return total.reshape(slot_expert.shape)


def _ordinal(key: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many equal entries come before each entry."""
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    first = np.concatenate(([True], ordered[1:] != ordered[:-1])) if len(key) else np.zeros(0, bool)
    begin = np.maximum.accumulate(np.where(first, np.arange(len(key)), 0))
    ordinal = np.empty(len(key), np.int64)
    ordinal[order] = np.arange(len(key)) - begin
    return ordinal
