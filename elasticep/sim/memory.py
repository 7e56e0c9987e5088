"""What the ranks of a simulated group have in common: their memory, and how long stores take."""

import itertools
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from elasticep.control.views import View
from elasticep.sim.barrier import Cell, Decider
from elasticep.sim.checks import Checker
from elasticep.sim.loop import TICK_S, VirtualLoop
from elasticep.sim.plants import Plant

if TYPE_CHECKING:
    from elasticep.sim.ranks import SimRank

LARGE: Final = 16  # ranks; in a larger group what goes to all of them is stored once for all
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
        agreed: ranks are coupled: a work counts once all have completed it.
        broken: pairs of ranks between which cells and flags are held back.
        marked: rank -> highest incarnation whose dead word is in all memory there is.
        held: stores that wait for a broken pair.
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
    agreed: bool
    memories: dict[tuple[str, int], "Memory"] = field(default_factory=dict)
    broken: set[frozenset[int]] = field(default_factory=set)
    marked: dict[int, int] = field(default_factory=dict)
    held: list[Callable[[], None]] = field(default_factory=list)
    _looks: bool = False
    _board: "Board | None" = None

    @property
    def large(self) -> bool:
        """Whether stores to all are made once."""
        return self.max_ranks > LARGE

    def memory_of(self, node: str, rank: int) -> "Memory":
        """New memory of a seat."""
        self.marked.clear()
        if self._board is None:
            self._board = Board(self.decider)
        memory = Memory(self.max_ranks, self._board if self.large else Board(self.decider))
        self.memories[node, rank] = memory
        return memory

    def look_all(self) -> None:
        """All ranks look, once for everything that comes within a moment."""
        if not self._looks:
            self._looks = True
            self.loop.call_later(_MOMENT_S, self._look_all)

    def _look_all(self) -> None:
        self._looks = False
        for memory in self.memories.values():
            if memory.rank is not None:
                memory.rank.look_now()

    def mend(self) -> None:
        """Links work again, and what was held back arrives."""
        self.broken.clear()
        held, self.held = self.held, []
        for store in held:
            store()

    def memory_s(self) -> float:
        """Until a store is seen by its reader."""
        rng = self.rng
        return rng.uniform(*(_MEMORY_SLOW_S if rng.random() < 0.02 else _MEMORY_S))


class Board:
    """Barrier cells and flags, by source; in a large group all ranks read the same ones."""

    def __init__(self, decider: Decider) -> None:
        self._decider = decider
        self.words = [decider.blank(), decider.blank()]
        self.cells: list[dict[int, Cell]] = [{}, {}]
        self.flags: dict[int, tuple[int, int]] = {}  # source -> (epoch, step)
        self.newest = (0, 0)  # highest step and highest epoch in any cell that was ever written

    def write_cell(self, source: int, cell: Cell) -> None:
        """A barrier cell arrives."""
        step, epoch = self.newest
        self.newest = (max(step, cell.step), max(epoch, cell.epoch))
        old = self.cells[cell.step & 1].get(source)
        if old is None or old.incarnation <= cell.incarnation:
            self.cells[cell.step & 1][source] = cell
            self._decider.word(self.words[cell.step & 1], source, cell)

    def heard_all(self, members: Mapping[int, int], step: int) -> bool:
        """Whether each of these, rank -> incarnation, wrote for this barrier or a later one."""
        return all(
            any(
                cells[rank].incarnation == incarnation and cells[rank].step >= step
                for cells in self.cells
                if rank in cells
            )
            for rank, incarnation in members.items()
        )

    def newest_of(self, me: int, views: Collection[View]) -> list[int]:
        """Of each parity the highest barrier that a member of these views wrote, later first."""
        steps = [
            [
                cell.step
                for rank, cell in cells.items()
                if rank != me and any(v.holds(rank, cell.incarnation) for v in views)
            ]
            for cells in self.cells
        ]
        return sorted((max(of_parity) for of_parity in steps if of_parity), reverse=True)

    def write_flag(self, source: int, flag: tuple[int, int]) -> None:
        """The flag of a dispatch arrives."""
        self.flags[source] = flag


class Memory:
    """A seat's regions: what others and the daemon write, and who runs on it now."""

    def __init__(self, max_ranks: int, board: Board) -> None:
        self.board = board
        self.leave: dict[int, tuple[int, int, bool]] = {}  # source -> (step, epoch, expelled)
        self.dead: NDArray[np.uint32] = np.zeros(max_ranks, np.uint32)
        self.fenced = 0
        self.step = 0
        self.complete = 0  # steps; the load counters follow from it
        self.identity = next(_MEMORIES)
        self.rank: SimRank | None = None

    def last_step(self) -> int:
        """The highest step that anything here names."""
        named = [self.step, *(step for step, _, _ in self.leave.values())]
        named += (cell.step for cells in self.board.cells for cell in cells.values())
        return max(named)

    def poke(self) -> None:
        """Something was written: its rank looks."""
        if self.rank is not None:
            self.rank.look()


class Links:
    """A rank's stores into the others' memory.

    Args:
        shared: the group's.
        me: the rank.
        board: its own, which in a large group is everybody's.
    """

    def __init__(self, shared: Shared, me: int, board: Board) -> None:
        self._s = shared
        self._me = me
        self._board = board
        self._last_s: dict[int, float] = {}

    def write(self, views: tuple[View, ...], what: Cell | tuple[int, int]) -> None:
        """Store a cell or a flag into the memory of all members; each link keeps its order."""
        if self._s.large:
            self._s.loop.call_at(self._at_s(-1), self._write_all, what)
            return
        for rank, memory in self._targets(views).items():
            self._s.loop.call_at(self._at_s(rank), self._arrive, rank, memory, what)

    def _at_s(self, link: int) -> float:
        loop = self._s.loop
        at_s = max(self._last_s.get(link, 0.0) + TICK_S, loop.now_s + self._s.memory_s())
        self._last_s[link] = at_s
        return at_s

    def _targets(self, views: tuple[View, ...]) -> dict[int, Memory]:
        found: dict[int, Memory] = {}
        for view in views:
            for member in view.members:
                memory = self._s.memories.get((member.node, member.rank))
                if member.rank != self._me and memory is not None:
                    found.setdefault(member.rank, memory)
        return found

    def _write_all(self, what: Cell | tuple[int, int]) -> None:
        self._put(self._board, what)
        self._s.look_all()

    def _arrive(self, rank: int, memory: Memory, what: Cell | tuple[int, int]) -> None:
        if frozenset((self._me, rank)) in self._s.broken:
            self._s.held.append(lambda: self._arrive(rank, memory, what))
            return
        self._put(memory.board, what)
        memory.poke()

    def _put(self, board: Board, what: Cell | tuple[int, int]) -> None:
        if isinstance(what, Cell):
            board.write_cell(self._me, what)
        else:
            board.write_flag(self._me, what)
