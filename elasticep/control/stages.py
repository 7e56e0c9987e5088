"""From one placement to another through views that overwrite nothing in use.

While a view runs, its slots are read. So a new view may fill only slots that the view before it
leaves empty, and may empty a slot only if the expert has another copy by then. A slot whose content
changes therefore takes two views: one that no longer uses it, one that uses what was put there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from elasticep.control.planner import resplit
from elasticep.control.policy import PlanPolicy, RankInfo
from elasticep.control.tables import EMPTY, BoolArray, Int32Array, Placement
from elasticep.errors import ConfigError, PlacementError

_DEFAULT = PlanPolicy()


class StagingImpossible(PlacementError):
    """Experts change places and no slot is free to put one of them meanwhile.

    Attributes:
        layers: layers where this is so.
    """

    reason = "PLACEMENT_NO_STAGING_SLOT"

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        shown = ", ".join(str(layer) for layer in self.layers[:16])
        more = ", ..." if len(self.layers) > 16 else ""
        super().__init__(
            f"layers {shown}{more}: experts with one copy change places and every slot holds such "
            "an expert; leave one slot empty (raise slots_per_rank) or add a rank"
        )


def stages(
    previous: Placement,
    target: Placement,
    ranks: Sequence[RankInfo],
    loads: ArrayLike,
    policy: PlanPolicy = _DEFAULT,
) -> tuple[Placement, ...]:
    """Placements to adopt one after the other; the last one is `target`.

    Each fills only slots that the one before leaves empty, and every expert that has a copy in
    `previous` has one in each. In those on the way tokens are split as well as the copies allow.

    Args:
        previous: the placement in force, without what dead ranks held (`Plan.previous`).
        target: where to go.
        ranks: the ranks alive, as given to `plan`.
        loads: integers [layers, experts], as given to `plan`.
        policy: as given to `plan`.

    Raises:
        StagingImpossible: experts would have to change places without a slot to pass through.
        ConfigError: the two placements are of different sizes.
    """
    if previous.slot_expert.shape != target.slot_expert.shape or previous.experts != target.experts:
        raise ConfigError(
            f"placements of {previous.slot_expert.shape} and {target.slot_expert.shape} slots; "
            "plan the target with the sizes of the placement in force"
        )
    exists = np.zeros(target.slot_expert.shape[1:], np.bool_)
    for info in ranks:
        exists[info.rank, : info.slots] = True
    paths = []
    stuck = []
    for layer in range(target.layers):
        path = _path(previous.slot_expert[layer], target.slot_expert[layer], exists)
        paths.append(path or [target.slot_expert[layer]])
        if path is None:
            stuck.append(layer)
    if stuck:
        raise StagingImpossible(stuck)
    on_the_way = []
    for step in range(max(len(path) for path in paths) - 1):
        tables = np.stack([path[min(step, len(path) - 1)] for path in paths])
        held = Placement(
            experts=target.experts,
            slot_expert=tables,
            slot_weight=np.zeros(tables.shape, np.uint32),
        )
        on_the_way.append(resplit(loads, ranks, held, policy).placement)
    return (*on_the_way, target)


@dataclass(slots=True)
class _Detours:
    """Experts that wait in a slot that is not theirs until their place is free."""

    waiting: set[tuple[int, int]] = field(default_factory=set)
    reserved: dict[tuple[int, int], int] = field(default_factory=dict)  # slot about to be emptied


def _path(now: Int32Array, target: Int32Array, exists: BoolArray) -> list[Int32Array] | None:
    """Tables [ranks, slots] of one layer, the last one equal to `target`; None if there is none."""
    detours = _Detours()
    path: list[Int32Array] = []
    for _ in range(4 * now.size + 4):
        if np.array_equal(now, target):
            return path or [target]
        after = _fill_and_empty(now, target, detours)
        if np.array_equal(after, now) and not _detour(now, after, target, exists, detours):
            return None
        path.append(after)
        now = after
    return None


def _fill_and_empty(now: Int32Array, target: Int32Array, detours: _Detours) -> Int32Array:
    """The next table: what is free is filled, what is wrong is emptied where a copy remains."""
    after = now.copy()
    for rank, slot in np.argwhere(now == EMPTY).tolist():
        expert = int(target[rank, slot])
        if (rank, slot) in detours.reserved:
            expert = detours.reserved.pop((rank, slot))
            detours.waiting.add((rank, slot))
        if expert != EMPTY:
            # The rank may hold it in another slot: the copy moves over within the same view.
            after[rank][after[rank] == expert] = EMPTY
            after[rank, slot] = expert
    for rank, slot in np.argwhere((now >= 0) & (now != target)).tolist():
        expert = now[rank, slot]
        if after[rank, slot] != expert:
            continue
        arrived = bool(((after == expert) & (target == expert)).any())
        if (after == expert).sum() >= 2 and (arrived or (rank, slot) not in detours.waiting):
            after[rank, slot] = EMPTY
            detours.waiting.discard((rank, slot))
    return after


def _detour(
    now: Int32Array, after: Int32Array, target: Int32Array, exists: BoolArray, detours: _Detours
) -> bool:
    """Experts block each other in a ring: put one aside, if need be where a copy that is not the
    only one gives way; that one comes back at the end. Changes `after`; False if nothing can go.
    """
    counts = np.bincount(now[now >= 0], minlength=1)
    blocked = np.argwhere((now >= 0) & (now != target) & (target >= 0)).tolist()
    free = np.argwhere(exists & (now == EMPTY) & (target == EMPTY)).tolist()
    spare = [
        (rank, slot)
        for rank, slot in np.argwhere((now >= 0) & (now == target)).tolist()
        if counts[now[rank, slot]] >= 2
    ]
    for rank, slot in blocked:
        expert = int(now[rank, slot])
        for aside, place in free:
            if aside == rank:
                after[rank, slot] = EMPTY  # it moves over within its rank
            if aside == rank or expert not in now[aside]:
                after[aside, place] = expert
                detours.waiting.add((aside, place))
                return True
        for aside, place in spare:
            if expert not in now[aside]:
                after[aside, place] = EMPTY
                detours.reserved[aside, place] = expert
                return True
    return False
