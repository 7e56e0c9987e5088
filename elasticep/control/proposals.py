"""Which view comes next: a decision over a group's situation, with a reason either way. Pure.

Limits kept here: at most two epochs are unadopted; the second is kept for deaths and drains, so
joins and repairs wait until all is adopted; no view has fewer than `min_ranks` members.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np

from elasticep.control.arrange import Around, admit, first_placement, split
from elasticep.control.pending import MAX_UNADOPTED, Goal, Pending
from elasticep.control.placement import EMPTY, Placement
from elasticep.control.refusals import Refusals, refused_slots
from elasticep.control.repair import (
    Usable,
    fill_lost,
    keep,
    lost_mask,
    make_room,
    restore,
    usable_slots,
)
from elasticep.control.seats import Phase, Seat
from elasticep.control.tables import BoolArray, Int32Array, Int64Array
from elasticep.control.views import Member, View, describe_ranks
from elasticep.group import GroupConfig, LostExperts

REFORM_PATIENCE_MS = 30_000  # after all members died: how long to wait for all initial_ranks
_MAX_REASON = 600


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
        refusals: what nodes found nobody to supply; they are not asked for it again.
        domains: node -> domain.
        loads: int64 [layers, experts], or None.
        goal: what the background wants next.
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
    cannot_load: Collection[tuple[int, int]]
    refusals: Refusals
    domains: Mapping[str, str]
    loads: Int64Array | None
    goal: Goal | None
    empty_since_ms: int
    now_ms: int

    @property
    def around(self) -> Around:
        """What placements depend on."""
        return Around(self.config, self.domains, self.loads, self.refusals.by_any())

    def barred(self, ranks: Iterable[int]) -> dict[int, BoolArray]:
        """Rank -> [layers, experts] that its node found nobody to supply; only ranks with any."""
        masks = {rank: self.refusals.of(self.seats[rank].node) for rank in ranks}
        return {rank: mask for rank, mask in masks.items() if mask is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class NextView:
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


def next_plan(s: Situation) -> NextView | str:
    """The view to propose now, or why there is none (empty: none is wanted)."""
    latest = s.latest
    if latest is None or s.empty_since_ms:
        return _form(s)
    change = _change(s, latest)
    refused = bool(_refused(latest, s).any())
    urgent = change.urgent or bool(s.revoked) or refused
    wanted = urgent or bool(change.joining)
    if s.unadopted >= MAX_UNADOPTED or (s.unadopted and not urgent):
        return _not_yet(s, latest) if wanted else ""
    awaited = _awaited(s, change) if refused else []
    if awaited and not change.urgent and not s.revoked:
        return (
            f"some experts of epoch {latest.epoch} were found nowhere; the next view waits until "
            f"{describe_ranks(awaited)} answered, who may name more"
        )
    if not s.unadopted and not wanted and s.goal is not None and s.goal.epoch == latest.epoch:
        return _rearranged(s, latest, s.goal)
    if not s.unadopted and not wanted and not latest.lost:
        return ""
    if s.unadopted or (urgent and len(change.stay) >= s.config.min_ranks):
        change.joining = []  # a death is answered first: a view with joiners waits for them
    plan = _evolve(s, latest, change) or _still_lost(s, latest)
    if isinstance(plan, NextView) and len(plan.members) < s.config.min_ranks:
        return (
            f"{describe_ranks(m.rank for m in plan.members)} would be left, min_ranks is "
            f"{s.config.min_ranks}; ranks must rejoin first"
        )
    return plan


def _awaited(s: Situation, change: _Change) -> list[int]:
    """Members that the latest view gives something to load and that have not answered it.

    What each of them cannot get is left out of the next view at once: a third open view, for what
    another one says later, there cannot be.
    """
    if s.pending is None:
        return []
    stay = {member.rank for member in change.stay}
    return sorted((s.pending.filled & stay) - s.pending.answered)


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


def _still_lost(s: Situation, latest: View) -> str:
    """Why nobody is asked for lost experts now; empty: there are none, or no room for them."""
    if not latest.lost:
        return ""
    failed = [m.rank for m in latest.members if (m.rank, m.incarnation) in s.cannot_load]
    missed = sorted({m.node for m in latest.members if s.refusals.of(m.node) is not None})
    why = [f"{describe_ranks(failed)} failed to load something"] if failed else []
    why += [f"nobody could supply them to {', '.join(missed)}"] if missed else []
    if not why:
        return ""
    return (
        f"{len(latest.lost)} experts have no replica: {' and '.join(why)}; tried again in a while"
    )


# ---- the first view, and the first after all members died


def _form(s: Situation) -> NextView | str:
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
    placement = first_placement(s.around, members)
    return NextView(
        members=tuple(members),
        placement=placement,
        forms=True,
        joiners=frozenset(m.rank for m in members),
        called_off=frozenset(),
        filled=frozenset(),
        reason=reason,
    )


# ---- every other view


def _evolve(s: Situation, latest: View, change: _Change) -> NextView | str:
    """A view that follows `latest`; empty when nothing would change."""
    experts = s.config.geometry.experts
    members = sorted((*change.stay, *change.joining))
    ranks = [m.rank for m in members]
    leaving = [m.rank for m in change.draining]
    joiners = frozenset(m.rank for m in change.joining)
    table = keep(_revoke(latest, s), (*(m.rank for m in change.stay), *leaving))
    if joiners:
        table = admit(s.around, table, joiners, sorted((*members, *change.draining)), leaving)
    with_draining = table
    table = keep(table, ranks)
    missing = lost_mask(table, experts)
    if missing.any() and s.in_use:
        # Whatever the latest view lacks by now, those who run the one before may still hold it.
        table = restore(table, missing, ranks, [s.in_use[0].slot_expert])
    may = [m.rank for m in members if (m.rank, m.incarnation) not in s.cannot_load]
    lost = _to_restore(s, table, experts, may)
    repair = s.config.lost_experts is LostExperts.REFUSE or not change.dead
    # What one node could not get others are asked for when this is adopted: if they cannot either,
    # another view has to follow, and there cannot be three.
    repair = repair and not _refused(latest, s).any()
    if repair and ranks and lost.any():
        used = [placement.slot_expert for placement in s.in_use or ()]
        table = restore(table, lost, may, used)
        usable = _usable(s, may, table)
        barred = s.barred(may)
        table = fill_lost(table, _to_restore(s, table, experts, may), usable, barred)
        lost = _to_restore(s, table, experts, may)
        if lost.any():
            able = [r for r in may if r not in barred or (lost & ~barred[r]).any()]
            roomy = make_room(table, lost, able, _usable(s, able, table))
            if change.draining and not np.array_equal(roomy, table):
                # The room is made while the leaving ranks still serve; the next view fills it.
                gone = (table != EMPTY) & (roomy == EMPTY)
                table = np.where(gone, np.int32(EMPTY), with_draining)
                members = sorted((*members, *change.draining))
                change.draining = []
            else:
                table = roomy
    if members == list(latest.members) and np.array_equal(table, latest.placement.slot_expert):
        return ""
    placement = split(s.around, table, members, latest.placement)
    return NextView(
        members=tuple(members),
        placement=placement,
        forms=False,
        joiners=joiners,
        called_off=frozenset(m.rank for m in change.called_off),
        filled=_filled(latest, placement, change.stay),
        reason=_reason(s, latest, change, placement, ranks),
    )


def _rearranged(s: Situation, latest: View, goal: Goal) -> NextView:
    """The same members, and experts where the background wants them."""
    return NextView(
        members=latest.members,
        placement=goal.placement,
        forms=False,
        joiners=frozenset(),
        called_off=frozenset(),
        filled=_filled(latest, goal.placement, latest.members),
        reason=goal.reason[:_MAX_REASON],
    )


def _to_restore(s: Situation, table: Int32Array, experts: int, may: Sequence[int]) -> BoolArray:
    """Mask [layers, experts]: no slot names the expert, and one of `may` may be able to load it."""
    lost = lost_mask(table, experts)
    barred = s.barred(may)
    if barred and len(barred) == len(may):
        lost &= ~np.all(list(barred.values()), axis=0)
    return lost


def _usable(s: Situation, ranks: Sequence[int], table: Int32Array) -> Usable:
    if s.in_use is None:  # somebody may read any slot: nothing can be filled yet
        return np.zeros(table.shape, np.bool_)
    return usable_slots(ranks, [table, *(placement.slot_expert for placement in s.in_use)])


def _filled(latest: View, placement: Placement, members: Sequence[Member]) -> frozenset[int]:
    """Members that get new content in some slot."""
    before, after = latest.placement.slot_expert, placement.slot_expert
    gains = ((after != before) & (after != EMPTY)).any(axis=(0, 2))
    return frozenset(member.rank for member in members if gains[member.rank])


def _refused(latest: View, s: Situation) -> BoolArray:
    """Slots that the latest view wants filled with what their node found nobody to supply."""
    table = latest.placement.slot_expert
    if not s.refusals or not s.in_use or s.pending is None:
        return np.zeros(table.shape, np.bool_)
    return refused_slots(table, s.in_use[0].slot_expert, s.barred(latest.ranks))


def _revoke(latest: View, s: Situation) -> Int32Array:
    """The latest slots without what ranks could not load, or their nodes found nowhere."""
    table = np.where(_refused(latest, s), np.int32(EMPTY), latest.placement.slot_expert)
    for rank in s.revoked if s.in_use else ():
        assert s.in_use is not None
        before = s.in_use[0].slot_expert[:, rank]
        table[:, rank] = np.where(table[:, rank] == before, table[:, rank], EMPTY)
    return table


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
    if _refused(latest, s).any():
        parts.append("some experts were found nowhere")
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
