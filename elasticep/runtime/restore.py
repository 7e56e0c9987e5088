"""Takes seats over from the daemon that ran before: its workers and engines are still there.

What is known at start: the state file (incarnations, processes by pid and start time) and, under
systemd, the descriptors. A seat whose processes live is reported as it was; its memory comes back
with them when they say hello again. A seat that lost a process meanwhile ends now.
"""

from typing import Final

from elasticep.errors import ElasticEPError
from elasticep.native.structs import Holder, Launch
from elasticep.runtime import seats
from elasticep.runtime.group import Group
from elasticep.runtime.keeper import SeatKeeper
from elasticep.runtime.liveness.process import Process
from elasticep.runtime.regions.keep import KeptGroup, KeptProcess, KeptSeat
from elasticep.runtime.regions.memory import SeatMemory
from elasticep.runtime.seats import Half, Seat, SeatState

LOST: Final = "while the daemon was away"
_RECONCILE_S: Final = 0.05


def restore_group(group: Group, kept: KeptGroup) -> None:
    """Bring a group's seats to where they were, and end those that lost a process."""
    group.members = dict(kept.members)
    group.nodes = {endpoint.node: endpoint for endpoint in kept.nodes}
    for seat in kept.seats:
        keeper = group.keepers.get(seat.rank)
        if keeper is not None:
            _restore_seat(keeper, seat)
    if group.weights is not None:
        try:
            group.weights.restore(kept.weights, group.nodes)
        except (ValueError, TypeError, AttributeError) as error:
            group.node.log.error("weights.not_restored", group=group.name, error=str(error))


def _restore_seat(keeper: SeatKeeper, kept: KeptSeat) -> None:
    launch = keeper.seat.launch
    keeper.granted_ns = kept.granted_ns
    _take_stored_memory(keeper, kept.incarnation)
    held = launch is Launch.INLINE and kept.ready and keeper.memory is not None
    if kept.incarnation == 0 or (kept.worker is None and kept.engine is None and not held):
        keeper.seat = Seat(launch=launch, incarnation=kept.incarnation)
        return
    worker, engine = _find(kept.worker), _find(kept.engine)
    state = SeatState.STARTING
    if kept.ready:
        state = SeatState.ATTACHED if kept.engine else SeatState.READY
    runner = Half.GONE
    if launch is Launch.SERVICE:
        runner = Half.HELD if kept.ready else Half.RUNNING
    keeper.seat = Seat(
        launch=launch,
        incarnation=kept.incarnation,
        state=state,
        runner=runner,
        engine=Half.HELD if kept.engine and kept.ready else Half.GONE,
    )
    keeper.seat.validate()
    lost: list[Holder] = []
    for holder, was, process in (
        (Holder.RUNNER, kept.worker, worker),
        (Holder.ENGINE, kept.engine, engine),
    ):
        if process is not None:
            keeper.set_process(holder, process)
        elif was is not None or (holder is Holder.RUNNER and launch is Launch.SERVICE):
            lost.append(holder)
    for holder in lost:
        keeper.apply(seats.Exited(holder, kept.incarnation, LOST))
    if not lost and keeper.memory is not None:
        reconcile_soon(keeper)


def _take_stored_memory(keeper: SeatKeeper, incarnation: int) -> None:
    stored = keeper.node.fd_store.take(keeper.group.name, keeper.rank)
    if stored is None:
        return
    try:
        memory = SeatMemory.adopt(*stored, keeper.rank, keeper.group.layout)
    except ElasticEPError as error:
        keeper.log.warning("memory.not_restored", error=str(error))
        return
    if memory.header.status().incarnation != incarnation:
        memory.close()
        keeper.log.warning("memory.not_restored", error="it is at another incarnation")
        return
    keeper.take_memory(memory)


def _find(kept: KeptProcess | None) -> Process | None:
    return None if kept is None else Process.find(kept.pid, kept.started)


def reconcile_soon(keeper: SeatKeeper) -> None:
    """Compare the seat with its header's locks, when the watcher has told of deaths: what was let
    go while nobody looked is over now.
    """
    keeper.later(_RECONCILE_S, lambda _: _reconcile(keeper), keeper.seat.incarnation)


def _reconcile(keeper: SeatKeeper) -> None:
    status = keeper.status()
    if status is None or not keeper.seat.live:
        return
    seat = keeper.seat
    for holder, half, pid, process in (
        (Holder.RUNNER, seat.runner, status.runner_pid, keeper.worker),
        (Holder.ENGINE, seat.engine, status.engine_pid, keeper.engine),
    ):
        if half is Half.HELD and pid == 0 and process is not None and not process.exited:
            keeper.apply(seats.Released(holder, seat.incarnation))


def awaited(keepers: list[SeatKeeper]) -> list[SeatKeeper]:
    """Live seats whose runner is not connected (again) although it should be."""
    return [
        keeper
        for keeper in keepers
        if keeper.seat.live
        and keeper.runner_link is None
        and (keeper.seat.launch is Launch.SERVICE or keeper.seat.engine is not Half.GONE)
    ]


def end_lost(keepers: list[SeatKeeper], limit_s: float) -> None:
    """End seats whose runner has not come back in time."""
    for keeper in awaited(keepers):
        keeper.apply(
            seats.Ended(
                keeper.seat.incarnation,
                f"it did not come back within {limit_s:g} s after the daemon's restart",
            )
        )
