"""What a group's membership hears (events), and what it wants done (effects). Plain values.

An `Outcome` has its effects in three stages: `now` may be done at once, `writes` go to the store in
one transaction, `after` only when that succeeded. Times are milliseconds of one monotonic clock.
"""

import enum
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from elasticep.control.tables import Placement
from elasticep.control.views import View
from elasticep.policies import Policies


class SeatState(enum.IntEnum):
    """What a node says of a seat; the numbers are those of `SeatState` in types.proto."""

    EMPTY = 1  # no worker: never started, or confirmed gone with its engine
    READY = 2  # worker up, no engine
    ATTACHED = 3  # worker and engine up
    DEAD = 4  # this incarnation is over


@dataclass(frozen=True, slots=True)
class SeatReport:
    """One seat, as its node sees it. `incarnation` 0: never granted; `epoch` 0: runs in none."""

    rank: int
    incarnation: int
    state: SeatState
    epoch: int = 0
    cause: str = ""


# ---- events


@dataclass(frozen=True, slots=True)
class NodeHello:
    """A node's session began; `seats` are all that it offers to this group."""

    node: str
    seats: tuple[SeatReport, ...]
    domain: str = ""  # empty: its own


@dataclass(frozen=True, slots=True)
class NodeDisconnected:
    """A node's session ended; nothing is concluded from that alone."""

    node: str


@dataclass(frozen=True, slots=True)
class NodeGone:
    """A node was not heard of for too long."""

    node: str
    why: str


@dataclass(frozen=True, slots=True)
class SeatChanged:
    """A seat changed its state."""

    node: str
    report: SeatReport


@dataclass(frozen=True, slots=True)
class Staged:
    """A rank staged an epoch, or says why it cannot; `unrestorable` names (layer, expert) pairs
    that no peer, backup or checkpoint can supply.
    """

    node: str
    rank: int
    incarnation: int
    epoch: int
    error: str = ""
    unrestorable: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Told:
    """What was wanted of nodes was sent: to stage an epoch for these ranks, whose time begins."""

    epoch: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Adopted:
    """A rank runs in an epoch, from `step` on."""

    node: str
    rank: int
    incarnation: int
    epoch: int
    step: int = 0


@dataclass(frozen=True, slots=True)
class Waits:
    """A rank waits for another; `waited_ms` 0 withdraws what it said before."""

    node: str
    rank: int
    incarnation: int
    waits_for: int
    phase: str
    waited_ms: int
    progress: int


@dataclass(frozen=True, slots=True)
class Progressed:
    """A rank's progress counter, whether its engine is warming up, and how far the weights are
    that it loads for a view (`staging_epoch` 0: for none).
    """

    node: str
    rank: int
    incarnation: int
    progress: int
    warmup: bool
    staging_epoch: int = 0
    staging_done_bytes: int = 0
    staging_total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Token counters of some layers of a rank; see `LoadReport` in controller.proto."""

    node: str
    rank: int
    incarnation: int
    memory: int
    first_layer: int
    counters: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Loads:
    """The tokens to plan for, int64 [layers, experts]; None: not known."""

    tokens: "NDArray[np.int64] | None"


@dataclass(frozen=True, slots=True, eq=False)
class Rearrange:
    """The background wants another placement for the members of the view `epoch`, which is in
    force. It fills only slots that are empty there. Nothing follows when the view has changed.
    """

    epoch: int
    placement: Placement
    reason: str


@dataclass(frozen=True, slots=True)
class Retry:
    """Try again to load what could not be loaded."""


@dataclass(frozen=True, slots=True)
class Drain:
    """An operator takes ranks out of the view and keeps them out."""

    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Undrain:
    """An operator lets ranks back in: drained, flapping, or kept out by manual readmission."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SetPolicies:
    """An operator changed the group's policies; these are all of them."""

    policies: Policies


@dataclass(frozen=True, slots=True)
class NodeOff:
    """An operator says that a node is off, and with it every process that ran there."""

    node: str
    why: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event: TypeAlias = (
    NodeHello
    | NodeDisconnected
    | NodeGone
    | SeatChanged
    | Staged
    | Told
    | Adopted
    | Waits
    | Progressed
    | LoadReport
    | Loads
    | Rearrange
    | Retry
    | Drain
    | Undrain
    | SetPolicies
    | NodeOff
    | Tick
)

# ---- effects


@dataclass(frozen=True, slots=True)
class Grant:
    """Tell a node that it may start a worker for this seat."""

    node: str
    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Propose:
    """Send a view to a node; these ranks of its own stage it, and the view leaves others of its own
    out alive: (rank, why).
    """

    node: str
    view: View
    ranks: tuple[int, ...]
    leaving: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Fence:
    """Tell a node that an incarnation is over; its own node ends it, others set its dead word."""

    node: str
    rank: int
    incarnation: int
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Forget:
    """Tell a node that the group was deleted: incarnations below `incarnation` are over, and when
    nothing runs of them the node lets go of their memory.
    """

    node: str
    incarnation: int
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell a node which policies hold."""

    node: str
    policies: Policies


Send: TypeAlias = Grant | Propose | Fence | Forget | Tell


@dataclass(frozen=True, slots=True)
class SaveView:
    """Write `/view` and its history entry."""

    view: View


@dataclass(frozen=True, slots=True)
class SaveSeat:
    """Write what must survive of a seat; see `elasticep.control.seats.Seat`. `ended_ms` is of this
    leader's clock; the store has times that any leader can read.
    """

    rank: int
    incarnation: int
    node: str
    phase: str
    since: int
    held: str
    reason: str
    ended_ms: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SaveAdopted:
    """Write the epoch that every live member runs in."""

    epoch: int


@dataclass(frozen=True, slots=True)
class SaveRebalance:
    """Write what an operator wants of the background; see `elasticep.control.rebalance`.

    Attributes:
        paused: why nothing is to be moved; empty: it may be.
        asked: "", "force" or "import", until that is done.
        placement: `Placement.to_bytes` of an import.
        held: an imported placement is kept: nothing moves for balance without being asked.
    """

    paused: str
    asked: str
    placement: bytes
    held: bool = False


@dataclass(frozen=True, slots=True)
class SavePolicies:
    """Write the group's policies."""

    policies: Policies


@dataclass(frozen=True, slots=True, eq=False)
class SaveLoads:
    """Write what placements are planned for, int64 [layers, experts]."""

    tokens: "NDArray[np.int64]"


Write: TypeAlias = SaveView | SaveSeat | SaveAdopted | SaveRebalance | SavePolicies | SaveLoads


@dataclass(frozen=True, slots=True)
class Notice:
    """Something worth a log line and a metric; `event` such as "rank.fenced"."""

    event: str
    fields: dict[str, Any]


@dataclass(slots=True)
class Outcome:
    """What is to be done, in this order: `now`, `writes`, `after`."""

    now: list[Send] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    after: list[Send] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)

    def note(self, event: str, **fields: Any) -> None:
        """Add a notice."""
        self.notices.append(Notice(event, fields))

    def save(self, record: Write) -> None:
        """Write a record in place of an earlier one of the same thing: a transaction that names a
        key twice is refused.
        """
        for index, write in enumerate(self.writes):
            if _of(write) == _of(record):
                self.writes[index] = record
                return
        self.writes.append(record)


def _of(write: Write) -> tuple[type, int]:
    return type(write), write.rank if isinstance(write, SaveSeat) else 0
