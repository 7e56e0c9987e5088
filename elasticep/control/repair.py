"""Slot tables that follow a change of members, before tokens are split anew over them. Pure.

The rule that all of them keep: a slot that names an expert on a rank that stays keeps naming it,
because ranks in the old view may still read it. New content goes into slots that are empty in
every view that somebody may run in. When there are not enough of those, `make_room` empties slots
of redundant copies in one view, and the next one fills them.

Tables are int32 [layers, max_ranks, slots_per_rank], as in `Placement.slot_expert`; none is
changed in place.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from elasticep.control.tables import EMPTY, BoolArray, Int32Array

Usable = BoolArray
"""bool [layers, max_ranks, slots_per_rank]: slots that may be given new content."""


def keep(table: Int32Array, ranks: Collection[int]) -> Int32Array:
    """The table with the rows of all other ranks empty."""
    kept = table.copy()
    kept[:, _others(ranks, table.shape[1])] = EMPTY
    return kept


def lost_mask(table: Int32Array, experts: int) -> BoolArray:
    """Mask [layers, experts]: no slot names the expert."""
    layers = table.shape[0]
    key = np.arange(layers)[:, None, None] * experts + table
    count = np.bincount(key[table >= 0], minlength=layers * experts)
    missing: BoolArray = (count == 0).reshape(layers, experts)
    return missing


def usable_slots(ranks: Collection[int], tables: Sequence[Int32Array]) -> Usable:
    """Slots of `ranks` that are empty in all of `tables` (at least one)."""
    usable = np.ones(tables[0].shape, np.bool_)
    for table in tables:
        usable &= table == EMPTY
    usable[:, _others(ranks, tables[0].shape[1])] = False
    return usable


def fill_lost(
    table: Int32Array,
    lost: BoolArray,
    usable: Usable,
    barred: Mapping[int, BoolArray] | None = None,
) -> Int32Array:
    """Give lost experts a usable slot each, on the rank with the most room.

    Args:
        table: the slots.
        lost: bool [layers, experts], whom to place.
        usable: where; experts that find no room stay lost.
        barred: rank -> [layers, experts] that it is not given.
    """
    filled, free = table.copy(), usable.copy()
    for layer in np.flatnonzero(lost.any(axis=1)).tolist():
        room = free[layer].sum(axis=1)
        for expert in np.flatnonzero(lost[layer]).tolist():
            open_to = room.copy() if barred else room
            for other, mask in (barred or {}).items():
                open_to[other] *= not mask[layer, expert]
            rank = int(np.argmax(open_to))
            if open_to[rank] == 0:
                continue
            slot = int(np.argmax(free[layer, rank]))
            filled[layer, rank, slot] = expert
            free[layer, rank, slot] = False
            room[rank] -= 1
    return filled


def restore(
    table: Int32Array, lost: BoolArray, may: Collection[int], in_use: Sequence[Int32Array]
) -> Int32Array:
    """Name lost experts again that still lie where a view in use has them, on one of `may`."""
    found = table.copy()
    order = sorted(may)
    for layer, expert in np.argwhere(lost).tolist():
        for old in in_use:
            held = (old[layer] == expert) & (found[layer] == EMPTY)
            place = next(((r, int(np.argmax(held[r]))) for r in order if held[r].any()), None)
            if place is not None:
                found[layer, place[0], place[1]] = expert
                break
    return found


def make_room(
    table: Int32Array, lost: BoolArray, ranks: Collection[int], usable: Usable
) -> Int32Array:
    """Empty as many slots of redundant copies as lost experts are short of usable slots.

    Copies of the experts with the most of them go first; an expert's last copy on `ranks` never
    does. Nothing is filled: that is for the next view.
    """
    roomy = table.copy()
    order = sorted(ranks)
    short = lost.sum(axis=1) - usable.sum(axis=(1, 2))
    for layer in np.flatnonzero(short > 0):
        for _ in range(int(short[layer])):
            place = _most_redundant(roomy[layer], order, lost.shape[1])
            if place is None:
                break
            roomy[layer, place[0], place[1]] = EMPTY
    return roomy


def cover_single(
    table: Int32Array, ranks: Collection[int], experts: int, staging: int, most: int
) -> Int32Array:
    """Give experts with one copy a second one on some of `ranks`: in a free slot where a rank has
    more than `staging` of them, else in place of a copy that is at least a third one.

    Args:
        table: the slots.
        ranks: who may be given something.
        experts: in each layer.
        staging: slots of a rank that stay free.
        most: copies that are made in all.
    """
    covered = table.copy()
    for layer, rows in enumerate(covered):
        copies = np.bincount(rows[rows != EMPTY], minlength=experts)
        for expert in np.flatnonzero(copies == 1).tolist():
            count = np.where(rows != EMPTY, copies[np.maximum(rows, 0)], 0)
            free = (rows == EMPTY) & ((rows == EMPTY).sum(axis=1, keepdims=True) > staging)
            places = np.where(free, experts + len(rows), np.where(count >= 3, count, 0))
            places[_others(ranks, len(rows)) | (rows == expert).any(axis=1)] = 0
            rank, slot = np.unravel_index(int(np.argmax(places)), places.shape)
            if most == 0 or places[rank, slot] == 0:
                continue
            if rows[rank, slot] != EMPTY:
                copies[rows[rank, slot]] -= 1
            covered[layer, rank, slot] = expert
            most -= 1
    return covered


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


def _others(ranks: Collection[int], max_ranks: int) -> BoolArray:
    """[max_ranks], True for the seats that are not in `ranks`."""
    others = np.ones(max_ranks, np.bool_)
    others[list(ranks)] = False
    return others
