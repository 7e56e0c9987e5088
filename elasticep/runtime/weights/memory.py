"""Memory for expert weights: a memfd with an arena in it, and what its labels say, mirrored.

The daemon reserves and formats it, hands it to the mover for writing and to everybody else for
reading. Since the mover alone writes and reports every change, the daemon need not read labels
again: a scan of a large arena would keep its event loop busy.
"""

import mmap
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elasticep.arena import Arena, SlotState
from elasticep.errors import WeightsError
from elasticep.native.region import create_memory
from elasticep.runtime.regions.memory import check_memory, identity_of
from elasticep.weights import ArenaLayout

_EXPERTS = 64  # columns to begin with
_MOST_EXPERTS = 65_536

NOTHING = -1
"""In `ArenaMemory.held`: no whole expert lies in the slot."""


class ArenaMemory:
    """One arena, mapped for reading.

    Args:
        fd: sealed memfd with a formatted arena; owned from now on.
        layout: that it must have.
        name: for messages: "rank 3 of group 'g'".

    Attributes:
        arena: for reading.
        held: int32 [layers, slots], the expert that lies whole in each slot, or `NOTHING`.
        number: tells this memory from any other of the host, whoever has a descriptor of it.
        settled: False while an earlier daemon's mover may still write into it: what labels said
            when they were read may not hold any more.
        sums: (layer, slot) -> checksum of those.

    Raises:
        GroupMismatch, NativeError, WeightsError: it is not; the descriptor is closed.
    """

    def __init__(self, fd: int, layout: ArenaLayout, name: str) -> None:
        self.fd = fd
        self.layout = layout
        self.name = name
        try:
            check_memory(f"arena of {name}", fd, layout.total_bytes)
            self._map = mmap.mmap(fd, layout.total_bytes, prot=mmap.PROT_READ)
            try:
                self.arena = Arena(self._map, layout)
            except BaseException:
                self._map.close()
                raise
        except BaseException:
            os.close(fd)
            self.fd = -1
            raise
        self.held: NDArray[np.int32] = np.full((layout.layers, layout.slots), NOTHING, np.int32)
        self.sums: dict[tuple[int, int], bytes] = {}
        self.settled = True
        self.number = self.identity[1]
        self._where = np.full((layout.layers, _EXPERTS), NOTHING, np.int32)  # expert -> a slot

    @classmethod
    def create(cls, layout: ArenaLayout, rank: int, name: str) -> "ArenaMemory":
        """Reserve every page and format; takes a while (about a second for some gigabytes), so it
        is called in a thread.

        Raises:
            MemoryShort: names the bytes asked for and available. Nothing is left behind.
        """
        fd = create_memory(f"elasticep-arena-{rank}", layout.total_bytes)
        try:
            with mmap.mmap(fd, layout.total_bytes) as whole:
                Arena.format(whole, layout, rank).release()
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, layout, name)

    @property
    def identity(self) -> tuple[int, int]:
        """Names this memory as long as it exists, whoever holds a descriptor of it."""
        return identity_of(self.fd)

    def reader_fd(self) -> int:
        """A new descriptor that can be mapped for reading only; the caller's."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def read_label(self, layer: int, slot: int) -> None:
        """Take a label into the mirror while nobody writes the slot."""
        try:
            label = self.arena.label(layer, slot)
        except WeightsError:  # broken: the mover empties it
            return
        if label.state is SlotState.VALID and label.expert < _MOST_EXPERTS:
            self.note(layer, slot, label.expert, label.checksum)

    def read_layer(self, layer: int, but: Collection[tuple[int, int]] = ()) -> None:
        """Take all labels of a layer into the mirror, but those of (layer, slot) in `but`, which
        are being written.
        """
        for slot in range(self.layout.slots):
            if (layer, slot) not in but:
                self.forget(layer, slot)
                self.read_label(layer, slot)

    def note(self, layer: int, slot: int, expert: int, checksum: bytes) -> None:
        """The mover has put an expert there."""
        self.forget(layer, slot)
        if expert >= self._where.shape[1]:
            wider = np.full((len(self._where), 2 * expert), NOTHING, np.int32)
            wider[:, : self._where.shape[1]] = self._where
            self._where = wider
        self.held[layer, slot] = expert
        self.sums[layer, slot] = checksum
        self._where[layer, expert] = slot

    def forget(self, layer: int, slot: int) -> None:
        """The slot's bytes are about to change, or may have."""
        expert = int(self.held[layer, slot])
        if expert == NOTHING:
            return
        self.held[layer, slot] = NOTHING
        self.sums.pop((layer, slot), None)
        if self._where[layer, expert] == slot:
            others = np.flatnonzero(self.held[layer] == expert)
            self._where[layer, expert] = others[0] if others.size else NOTHING

    def slot_of(self, layer: int, expert: int) -> int:
        """A slot that holds the expert, or `NOTHING`."""
        return int(self._where[layer, expert]) if expert < self._where.shape[1] else NOTHING

    def slots_of(self, layers: NDArray[np.int64], experts: NDArray[np.int64]) -> NDArray[np.int32]:
        """`slot_of` for many at once: int64 [n] each, int32 [n]."""
        known = experts < self._where.shape[1]
        found: NDArray[np.int32] = np.full(len(layers), NOTHING, np.int32)
        found[known] = self._where[layers[known], experts[known]]
        return found

    def present(self, experts: int) -> NDArray[np.bool_]:
        """Which of the layer's experts lie here: bool [layers, experts]."""
        there = np.zeros((self.layout.layers, experts), np.bool_)
        width = min(experts, self._where.shape[1])
        there[:, :width] = self._where[:, :width] != NOTHING
        return there

    def units(self) -> Iterator[tuple[int, int, int, bytes]]:
        """(layer, slot, expert, checksum) of every whole expert."""
        for (layer, slot), checksum in list(self.sums.items()):
            yield layer, slot, int(self.held[layer, slot]), checksum

    @property
    def valid(self) -> int:
        """Slots with a whole expert."""
        return len(self.sums)

    @property
    def slots(self) -> int:
        """Slots of all layers."""
        return self.layout.layers * self.layout.slots

    @property
    def closed(self) -> bool:
        """Whether the memory was let go of."""
        return self.fd < 0

    def close(self) -> None:
        """Unmap and let go; the memory is freed when nobody else holds it."""
        if self.fd >= 0:
            self.arena.release()
            self._map.close()
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """Where an expert is to be put.

    Attributes:
        memory: the arena.
        layer, slot: the place.
        expert: what goes there.
    """

    memory: ArenaMemory
    layer: int
    slot: int
    expert: int

    @property
    def ref(self) -> tuple[int, int]:
        """(layer, expert)."""
        return self.layer, self.expert
