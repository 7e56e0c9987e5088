"""What nodes say about a group: their seats, the views that they stage and adopt, who waits. Pure.

Each function takes one event into the group's state; what follows from it at once goes into the
outcome, and `decisions.settle` looks at the rest.
"""

from typing import Final

from elasticep.control import events as ev
from elasticep.control.events import Outcome, SeatReport, SeatState
from elasticep.control.pending import MAX_UNADOPTED, Loading, Pending
from elasticep.control.seats import JUDGED, Phase, Seat
from elasticep.control.state import GroupState

DETACHED = "detached"
"""Cause of an end that was asked for (see `Seat.cause` in the protos)."""
# What nodes know beyond the store a leader goes on from, and must be able to: incarnations have 32
# bits, epochs 64.
MOST_INCARNATION: Final = 1 << 31
MOST_EPOCH: Final = 1 << 63


def node_hello(state: GroupState, event: ev.NodeHello, now_ms: int, out: Outcome) -> None:
    """A daemon opened a session: what it offers and runs, as it is now."""
    state.connected.add(event.node)
    state.domains[event.node] = event.domain or event.node
    state.ask_again(event.node)
    offered = {report.rank for report in event.seats if report.rank in state.seats}
    state.offers[event.node] = offered
    for seat in state.seats_of(event.node):
        for pending in state.pending:
            pending.asked.discard(seat.rank)
            pending.sent.pop(seat.rank, None)
            pending.loading.pop(seat.rank, None)  # a daemon that was started anew counts anew
        if seat.rank not in offered:
            why = f"node {event.node} does not offer the seat any more"
            state.confirm_gone(seat, now_ms, why, out)
    for report in event.seats:
        _report(state, event.node, report, now_ms, out, hello=True)
    # It may have missed who ended, and no view may be open to say so: its ranks would wait.
    out.after.extend(
        ev.Fence(event.node, gone.rank, gone.incarnation, state.next_epoch, "it is over")
        for gone in (left.member for left in state.left)
        if state.over(gone)
    )
    out.after.append(ev.Tell(event.node, state.policies))


def node_disconnected(
    state: GroupState, event: ev.NodeDisconnected, now_ms: int, out: Outcome
) -> None:
    """Its session ended, which alone proves nothing: a daemon may restart."""
    state.connected.discard(event.node)
    for seat in state.seats_of(event.node):
        seat.wait = None  # it is reported again when the node is back


def node_gone(state: GroupState, event: ev.NodeGone, now_ms: int, out: Outcome) -> None:
    """It was not heard of for too long: its ranks are over, and their seats stay with it."""
    node_disconnected(state, ev.NodeDisconnected(event.node), now_ms, out)
    state.offers.pop(event.node, None)
    for seat in state.seats_of(event.node):
        if seat.live:
            state.end(seat, now_ms, event.why, out, at_once=False)


def seat_changed(state: GroupState, event: ev.SeatChanged, now_ms: int, out: Outcome) -> None:
    """One of its seats is in another state."""
    _report(state, event.node, event.report, now_ms, out, hello=False)


def _report(
    state: GroupState, node: str, report: SeatReport, now_ms: int, out: Outcome, *, hello: bool
) -> None:
    seat = state.seats.get(report.rank)
    if seat is None:
        most = state.created.geometry.max_ranks - 1
        out.note("seat.refused", node=node, rank=report.rank, why=f"ranks are 0 to {most}")
        return
    why = _beyond(state, seat, report.incarnation, report.epoch)
    if why:
        state.offers.get(node, set()).discard(report.rank)
        out.note("seat.refused", node=node, rank=report.rank, why=why)
        return
    state.offers.setdefault(node, set()).add(report.rank)
    running = report.state in (SeatState.READY, SeatState.ATTACHED)
    if seat.node != node and seat.phase is not Phase.GONE:
        if running:  # two nodes hold one seat: the one it was granted to keeps it
            why = f"the seat is held by node {seat.node}"
            out.after.append(ev.Fence(node, seat.rank, report.incarnation, 0, why))
        return
    if report.incarnation == seat.incarnation:
        seat.written = True  # the node heard of it after the store
    if report.incarnation > seat.incarnation:
        _unknown(state, seat, node, report, now_ms, out)
    elif report.state is SeatState.EMPTY:
        _empty(state, seat, report, now_ms, out, hello=hello)
    elif report.incarnation < seat.incarnation:
        _bygone(state, seat, node, report, now_ms, out, hello=hello)
    elif report.state is SeatState.DEAD:
        if seat.live:
            why = report.cause or "it ended"
            clean = report.cause == DETACHED  # an engine that is restarted does not flap
            state.end(seat, now_ms, why, out, at_once=True, counts=not clean)
    else:
        _up(state, seat, report, now_ms, out)


def _beyond(state: GroupState, seat: Seat, incarnation: int, epoch: int) -> str:
    """Why what a node knows beyond the store cannot be taken over; empty: it can, or is known."""
    if incarnation > max(seat.incarnation, MOST_INCARNATION):
        return f"nothing could follow incarnation {incarnation}"
    if epoch > max(state.next_epoch - 1, MOST_EPOCH):
        return f"nothing could follow epoch {epoch}"
    return ""


def _bygone(
    state: GroupState,
    seat: Seat,
    node: str,
    report: SeatReport,
    now_ms: int,
    out: Outcome,
    *,
    hello: bool,
) -> None:
    """A node holds an earlier incarnation, as one of a deleted group. It is offered the seat's next
    one when it says that nothing is left of that.
    """
    state.offers[node].discard(seat.rank)
    if hello and seat.node == node and seat.phase is Phase.FENCED:
        state.confirm_gone(seat, now_ms, "its node had not heard of it", out)
    if report.state in (SeatState.READY, SeatState.ATTACHED):
        why = f"incarnation {seat.incarnation} has the seat"
        out.after.append(ev.Fence(node, seat.rank, report.incarnation, 0, why))


def _up(state: GroupState, seat: Seat, report: SeatReport, now_ms: int, out: Outcome) -> None:
    if not seat.live:
        epoch = state.view.epoch if state.view else 0
        fence = ev.Fence(seat.node, seat.rank, seat.incarnation, epoch, seat.why or "it ended")
        out.after.append(fence)  # behind the write of that end, if it is on its way
        return
    attached = report.state is SeatState.ATTACHED
    if not attached and (seat.attached or seat.since or seat.phase in JUDGED):
        state.end(seat, now_ms, "its engine left", out, at_once=True)
        return
    seat.attached, seat.heard = attached, True
    if report.epoch:
        _runs(state, seat, report.epoch, now_ms, out)


def _empty(
    state: GroupState, seat: Seat, report: SeatReport, now_ms: int, out: Outcome, *, hello: bool
) -> None:
    ended = report.incarnation == seat.incarnation and bool(report.cause)
    starting = report.incarnation > 0 and not ended
    if seat.phase is Phase.JOINING and not seat.attached and starting:
        # The node may not have heard of the grant; it may hear of it twice.
        if hello or report.incarnation < seat.incarnation:
            out.after.append(ev.Grant(seat.node, seat.rank, seat.incarnation))
        seat.heard = True
    elif hello or report.incarnation == seat.incarnation:
        state.confirm_gone(seat, now_ms, report.cause or "its node holds no worker", out)


def _unknown(
    state: GroupState, seat: Seat, node: str, report: SeatReport, now_ms: int, out: Outcome
) -> None:
    """The store lost what it knew: take over the number, end the incarnation."""
    if seat.live:
        state.end(seat, now_ms, "a later incarnation is reported", out, at_once=True)
    seat.incarnation, seat.node = report.incarnation, node
    _past(state, seat, report.epoch, out)
    if seat.phase is Phase.GONE:
        seat.move(Phase.FENCED, now_ms, "the store does not know this incarnation")
    seat.why = "this controller does not know the incarnation; attach anew"
    out.save(seat.record())
    if report.state is SeatState.EMPTY:
        state.confirm_gone(seat, now_ms, seat.why, out)
    else:
        out.after.append(ev.Fence(node, seat.rank, seat.incarnation, 0, seat.why))


def staged(state: GroupState, event: ev.Staged, now_ms: int, out: Outcome) -> None:
    """A rank staged a view, or could not."""
    seat = _current(state, event.node, event.rank, event.incarnation, out)
    if seat is None:
        return
    pending = next((p for p in state.pending if p.view.epoch == event.epoch), None)
    # A join that was called off counts from a later view on.
    taken_in = 0 < seat.since <= event.epoch
    if not taken_in or pending is None or not pending.view.holds(seat.rank, seat.incarnation):
        out.note("staged.ignored", rank=event.rank, epoch=event.epoch, error=event.error)
        return
    pending.answered.add(event.rank)
    if event.error and _unrestorable(state, seat, pending, event, now_ms, out):
        pending.errors.pop(event.rank, None)
    elif event.error:
        pending.errors[event.rank] = event.error
    else:
        seat.staged.add(event.epoch)
        if seat.rank in pending.filled:
            state.loaded(seat)
        if seat.phase is Phase.JOINING:
            seat.move(Phase.STAGED, now_ms, f"it staged epoch {event.epoch}")


def told(state: GroupState, event: ev.Told, now_ms: int, out: Outcome) -> None:
    """Nodes were told to stage a view. Until then nobody is late, however long the store takes."""
    for pending in state.pending:
        if pending.view.epoch == event.epoch:
            pending.sent.update({rank: now_ms for rank in event.ranks if rank in pending.asked})


def _unrestorable(
    state: GroupState, seat: Seat, pending: Pending, event: ev.Staged, now_ms: int, out: Outcome
) -> bool:
    """Whether the fault lies with experts that the node found nowhere, not with the rank."""
    table = pending.view.placement.slot_expert
    experts = pending.view.placement.experts
    named = {
        (layer, expert)
        for layer, expert in event.unrestorable
        if layer < len(table) and expert < experts and expert in table[layer, seat.rank]
    }
    if named and state.refusals.add(seat.node, named, now_ms):
        shown = sorted(named)[:16]
        out.note(
            "experts.unrestorable",
            node=seat.node,
            rank=seat.rank,
            experts=shown,
            count=len(named),
        )
    # Members that come in, or a third open view: then the rank answers for it.
    return bool(named) and seat.running and state.unadopted < MAX_UNADOPTED


def adopted(state: GroupState, event: ev.Adopted, now_ms: int, out: Outcome) -> None:
    """A rank runs in a view."""
    seat = _current(state, event.node, event.rank, event.incarnation, out)
    if seat is None:
        return
    why = _beyond(state, seat, event.incarnation, event.epoch)
    if why:
        out.note("report.refused", node=event.node, rank=event.rank, why=why)
        return
    _runs(state, seat, event.epoch, now_ms, out)


def waits(state: GroupState, event: ev.Waits, now_ms: int, out: Outcome) -> None:
    """A rank waits for another for longer than `suspect_after`, or does not any more."""
    seat = _current(state, event.node, event.rank, event.incarnation, out)
    if seat is None:
        return
    seat.observe(event.progress, seat.warmup, now_ms)
    seat.note_wait(event.waits_for, event.phase, event.waited_ms, now_ms)


def progressed(state: GroupState, event: ev.Progressed, now_ms: int, out: Outcome) -> None:
    """How far a rank is: with its steps, and with the weights of a view."""
    seat = _current(state, event.node, event.rank, event.incarnation, out)
    if seat is None:
        return
    seat.observe(event.progress, event.warmup, now_ms)
    for pending in state.pending if event.staging_epoch else ():
        if pending.view.epoch == event.staging_epoch:
            new = Loading(event.staging_total_bytes)
            loading = pending.loading.setdefault(seat.rank, new)
            loading.observe(event.staging_done_bytes, now_ms)


def _past(state: GroupState, seat: Seat, epoch: int, out: Outcome) -> None:
    """The next view is beyond an epoch that a rank runs. If the store has lost none that is a lie,
    for which others may pay: the view is too far ahead of what they run. So it is said who told it.
    """
    if epoch < state.next_epoch:
        return
    latest, state.next_epoch = state.next_epoch - 1, epoch + 1
    state.leap = (
        f"node {seat.node} says that rank {seat.rank} runs epoch {epoch}, where {latest} was the "
        "latest known here"
    )
    out.note("epoch.unknown", node=seat.node, rank=seat.rank, epoch=epoch, latest=latest)


def _runs(state: GroupState, seat: Seat, epoch: int, now_ms: int, out: Outcome) -> None:
    _past(state, seat, epoch, out)
    seat.epoch = max(seat.epoch, epoch)
    seat.staged = {staged for staged in seat.staged if staged > epoch}
    if seat.phase in (Phase.JOINING, Phase.STAGED):
        seat.move(Phase.ACTIVE, now_ms, f"it runs in epoch {epoch}")


def _current(
    state: GroupState, node: str, rank: int, incarnation: int, out: Outcome
) -> Seat | None:
    """The seat, if the report is of its live incarnation and from its node."""
    seat = state.seats.get(rank)
    if seat is None or seat.node != node:
        out.note("report.refused", node=node, rank=rank, why="the node does not hold the seat")
        return None
    if incarnation != seat.incarnation or not seat.live:
        return None  # of an incarnation that is over: an echo
    return seat
