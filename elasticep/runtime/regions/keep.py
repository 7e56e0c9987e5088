"""What a daemon leaves for its next start: group configs, incarnations, processes, descriptors.

The file lies beside the sockets, in a directory that a reboot empties, like the memory it is about.
It is written in one rename. A file that cannot be used is reported and ignored: the seats it spoke
of are then simply new.
"""

import base64
import binascii
import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import DecodeError

from elasticep.errors import ConfigError, ElasticEPError
from elasticep.group import GroupConfig
from elasticep.proto import types_pb2
from elasticep.runtime.regions.peers import Endpoint
from elasticep.runtime.systemd import Notifier

VERSION: Final = 1
_MAX_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class KeptProcess:
    """A process by pid and start time."""

    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class KeptSeat:
    """One seat as its daemon last knew it; `granted_ns` is CLOCK_MONOTONIC."""

    rank: int
    incarnation: int
    ready: bool
    granted_ns: int = 0
    worker: KeptProcess | None = None
    engine: KeptProcess | None = None


@dataclass(frozen=True, slots=True)
class KeptGroup:
    """One group as its daemon last knew it.

    Attributes:
        config: the group's config.
        seats: this node's seats of it.
        members: rank -> (incarnation, node) of the newest proposed view.
        nodes: daemons of those members.
        weights: what `GroupWeights.kept` says, {} without weights.
    """

    config: GroupConfig
    seats: tuple[KeptSeat, ...] = ()
    members: dict[int, tuple[int, str]] = field(default_factory=dict)
    nodes: tuple[Endpoint, ...] = ()
    weights: dict[str, Any] = field(default_factory=dict)


class StateFile:
    """Reads and writes a node's file.

    Args:
        path: where.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, groups: Iterable[KeptGroup]) -> None:
        """Replace the file. Raises `OSError`."""
        plain = {"version": VERSION, "groups": [_plain(group) for group in groups]}
        temporary = self._path.with_suffix(".new")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as stream:
                json.dump(plain, stream, separators=(",", ":"))
            temporary.replace(self._path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def read(self) -> list[KeptGroup]:
        """What the last daemon left; [] when it left nothing.

        Raises:
            ConfigError: the file is there and cannot be used.
        """
        try:
            with self._path.open("rb") as stream:
                content = stream.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(f"cannot read {self._path}: {error.strerror}") from None
        try:
            if len(content) > _MAX_BYTES:
                raise ValueError("too long")
            plain = json.loads(content)
            if plain["version"] != VERSION:
                raise ValueError(f"version {plain['version']}")
            return [_group(item) for item in plain["groups"]]
        except (
            *(ValueError, KeyError, TypeError, AttributeError, binascii.Error),
            *(DecodeError, ElasticEPError),
        ) as error:
            raise ConfigError(f"{self._path} cannot be used: {error!r}") from None

    def remove(self) -> None:
        """Leave nothing for the next start."""
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()


def _plain(group: KeptGroup) -> dict[str, Any]:
    return {
        "config": base64.b64encode(group.config.to_proto().SerializeToString()).decode(),
        "seats": [asdict(seat) for seat in group.seats],
        "members": [[rank, *who] for rank, who in sorted(group.members.items())],
        "nodes": [asdict(node) for node in group.nodes],
        "weights": group.weights,
    }


def _group(plain: dict[str, Any]) -> KeptGroup:
    message = types_pb2.GroupConfig.FromString(base64.b64decode(plain["config"], validate=True))
    return KeptGroup(
        config=GroupConfig.from_proto(message),
        seats=tuple(_seat(seat) for seat in plain["seats"]),
        members={int(rank): (int(inc), str(node)) for rank, inc, node in plain["members"]},
        nodes=tuple(Endpoint(**node) for node in plain["nodes"]),
        weights=dict(plain.get("weights", {})),
    )


def _seat(plain: dict[str, Any]) -> KeptSeat:
    processes = {
        name: KeptProcess(int(plain[name]["pid"]), int(plain[name]["started"]))
        for name in ("worker", "engine")
        if plain[name] is not None
    }
    return KeptSeat(
        rank=int(plain["rank"]),
        incarnation=int(plain["incarnation"]),
        ready=bool(plain["ready"]),
        granted_ns=int(plain["granted_ns"]),
        **processes,
    )


# ---- descriptors in systemd's store


class FdStore:
    """Puts seats' descriptors into systemd's store and finds those of the last daemon.

    Args:
        notifier: speaks to systemd.
        stored: what `systemd.take_stored_fds` found.
    """

    def __init__(self, notifier: Notifier, stored: dict[str, list[int]]) -> None:
        self._notifier = notifier
        self._stored = stored

    def put(self, group: str, rank: int, fds: tuple[int, int]) -> None:
        """Keep a seat's header and data."""
        for name, fd in zip(_names(group, rank), fds, strict=True):
            self._notifier.store(name, (fd,))

    def remove(self, group: str, rank: int) -> None:
        """Keep a seat's descriptors no longer."""
        for name in _names(group, rank):
            self._notifier.remove(name)

    def take(self, group: str, rank: int) -> tuple[int, int] | None:
        """Header and data that the last daemon stored; the caller's from now on."""
        header, data = (self._stored.get(name, []) for name in _names(group, rank))
        if len(header) != 1 or len(data) != 1:
            return None
        return header.pop(), data.pop()

    def put_one(self, name: str, fd: int) -> None:
        """Keep one descriptor under a name."""
        self._notifier.store(name, (fd,))

    def remove_one(self, name: str) -> None:
        """Keep it no longer."""
        self._notifier.remove(name)

    def take_one(self, name: str) -> int | None:
        """What the last daemon stored under a name; the caller's from now on."""
        fds = self._stored.get(name, [])
        return fds.pop() if len(fds) == 1 else None

    def names(self, prefix: str, suffix: str) -> list[str]:
        """What the last daemon stored under such names and nobody took yet, ascending."""
        return sorted(
            name
            for name, fds in self._stored.items()
            if fds and name.startswith(prefix) and name.endswith(suffix)
        )

    def close_rest(self) -> list[str]:
        """Close and remove what nobody took; their names."""
        names = []
        for name, fds in self._stored.items():
            for fd in fds:
                os.close(fd)
            if fds:
                self._notifier.remove(name)
                names.append(name)
        self._stored = {}
        return names


def _names(group: str, rank: int) -> tuple[str, str]:
    return f"header-{rank}-{group}", f"data-{rank}-{group}"
