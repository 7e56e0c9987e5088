"""What must hold in every schedule: I2 to I6 of the protocol. All that happens is told here."""

import hashlib
import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from elasticep.control.placement import EMPTY
from elasticep.control.store import Put
from elasticep.control.views import View

_LOG_LINES: Final = 400
_STEPS_KEPT: Final = 4_096
Seat = tuple[str, int, int]
"""Group, rank, incarnation."""


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant that broke."""

    invariant: str
    what: str
    at_s: float

    def __str__(self) -> str:
        return f"{self.at_s:9.3f} s: {self.invariant} is broken: {self.what}"


class Checker:
    """Takes down what happens and compares.

    Args:
        now: simulated seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._digest = hashlib.blake2b(digest_size=16)
        self.log: deque[str] = deque(maxlen=_LOG_LINES)
        self.violations: list[Violation] = []
        self.views: dict[tuple[str, int], View] = {}
        self._line: dict[tuple[str, int], int] = {}  # epoch -> the view without a predecessor
        self._written: dict[str, int] = {}  # group -> highest epoch in the store
        self._started: set[Seat] = set()
        self._runs: dict[Seat, int] = {}
        self._left: dict[Seat, str] = {}
        self._steps: dict[tuple[str, int, int], tuple[int, Seat, int]] = {}
        self._settled: dict[tuple[str, int], int] = {}  # (group, line) -> work
        self.acknowledged: dict[tuple[str, int], bool] = {}  # (group, rank) -> drained
        self.completed: dict[Seat, tuple[int, int]] = {}  # steps complete, epoch of the last
        self.total_steps = 0

    # ---- the trace

    def trace(self, text: str) -> None:
        """Something worth a line."""
        line = f"{self._now():9.3f} s: {text}"
        self.log.append(line)
        self._digest.update(line.encode())

    def fail(self, invariant: str, what: str) -> None:
        """An invariant is broken."""
        self.violations.append(Violation(invariant, what, self._now()))
        self.trace(f"{invariant} is broken: {what}")

    @property
    def digest(self) -> str:
        """Of everything that happened so far."""
        return self._digest.hexdigest()

    # ---- views

    def written(self, put: Put) -> None:
        """The store took a write of a leader."""
        _, _, rest = put.key.partition("/groups/")
        group, _, what = rest.partition("/")
        if what.startswith("history/"):
            epoch = int(what.removeprefix("history/"))
            if epoch <= self._written.get(group, 0):
                self.fail("I4", f"epoch {epoch} was written after {self._written[group]}")
            self._written[group] = epoch
            self.trace(f"store: {json.loads(put.value)['sentence']}")

    def view(self, view: View) -> View:
        """A node heard of a view; returns the one object that all share."""
        known = self.views.get((view.group, view.epoch))
        if known is None:
            self.views[view.group, view.epoch] = known = view
            root = self._line.get((view.group, view.previous_epoch), view.previous_epoch)
            self._line[view.group, view.epoch] = root if view.previous_epoch else view.epoch
            self._covered(view)
            if view.epoch > self._written.get(view.group, 0):
                self.fail("I4", f"epoch {view.epoch} was shown before it was in the store")
        elif known.digest != view.digest:
            self.fail("I4", f"there are two views of epoch {view.epoch}")
        return known

    def _covered(self, view: View) -> None:
        slots = view.placement.slot_expert[:, list(view.ranks)]
        experts = view.placement.experts
        lost = {
            (layer, expert)
            for layer in range(slots.shape[0])
            for expert in np.setdiff1d(np.arange(experts), slots[layer]).tolist()
        }
        if lost != set(view.lost):
            self.fail("I5", f"epoch {view.epoch} lacks {sorted(lost)[:4]}, says {view.lost[:4]}")

    def filled(self, group: str, rank: int, view: View, running: list[View]) -> None:
        """A rank puts the content of a view's slots in place while others run `running`."""
        new = view.placement.slot_expert[:, rank]
        for used in running:
            old = used.placement.slot_expert[:, rank]
            if ((new != old) & (new != EMPTY) & (old != EMPTY)).any():
                self.fail(
                    "I5",
                    f"rank {rank} overwrites a slot for epoch {view.epoch} that epoch "
                    f"{used.epoch} uses",
                )

    # ---- ranks

    def started(self, seat: Seat) -> None:
        """A process took a seat."""
        if seat in self._started:
            self.fail("I3", f"incarnation {seat[2]} of rank {seat[1]} was used twice")
        self._started.add(seat)

    def adopted(self, seat: Seat, view: View, step: int, before: View | None) -> None:
        """A rank runs in a view from a step on."""
        group, rank, incarnation = seat
        self.trace(f"rank {rank}.{incarnation} of {group} runs epoch {view.epoch} at step {step}")
        if not view.holds(rank, incarnation):
            self.fail("I4", f"rank {rank}.{incarnation} adopted epoch {view.epoch} without it")
        if view.epoch <= self._runs.get(seat, 0):
            self.fail("I4", f"rank {rank}.{incarnation} went back to epoch {view.epoch}")
        self._runs[seat] = view.epoch
        for member in before.members if before else ():
            if not view.holds(member.rank, member.incarnation):
                gone = (group, member.rank, member.incarnation)
                self._left.setdefault(gone, f"rank {rank} in epoch {view.epoch} at step {step}")

    def step(self, seat: Seat, step: int, view: View, work: int) -> None:
        """A rank completed a step; `work` 0: completion is local."""
        group, rank, incarnation = seat
        self._digest.update(f"{self._now():.6f} {seat} {step} {view.epoch} {work}".encode())
        self.total_steps += 1
        if seat in self._left:
            self.fail(
                "I3",
                f"rank {rank}.{incarnation} completed step {step} after it was left by "
                f"{self._left[seat]}",
            )
        line = self._line[group, view.epoch]
        ran = self._steps.setdefault((group, line, step), (view.epoch, seat, work))
        if (ran[0], ran[2]) != (view.epoch, work):
            self.fail(
                "I4",
                f"step {step} ran in epoch {ran[0]} (work {ran[2]}) on rank {ran[1][1]} and in "
                f"{view.epoch} (work {work}) on rank {rank}",
            )
        if len(self._steps) > _STEPS_KEPT:
            del self._steps[next(iter(self._steps))]
        self.completed[seat] = (self.completed.get(seat, (0, 0))[0] + 1, view.epoch)

    def undone(self, seat: Seat, view: View, done: int, least: int) -> None:
        """A rank takes works back, because others could not complete them."""
        group, rank, incarnation = seat
        if done - least > 1:
            self.fail("I4", f"rank {rank}.{incarnation} takes {done - least} works back")
        if least < self._settled.get((group, self._line[group, view.epoch]), 0):
            self.fail("I4", f"rank {rank}.{incarnation} takes work {done} back, which was settled")

    def settled(self, seat: Seat, view: View, work: int) -> None:
        """A barrier showed a rank that all have completed a work."""
        key = (seat[0], self._line[seat[0], view.epoch])
        self._settled[key] = max(self._settled.get(key, 0), work)
