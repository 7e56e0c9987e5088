"""A plan: the placement, what it costs, and why it looks as it does."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticep.control.policy import PlanPolicy, RankInfo
from elasticep.control.tables import Placement

METHODS = ("kept", "repaired", "fresh")


@dataclass(frozen=True, slots=True)
class Move:
    """One copy of an expert's weights.

    Attributes:
        layer: of the model's mixture-of-experts layers.
        expert: logical expert.
        rank: where it goes.
        slot: into which slot.
        sources: live ranks that hold it, those of the same domain first, draining ones last;
            empty when it has to come from a backup or the checkpoint.
        size_bytes: bytes copied.
    """

    layer: int
    expert: int
    rank: int
    slot: int
    sources: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One layer's figures; `PlanReport` says what they mean."""

    imbalance_before: float | None
    imbalance_after: float
    bound: float
    moves: int
    restored: int
    lost: int
    single: int
    same_node: int
    method: str
    spilled: int


@dataclass(frozen=True, slots=True, eq=False)
class PlanReport:
    """What a plan does. Imbalance is the highest rank load over the mean of the open ranks.

    Attributes:
        imbalance_before: worst layer under the previous placement with the new loads; None
            without a previous placement.
        imbalance_after: worst layer under the plan.
        mean_imbalance_after: average over layers.
        bound: worst layer's lower bound; no placement on these slots can be below it.
        moves: slots that get other weights than they hold.
        restored: of these, experts that no rank held.
        move_bytes: bytes of all moves.
        lost: (layer, expert) pairs left without a copy (re-split only: nothing may move).
        single: experts, over all layers, with one copy on ranks that stay.
        same_node: experts, over all layers, whose copies all lie in one node.
        spilled: experts that a missing copy forces out of their group's node.
        grouped: whether expert groups are kept inside nodes.
        reason: one sentence that says all of this.
        layers: one entry per layer.
    """

    imbalance_before: float | None
    imbalance_after: float
    mean_imbalance_after: float
    bound: float
    moves: int
    restored: int
    move_bytes: int
    lost: tuple[tuple[int, int], ...]
    single: int
    same_node: int
    spilled: int
    grouped: bool
    reason: str
    layers: tuple[LayerReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and logs; layers left out."""
        names = [name for name in self.__slots__ if name not in ("layers", "lost")]
        return {name: getattr(self, name) for name in names} | {
            "lost": [list(p) for p in self.lost]
        }


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Result of `plan`.

    Attributes:
        placement: the tables.
        report: what it costs and why.
        previous: the placement it starts from, with what dead ranks held taken out; or None.
        ranks: the ranks it was made for.
        policy: what was asked for.
    """

    placement: Placement
    report: PlanReport
    previous: Placement | None
    ranks: tuple[RankInfo, ...]
    policy: PlanPolicy

    def moves(self) -> list[Move]:
        """Copies that the plan needs, by layer, rank and slot. A source is always alive."""
        domain = {info.rank: info.domain for info in self.ranks}
        draining = {info.rank: info.draining for info in self.ranks}
        old = self.previous.slot_expert if self.previous else None
        new = self.placement.slot_expert
        changed = (new >= 0) if old is None else (new >= 0) & (new != old)
        wanted: list[Move] = []
        for layer, rank, slot in np.argwhere(changed).tolist():
            expert = int(new[layer, rank, slot])
            holders = _holders(old, layer, expert)
            here = domain[rank]
            holders.sort(key=lambda r: (draining[r], domain[r] != here, r))
            size = self.policy.bytes_of(layer)
            wanted.append(Move(layer, expert, rank, slot, tuple(holders), size))
        return wanted


def _holders(table: NDArray[np.int32] | None, layer: int, expert: int) -> list[int]:
    if table is None:
        return []
    return [int(rank) for rank in np.flatnonzero((table[layer] == expert).any(axis=1))]


def explain(report: NDArray[Any], policy: PlanPolicy, moved_bytes: int) -> str:
    """The sentence of reason, from the planner's per-layer records."""
    methods = np.bincount(report["method"], minlength=3)
    after, bound = float(report["after"].max()), float(report["bound"].max())
    before = float(report["before"].max())
    parts: list[str] = []
    if methods[0] == len(report):
        parts.append("nothing moves, tokens are split anew")
    elif methods[2] == len(report) and before == 0.0:
        parts.append(f"{len(report)} layers placed for the first time")
    else:
        names = ("split anew", "repaired", "built anew")
        shown = [f"{n} {name}" for n, name in zip(methods, names, strict=True) if n]
        parts.append(f"of {len(report)} layers {', '.join(shown)}")
    change = f"{before:.3f} -> {after:.3f}" if before > 0.0 else f"{after:.3f}"
    parts.append(f"highest rank load {change} of the mean (no placement can be below {bound:.3f})")
    moves, restored = int(report["moves"].sum()), int(report["restored"].sum())
    if moves:
        size = f", {moved_bytes} bytes" if moved_bytes else ""
        parts.append(f"{moves} copies{size}" + (f", {restored} from a backup" if restored else ""))
    lost, single = int(report["lost"].sum()), int(report["single"].sum())
    if lost:
        parts.append(f"{lost} experts have no copy")
    if policy.cover and single:
        parts.append(f"{single} experts have one copy only")
    elif policy.cover and not lost:
        parts.append("no single death uncovers an expert")
    if report["global"].any():
        parts.append("expert groups do not fit into nodes, so they are not kept together")
    return "; ".join(parts)
