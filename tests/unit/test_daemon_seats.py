"""The seat machine: every reachable state, in a small world that knows which processes exist."""

import dataclasses
import errno
import os
import re
import resource
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from elasticep.errors import AttachError, DescriptorsShort, MemoryShort, UsageError
from elasticep.native.structs import Holder, Launch
from elasticep.runtime import descriptors, seats
from elasticep.runtime.liveness.exits import ExitGate
from elasticep.runtime.seats import Half, Seat, SeatState, advance
from elasticep.runtime.start_failure import StartFailure

RUNNER, ENGINE = Holder.RUNNER, Holder.ENGINE
DEAD, EMPTY = seats.Report(SeatState.ENDING), seats.Report(SeatState.EMPTY)


def after(seat: Seat, *events: seats.Event) -> tuple[Seat, list[seats.Effect]]:
    effects: list[seats.Effect] = []
    for event in events:
        seat, more = advance(seat, event)
        effects += more
    return seat, effects


def attached(launch: Launch = Launch.SERVICE) -> Seat:
    events: list[seats.Event] = [seats.Granted(1)]
    if launch is Launch.SERVICE:
        events.append(seats.Held(RUNNER, 1))
    events.append(seats.Connected(1))
    if launch is Launch.INLINE:
        events.append(seats.Held(RUNNER, 1))
    events.append(seats.Held(ENGINE, 1))
    seat, _ = after(Seat(launch=launch), *events)
    assert seat.state is SeatState.ATTACHED
    return seat


def test_service_seat_starts_and_is_taken() -> None:
    seat, effects = after(Seat(launch=Launch.SERVICE), seats.Granted(1))
    assert seat.state is SeatState.STARTING
    assert effects == [seats.Start(1)]
    seat, effects = after(seat, seats.Held(RUNNER, 1))
    assert (seat.state, effects) == (SeatState.READY, [seats.Report(SeatState.READY)])
    seat, effects = after(seat, seats.Connected(1), seats.Held(ENGINE, 1))
    assert (seat.state, effects) == (SeatState.ATTACHED, [seats.Report(SeatState.ATTACHED)])


def test_inline_seat_is_ready_at_once() -> None:
    seat, effects = after(Seat(launch=Launch.INLINE), seats.Granted(4))
    assert seat.state is SeatState.READY
    assert effects == [seats.Start(4), seats.Report(SeatState.READY)]


def test_inline_seat_on_a_gpu_waits_for_its_memory() -> None:
    empty = Seat(launch=Launch.INLINE)
    starting, effects = after(empty, seats.Granted(1, allocate=True))
    assert (starting.state, effects) == (SeatState.STARTING, [seats.Start(1)])
    seat, effects = after(starting, seats.Allocated(1))
    assert (seat.state, effects) == (SeatState.READY, [seats.Report(SeatState.READY)])
    assert after(seat, seats.Allocated(1)) == (seat, [])
    # What comes late is of an incarnation that is over, or of none.
    seat, effects = after(starting, seats.Ended(1, "no room"))
    assert (seat.state, seat.failed_starts) == (SeatState.EMPTY, 1)
    assert effects == [seats.Expel(1, 0, "no room"), DEAD, seats.Report(SeatState.EMPTY, 1)]
    assert after(seat, seats.Allocated(1)) == (seat, [])
    again, _ = after(seat, seats.Granted(2, allocate=True))
    assert after(again, seats.Allocated(1)) == (again, [])
    # A worker of service launch says itself when it is up.
    service, _ = after(Seat(launch=Launch.SERVICE), seats.Granted(1))
    assert after(service, seats.Allocated(1)) == (service, [])


def test_a_dead_worker_ends_the_seat_in_order() -> None:
    seat, effects = after(attached(), seats.Died(RUNNER, 1))
    assert seat.state is SeatState.ENDING
    assert effects == [seats.Expel(1, 0, "worker died"), DEAD, seats.LetGo(1)]
    seat, effects = after(seat, seats.Exited(RUNNER, 1, "killed by SIGKILL"))
    assert (seat.state, effects) == (SeatState.ENDING, [])
    seat, effects = after(seat, seats.Released(ENGINE, 1))
    assert (seat.state, effects) == (SeatState.EMPTY, [EMPTY])


def test_a_dead_engine_takes_the_worker_with_it() -> None:
    seat, effects = after(attached(), seats.Died(ENGINE, 1))
    assert effects == [seats.Expel(1, 0, "engine died"), DEAD, seats.Kill(RUNNER)]
    seat, effects = after(seat, seats.Died(RUNNER, 1), seats.Exited(RUNNER, 1))
    assert (seat.state, effects) == (SeatState.ENDING, [])  # the engine's exit is not confirmed
    seat, effects = after(seat, seats.Exited(ENGINE, 1))
    assert (seat.state, effects) == (SeatState.EMPTY, [EMPTY])


def test_an_engine_that_holds_on_is_killed_after_its_grace() -> None:
    seat, effects = after(attached(), seats.Ended(1, "expelled", 7), seats.Exited(RUNNER, 1))
    assert effects[0] == seats.Expel(1, 7, "expelled")
    assert seat.state is SeatState.ENDING
    seat, effects = after(seat, seats.GraceOver(1))
    assert effects == [seats.Kill(ENGINE)]
    seat, effects = after(seat, seats.Died(ENGINE, 1), seats.GraceOver(1), seats.Exited(ENGINE, 1))
    assert (seat.state, effects) == (SeatState.EMPTY, [EMPTY])


def test_inline_engine_is_gone_when_both_locks_are() -> None:
    seat, effects = after(attached(Launch.INLINE), seats.Released(ENGINE, 1))
    assert seat.state is SeatState.ENDING
    assert seats.Kill(RUNNER) not in effects
    seat, _ = after(seat, seats.Released(RUNNER, 1))
    assert seat.state is SeatState.EMPTY
    seat, _ = after(attached(Launch.INLINE), seats.Died(RUNNER, 1), seats.Died(ENGINE, 1))
    assert (seat.state, seat.cause) == (SeatState.ENDING, "engine died")
    seat, _ = after(seat, seats.Exited(ENGINE, 1))
    assert seat.state is SeatState.EMPTY


def test_an_engine_between_ticket_and_lock_keeps_the_memory_busy() -> None:
    ready, _ = after(Seat(launch=Launch.SERVICE), seats.Granted(1), seats.Held(RUNNER, 1))
    seat, effects = after(ready, seats.Connected(1), seats.Died(RUNNER, 1))
    assert seats.LetGo(1) in effects
    seat, _ = after(seat, seats.Exited(RUNNER, 1))
    assert seat.state is SeatState.ENDING
    seat, effects = after(seat, seats.Disconnected(1))
    assert (seat.state, effects) == (SeatState.EMPTY, [EMPTY])
    # An engine that gives up before it took its lock costs nothing.
    seat, effects = after(ready, seats.Connected(1), seats.Disconnected(1))
    assert (seat, effects) == (ready, [])


def test_earlier_incarnations_move_nothing() -> None:
    seat, _ = after(attached(), seats.Died(ENGINE, 1), seats.Exited(ENGINE, 1))
    seat, _ = after(seat, seats.Exited(RUNNER, 1), seats.Granted(2), seats.Held(RUNNER, 2))
    echoes = (
        seats.Died(RUNNER, 1),
        seats.Released(ENGINE, 1),
        seats.Exited(ENGINE, 1),
        seats.Ended(1, "late"),
        seats.GraceOver(1),
    )
    assert after(seat, *echoes) == (seat, [])


def test_failed_starts_are_counted_until_one_succeeds() -> None:
    seat = Seat(launch=Launch.SERVICE)
    for number in (1, 2, 3):
        seat, effects = after(seat, seats.Granted(number), seats.Exited(RUNNER, number, "status 1"))
        assert effects[-1] == seats.Report(SeatState.EMPTY, number)
    seat, _ = after(seat, seats.Granted(4), seats.Held(RUNNER, 4))
    assert seat.failed_starts == 0
    seat = Seat(launch=Launch.INLINE)
    seat, effects = after(seat, seats.Granted(1), seats.Ended(1, "no memory", failed=True))
    assert effects[-1] == seats.Report(SeatState.EMPTY, 1)


def test_grants_that_cannot_be_followed_are_refused() -> None:
    with pytest.raises(UsageError, match="must be reported empty first"):
        advance(attached(), seats.Granted(2))
    empty, _ = after(attached(), seats.Died(ENGINE, 1), seats.Exited(ENGINE, 1))
    empty, _ = after(empty, seats.Exited(RUNNER, 1))
    for old in (0, 1):
        with pytest.raises(UsageError, match="only grow"):
            advance(empty, seats.Granted(old))
    # The controller did not hear the report: it is made again.
    assert advance(attached(), seats.Granted(1)) == (
        attached(),
        (seats.Report(SeatState.ATTACHED),),
    )


def test_an_exit_that_comes_first_reports_both_states_by_name() -> None:
    ready, _ = after(Seat(launch=Launch.SERVICE), seats.Granted(1), seats.Held(RUNNER, 1))
    seat, effects = after(ready, seats.Exited(RUNNER, 1))
    assert seat.state is SeatState.EMPTY
    assert effects == [seats.Expel(1, 0, "worker died"), DEAD, EMPTY]


def test_an_exit_waits_until_the_watcher_has_seen_its_locks() -> None:
    gate = ExitGate()
    exited = seats.Exited(ENGINE, 1)
    both = frozenset((RUNNER, ENGINE))
    assert not gate.hold_back(both, exited)  # it held none
    for holder in both:
        assert gate.follow(seats.Held(holder, 1)) == []
    assert gate.hold_back(both, exited)
    assert gate.follow(seats.Died(RUNNER, 1)) == []
    assert gate.follow(seats.Died(ENGINE, 1)) == [exited]
    assert gate.follow(seats.Died(ENGINE, 1)) == []
    gate.follow(seats.Held(RUNNER, 1))
    assert gate.hold_back(frozenset((RUNNER,)), seats.Exited(RUNNER, 1))
    assert gate.follow(seats.Granted(2)) == []  # another incarnation: forgotten
    assert gate.follow(seats.Died(RUNNER, 2)) == []


# ---- exploration


@dataclass(frozen=True)
class World:
    """A seat and the truth about its processes, whose news may come late and in any order.

    `worker` and `engine`: 0 none, 1 alive without lock, 2 alive with lock, 3 dying.
    `news`: events on their way.
    """

    seat: Seat
    worker: int = 0
    engine: int = 0
    news: frozenset[seats.Event] = frozenset()
    ended: int = 0  # highest incarnation that was expelled


LAST = 2


def moves(world: World) -> Iterator[World]:
    seat, inc = world.seat, world.seat.incarnation
    for event in world.news:
        yield deliver(dataclasses.replace(world, news=world.news - {event}), event)
    if seat.state is SeatState.EMPTY and inc < LAST:
        yield deliver(world, seats.Granted(inc + 1))
    if seat.live:
        yield deliver(world, seats.Ended(inc, "expelled", 5))
    if seat.state is SeatState.ENDING:
        yield deliver(world, seats.GraceOver(inc))
    if seat.state is SeatState.READY and world.engine == 0 and seat.engine is Half.GONE:
        yield deliver(dataclasses.replace(world, engine=1), seats.Connected(inc))
    yield from process_moves(world, "worker", RUNNER)
    yield from process_moves(world, "engine", ENGINE)


def process_moves(world: World, name: str, holder: Holder) -> Iterator[World]:
    inc, state = world.seat.incarnation, getattr(world, name)

    def to(value: int, *events: seats.Event) -> World:
        return dataclasses.replace(world, **{name: value}, news=world.news | frozenset(events))

    if state == 1:
        yield to(2, seats.Held(holder, inc))
        yield to(0, seats.Exited(holder, inc))
        if holder is ENGINE:
            yield to(0, seats.Disconnected(inc))
    elif state == 2:
        yield to(3, seats.Died(holder, inc))
        if holder is ENGINE:
            yield to(0, seats.Released(holder, inc))
    elif state == 3:
        yield to(0, seats.Exited(holder, inc))


def deliver(world: World, event: seats.Event) -> World:
    before = world.seat
    seat, effects = advance(before, event)
    world = dataclasses.replace(world, seat=seat)
    for effect in effects:
        match effect:
            case seats.Start():
                assert world.worker == 0, "a second worker"
                assert world.engine == 0, "the memory is still used by an engine"
                world = dataclasses.replace(world, worker=1)
            case seats.Expel(incarnation):
                assert incarnation > world.ended, "ended twice"
                world = dataclasses.replace(world, ended=incarnation)
            case seats.Report():
                if effect.state is SeatState.EMPTY:
                    assert (world.worker, world.engine) == (0, 0), "EMPTY too early"
    return world


def settle(world: World) -> World:
    """Let everything die and all news arrive; the seat must come to rest."""
    for _ in range(40):
        if world.news:
            event = sorted(world.news, key=repr)[0]
            world = deliver(dataclasses.replace(world, news=world.news - {event}), event)
        elif (world.seat.live and world.worker == 0) or world.seat.state is SeatState.EMPTY:
            return world
        else:
            name, holder = ("worker", RUNNER) if world.worker else ("engine", ENGINE)
            state = getattr(world, name)
            dying = seats.Died(holder, world.seat.incarnation)
            gone = seats.Exited(holder, world.seat.incarnation)
            event = dying if state == 2 else gone
            world = dataclasses.replace(
                world, **{name: 3 if state == 2 else 0}, news=world.news | {event}
            )
    raise AssertionError(f"it does not come to rest: {world}")


def test_every_reachable_state_keeps_its_promises() -> None:
    start = World(Seat(launch=Launch.SERVICE))
    seen, todo = {start}, deque([start])
    while todo:
        world = todo.popleft()
        for step in moves(world):
            if step not in seen:
                seen.add(step)
                todo.append(step)
    assert len(seen) > 300
    states = {world.seat.state for world in seen}
    assert states == set(SeatState)
    for world in seen:
        if world.seat.state is SeatState.ENDING:
            assert settle(world).seat.state is SeatState.EMPTY


def test_a_start_that_failed_is_told_until_the_next_one() -> None:
    failure = StartFailure()
    seat, _ = after(Seat(launch=Launch.INLINE), seats.Granted(1))
    assert failure.of(seat) is None
    error = MemoryShort("needs 2 bytes and 1 is available")
    seat, _ = after(seat, failure.note(seat, error))
    assert failure.of(seat) is error
    seat, _ = after(seat, seats.Granted(2, allocate=True))
    assert failure.of(seat) is None
    seat, _ = after(seat, failure.note(seat, OSError(11, "Resource temporarily unavailable")))
    assert isinstance(failure.of(seat), AttachError)
    seat, _ = after(seat, seats.Granted(3), seats.Ended(3, "detached"))
    assert failure.of(seat) is None


def test_descriptors_that_are_all_in_use_are_told_with_the_limit_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    full = OSError(errno.EMFILE, "Too many open files", "/dev/null")
    said = r"has all of its 100 in use; end what .* raise its hard limit \(ulimit -Hn"
    failure = StartFailure()
    seat, _ = after(Seat(launch=Launch.SERVICE), seats.Granted(1))
    ended = failure.note(seat, full)
    assert re.search(said, ended.cause)
    seat, _ = after(seat, ended, seats.Exited(RUNNER, 1))
    assert isinstance(failure.of(seat), DescriptorsShort)

    def none_left(_: str) -> list[str]:
        raise full

    monkeypatch.setattr(os, "listdir", none_left)
    with pytest.raises(DescriptorsShort, match=said):
        descriptors.require(8, "a seat of group 'g'")


def test_a_worker_that_ends_again_and_again_is_told_without_waiting_for_one_that_does_not() -> None:
    failure, seat = StartFailure(), Seat(launch=Launch.SERVICE)
    for number in (1, 2, 3):
        assert failure.of(seat) is None
        seat, _ = after(seat, seats.Granted(number), seats.Exited(RUNNER, number, "status 1"))
    assert "worker exited (status 1), 3 times in a row; see" in str(failure.of(seat))
