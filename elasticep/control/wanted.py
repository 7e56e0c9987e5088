"""What operators and the background want of a group: drains, policies, other placements. Pure."""

from elasticep.control import events as ev
from elasticep.control.events import Outcome
from elasticep.control.pending import Goal
from elasticep.control.placement import EMPTY, SlotShortage
from elasticep.control.repair import usable_slots
from elasticep.control.seats import Phase, Seat
from elasticep.control.state import GroupState
from elasticep.control.views import describe_ranks
from elasticep.errors import UnknownRank, UsageError
from elasticep.policies import flat


def loads(state: GroupState, event: ev.Loads, now_ms: int, out: Outcome) -> None:
    """Another load is to be planned for."""
    state.loads = event.tokens


def retry(state: GroupState, event: ev.Retry, now_ms: int, out: Outcome) -> None:
    """What could not be loaded is to be tried again."""
    state.refusals.clear()
    state.cannot_load.clear()
    state.failures.clear()


def rearrange(state: GroupState, event: ev.Rearrange, now_ms: int, out: Outcome) -> None:
    """The background wants another placement for the same members. Refused, and said, when
    another view came first, it fills a slot that somebody may read, or it loses experts.
    """
    view, in_use = state.view, state.in_use
    if view is None or view.epoch != event.epoch or not in_use or state.unadopted:
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
    state.goal = Goal(epoch=event.epoch, placement=event.placement, reason=event.reason)


def drain(state: GroupState, event: ev.Drain, now_ms: int, out: Outcome) -> None:
    """Ranks are to be taken out, and kept out.

    Raises:
        UnknownRank: the group has no such ranks, or none is named.
        UsageError: fewer than `min_ranks` members would be left.
        SlotShortage: fewer slots than experts would be left.
    """
    seats = _named(state, event.ranks)
    _check_drain(state, event.ranks)
    for seat in seats:
        seat.held = f"drained: {event.reason}" if event.reason else "drained"
        if seat.phase in (Phase.STAGED, Phase.ACTIVE, Phase.SUSPECTED):
            seat.move(Phase.DRAINING, now_ms, seat.held)
        elif seat.phase is Phase.JOINING:
            state.end(seat, now_ms, seat.held, out, at_once=False, counts=False)
        out.save(seat.record())
        out.note("rank.draining", rank=seat.rank, reason=seat.held)


def undrain(state: GroupState, event: ev.Undrain, now_ms: int, out: Outcome) -> None:
    """Ranks may come in again; a drain under way is taken back. Raises `UnknownRank`."""
    for seat in _named(state, event.ranks):
        seat.held = ""
        seat.ended_ms.clear()
        view = state.view
        if seat.phase is Phase.DRAINING and view and view.holds(seat.rank, seat.incarnation):
            seat.move(Phase.ACTIVE, now_ms, "the drain is taken back")
        out.save(seat.record())
        out.note("rank.undrained", rank=seat.rank)


def set_policies(state: GroupState, event: ev.SetPolicies, now_ms: int, out: Outcome) -> None:
    """Other policies hold from now on. Raises `ConfigError` when they do not fit the group."""
    config = event.policies.apply(state.created)
    before, after = flat(state.policies.to_dict()), flat(event.policies.to_dict())
    state.policies, state.config = event.policies, config
    out.save(ev.SavePolicies(event.policies))
    out.after.extend(ev.Tell(node, event.policies) for node in sorted(state.connected))
    changed = {name: value for name, value in after.items() if before[name] != value}
    if changed:
        out.note("policies.changed", changed=changed)


def node_off(state: GroupState, event: ev.NodeOff, now_ms: int, out: Outcome) -> None:
    """Nothing is left of a node's incarnations: their seats may be given to other nodes."""
    state.offers.pop(event.node, None)
    for seat in state.seats_of(event.node):
        if seat.phase is not Phase.GONE:
            state.confirm_gone(seat, now_ms, event.why, out)
            out.note("seat.freed", rank=seat.rank, incarnation=seat.incarnation, node=event.node)


def _named(state: GroupState, ranks: tuple[int, ...]) -> list[Seat]:
    unknown = sorted(set(ranks) - set(state.seats))
    if unknown or not ranks:
        most = state.created.geometry.max_ranks - 1
        raise UnknownRank(
            f"group {state.created.name!r} has ranks 0 to {most}; "
            f"{describe_ranks(unknown)} {'was' if len(unknown) < 2 else 'were'} named"
        )
    return [state.seats[rank] for rank in sorted(set(ranks))]


def _check_drain(state: GroupState, ranks: tuple[int, ...]) -> None:
    """Refuse a drain that would leave too few ranks or slots."""
    members = [seat for seat in state.live_members() if seat.phase is not Phase.DRAINING]
    left = [seat.rank for seat in members if seat.rank not in ranks]
    if state.view is None or len(left) == len(members):
        return
    config = state.config
    if len(left) < config.min_ranks:
        raise UsageError(
            f"draining {describe_ranks(ranks)} would leave {len(left)} members of group "
            f"{config.name!r}; min_ranks is {config.min_ranks}: add ranks first"
        )
    slots = len(left) * config.geometry.slots_per_rank
    if slots < config.geometry.experts:
        layers = range(config.geometry.layers)
        raise SlotShortage(layers, left, slots, config.geometry.experts)
