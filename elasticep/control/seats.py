"""A seat as the controller sees it: its phase, its incarnation, and the story of both.

    GONE ─granted─▶ JOINING ─▶ STAGED ─▶ ACTIVE ◀─▶ SUSPECTED
      ▲                │          │         │  ╲       │
      │                │          │         ▼   ▼      │
      └─confirmed── FENCED ◀──────┴───── DRAINING ◀────┘     (every live phase may be fenced)

An incarnation ends once: FENCED. Its seat is given out again, under a higher one, only from GONE:
when the node that held it confirmed that worker and engine are no more.
"""

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from elasticep.control.events import SaveSeat
from elasticep.control.views import Member
from elasticep.errors import ElasticEPError

_STORY_LENGTH: Final = 24
_START_BACKOFF_MS: Final = (100, 5_000)  # first and longest pause before a seat is granted again


class Phase(enum.StrEnum):
    """Where an incarnation is in its life."""

    GONE = "gone"  # none, or the last one is confirmed gone
    JOINING = "joining"  # granted; not yet staged a view
    STAGED = "staged"  # staged the view that takes it in
    ACTIVE = "active"  # runs in a view
    SUSPECTED = "suspected"  # others wait for it and it makes no progress
    DRAINING = "draining"  # an operator wants it out
    FENCED = "fenced"  # over; its processes may still exist


TRANSITIONS: Final[dict[tuple[Phase, Phase], str]] = {
    (Phase.GONE, Phase.JOINING): "a node got the seat under a new incarnation",
    (Phase.GONE, Phase.FENCED): "a node reports an incarnation that the store does not know",
    (Phase.JOINING, Phase.STAGED): "it staged the view that takes it in",
    (Phase.JOINING, Phase.ACTIVE): "it runs in a view; that it staged it was not heard",
    (Phase.STAGED, Phase.JOINING): "its view was called off before anyone else saw it",
    (Phase.STAGED, Phase.ACTIVE): "it runs in the view",
    (Phase.STAGED, Phase.SUSPECTED): "others wait for it",
    (Phase.ACTIVE, Phase.SUSPECTED): "others wait for it",
    (Phase.SUSPECTED, Phase.STAGED): "nobody waits for it any more",
    (Phase.SUSPECTED, Phase.ACTIVE): "nobody waits for it any more",
    (Phase.STAGED, Phase.DRAINING): "an operator drains it",
    (Phase.ACTIVE, Phase.DRAINING): "an operator drains it",
    (Phase.SUSPECTED, Phase.DRAINING): "an operator drains it",
    (Phase.DRAINING, Phase.ACTIVE): "an operator takes the drain back",
    (Phase.JOINING, Phase.FENCED): "it ended before it was a member",
    (Phase.STAGED, Phase.FENCED): "it ended",
    (Phase.ACTIVE, Phase.FENCED): "it ended",
    (Phase.SUSPECTED, Phase.FENCED): "it ended",
    (Phase.DRAINING, Phase.FENCED): "it ended, or it has left",
    (Phase.FENCED, Phase.GONE): "its node confirmed that its processes are gone",
}
LIVE: Final = frozenset(
    {Phase.JOINING, Phase.STAGED, Phase.ACTIVE, Phase.SUSPECTED, Phase.DRAINING}
)
JUDGED: Final = LIVE - {Phase.JOINING}


class InvalidTransition(ElasticEPError):
    """A seat was to make a step that its life does not have: an error of the controller."""

    reason = "INVALID_TRANSITION"


@dataclass(frozen=True, slots=True)
class Wait:
    """A standing report: this seat's rank waits for `target` since `since_ms`."""

    target: int
    phase: str
    since_ms: int


@dataclass(slots=True)
class Seat:
    """One seat of a group.

    Attributes:
        rank: 0..max_ranks-1.
        incarnation: the present or last one; 0: never granted.
        node: who holds that incarnation.
        phase: see the module's picture.
        attached: worker and engine are up.
        heard: its node said something of this incarnation since this controller leads.
        written: that this incarnation was granted is certainly in the store.
        epoch: the epoch it reported to run in; 0: none yet.
        since: the epoch of the first view that has this incarnation; 0: none.
        staged: epochs it reported as staged.
        held: why the seat is not given out; empty: it may be.
        why: why the last incarnation ended.
        ended_ms: when incarnations ended that count for flap damping.
        failed_starts: incarnations in a row that ended before an engine attached.
        grant_after_ms: not granted before.
        over_ms: when the last incarnation ended.
    """

    rank: int
    incarnation: int = 0
    node: str = ""
    phase: Phase = Phase.GONE
    attached: bool = False
    heard: bool = False
    written: bool = False
    epoch: int = 0
    since: int = 0
    staged: set[int] = field(default_factory=set)
    held: str = ""
    why: str = ""
    ended_ms: list[int] = field(default_factory=list)
    failed_starts: int = 0
    grant_after_ms: int = 0
    over_ms: int = 0
    wait: Wait | None = None
    progress: int = -1  # not heard yet
    progress_seen_ms: int = 0
    moved_ms: int = 0  # no earlier than this did the progress move last
    warmup: bool = False
    story: deque[str] = field(default_factory=lambda: deque(maxlen=_STORY_LENGTH))

    @property
    def live(self) -> bool:
        """Whether the present incarnation is not over."""
        return self.phase in LIVE

    @property
    def member(self) -> Member:
        """The present incarnation as a member of a view."""
        return Member(self.rank, self.incarnation, self.node)

    @property
    def running(self) -> bool:
        """Whether it reported to run in a view."""
        return self.epoch > 0

    def move(self, phase: Phase, now_ms: int, why: str) -> None:
        """Go to another phase; `InvalidTransition` tells the seat's story when there is no way."""
        if (self.phase, phase) not in TRANSITIONS:
            story = "; ".join(self.story) or "nothing happened to it yet"
            raise InvalidTransition(
                f"rank {self.rank} (incarnation {self.incarnation}) cannot go from {self.phase} to "
                f"{phase} because {why}. Its story: {story}"
            )
        self.story.append(f"{now_ms} ms: {self.phase} -> {phase}: {why}")
        self.phase = phase

    def grant(self, node: str, now_ms: int) -> None:
        """Give the seat to the next incarnation, on `node`."""
        self.incarnation += 1
        self.node = node
        self.attached = self.warmup = self.written = False
        self.heard = True
        self.epoch = self.since = 0
        self.staged.clear()
        self.wait = None
        self.progress = -1
        self.move(Phase.JOINING, now_ms, f"incarnation {self.incarnation} is granted to {node}")

    def end(self, now_ms: int, why: str, *, counts: bool, window_ms: int) -> None:
        """The present incarnation is over; `counts`: if an engine had attached for flap damping,
        within `window_ms`, else for start backoff.
        """
        self.move(Phase.FENCED, now_ms, why)
        self.why, self.wait, self.over_ms = why, None, now_ms
        if not counts:
            return
        self.ended_ms = [t for t in self.ended_ms if now_ms - t < window_ms]
        if self.attached:
            self.ended_ms.append(now_ms)
            self.failed_starts = 0
            return
        first, longest = _START_BACKOFF_MS
        self.grant_after_ms = now_ms + min(longest, first << min(self.failed_starts, 10))
        self.failed_starts += 1

    def observe(self, progress: int, warmup: bool, now_ms: int) -> None:
        """Take a reading of the progress counter."""
        if self.progress < 0:
            self.moved_ms = now_ms
        elif progress != self.progress:
            # It moved between the last reading and this one; to have moved early is the harder
            # case for the rank, and at most one heartbeat off.
            self.moved_ms = self.progress_seen_ms
        if self.warmup and not warmup:
            self.moved_ms = now_ms
        self.progress, self.progress_seen_ms, self.warmup = progress, now_ms, warmup

    def note_wait(self, target: int, phase: str, waited_ms: int, now_ms: int) -> None:
        """Take a wait report; `waited_ms` 0 withdraws it."""
        if self.wait is not None and waited_ms == 0:
            # Its wait ended, so it moved, though the counter is read only with the next heartbeat.
            # Others' reports of having waited for it may stand until their nodes look again.
            self.moved_ms = now_ms
        self.wait = Wait(target, phase, now_ms - waited_ms) if waited_ms > 0 else None

    def record(self) -> SaveSeat:
        """What must survive a change of the leader."""
        return SaveSeat(
            *(self.rank, self.incarnation, self.node, self.phase, self.since, self.held, self.why),
            tuple(self.ended_ms),
        )
