"""Folders of tests under /tmp that nobody has to clean up: the next one sweeps what a kill left."""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from elasticep.errors import ConfigError

_SUFFIX: Final = ".held"
_LONGEST_BYTES: Final = 60  # a socket's path has 107, of which 45 are for what is made here
_held: dict[Path, int] = {}


def make_folder(prefix: str) -> Path:
    """A new folder, ours as long as this process lives; `remove_folder` gives it back before.

    Folders with the same prefix whose processes are gone are removed.

    Raises:
        ConfigError: paths of sockets in it would be too long.
    """
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > _LONGEST_BYTES:
        raise ConfigError(
            f"the folder of temporary files, {parent}, has a path of more than {_LONGEST_BYTES} "
            "bytes, too long for sockets in it; let TMPDIR name another"
        )
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    made = _lock_of(folder).with_suffix(".made")
    descriptor = os.open(made, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    made.rename(_lock_of(folder))  # whoever sees it sees it locked
    _held[folder] = descriptor
    for lock in folder.parent.glob(f"{prefix}*{_SUFFIX}"):
        if lock != _lock_of(folder) and _abandoned(lock):
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink(missing_ok=True)
    return folder


def remove_folder(folder: Path) -> None:
    """Remove it with all that is in it; twice is fine."""
    shutil.rmtree(folder, ignore_errors=True)
    _lock_of(folder).unlink(missing_ok=True)
    descriptor = _held.pop(folder, None)
    if descriptor is not None:
        os.close(descriptor)


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + _SUFFIX)


def _abandoned(lock: Path) -> bool:
    with suppress(OSError):
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)
        return True
    return False  # held, not ours to judge, or gone meanwhile
