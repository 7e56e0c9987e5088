"""Units out of a checkpoint: which byte ranges of which files they are, and their bytes."""

from dataclasses import dataclass
from io import FileIO
from typing import TYPE_CHECKING, Self

from elasticep.checkpoint.files import StoredTensor, TensorFile
from elasticep.checkpoint.names import parts_of
from elasticep.errors import CheckpointError
from elasticep.weights import TensorSpec, WeightSpec

if TYPE_CHECKING:
    from elasticep.checkpoint.opened import Checkpoint


@dataclass(frozen=True, slots=True)
class FileRange:
    """Consecutive bytes of a file.

    Attributes:
        file: where.
        start: first byte.
        nbytes: how many.
    """

    file: TensorFile
    start: int
    nbytes: int


class Units:
    """The units of a checkpoint for one spec.

    Any thread may read. What is wrong with an expert's tensors (missing, another shape or dtype,
    a file cut off) is said when that expert is asked for, before a byte of it is read.

    Args:
        checkpoint: where from.
        spec: what an expert consists of. The first expert is compared with it at once.

    Attributes:
        checkpoint, spec: as given.
    """

    def __init__(self, checkpoint: "Checkpoint", spec: WeightSpec) -> None:
        self.checkpoint = checkpoint
        self.spec = spec
        self.ranges(0, 0)
        _check_blocks(checkpoint, spec)

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit."""
        return self.spec.unit_bytes

    def ranges(self, layer: int, expert: int) -> list[FileRange]:
        """Where the plain bytes of a unit lie, in their order.

        Args:
            layer: MoE layer, 0-based.
            expert: 0-based.

        Raises:
            CheckpointError: names the tensor that is missing or odd.
        """
        found = []
        for wanted in self.spec.tensors:
            parts = [
                _stored(self.checkpoint, layer, expert, kind) for kind in parts_of(wanted.name)
            ]
            _check_parts(wanted, [part for part, _ in parts])
            found += [where for _, where in parts]
        return found

    def read(self, layer: int, expert: int) -> bytearray:
        """The plain bytes of a unit, in the order of the spec."""
        data = bytearray(self.unit_bytes)
        self.read_into(layer, expert, [memoryview(data)])
        return data

    def read_into(self, layer: int, expert: int, pieces: list[memoryview], offset: int = 0) -> None:
        """Read a unit's plain bytes from `offset` on into memory; as many as `pieces` take.

        Made for the pieces of an arena's slot (`Arena.pieces`): nothing lies in between.

        Raises:
            CheckpointError: a tensor is missing or odd, or a file cannot be read.
        """
        with self.reader(layer, expert) as unit:
            unit.read_into(pieces, offset)

    def reader(self, layer: int, expert: int) -> "UnitReader":
        """One unit, to be read in chunks; a context.

        Raises:
            CheckpointError: a tensor is missing or odd.
        """
        return UnitReader(self.ranges(layer, expert))


class UnitReader:
    """The plain bytes of one unit; each file is opened once, when something of it is read.

    Args:
        ranges: where they lie.
    """

    def __init__(self, ranges: list[FileRange]) -> None:
        self._ranges = ranges
        self._files: dict[TensorFile, FileIO] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def read_into(self, pieces: list[memoryview], offset: int = 0) -> None:
        """As `Units.read_into`."""
        at = 0
        left = [piece for piece in pieces if len(piece)]
        for where in self._ranges:
            skip = min(max(0, offset - at), where.nbytes)
            start, nbytes = where.start + skip, where.nbytes - skip
            at += where.nbytes
            taken: list[memoryview] = []
            while left and nbytes:
                piece = left[0][:nbytes]
                left[0] = left[0][len(piece) :]
                if not len(left[0]):
                    left.pop(0)
                taken.append(piece)
                nbytes -= len(piece)
            if taken:
                where.file.read_into(self._opened(where.file), start, taken)
        if left:
            raise CheckpointError(
                f"{sum(map(len, pieces))} bytes from {offset} on were asked of a unit that has {at}"
            )

    def _opened(self, file: TensorFile) -> FileIO:
        opened = self._files.get(file)
        if opened is None:
            opened = self._files[file] = file.open()
        return opened


def stored_spec(checkpoint: "Checkpoint", kind: str) -> TensorSpec:
    """What the first expert's tensor is like, parts put one above the other."""
    parts = [_stored(checkpoint, 0, 0, part)[0] for part in parts_of(kind)]
    return TensorSpec(kind, parts[0].dtype, _stacked_shape(parts))


def _stored(
    checkpoint: "Checkpoint", layer: int, expert: int, kind: str
) -> tuple[StoredTensor, FileRange]:
    """One expert's tensor: what it is, and where."""
    name = checkpoint.name_of(layer, expert, kind)
    file = checkpoint.file_of(name)
    tensor = file.tensor(name)
    if checkpoint.stacked:
        if not tensor.shape or tensor.shape[0] != checkpoint.experts:
            raise CheckpointError(
                f"{name} in {file.path} has shape {list(tensor.shape)}; its first dimension must "
                f"be the {checkpoint.experts} experts"
            )
        nbytes = tensor.nbytes // checkpoint.experts
        start = tensor.start + expert * nbytes
        tensor = StoredTensor(name, tensor.dtype, tensor.shape[1:], start, nbytes)
    return tensor, FileRange(file, tensor.start, tensor.nbytes)


def _stacked_shape(parts: list[StoredTensor]) -> tuple[int, ...]:
    """Of the parts one above the other: they are row-major, so their bytes just follow."""
    first = parts[0].shape
    if len(parts) == 1:
        return first
    rows, *rest = first or (1,)
    return (rows * len(parts), *rest)


def _check_parts(wanted: TensorSpec, parts: list[StoredTensor]) -> None:
    for part in parts:
        if part.dtype is not wanted.dtype or part.shape != parts[0].shape:
            raise _odd(wanted, part)
    if _stacked_shape(parts) != wanted.shape:
        raise _odd(wanted, parts[0])


def _check_blocks(checkpoint: "Checkpoint", spec: WeightSpec) -> None:
    """Scales by blocks can be put one above the other only where no block spans both parts."""
    names = {tensor.name for tensor in spec.tensors}
    for tensor in spec.tensors:
        parts = parts_of(tensor.name)
        base, _, rest = tensor.name.partition("_")
        if len(parts) == 1 or not rest or base not in names or len(tensor.shape) < 2:
            continue
        rows = _stored(checkpoint, 0, 0, parts_of(base)[0])[0].shape[0]
        blocks = _stored(checkpoint, 0, 0, parts[0])[0].shape[0]
        if rows % blocks:
            raise CheckpointError(
                f"{tensor.name}: {rows} rows of each part have {blocks} blocks of scales, which do "
                f"not divide them; a block would span both parts of {base}. Take the parts apart "
                "(`elasticep checkpoint --split`)"
            )


def _odd(wanted: TensorSpec, part: StoredTensor) -> CheckpointError:
    return CheckpointError(
        f"{part.name} is {part.dtype} {list(part.shape)}, which does not make {wanted.name} "
        f"{wanted.dtype} {list(wanted.shape)} of the group's [weights]; take them from "
        "`elasticep checkpoint`"
    )
