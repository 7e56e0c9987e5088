"""What an engine that asks for a seat waits for: who has it, and what to do about it."""

from typing import Final

from elasticep.native.structs import Launch
from elasticep.runtime.group import Registry
from elasticep.runtime.keeper import SeatKeeper
from elasticep.runtime.seats import OVER, SeatState

TELL_S: Final = 1.0  # an engine that waits longer is told, and so is the log


def waits_for(registry: Registry, group: str, rank: int, *, connected: bool) -> str:
    """One sentence about a seat that an engine cannot have now; "" if it can.

    Args:
        registry: the node's groups.
        group: the seat's group, which the node offers.
        rank: the seat.
        connected: whether a controller has this node's hello.
    """
    known = registry.present(group)
    if known is not None:
        keeper = known.keepers.get(rank)
        return _seat(keeper, connected) if keeper is not None else "the group has no such rank"
    if group in registry.groups:
        return "the group was deleted, and what ran in it on this node is being ended"
    if not connected:
        return "the group is not known here yet, and no controller answers this node's daemon"
    return (
        "the group is not known here yet; create it with `elasticep group create`, or attach with "
        "its config"
    )


def _seat(keeper: SeatKeeper, connected: bool) -> str:
    seat, who = keeper.seat, _holders(keeper)
    limits = keeper.node.limits
    cause = f" ({seat.cause})" if seat.cause else ""
    match seat.state:
        case SeatState.EMPTY:
            if not connected:
                return f"it is empty{cause}, and no controller answers this node's daemon"
            return (
                f"it is empty{cause}, and the controller has not given it out; `elasticep status` "
                "says why, and `elasticep undrain` ends a drain or a hold"
            )
        case SeatState.STARTING:
            return f"incarnation {seat.incarnation} is being started"
        case SeatState.ENDING:
            return (
                f"incarnation {seat.incarnation} has ended{cause}, but not yet {who}; an engine "
                f"that has not let go within {limits.engine_grace_s:g} s is killed"
            )
    if keeper.memory is None:
        return (
            f"incarnation {seat.incarnation} is held by {who}, and has not come back to this "
            "daemon, which was started anew; it is ended if it has not within "
            f"{limits.reattach_limit_s:g} s"
        )
    if keeper.free(0):
        return ""
    if seat.engine not in OVER:
        return f"incarnation {seat.incarnation} is held by {who}; end that process to free the rank"
    if keeper.group.weights is not None and not keeper.group.weights.opened(keeper.rank):
        return "memory for its expert weights is being reserved"
    return f"process {keeper.reserved_pid} is about to take incarnation {seat.incarnation}"


def _holders(keeper: SeatKeeper) -> str:
    """Who of a seat's processes is not known to be gone."""
    seat, found = keeper.seat, []
    if seat.engine not in OVER:
        found.append("an engine" if keeper.engine is None else f"engine {keeper.engine.pid}")
    if seat.runner not in OVER and seat.launch is Launch.SERVICE:
        found.append("a worker" if keeper.worker is None else f"worker {keeper.worker.pid}")
    return " and ".join(found) or "its processes"
