"""Simulated ranks: the step barrier of `csrc/cpu/step.cpp` with one exchange per step.

A rank's memory outlives its processes and is never cleared, like the real one. Cells and flags take
time to arrive; a leave mark is there when its writer goes on, as the fence behind it has it. The
decision itself is the native core's.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from elasticep.control.views import View
from elasticep.native.abi import BANKS
from elasticep.sim.barrier import Cell, Decision, Kind
from elasticep.sim.memory import Links, Memory, Shared
from elasticep.sim.plants import Plant

if TYPE_CHECKING:
    from elasticep.sim.nodes import SimNode

# The real one is shorter; an outage of minutes would take hours.
_DOOMED_PAUSE_S: Final = 0.02
_DOOMED_PAUSE_LARGE_S: Final = 0.25
_EXIT_S: Final = 0.02
_WARMUP_S: Final = 2.5  # beyond hang_timeout, within warmup()
_PULL_S: Final = (0.001, 0.03)  # reading the others' outputs: long, so that faults fall into it


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
        self._floor = memory.last_step()
        self.step = self._floor + 1
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
        self._links = Links(shared, rank, memory.board)
        self._board = memory.board
        self.compiles = False  # after its next steps, within warmup()
        self.warm = False
        self.done = 0
        self._work_number = 0
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
        self.state, self.began_s, self.warm = "barrier", self.s.loop.now_s, False
        self.look()

    def look(self) -> None:
        """Do what can be done now."""
        if self._looking or not self.alive or self.stopped:
            return
        self._work()

    def look_now(self) -> None:
        """Look, if it has a turn."""
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
        decision = self._decide(self.step, [self.views[e] for e in staged])
        if decision.kind is Kind.WAIT and self._join_higher():
            return True
        return self._follow(decision)

    def _join_higher(self) -> bool:
        """Follow a later barrier, where this one cannot be decided; whether there is one."""
        higher = self._higher()
        dead = self.memory.dead
        live = {r: i for r, i in self._members.items() if dead[r] < i}
        if not higher or not self._board.heard_all(live, self.step):
            return False
        self.step, self.said = higher, None
        return True

    def _waits_plainly(self) -> bool:
        """Whether a cell is missing and none says anything new: then the decision is to wait."""
        cells = self._board.cells[self.step & 1]
        news = self._board.newest[1] > self.epoch
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

    def _decide(self, step: int, staged: list[View]) -> Decision:
        decider, said, words = self.s.decider, self.said or (), self._board.words[step & 1]
        if self.s.plant is Plant.EARLY_ADOPT and self.view is not None and staged:
            said, words = tuple(staged), decider.blank()
            for rank, cell in self._board.cells[step & 1].items():
                if cell.step == step and cell.epoch < staged[0].epoch:
                    told = Cell(step, cell.incarnation, (cell.views[0], *staged))
                    decider.word(words, rank, told)
        return decider.decide(
            *(self.me, self.incarnation, step, self.view, said, staged, words, self.memory.dead)
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
            self._next_barrier()
            self.state = "pause"
            pause_s = _DOOMED_PAUSE_LARGE_S if self.s.large else _DOOMED_PAUSE_S
            self.later(pause_s, self.enter_again)
            return False
        self._agree()
        self._begin()
        return True

    def _agree(self) -> None:
        """All run the work after the least that is done on whoever's word counts."""
        assert self.view is not None
        if not self.s.agreed:
            return
        least = min(self._done_by_others(self.view), default=self.done)
        if least < self.done:
            self.s.checker.undone(self.seat, self.view, self.done, least)
            self.done = least
        self._work_number = self.done + 1
        self.s.checker.settled(self.seat, self.view, self.done)

    def _done_by_others(self, view: View) -> list[int]:
        return [
            cell.done
            for rank, cell in self._board.cells[self.step & 1].items()
            if rank != self.me and cell.step == self.step and view.holds(rank, cell.incarnation)
        ]

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
        cell = Cell(self.step, self.incarnation, (self.view, *later), self.done)
        self._links.write((self.view, *later), cell)

    def _higher(self) -> int:
        """The number of a later barrier that a known peer has already written, or 0."""
        highest = 0
        assert self.view is not None
        if self._board.newest[0] <= self.step:
            return 0
        for cells in self._board.cells:
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
            if self.s.large:
                self.s.look_all()
            else:
                self.s.loop.call_soon(memory.poke)

    def _adopt(self, view: View) -> None:
        old, self.view = self.view, view
        for member in old.members if old else ():
            if not view.holds(member.rank, member.incarnation):
                assert old is not None
                self._leave(old, member.rank, expelled=True)
        self.views = {e: v for e, v in self.views.items() if e > view.epoch}
        self.s.checker.adopted(self.seat, view, self.step, old)
        if old is not None:
            self._check_staged(old, view)
        self.node.adopted(self, view)

    def _check_staged(self, old: View, view: View) -> None:
        """Whoever is in both views has staged the new one, or is dead."""
        for member in old.members:
            memory = self.s.memories.get((member.node, member.rank))
            other = memory.rank if memory is not None else None
            if (
                view.holds(member.rank, member.incarnation)
                and other is not None
                and other.incarnation == member.incarnation
                and other.epoch < view.epoch
                and view.epoch not in other.views
                and self.memory.dead[member.rank] < member.incarnation
            ):
                what = f"rank {self.me} adopted epoch {view.epoch}, which rank {other.me} has not"
                self.s.checker.fail("I4", f"{what} staged")

    def _join(self) -> bool:
        for epoch, view in sorted(self.views.items()):
            if view.previous_epoch == 0 and view.holds(self.me, self.incarnation):
                self._adopt(self.views[epoch])
                self.said = None
                return True
        for step in self._board.newest_of(self.me, self.views.values()):
            cells = {r: c for r, c in self._board.cells[step & 1].items() if c.step == step}
            decision = self._decide(step, [v for _, v in sorted(self.views.items())])
            if decision.kind is not Kind.RUN:
                continue
            self.step = step
            if self.s.agreed:
                self.done = min(self._done_by_others(self.views[decision.epoch]), default=self.done)
            if any(c.epoch >= decision.epoch for c in cells.values()):
                self._pass_floor()
                self._adopt(self.views[decision.epoch])
                self.said = None
                return True
            return self._follow(decision)
        return False

    def _next_barrier(self) -> None:
        self.step, self.said = self.step + 1, None
        self._pass_floor()

    def _pass_floor(self) -> None:
        """Be ahead of whatever the memory names; the others follow."""
        if self.step <= self._floor:
            self.step += (self._floor - self.step) // 2 * 2 + 2

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
        self._links.write((self.view,), (self.epoch, self.step))

    def _exchange(self) -> bool:
        memory, mine = self.memory, (self.epoch, self.step)
        if memory.fenced >= self.incarnation or self._left():
            return self._tear()
        waits = None
        for rank in list(self._missing):
            flag = self._board.flags.get(rank, (0, 0))
            if flag == mine:
                self._missing.discard(rank)
                continue
            later = flag[1] > self.step or (flag[1] == self.step and flag[0] != self.epoch)
            if later or memory.dead[rank] >= self._members[rank]:
                return self._tear()
            waits = rank if waits is None else min(waits, rank)
            if self.s.large:
                break  # who tears tells all, so that it is enough to look at one
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
            self.s.checker.step(self.seat, self.step, self.view, self._work_number)
            self.done = self._work_number
            memory.complete += 1
        self._next_barrier()
        self.state = "idle"
        self.progress += 1
        self.waits_for = None
        pause_s = self.s.rng.uniform(*self.s.pace_s) * self.slow
        if self.compiles:
            self.warm, pause_s = True, _WARMUP_S
        self.later(pause_s, self.enter)
