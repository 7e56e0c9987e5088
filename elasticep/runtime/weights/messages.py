"""What daemon and mover say to each other: JSON over a SEQPACKET pair, descriptors beside it.

Daemon to mover: `Use` an arena (with its descriptor), `Drop` it, `Copy` a unit, `Hurry` with a copy
or `Cancel` it. Mover to daemon: `Beat` about once a second, `Used`, `Started`, `Moved` (bytes so
far), `Ended`.
"""

import dataclasses
import enum
import json
from dataclasses import dataclass
from typing import Any, Final

from elasticep.errors import ElasticEPError

MAX_BYTES: Final = 64 * 1024
MAX_TEXT: Final = 512  # characters of a sentence


class Kind(enum.StrEnum):
    """Where a unit comes from; the order is that in which sources are tried."""

    REPLICA = "replica"  # a live rank of this domain, whose arena is mapped
    REMOTE = "remote"  # a live rank of another domain, through its daemon
    BACKUP = "backup"  # host memory of some node
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One place to copy a unit from.

    Attributes:
        kind: see `Kind`.
        arena, slot: an arena that the mover has, by number; -1: it is read through a daemon.
        address, group: of the daemon that is asked with `ReadExpert`.
        node: whose memory it is.
        rank, incarnation: the replica's; -1 and 0 for backups and checkpoints.
        path: of the checkpoint.
    """

    kind: Kind
    arena: int = -1
    slot: int = -1
    address: str = ""
    group: str = ""
    node: str = ""
    rank: int = -1
    incarnation: int = 0
    path: str = ""

    def __str__(self) -> str:
        match self.kind:
            case Kind.CHECKPOINT:
                return f"checkpoint {self.path}"
            case Kind.BACKUP:
                return f"backup on {self.node}"
        return f"rank {self.rank} on {self.node}"


class Failure(enum.StrEnum):
    """Why a copy did not come about."""

    LIED = "lied"  # the bytes are not what they must be
    STALLED = "stalled"  # nothing came for too long
    GONE = "gone"  # the source does not have it (any more)
    FAILED = "failed"  # it answered with an error
    BUSY = "busy"  # it has it, and serves as many as it may
    AWAY = "away"  # this node cannot reach it now: a file system that is not mounted
    MOVER = "mover"  # the mover ended or hung with it
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Use:
    """Map an arena (its descriptor comes along); `write`: be its one writer."""

    arena: int
    layers: int
    slots: int
    spec: dict[str, Any]
    write: bool


@dataclass(frozen=True, slots=True)
class Drop:
    """Unmap an arena."""

    arena: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Put a unit into a slot.

    Attributes:
        job: a number of its own.
        arena, layer, slot, expert: what goes where; expert -1: leave the slot empty.
        checksum: hexadecimal, what it must sum up to; "": not known, then the source's word.
        source: from where.
        urgent: beyond the rate limit: somebody waits for it to serve.
    """

    job: int
    arena: int
    layer: int
    slot: int
    expert: int
    checksum: str
    source: Source
    urgent: bool


@dataclass(frozen=True, slots=True)
class Cancel:
    """Give a copy up; its slot is left empty. `Ended` still comes."""

    job: int


@dataclass(frozen=True, slots=True)
class Hurry:
    """A copy has become urgent."""

    job: int


@dataclass(frozen=True, slots=True)
class Used:
    """An arena is mapped; if it is for writing, nobody else writes into it any more, and what an
    earlier writer left half filled is empty.
    """

    arena: int


@dataclass(frozen=True, slots=True)
class Beat:
    """The mover is there and does what it is told."""


@dataclass(frozen=True, slots=True)
class Started:
    """A job is being worked on: urgent ones first, else in their order."""

    job: int


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes of the running job that have arrived."""

    job: int
    done: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A job is over: with its checksum, or with why it failed.

    Attributes:
        job: its number.
        checksum: hexadecimal, "" when it failed.
        failure: "" or a `Failure`.
        text: a sentence, at most `MAX_TEXT` characters of it.
        done: bytes that were copied.
    """

    job: int
    checksum: str = ""
    failure: str = ""
    text: str = ""
    done: int = 0


Message = Use | Drop | Copy | Cancel | Hurry | Used | Beat | Started | Moved | Ended
_ALL: Final = (Use, Drop, Copy, Cancel, Hurry, Used, Beat, Started, Moved, Ended)
_KINDS: Final[dict[str, type]] = {kind.__name__: kind for kind in _ALL}


class BadMoverMessage(ElasticEPError):
    """What came over the pair is no message of this version."""

    reason = "BAD_MESSAGE"


def pack(message: Message) -> bytes:
    """The bytes of one packet.

    Raises:
        BadMoverMessage: it has more than `MAX_BYTES`, which would arrive cut off.
    """
    plain = {"is": type(message).__name__, **dataclasses.asdict(message)}
    data = json.dumps(plain, separators=(",", ":")).encode()
    if len(data) > MAX_BYTES:
        raise BadMoverMessage(
            f"a message {type(message).__name__} of {len(data)} bytes; at most {MAX_BYTES} go"
        )
    return data


def unpack(data: bytes) -> Message:
    """Read one packet.

    Raises:
        BadMoverMessage: it is none of ours.
    """
    try:
        plain = json.loads(data)
        kind = _KINDS[plain.pop("is")]
        if kind is Copy:
            source = plain["source"]
            plain["source"] = Source(**{**source, "kind": Kind(source["kind"])})
        message: Message = kind(**plain)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadMoverMessage(f"a packet of {len(data)} bytes: {error!r}") from None
    return message
