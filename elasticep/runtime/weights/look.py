"""Whether there is anything to read where `daemon.checkpoint` points, before a view needs it.

A folder that is not there, or is empty, may be mounted later: that is said, and looked at again.
What is there and can be no checkpoint is a mistake, and keeps a daemon from its first start.
"""

import asyncio
import contextlib
import errno
import os
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from structlog.typing import FilteringBoundLogger

from elasticep.config import DaemonConfig
from elasticep.errors import CheckpointError, ConfigError

AGAIN_S: Final = 10.0  # how often a checkpoint that is not there is looked for
_LOOK_S: Final = 1.0  # a file server that is away answers no stat
_WRONG: Final = (errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


@dataclass(frozen=True, slots=True)
class Found:
    """What is where a checkpoint should be.

    Attributes:
        problem: why nothing can be read there now, with the remedy; "" if something can.
        wrong: nothing that is mounted there later would help.
    """

    problem: str = ""
    wrong: bool = False


def look_at(path: str) -> Found:
    """Look for an index or a safetensors file, and whether it may be read; it is not read.

    Args:
        path: a folder or a file, as `daemon.checkpoint` has it.
    """
    from elasticep.checkpoint.opened import listing_of  # only a daemon with a checkpoint needs it

    where = Path(path)
    try:
        kind = where.stat().st_mode
        if stat.S_ISDIR(kind) and next(where.iterdir(), None) is None:
            return Found(f"{path} is an empty folder; mount the checkpoint there")
        if not stat.S_ISDIR(kind) and not stat.S_ISREG(kind):
            return Found(f"{path} is neither a folder nor a file", wrong=True)
        with listing_of(where).open("rb") as listed:
            listed.read(1)
    except CheckpointError as error:
        return Found(str(error), wrong=True)
    except FileNotFoundError:
        return Found(f"there is no {path}; mount the checkpoint there, or correct the path")
    except PermissionError as error:
        return Found(
            f"user {os.geteuid()}, as which the daemon runs, may not read {error.filename or path}",
            wrong=True,
        )
    except OSError as error:
        return Found(f"{path} cannot be read: {error.strerror}", wrong=error.errno in _WRONG)
    return Found()


class CheckpointWatch:
    """What is known of the checkpoints that this node's groups would be loaded from.

    Args:
        config: says which.
        log: where it is told.

    Attributes:
        problems: path -> why nothing can be read there now.
    """

    def __init__(self, config: DaemonConfig, log: FilteringBoundLogger) -> None:
        self._log = log
        self._groups: dict[str, list[str]] = {}
        for seats in config.seats:
            path = config.checkpoint_of(seats.group)
            if path:
                self._groups.setdefault(path, []).append(seats.group)
        self._named = [item.partition("=")[0] for item in config.checkpoint if "=" in item]
        self._offered = [seats.group for seats in config.seats]
        self.problems: dict[str, str] = {}

    async def start(self, *, refuse: bool) -> None:
        """Look at all of them, and tell of those from which nothing can be read.

        Args:
            refuse: raise if one can never be read; else that is an event, too.

        Raises:
            ConfigError: names the path, the groups and what is wrong.
        """
        for group in self._named:
            if group not in self._offered:
                self._log.warning(
                    "checkpoint.unused",
                    group=group,
                    why=f"daemon.seats offers no seat of it, but of {', '.join(self._offered)}",
                )
        for path, groups in self._groups.items():
            found = await _in_time(path)
            if found.wrong and refuse:
                raise ConfigError(
                    f"daemon.checkpoint of group {', '.join(groups)}: {found.problem}. Give a "
                    "folder with an index or a .safetensors file, as `elasticep checkpoint` shows "
                    "it"
                )
            if found.problem:
                self.problems[path] = found.problem
                tell = self._log.error if found.wrong else self._log.warning
                tell("checkpoint.away", path=path, groups=groups, why=found.problem)

    async def run(self) -> None:
        """Look again until each of them can be read."""
        while self.problems:
            await asyncio.sleep(AGAIN_S)
            for path in list(self.problems):
                found = await _in_time(path)
                if found.problem:
                    self.problems[path] = found.problem
                else:
                    del self.problems[path]
                    self._log.info("checkpoint.found", path=path, groups=self._groups[path])

    def told(self) -> list[tuple[str, str, str]]:
        """Group, path and problem of each group that has a checkpoint."""
        return [
            (group, path, self.problems.get(path, ""))
            for path, groups in self._groups.items()
            for group in groups
        ]


async def _in_time(path: str) -> Found:
    """`look_at` in a thread that nobody waits for when the file system does not answer."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Found] = loop.create_future()

    def tell(found: Found) -> None:
        if not done.done():
            done.set_result(found)

    def look() -> None:
        found = look_at(path)
        with contextlib.suppress(RuntimeError):  # the daemon has ended meanwhile
            loop.call_soon_threadsafe(tell, found)

    threading.Thread(target=look, name="checkpoint", daemon=True).start()
    try:
        return await asyncio.wait_for(done, _LOOK_S)
    except TimeoutError:
        return Found(f"the file system of {path} has not answered within {_LOOK_S:g} s")
