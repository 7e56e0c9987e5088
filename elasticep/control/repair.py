"""Placements that follow a change of members when no load figures are at hand. Pure.

The rule that all of them keep: a slot that names an expert on a rank that stays keeps naming it,
because ranks in the old view may still read it. New content goes into slots that are empty in
every view that somebody may run in. When there are not enough of those, `make_room` empties slots
of redundant copies in one view, and the next one fills them.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from elasticep.control.placement import EMPTY, GeometryLike, Placement
from elasticep.control.start import spread

Usable = NDArray[np.bool_]
"""bool [layers, max_ranks, slots_per_rank]: slots that may be given new content."""


def usable_slots(ranks: Collection[int], placements: Sequence[Placement]) -> Usable:
    """Slots of `ranks` that are empty in all of `placements` (at least one)."""
    usable = np.ones(placements[0].slot_expert.shape, np.bool_)
    for placement in placements:
        usable &= placement.slot_expert == EMPTY
    usable[:, _others(ranks, placements[0].max_ranks)] = False
    return usable


def fill_lost(placement: Placement, ranks: Collection[int], usable: Usable) -> Placement:
    """Give experts without a copy on `ranks` a usable slot each, on the rank with the most room.

    Experts that find no room stay lost; `Placement.lost_experts` names them.
    """
    table = placement.slot_expert.copy()
    order = sorted(ranks)
    free = usable.copy()
    for layer, expert in placement.lost_experts(ranks):
        room = free[layer].sum(axis=1)
        rank = max(order, key=lambda r: (int(room[r]), -r))
        if room[rank] == 0:
            continue
        slot = int(np.argmax(free[layer, rank]))
        table[layer, rank, slot] = expert
        free[layer, rank, slot] = False
    return _split_evenly(placement, table, ranks)


def restore(
    placement: Placement,
    ranks: Collection[int],
    may: Collection[int],
    in_use: Sequence[Placement],
) -> Placement:
    """Name lost experts again that still lie where a view in use has them, on one of `may`."""
    table = placement.slot_expert.copy()
    order = sorted(may)
    for layer, expert in placement.lost_experts(ranks):
        for old in in_use:
            held = (old.slot_expert[layer] == expert) & (table[layer] == EMPTY)
            place = next(((r, int(np.argmax(held[r]))) for r in order if held[r].any()), None)
            if place is not None:
                table[layer, place[0], place[1]] = expert
                break
    return _split_evenly(placement, table, ranks)


def make_room(placement: Placement, ranks: Collection[int], usable: Usable) -> Placement:
    """Empty as many slots of redundant copies as lost experts are short of usable slots.

    Copies of the experts with the most of them go first; an expert's last copy on `ranks` never
    does. Nothing is filled: that is for the next view.
    """
    table = placement.slot_expert.copy()
    order = sorted(ranks)
    lost = [layer for layer, _ in placement.lost_experts(ranks)]
    short = np.bincount(lost, minlength=placement.layers) - usable.sum(axis=(1, 2))
    for layer in np.flatnonzero(short > 0):
        for _ in range(int(short[layer])):
            place = _most_redundant(table[layer], order, placement.experts)
            if place is None:
                break
            table[layer, place[0], place[1]] = EMPTY
    return _split_evenly(placement, table, None)


def _most_redundant(
    table: NDArray[np.int32], order: Sequence[int], experts: int
) -> tuple[int, int] | None:
    """(rank, slot) of a copy of the expert with the most copies, at least two."""
    held = table[order]
    copies = np.bincount(held[held >= 0], minlength=experts)
    count = np.where(held >= 0, copies[np.maximum(held, 0)], 0)
    if count.size == 0 or count.max() < 2:
        return None
    index, slot = np.unravel_index(int(np.argmax(count)), count.shape)
    return order[int(index)], int(slot)


def admit(
    placement: Placement,
    geometry: GeometryLike,
    joiners: Collection[int],
    members: Collection[int],
    *,
    spare: int,
    nodes: Mapping[int, str],
) -> Placement:
    """Give joiners their share of experts: lost ones first, then those with the fewest copies.

    Slots of the members that stay are not touched. A joiner takes as many experts as every rank
    holds on average with 1 + `spare` copies of each. Among experts with equally few copies those
    that lie on no rank of the joiner's node go first.

    Args:
        placement: of the view before, joiners' slots empty.
        geometry: the group's sizes.
        joiners: ranks that come in; all of them are in `members`, too.
        members: ranks of the new view.
        spare: copies beyond the first that are wanted.
        nodes: rank -> node, of all members.
    """
    table = placement.slot_expert.copy()
    table[:, sorted(joiners)] = EMPTY
    share = min(geometry.slots_per_rank, -(-geometry.experts * (1 + spare) // len(members)))
    staying = sorted(set(members) - set(joiners))
    for layer in range(geometry.layers):
        copies = _holdings(table[layer], staying, geometry.experts).sum(axis=0)
        for joiner in sorted(joiners):
            neighbours = [r for r in members if nodes[r] == nodes[joiner] and r != joiner]
            near = _holdings(table[layer], neighbours, geometry.experts).any(axis=0)
            # Fewest copies, then none on this node, then a start that differs between joiners.
            turn = (np.arange(geometry.experts) - joiner * share) % geometry.experts
            chosen = np.lexsort((turn, near, copies))[:share]
            table[layer, joiner, : len(chosen)] = np.sort(chosen)
            copies[chosen] += 1
    return _split_evenly(placement, table, members)


def _others(ranks: Collection[int], max_ranks: int) -> NDArray[np.bool_]:
    """[max_ranks], True for the seats that are not in `ranks`."""
    others = np.ones(max_ranks, np.bool_)
    others[list(ranks)] = False
    return others


def _holdings(table: NDArray[np.int32], ranks: Sequence[int], experts: int) -> NDArray[np.int64]:
    """[len(ranks), experts]: 1 where the rank holds the expert."""
    held = np.zeros((len(ranks), experts), np.int64)
    for index, rank in enumerate(ranks):
        mine = table[rank]
        held[index, mine[mine >= 0]] = 1
    return held


def _split_evenly(
    placement: Placement, table: NDArray[np.int32], ranks: Collection[int] | None
) -> Placement:
    """A placement of these slots in which an expert's replicas share its tokens evenly."""
    if ranks is not None:
        table[:, _others(ranks, placement.max_ranks)] = EMPTY
    weights = spread(table, np.zeros(table.shape, np.uint32), placement.experts)
    return Placement(experts=placement.experts, slot_expert=table, slot_weight=weights)
