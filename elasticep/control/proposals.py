"""Which view comes next: a decision over a group's situation, with a reason either way. Pure.

Limits kept here: at most two epochs are unadopted; the second is kept for deaths and drains, so
joins and repairs wait until all is adopted; no view has fewer than `min_ranks` members.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np

from elasticep.control.placement import EMPTY, Placement, round_robin, without
from elasticep.control.repair import Usable, admit, fill_lost, make_room, restore, usable_slots
from elasticep.control.seats import Phase, Seat
from elasticep.control.start import spread
from elasticep.control.views import Member, View, describe_ranks
from elasticep.group import GroupConfig, LostExperts

MAX_UNADOPTED = 2
REFORM_PATIENCE_MS = 30_000  # after all members died: how long to wait for all initial_ranks
_MAX_REASON = 600


@dataclass(slots=True)
class Pending:
    """A proposed view that is not adopted.

    Attributes:
        view: the view.
        proposed_ms: when it was decided.
        joiners: ranks whose incarnation is new in it.
        filled: ranks that were members before and get new content in some slot.
        shown: members that are no joiners may stage it.
        seen: somebody other than its joiners may know it (after a change of the leader: maybe).
        sent: rank -> when its node was told to stage it.
        errors: rank -> why it cannot.
    """

    view: View
    proposed_ms: int
    joiners: frozenset[int] = frozenset()
    filled: frozenset[int] = frozenset()
    shown: bool = False
    seen: bool = False
    sent: dict[int, int] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All that a proposal depends on.

    Attributes:
        config: the group's config.
        seats: rank -> seat.
        connected: nodes with a session.
        latest: the view proposed last.
        pending: its `Pending`, None once adopted.
        unadopted: how many proposed views are not adopted.
        in_use: placements that somebody may run in; None: not known since the leader changed.
        revoked: ranks that could not load what the latest view gave them.
        cannot_load: incarnations that get no new content: they failed to load some.
        empty_since_ms: when the last member died; 0: there are members.
        now_ms: the time.
    """

    config: GroupConfig
    seats: Mapping[int, Seat]
    connected: AbstractSet[str]
    latest: View | None
    pending: Pending | None
    unadopted: int
    in_use: Sequence[Placement] | None
    revoked: AbstractSet[int]
    cannot_load: AbstractSet[tuple[int, int]]
    empty_since_ms: int
    now_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A view that is to be proposed."""

    members: tuple[Member, ...]
    placement: Placement
    forms: bool  # nobody runs an earlier view
    joiners: frozenset[int]
    called_off: frozenset[int]
    filled: frozenset[int]
    reason: str


@dataclass(slots=True)
class _Change:
    """Who goes, stays and comes."""

    stay: list[Member] = field(default_factory=list)
    dead: list[Member] = field(default_factory=list)
    draining: list[Member] = field(default_factory=list)
    called_off: list[Member] = field(default_factory=list)
    joining: list[Member] = field(default_factory=list)

    @property
    def urgent(self) -> bool:
        return bool(self.dead or self.draining)


def next_plan(s: Situation) -> Plan | str:
    """The view to propose now, or why there is none (empty: none is wanted)."""
    latest = s.latest
    if latest is None or s.empty_since_ms:
        return _form(s)
    change = _change(s, latest)
    urgent = change.urgent or bool(s.revoked)
    wanted = urgent or bool(change.joining)
    if s.unadopted >= MAX_UNADOPTED or (s.unadopted and not urgent):
        return _not_yet(s, latest) if wanted else ""
    if not s.unadopted and not wanted and not latest.lost:
        return ""
    if s.unadopted or (urgent and len(change.stay) >= s.config.min_ranks):
        change.joining = []  # a death is answered first: a view with joiners waits for them
    plan = _evolve(s, latest, change)
    if isinstance(plan, Plan) and len(plan.members) < s.config.min_ranks:
        return (
            f"{describe_ranks(m.rank for m in plan.members)} would be left, min_ranks is "
            f"{s.config.min_ranks}; ranks must rejoin first"
        )
    return plan


def _change(s: Situation, latest: View) -> _Change:
    change = _Change()
    for member in latest.members:
        seat = s.seats[member.rank]
        if seat.incarnation != member.incarnation or not seat.live:
            change.dead.append(member)
        elif seat.phase is Phase.DRAINING:
            change.draining.append(member)
        else:
            change.stay.append(member)
    if change.draining and not any(s.seats[m.rank].running for m in change.stay):
        # Somebody who runs has to let the others in; it leaves when they are.
        change.stay = sorted((*change.stay, *change.draining))
        change.draining = []
    change.joining = [
        seat.member
        for _, seat in sorted(s.seats.items())
        if joinable(seat, s.connected) and not latest.holds(seat.rank, seat.incarnation)
    ]
    if change.urgent and s.pending is not None and not s.pending.seen:
        # Nobody but the joiners knows that view, so they lose nothing by waiting for another.
        keep: list[Member] = []
        off = change.called_off
        for member in change.stay:
            (off if member.rank in s.pending.joiners else keep).append(member)
        change.stay = keep
    return change


def joinable(seat: Seat, connected: AbstractSet[str]) -> bool:
    """Whether a seat could be taken into a view now."""
    return (
        seat.phase is Phase.JOINING and seat.attached and not seat.held and seat.node in connected
    )


def _not_yet(s: Situation, latest: View) -> str:
    missing = [
        m.rank
        for m in latest.members
        if (seat := s.seats[m.rank]).live and seat.epoch < latest.epoch
    ]
    return (
        f"epoch {latest.epoch} is not adopted yet: {describe_ranks(missing)} did not report it; "
        "the next view waits for that"
    )


# ---- the first view, and the first after all members died


def _form(s: Situation) -> Plan | str:
    config = s.config
    ready = [seat.member for _, seat in sorted(s.seats.items()) if joinable(seat, s.connected)]
    first = s.latest is None
    if first:
        members = [m for m in ready if m.rank < config.initial_ranks]
        missing = set(range(config.initial_ranks)) - {m.rank for m in members}
        if missing:
            return f"the first view waits for {describe_ranks(missing)} to attach"
        reason = f"the first {config.initial_ranks} ranks are attached"
    else:
        members = ready
        waited_ms = s.now_ms - s.empty_since_ms
        needed = config.initial_ranks if waited_ms < REFORM_PATIENCE_MS else config.min_ranks
        room = len(members) * config.geometry.slots_per_rank
        if not members or len(members) < needed or room < config.geometry.experts:
            return (
                f"all members died; {len(members)} ranks attached anew, {needed} ranks with "
                f"{config.geometry.experts} slots in all are needed"
            )
        reason = f"all earlier members died; {len(members)} ranks attached anew"
    placement = round_robin(
        config.geometry,
        [m.rank for m in members],
        config.spare_copies,
        {m.rank: m.node for m in members},
    )
    return Plan(
        members=tuple(members),
        placement=placement,
        forms=True,
        joiners=frozenset(m.rank for m in members),
        called_off=frozenset(),
        filled=frozenset(),
        reason=reason,
    )


# ---- every other view


def _evolve(s: Situation, latest: View, change: _Change) -> Plan | str:
    """A view that follows `latest`; empty when nothing would change."""
    config = s.config
    base = _revoke(latest, s)
    gone = [m.rank for m in (*change.dead, *change.called_off)]
    placement, _ = without(base, gone)
    members = sorted((*change.stay, *change.joining))
    ranks = [m.rank for m in members]
    joiners = frozenset(m.rank for m in change.joining)
    if joiners:
        there = sorted((*members, *change.draining))
        placement = admit(
            placement,
            config.geometry,
            joiners,
            [m.rank for m in there],
            spare=config.spare_copies,
            nodes={m.rank: m.node for m in there},
        )
    with_draining = placement
    if change.draining:
        placement, _ = without(placement, [m.rank for m in change.draining])
    repair = config.lost_experts is LostExperts.REFUSE or not change.dead
    if repair and ranks and placement.lost_experts(ranks):
        may = [m.rank for m in members if (m.rank, m.incarnation) not in s.cannot_load]
        placement = restore(placement, ranks, may, s.in_use or ())
        usable = _usable(s, may, placement)
        placement = fill_lost(placement, ranks, usable)
        lost = placement.lost_experts(ranks)
        if lost:
            emptied = make_room(placement, may, usable)
            if emptied != placement and change.draining:
                # The room is made while the leaving ranks still serve; the next view fills it.
                placement = _emptied(with_draining, placement, emptied)
                members = sorted((*members, *change.draining))
                change.draining = []
            elif emptied != placement:
                placement = emptied
    if members == list(latest.members) and placement == latest.placement:
        return ""
    filled = frozenset(m.rank for m in change.stay if _gained(latest.placement, placement, m.rank))
    return Plan(
        members=tuple(members),
        placement=placement,
        forms=False,
        joiners=joiners,
        called_off=frozenset(m.rank for m in change.called_off),
        filled=filled,
        reason=_reason(s, latest, change, placement, ranks),
    )


def _usable(s: Situation, ranks: Sequence[int], placement: Placement) -> Usable:
    if s.in_use is None:  # somebody may read any slot: nothing can be filled yet
        return np.zeros(placement.slot_expert.shape, np.bool_)
    return usable_slots(ranks, [placement, *s.in_use])


def _gained(old: Placement, new: Placement, rank: int) -> bool:
    before, after = old.slot_expert[:, rank], new.slot_expert[:, rank]
    return bool(((after != before) & (after != EMPTY)).any())


def _revoke(latest: View, s: Situation) -> Placement:
    """The latest placement without what the revoked ranks could not load."""
    if not s.revoked or not s.in_use:
        return latest.placement
    table = latest.placement.slot_expert.copy()
    before = s.in_use[0].slot_expert
    for rank in s.revoked:
        table[:, rank] = np.where(table[:, rank] == before[:, rank], table[:, rank], EMPTY)
    weights = spread(table, np.zeros(table.shape, np.uint32), latest.placement.experts)
    return Placement(experts=latest.placement.experts, slot_expert=table, slot_weight=weights)


def _emptied(placement: Placement, before: Placement, after: Placement) -> Placement:
    """`placement` without the slots that went from full in `before` to empty in `after`."""
    gone = (before.slot_expert != EMPTY) & (after.slot_expert == EMPTY)
    table = np.where(gone, np.int32(EMPTY), placement.slot_expert)
    weights = spread(table, np.zeros(table.shape, np.uint32), placement.experts)
    return Placement(experts=placement.experts, slot_expert=table, slot_weight=weights)


def _reason(
    s: Situation, latest: View, change: _Change, placement: Placement, ranks: Sequence[int]
) -> str:
    parts = []
    for member in change.dead:
        seat = s.seats[member.rank]
        why = seat.why if seat.incarnation == member.incarnation else "its seat was taken anew"
        parts.append(f"rank {member.rank} left: {why}")
    parts += [f"rank {m.rank} leaves: {s.seats[m.rank].held}" for m in change.draining]
    parts += [f"rank {m.rank} has to join later" for m in change.called_off]
    parts += [f"rank {m.rank} joins (incarnation {m.incarnation})" for m in change.joining]
    parts += [f"rank {rank} could not load what it was given" for rank in sorted(s.revoked)]
    lost = len(placement.lost_experts(ranks))
    before = len(latest.lost)
    if before and lost < before:
        parts.append(f"{before - lost} lost experts are loaded again")
    if lost:
        parts.append(f"{lost} experts have no replica")
    if not parts:
        parts.append("room is made for experts without a replica")
    reason = "; ".join(parts)
    return reason if len(reason) <= _MAX_REASON else f"{reason[: _MAX_REASON - 3]}..."
