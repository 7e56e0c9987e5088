"""Placements that need no load figures and no native core: a first one, and what deaths leave.

Part of `elasticep.placement`. The controller plans its own (`elasticep.control.planner`).
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from elasticep.control.tables import EMPTY, GeometryLike, Placement, SlotShortage, spread

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
    deal = _Deal(geometry.experts, geometry.slots_per_rank, names)
    for copy in range(1 + spare):
        for expert in range(geometry.experts):
            deal.place(expert, copy)
    table = np.full((geometry.max_ranks, geometry.slots_per_rank), EMPTY, np.int32)
    for rank, content in zip(ranks, deal.content, strict=True):
        table[rank, : len(content)] = content
    slot_expert = np.repeat(table[None], geometry.layers, axis=0)
    weights = np.zeros(slot_expert.shape, np.uint32)
    return Placement(
        experts=geometry.experts,
        slot_expert=slot_expert,
        slot_weight=spread(slot_expert, weights, geometry.experts),
    )


class _Deal:
    """One layer's slots while experts are dealt out; ranks are numbered 0.. here."""

    def __init__(self, experts: int, slots: int, names: Sequence[str]) -> None:
        self.content: list[list[int]] = [[] for _ in names]
        self._slots = slots
        self._node = np.unique(names, return_inverse=True)[1]
        self._holds = np.zeros((experts, len(names)), np.bool_)
        self._used = np.zeros(len(names), np.int64)

    def place(self, expert: int, copy: int) -> None:
        """Put a further copy of an expert on the emptiest rank, in a node without one if it can."""
        ranks = len(self._used)
        # The offset by copy number spreads the second copies of one rank's experts over all.
        turn = (np.arange(ranks) - expert - copy * (1 + expert // ranks)) % ranks
        for apart in (True, False):
            taken = self._near(expert) if apart else self._holds[expert]
            cost = np.where(taken | (self._used >= self._slots), _NEVER, self._used * ranks + turn)
            rank: int | None = int(np.argmin(cost))
            if cost[rank] == _NEVER:
                rank = self._make_room(taken, apart)
            if rank is not None:
                self._add(expert, rank)
                return

    def _near(self, expert: int) -> NDArray[np.bool_]:
        """[ranks], True in nodes that hold the expert."""
        return np.isin(self._node, self._node[self._holds[expert]])

    def _add(self, expert: int, rank: int) -> None:
        self.content[rank].append(expert)
        self._holds[expert, rank] = True
        self._used[rank] += 1

    def _make_room(self, taken: NDArray[np.bool_], apart: bool) -> int | None:
        """Free a slot on a rank that is not `taken`: one of its copies moves to a rank with room,
        if `apart` only to a node without another copy of it.
        """
        roomy = np.flatnonzero(self._used < self._slots).tolist()
        for rank in np.flatnonzero(~taken).tolist() if roomy else ():
            for other in self.content[rank]:
                self._holds[other, rank] = False
                avoid = self._near(other) if apart else self._holds[other]
                for to in roomy:
                    if to != rank and not avoid[to]:
                        self.content[rank].remove(other)
                        self._used[rank] -= 1
                        self._add(other, to)
                        return int(rank)
                self._holds[other, rank] = True
        return None


def without(
    placement: Placement, dead_ranks: Collection[int]
) -> tuple[Placement, list[tuple[int, int]]]:
    """The placement that is left when ranks die: no byte moves, only weights change.

    Slots of the survivors stay; those of the dead become empty, and their weights go in equal
    parts to the surviving replicas (live ones of weight 0 included). With load figures at hand
    `resplit` balances better.

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
