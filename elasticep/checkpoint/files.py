"""safetensors files by their documented layout: where each tensor lies, and its bytes.

A file is eight bytes with the length of a JSON header (little-endian), the header, and the tensors'
bytes; offsets in the header count from its end. The `safetensors` library reads tensors into NumPy
or torch, which know not all of their formats; here they stay bytes, so that any format can be
copied, and only the ranges that are asked for are read.
"""

import json
import math
import os
import threading
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Final, TypeGuard

from elasticep.errors import CheckpointError
from elasticep.weights import WeightDtype

MAX_HEADER_BYTES: Final = 100_000_000  # the format's own limit
_LENGTH_BYTES: Final = 8
_METADATA: Final = "__metadata__"
_READ_BYTES: Final = 1 << 30  # Linux reads at most 2 GiB at once

DTYPES: Final = {
    "F32": WeightDtype.FP32,
    "F16": WeightDtype.FP16,
    "BF16": WeightDtype.BF16,
    "F8_E4M3": WeightDtype.FP8_E4M3,
    "F8_E5M2": WeightDtype.FP8_E5M2,
    "F8_E8M0": WeightDtype.FP8_E8M0,
    "I64": WeightDtype.INT64,
    "I32": WeightDtype.INT32,
    "I16": WeightDtype.INT16,
    "I8": WeightDtype.INT8,
    "U8": WeightDtype.UINT8,
}
"""Names of the format, and ours."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        name: in the checkpoint.
        dtype: of its elements.
        shape: row-major.
        start: first byte in the file.
        nbytes: how many there are.
    """

    name: str
    dtype: WeightDtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


class TensorFile:
    """One safetensors file; only its header is read when it is opened.

    Args:
        path: of the file.

    Attributes:
        path: as given.
        bytes_read: of tensors, so far.

    Raises:
        CheckpointError: it cannot be read, is no safetensors file, or is cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        self._lock = threading.Lock()
        if not path.is_file():  # a pipe would never answer
            raise CheckpointError(f"there is no file {path}; fetch the checkpoint again")
        try:
            with path.open("rb") as file:
                self._identity = _identity_of(file.fileno())
                size = os.fstat(file.fileno()).st_size
                self._data_start, plain = _header(path, file, size)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        self._data_bytes = size - self._data_start
        self._plain = plain
        self._check_ends(plain)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors in it."""
        return tuple(self._plain)

    def tensor(self, name: str) -> StoredTensor:
        """Where a tensor lies.

        Raises:
            CheckpointError: it is not here, of an unknown dtype, or its entry makes no sense.
        """
        plain = self._plain.get(name)
        if plain is None:
            raise CheckpointError(
                f"{self.path} has no tensor {name!r}; the file is incomplete, fetch it again"
            )
        dtype, shape, (start, end) = plain["dtype"], plain["shape"], plain["data_offsets"]
        if dtype not in DTYPES:
            raise CheckpointError(
                f"{name} in {self.path} is of dtype {dtype!r}; known are {', '.join(DTYPES)}"
            )
        known = DTYPES[dtype]
        if math.prod(shape) * known.item_bytes != end - start:
            raise CheckpointError(
                f"{name} in {self.path}: {dtype} {shape} needs "
                f"{math.prod(shape) * known.item_bytes} bytes, the header gives it {end - start}; "
                "the file is broken, fetch it again"
            )
        return StoredTensor(name, known, tuple(shape), self._data_start + start, end - start)

    def open(self) -> FileIO:
        """The file for `read_into`, if it is still the same; to be closed by the caller.

        Raises:
            CheckpointError: it is another one, or cannot be opened.
        """
        try:
            file = FileIO(self.path)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from None
        if _identity_of(file.fileno()) != self._identity:
            file.close()
            raise CheckpointError(
                f"{self.path} was changed since it was opened; checkpoints that serve must "
                "stay as they are. Restart with the new one"
            )
        return file

    def read_into(self, file: FileIO, start: int, pieces: list[memoryview]) -> None:
        """Read bytes from `start` on into `pieces`, one after another, without the GIL.

        Args:
            file: from `open`.
            start: first byte.
            pieces: as many bytes as they take.

        Raises:
            CheckpointError: the file is shorter than it was, or unreadable.
        """
        try:
            for piece in pieces:
                self._read_piece(file.fileno(), start, piece)
                start += len(piece)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from None

    def _read_piece(self, fd: int, start: int, piece: memoryview) -> None:
        at = 0
        while at < len(piece):
            got = os.preadv(fd, [piece[at : at + _READ_BYTES]], start + at)
            if not got:
                raise CheckpointError(f"{self.path} ends at byte {start + at}; fetch it again")
            at += got
        with self._lock:
            self.bytes_read += at

    def _check_ends(self, plain: dict[str, Any]) -> None:
        # Tensors fill the data without gaps, so the last end is the size: a cut-off file is seen
        # before anything of it is used.
        ends = [entry["data_offsets"][1] for entry in plain.values()]
        needed = max(ends, default=0)
        if needed != self._data_bytes:
            raise CheckpointError(
                f"{self.path} has {self._data_bytes} bytes of tensors, its header speaks of "
                f"{needed}; the file is incomplete or broken, fetch it again"
            )


def _identity_of(fd: int) -> tuple[int, int, int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _header(path: Path, file: Any, size: int) -> tuple[int, dict[str, Any]]:
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if size < _LENGTH_BYTES or not 2 <= length <= min(MAX_HEADER_BYTES, size - _LENGTH_BYTES):
        raise CheckpointError(
            f"{path} is no safetensors file, or was cut off within its header; only safetensors "
            "checkpoints are read (no pickle)"
        )
    try:
        plain = json.loads(file.read(length))
    except (ValueError, RecursionError):
        plain = None
    if not isinstance(plain, dict):
        raise CheckpointError(f"{path} has no JSON header: it is no safetensors file")
    plain.pop(_METADATA, None)
    for name, entry in plain.items():
        _check_entry(path, name, entry)
    return _LENGTH_BYTES + length, plain


def _check_entry(path: Path, name: str, entry: Any) -> None:
    if isinstance(entry, dict):
        shape, offsets = entry.get("shape"), entry.get("data_offsets")
        if (
            isinstance(entry.get("dtype"), str)
            and _naturals(shape)
            and _naturals(offsets)
            and len(offsets) == 2
            and offsets[0] <= offsets[1]
        ):
            return
    raise CheckpointError(f"{path}: the header's entry of {name!r} makes no sense: {entry!r:.200}")


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    )
