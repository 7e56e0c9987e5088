"""When experts are moved in the background, and how far that is: one rebalance at a time. Pure.

    IDLE ─worth judging─▶ PLANNING ─worth doing─▶ RUNNING ─last stage adopted─▶ IDLE
     ▲                       │ no                    │ another view came, or stuck
     └───────────────────────┴───────────────────────┘

A rebalance is a sequence of views. The next one is asked for when the one before is adopted and
nothing else is under way; a view that comes from elsewhere ends it, and what is left is planned
anew from there. Whoever looks at `alive_ms` and `progress_ms` sees whether it still does its work:
a plan or a stage without progress for `stuck_ms` is reported and begun anew.
"""

import enum
import itertools
from dataclasses import dataclass, field
from typing import Final

from elasticep.control import events as ev
from elasticep.control.arrange import Around
from elasticep.control.events import Outcome
from elasticep.control.loads import GroupLoads
from elasticep.control.membership import Membership
from elasticep.control.placement import EMPTY, Placement
from elasticep.control.planning import Figures, PlanJob, Planned, group_policy
from elasticep.control.repair import lost_mask
from elasticep.control.tables import BoolArray
from elasticep.control.views import View, describe_ranks

_FIRST_PAUSE_MS: Final = 1_000  # after one that was abandoned; doubles
_LONGEST_PAUSE_MS: Final = 300_000
HELD: Final = "an imported placement is kept; elasticep rebalance --resume lets experts move again"
_ATTEMPTS: Final = 8  # of what an operator asked for


class Doing(enum.StrEnum):
    """What the background does."""

    IDLE = "idle"
    PLANNING = "planning"
    RUNNING = "running"


@dataclass(slots=True)
class Run:
    """A rebalance under way.

    Attributes:
        planned: the plan.
        base_epoch: the adopted view that the next stage starts from.
        why: for logs and views.
        began_ms: when it began.
        stage: stages adopted.
        open_epoch: the epoch of the stage that is proposed; 0: none is.
        moves_done: copies in adopted stages.
        bytes_done: their bytes.
    """

    planned: Planned
    base_epoch: int
    why: str
    began_ms: int
    stage: int = 0
    open_epoch: int = 0
    moves_done: int = 0
    bytes_done: int = 0

    @property
    def moves(self) -> list[int]:
        """Copies in each stage."""
        tables = [self.planned.job.view.placement, *self.planned.path]
        return [
            int(((b.slot_expert != EMPTY) & (a.slot_expert != b.slot_expert)).sum())
            for a, b in itertools.pairwise(tables)
        ]


@dataclass(frozen=True, slots=True)
class Ended:
    """The last rebalance that came to an end.

    Attributes:
        done: all stages were adopted.
        why: what it was for, or why it was abandoned.
        before: imbalance before, average over layers.
        after: as planned; the one before when it was abandoned.
        moves: copies made.
        move_bytes: their bytes.
        took_ms: from the decision on.
        at_ms: when it ended.
    """

    done: bool
    why: str
    before: float
    after: float
    moves: int
    move_bytes: int
    took_ms: int
    at_ms: int


@dataclass(slots=True)
class Rebalancer:
    """One group's background.

    Attributes:
        paused: an operator wants none; why.
        asked: what an operator asked for that is not done: "", "force" or "import".
        wanted: the placement of an import.
        held: a placement was imported and is kept: nothing moves for balance without being asked.
        doing: what it does.
        why: what it waits for, or does.
        run: the rebalance under way.
        last: the one before.
        alive_ms: when it looked last.
        progress_ms: when a plan or stage made headway last.
        stuck: times that there was none for too long.
        completed: rebalances carried out by this leader.
        loaded_bytes: that members loaded for the view that is open.
    """

    paused: str = ""
    asked: str = ""
    wanted: Placement | None = None
    held: bool = False
    doing: Doing = Doing.IDLE
    why: str = "no view yet"
    run: Run | None = None
    last: Ended | None = None
    alive_ms: int = 0
    progress_ms: int = 0
    stuck: int = 0
    completed: int = 0
    loaded_bytes: int = 0
    _answers: bool = False  # what is planned or run is for what is asked
    _failures: int = 0
    _not_before_ms: int = 0
    _judged: object = None  # what the last judgement was about
    _ended_ms: int | None = None  # when the last one was done
    _single: int = -1  # experts with one copy that the last plan could not help, in this epoch
    _single_of: object = None  # and under these policies
    _job: PlanJob | None = field(default=None, repr=False)

    @classmethod
    def new(cls, saved: ev.SaveRebalance | None, now_ms: int) -> "Rebalancer":
        """As an operator left it."""
        made = cls(alive_ms=now_ms, progress_ms=now_ms)
        if saved is not None:
            made.paused, made.asked, made.held = saved.paused, saved.asked, saved.held
            made.wanted = Placement.from_bytes(saved.placement) if saved.placement else None
        return made

    def record(self) -> ev.SaveRebalance:
        """What must survive a change of the leader."""
        placement = self.wanted.to_bytes() if self.wanted is not None else b""
        return ev.SaveRebalance(self.paused, self.asked, placement, self.held)

    # ---- operators

    def pause(self, why: str, out: Outcome) -> None:
        """Begin nothing, and no further stage of what is under way."""
        self.paused = why or "paused by an operator"
        out.save(self.record())
        out.note("rebalance.paused", reason=self.paused)

    def resume(self, out: Outcome) -> None:
        """Go on, also from a placement that was imported."""
        self.paused, self.held, self._judged = "", False, None
        out.save(self.record())
        out.note("rebalance.resumed")

    def ask(self, asked: str, wanted: Placement | None, out: Outcome) -> None:
        """An operator wants one now, or a placement of their own."""
        self.asked, self.wanted, self._failures, self._not_before_ms = asked, wanted, 0, 0
        self.held = wanted is not None
        self._answers = False  # a plan or rebalance under way was not made for this
        out.save(self.record())
        out.note("rebalance.asked", what=asked)

    def _answered(self, out: Outcome) -> None:
        if self.asked and self._answers:
            self.asked, self.wanted = "", None
            out.save(self.record())

    # ---- time

    def advance(
        self, group: Membership, loads: GroupLoads, now_ms: int, out: Outcome
    ) -> PlanJob | ev.Rearrange | None:
        """Look at the group; returns a plan to make, or a view to propose."""
        self.alive_ms = now_ms
        view = group.view
        if self.doing is not Doing.IDLE and self._stuck(group, now_ms, out):
            return None
        if view is None:
            self.progress_ms = now_ms
            return None
        if self.run is not None:
            return self._go_on(self.run, group, view, now_ms, out)
        if self._job is not None:
            return None
        wanted = self.asked or group.in_force.rebalance.automatic
        if group.quiet_ms(now_ms) >= 0 or self.paused or not wanted:
            self.progress_ms = now_ms
        return self._judge(group, view, loads, now_ms)

    def _stuck(self, group: Membership, now_ms: int, out: Outcome) -> bool:
        pending = group.pending
        loaded = sum(each.done_bytes for each in pending.loading.values()) if pending else 0
        if loaded > self.loaded_bytes or (self.paused and not (self.run and self.run.open_epoch)):
            self.progress_ms = now_ms
        self.loaded_bytes = loaded
        silent_ms = now_ms - self.progress_ms
        if silent_ms < group.in_force.rebalance.stuck_ms:
            return False
        self.stuck += 1
        what = f"no progress for {silent_ms} ms while {self.doing}: {self.why}"
        out.note("rebalance.stuck", reason=what, stuck=self.stuck)
        self._abandon(what, now_ms, out)
        return True

    # ---- whether one is worth it

    def _judge(
        self, group: Membership, view: View, loads: GroupLoads, now_ms: int
    ) -> PlanJob | None:
        policy = group.in_force.rebalance
        quiet_ms = group.quiet_ms(now_ms)
        if quiet_ms < 0:
            self.why = f"a view is under way{f': {group.waiting}' if group.waiting else ''}"
            return None
        around = around_of(group, loads)
        if self.paused:
            self.why = self.paused
            return None
        if not self.asked:
            if not policy.automatic:
                self.why = "automatic rebalancing is off"
                return None
            rested = self._ended_ms is None or now_ms >= self._ended_ms + policy.min_interval_ms
            if quiet_ms < policy.settle_ms or now_ms < self._not_before_ms or not rested:
                self.why = "it is too early after the last view or rebalance"
                return None
            about = (view.epoch, loads.rolls, group.cannot_load, group.policies)
            if self._judged == about:
                return None
            self._judged = about
            now = Figures.of(view.placement, around, view.ranks)
            if self._single_of != (view.epoch, group.policies):
                self._single = -1
            cover = group.in_force.spare_copies >= 1 and now.single != self._single
            lost = _restorable(view.placement, group.refused)
            if self.held and not lost:
                self.why = HELD
                return None
            uneven = around.loads is not None and now.mean > policy.target
            if not (cover and now.single) and not lost and not uneven:
                self.why = f"balanced (imbalance {now.mean:.3f}, target {policy.target:g})"
                if around.loads is None:
                    self.why = "no load is known yet"
                return None
        elif now_ms < self._not_before_ms:
            return None
        self._job = PlanJob(
            around=around,
            view=view,
            policy=group_policy(group.in_force),
            wanted=self.wanted,
            asked=self.asked,
        )
        self._answers = bool(self.asked)
        self.doing, self.why, self.progress_ms = Doing.PLANNING, "a plan is made", now_ms
        return self._job

    def planned(self, planned: Planned, group: Membership, now_ms: int, out: Outcome) -> None:
        """A plan is there."""
        if planned.job is not self._job:
            return  # it was given up meanwhile
        self._job, self.doing, self.progress_ms = None, Doing.IDLE, now_ms
        view = group.view
        if view is None or view.epoch != planned.job.view.epoch or group.quiet_ms(now_ms) < 0:
            self.why = "another view came while the plan was made"
            self._judged = None
            return
        go, self.why = planned.verdict()
        if group.cannot_load:
            ranks = describe_ranks(group.cannot_load)
            self.why += f"; {ranks} failed to load something, so nothing new is given there"
        out.note("rebalance.planned", go=go, reason=self.why)
        if not go:
            self._helped(planned, view.epoch, group)
            if planned.error:
                self._judged = None
                self._pause_after_failure(now_ms)
                self.held = self.held and self.asked != "import"  # it cannot be reached
            self._answered(out)
            return
        self.run = Run(planned, view.epoch, self.why, now_ms)
        self.doing = Doing.RUNNING
        out.note("rebalance.began", stages=len(planned.path), moves=sum(self.run.moves))

    # ---- one under way

    def _go_on(
        self, run: Run, group: Membership, view: View, now_ms: int, out: Outcome
    ) -> ev.Rearrange | None:
        if view.epoch != (run.open_epoch or run.base_epoch):
            self._abandon(f"epoch {view.epoch} came first: {view.reason}", now_ms, out)
            return None
        if run.open_epoch:
            if group.adopted_epoch < run.open_epoch:
                return None
            self._stage_adopted(run, now_ms)
            if run.stage == len(run.planned.path):
                self._finish(run, group, now_ms, out)
                return None
        if group.quiet_ms(now_ms) < 0 or self.paused:
            return None
        stage = f"stage {run.stage + 1} of {len(run.planned.path)}"
        return ev.Rearrange(
            run.base_epoch,
            run.planned.path[run.stage],
            f"rebalance, {stage}: {run.why}",
        )

    def proposed(self, group: Membership, now_ms: int, out: Outcome) -> None:
        """What `advance` wanted proposed was given to the membership; see what came of it."""
        run, view = self.run, group.view
        if run is None or view is None:
            return
        if view.epoch > run.base_epoch and view.placement is run.planned.path[run.stage]:
            run.open_epoch, self.progress_ms = view.epoch, now_ms
        else:
            self._abandon("the group did not take the next stage", now_ms, out)

    def fault(self, why: str, now_ms: int, out: Outcome) -> None:
        """Something unexpected happened in it: it is said, and begun anew after a pause."""
        out.note("rebalance.fault", reason=why)
        self._abandon(why, now_ms, out)

    def _stage_adopted(self, run: Run, now_ms: int) -> None:
        moves = run.moves[run.stage]
        run.moves_done += moves
        run.bytes_done += moves * run.planned.job.policy.bytes_of(0)
        run.stage, run.base_epoch, run.open_epoch = run.stage + 1, run.open_epoch, 0
        self.progress_ms, self.loaded_bytes = now_ms, 0

    def _finish(self, run: Run, group: Membership, now_ms: int, out: Outcome) -> None:
        planned = run.planned
        self.last = Ended(
            True,
            run.why,
            planned.before.mean,
            planned.after.mean,
            run.moves_done,
            run.bytes_done,
            now_ms - run.began_ms,
            now_ms,
        )
        self.completed += 1
        self._failures = 0
        self._ended_ms = now_ms
        self._end(f"done: {run.why}")
        self._helped(planned, run.base_epoch, group)
        out.note(
            "rebalance.done",
            imbalance_before=round(planned.before.mean, 4),
            imbalance_after=round(planned.after.mean, 4),
            moves=run.moves_done,
            move_bytes=run.bytes_done,
            took_ms=now_ms - run.began_ms,
        )
        self._answered(out)

    def _abandon(self, why: str, now_ms: int, out: Outcome) -> None:
        run = self.run
        if run is not None:
            before = run.planned.before.mean
            took_ms = now_ms - run.began_ms
            self.last = Ended(
                False, why, before, before, run.moves_done, run.bytes_done, took_ms, now_ms
            )
        out.note("rebalance.abandoned", reason=why, moves=run.moves_done if run else 0)
        self._pause_after_failure(now_ms)
        self._end(f"abandoned: {why}")
        if self._failures >= _ATTEMPTS:
            self.held = self.held and self.asked != "import"  # it was not reached
            self._answered(out)

    def _helped(self, planned: Planned, epoch: int, group: Membership) -> None:
        """No plan helps more experts to a second copy than this one, until something changes."""
        self._single, self._single_of = planned.after.single, (epoch, group.policies)

    def _pause_after_failure(self, now_ms: int) -> None:
        pause_ms = min(_FIRST_PAUSE_MS << min(self._failures, 20), _LONGEST_PAUSE_MS)
        self._failures += 1
        self._not_before_ms = now_ms + pause_ms

    def _end(self, why: str) -> None:
        self.run = self._job = None
        self.doing, self.why = Doing.IDLE, why
        self.loaded_bytes = 0
        self._judged = None


def around_of(group: Membership, loads: GroupLoads) -> Around:
    """What placements of a group depend on now."""
    return Around(
        group.in_force, dict(group.domains), loads.tokens(), group.refused, group.cannot_load
    )


def _restorable(placement: Placement, refused: BoolArray | None) -> bool:
    """Whether an expert is lost that every node may still be asked for."""
    lost = lost_mask(placement.slot_expert, placement.experts)
    return bool((lost if refused is None else lost & ~refused).any())
