"""The view that a rank runs in, as an engine sees it."""

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from elasticep.geometry import GroupGeometry
from elasticep.native import abi

if TYPE_CHECKING:
    from elasticep.client.handle import SessionHandle

EMPTY: Final = -1
"""Content of a slot that holds no expert."""


@dataclass(frozen=True, slots=True)
class View:
    """Who is a member and which expert sits where. Views of a group are ordered by epoch.

    Attributes:
        epoch: number of the view, >= 1.
        digest: of members and placement; equal on every member of the view.
        members: rank -> incarnation.
        placement: logical expert in each slot, int32 [layers, max_ranks, slots], -1 = empty; read
            only.
    """

    epoch: int
    digest: int
    members: MappingProxyType[int, int]
    placement: NDArray[np.int32] = field(repr=False, compare=False)

    def slots(self, layer: int, rank: int) -> tuple[int, ...]:
        """Logical expert in each of a rank's slots of one layer; -1 marks an empty slot."""
        return tuple(int(expert) for expert in self.placement[layer, rank])

    def lost(self, experts: int) -> list[tuple[int, int]]:
        """(layer, expert) pairs that no member of this view holds.

        Args:
            experts: logical experts per layer.
        """
        held = self.placement[:, sorted(self.members)]
        missing: list[tuple[int, int]] = []
        for layer, table in enumerate(held):
            present = np.unique(table)
            missing += [
                (layer, int(e))
                for e in np.setdiff1d(np.arange(experts), present, assume_unique=True)
            ]
        return missing


def read_view(handle: "SessionHandle", geometry: GroupGeometry, info: abi.StepInfo) -> View:
    """The view that a barrier adopted, from the rank's memory."""
    shape = (geometry.layers, geometry.max_ranks, geometry.slots_per_rank)
    placement = handle.slots(info.epoch, shape)
    placement.flags.writeable = False
    members = {r: i for r, i in enumerate(info.incarnation[: geometry.max_ranks]) if i}
    return View(info.epoch, info.digest, MappingProxyType(members), placement)
