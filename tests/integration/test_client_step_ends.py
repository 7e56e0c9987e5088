"""Signals that come on an engine's way into a rank, out of a step and out of a session."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

from elasticep.client.compiled import Operators
from elasticep.client.handle import NativeHandle
from elasticep.client.session import Session
from elasticep.client.step import Step
from elasticep.errors import Fenced, UsageError
from elasticep.group import Launch
from elasticep.native import abi
from elasticep.native.convert import geometry_struct
from elasticep.testing.local_group import LocalGroup
from elasticep.testing.signalled import Pair, Stop, config, meanwhile
from elasticep.testing.small import until


@pytest.fixture(scope="module", params=[Launch.SERVICE, Launch.INLINE])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    opened = Pair(request.param)
    yield opened
    opened.close()


@contextmanager
def interrupted_at(place: Callable[..., Any]) -> Iterator[None]:
    """What a handler raises, raised before the first instruction of a function, once."""
    code = place.__code__

    def trace(frame: Any, event: str, _: Any) -> None:
        if frame.f_code is code:
            sys.settrace(None)
            raise Stop

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def empty_step(session: Session) -> None:
    with session.step():
        pass


ENDS: Final = (
    *(Step.__exit__, Session._end, Session._ended, Operators.after),
    *(Session._end_natively, NativeHandle.step_end),
)


@pytest.mark.parametrize(
    ("place", "fails"),
    [*((end, fails) for fails in (False, True) for end in ENDS), (NativeHandle.step_tear, True)],
)
def test_a_handler_that_raises_while_a_step_ends_leaves_none_open(
    pair: Pair, place: Callable[..., Any], fails: bool
) -> None:
    """Wherever it is on its way out of the block, also after another error."""
    pair.mine.exchange("decode")
    with (
        meanwhile(lambda: empty_step(pair.peer)),
        interrupted_at(place),
        pytest.raises(Stop),
        pair.mine.step() as cut,
    ):
        assert not fails, "an error of the engine"
    assert not cut.complete
    if place in (Step.__exit__, Session._end):  # none that the session knows of
        with pytest.raises(UsageError, match="torn now"), pair.mine.step():
            raise AssertionError("two steps at once")
    pair.both_step()


def test_a_session_ends_also_where_a_step_was_not_ended() -> None:
    """The engine leaves both blocks; the first one's end was interrupted."""
    pair = Pair(Launch.INLINE)
    try:
        with meanwhile(lambda: empty_step(pair.peer)), pytest.raises(Stop), pair.mine:  # noqa: SIM117
            with interrupted_at(Step.__exit__), pair.mine.step():
                pass
        until(lambda: pair.group.status(0).engine_pid == 0, "the seat was given back")
    finally:
        pair.close()


def test_a_handler_that_raises_while_a_rank_is_taken_gives_it_back() -> None:
    config_ = config(Launch.INLINE)
    with LocalGroup(geometry_struct(config_)) as group:
        with interrupted_at(abi.check), pytest.raises(Stop):
            NativeHandle(group.socket_path, group.ticket(0), 60_000)
        assert group.status(0).engine_pid == 0


def test_an_error_in_a_step_of_a_rank_that_is_over_is_followed_by_why() -> None:
    """Nothing of that step can be told to anybody, but it has ended."""
    pair = Pair(Launch.SERVICE)
    entered = threading.Event()

    def peer_steps() -> None:
        with pair.peer.step():
            entered.set()

    def kill_worker() -> None:
        assert entered.wait(60.0)  # else the peer would find a dead member at the barrier
        pair.group.signal_worker(0, signal.SIGKILL)
        until(lambda: pair.group.status(0).fenced, "its daemon has seen it")
        raise ZeroDivisionError

    try:
        with meanwhile(peer_steps), pytest.raises(ZeroDivisionError), pair.mine.step():
            kill_worker()
        with pytest.raises(Fenced, match="worker process died"), pair.mine.step():
            raise AssertionError("a step without a worker")
    finally:
        pair.close()
