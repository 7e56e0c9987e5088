"""The barrier's decision on simulated cells, made by the native core itself."""

import ctypes
import enum
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from elasticep.control.views import View
from elasticep.native import abi

CELL_WORDS: Final = 7
_VIEWS: Final = 256  # kept at a time; epochs that are in use at once are few


class Kind(enum.IntEnum):
    """What a rank is to do."""

    WAIT = 0
    RUN = 1
    EXPELLED = 2


@dataclass(frozen=True, slots=True)
class Decision:
    """See `BarrierDecision` in csrc/common/barrier.h."""

    kind: Kind
    epoch: int
    waits_for: int
    doomed: bool


@dataclass(frozen=True, slots=True)
class Cell:
    """What a rank says at a barrier: its running view, then the later ones that it has staged."""

    step: int
    incarnation: int
    views: tuple[View, ...]
    done: int = 0  # works complete, of agreed completion

    @property
    def epoch(self) -> int:
        """Of the view that it runs in."""
        return self.views[0].epoch


class Decider:
    """Calls the core for one group.

    Args:
        ranks: seats of the group.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._decide = abi.api().ep_barrier_decide
        self._epochs: NDArray[np.uint64] = np.zeros(_VIEWS, np.uint64)
        self._members: NDArray[np.uint32] = np.zeros((_VIEWS, ranks), np.uint32)
        self._mine: NDArray[np.int32] = np.zeros(1 + 2 * abi.BANKS, np.int32)
        self._out: NDArray[np.uint64] = np.zeros(5, np.uint64)

    def _index(self, view: View) -> int:
        index = view.epoch % _VIEWS
        if self._epochs[index] != view.epoch:
            self._epochs[index] = view.epoch
            self._members[index] = 0
            for member in view.members:
                self._members[index, member.rank] = member.incarnation
        return index

    def blank(self) -> NDArray[np.uint64]:
        """Words for no cells at all."""
        return np.zeros((self._ranks, CELL_WORDS), np.uint64)

    def word(self, words: NDArray[np.uint64], rank: int, cell: Cell) -> None:
        """Put a cell among the words that the core reads."""
        indices = [self._index(view) for view in cell.views]
        words[rank, : 3 + len(indices)] = (cell.step, cell.incarnation, len(indices), *indices)

    def decide(
        self,
        me: int,
        incarnation: int,
        step: int,
        running: View | None,
        said: tuple[View, ...],
        staged: list[View],
        words: NDArray[np.uint64],
        dead: NDArray[np.uint32],
    ) -> Decision:
        """What a rank decides.

        Args:
            me: its rank.
            incarnation: its own.
            step: the barrier's number.
            running: its view; None: a joiner.
            said: later views in its own cell.
            staged: later views that it has by now, ascending.
            words: the others' cells, for any step, as `word` gives them, uint64 [ranks, 7].
            dead: uint32 [ranks], highest dead incarnations.
        """
        index = self._index
        mine = self._mine
        mine[:] = -1
        if running is not None:
            mine[0] = index(running)
        for i, view in enumerate(said):
            mine[1 + i] = index(view)
        for i, view in enumerate(staged[: abi.BANKS]):
            mine[1 + abi.BANKS + i] = index(view)
        code = self._decide(
            *(self._ranks, me, incarnation, step),
            *(
                ctypes.c_void_p(array.ctypes.data)
                for array in (self._epochs, self._members, mine, words, dead, self._out)
            ),
        )
        abi.check(code, "deciding at a simulated barrier")
        kind, epoch, _, waits_for, doomed = self._out.tolist()
        return Decision(Kind(kind), epoch, waits_for, bool(doomed))
