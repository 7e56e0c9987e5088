"""The slot tables of the views that a daemon has heard of: which expert belongs where."""

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from elasticep.errors import ConfigError
from elasticep.proto import types_pb2

MAX_VIEWS: Final = 8
_MOST_TABLE_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class ViewTable:
    """One view's slots.

    Attributes:
        epoch, previous_epoch: of the view.
        members: rank -> (incarnation, node).
        slots: int32 [layers, max_ranks, slots], -1 = empty.
        awaited: a member is expelled by it, so the others have no step until it is adopted.
    """

    epoch: int
    previous_epoch: int
    members: Mapping[int, tuple[int, str]]
    slots: NDArray[np.int32]
    awaited: bool = False

    @classmethod
    def read(cls, view: types_pb2.View, shape: tuple[int, int, int], experts: int) -> Self:
        """Out of a proposal.

        Raises:
            ConfigError: the table is not of this shape, or names an expert that is not.
        """
        slots = np.frombuffer(view.placement.slot_expert, "<i4")
        low, high = slots.min(initial=-1), slots.max(initial=-1)
        if slots.size != np.prod(shape) or low < -1 or high >= experts:
            raise ConfigError(
                f"view {view.epoch} has a table of {slots.size} slots, or experts beyond {experts}"
            )
        members = {m.rank: (m.incarnation, m.node) for m in view.members}
        table = slots.reshape(shape).astype(np.int32)
        return cls(view.epoch, view.previous_epoch, members, table, bool(view.expelled))

    def of(self, rank: int) -> NDArray[np.int32]:
        """A rank's slots: int32 [layers, slots]."""
        table: NDArray[np.int32] = self.slots[:, rank]
        return table

    @property
    def node_of(self) -> dict[int, str]:
        """Rank -> node."""
        return {rank: node for rank, (_, node) in self.members.items()}

    # ---- the daemon's state file

    @cached_property
    def kept(self) -> dict[str, Any]:
        """Plain values for the state file, made once, in the daemon's loop: not compressed, which
        would take milliseconds for each view of a large group.
        """
        width = 2 if int(self.slots.max(initial=0)) < 1 << 15 else 4
        return {
            "epoch": self.epoch,
            "previous": self.previous_epoch,
            "members": [[rank, *who] for rank, who in sorted(self.members.items())],
            "width": width,
            "slots": base64.b64encode(self.slots.astype(f"<i{width}").tobytes()).decode(),
        }

    @classmethod
    def from_kept(cls, plain: Mapping[str, Any], shape: tuple[int, int, int]) -> Self:
        """Read what `kept` gave; `ValueError` when it is something else."""
        try:
            raw, width = base64.b64decode(plain["slots"], validate=True), plain.get("width")
            if width is None:  # as earlier daemons wrote it
                raw, width = zlib.decompressobj().decompress(raw, _MOST_TABLE_BYTES), 4
            slots = np.frombuffer(raw, {2: "<i2", 4: "<i4"}[width]).reshape(shape)
            slots = slots.astype(np.int32)
            members = {int(rank): (int(inc), str(node)) for rank, inc, node in plain["members"]}
            return cls(int(plain["epoch"]), int(plain["previous"]), members, slots)
        except (KeyError, TypeError, ValueError, zlib.error) as error:
            raise ValueError(f"a view that cannot be used: {error!r}") from None


class ViewBook:
    """The last views of a group, by epoch."""

    def __init__(self) -> None:
        self._views: dict[int, ViewTable] = {}

    def add(self, table: ViewTable, needed: int) -> None:
        """Know a view; those older than `needed` are forgotten, and the oldest beyond a bound."""
        self._views[table.epoch] = table
        for epoch in [e for e in self._views if e < min(needed, table.epoch)]:
            del self._views[epoch]
        while len(self._views) > MAX_VIEWS:
            del self._views[min(self._views)]

    def get(self, epoch: int) -> ViewTable | None:
        """A view, if it is known."""
        return self._views.get(epoch)

    def all(self) -> list[ViewTable]:
        """Oldest first."""
        return [self._views[epoch] for epoch in sorted(self._views)]
