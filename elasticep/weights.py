"""Expert weights: what one expert consists of, and how a rank's arena lays experts out in memory.

All tensors of one expert in one layer (weights, scales, biases) are a **unit**: they are loaded,
copied, checked and become visible together, so weights never move without their scales. A
`WeightSpec` lists them; it is the same for all layers of a group. As plain bytes a unit is its
tensors one after another in the order of the spec, each row-major, without padding.

An **arena** holds `layers x slots` units of one rank in one piece of memory (`ArenaLayout`):

    head      magic, version, sizes, digest
    labels    per layer and slot: which expert lies there, whether its bytes are whole, checksum
    tensors   per layer and tensor [slots, *shape], contiguous: what grouped expert kernels read

A unit is thus spread over its layer's tensors, one piece in each. `elasticep.arena` reads and
writes arenas. Everything here is arithmetic; no torch, no files, no threads.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any, Final, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from elasticep.errors import ConfigError, WeightsError

MAX_TENSORS: Final = 64
MAX_DIMENSIONS: Final = 8
MAX_UNIT_BYTES: Final = 1 << 36
MAX_ARENA_BYTES: Final = 1 << 44

CHECKSUM_BYTES: Final = 16
HEAD_BYTES: Final = 4096
LABEL_BYTES: Final = 128
TENSOR_ALIGNMENT: Final = 256
PAGE_BYTES: Final = 4096
LAYOUT_VERSION: Final = 1

Buffer = bytes | bytearray | memoryview
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,126}")


class WeightDtype(StrEnum):
    """How the elements of a weight tensor are stored. Packed fp4 is `uint8`, two elements each."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    FP8_E8M0 = "fp8_e8m0"
    """A power of two in one byte: the scales of the mx formats."""
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    UINT8 = "uint8"

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return _NUMPY[self].itemsize

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy type of the same bytes; an unsigned integer where NumPy has no such format."""
        return _NUMPY[self]


_NUMPY: Final[Mapping[WeightDtype, np.dtype[Any]]] = {
    WeightDtype.FP32: np.dtype("<f4"),
    WeightDtype.FP16: np.dtype("<f2"),
    WeightDtype.BF16: np.dtype("<u2"),
    WeightDtype.FP8_E4M3: np.dtype("u1"),
    WeightDtype.FP8_E5M2: np.dtype("u1"),
    WeightDtype.FP8_E8M0: np.dtype("u1"),
    WeightDtype.INT64: np.dtype("<i8"),
    WeightDtype.INT32: np.dtype("<i4"),
    WeightDtype.INT16: np.dtype("<i2"),
    WeightDtype.INT8: np.dtype("i1"),
    WeightDtype.UINT8: np.dtype("u1"),
}


# ---- what an expert consists of


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of an expert; checked when made.

    Attributes:
        name: as `session.weights(layer)` will call it: letters, digits, "_", "." and "-".
        dtype: of its elements; a `WeightDtype` or its name.
        shape: of one expert's tensor, at most 8 dimensions, each at least 1; () is a number.
    """

    name: str
    dtype: WeightDtype
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"a weight tensor is named {self.name!r}; use letters, digits, '_', '.' and '-', "
                "at most 127"
            )
        try:
            object.__setattr__(self, "dtype", WeightDtype(self.dtype))
        except ValueError:
            raise ConfigError(
                f"weights.{self.name}.dtype is {self.dtype!r}; use one of {', '.join(WeightDtype)}"
            ) from None
        shape = self.shape
        if (
            not isinstance(shape, (list, tuple))
            or len(shape) > MAX_DIMENSIONS
            or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in shape)
        ):
            raise ConfigError(
                f"weights.{self.name}.shape is {shape!r}; give at most {MAX_DIMENSIONS} whole "
                "numbers above 0, the shape of one expert's tensor"
            )
        object.__setattr__(self, "shape", tuple(shape))

    @classmethod
    def of(cls, name: str, dtype: Any, shape: Any) -> Self:
        """A spec from what came over the wire or out of a file; checked like any other."""
        return cls(name, dtype, shape)

    @property
    def nbytes(self) -> int:
        """Bytes of one expert's tensor."""
        return math.prod(self.shape) * self.dtype.item_bytes


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """The tensors of one expert, the same in every layer; checked when made.

    Attributes:
        tensors: in the order in which they are written out and summed up.
    """

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", tuple(self.tensors))
        if not 1 <= len(self.tensors) <= MAX_TENSORS:
            raise ConfigError(
                f"[weights] has {len(self.tensors)} tensors; an expert has 1 to {MAX_TENSORS}"
            )
        names = [tensor.name for tensor in self.tensors]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"[weights] names a tensor twice: {', '.join(twice)}")
        if self.unit_bytes > MAX_UNIT_BYTES:
            raise ConfigError(
                f"[weights] makes {self.unit_bytes} bytes of one expert, the limit is "
                f"{MAX_UNIT_BYTES}; check the shapes, which are those of one expert"
            )

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit as plain bytes: the sum of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor begins in a unit's plain bytes, and at the end their number."""
        return tuple(accumulate((tensor.nbytes for tensor in self.tensors), initial=0))

    def tensor(self, name: str) -> TensorSpec:
        """The tensor of this name; `ConfigError` lists those there are."""
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        known = ", ".join(tensor.name for tensor in self.tensors)
        raise ConfigError(f"an expert has no tensor {name!r}; it has {known}")

    def to_dict(self) -> dict[str, Any]:
        """The form that `from_dict` reads: a table for each tensor, in their order."""
        return {t.name: {"dtype": t.dtype.value, "shape": list(t.shape)} for t in self.tensors}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read `{name: {"dtype": ..., "shape": [...]}, ...}`; the order counts."""
        tensors = []
        for name, plain in data.items():
            if not isinstance(plain, Mapping) or set(plain) != {"dtype", "shape"}:
                raise ConfigError(f"[weights.{name}] needs dtype and shape, and nothing else")
            tensors.append(TensorSpec.of(name, plain["dtype"], plain["shape"]))
        return cls(tuple(tensors))

    def canonical_json(self) -> str:
        """One text per spec; the order of the tensors counts."""
        plain = [[t.name, t.dtype.value, list(t.shape)] for t in self.tensors]
        return json.dumps(plain, separators=(",", ":"))


# ---- units as plain bytes


def unit_checksum(layer: int, expert: int, pieces: Iterable[Buffer]) -> bytes:
    """XXH3-128 of a unit's bytes, seeded with what it is the unit of: 16 bytes.

    Because layer and expert are part of it, bytes under the label of another expert never fit
    their checksum, though each of both were right. Long pieces are summed without the GIL.

    Args:
        layer: of the unit.
        expert: of the unit.
        pieces: its bytes in order, in any number of contiguous pieces.
    """
    hasher = UnitHasher(layer, expert)
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()


class UnitHasher:
    """`unit_checksum`, piece by piece."""

    __slots__ = ("_state",)

    def __init__(self, layer: int, expert: int) -> None:
        self._state = xxhash.xxh3_128(seed=layer << 32 | expert)

    def update(self, piece: Buffer) -> None:
        """Add the next bytes."""
        self._state.update(piece)

    def digest(self) -> bytes:
        """Of all that was added so far."""
        return self._state.digest()


def join_unit(spec: WeightSpec, tensors: Mapping[str, NDArray[Any]]) -> bytes:
    """A unit's plain bytes from its tensors.

    Raises:
        WeightsError: a tensor is missing, not in the spec, or of another shape or element size.
    """
    unknown = sorted(set(tensors) - {tensor.name for tensor in spec.tensors})
    if unknown:
        raise WeightsError(f"tensors that no expert of this group has: {', '.join(unknown)}")
    pieces = []
    for tensor in spec.tensors:
        array = tensors.get(tensor.name)
        if array is None:
            raise WeightsError(f"the unit lacks tensor {tensor.name!r}; a unit is all its tensors")
        if array.shape != tensor.shape or array.itemsize != tensor.dtype.item_bytes:
            raise WeightsError(
                f"tensor {tensor.name!r} is {array.dtype} {list(array.shape)}; the group's spec "
                f"wants {tensor.dtype} {list(tensor.shape)}"
            )
        pieces.append(array.tobytes())
    return b"".join(pieces)


def split_unit(spec: WeightSpec, data: Buffer) -> dict[str, NDArray[Any]]:
    """The tensors of a unit over its plain bytes; nothing is copied.

    Raises:
        WeightsError: `data` has not the unit's size.
    """
    view = memoryview(data).cast("B")
    if len(view) != spec.unit_bytes:
        raise WeightsError(f"{len(view)} bytes are no unit, which has {spec.unit_bytes}")
    return {
        tensor.name: np.frombuffer(view[start:end], tensor.dtype.numpy).reshape(tensor.shape)
        for tensor, start, end in zip(spec.tensors, spec.offsets, spec.offsets[1:], strict=False)
    }


# ---- arenas


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Where everything lies in a rank's arena; sizes are checked when it is made.

    All offsets are in bytes from the arena's begin. Every layer begins at a page and every tensor
    of it at 256 bytes; within a tensor slot s begins at s times the bytes of one expert's.

    Attributes:
        layers: MoE layers.
        slots: slots per layer.
        spec: the tensors of a unit.
    """

    layers: int
    slots: int
    spec: WeightSpec

    def __post_init__(self) -> None:
        for name in ("layers", "slots"):
            if getattr(self, name) < 1:
                raise ConfigError(f"an arena with {getattr(self, name)} {name}; it needs 1 or more")
        if self.total_bytes > MAX_ARENA_BYTES:
            raise ConfigError(
                f"the arena of a rank would have {self.total_bytes} bytes ({self.layers} layers x "
                f"{self.slots} slots x {self.spec.unit_bytes} bytes), the limit is "
                f"{MAX_ARENA_BYTES}; lower geometry.slots_per_rank, or check [weights]"
            )

    @property
    def labels_offset(self) -> int:
        """Begin of the labels, `[layers][slots]` records of 128 bytes."""
        return HEAD_BYTES

    def label_offset(self, layer: int, slot: int) -> int:
        """Begin of one label."""
        self.check(layer, slot)
        return HEAD_BYTES + (layer * self.slots + slot) * LABEL_BYTES

    @property
    def data_offset(self) -> int:
        """Begin of the first layer's tensors."""
        return _up(HEAD_BYTES + self.layers * self.slots * LABEL_BYTES, PAGE_BYTES)

    @property
    def tensor_offsets(self) -> tuple[int, ...]:
        """Begin of each tensor within a layer, and at the end the bytes they need together."""
        sizes = (_up(tensor.nbytes * self.slots, TENSOR_ALIGNMENT) for tensor in self.spec.tensors)
        return tuple(accumulate(sizes, initial=0))

    @property
    def layer_bytes(self) -> int:
        """From the begin of one layer's tensors to that of the next layer's."""
        return _up(self.tensor_offsets[-1], PAGE_BYTES)

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole arena."""
        return self.data_offset + self.layers * self.layer_bytes

    def tensor_offset(self, layer: int, index: int) -> int:
        """Begin of the `[slots, *shape]` block of the spec's tensor number `index`."""
        self.check(layer, 0)
        return self.data_offset + layer * self.layer_bytes + self.tensor_offsets[index]

    def unit_pieces(self, layer: int, slot: int) -> tuple[tuple[int, int], ...]:
        """(offset, bytes) of each tensor of the unit in a slot, in the order of the spec."""
        self.check(layer, slot)
        base = self.data_offset + layer * self.layer_bytes
        return tuple(
            (base + start + slot * tensor.nbytes, tensor.nbytes)
            for start, tensor in zip(self.tensor_offsets, self.spec.tensors, strict=False)
        )

    def digest(self) -> int:
        """64 bits over version, sizes and spec: equal where arenas are laid out alike."""
        text = f"{LAYOUT_VERSION}/{self.layers}/{self.slots}/{self.spec.canonical_json()}"
        return xxhash.xxh3_64_intdigest(text.encode())

    def check(self, layer: int, slot: int) -> None:
        """Raise `WeightsError` for a layer or slot that the arena does not have."""
        if not (0 <= layer < self.layers and 0 <= slot < self.slots):
            raise WeightsError(
                f"layer {layer} slot {slot} is outside this arena of {self.layers} layers x "
                f"{self.slots} slots"
            )


def _up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment
