"""One seat of a node as a state machine: events in, effects out, no I/O and no clock.

    EMPTY ──granted──▶ STARTING ──runner held──▶ READY ──engine held──▶ ATTACHED
      ▲                    │                       │                       │
      └── both gone ── ENDING ◀── a half died, let go, exited, or was ended ┘

Invariants, in this order of effects:

1. An incarnation ends once. The dead words are set before anybody is told, and the controller is
   told before anything is killed.
2. EMPTY is reported only when the old worker is gone (its exit confirmed) and the old engine too
   (its exit confirmed, or its lock released). Only then may the memory be used by the next
   incarnation.
3. Nothing that an earlier incarnation's processes do moves the present one: every lock event
   carries its incarnation.

Under inline launch there is no worker: the engine's process holds both locks, and it is gone when
both are released. It starts READY, unless its memory is on a GPU and has to be made first.
"""

import dataclasses
import enum
from collections.abc import Callable
from dataclasses import dataclass

from elasticep.errors import UsageError
from elasticep.native.structs import Holder, Launch
from elasticep.runtime.seat_events import (
    Allocated,
    Connected,
    Died,
    Disconnected,
    Effect,
    Ended,
    Event,
    Exited,
    Expel,
    GraceOver,
    Granted,
    Held,
    Kill,
    LetGo,
    Released,
    Report,
    SeatState,
    Start,
)

__all__ = [
    "OVER",
    "Allocated",
    "Connected",
    "Died",
    "Disconnected",
    "Effect",
    "Ended",
    "Event",
    "Exited",
    "Expel",
    "GraceOver",
    "Granted",
    "Half",
    "Held",
    "Kill",
    "LetGo",
    "Next",
    "Released",
    "Report",
    "Seat",
    "SeatState",
    "Start",
    "advance",
]


class Half(enum.StrEnum):
    """One of the two processes of a seat."""

    GONE = "gone"  # there is none, or it let go
    EXITED = "exited"  # confirmed; what its lock says afterwards is an echo
    RUNNING = "running"  # exists, does not hold its lock
    HELD = "held"  # holds its lock
    DYING = "dying"  # the kernel marked its lock; its exit is not confirmed


OVER = (Half.GONE, Half.EXITED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A seat's whole state; `advance` makes the next one.

    Attributes:
        launch: who runs the kernels.
        incarnation: the present or last one, 0 = never granted.
        state: see the module's picture.
        cause: why the last incarnation ended.
        runner: the worker process under service launch, the runner lock under inline.
        engine: the engine.
        failed_starts: workers in a row that never became ready.
    """

    launch: Launch
    incarnation: int = 0
    state: SeatState = SeatState.EMPTY
    cause: str = ""
    runner: Half = Half.GONE
    engine: Half = Half.GONE
    failed_starts: int = 0

    @property
    def live(self) -> bool:
        """Whether the present incarnation is not over."""
        return self.state in (SeatState.STARTING, SeatState.READY, SeatState.ATTACHED)

    def validate(self) -> None:
        """Assert what holds between the fields in every state."""
        both_gone = self.runner in OVER and self.engine in OVER
        if self.state is SeatState.EMPTY:
            assert both_gone, self
        elif self.state is SeatState.ENDING:
            assert not both_gone, self
        else:
            assert self.incarnation >= 1, self
            assert Half.DYING not in (self.runner, self.engine), self
        if self.state is SeatState.ATTACHED:
            assert self.engine is Half.HELD, self
        if self.state in (SeatState.READY, SeatState.ATTACHED) and self.launch is Launch.SERVICE:
            assert self.runner is Half.HELD, self


Next = tuple[Seat, tuple[Effect, ...]]

_HALF = {Holder.RUNNER: "runner", Holder.ENGINE: "engine"}


def advance(seat: Seat, event: Event) -> Next:
    """The seat after an event, and what is to be done, in order.

    Raises:
        UsageError: a grant that cannot be followed. Other events that come too late are ignored.
    """
    if not isinstance(event, Granted) and event.incarnation != seat.incarnation:
        return seat, ()
    if isinstance(event, Held | Died | Released) and _half(seat, event.holder) is Half.EXITED:
        return seat, ()
    handler = _TABLE.get((seat.state, type(event)))
    if handler is None:
        return seat, ()
    after, effects = handler(seat, event)
    after.validate()
    return after, effects


def _with_half(seat: Seat, holder: Holder, half: Half, **changes: object) -> Seat:
    return dataclasses.replace(seat, **{_HALF[holder]: half}, **changes)  # type: ignore[arg-type]


def _half(seat: Seat, holder: Holder) -> Half:
    return seat.runner if holder is Holder.RUNNER else seat.engine


def _granted(seat: Seat, event: Granted) -> Next:
    if event.incarnation <= seat.incarnation:
        raise UsageError(
            f"incarnation {event.incarnation} was granted after {seat.incarnation}; "
            "incarnations of a seat only grow"
        )
    service = seat.launch is Launch.SERVICE
    after = dataclasses.replace(
        seat,
        incarnation=event.incarnation,
        state=SeatState.STARTING if service or event.allocate else SeatState.READY,
        cause="",
        runner=Half.RUNNING if service else Half.GONE,
        engine=Half.GONE,
    )
    start = Start(event.incarnation)
    return after, (start,) if after.state is SeatState.STARTING else (start, Report(after.state))


def _allocated(seat: Seat, event: Allocated) -> Next:
    if seat.launch is Launch.SERVICE:
        return seat, ()
    after = dataclasses.replace(seat, state=SeatState.READY, failed_starts=0)
    return after, (Report(after.state),)


def _refuse_grant(seat: Seat, event: Granted) -> Next:
    if event.incarnation == seat.incarnation and seat.live:
        return seat, (
            Report(seat.state),
        )  # the controller did not hear of it: say again where we are
    raise UsageError(
        f"incarnation {event.incarnation} was granted while incarnation {seat.incarnation} is "
        f"{seat.state}; the seat must be reported empty first"
    )


def _connected(seat: Seat, event: Connected) -> Next:
    if seat.engine is Half.GONE:
        return dataclasses.replace(seat, engine=Half.RUNNING), ()
    return seat, ()


def _disconnected(seat: Seat, event: Disconnected) -> Next:
    if seat.engine is not Half.RUNNING:
        return seat, ()
    after = dataclasses.replace(seat, engine=Half.GONE)
    return _finish(after) if seat.state is SeatState.ENDING else (after, ())


def _held(seat: Seat, event: Held) -> Next:
    after = _with_half(seat, event.holder, Half.HELD)
    if event.holder is Holder.RUNNER:
        if seat.state is SeatState.STARTING:
            after = dataclasses.replace(after, state=SeatState.READY, failed_starts=0)
            return after, (Report(after.state),)
        return after, ()
    if seat.state is SeatState.READY:
        after = dataclasses.replace(after, state=SeatState.ATTACHED, failed_starts=0)
        return after, (Report(after.state),)
    return after, ()


def _held_late(seat: Seat, event: Held) -> Next:
    """It took its lock while the incarnation ended: it has to let go like the others."""
    after = _with_half(seat, event.holder, Half.HELD)
    if event.holder is Holder.ENGINE:
        return after, (LetGo(seat.incarnation),)
    return after, ()


def _died(seat: Seat, event: Died) -> Next:
    who = "worker" if _is_worker(seat, event.holder) else "engine"
    changed = _lost(seat, event.holder, Half.DYING)
    return _end(changed, seat, f"{who} died", 0)


def _released(seat: Seat, event: Released) -> Next:
    if _is_worker(seat, event.holder):
        return _end(_with_half(seat, event.holder, Half.RUNNING), seat, "worker left", 0)
    changed = _with_half(seat, event.holder, Half.GONE)
    if event.holder is Holder.RUNNER:  # inline: the engine's own lock follows or has gone
        return changed, ()
    return _end(changed, seat, "detached", 0)


def _exited(seat: Seat, event: Exited) -> Next:
    who = "worker" if _is_worker(seat, event.holder) else "engine"
    died = _half(seat, event.holder) is Half.HELD  # and its lock's word is on the way
    cause = f"{who} died" if died else f"{who} exited{event.how and f' ({event.how})'}"
    return _end(_gone(seat, event.holder), seat, cause, 0)


def _ended(seat: Seat, event: Ended) -> Next:
    failed = event.failed and seat.state is not SeatState.STARTING  # which counts by itself
    counted = dataclasses.replace(seat, failed_starts=seat.failed_starts + failed)
    return _end(counted, counted, event.cause, event.epoch)


def _end(changed: Seat, before: Seat, cause: str, epoch: int) -> Next:
    failed = before.failed_starts + (before.state is SeatState.STARTING)
    after = dataclasses.replace(changed, state=SeatState.ENDING, cause=cause, failed_starts=failed)
    effects: list[Effect] = [Expel(before.incarnation, epoch, cause), Report(after.state)]
    if after.launch is Launch.SERVICE and after.runner in (Half.RUNNING, Half.HELD):
        effects.append(Kill(Holder.RUNNER))
    if after.engine in (Half.RUNNING, Half.HELD):
        effects.append(LetGo(after.incarnation))
    finished, more = _finish(after)
    return finished, (*effects, *more)


def _ending_died(seat: Seat, event: Died) -> Next:
    return _finish(_lost(seat, event.holder, Half.DYING))


def _ending_released(seat: Seat, event: Released) -> Next:
    half = Half.RUNNING if _is_worker(seat, event.holder) else Half.GONE
    if _half(seat, event.holder) is Half.GONE:
        return seat, ()
    return _finish(_with_half(seat, event.holder, half))


def _ending_exited(seat: Seat, event: Exited) -> Next:
    return _finish(_gone(seat, event.holder))


def _ending_grace_over(seat: Seat, event: GraceOver) -> Next:
    if seat.engine in (Half.RUNNING, Half.HELD):
        return seat, (Kill(Holder.ENGINE),)
    return seat, ()


def _finish(seat: Seat) -> Next:
    if seat.runner in OVER and seat.engine in OVER:
        report = Report(SeatState.EMPTY, seat.failed_starts)
        return dataclasses.replace(seat, state=SeatState.EMPTY), (report,)
    return seat, ()


def _is_worker(seat: Seat, holder: Holder) -> bool:
    return holder is Holder.RUNNER and seat.launch is Launch.SERVICE


def _lost(seat: Seat, holder: Holder, half: Half) -> Seat:
    """A half that dies; under inline launch both are one process."""
    if seat.launch is Launch.SERVICE:
        return _with_half(seat, holder, half)
    return dataclasses.replace(seat, engine=half, runner=Half.GONE)


def _gone(seat: Seat, holder: Holder) -> Seat:
    if seat.launch is Launch.SERVICE:
        return _with_half(seat, holder, Half.EXITED)
    return dataclasses.replace(seat, engine=Half.EXITED, runner=Half.EXITED)


_LIVE = (SeatState.STARTING, SeatState.READY, SeatState.ATTACHED)

# (state, event) -> what follows. What is not here is a late echo and changes nothing.
_TABLE: dict[tuple[SeatState, type], Callable[..., Next]] = {
    (SeatState.EMPTY, Granted): _granted,
    (SeatState.ENDING, Granted): _refuse_grant,
    (SeatState.STARTING, Allocated): _allocated,
    (SeatState.READY, Connected): _connected,
    (SeatState.READY, Disconnected): _disconnected,
    (SeatState.ENDING, Disconnected): _disconnected,
    (SeatState.ENDING, Held): _held_late,
    (SeatState.ENDING, Died): _ending_died,
    (SeatState.ENDING, Released): _ending_released,
    (SeatState.ENDING, Exited): _ending_exited,
    (SeatState.ENDING, GraceOver): _ending_grace_over,
    **{(state, Granted): _refuse_grant for state in _LIVE},
    **{(state, Held): _held for state in _LIVE},
    **{(state, Died): _died for state in _LIVE},
    **{(state, Released): _released for state in _LIVE},
    **{(state, Exited): _exited for state in _LIVE},
    **{(state, Ended): _ended for state in _LIVE},
}
