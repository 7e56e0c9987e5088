"""Who is a member of a group, and what follows from what is heard: a pure state machine.

Events and the time go in; an `Outcome` comes out. There is no clock, no I/O and no thread, and the
same events give the same outcomes, so a simulator runs this very code.

Invariants, and the order of operations that keeps them:

1. Epochs only grow and none is used twice. A view is written before anybody hears of it; its number
   is taken when it is decided, also if the write fails.
2. At most two epochs are unadopted (reported by every live member, they or later ones), so a bank
   is never reused under a rank that reads it.
3. An incarnation ends once. It is granted after its number was written, and the next one only
   after the node confirmed that its processes are gone.
4. Evidence has classes. A confirmed end (a death, a node that is gone, a failed staging) acts at
   once. Wait reports act after `hang_timeout`, on the root of a wait only, never during warmup.
5. A joiner stages first: nobody else hears of its view before, so a join that fails costs nothing.
"""

from collections.abc import Callable
from typing import Any

from elasticep.control import events as ev
from elasticep.control.arrange import Int64Array
from elasticep.control.decisions import settle
from elasticep.control.events import Outcome, SeatReport, SeatState
from elasticep.control.placement import EMPTY, SlotShortage
from elasticep.control.proposals import MAX_UNADOPTED, Goal, Loading, Pending, joinable
from elasticep.control.refusals import BoolArray
from elasticep.control.repair import usable_slots
from elasticep.control.seats import JUDGED, Phase, Seat
from elasticep.control.state import GroupState, Saved
from elasticep.control.views import View, describe_ranks
from elasticep.errors import UnknownRank, UsageError
from elasticep.group import GroupConfig
from elasticep.policies import Policies

__all__ = ["Membership", "Saved"]

DETACHED = "detached"
"""Cause of an end that was asked for (see `Seat.cause` in the protos)."""


class Membership:
    """One group's members and views.

    Args:
        config: the group's config.
        now_ms: the time.
        saved: what the store holds, when an earlier leader left something.
    """

    def __init__(self, config: GroupConfig, now_ms: int, saved: Saved | None = None) -> None:
        self._s = GroupState.new(config, now_ms, saved)
        self._handlers: dict[type, Callable[[Any, int, Outcome], None]] = {
            ev.NodeHello: self._node_hello,
            ev.NodeDisconnected: self._node_disconnected,
            ev.NodeGone: self._node_gone,
            ev.SeatChanged: self._seat_changed,
            ev.Staged: self._staged,
            ev.Adopted: self._adopted,
            ev.Waits: self._waits,
            ev.Progressed: self._progressed,
            ev.Loads: self._loads,
            ev.Rearrange: self._rearrange,
            ev.Retry: self._retry,
            ev.Drain: self._drain,
            ev.Undrain: self._undrain,
            ev.SetPolicies: self._set_policies,
            ev.Tick: self._tick,
        }

    # ---- what others see

    @property
    def config(self) -> GroupConfig:
        """The group's config as it was created."""
        return self._s.created

    @property
    def in_force(self) -> GroupConfig:
        """The group's config with the policies that hold now."""
        return self._s.config

    @property
    def policies(self) -> Policies:
        """What operators may change about it, as it is now."""
        return self._s.policies

    @property
    def seats(self) -> dict[int, Seat]:
        """Rank -> seat; not to be changed by others."""
        return self._s.seats

    @property
    def history(self) -> tuple[str, ...]:
        """One sentence per epoch, the newest last; the last 64."""
        return tuple(self._s.history)

    @property
    def view(self) -> View | None:
        """The view proposed last."""
        return self._s.view

    @property
    def adopted_epoch(self) -> int:
        """The highest epoch that every live member reported, it or a later one."""
        return self._s.adopted

    @property
    def waiting(self) -> str:
        """Why no further view is proposed; empty when none is wanted."""
        return self._s.waiting

    @property
    def pending(self) -> Pending | None:
        """The view proposed last, while it is not adopted."""
        return self._s.latest_pending()

    @property
    def domains(self) -> dict[str, str]:
        """Node -> domain; not to be changed by others."""
        return self._s.domains

    @property
    def loads(self) -> Int64Array | None:
        """The tokens to plan for, int64 [layers, experts]; None: not known."""
        return self._s.loads

    @property
    def refused(self) -> BoolArray | None:
        """[layers, experts] that some node found nobody to supply; None: nothing."""
        return self._s.refusals.by_any()

    @property
    def cannot_load(self) -> frozenset[int]:
        """Members that get no new content, because they failed to load some."""
        view = self._s.view
        held = self._s.cannot_load
        return frozenset(
            m.rank for m in (view.members if view else ()) if (m.rank, m.incarnation) in held
        )

    def quiet_ms(self, now_ms: int) -> int:
        """How long the view is in force with nothing else under way; -1: something is."""
        state = self._s
        if state.view is None or state.unadopted or state.empty_since_ms or not state.in_use:
            return -1
        seats = state.seats.values()
        coming = any(joinable(seat, state.connected) for seat in seats)
        going = any(seat.phase is Phase.DRAINING for seat in seats)
        if coming or going or len(state.live_members()) < len(state.view.members):
            return -1
        return now_ms - state.adopted_ms

    def handle(self, event: ev.Event, now_ms: int) -> Outcome:
        """Take one event; returns what is to be done.

        Raises:
            UnknownRank, UsageError, SlotShortage: a drain or undrain that cannot be; nothing of
                it happened.
        """
        out = Outcome()
        self._handlers[type(event)](event, now_ms, out)
        if isinstance(event, (ev.Progressed, ev.Loads)):
            return out  # there are many of them; the next tick judges by what they say
        if not isinstance(event, (ev.Waits, ev.Tick)):
            self._s.dirty = True
        settle(self._s, now_ms, out)
        self._s.validate()
        return out

    # ---- events

    def _tick(self, event: ev.Tick, now_ms: int, out: Outcome) -> None:
        """Time alone: `settle` looks at deadlines after every event."""
        if self._s.forgive(now_ms):
            self._s.dirty = True

    def _node_hello(self, event: ev.NodeHello, now_ms: int, out: Outcome) -> None:
        self._s.connected.add(event.node)
        self._s.domains[event.node] = event.domain or event.node
        self._s.ask_again(event.node)
        offered = {report.rank for report in event.seats if report.rank in self.seats}
        self._s.offers[event.node] = offered
        for seat in self._s.seats_of(event.node):
            for pending in self._s.pending:
                pending.sent.pop(seat.rank, None)
            if seat.rank not in offered:
                why = f"node {event.node} does not offer the seat any more"
                self._s.confirm_gone(seat, now_ms, why, out)
        for report in event.seats:
            self._report(event.node, report, now_ms, out, hello=True)
        # It may have missed who ended, and no view may be open to say so: its ranks would wait.
        out.after.extend(
            ev.Fence(event.node, gone.rank, gone.incarnation, self._s.next_epoch, "it is over")
            for gone in (left.member for left in self._s.left)
            if self._s.over(gone)
        )
        out.after.append(ev.Tell(event.node, self._s.policies))

    def _node_disconnected(self, event: ev.NodeDisconnected, now_ms: int, out: Outcome) -> None:
        self._s.connected.discard(event.node)
        for seat in self._s.seats_of(event.node):
            seat.wait = None  # it is reported again when the node is back

    def _node_gone(self, event: ev.NodeGone, now_ms: int, out: Outcome) -> None:
        self._node_disconnected(ev.NodeDisconnected(event.node), now_ms, out)
        self._s.offers.pop(event.node, None)
        for seat in self._s.seats_of(event.node):
            if seat.live:
                self._s.end(seat, now_ms, event.why, out, at_once=False)

    def _seat_changed(self, event: ev.SeatChanged, now_ms: int, out: Outcome) -> None:
        self._report(event.node, event.report, now_ms, out, hello=False)

    def _report(
        self, node: str, report: SeatReport, now_ms: int, out: Outcome, *, hello: bool
    ) -> None:
        seat = self.seats.get(report.rank)
        if seat is None:
            most = self.config.geometry.max_ranks - 1
            out.note("seat.refused", node=node, rank=report.rank, why=f"ranks are 0 to {most}")
            return
        self._s.offers.setdefault(node, set()).add(report.rank)
        running = report.state in (SeatState.READY, SeatState.ATTACHED)
        if seat.node != node and seat.phase is not Phase.GONE:
            if running:  # two nodes hold one seat: the one it was granted to keeps it
                why = f"the seat is held by node {seat.node}"
                out.after.append(ev.Fence(node, seat.rank, report.incarnation, 0, why))
            return
        if report.incarnation == seat.incarnation:
            seat.written = True  # the node heard of it after the store
        if report.incarnation > seat.incarnation:
            self._unknown(seat, node, report, now_ms, out)
        elif report.state is SeatState.EMPTY:
            self._empty(seat, report, now_ms, out, hello=hello)
        elif report.incarnation < seat.incarnation:
            if running:
                why = f"incarnation {seat.incarnation} has the seat"
                out.after.append(ev.Fence(node, seat.rank, report.incarnation, 0, why))
        elif report.state is SeatState.DEAD:
            if seat.live:
                why = report.cause or "it ended"
                clean = report.cause == DETACHED  # an engine that is restarted does not flap
                self._s.end(seat, now_ms, why, out, at_once=True, counts=not clean)
        else:
            self._up(seat, report, now_ms, out)

    def _up(self, seat: Seat, report: SeatReport, now_ms: int, out: Outcome) -> None:
        if not seat.live:
            epoch = self._s.view.epoch if self._s.view else 0
            fence = ev.Fence(seat.node, seat.rank, seat.incarnation, epoch, seat.why or "it ended")
            out.after.append(fence)  # behind the write of that end, if it is on its way
            return
        attached = report.state is SeatState.ATTACHED
        if not attached and (seat.attached or seat.since or seat.phase in JUDGED):
            self._s.end(seat, now_ms, "its engine left", out, at_once=True)
            return
        seat.attached, seat.heard = attached, True
        if report.epoch:
            self._runs(seat, report.epoch, now_ms)

    def _empty(
        self, seat: Seat, report: SeatReport, now_ms: int, out: Outcome, *, hello: bool
    ) -> None:
        ended = report.incarnation == seat.incarnation and bool(report.cause)
        starting = report.incarnation > 0 and not ended
        if seat.phase is Phase.JOINING and not seat.attached and starting:
            # The node may not have heard of the grant; it may hear of it twice.
            if hello or report.incarnation < seat.incarnation:
                out.after.append(ev.Grant(seat.node, seat.rank, seat.incarnation))
            seat.heard = True
        elif hello or report.incarnation == seat.incarnation:
            self._s.confirm_gone(seat, now_ms, report.cause or "its node holds no worker", out)

    def _unknown(
        self, seat: Seat, node: str, report: SeatReport, now_ms: int, out: Outcome
    ) -> None:
        """The store lost what it knew: take over the number, end the incarnation."""
        if seat.live:
            self._s.end(seat, now_ms, "a later incarnation is reported", out, at_once=True)
        seat.incarnation, seat.node = report.incarnation, node
        self._s.next_epoch = max(self._s.next_epoch, report.epoch + 1)
        if seat.phase is Phase.GONE:
            seat.move(Phase.FENCED, now_ms, "the store does not know this incarnation")
        seat.why = "this controller does not know the incarnation; attach anew"
        out.writes.append(seat.record())
        if report.state is SeatState.EMPTY:
            self._s.confirm_gone(seat, now_ms, seat.why, out)
        else:
            out.after.append(ev.Fence(node, seat.rank, seat.incarnation, 0, seat.why))

    def _staged(self, event: ev.Staged, now_ms: int, out: Outcome) -> None:
        seat = self._current(event.node, event.rank, event.incarnation, out)
        if seat is None:
            return
        pending = next((p for p in self._s.pending if p.view.epoch == event.epoch), None)
        # A join that was called off counts from a later view on.
        taken_in = 0 < seat.since <= event.epoch
        if not taken_in or pending is None or not pending.view.holds(seat.rank, seat.incarnation):
            out.note("staged.ignored", rank=event.rank, epoch=event.epoch, error=event.error)
            return
        pending.answered.add(event.rank)
        if event.error and self._unrestorable(seat, pending, event, now_ms, out):
            pending.errors.pop(event.rank, None)
        elif event.error:
            pending.errors[event.rank] = event.error
        else:
            seat.staged.add(event.epoch)
            if seat.phase is Phase.JOINING:
                seat.move(Phase.STAGED, now_ms, f"it staged epoch {event.epoch}")

    def _unrestorable(
        self, seat: Seat, pending: Pending, event: ev.Staged, now_ms: int, out: Outcome
    ) -> bool:
        """Whether the fault lies with experts that the node found nowhere, not with the rank."""
        table = pending.view.placement.slot_expert
        experts = pending.view.placement.experts
        named = {
            (layer, expert)
            for layer, expert in event.unrestorable
            if layer < len(table) and expert < experts and expert in table[layer, seat.rank]
        }
        if named and self._s.refusals.add(seat.node, named, now_ms):
            shown = sorted(named)[:16]
            out.note(
                "experts.unrestorable",
                node=seat.node,
                rank=seat.rank,
                experts=shown,
                count=len(named),
            )
        # Members that come in, or a third open view: then the rank answers for it.
        return bool(named) and seat.running and self._s.unadopted < MAX_UNADOPTED

    def _adopted(self, event: ev.Adopted, now_ms: int, out: Outcome) -> None:
        seat = self._current(event.node, event.rank, event.incarnation, out)
        if seat is not None:
            self._runs(seat, event.epoch, now_ms)

    def _runs(self, seat: Seat, epoch: int, now_ms: int) -> None:
        self._s.next_epoch = max(self._s.next_epoch, epoch + 1)
        seat.epoch = max(seat.epoch, epoch)
        seat.staged = {staged for staged in seat.staged if staged > epoch}
        if seat.phase in (Phase.JOINING, Phase.STAGED):
            seat.move(Phase.ACTIVE, now_ms, f"it runs in epoch {epoch}")

    def _waits(self, event: ev.Waits, now_ms: int, out: Outcome) -> None:
        seat = self._current(event.node, event.rank, event.incarnation, out)
        if seat is None:
            return
        seat.observe(event.progress, seat.warmup, now_ms)
        seat.note_wait(event.waits_for, event.phase, event.waited_ms, now_ms)

    def _progressed(self, event: ev.Progressed, now_ms: int, out: Outcome) -> None:
        seat = self._current(event.node, event.rank, event.incarnation, out)
        if seat is None:
            return
        seat.observe(event.progress, event.warmup, now_ms)
        for pending in self._s.pending if event.staging_epoch else ():
            if pending.view.epoch == event.staging_epoch:
                new = Loading(event.staging_total_bytes)
                loading = pending.loading.setdefault(seat.rank, new)
                loading.observe(event.staging_done_bytes, now_ms)

    def _loads(self, event: ev.Loads, now_ms: int, out: Outcome) -> None:
        self._s.loads = event.tokens

    def _retry(self, event: ev.Retry, now_ms: int, out: Outcome) -> None:
        self._s.refusals.clear()
        self._s.cannot_load.clear()

    def _rearrange(self, event: ev.Rearrange, now_ms: int, out: Outcome) -> None:
        view, in_use = self._s.view, self._s.in_use
        if view is None or view.epoch != event.epoch or not in_use or self._s.unadopted:
            out.note("rearrange.ignored", epoch=event.epoch, why="another view came first")
            return
        table = event.placement.slot_expert
        usable = usable_slots(view.ranks, [placement.slot_expert for _, placement in in_use])
        new = (table != EMPTY) & (table != view.placement.slot_expert)
        lost = set(event.placement.lost_experts(view.ranks)) - set(view.lost)
        if (new & ~usable).any() or lost:
            why = "it overwrites a slot in use" if not lost else f"it loses {sorted(lost)[:4]}"
            out.note("rearrange.ignored", epoch=event.epoch, why=why)
            return
        self._s.goal = Goal(epoch=event.epoch, placement=event.placement, reason=event.reason)

    def _drain(self, event: ev.Drain, now_ms: int, out: Outcome) -> None:
        seats = self._named(event.ranks)
        self._check_drain(event.ranks)
        for seat in seats:
            seat.held = f"drained: {event.reason}" if event.reason else "drained"
            if seat.phase in (Phase.STAGED, Phase.ACTIVE, Phase.SUSPECTED):
                seat.move(Phase.DRAINING, now_ms, seat.held)
            elif seat.phase is Phase.JOINING:
                self._s.end(seat, now_ms, seat.held, out, at_once=False, counts=False)
            out.save(seat.record())
            out.note("rank.draining", rank=seat.rank, reason=seat.held)

    def _undrain(self, event: ev.Undrain, now_ms: int, out: Outcome) -> None:
        for seat in self._named(event.ranks):
            seat.held = ""
            seat.ended_ms.clear()
            view = self._s.view
            if seat.phase is Phase.DRAINING and view and view.holds(seat.rank, seat.incarnation):
                seat.move(Phase.ACTIVE, now_ms, "the drain is taken back")
            out.save(seat.record())
            out.note("rank.undrained", rank=seat.rank)

    def _set_policies(self, event: ev.SetPolicies, now_ms: int, out: Outcome) -> None:
        config = event.policies.apply(self._s.created)
        self._s.policies, self._s.config = event.policies, config
        out.writes.append(ev.SavePolicies(event.policies))
        out.after.extend(ev.Tell(node, event.policies) for node in sorted(self._s.connected))
        out.note("policies.changed", **event.policies.to_dict())

    # ---- checks

    def _current(self, node: str, rank: int, incarnation: int, out: Outcome) -> Seat | None:
        """The seat, if the report is of its live incarnation and from its node."""
        seat = self.seats.get(rank)
        if seat is None or seat.node != node:
            out.note("report.refused", node=node, rank=rank, why="the node does not hold the seat")
            return None
        if incarnation != seat.incarnation or not seat.live:
            return None  # of an incarnation that is over: an echo
        return seat

    def _named(self, ranks: tuple[int, ...]) -> list[Seat]:
        unknown = sorted(set(ranks) - set(self.seats))
        if unknown or not ranks:
            most = self.config.geometry.max_ranks - 1
            raise UnknownRank(
                f"group {self.config.name!r} has ranks 0 to {most}; "
                f"{describe_ranks(unknown)} {'was' if len(unknown) < 2 else 'were'} named"
            )
        return [self.seats[rank] for rank in sorted(set(ranks))]

    def _check_drain(self, ranks: tuple[int, ...]) -> None:
        """Refuse a drain that would leave too few ranks or slots."""
        members = [seat for seat in self._s.live_members() if seat.phase is not Phase.DRAINING]
        left = [seat.rank for seat in members if seat.rank not in ranks]
        if self.view is None or len(left) == len(members):
            return
        config = self._s.config
        if len(left) < config.min_ranks:
            raise UsageError(
                f"draining {describe_ranks(ranks)} would leave {len(left)} members of group "
                f"{config.name!r}; min_ranks is {config.min_ranks}: add ranks first"
            )
        slots = len(left) * config.geometry.slots_per_rank
        if slots < config.geometry.experts:
            layers = range(config.geometry.layers)
            raise SlotShortage(layers, left, slots, config.geometry.experts)
