"""Placements: which expert lies in which slot, and which share of its tokens each replica takes.

Pure: no clock, no I/O, no threads. Everything here is a value; `elasticep.control.placement`
gathers the public names and holds the planner that computes good ones.

Two notions to keep apart: a slot is **live** when it names an expert on a member, and a replica is
**used** when its weight is above zero. A live replica of weight 0 takes no tokens; it is there so
that the death of the others uncovers nothing, and a later re-split may give it tokens without
moving a byte.
"""

import hashlib
import struct
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from elasticep.errors import ExpertsLost, PlacementError

EMPTY = -1  # in slot_expert: nothing lies in this slot
ONE = 65536  # in slot_weight: all of the expert's tokens

_MAGIC = b"EPPL"
_HEADER = struct.Struct("<4sHHIIII")  # magic, version, reserved, experts, layers, ranks, slots
_VERSION = 1
_MAX_CELLS = 1 << 26  # bound on layers * max_ranks * slots_per_rank of a placement that is read

_Integer = TypeVar("_Integer", np.int32, np.uint32)
BoolArray = NDArray[np.bool_]
Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Uint32Array = NDArray[np.uint32]


class GeometryLike(Protocol):
    """The sizes of a group that a placement depends on (`elasticep.geometry.GroupGeometry`)."""

    @property
    def layers(self) -> int:
        """Mixture-of-experts layers."""

    @property
    def experts(self) -> int:
        """Logical experts per layer."""

    @property
    def slots_per_rank(self) -> int:
        """Places for an expert's weights on each rank, per layer."""

    @property
    def max_ranks(self) -> int:
        """Seats of the group."""


class InvalidPlacement(PlacementError):
    """A placement breaks one of its rules; the message names the place and the rule."""

    reason = "PLACEMENT_INVALID"


class SlotShortage(PlacementError):
    """The ranks that may hold experts have fewer slots than there are experts.

    Attributes:
        layers: layers that cannot be placed.
        ranks: ranks that may hold experts.
        slots: their slots, per layer.
        experts: experts that need one, per layer.
    """

    reason = "PLACEMENT_SLOTS_SHORT"

    def __init__(self, layers: range, ranks: Collection[int], slots: int, experts: int) -> None:
        self.layers = layers
        self.ranks = tuple(sorted(ranks))
        self.slots = slots
        self.experts = experts
        shown = ", ".join(str(rank) for rank in self.ranks[:16])
        more = ", ..." if len(self.ranks) > 16 else ""
        super().__init__(
            f"layers {layers.start}..{layers.stop - 1}: {len(self.ranks)} alive ranks "
            f"({shown}{more}) have {slots} slots for {experts} experts, {experts - slots} too few; "
            f"add ranks, raise slots_per_rank, or end a drain"
        )

    @property
    def shortfall(self) -> int:
        """Slots missing per layer."""
        return self.experts - self.slots


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """Slot tables of all layers. Immutable: the arrays are copied in and locked.

    Attributes:
        experts: logical experts per layer; ids are 0..experts-1.
        slot_expert: int32 [layers, max_ranks, slots_per_rank], `EMPTY` (-1) = nothing there.
        slot_weight: uint32, same shape: share of the expert's tokens that this replica takes,
            `ONE` (65536) = all. The weights of an expert's replicas sum to exactly `ONE`.
    """

    experts: int
    slot_expert: Int32Array
    slot_weight: Uint32Array
    _packed: bytes = field(default=b"", init=False, repr=False)

    def __post_init__(self) -> None:
        for name, dtype in (("slot_expert", np.int32), ("slot_weight", np.uint32)):
            given = np.asarray(getattr(self, name))
            if given.dtype != dtype or given.ndim != 3:
                raise InvalidPlacement(
                    f"{name} is {given.dtype} with {given.ndim} dimensions; it must be "
                    f"{np.dtype(dtype).name} [layers, max_ranks, slots_per_rank]"
                )
            array = np.array(given, order="C", copy=True)
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        if self.slot_expert.shape != self.slot_weight.shape:
            raise InvalidPlacement(
                f"slot_expert is {self.slot_expert.shape} but slot_weight is "
                f"{self.slot_weight.shape}; they must have the same shape"
            )

    # ---- sizes and comparison

    @property
    def layers(self) -> int:
        """Layers described."""
        return int(self.slot_expert.shape[0])

    @property
    def max_ranks(self) -> int:
        """Seats described; those of non-members are empty."""
        return int(self.slot_expert.shape[1])

    @property
    def slots_per_rank(self) -> int:
        """Slots per rank and layer."""
        return int(self.slot_expert.shape[2])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Placement):
            return NotImplemented
        return (
            self.experts == other.experts
            and np.array_equal(self.slot_expert, other.slot_expert)
            and np.array_equal(self.slot_weight, other.slot_weight)
        )

    def __hash__(self) -> int:
        return hash(self.digest())

    def digest(self) -> str:
        """32 hex digits over sizes and both tables; equal placements have equal digests."""
        state = hashlib.blake2b(self._header(), digest_size=16)
        for table in self.to_tables():
            state.update(table)
        return state.hexdigest()

    # ---- questions

    def copies(self) -> Int32Array:
        """Live replicas of every expert, int32 [layers, experts]; weight does not matter."""
        return _count(self.slot_expert, self.experts)

    def lost_experts(self, members: Collection[int]) -> list[tuple[int, int]]:
        """(layer, expert) pairs without a live replica on any of `members`, ascending."""
        outside = self._outside(members)
        slot_expert = np.where(outside[None, :, None], np.int32(EMPTY), self.slot_expert)
        missing = np.argwhere(_count(slot_expert, self.experts) == 0)
        return [(int(layer), int(expert)) for layer, expert in missing]

    def rank_loads(self, loads: NDArray[np.int64]) -> NDArray[np.float64]:
        """Tokens that each rank would get, float64 [layers, max_ranks], for `loads` tokens per
        (layer, expert) [layers, experts].
        """
        layer = np.arange(self.layers)[:, None, None]
        of_slot = np.asarray(loads, np.float64)[layer, np.maximum(self.slot_expert, 0)]
        share = np.where(self.slot_expert >= 0, self.slot_weight / ONE, 0.0)
        loads_of_rank: NDArray[np.float64] = (of_slot * share).sum(axis=2)
        return loads_of_rank

    def _outside(self, members: Collection[int]) -> NDArray[np.bool_]:
        """[max_ranks], True for seats that are not in `members`."""
        outside = np.ones(self.max_ranks, np.bool_)
        for rank in members:
            if not 0 <= rank < self.max_ranks:
                raise InvalidPlacement(
                    f"member {rank} is outside the placement's seats 0..{self.max_ranks - 1}"
                )
            outside[rank] = False
        return outside

    # ---- rules

    def validate(
        self, geometry: GeometryLike, members: Collection[int], *, allow_lost: bool = False
    ) -> None:
        """Raise unless every rule holds for a view with these members.

        Rules: sizes equal the geometry's; ids are known; no expert lies twice on a rank; only
        members' slots are filled; empty slots weigh nothing; an expert's weights sum to `ONE`.

        Args:
            geometry: the group's sizes.
            members: ranks of the view.
            allow_lost: accept experts without any replica (policy `serve`).

        Raises:
            InvalidPlacement: a rule is broken.
            ExpertsLost: an expert has no replica and `allow_lost` is False.
        """
        want = (geometry.layers, geometry.max_ranks, geometry.slots_per_rank)
        if self.slot_expert.shape != want or self.experts != geometry.experts:
            raise InvalidPlacement(
                f"placement is for {self.experts} experts and {self.slot_expert.shape} layers x "
                f"ranks x slots; the group has {geometry.experts} and {want}"
            )
        table, weight = self.slot_expert, self.slot_weight
        _refuse((table < EMPTY) | (table >= self.experts), f"an id outside -1..{self.experts - 1}")
        filled = table >= 0
        outside = self._outside(members)
        _refuse(filled & outside[None, :, None], "an expert on a rank that is not a member")
        _refuse(~filled & (weight > 0), "a weight above 0 on an empty slot")
        _refuse(weight > ONE, f"a weight above {ONE}")
        ordered = np.sort(table, axis=2)
        _refuse(
            (ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] >= 0),
            "two copies of an expert on one rank (slot counted after sorting)",
        )
        lost = np.argwhere(_count(table, self.experts) == 0)
        if len(lost) and not allow_lost:
            raise ExpertsLost([(int(layer), int(expert)) for layer, expert in lost])
        sums = np.bincount(
            _keys(table, self.experts)[filled],
            weights=weight[filled],
            minlength=self.layers * self.experts,
        ).astype(np.int64)
        present = _count(table, self.experts).ravel() > 0
        wrong = np.flatnonzero(present & (sums != ONE))
        if len(wrong):
            layer, expert = divmod(int(wrong[0]), self.experts)
            raise InvalidPlacement(
                f"layer {layer} expert {expert}: the weights of its replicas sum to "
                f"{int(sums[wrong[0]])}, not {ONE}; split them again"
            )

    # ---- stored forms

    def _header(self) -> bytes:
        return _HEADER.pack(_MAGIC, _VERSION, 0, self.experts, *self.slot_expert.shape)

    def to_tables(self) -> tuple[bytes, bytes]:
        """(slot_expert, slot_weight) as little-endian row-major bytes, as `View` messages carry."""
        return self.slot_expert.astype("<i4").tobytes(), self.slot_weight.astype("<u4").tobytes()

    @classmethod
    def from_tables(cls, geometry: GeometryLike, slot_expert: bytes, slot_weight: bytes) -> Self:
        """Inverse of `to_tables`; raises `InvalidPlacement` when the sizes do not fit."""
        shape = (geometry.layers, geometry.max_ranks, geometry.slots_per_rank)
        return cls._from_bytes(geometry.experts, shape, slot_expert, slot_weight)

    @classmethod
    def _from_bytes(
        cls, experts: int, shape: tuple[int, int, int], slot_expert: bytes, slot_weight: bytes
    ) -> Self:
        want = 4 * shape[0] * shape[1] * shape[2]
        for name, data in (("slot_expert", slot_expert), ("slot_weight", slot_weight)):
            if len(data) != want:
                raise InvalidPlacement(
                    f"{name} has {len(data)} bytes; layers x ranks x slots {shape} take {want}"
                )
        return cls(
            experts=experts,
            slot_expert=np.frombuffer(slot_expert, "<i4").astype(np.int32).reshape(shape),
            slot_weight=np.frombuffer(slot_weight, "<u4").astype(np.uint32).reshape(shape),
        )

    def to_bytes(self) -> bytes:
        """Self-contained compressed form for the store; sizes included.

        The largest take half a second, so it is done once: whoever packs one in a thread spares
        the leader's loop of it.
        """
        if not self._packed:
            packed = self._header() + zlib.compress(b"".join(self.to_tables()), level=6)
            object.__setattr__(self, "_packed", packed)
        return self._packed

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Inverse of `to_bytes`; raises `InvalidPlacement` on anything else, and never inflates
        more than the header announces.
        """
        if len(data) < _HEADER.size:
            raise InvalidPlacement(f"{len(data)} bytes are too few for a placement's header")
        magic, version, _, experts, *sizes = _HEADER.unpack_from(data)
        if magic != _MAGIC or version != _VERSION:
            raise InvalidPlacement(f"not a placement of version {_VERSION}")
        shape = (sizes[0], sizes[1], sizes[2])
        cells = shape[0] * shape[1] * shape[2]
        if cells > _MAX_CELLS:
            raise InvalidPlacement(f"{cells} slots; a placement may have {_MAX_CELLS}")
        inflate = zlib.decompressobj()
        try:
            body = inflate.decompress(data[_HEADER.size :], 8 * cells + 1)
        except zlib.error as error:
            raise InvalidPlacement(f"the tables cannot be decompressed: {error}") from error
        return cls._from_bytes(experts, shape, body[: 4 * cells], body[4 * cells :])

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, for JSON; the form that engines read is in `elasticep.control.planfile`."""
        return {
            "experts": self.experts,
            "slot_expert": self.slot_expert.tolist(),
            "slot_weight": self.slot_weight.tolist(),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`."""
        try:
            return cls(
                experts=int(plain["experts"]),
                slot_expert=integer_table(plain["slot_expert"], np.int32),
                slot_weight=integer_table(plain["slot_weight"], np.uint32),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidPlacement(f"not a placement: {error}") from error


def integer_table(rows: Any, dtype: type[_Integer]) -> NDArray[_Integer]:
    """Nested lists of integers as an array; `InvalidPlacement` for anything else."""
    try:
        table = np.array(rows)
    except ValueError as error:
        raise InvalidPlacement(f"the table's rows are not equally long: {error}") from error
    limits = np.iinfo(dtype)
    if table.dtype.kind not in "iu":
        raise InvalidPlacement(f"the table holds {table.dtype}, not integers")
    if table.size and not (limits.min <= int(table.min()) and int(table.max()) <= limits.max):
        raise InvalidPlacement(f"the table holds a number outside {limits.min}..{limits.max}")
    return table.astype(dtype)


def spread(slot_expert: Int32Array, slot_weight: Uint32Array, experts: int) -> Uint32Array:
    """Top the weights up so that those of each expert sum to `ONE`: what is missing goes in equal
    parts to its replicas, what does not divide to the lowest slots.

    Args:
        slot_expert: int32 [layers, ranks, slots].
        slot_weight: uint32, same shape; no expert's weights may sum to more than `ONE`.
        experts: logical experts per layer.
    """
    layers = slot_expert.shape[0]
    filled = np.flatnonzero(slot_expert.ravel() >= 0)
    layer = filled // (slot_expert.shape[1] * slot_expert.shape[2])
    key = layer * experts + slot_expert.ravel()[filled]
    weight = slot_weight.ravel()[filled].astype(np.int64)
    held = np.bincount(key, weights=weight, minlength=layers * experts).astype(np.int64)
    copies = np.bincount(key, minlength=layers * experts)
    each, rest = np.divmod(ONE - held, np.maximum(copies, 1))
    extra = each[key] + (_ordinal(key) < rest[key])
    total = np.zeros(slot_expert.size, np.uint32)
    total[filled] = weight + extra
    return total.reshape(slot_expert.shape)


def _ordinal(key: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many equal entries come before each entry."""
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    first = np.concatenate(([True], ordered[1:] != ordered[:-1])) if len(key) else np.zeros(0, bool)
    begin = np.maximum.accumulate(np.where(first, np.arange(len(key)), 0))
    ordinal = np.empty(len(key), np.int64)
    ordinal[order] = np.arange(len(key)) - begin
    return ordinal


def _keys(slot_expert: Int32Array, experts: int) -> NDArray[np.int64]:
    """One integer per (layer, expert) for every slot; meaningless where the slot is empty."""
    layer = np.arange(slot_expert.shape[0], dtype=np.int64)[:, None, None]
    return layer * experts + slot_expert


def _count(slot_expert: Int32Array, experts: int) -> Int32Array:
    layers = slot_expert.shape[0]
    filled = (slot_expert >= 0) & (slot_expert < experts)
    counted = np.bincount(_keys(slot_expert, experts)[filled], minlength=layers * experts)
    return counted.astype(np.int32).reshape(layers, experts)


def _refuse(broken: NDArray[np.bool_], what: str) -> None:
    if broken.any():
        layer, rank, slot = (int(i) for i in np.argwhere(broken)[0])
        raise InvalidPlacement(f"layer {layer} rank {rank} slot {slot}: {what}")
