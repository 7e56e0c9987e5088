"""The state of one group's membership, and how an incarnation ends. Pure."""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from elasticep.control import events as ev
from elasticep.control.events import Outcome
from elasticep.control.pending import MAX_UNADOPTED, Goal, Pending
from elasticep.control.placement import Placement
from elasticep.control.refusals import Refusals
from elasticep.control.seats import Phase, Seat
from elasticep.control.tables import Int64Array
from elasticep.control.views import Member, View
from elasticep.group import GroupConfig, LostExperts
from elasticep.policies import Policies

HISTORY_LENGTH: Final = 64
CANNOT_LOAD_MS: Final = 300_000  # a member that failed to load something is given nothing new
# While nothing is served, because an expert is lost, it is asked again after this, then after twice
# as long each time, up to the other: every try costs two views.
LOST_AGAIN_MS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Saved:
    """What a store holds of a group; where the next leader goes on."""

    view: View | None = None
    adopted: int = 0
    seats: tuple[ev.SaveSeat, ...] = ()
    history: tuple[str, ...] = ()
    rebalance: ev.SaveRebalance | None = None
    policies: Policies | None = None
    loads: Int64Array | None = None


@dataclass(frozen=True, slots=True)
class Past:
    """What deleted groups of a name have used up: lower numbers are theirs, for ever.

    Attributes:
        incarnation: no rank had this one or a later one.
        epoch: no view had this one or a later one.
    """

    incarnation: int = 0
    epoch: int = 1

    def beyond(self, other: "Past") -> "Past":
        """What both have used up."""
        return Past(max(self.incarnation, other.incarnation), max(self.epoch, other.epoch))

    def precedes(self, saved: Saved) -> bool:
        """Whether a group's seats have no number of these."""
        return all(not 0 < seat.incarnation < self.incarnation for seat in saved.seats)


@dataclass(slots=True)
class Left:
    """A member that ended, and the first epoch that says so (0: none yet)."""

    member: Member
    epoch: int = 0


@dataclass(slots=True)
class GroupState:
    """What is known of a group.

    Attributes:
        created: the group's config as it was created.
        policies: what operators may change about it.
        config: the group's config with the policies that hold now.
        seats: rank -> seat, for every rank there may be.
        connected: nodes with a session.
        offers: node -> ranks that it offers.
        view: the view proposed last.
        pending: views that are not adopted, ascending.
        adopted: the highest epoch that every live member reported, it or a later one.
        open_epoch: a view before the latest that was not adopted when this leader took over; its
            content is not known.
        next_epoch: the number that the next view gets.
        leap: why that is beyond what was proposed here, for the next view's reason; or empty.
        in_use: (epoch, placement) of views that somebody may run in; None: not known.
        left: members that ended since the last adopted view.
        revoked: ranks that could not load what the latest view gave them.
        cannot_load: incarnations that get no new content -> since when.
        failures: incarnations -> how often in a row they failed to load something.
        refusals: what nodes found nobody to supply.
        domains: node -> domain, of nodes that said hello.
        loads: int64 [layers, experts], what to plan for; None: not known.
        goal: what the background wants next; asked once.
        adopted_ms: when the latest view was adopted.
        empty_since_ms: when the last member ended; 0: there are members.
        stranded_ms: since when members of a group that forms cannot go on; 0: they can.
        waiting: why no further view is proposed; empty: none is wanted.
        dirty: something happened since it was last asked which view comes next.
    """

    created: GroupConfig
    policies: Policies
    config: GroupConfig
    seats: dict[int, Seat]
    refusals: Refusals
    connected: set[str] = field(default_factory=set)
    offers: dict[str, set[int]] = field(default_factory=dict)
    view: View | None = None
    pending: list[Pending] = field(default_factory=list)
    adopted: int = 0
    open_epoch: int = 0
    next_epoch: int = 1
    leap: str = ""
    in_use: list[tuple[int, Placement]] | None = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    revoked: set[int] = field(default_factory=set)
    cannot_load: dict[tuple[int, int], int] = field(default_factory=dict)
    failures: dict[tuple[int, int], int] = field(default_factory=dict)
    domains: dict[str, str] = field(default_factory=dict)
    loads: Int64Array | None = None
    goal: Goal | None = None
    adopted_ms: int = 0
    empty_since_ms: int = 0
    stranded_ms: int = 0
    waiting: str = ""
    dirty: bool = True
    history: deque[str] = field(default_factory=lambda: deque(maxlen=HISTORY_LENGTH))

    @classmethod
    def new(cls, config: GroupConfig, now_ms: int, saved: Saved | None, past: Past) -> "GroupState":
        """A group as the store knows it; a new one when it knows nothing."""
        policies = saved.policies if saved is not None and saved.policies else Policies.of(config)
        in_force = policies.apply(config)
        state = cls(
            config,
            policies,
            in_force,
            {rank: Seat(rank, past.incarnation) for rank in range(config.geometry.max_ranks)},
            Refusals(config.geometry.layers, config.geometry.experts),
            next_epoch=past.epoch,
        )
        if saved is not None:
            state._restore(saved, now_ms)
        return state

    def _restore(self, saved: Saved, now_ms: int) -> None:
        view = saved.view
        self.view, self.adopted, self.adopted_ms = view, saved.adopted, now_ms
        self.history.extend(saved.history)
        self.loads = saved.loads
        for record in saved.seats:
            if record.rank in self.seats:
                self._restore_seat(self.seats[record.rank], record, now_ms)
        if view is None:
            return
        self.next_epoch = view.epoch + 1
        self.in_use = [(view.epoch, view.placement)] if view.epoch == self.adopted else None
        if view.epoch > self.adopted:
            forms = view.previous_epoch == 0
            joiners = {m.rank for m in view.members if self.seats[m.rank].since == view.epoch}
            # Whether others saw it is not known, so they may have.
            self.pending = [Pending(view, now_ms, frozenset(joiners), shown=forms, seen=True)]
            self.open_epoch = view.previous_epoch
            self.left = [Left(member, view.epoch) for member in view.expelled]
        self.left += [Left(member) for member in view.members if self.over(member)]

    def _restore_seat(self, seat: Seat, record: ev.SaveSeat, now_ms: int) -> None:
        seat.incarnation, seat.node = record.incarnation, record.node
        seat.since, seat.held, seat.why = record.since, record.held, record.reason
        seat.written = True
        seat.ended_ms = list(record.ended_ms)
        phase, view = Phase(record.phase), self.view
        if phase in (Phase.STAGED, Phase.ACTIVE, Phase.SUSPECTED, Phase.JOINING):
            member = view is not None and view.holds(seat.rank, seat.incarnation)
            # Who comes in with the open view may still load: it has the time of a joiner.
            comes_in = view is not None and view.epoch > self.adopted and seat.since == view.epoch
            phase = Phase.ACTIVE if member and not comes_in else Phase.JOINING
        seat.phase = phase
        seat.story.append(f"{now_ms} ms: {phase}: taken over from the store")

    # ---- questions

    def seats_of(self, node: str) -> list[Seat]:
        """Seats whose present incarnation is or was on this node."""
        return [seat for seat in self.seats.values() if seat.node == node and seat.incarnation]

    def over(self, member: Member) -> bool:
        """Whether an incarnation is over."""
        seat = self.seats[member.rank]
        return seat.incarnation != member.incarnation or not seat.live

    def live_members(self) -> list[Seat]:
        """Seats of the latest view's members that are not over."""
        members = self.view.members if self.view is not None else ()
        return [self.seats[member.rank] for member in members if not self.over(member)]

    @property
    def unadopted(self) -> int:
        """How many proposed views are not adopted."""
        return len(self.pending) + (self.open_epoch > self.adopted)

    def latest_pending(self) -> Pending | None:
        """The latest view, while it is not adopted."""
        return self.pending[-1] if self.pending else None

    def ask_again(self, node: str) -> None:
        """A node said hello: it may have a backup of what nobody could supply, and its daemon, if
        it is a new one, may load what the one before did not get done.
        """
        self.refusals.clear()
        for seat in self.seats_of(node):
            self._excuse(seat)

    def failed_to_load(self, seat: Seat, now_ms: int) -> None:
        """A member could not load what a view gave it: it gets nothing new for a while."""
        who = seat.rank, seat.incarnation
        self.cannot_load[who] = now_ms
        self.failures[who] = self.failures.get(who, 0) + 1

    def loaded(self, seat: Seat) -> None:
        """A member loaded what a view gave it."""
        self.failures.pop((seat.rank, seat.incarnation), None)

    def _excuse(self, seat: Seat) -> None:
        """What a seat's incarnation failed to load is of no account any more."""
        self.loaded(seat)
        self.cannot_load.pop((seat.rank, seat.incarnation), None)

    def forgive(self, now_ms: int) -> bool:
        """Forget what went wrong long ago and is to be tried again; whether there was anything."""
        refuses = self.config.lost_experts is LostExperts.REFUSE
        stopped = refuses and self.view is not None and bool(self.view.lost)
        over = [
            who
            for who, at in self.cannot_load.items()
            if now_ms - at >= (self._again_ms(who) if stopped else CANNOT_LOAD_MS)
        ]
        for who in over:
            del self.cannot_load[who]
        return bool(self.refusals and self.refusals.expire(now_ms)) or bool(over)

    def _again_ms(self, who: tuple[int, int]) -> int:
        doublings = min(self.failures.get(who, 1) - 1, 16)
        return min(LOST_AGAIN_MS << doublings, CANNOT_LOAD_MS)

    # ---- the end of an incarnation

    def end(
        self,
        seat: Seat,
        now_ms: int,
        why: str,
        out: Outcome,
        *,
        at_once: bool,
        counts: bool = True,
    ) -> None:
        """An incarnation is over.

        Args:
            seat: whose.
            now_ms: the time.
            why: the cause, for logs, status and the engine.
            out: takes what follows.
            at_once: it is a fact; others may hear of it before it is written. Only if the grant
                is, though: the next leader would give the same number out again, and its holder
                would be dead to whoever heard of this.
            counts: for flap damping.
        """
        window_ms = self.policies.flap_window_ms
        seat.end(now_ms, why, counts=counts, window_ms=window_ms)
        self._excuse(seat)
        self.dirty = True
        limit = self.config.flap_limit
        if counts and seat.since and self.config.manual_readmission:
            seat.held = seat.held or f"kept out until an operator lets it in: {why}"
        if limit and len(seat.ended_ms) >= limit:
            seat.held = seat.held or (
                f"ended {len(seat.ended_ms)} times in {_span(window_ms)}, the last "
                f"time because {why}; look at it, then undrain it"
            )
        if seat.since:
            self.left.append(Left(seat.member))
        out.save(seat.record())
        epoch, view = self.next_epoch, self.view  # the first one without it
        if view is not None and seat.since and not view.holds(seat.rank, seat.incarnation):
            epoch = view.epoch  # it was drained
        (out.now if at_once and seat.written else out.after).extend(
            ev.Fence(node, seat.rank, seat.incarnation, epoch, why)
            for node in sorted(self.connected)
            if seat.since or node == seat.node
        )
        out.note(
            "rank.fenced",
            rank=seat.rank,
            incarnation=seat.incarnation,
            reason=why,
            held=seat.held,
            counts=counts,
        )

    def confirm_gone(self, seat: Seat, now_ms: int, why: str, out: Outcome) -> None:
        """The node says that nothing is left of the seat's incarnation."""
        if seat.live:
            self.end(seat, now_ms, why, out, at_once=True)
        if seat.phase is Phase.FENCED:
            seat.move(Phase.GONE, now_ms, f"its node confirmed that it is gone ({why})")
            seat.attached = False
            out.save(seat.record())

    # ---- assertions

    def validate(self) -> None:
        """Assert what holds between events."""
        view = self.view
        epochs = [pending.view.epoch for pending in self.pending]
        assert epochs == sorted(set(epochs)), epochs
        if view is None:
            assert not self.pending
            assert self.adopted == 0
            return
        assert self.adopted <= view.epoch < self.next_epoch, (self.adopted, view.epoch)
        assert self.unadopted <= MAX_UNADOPTED, (epochs, self.open_epoch, self.adopted)
        assert not epochs or epochs[0] > self.adopted, (epochs, self.adopted)
        for member in view.members:
            seat = self.seats[member.rank]
            assert seat.incarnation >= member.incarnation, (member, seat.incarnation)
        for member in view.expelled:
            assert not view.holds(member.rank, member.incarnation), member


def _span(ms: int) -> str:
    return f"{ms // 60_000} minutes" if ms >= 120_000 else f"{ms / 1_000:g} seconds"
