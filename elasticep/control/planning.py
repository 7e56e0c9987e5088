"""Planning a rebalance: a job that can run beside the controller's loop, and its result. Pure."""

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from elasticep.control.arrange import Around, expert_bytes, plan_policy, split, target
from elasticep.control.placement import Placement, Plan, PlanPolicy
from elasticep.control.report import LayerReport, PlanReport
from elasticep.control.stages import StagingImpossible, stages
from elasticep.control.views import Member, View
from elasticep.errors import ElasticEPError
from elasticep.group import GroupConfig

INLINE_CELLS = 1 << 14  # layers x experts x ranks up to which a plan takes some milliseconds


@dataclass(frozen=True, slots=True)
class Figures:
    """A placement under some loads. Imbalance is the busiest rank's load over the mean.

    Attributes:
        mean: imbalance, average over layers.
        worst: of the worst layer.
        single: (layer, expert) pairs with one copy.
        lost: pairs with none.
    """

    mean: float
    worst: float
    single: int
    lost: int

    @classmethod
    def of(cls, placement: Placement, around: Around, ranks: Collection[int]) -> "Figures":
        """Of a placement on these ranks."""
        each = imbalances(placement, around, ranks)
        copies = placement.copies()
        return cls(
            float(each.mean()),
            float(each.max()),
            int((copies == 1).sum()),
            int((copies == 0).sum()),
        )


def imbalances(
    placement: Placement, around: Around, ranks: Collection[int]
) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Imbalance of every layer, float64 [layers]; 1.0 where nothing is to do."""
    of_rank = placement.rank_loads(around.tokens)[:, sorted(ranks)]
    total = of_rank.sum(axis=1)
    peak = of_rank.max(axis=1) * of_rank.shape[1]
    each: np.ndarray[tuple[int], np.dtype[np.float64]] = np.divide(
        peak, total, out=np.ones_like(total), where=total > 0
    )
    return each


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanJob:
    """Plan from a view in force.

    Attributes:
        around: config, domains and loads.
        view: the view.
        policy: what is asked of the planner.
        wanted: the placement to go to; None: the planner finds one.
        asked: what an operator asked for: "", "force" or "import".
    """

    around: Around
    view: View
    policy: PlanPolicy
    wanted: Placement | None = None
    asked: str = ""

    @property
    def small(self) -> bool:
        """Whether it takes no time worth a thread."""
        geometry = self.around.config.geometry
        return geometry.layers * geometry.experts * len(self.view.members) <= INLINE_CELLS

    def failed(self, why: str) -> "Planned":
        """The result when it could not be done."""
        nothing = Figures(1.0, 1.0, 0, 0)
        return Planned(self, nothing, nothing, None, (), why)

    def run(self) -> "Planned":
        """Do it; an error is part of the result."""
        members = self.view.members
        ranks = self.view.ranks
        before = Figures.of(self.view.placement, self.around, ranks)
        try:
            made = self._imported(members) if self.wanted is not None else self._planned(members)
            path = self._path(made)
        except StagingImpossible as stuck:
            if self.wanted is not None:
                return Planned(self, before, before, None, (), str(stuck))
            made = self._without(made, stuck.layers)
            path = self._path(made)
        except ElasticEPError as error:
            return Planned(self, before, before, None, (), str(error))
        after = Figures.of(made.placement, self.around, ranks)
        return Planned(self, before, after, made, path, "")

    def _path(self, made: Plan) -> tuple[Placement, ...]:
        now = self.view.placement
        if now == made.placement:
            return ()
        infos = self.around.infos(self.view.members, whole=True)
        return stages(now, made.placement, infos, self.around.tokens, self.policy)

    def _without(self, made: Plan, layers: Collection[int]) -> Plan:
        """The plan, with tokens only split anew in layers whose moves have no place to pass."""
        now = self.view.placement
        kept = split(self.around, now.slot_expert, self.view.members, now)
        expert, weight = made.placement.slot_expert.copy(), made.placement.slot_weight.copy()
        expert[list(layers)] = kept.slot_expert[list(layers)]
        weight[list(layers)] = kept.slot_weight[list(layers)]
        placement = Placement(experts=kept.experts, slot_expert=expert, slot_weight=weight)
        moved = int(((expert >= 0) & (expert != self.view.placement.slot_expert)).sum())
        report = replace(
            made.report,
            moves=moved,
            move_bytes=moved * self.policy.bytes_of(0),
            reason=f"{made.report.reason}; {len(layers)} layers have no slot to move through",
        )
        return replace(made, placement=placement, report=report)

    def _planned(self, members: tuple[Member, ...]) -> Plan:
        return target(self.around, self.view.placement, members, policy=self.policy)

    def _imported(self, members: tuple[Member, ...]) -> Plan:
        assert self.wanted is not None
        self.wanted.validate(self.around.config.geometry, self.view.ranks)
        before = self.view.placement.slot_expert
        moved = (self.wanted.slot_expert >= 0) & (self.wanted.slot_expert != before)
        each = imbalances(self.wanted, self.around, self.view.ranks)
        old = imbalances(self.view.placement, self.around, self.view.ranks)
        moves = moved.sum(axis=(1, 2))
        size = self.policy.bytes_of(0)
        layers = tuple(
            LayerReport(float(b), float(a), 1.0, int(m), 0, 0, 0, 0, "imported", 0)
            for b, a, m in zip(old, each, moves, strict=True)
        )
        report = PlanReport(
            imbalance_before=float(old.max()),
            imbalance_after=float(each.max()),
            mean_imbalance_after=float(each.mean()),
            bound=1.0,
            moves=int(moves.sum()),
            restored=0,
            move_bytes=int(moves.sum()) * size,
            lost=(),
            single=int((self.wanted.copies() == 1).sum()),
            same_node=0,
            spilled=0,
            grouped=False,
            reason=f"an imported placement, {int(moves.sum())} copies",
            layers=layers,
        )
        infos = self.around.infos(members, whole=True)
        return Plan(self.wanted, report, self.view.placement, infos, self.policy)


@dataclass(frozen=True, slots=True)
class Planned:
    """What a job found.

    Attributes:
        job: the job.
        before: the view's placement.
        after: the plan's.
        plan: the plan; None: there is none.
        path: placements to adopt one after the other; empty: nothing would change.
        error: why there is no plan.
    """

    job: PlanJob
    before: Figures
    after: Figures
    plan: Plan | None
    path: tuple[Placement, ...]
    error: str

    @property
    def chance(self) -> float:
        """What the busiest of all ranks may have above the mean by chance: three standard
        deviations of a rank's tokens in a layer, relative to their mean.
        """
        around = self.job.around
        if around.loads is None:
            return 0.0
        each = around.loads.sum() / (len(around.loads) * len(self.job.view.members))
        return float(3.0 / np.sqrt(max(each, 1.0)))

    @property
    def gain(self) -> float:
        """By which fraction the busiest ranks' load falls, over all layers."""
        return self.before.mean / self.after.mean - 1.0

    def verdict(self) -> tuple[bool, str]:
        """Whether it is worth doing, and why."""
        policy = self.job.around.config.rebalance
        if self.plan is None:
            return False, self.error
        change = f"imbalance {self.before.mean:.3f} -> {self.after.mean:.3f}"
        if not self.path:
            return False, f"nothing better was found ({change})"
        cost = f"{self.plan.report.moves} copies, {self.plan.report.move_bytes} bytes"
        if self.job.asked:
            return True, f"asked for by an operator: {change}, {cost}"
        if self.after.lost < self.before.lost:
            return True, f"{self.before.lost - self.after.lost} lost experts return: {cost}"
        if self.after.single < self.before.single:
            better = self.before.single - self.after.single
            return True, f"{better} experts get a second copy: {change}, {cost}"
        if self.job.around.loads is None:
            return False, "no load is known yet, so there is none to balance"
        if self.before.mean <= policy.target:
            return False, f"balanced ({change}; target {policy.target:g})"
        if self.gain < policy.min_gain:
            return False, f"not worth it: {change} for {cost}; min_gain is {policy.min_gain:g}"
        if self.gain < self.chance:
            return False, f"so few tokens may be uneven by chance: {change}"
        return True, f"{change}, {cost}"


def group_policy(config: GroupConfig) -> PlanPolicy:
    """The planner's policy for a rebalance within the group's limits."""
    limits = [config.rebalance.max_moves] if config.rebalance.max_moves else []
    size = expert_bytes(config)
    if config.rebalance.max_bytes and size:
        limits.append(config.rebalance.max_bytes // size)
    return replace(plan_policy(config), max_moves=min(limits, default=None))
