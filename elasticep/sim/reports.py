"""What a simulated daemon tells of its ranks from time to time: waits, and progress."""

from typing import TYPE_CHECKING

from elasticep.control import events as ev
from elasticep.control.events import SeatState

if TYPE_CHECKING:
    from elasticep.sim.cluster import SimSeat
    from elasticep.sim.nodes import SimNode


def tell_waits(node: "SimNode", now_s: float, beat_s: float) -> bool:
    """Report waits that began to count or ended; whether a heartbeat is due."""
    due = False
    for seat in node.seats.values():
        if seat.process is None or not _attached(seat):
            continue
        timeouts = node.c.configs[seat.group].timeouts
        due = due or now_s - beat_s >= timeouts.node_timeout_ms / 3_000
        process = seat.process
        if process.waits_for is not None:
            process.look()
        waited_s = now_s - process.waits_since_s
        target = process.waits_for
        if target is not None and waited_s * 1_000 < timeouts.suspect_after_ms:
            target = None
        if target != seat.waits:
            seat.waits = target
            ms = int(waited_s * 1_000) if target is not None else 0
            who = (node.name, seat.rank, seat.incarnation, target or 0)
            event = ev.Waits(*who, process.state, ms, process.progress)
            node.say_all(((seat.group, event),))
    return due


def heartbeat(node: "SimNode") -> tuple[tuple[str, ev.Event], ...]:
    """Progress of every attached rank."""
    return tuple(
        (
            seat.group,
            ev.Progressed(
                *(node.name, seat.rank, seat.incarnation, seat.process.progress),
                warmup=seat.process.warm,
            ),
        )
        for seat in node.seats.values()
        if seat.process is not None and seat.state is SeatState.ATTACHED
    )


def _attached(seat: "SimSeat") -> bool:
    process = seat.process
    return process is not None and process.alive and seat.state is SeatState.ATTACHED
