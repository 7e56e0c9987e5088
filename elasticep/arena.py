"""Reading and writing a rank's arena of expert weights (laid out by `elasticep.weights`).

An arena has **one writer** at a time (the process that copies weights for the rank) and any number
of readers in other processes: engines, and daemons that copy units away. What they may rely on:

- A slot is filled in a fixed order: its label becomes `filling` under the new expert before the
  first byte changes, and `valid` with the checksum after the last byte was written and the sum of
  what really lies there was taken. There is no way to relabel bytes that are there.
- Labels are read whole or not at all, without locks. A label is two records, written in turn; each
  carries a sequence number and a check sum of itself, and the newer one that is whole counts. A
  writer that dies in the middle of a record leaves the label of before.
- Label and bytes are in order on every host, also where memory is weakly ordered: there is a memory
  fence before and after each label that is written or read. So whoever sees a valid label reads the
  bytes of it or later ones; whoever read a later byte sees, looking again, the label that was
  written before it.
- A reader in another process that copies a unit verifies its checksum and that the label is still
  the same one afterwards (`read`). An engine computes from slots only once its view named them,
  which is after they were valid, and they are filled anew only after every member has left that
  view: no lock there either.

A writer that died while it filled a slot leaves it `filling`; `recover` empties such slots.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from elasticep.errors import ChecksumMismatch, SlotInvalid, WeightsError
from elasticep.native.region import memory_fence
from elasticep.weights import (
    CHECKSUM_BYTES,
    HEAD_BYTES,
    LABEL_BYTES,
    LAYOUT_VERSION,
    ArenaLayout,
    Buffer,
    UnitHasher,
    unit_checksum,
)

_MAGIC: Final = b"EEPARENA"
_HEAD: Final = struct.Struct(
    "<8sIIIIQQQ"
)  # magic, version, layers, slots, rank, unit, total, digest
_RECORD: Final = struct.Struct(f"<QiI{CHECKSUM_BYTES}s24x")  # sequence, expert, state, checksum
_CHECK: Final = struct.Struct("<Q")
_RECORD_BYTES: Final = LABEL_BYTES // 2
_LABEL_TRIES: Final = 10_000
NO_CHECKSUM: Final = bytes(CHECKSUM_BYTES)
NO_EXPERT: Final = -1


class SlotState(IntEnum):
    """What may be done with a slot's bytes."""

    EMPTY = 0
    FILLING = 1  # they are being written
    VALID = 2  # they are the label's expert, and sum up to its checksum


@dataclass(frozen=True, slots=True)
class Label:
    """What lies in a slot.

    Attributes:
        state: whether the bytes are whole.
        expert: whose they are or will be; -1: nobody's.
        checksum: `unit_checksum` of the bytes if valid, else zeros.
        sequence: grows with every change of this slot's label.
    """

    state: SlotState = SlotState.EMPTY
    expert: int = NO_EXPERT
    checksum: bytes = NO_CHECKSUM
    sequence: int = 0

    def holds(self, expert: int) -> bool:
        """Whether this expert can be computed from the slot."""
        return self.state is SlotState.VALID and self.expert == expert


class Arena:
    """An arena over mapped memory.

    Args:
        memory: the whole arena; a `mmap.mmap`, a bytearray, a memoryview. Read-only memory serves
            readers.
        layout: as the group's config gives it.

    Raises:
        WeightsError: the memory is no arena of this layout.
    """

    def __init__(self, memory: Any, layout: ArenaLayout) -> None:
        self.layout = layout
        self._bytes = memoryview(memory).cast("B")
        self.rank = _check_head(self._bytes, layout)

    @classmethod
    def format(cls, memory: Any, layout: ArenaLayout, rank: int) -> Self:
        """Write head and empty labels into fresh memory; the tensors are left as they are."""
        view = memoryview(memory).cast("B")
        if len(view) < layout.total_bytes:
            raise WeightsError(f"{len(view)} bytes of memory for an arena of {layout.total_bytes}")
        body = _RECORD.pack(0, NO_EXPERT, SlotState.EMPTY, NO_CHECKSUM)
        record = body + _CHECK.pack(_check_of(body))
        view[:HEAD_BYTES] = bytes(HEAD_BYTES)
        for layer in range(layout.layers):
            start = layout.label_offset(layer, 0)
            view[start : start + layout.slots * LABEL_BYTES] = record * (2 * layout.slots)
        _HEAD.pack_into(
            view, 0, _MAGIC, LAYOUT_VERSION, layout.layers, layout.slots, rank,
            layout.spec.unit_bytes, layout.total_bytes, layout.digest(),
        )  # fmt: skip
        return cls(memory, layout)

    def release(self) -> None:
        """Let go of the memory, so that it can be unmapped; the arena cannot be used any more."""
        self._bytes.release()

    # ---- read

    def label(self, layer: int, slot: int) -> Label:
        """What lies in a slot.

        Raises:
            WeightsError: no such slot, or the label was never whole while it was looked at.
        """
        start = self.layout.label_offset(layer, slot)
        for _ in range(_LABEL_TRIES):
            label = newest_label(self._look(start, LABEL_BYTES))
            if label is not None:
                return label
            os.sched_yield()
        raise WeightsError(
            f"the label of layer {layer} slot {slot} of rank {self.rank} is broken; restart this "
            "node's daemon, which fills the slot anew"
        )

    def labels(self, layer: int) -> tuple[Label, ...]:
        """The labels of all slots of a layer."""
        return tuple(self.label(layer, slot) for slot in range(self.layout.slots))

    def raw_labels(self, layer: int) -> bytes:
        """The label records of a layer as they are: equal bytes, equal labels."""
        return self._look(self.layout.label_offset(layer, 0), self.layout.slots * LABEL_BYTES)

    def _look(self, start: int, size: int) -> bytes:
        memory_fence()  # after the bytes that were read before
        found = bytes(self._bytes[start : start + size])
        memory_fence()  # and before those that are read next
        return found

    def tensors(self, layer: int) -> dict[str, NDArray[Any]]:
        """`[slots, *shape]` of each tensor over the arena's memory, by the spec's names."""
        arrays = {}
        for index, tensor in enumerate(self.layout.spec.tensors):
            start = self.layout.tensor_offset(layer, index)
            data = self._bytes[start : start + tensor.nbytes * self.layout.slots]
            array = np.frombuffer(data, tensor.dtype.numpy)
            arrays[tensor.name] = array.reshape(self.layout.slots, *tensor.shape)
        return arrays

    def pieces(
        self, layer: int, slot: int, offset: int = 0, length: int | None = None
    ) -> list[memoryview]:
        """The memory of a unit, or of `length` of its plain bytes from `offset` on, in order.

        For gathering writes (`sendmsg`) and scattering reads (`recvmsg_into`, `preadv`). Whoever
        writes through them must have begun a `fill`.
        """
        size = self.layout.spec.unit_bytes
        end = size if length is None else offset + length
        if not 0 <= offset <= end <= size:
            raise WeightsError(f"bytes {offset} to {end} of a unit that has {size}")
        found = []
        at = 0
        for start, nbytes in self.layout.unit_pieces(layer, slot):
            low, high = max(offset, at), min(end, at + nbytes)
            if low < high:
                found.append(self._bytes[start + low - at : start + high - at])
            at += nbytes
        return found

    def read(self, layer: int, slot: int, expert: int) -> tuple[bytes, bytes]:
        """A copy of a unit, verified: (its plain bytes, its checksum).

        Raises:
            SlotInvalid: the slot does not hold this expert, or was filled anew meanwhile.
            ChecksumMismatch: the bytes are not what the label says.
        """
        label = self.require(layer, slot, expert)
        data = b"".join(self.pieces(layer, slot))
        if self.label(layer, slot) != label:
            raise SlotInvalid(
                f"{self._where(layer, slot)} was filled anew while expert {expert} was copied from "
                "it; take another replica"
            )
        _require_equal(self._where(layer, slot), expert, label.checksum, unit_checksum(
            layer, expert, [data]
        ))  # fmt: skip
        return data, label.checksum

    def require(self, layer: int, slot: int, expert: int) -> Label:
        """The slot's label, if it holds this expert; `SlotInvalid` says what it holds instead."""
        label = self.label(layer, slot)
        if not label.holds(expert):
            what = (
                "is empty" if label.state is SlotState.EMPTY
                else f"is being filled with expert {label.expert}"
                if label.state is SlotState.FILLING
                else f"holds expert {label.expert}"
            )  # fmt: skip
            raise SlotInvalid(
                f"{self._where(layer, slot)} {what}, not expert {expert}; its weights must be in "
                "place before the view that names them is staged"
            )
        return label

    def verify(self, layer: int, slot: int) -> Label:
        """Sum up a valid slot's bytes again and compare; returns its label.

        Raises:
            ChecksumMismatch: they changed since they were written.
            SlotInvalid: the slot is not valid.
        """
        label = self.label(layer, slot)
        self.require(layer, slot, label.expert)
        found = unit_checksum(layer, label.expert, self.pieces(layer, slot))
        _require_equal(self._where(layer, slot), label.expert, label.checksum, found)
        return label

    def count(self, state: SlotState = SlotState.VALID) -> int:
        """Slots of all layers in a state."""
        return sum(label.state is state for _, _, label in self.all_labels())

    def all_labels(self) -> Iterator[tuple[int, int, Label]]:
        """(layer, slot, label) of every slot."""
        for layer in range(self.layout.layers):
            for slot in range(self.layout.slots):
                yield layer, slot, self.label(layer, slot)

    # ---- write: one writer

    def fill(self, layer: int, slot: int, expert: int) -> "Fill":
        """Begin to write an expert into a slot, whatever it held before."""
        if expert < 0:
            raise WeightsError(f"expert {expert} cannot be put into a slot; experts begin at 0")
        self._set(layer, slot, SlotState.FILLING, expert, NO_CHECKSUM)
        return Fill(self, layer, slot, expert)

    def write(
        self, layer: int, slot: int, expert: int, data: Buffer, checksum: bytes | None = None
    ) -> bytes:
        """Put a unit into a slot; returns its checksum.

        Args:
            layer: 0-based.
            slot: place in the layer.
            expert: whose unit it is.
            data: the unit's plain bytes.
            checksum: what it must sum up to; None: whatever it does.

        Raises:
            ChecksumMismatch: it does not; the slot is empty then.
            WeightsError: `data` is no unit; the slot is as it was.
        """
        if memoryview(data).nbytes != self.layout.spec.unit_bytes:
            raise WeightsError(
                f"{memoryview(data).nbytes} bytes are no unit, which has "
                f"{self.layout.spec.unit_bytes}"
            )
        filling = self.fill(layer, slot, expert)
        filling.write(0, data)
        return filling.finish(checksum)

    def empty(self, layer: int, slot: int) -> None:
        """Forget what a slot holds; its bytes stay until they are overwritten."""
        self._set(layer, slot, SlotState.EMPTY, NO_EXPERT, NO_CHECKSUM)

    def recover(self, *, verify: bool = False) -> list[tuple[int, int]]:
        """Empty the slots that an earlier writer left half filled; (layer, slot) of each.

        Args:
            verify: sum up the valid ones too, and empty those whose bytes do not fit.
        """
        emptied = []
        for layer, slot, label in self._readable_labels():
            broken = label is None or label.state is SlotState.FILLING
            if label is not None and label.state is SlotState.VALID and verify:
                found = unit_checksum(layer, label.expert, self.pieces(layer, slot))
                broken = found != label.checksum
            if broken:
                self.empty(layer, slot)
                emptied.append((layer, slot))
        return emptied

    def _readable_labels(self) -> Iterator[tuple[int, int, Label | None]]:
        for layer in range(self.layout.layers):
            raw = self.raw_labels(layer)
            for slot in range(self.layout.slots):
                yield layer, slot, newest_label(raw[slot * LABEL_BYTES : (slot + 1) * LABEL_BYTES])

    def _set(self, layer: int, slot: int, state: SlotState, expert: int, checksum: bytes) -> None:
        start = self.layout.label_offset(layer, slot)
        raw = bytes(self._bytes[start : start + LABEL_BYTES])
        records = [_record(raw[:_RECORD_BYTES]), _record(raw[_RECORD_BYTES:])]
        sequences = [-1 if record is None else record.sequence for record in records]
        older = sequences.index(min(sequences))
        body = _RECORD.pack(max(0, *sequences) + 1, expert, state, checksum)
        at = start + older * _RECORD_BYTES
        memory_fence()  # after the bytes that a valid label vouches for
        self._bytes[at : at + _RECORD_BYTES] = body + _CHECK.pack(_check_of(body))
        memory_fence()  # and before those that a label which says `filling` warns of

    def _where(self, layer: int, slot: int) -> str:
        return f"layer {layer} slot {slot} of rank {self.rank}"


class Fill:
    """A slot that is being written, in any order and in pieces of any size.

    Args:
        arena, layer, slot, expert: what goes where; the slot's label says `filling`.
    """

    def __init__(self, arena: Arena, layer: int, slot: int, expert: int) -> None:
        self.arena = arena
        self.layer = layer
        self.slot = slot
        self.expert = expert

    def pieces(self, offset: int = 0, length: int | None = None) -> list[memoryview]:
        """Where `length` of the unit's plain bytes from `offset` on go, for reading into them."""
        return self.arena.pieces(self.layer, self.slot, offset, length)

    def write(self, offset: int, data: Buffer) -> None:
        """Put plain bytes of the unit at `offset`."""
        source = memoryview(data).cast("B")
        at = 0
        for piece in self.pieces(offset, len(source)):
            piece[:] = source[at : at + len(piece)]
            at += len(piece)

    def finish(self, checksum: bytes | None = None) -> bytes:
        """Sum up what lies in the slot now, and make it valid; returns the checksum.

        Args:
            checksum: what the source promised; None: nothing was.

        Raises:
            ChecksumMismatch: the bytes are others; the slot is empty then.
        """
        hasher = UnitHasher(self.layer, self.expert)
        for piece in self.pieces():
            hasher.update(piece)
        found = hasher.digest()
        if checksum is not None and found != checksum:
            self.abandon()
            where = self.arena._where(self.layer, self.slot)
            _require_equal(where, self.expert, checksum, found)
        self.arena._set(self.layer, self.slot, SlotState.VALID, self.expert, found)
        return found

    def abandon(self) -> None:
        """Leave the slot empty."""
        self.arena.empty(self.layer, self.slot)


def _require_equal(where: str, expert: int, promised: bytes, found: bytes) -> None:
    if promised != found:
        raise ChecksumMismatch(
            f"expert {expert} in {where} sums up to {found.hex()}, its label or source says "
            f"{promised.hex()}; take it from another replica or the checkpoint"
        )


def _check_head(view: memoryview, layout: ArenaLayout) -> int:
    if len(view) < HEAD_BYTES:
        raise WeightsError(f"{len(view)} bytes are no arena of expert weights")
    magic, version, layers, slots, rank, unit, total, digest = _HEAD.unpack_from(view, 0)
    if magic != _MAGIC or version != LAYOUT_VERSION:
        raise WeightsError(
            f"this memory is no arena of expert weights of version {LAYOUT_VERSION}; install one "
            "version everywhere"
        )
    wanted = (layout.layers, layout.slots, layout.spec.unit_bytes, layout.total_bytes)
    found = (layers, slots, unit, total)
    if found != wanted or digest != layout.digest() or len(view) < total:
        raise WeightsError(
            f"the arena of rank {rank} is laid out for (layers, slots, unit bytes, bytes) "
            f"{found}, the group's config says {wanted}; its [weights] or geometry changed"
        )
    return int(rank)


def newest_label(raw: bytes) -> Label | None:
    """The label in 128 bytes as they were read; None if neither record was whole."""
    records = (_record(raw[:_RECORD_BYTES]), _record(raw[_RECORD_BYTES:]))
    whole = [record for record in records if record is not None]
    return max(whole, key=lambda label: label.sequence, default=None)


def _record(raw: bytes) -> Label | None:
    body = raw[: _RECORD.size]
    if _CHECK.unpack_from(raw, _RECORD.size)[0] != _check_of(body):
        return None
    sequence, expert, state, checksum = _RECORD.unpack(body)
    return Label(SlotState(state), expert, checksum, sequence) if state <= max(SlotState) else None


def _check_of(body: bytes) -> int:
    return xxhash.xxh3_64_intdigest(body)
