"""The arena of one seat: reserved in the background, kept over incarnations, and which of its slots
may be written.

The rule for slots: a slot that holds an expert is overwritten only if no view that this rank runs,
or may still switch to, names it. Those views are the one that its header says it runs, and every
later one that was handed to its runner (`pin`): no other can be adopted by this rank, because the
runner never heard of it. Nobody else computes from this arena, and whoever copies out of it looks
at label and checksum, so other ranks' epochs do not matter here. The controller keeps a stricter
rule on top (new content only in slots that are empty in every view that any member may run in),
because of which a fill hardly ever has to wait for this one.
"""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from elasticep.runtime.node import Signal
from elasticep.runtime.weights.memory import NOTHING, ArenaMemory
from elasticep.runtime.weights.views import MAX_VIEWS, ViewBook, ViewTable

if TYPE_CHECKING:
    from elasticep.runtime.keeper import SeatKeeper


@dataclass(frozen=True, slots=True)
class Copying:
    """What the engine's session copies from the arena to its GPU, as it says; zeros: nothing.

    Attributes:
        epoch: the view that it is for.
        done: bytes that have arrived there.
        total: bytes in all.
    """

    epoch: int = 0
    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a view, when it was first to be staged.

    Attributes:
        arena: bytes that the arena lacked of it.
        gpu: bytes that the rank's GPU lacks of it, at most; 0 where there is none.
    """

    arena: int = 0
    gpu: int = 0


class SeatWeights:
    """One rank's.

    Args:
        keeper: of the seat.
        views: the slot tables that the group knows.
        on_gpu: the engine's session copies what a view names to its GPU before it is staged.

    Attributes:
        memory: the arena; None until it is reserved, and after a restart that lost it.
        lost: a runner of before a restart computes from an arena that this daemon has not.
        pinned: epochs that were handed to the present incarnation's runner.
        changed: notified when slots, pins or the arena changed.
        epoch, done, total: the view whose weights are being put in place (0: none), in bytes.
        beats: grows with headway towards it that is no bytes of its own.
        copying: what is on its way to the GPU.
    """

    def __init__(self, keeper: "SeatKeeper", views: ViewBook, *, on_gpu: bool = False) -> None:
        self.keeper = keeper
        self.on_gpu = on_gpu
        self.memory: ArenaMemory | None = None
        self.opening: asyncio.Task[None] | None = None
        self.lost = False
        self.pinned: set[int] = set()
        self.changed = Signal()
        self.wanted: set[int] = set()  # epochs whose fill has not ended
        self.epoch = 0
        self.done = 0
        self.total = 0
        self.beats = 0
        self.copying = Copying()
        self._sizes: dict[int, Sizes] = {}  # epoch -> of views that are not staged yet
        self._headway = 0
        self._views = views

    @property
    def rank(self) -> int:
        """The seat's rank."""
        return self.keeper.rank

    @property
    def running(self) -> int:
        """The epoch that the rank runs, 0 = none yet."""
        status = self.keeper.status()
        return status.epoch if status is not None else 0

    def granted(self) -> None:
        """A new incarnation has the seat: nobody computes from the arena."""
        self.pinned.clear()
        self.lost = False
        self.copies_ended()

    def note_headway(self, headway: int) -> None:
        """So much was copied on this node, while this seat has its turn before it."""
        if headway != self._headway:
            self._headway = headway
            self.beats += 1

    # ---- how far a view is

    def measure(self, view: ViewTable, arena: int, unit: int) -> None:
        """A view is to be staged: how much that is to move.

        Args:
            view: the view.
            arena: bytes that the arena lacks of it.
            unit: bytes of an expert.
        """
        gpu = 0
        if self.on_gpu:
            table, there = view.of(self.rank), self._views.get(self.running)
            wanted = table != NOTHING
            if there is not None:  # what the rank computes with lies on its GPU
                wanted &= table != there.of(self.rank)
            gpu = int(wanted.sum()) * unit
        self._sizes.setdefault(view.epoch, Sizes(arena, gpu))
        while len(self._sizes) > MAX_VIEWS:
            del self._sizes[min(self._sizes)]

    def heard(self, copying: Copying) -> None:
        """The session says how far its copies are; of a view that it answered it says nothing."""
        if copying.epoch in self._sizes:
            self.copying = copying

    def answered(self, epoch: int) -> None:
        """The session staged a view, or said why it cannot."""
        self._sizes.pop(epoch, None)
        if self.copying.epoch == epoch:
            self.copying = Copying()

    def copies_ended(self) -> None:
        """With the incarnation that made them."""
        self._sizes.clear()
        self.copying = Copying()

    def staging(self) -> tuple[int, int, int]:
        """(epoch, bytes done, bytes in all) of the latest view that is being put in place, first in
        the arena and then on the GPU; zeros when none is. Both count from the start, so that what
        is done of a view only grows, and never beyond what was said at first.
        """
        epoch = max(self.epoch, self.copying.epoch)
        sizes = self._sizes.get(epoch, Sizes())
        if epoch == self.epoch:
            done = max(0, min(self.done + self.beats, self.total))
            return epoch, done, self.total + sizes.gpu
        done = min(self.copying.done, sizes.gpu)
        return epoch, sizes.arena + done, sizes.arena + sizes.gpu

    # ---- slots

    def missing(self, table: NDArray[np.int32]) -> list[tuple[int, int, int]]:
        """(layer, slot, expert) of what a view wants and the arena does not hold.

        Args:
            table: int32 [layers, slots] of the view, -1 = empty.
        """
        assert self.memory is not None
        layer, slot = np.nonzero((table != NOTHING) & (table != self.memory.held))
        return [
            (int(at), int(number), int(table[at, number]))
            for at, number in zip(layer, slot, strict=True)
        ]

    def blocked(self, layer: int, slot: int, expert: int) -> bool:
        """Whether a view in use reads something else in this slot."""
        assert self.memory is not None
        running = self.running
        self.pinned = {epoch for epoch in self.pinned if epoch >= running}
        in_use = self.pinned | ({running} if running else set())
        for epoch in in_use:
            view = self._views.get(epoch)
            if view is None:  # forgotten in a restart: then everything may be in use
                if self.memory.held[layer, slot] not in (NOTHING, expert):
                    return True
                continue
            named = view.of(self.rank)[layer, slot]
            if named not in (NOTHING, expert):
                return True
        return False

    def same_as_running(self, table: NDArray[np.int32]) -> bool:
        """Whether a view names nothing but what the running one names in the same slots."""
        view = self._views.get(self.running)
        if view is None:
            return False
        return not bool(((table != NOTHING) & (table != view.of(self.rank))).any())

    def close(self) -> None:
        """Let go of the memory."""
        if self.opening is not None:
            self.opening.cancel()
            self.opening = None
        if self.memory is not None:
            self.keeper.node.mover.give_up(self.memory)
            self.memory.close()
            self.memory = None
