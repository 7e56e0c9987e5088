"""What ranks that come in hold at first: a rule that takes a few milliseconds, not a plan. Pure.

A view that lets ranks in is decided in the controller's loop, while nothing else is. What a plan
would do better follows in the background, when they serve.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from elasticep.control.tables import EMPTY, BoolArray, Int32Array

_ENOUGH = 1.25  # of the mean load: a joiner with copies for this much takes its part of the tokens
_LOST, _SINGLE, _NEAR = 6.0, 4.0, 2.0  # how much a copy is wanted; the rest is below 1


def fill_joiners(
    table: Int32Array,
    tokens: NDArray[np.int64],
    room: Mapping[int, int],
    nodes: Mapping[int, str],
    staying: Sequence[int],
    *,
    cover: bool,
    fill: bool,
    refused: BoolArray | None = None,
) -> Int32Array:
    """The table with the joiners' slots filled, layer by layer, slot by slot, in turn.

    Experts without a copy on ranks that stay come first, then those with one copy (first those
    whose copy is in another node), then those with the most tokens for each copy.

    Args:
        table: slots, int32 [layers, max_ranks, slots]; the joiners' rows are empty.
        tokens: int64 [layers, experts].
        room: joiner -> slots that it may fill.
        nodes: rank -> node, of all members.
        staying: members that are no joiners and do not leave.
        cover: second copies are wanted.
        fill: no slot is to stay empty; else a layer has enough when the joiner gets its part.
        refused: [layers, experts] that nobody is given while it is lost; None: nothing.
    """
    filled = table.copy()
    layers, experts = tokens.shape
    copies = _held(filled, staying, experts)
    anywhere = _held(filled, list(nodes), experts) > 0
    closed = np.zeros((layers, experts), np.bool_) if refused is None else refused & ~anywhere
    near = {
        node: _held(filled, [r for r in staying if nodes[r] == node], experts) > 0
        for node in {nodes[rank] for rank in room}
    }
    has = {rank: np.zeros((layers, experts), np.bool_) for rank in room}
    reach = {rank: np.zeros(layers) for rank in room}
    enough = tokens.sum(axis=1) * (_ENOUGH / max(1, len(staying) + len(room)))
    heat = (tokens + 1.0) / (tokens.max(axis=1, keepdims=True) + 2.0)
    row = np.arange(layers)
    for slot in range(max(room.values(), default=0)):
        for rank in (rank for rank in sorted(room) if slot < room[rank]):
            worth = heat / np.maximum(copies, 1) + _LOST * (copies == 0)
            if cover:
                worth += (copies == 1) * np.where(near[nodes[rank]], _NEAR, _SINGLE)
            worth[has[rank] | closed] = -1.0
            best = worth.argmax(axis=1)
            most = worth[row, best]
            take = (most > 0) & (fill | (most >= _NEAR) | (reach[rank] < enough))
            at, expert = row[take], best[take]
            filled[at, rank, slot] = expert
            copies[at, expert] += 1
            has[rank][at, expert] = near[nodes[rank]][at, expert] = True
            reach[rank][at] += tokens[at, expert] / copies[at, expert]
    return filled


def _held(table: Int32Array, ranks: Sequence[int], experts: int) -> NDArray[np.int64]:
    """Copies of each expert on these ranks, int64 [layers, experts]."""
    layers = len(table)
    rows = table[:, list(ranks)]
    key = np.arange(layers)[:, None, None] * experts + rows
    return np.bincount(key[rows != EMPTY], minlength=layers * experts).reshape(layers, experts)
