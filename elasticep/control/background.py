"""What goes on behind a group's membership: its load, and moving experts by it. Pure."""

from dataclasses import dataclass, replace
from typing import Final

from elasticep.control import events as ev
from elasticep.control.arrange import Around
from elasticep.control.events import Outcome
from elasticep.control.loads import GroupLoads
from elasticep.control.membership import Membership
from elasticep.control.placement import Placement, PlanPolicy
from elasticep.control.planning import Figures, PlanJob, Planned, group_policy
from elasticep.control.rebalance import Rebalancer, around_of
from elasticep.errors import UsageError

SAVE_LOADS_MS: Final = 600_000  # the next leader has newer ones within some windows


@dataclass(frozen=True, slots=True)
class Pause:
    """Nothing is to be moved."""

    reason: str


@dataclass(frozen=True, slots=True)
class Resume:
    """It may be again."""


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """Rebalance now ("force"), or go to a placement ("import")."""

    what: str
    placement: Placement | None = None


class Background:
    """One group's loads and rebalances.

    Args:
        membership: the group.
        saved: what an operator wanted, as the store has it.
        now_ms: the time.
    """

    def __init__(self, membership: Membership, saved: ev.SaveRebalance | None, now_ms: int) -> None:
        self._group = membership
        geometry, policy = membership.config.geometry, membership.in_force.rebalance
        self.loads = GroupLoads(
            geometry.layers, geometry.experts, policy.window_ms, now_ms, membership.loads
        )
        self._save_loads_ms = now_ms
        self.rebalancer = Rebalancer.new(saved, now_ms)

    def load(self, report: ev.LoadReport) -> Outcome:
        """Counters of a rank. What makes no sense is refused, and said."""
        out = Outcome()
        seat = self._group.seats.get(report.rank)
        if seat is None or seat.node != report.node:
            why = "the node does not hold the seat"
            out.note("report.refused", node=report.node, rank=report.rank, why=why)
            return out
        if not seat.live or seat.incarnation != report.incarnation:
            return out  # of an incarnation that is over: an echo
        try:
            added = self.loads.report(
                report.node,
                report.rank,
                report.incarnation,
                report.memory,
                report.first_layer,
                report.counters,
            )
        except UsageError as error:
            out.note("load.refused", node=report.node, rank=report.rank, why=str(error))
            return out
        if added:
            out.note("load.counted", tokens=added)
        return out

    def job(
        self,
        policy: PlanPolicy | None = None,
        *,
        asked: str = "",
    ) -> PlanJob:
        """A plan from the view in force, outside of what the background does.

        Raises:
            UsageError: there is no view.
        """
        view = self._group.view
        if view is None:
            raise UsageError(f"group {self._group.config.name!r} has no view yet; nothing to move")
        around = self.around
        return PlanJob(
            around=replace(around, refused=None) if asked else around,
            view=view,
            policy=policy or group_policy(self._group.in_force),
            asked=asked,
        )

    @property
    def around(self) -> Around:
        """Config, domains and loads, as they are."""
        return around_of(self._group, self.loads)

    def operate(self, event: Ask | Pause | Resume, now_ms: int) -> list[Outcome]:
        """What an operator wants."""
        out = Outcome()
        if isinstance(event, Pause):
            self.rebalancer.pause(event.reason, out)
        elif isinstance(event, Resume):
            self.rebalancer.resume(out)
        else:
            self.rebalancer.ask(event.what, event.placement, out)
            return [out, self._group.handle(ev.Retry(), now_ms)]
        return [out]

    def tick(self, now_ms: int) -> tuple[list[Outcome], PlanJob | None]:
        """Time has passed. Returns what is to be done, and a plan that is to be made."""
        outcomes = []
        self.loads.window_ms = self._group.in_force.rebalance.window_ms
        if self.loads.tick(now_ms):
            tokens = self.loads.tokens()
            window = self._group.handle(ev.Loads(tokens), now_ms)
            view = self._group.view
            if tokens is not None and now_ms >= self._save_loads_ms:
                window.save(ev.SaveLoads(tokens))
                self._save_loads_ms = now_ms + SAVE_LOADS_MS
            if view is not None:
                now = Figures.of(view.placement, self.around, view.ranks)
                window.note(
                    "load.window",
                    known=tokens is not None,
                    imbalance=round(now.mean, 4),
                    worst=round(now.worst, 4),
                    cannot_load=len(self._group.cannot_load),
                )
            outcomes.append(window)
        out = Outcome()
        try:
            wanted = self.rebalancer.advance(self._group, self.loads, now_ms, out)
        except Exception as error:  # an error of ours here must not cost the group its leader
            self.rebalancer.fault(f"{type(error).__name__}: {error}", now_ms, out)
            wanted = None
        outcomes.append(out)
        if isinstance(wanted, PlanJob):
            return outcomes, wanted
        if wanted is not None:
            outcomes.append(self._group.handle(wanted, now_ms))
            after = Outcome()
            self.rebalancer.proposed(self._group, now_ms, after)
            outcomes.append(after)
        return outcomes, None

    def planned(self, planned: Planned, now_ms: int) -> Outcome:
        """A plan was made."""
        out = Outcome()
        self.rebalancer.planned(planned, self._group, now_ms, out)
        return out
