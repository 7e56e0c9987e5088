"""Which experts a node found nobody to supply, and since when. Pure.

Finding none is one node's experience: another may have a checkpoint mounted, reach a peer that this
one does not, or keep a backup. So what a node could not get is asked of others, and is lost for
good only when no node is left to ask. It is asked again after `REFUSAL_MS`, when a node says hello,
when an operator wants it, and when a view gives it the same expert again for another reason.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from elasticep.control.tables import EMPTY, BoolArray, Int32Array

REFUSAL_MS: Final = 300_000  # every retry costs two views for each node that is asked


class Refusals:
    """What each node could not get. Ranks of a node share its daemon, which is who looks.

    Args:
        layers: layers of the group.
        experts: experts in each.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self._shape = (layers, experts)
        self._since: dict[str, NDArray[np.int64]] = {}  # node -> ms [layers, experts]; 0: not said

    def __bool__(self) -> bool:
        return bool(self._since)

    def add(self, node: str, pairs: Iterable[tuple[int, int]], now_ms: int) -> int:
        """A node found nobody to supply these (layer, expert) pairs; how many are news."""
        since = self._since.setdefault(node, np.zeros(self._shape, np.int64))
        named = np.zeros(self._shape, np.bool_)
        for layer, expert in pairs:
            named[layer, expert] = True
        news = int((named & (since == 0)).sum())
        since[named] = max(1, now_ms)
        return news

    def of(self, node: str) -> BoolArray | None:
        """Mask [layers, experts] of what a node could not get; None: nothing."""
        since = self._since.get(node)
        return None if since is None else since > 0

    def by_any(self) -> BoolArray | None:
        """Mask [layers, experts] of what some node could not get; None: nothing."""
        if not self._since:
            return None
        mask: BoolArray = np.any([since > 0 for since in self._since.values()], axis=0)
        return mask

    def clear(self) -> None:
        """Everything may be asked of everybody again."""
        self._since.clear()

    def forget(self, node: str, mask: BoolArray) -> None:
        """A node is asked again for these."""
        since = self._since.get(node)
        if since is not None:
            since[mask] = 0
            self._drop_empty()

    def expire(self, now_ms: int) -> bool:
        """Forget what was said long ago; whether there was any."""
        old = False
        for since in self._since.values():
            over = (since > 0) & (since <= now_ms - REFUSAL_MS)
            old = old or bool(over.any())
            since[over] = 0
        if old:
            self._drop_empty()
        return old

    def _drop_empty(self) -> None:
        self._since = {node: since for node, since in self._since.items() if since.any()}


def given(table: Int32Array, before: Int32Array, ranks: Iterable[int], experts: int) -> BoolArray:
    """Mask [layers, experts]: what these ranks have in `table` in a slot that was not so before."""
    rows = list(ranks)
    new = (table[:, rows] != EMPTY) & (table[:, rows] != before[:, rows])
    mask = np.zeros((len(table), experts), np.bool_)
    layer, _, _ = np.nonzero(new)
    mask[layer, table[:, rows][new]] = True
    return mask


def refused_slots(
    table: Int32Array, in_use: Int32Array, barred: Mapping[int, BoolArray]
) -> BoolArray:
    """Slots that a view wants filled with what their rank's node could not get.

    Args:
        table: slots of the view, int32 [layers, ranks, slots].
        in_use: of the earliest view that somebody may run in.
        barred: rank -> mask [layers, experts].
    """
    refused = np.zeros(table.shape, np.bool_)
    layers = np.arange(len(table))[:, None]
    for rank, mask in barred.items():
        row = table[:, rank]
        new = (row != EMPTY) & (row != in_use[:, rank])
        refused[:, rank] = new & mask[layers, np.maximum(row, 0)]
    return refused
