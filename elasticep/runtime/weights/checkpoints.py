"""In the mover: units out of checkpoints on disk, each opened once."""

from pathlib import Path
from typing import TYPE_CHECKING

from elasticep.arena import Fill
from elasticep.errors import CheckpointError
from elasticep.runtime.weights.messages import Failure
from elasticep.runtime.weights.sources import SourceFailed, Went

if TYPE_CHECKING:
    from elasticep.checkpoint import Units


class Checkpoints:
    """The checkpoints in use, by path and the group's spec."""

    def __init__(self) -> None:
        self._units: dict[tuple[str, str], Units] = {}

    def copy(self, path: str, fill: Fill, chunk: int, went: Went) -> None:
        """Read one unit, straight into the slot. A checkpoint promises nothing: it is the truth
        that promises are made from.

        Raises:
            SourceFailed: there is no such checkpoint, or it lacks the expert or has another one.
        """
        total = fill.arena.layout.spec.unit_bytes
        try:
            with self._open(path, fill).reader(fill.layer, fill.expert) as unit:
                for at in range(0, total, chunk):
                    size = min(chunk, total - at)
                    unit.read_into(fill.pieces(at, size), at)
                    went(size)
        except CheckpointError as error:
            self._units.clear()  # it may be repaired or replaced: look again the next time
            # An error of the file system, or a folder that is not there or holds nothing: it is
            # not mounted. That does not say that the checkpoint lacks the expert.
            cause = error.__context__
            broken = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
            away = broken or not _holds_something(path)
            failure = Failure.AWAY if away else Failure.FAILED
            raise SourceFailed(failure, str(error)) from None

    def _open(self, path: str, fill: Fill) -> "Units":
        from elasticep.checkpoint import open_checkpoint

        spec = fill.arena.layout.spec
        key = (path, spec.canonical_json())
        units = self._units.get(key)
        if units is None:
            units = self._units[key] = open_checkpoint(path).units(spec)
        return units


def _holds_something(path: str) -> bool:
    where = Path(path)
    try:
        return where.is_file() or next(where.iterdir(), None) is not None
    except OSError:
        return False
