"""Which of many experts lie on this node, and where."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from elasticep.runtime.weights.memory import NOTHING, ArenaMemory

if TYPE_CHECKING:
    from elasticep.runtime.weights.group import GroupWeights


@dataclass(frozen=True, slots=True)
class Here:
    """What lies here of n experts.

    Attributes:
        replicas: for each live rank: (rank, incarnation, its slot for each expert or `NOTHING`).
        pieces: for each piece of backup: (number, memory, the same).
    """

    replicas: list[tuple[int, int, list[int]]]
    pieces: list[tuple[int, ArenaMemory, list[int]]]

    def replicas_of(self, index: int) -> list[tuple[int, int, int]]:
        """(rank, incarnation, slot) of those that hold the expert."""
        return [
            (rank, incarnation, slots[index])
            for rank, incarnation, slots in self.replicas
            if slots[index] != NOTHING
        ]

    def backup_of(self, index: int) -> tuple[int, ArenaMemory, int] | None:
        """(piece, memory, slot) of a backup of the expert."""
        for number, memory, slots in self.pieces:
            if slots[index] != NOTHING:
                return number, memory, slots[index]
        return None


def look_up(weights: "GroupWeights", layers: NDArray[np.int64], experts: NDArray[np.int64]) -> Here:
    """Look for all of them at once.

    Args:
        weights: this node's.
        layers: int64 [n], within the group's bounds.
        experts: the same.
    """
    return Here(
        [
            (rank, incarnation, memory.slots_of(layers, experts).tolist())
            for rank, incarnation, memory in weights.live()
        ],
        [
            (number, memory, memory.slots_of(layers, experts).tolist())
            for number, memory in enumerate(weights.backup.segments)
        ],
    )
