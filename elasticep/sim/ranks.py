"""Simulated ranks: the step barrier of `csrc/cpu/step.cpp` with one exchange per step.

A rank's memory outlives its processes and is never cleared, like the real one. Cells and flags take
time to arrive; a leave mark is there when its writer goes on, as the fence behind it has it. The
decision itself is the native core's.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from elasticep.control.views import View
from elasticep.native.abi import BANKS
from elasticep.sim.barrier import Cell, Decider, Decision, Kind
from elasticep.sim.checks import Checker
from elasticep.sim.loop import TICK_S, VirtualLoop
from elasticep.sim.plants import Plant

if TYPE_CHECKING:
    from elasticep.sim.nodes import SimNode

_DOOMED_PAUSE_S: Final = 0.02  # the real one is shorter; an outage of minutes would take hours
_EXIT_S: Final = 0.02
_LARGE: Final = 16  # ranks; a larger group's cells go out in one event
_PULL_S: Final = (0.001, 0.03)  # reading the others' outputs: long, so that faults fall into it
_MOMENT_S: Final = 0.003
_MEMORIES: Final = itertools.count(1)
_MEMORY_S: Final = (0.000_02, 0.001)
_MEMORY_SLOW_S: Final = (0.001, 0.05)


@dataclass(slots=True)
class Shared:
    """What all ranks of a group have in common.

    Attributes:
        memories: (node, rank) -> memory; a node's death frees it.
        pace_s: time that an engine takes between steps, least and most.
    """

    loop: VirtualLoop
    rng: random.Random
    checker: Checker
    plant: Plant
    group: str
    max_ranks: int
    exchange_s: float
    step_s: float
    pace_s: tuple[float, float]
    decider: Decider
    memories: dict[tuple[str, int], "Memory"] = field(default_factory=dict)

    def memory_s(self) -> float:
        """Until a store is seen by its reader."""
        rng = self.rng
        return rng.uniform(*(_MEMORY_SLOW_S if rng.random() < 0.02 else _MEMORY_S))


class Memory:
    """A seat's regions: what others and the daemon write, and who runs on it now."""

    def __init__(self, max_ranks: int) -> None:
        self.cells: list[dict[int, Cell]] = [{}, {}]
        self.flags: dict[int, tuple[int, int]] = {}  # source -> (epoch, step)
        self.leave: dict[int, tuple[int, int, bool]] = {}  # source -> (step, epoch, expelled)
        self.newest = (0, 0)  # highest step and highest epoch in any cell that was ever written
        self.dead: NDArray[np.uint32] = np.zeros(max_ranks, np.uint32)
        self.fenced = 0
        self.step = 0
        self.complete = 0  # steps; the load counters follow from it
        self.identity = next(_MEMORIES)
        self.rank: SimRank | None = None

    def poke(self) -> None:
        """Something was written: its rank looks."""
        if self.rank is not None:
            self.rank.look()


class SimRank:
    """One incarnation's processes.

    Args:
        shared: the group's.
        node: where it runs.
        rank: its seat.
        incarnation: its own.
        memory: the seat's.
    """

    def __init__(
        self, shared: Shared, node: "SimNode", rank: int, incarnation: int, memory: Memory
    ) -> None:
        self.s = shared
        self.node = node
        self.me = rank
        self.incarnation = incarnation
        self.seat = (shared.group, rank, incarnation)
        self.memory = memory
        self.alive = True
        self.stopped = False
        self.view: View | None = None
        self.views: dict[int, View] = {}  # staged, later than `view`
        self.said: tuple[View, ...] | None = None  # later views in the posted cell; None: not yet
        self.step = memory.step + 1
        self.state = "idle"  # idle, barrier, pause, exchange, pull
        self.torn = False
        self.began_s = 0.0
        self.waits_for: int | None = None
        self.waits_since_s = 0.0
        self.progress = 0
        self.slow = 1.0
        self._missing: set[int] = set()
        self._kept: list[Callable[[], None]] = []
        self._looking = False
        self._looks_at_s = 0.0
        self._links: dict[int, float] = {}
        memory.rank = self
        shared.checker.started(self.seat)

    # ---- its life

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """A timer of this process: a stopped one acts on it when it continues."""
        self.s.loop.call_later(delay_s, self._fire, action)

    def _fire(self, action: Callable[[], None]) -> None:
        if not self.alive:
            return
        if self.stopped:
            self._kept.append(action)
        else:
            action()

    def cont(self) -> None:
        """SIGCONT."""
        self.stopped = False
        kept, self._kept = self._kept, []
        for action in kept:
            self._fire(action)
        self.look()

    def kill(self) -> None:
        """SIGKILL."""
        self.alive = False
        if self.memory.rank is self:
            self.memory.rank = None

    def stage(self, view: View) -> None:
        """A view's bank is written."""
        self.views[view.epoch] = view
        self.look()

    @property
    def epoch(self) -> int:
        """That it runs in, 0: none."""
        return self.view.epoch if self.view else 0

    # ---- the engine

    def enter(self) -> None:
        """The engine calls step()."""
        self.state, self.began_s = "barrier", self.s.loop.now_s
        self.look()

    def look(self) -> None:
        """Do what can be done now."""
        if self._looking or not self.alive or self.stopped:
            return
        if self.s.max_ranks > _LARGE:  # one look for all that comes within a moment
            if self._looks_at_s > self.s.loop.now_s:
                return
            self._looks_at_s = self.s.loop.now_s + _MOMENT_S
            self.s.loop.call_at(self._looks_at_s, self._look_now)
            return
        self._work()

    def _look_now(self) -> None:
        self._looks_at_s = 0.0
        if not self._looking and self.alive and not self.stopped:
            self._work()

    def _work(self) -> None:
        self._looking = True
        try:
            while self._advance():
                pass
        finally:
            self._looking = False

    def _advance(self) -> bool:
        if self.state == "barrier":
            return self._barrier()
        if self.state == "exchange":
            return self._exchange()
        return False

    # ---- the barrier

    def _barrier(self) -> bool:
        memory = self.memory
        if memory.fenced >= self.incarnation:
            return self._expelled("it was fenced")
        if self.view is None:
            return self._join()
        left = self._left_behind()
        if left:
            return self._expelled(f"others went on in epoch {left}")
        if self.said is None:
            self._post()
        if self._waits_plainly():
            return self._join_higher()
        staged = sorted(v.epoch for v in self.views.values())
        cells = {r: c for r, c in memory.cells[self.step & 1].items() if c.step == self.step}
        decision = self._decide(self.step, cells, [self.views[e] for e in staged])
        if decision.kind is Kind.WAIT and self._join_higher():
            return True
        return self._follow(decision)

    def _join_higher(self) -> bool:
        """Follow a later barrier, where this one cannot be decided; whether there is one."""
        higher = self._higher()
        if higher:
            self.step, self.said = higher, None
        return bool(higher)

    def _waits_plainly(self) -> bool:
        """Whether a cell is missing and none says anything new: then the decision is to wait."""
        cells = self.memory.cells[self.step & 1]
        news = self.memory.newest[1] > self.epoch
        for rank in list(self._missing):
            member = self._members[rank]
            cell = cells.get(rank)
            come = cell is not None and cell.step == self.step and cell.incarnation == member
            if come or self.memory.dead[rank] >= member:
                self._missing.discard(rank)
            elif not news or all(
                c.step != self.step or c.epoch <= self.epoch for c in cells.values()
            ):
                self._wait(rank)
                return True
        return False

    def _decide(self, step: int, cells: dict[int, Cell], staged: list[View]) -> Decision:
        if self.s.plant is Plant.EARLY_ADOPT and self.view is not None and staged:
            cells = {r: Cell(c.step, c.incarnation, (c.views[0], *staged)) for r, c in cells.items()
                     if c.epoch < staged[0].epoch}  # fmt: skip
            return self.s.decider.decide(
                *(self.me, self.incarnation, step, self.view, tuple(staged), staged),
                *(cells, self.memory.dead),
            )
        return self.s.decider.decide(
            *(self.me, self.incarnation, step, self.view, self.said or (), staged),
            *(cells, self.memory.dead),
        )

    def _follow(self, decision: Decision) -> bool:
        if decision.kind is Kind.EXPELLED:
            return self._expelled(f"others went on in epoch {decision.epoch}")
        if decision.kind is Kind.WAIT:
            self._wait(decision.waits_for)
            if self.s.loop.now_s - self.began_s >= self.s.step_s:
                self.waits_for = None
                self.began_s = self.s.loop.now_s  # StepTimeout; the engine calls again
            return False
        if decision.epoch != self.epoch:
            self._adopt(self.views[decision.epoch])
        self.progress += 1
        self.waits_for = None
        if decision.doomed:
            assert self.view is not None
            for member in self.view.members:
                self._leave(self.view, member.rank, expelled=False)
            self.step, self.said, self.state = self.step + 1, None, "pause"
            self.later(_DOOMED_PAUSE_S, self.enter_again)
            return False
        self._begin()
        return True

    def enter_again(self) -> None:
        """After a doomed barrier."""
        if self.state == "pause":
            self.state = "barrier"
            self.look()

    def _wait(self, rank: int) -> None:
        if self.waits_for != rank:
            self.waits_for, self.waits_since_s = rank, self.s.loop.now_s

    def _post(self) -> None:
        assert self.view is not None
        later = [v for e, v in sorted(self.views.items()) if self.epoch < e < self.epoch + BANKS]
        self.said = tuple(later)
        self._members = {m.rank: m.incarnation for m in self.view.members if m.rank != self.me}
        self._missing = set(self._members)
        cell = Cell(self.step, self.incarnation, (self.view, *later))
        self._write(self._targets((self.view, *later)), self._write_cell, cell)

    def _targets(self, views: tuple[View, ...]) -> dict[int, "Memory"]:
        found: dict[int, Memory] = {}
        for view in views:
            for member in view.members:
                memory = self.s.memories.get((member.node, member.rank))
                if member.rank != self.me and memory is not None:
                    found.setdefault(member.rank, memory)
        return found

    def _write(
        self, targets: dict[int, "Memory"], write: Callable[[Memory, Any], None], what: Any
    ) -> None:
        """Store into others' memory; each link keeps its order."""
        loop = self.s.loop
        if len(targets) > _LARGE:
            at_s = max(self._links.get(-1, 0.0) + TICK_S, loop.now_s + self.s.memory_s())
            self._links[-1] = at_s
            loop.call_at(at_s, self._write_all, list(targets.values()), write, what)
            return
        for rank, memory in targets.items():
            at_s = max(self._links.get(rank, 0.0) + TICK_S, loop.now_s + self.s.memory_s())
            self._links[rank] = at_s
            loop.call_at(at_s, self._write_all, (memory,), write, what)

    def _write_all(self, memories: Any, write: Callable[[Memory, Any], None], what: Any) -> None:
        for memory in memories:
            write(memory, what)
            memory.poke()

    def _write_cell(self, memory: Memory, cell: Cell) -> None:
        step, epoch = memory.newest
        memory.newest = (max(step, cell.step), max(epoch, cell.epoch))
        old = memory.cells[cell.step & 1].get(self.me)
        if old is None or old.incarnation <= cell.incarnation:
            memory.cells[cell.step & 1][self.me] = cell

    def _write_flag(self, memory: Memory, flag: tuple[int, int]) -> None:
        memory.flags[self.me] = flag

    def _higher(self) -> int:
        """The number of a later barrier that a known peer has already written, or 0."""
        highest = 0
        assert self.view is not None
        if self.memory.newest[0] <= self.step:
            return 0
        for cells in self.memory.cells:
            for rank, cell in cells.items():
                if cell.step <= max(self.step, highest):
                    continue
                known = (self.view, *self.views.values())
                alive = self.memory.dead[rank] < cell.incarnation
                if alive and any(v.holds(rank, cell.incarnation) for v in known):
                    highest = cell.step
        return highest

    def _left_behind(self) -> int:
        for _, epoch, expelled in self.memory.leave.values():
            if expelled and epoch > self.epoch:
                return epoch
        return 0

    def _leave(self, view: View, rank: int, *, expelled: bool) -> None:
        """Write a leave mark; it is there before anything that this rank does next."""
        member = view.member(rank)
        if rank == self.me or member is None or self.s.plant is Plant.NO_LEAVE_CELL:
            return
        memory = self.s.memories.get((member.node, rank))
        if memory is not None:
            old = memory.leave.get(self.me, (0, 0, False))
            memory.leave[self.me] = (max(self.step, old[0]), self.epoch, expelled)
            self.s.loop.call_soon(memory.poke)

    def _adopt(self, view: View) -> None:
        old, self.view = self.view, view
        for member in old.members if old else ():
            if not view.holds(member.rank, member.incarnation):
                assert old is not None
                self._leave(old, member.rank, expelled=True)
        self.views = {e: v for e, v in self.views.items() if e > view.epoch}
        self.s.checker.adopted(self.seat, view, self.step, old)
        self.node.adopted(self, view)

    def _join(self) -> bool:
        for epoch, view in sorted(self.views.items()):
            if view.previous_epoch == 0 and view.holds(self.me, self.incarnation):
                self._adopt(self.views[epoch])
                self.said = None
                return True
        steps = sorted(
            {c.step for cells in self.memory.cells for c in cells.values()}, reverse=True
        )
        for step in steps[:2]:
            cells = {r: c for r, c in self.memory.cells[step & 1].items() if c.step == step}
            decision = self._decide(step, cells, [v for _, v in sorted(self.views.items())])
            if decision.kind is not Kind.RUN:
                continue
            self.step = step
            if any(c.epoch >= decision.epoch for c in cells.values()):
                self._adopt(self.views[decision.epoch])
                self.said = None
                return True
            return self._follow(decision)
        return False

    def _expelled(self, why: str) -> bool:
        self.state = "over"
        self.memory.fenced = max(self.memory.fenced, self.incarnation)
        self.s.checker.trace(f"rank {self.me}.{self.incarnation} learns that {why}")
        self.later(_EXIT_S, lambda: self.node.exited(self, "it was expelled"))
        return False

    # ---- the exchange

    def _begin(self) -> None:
        assert self.view is not None
        self.state, self.torn, self.began_s = "exchange", False, self.s.loop.now_s
        self.memory.step = self.step
        self._members = {m.rank: m.incarnation for m in self.view.members if m.rank != self.me}
        self._missing = set(self._members)
        self._write(self._targets((self.view,)), self._write_flag, (self.epoch, self.step))

    def _exchange(self) -> bool:
        memory, mine = self.memory, (self.epoch, self.step)
        if memory.fenced >= self.incarnation or self._left():
            return self._tear()
        waits = None
        for rank in list(self._missing):
            flag = memory.flags.get(rank, (0, 0))
            if flag == mine:
                self._missing.discard(rank)
                continue
            later = flag[1] > self.step or (flag[1] == self.step and flag[0] != self.epoch)
            if later or memory.dead[rank] >= self._members[rank]:
                return self._tear()
            waits = rank if waits is None else min(waits, rank)
        if waits is None:
            self.state, self.waits_for = "pull", None
            self.later(self.s.rng.uniform(*_PULL_S) * self.slow, self._end)
            return False
        self._wait(waits)
        if self.s.loop.now_s - self.began_s >= self.s.exchange_s:
            return self._tear()
        return False

    def _left(self) -> bool:
        return any(step >= self.step for step, _, _ in self.memory.leave.values())

    def _tear(self) -> bool:
        assert self.view is not None
        for member in self.view.members:
            self._leave(self.view, member.rank, expelled=False)
        self.torn = True
        self._end()
        return False

    def _end(self) -> None:
        """The last act of a step."""
        memory = self.memory
        assert self.view is not None
        if not self.torn and (self._left() or memory.fenced >= self.incarnation):
            self.torn = True
            for member in self.view.members:
                self._leave(self.view, member.rank, expelled=False)
        if not self.torn:
            self.s.checker.step(self.seat, self.step, self.view)
            memory.complete += 1
        self.step, self.said, self.state = self.step + 1, None, "idle"
        self.progress += 1
        self.waits_for = None
        self.later(self.s.rng.uniform(*self.s.pace_s) * self.slow, self.enter)
