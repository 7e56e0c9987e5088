"""What follows from a group's state, whatever the event was: one pass over it after each. Pure."""

from typing import Final

from elasticep.control import events as ev
from elasticep.control.events import Outcome
from elasticep.control.evidence import judge
from elasticep.control.pending import MAX_UNADOPTED, Pending
from elasticep.control.proposals import NextView, Situation, next_plan
from elasticep.control.refusals import given
from elasticep.control.seats import Phase, Seat
from elasticep.control.state import GroupState
from elasticep.control.views import View

STAGE_TIMEOUT_MS: Final = 5_000  # a member that runs, or did stage before, stages within this


def settle(state: GroupState, now_ms: int, out: Outcome) -> None:
    """Do all that is due: adoptions, hangs, staging deadlines, the next view, grants."""
    retire(state, now_ms, out)
    condemn(state, now_ms, out)
    check_staging(state, now_ms, out)
    end_stranded(state, now_ms, out)
    retire(state, now_ms, out)  # an end may be what an adoption waited for
    if state.dirty or state.empty_since_ms:
        state.dirty = False
        propose(state, now_ms, out)
    show(state, now_ms, out)
    grant(state, now_ms, out)


# ---- adoption


def retire(state: GroupState, now_ms: int, out: Outcome) -> None:
    """Find out which epochs are adopted, and let go of what waited for that."""
    view = state.view
    if view is None or state.empty_since_ms:
        return
    live = state.live_members()
    if not live:
        state.empty_since_ms = max(1, now_ms)
        state.dirty = True
        out.note("group.empty", epoch=view.epoch)
    # A joiner need not report epochs from before it came in.
    floor = min((seat.epoch or seat.since - 1 for seat in live), default=view.epoch)
    floor = min(floor, view.epoch)
    if floor <= state.adopted:
        return
    state.adopted = floor
    state.dirty = True
    for pending in [p for p in state.pending if p.view.epoch <= floor]:
        state.pending.remove(pending)
        out.note(
            "view.adopted",
            epoch=pending.view.epoch,
            members=len(pending.view.members),
            took_ms=now_ms - pending.proposed_ms,
        )
    state.left = [left for left in state.left if left.epoch == 0 or left.epoch > floor]
    if floor == view.epoch:
        state.adopted_ms = now_ms
        state.in_use = [(view.epoch, view.placement)]
    elif state.in_use is not None:
        first = max((epoch for epoch, _ in state.in_use if epoch <= floor), default=0)
        state.in_use = [(epoch, table) for epoch, table in state.in_use if epoch >= first]
    out.save(ev.SaveAdopted(floor))
    if floor == view.epoch:
        for seat in state.seats.values():
            if seat.phase is Phase.DRAINING and not view.holds(seat.rank, seat.incarnation):
                why = seat.held or "it was drained, and let back in when it had left"
                state.end(seat, now_ms, why, out, at_once=False, counts=False)


# ---- hangs


def condemn(state: GroupState, now_ms: int, out: Outcome) -> None:
    """Expel the roots of waits whose time is up; mark and clear suspects."""
    if not any(seat.wait or seat.phase is Phase.SUSPECTED for seat in state.seats.values()):
        return
    timeouts = state.config.timeouts
    judgement = judge(
        state.seats,
        state.connected,
        hang_ms=timeouts.hang_timeout_ms,
        first_step_ms=max(timeouts.step_timeout_ms, timeouts.hang_timeout_ms),
        # One for the barrier, one a layer at least, one for the end of the step.
        first_step_progress=state.config.geometry.layers + 2,
        now_ms=now_ms,
    )
    for verdict in judgement.expelled:
        state.end(state.seats[verdict.rank], now_ms, verdict.why, out, at_once=False)
    for seat in state.seats.values():
        suspected = seat.rank in judgement.suspected
        if suspected and seat.phase in (Phase.STAGED, Phase.ACTIVE):
            seat.move(Phase.SUSPECTED, now_ms, "others wait for it")
            out.note("rank.suspected", rank=seat.rank, incarnation=seat.incarnation)
        elif not suspected and seat.phase is Phase.SUSPECTED:
            phase = Phase.ACTIVE if seat.running else Phase.STAGED
            seat.move(phase, now_ms, "nobody waits for it any more")
            out.note("rank.cleared", rank=seat.rank, incarnation=seat.incarnation)


# ---- staging


def check_staging(state: GroupState, now_ms: int, out: Outcome) -> None:
    """Deal with members that cannot stage the latest view, or not in time."""
    pending = state.latest_pending()
    if pending is None:
        return
    epoch = pending.view.epoch
    for seat in state.live_members():
        if not seat.live or seat.epoch >= epoch:  # one failure may have ended others
            continue
        error = pending.errors.pop(seat.rank, "")
        sent_ms = pending.sent.get(seat.rank)
        if error:
            why = f"rank {seat.rank} could not stage epoch {epoch}: {error}"
        elif epoch in seat.staged or sent_ms is None:
            continue
        else:
            limit_ms = _stage_limit_ms(state, pending, seat)
            loading = pending.loading.get(seat.rank)
            since_ms = max(sent_ms, loading.moved_ms) if loading else sent_ms
            if limit_ms is None or now_ms - since_ms < limit_ms:
                continue
            why = f"rank {seat.rank} did not stage epoch {epoch} within {limit_ms} ms"
        out.note("staging.failed", rank=seat.rank, epoch=epoch, reason=why)
        _blame(state, pending, seat, why, now_ms, out)


def _stage_limit_ms(state: GroupState, pending: Pending, seat: Seat) -> int | None:
    if seat.running or seat.phase is not Phase.JOINING:
        return STAGE_TIMEOUT_MS
    if seat.rank in pending.joiners and pending.view.previous_epoch:
        return state.config.timeouts.step_timeout_ms  # its engine has to call step() first
    return None  # the group forms: engines take as long as they take to load


def _blame(
    state: GroupState, pending: Pending, seat: Seat, why: str, now_ms: int, out: Outcome
) -> None:
    """Decide who pays for a view that cannot be staged: what is newest in it."""
    joiners = [rank for rank in sorted(pending.joiners) if state.seats[rank].live]
    if not seat.running or not pending.view.previous_epoch:
        state.end(seat, now_ms, why, out, at_once=False)
    elif joiners:
        for rank in joiners:
            state.end(state.seats[rank], now_ms, f"{why}, while {rank} joined", out, at_once=False)
    elif seat.rank in pending.filled and seat.rank not in state.revoked:
        state.revoked.add(seat.rank)
        state.failed_to_load(seat, now_ms)
        pending.sent[seat.rank] = now_ms
        state.dirty = True
    else:
        state.end(seat, now_ms, why, out, at_once=False)


def end_stranded(state: GroupState, now_ms: int, out: Outcome) -> None:
    """End members that nobody can let in: they wait for a rank that runs, and none is left."""
    view, members = state.view, state.live_members()
    if view is None or not members or any(seat.running or not seat.heard for seat in members):
        state.stranded_ms = 0
        return
    if any(pending.view.previous_epoch == 0 for pending in state.pending):
        # The group forms: its first view needs nobody who runs. But no step is run with somebody
        # dead, and no third open view can leave them out; unless word of one that runs is coming.
        if state.unadopted < MAX_UNADOPTED or len(members) == len(view.members):
            state.stranded_ms = 0
            return
        state.stranded_ms = state.stranded_ms or max(1, now_ms)
        if now_ms - state.stranded_ms < STAGE_TIMEOUT_MS:
            return
    state.stranded_ms = 0
    for seat in members:
        why = f"nobody is left who runs a view before epoch {view.epoch}; the group forms anew"
        state.end(seat, now_ms, why, out, at_once=False, counts=False)


# ---- the next view


def propose(state: GroupState, now_ms: int, out: Outcome) -> None:
    """Propose the next view, or say why there is none."""
    in_use = state.in_use
    plan = next_plan(
        Situation(
            config=state.config,
            seats=state.seats,
            connected=state.connected,
            latest=state.view,
            pending=state.latest_pending(),
            unadopted=state.unadopted,
            in_use=None if in_use is None else [placement for _, placement in in_use],
            revoked=state.revoked,
            cannot_load=state.cannot_load,
            refusals=state.refusals,
            domains=state.domains,
            loads=state.loads,
            goal=state.goal,
            empty_since_ms=state.empty_since_ms,
            now_ms=now_ms,
        )
    )
    state.goal = None  # asked once: whoever wants it sees whether it came
    if isinstance(plan, str):
        if plan != state.waiting:
            state.waiting = plan
            if plan:
                out.note("view.waiting", reason=plan)
        return
    _adopt_plan(state, plan, now_ms, out)


def _adopt_plan(state: GroupState, plan: NextView, now_ms: int, out: Outcome) -> None:
    epoch, state.next_epoch = state.next_epoch, state.next_epoch + 1
    for left in state.left:
        left.epoch = left.epoch or epoch
    previous = 0 if plan.forms or state.view is None else state.view.epoch
    view = View(
        group=state.config.name,
        epoch=epoch,
        previous_epoch=previous,
        members=plan.members,
        expelled=tuple(sorted(left.member for left in state.left)),
        placement=plan.placement,
        reason=f"{state.leap}; {plan.reason}" if state.leap else plan.reason,
    )
    for rank in plan.called_off:
        seat = state.seats[rank]
        seat.since = 0
        seat.staged.clear()
        if seat.phase is Phase.STAGED:
            seat.move(Phase.JOINING, now_ms, f"epoch {epoch} had to come first")
        out.save(seat.record())
    for rank in plan.joiners:
        state.seats[rank].since = epoch
        out.save(state.seats[rank].record())
    if plan.forms or state.in_use is None:
        state.in_use = [] if plan.forms else None
    if state.in_use is not None:
        state.in_use.append((epoch, plan.placement))
    if plan.forms and state.pending:
        state.pending.clear()  # nobody is left to run those
    state.pending.append(
        Pending(view, now_ms, plan.joiners, plan.filled, shown=plan.forms, seen=plan.forms)
    )
    state.view, state.waiting, state.leap, state.empty_since_ms = view, "", "", 0
    state.revoked.clear()
    _ask_again(state, plan)
    state.history.append(view.describe())
    out.save(ev.SaveView(view))
    out.note(
        "view.proposed",
        epoch=epoch,
        members=list(view.ranks),
        expelled=[member.rank for member in view.expelled],
        lost_experts=len(view.lost),
        reason=view.reason,
    )


def _ask_again(state: GroupState, plan: NextView) -> None:
    """What the view gives to a node is tried, whatever the node could not get before."""
    if not state.refusals or state.in_use is None or len(state.in_use) < 2:
        return
    before, table = state.in_use[-2][1].slot_expert, plan.placement.slot_expert
    for node in {member.node for member in plan.members}:
        ranks = [member.rank for member in plan.members if member.node == node]
        state.refusals.forget(node, given(table, before, ranks, plan.placement.experts))


def show(state: GroupState, now_ms: int, out: Outcome) -> None:
    """Tell nodes to stage the open views, in order: joiners first, the others when those have."""
    for pending in state.pending:
        view = pending.view
        members = [
            seat
            for member in view.members
            if (seat := state.seats[member.rank]).incarnation == member.incarnation and seat.live
        ]
        if not pending.shown and view is state.view:
            pending.shown = all(s.heard and (s.running or view.epoch in s.staged) for s in members)
            pending.seen |= pending.shown
        told: dict[str, list[int]] = {}
        for seat in members:
            unsent = seat.rank not in pending.asked and seat.node in state.connected
            # A join that was called off does not count from that view on, but from a later one.
            taken_in = 0 < seat.since <= view.epoch
            if unsent and taken_in and (pending.shown or not seat.running):
                pending.asked.add(seat.rank)
                told.setdefault(seat.node, []).append(seat.rank)
        out.after.extend(
            ev.Propose(n, view, tuple(told[n]), _leaving(state, view, n)) for n in sorted(told)
        )


def _leaving(state: GroupState, view: View, node: str) -> tuple[tuple[int, str], ...]:
    """Ranks of a node that are drained and that the view leaves out, and why."""
    return tuple(
        (seat.rank, seat.held)
        for seat in state.seats_of(node)
        if seat.phase is Phase.DRAINING and not view.holds(seat.rank, seat.incarnation)
    )


# ---- seats


def grant(state: GroupState, now_ms: int, out: Outcome) -> None:
    """Give free seats to the nodes that offer them."""
    for seat in state.seats.values():
        if seat.phase is not Phase.GONE or seat.held or now_ms < seat.grant_after_ms:
            continue
        offering = [node for node in state.connected if seat.rank in state.offers.get(node, ())]
        if not offering:
            continue
        node = seat.node if seat.node in offering else min(offering)
        seat.grant(node, now_ms)
        out.save(seat.record())
        out.after.append(ev.Grant(node, seat.rank, seat.incarnation))
        out.note("seat.granted", rank=seat.rank, incarnation=seat.incarnation, node=node)
