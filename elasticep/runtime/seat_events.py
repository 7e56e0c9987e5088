"""What happens to a seat, and what is to be done about it: the events and effects of `seats`."""

import enum
from dataclasses import dataclass

from elasticep.native.structs import Holder


class SeatState(enum.StrEnum):
    """Where a seat is."""

    EMPTY = "empty"
    STARTING = "starting"
    READY = "ready"
    ATTACHED = "attached"
    ENDING = "ending"


# ---- events


@dataclass(frozen=True, slots=True)
class Granted:
    """The controller gives the seat to a new incarnation.

    `allocate`: it has no memory yet, and a process of its own must make it first (on a GPU).
    """

    incarnation: int
    allocate: bool = False


@dataclass(frozen=True, slots=True)
class Allocated:
    """The memory of a seat that had none is there."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Connected:
    """An engine showed its ticket and has the memory; it takes its lock next."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The engine's socket closed. While it holds its lock, only the lock counts."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Held:
    """A process took its lock."""

    holder: Holder
    incarnation: int


@dataclass(frozen=True, slots=True)
class Died:
    """The kernel marked a lock whose holder began to die."""

    holder: Holder
    incarnation: int


@dataclass(frozen=True, slots=True)
class Released:
    """A process let go of its lock."""

    holder: Holder
    incarnation: int


@dataclass(frozen=True, slots=True)
class Exited:
    """A process is confirmed gone (pidfd)."""

    holder: Holder
    incarnation: int
    how: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """This incarnation is over: expelled, detached, failed to start, daemon stopping."""

    incarnation: int
    cause: str
    epoch: int = 0
    failed: bool = False  # it never came up


@dataclass(frozen=True, slots=True)
class GraceOver:
    """A fenced engine had its time to let go."""

    incarnation: int


Event = (
    Granted
    | Allocated
    | Connected
    | Disconnected
    | Held
    | Died
    | Released
    | Exited
    | Ended
    | GraceOver
)


# ---- effects


@dataclass(frozen=True, slots=True)
class Start:
    """Make the memory if there is none, grant the header, start the worker under service."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Expel:
    """Set the dead word of this incarnation everywhere and fence its header."""

    incarnation: int
    epoch: int
    cause: str


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the controller that the seat has come to this state.

    The state is named, because one event may lead through two. `backoff` counts failed starts in
    a row: the report of EMPTY waits longer with each.
    """

    state: SeatState
    backoff: int = 0


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL one half."""

    holder: Holder


@dataclass(frozen=True, slots=True)
class LetGo:
    """Tell the engine to let go and give it its grace."""

    incarnation: int


Effect = Start | Expel | Report | Kill | LetGo
