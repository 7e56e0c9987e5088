"""Signals that come while an engine waits in native code: their handlers run at once, and the wait
goes on as if nothing had been, or is given up in order."""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import pytest

from elasticep.client.compiled import Operators
from elasticep.client.handle import NativeHandle
from elasticep.client.session import Session
from elasticep.client.step import Step
from elasticep.errors import Fenced, NativeError, StepTimeout, UsageError
from elasticep.geometry import GroupGeometry
from elasticep.group import GroupConfig, Launch
from elasticep.native import abi
from elasticep.native.convert import geometry_struct
from elasticep.spec import ExchangeSpec
from elasticep.testing import processes, small
from elasticep.testing.clients import attach_to, on_all
from elasticep.testing.local_group import LocalGroup, spread
from elasticep.testing.raw import RawSession
from elasticep.testing.small import until

torch = pytest.importorskip("torch")

HIDDEN, TOPK, EXPERTS, TOKENS = 16, 2, 4, 3
SOON_S: Final = 20.0
"""Far below every deadline of the group, and far above what a busy machine takes."""
AT_BARRIER, IN_DISPATCH, IN_COMBINE = (
    int(phase) for phase in (abi.WaitPhase.BARRIER, abi.WaitPhase.DISPATCH, abi.WaitPhase.COMBINE)
)


def config(launch: Launch) -> GroupConfig:
    spec = ExchangeSpec.preset(
        "ROUTED", dispatch_dtype="fp32", combine_dtype="fp32", max_tokens=TOKENS
    )
    sizes = GroupGeometry(
        layers=1, experts=EXPERTS, topk=TOPK, hidden=HIDDEN, slots_per_rank=EXPERTS, max_ranks=2
    )
    return GroupConfig(
        name="signals",
        geometry=sizes,
        exchanges=(("decode", spec),),
        initial_ranks=2,
        launch=launch,
    )


class Pair:
    """Rank 0, which gets the signals, and its peer in a thread."""

    def __init__(self, launch: Launch) -> None:
        self.config = config(launch)
        self.group = LocalGroup(geometry_struct(self.config))
        self.mine, self.peer = (attach_to(self.group, self.config, rank) for rank in range(2))
        self.group.stage(1, 0, range(2), spread(self.group.geometry, range(2)))

    def close(self) -> None:
        on_all([self.mine, self.peer], Session.detach)
        self.group.close()

    def step(self, session: Session, before: Callable[[str], None] = lambda half: None) -> bool:
        """A step whose experts pass their rows on; True if it is complete, and right."""
        exchange = session.exchange("decode")
        x = torch.full((TOKENS, HIDDEN), float(session.rank + 1))
        ids = torch.tensor([[0, 3]] * TOKENS)
        with session.step(TOKENS) as step:
            before("dispatch")
            recv = exchange.dispatch(0, x, ids, torch.full((TOKENS, TOPK), 0.5))
            recv.out[:] = recv.rows * recv.weights.sum(1, keepdim=True)
            before("combine")
            out = exchange.combine(0, recv)
        return bool(step.complete) and bool((out == x).all())

    def both_step(self) -> None:
        assert on_all([self.mine, self.peer], self.step) == [True, True]


@pytest.fixture(scope="module", params=[Launch.SERVICE, Launch.INLINE])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    opened = Pair(request.param)
    yield opened
    opened.close()


class Stop(Exception):
    """What a handler raises."""


@contextmanager
def handled(handler: Callable[[], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR2, lambda number, frame: handler())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR2, before)


def stop() -> None:
    raise Stop


@contextmanager
def meanwhile(work: Callable[[], Any]) -> Iterator[None]:
    """`work` in a thread; what it raises is raised after the block."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(60.0)
    assert not thread.is_alive()
    if failed:
        raise failed[0]


def interrupt_at(pair: Pair, phase: int) -> None:
    """Send rank 0's process a signal while rank 0 waits for its peer."""
    until(lambda: pair.group.status(0).wait_phase == phase, "rank 0 waits")
    os.kill(os.getpid(), signal.SIGUSR2)


def ran(seen: list[int], count: int) -> None:
    until(lambda: len(seen) >= count, "the handler ran")


def test_a_handler_that_raises_ends_the_wait_at_a_barrier(pair: Pair) -> None:
    """As if the barrier had timed out: the next step goes on waiting at it."""
    began = time.monotonic()
    with handled(stop), meanwhile(lambda: interrupt_at(pair, AT_BARRIER)):  # noqa: SIM117
        with pytest.raises(Stop) as caught, pair.mine.step():
            raise AssertionError("the barrier was passed alone")
    assert time.monotonic() - began < SOON_S
    assert not hasattr(caught.value, "__notes__")
    until(lambda: pair.group.status(0).wait_phase == 0, "nobody waits")
    pair.both_step()


def test_a_handler_that_returns_leaves_the_barrier_as_it_was(pair: Pair) -> None:
    """It has run before the peer comes, many times."""
    seen: list[int] = []
    torn = pair.mine.status().torn_steps

    def signals_then_step() -> None:
        for count in range(1, 6):
            interrupt_at(pair, AT_BARRIER)
            ran(seen, count)
        assert pair.step(pair.peer)

    with handled(lambda: seen.append(1)), meanwhile(signals_then_step):
        assert pair.step(pair.mine)
    assert len(seen) == 5
    assert pair.mine.status().torn_steps == torn


def test_signals_do_not_put_a_deadline_off(pair: Pair) -> None:
    """One every 10 ms, while a barrier has 500."""
    seen: list[int] = []
    over = threading.Event()

    def keep_on() -> None:
        while not over.wait(0.01):
            os.kill(os.getpid(), signal.SIGUSR2)

    began = time.monotonic()
    with handled(lambda: seen.append(1)), meanwhile(keep_on):
        try:
            with pytest.raises(StepTimeout), pair.mine.step(timeout=0.5):
                raise AssertionError("the barrier was passed alone")
        finally:
            over.set()
    assert 0.4 < time.monotonic() - began < SOON_S
    assert len(seen) > 3
    pair.both_step()


@pytest.mark.parametrize(("half", "phase"), [("dispatch", IN_DISPATCH), ("combine", IN_COMBINE)])
def test_a_handler_that_raises_in_an_exchange_tears_the_step_for_all(
    pair: Pair, half: str, phase: int
) -> None:
    """The peer hears of it at once, and both repeat the step."""
    left = threading.Event()
    results: list[bool] = []

    def hold(now: str) -> None:
        if now == half:
            interrupt_at(pair, phase)
            assert left.wait(60.0)

    began = time.monotonic()
    with handled(stop), meanwhile(lambda: results.append(pair.step(pair.peer, hold))):
        with pytest.raises(Stop) as caught:
            pair.step(pair.mine)
        left.set()
    assert time.monotonic() - began < SOON_S
    assert results == [False]
    assert not hasattr(caught.value, "__notes__")
    assert pair.group.status(0).wait_phase == 0
    pair.both_step()


@pytest.mark.parametrize(("half", "phase"), [("dispatch", IN_DISPATCH), ("combine", IN_COMBINE)])
def test_a_handler_that_returns_leaves_the_exchange_as_it_was(
    pair: Pair, half: str, phase: int
) -> None:
    """The same exchange goes on and gives what it must."""
    seen: list[int] = []
    results: list[bool] = []
    torn = [session.status().torn_steps for session in (pair.mine, pair.peer)]

    def hold(now: str) -> None:
        for count in range(1, 4 if now == half else 1):
            interrupt_at(pair, phase)
            ran(seen, count)

    with (
        handled(lambda: seen.append(1)),
        meanwhile(lambda: results.append(pair.step(pair.peer, hold))),
    ):
        results.append(pair.step(pair.mine))
    assert results == [True, True]
    assert len(seen) == 3
    assert [session.status().torn_steps for session in (pair.mine, pair.peer)] == torn


def test_a_step_does_not_count_whose_combine_was_given_up(pair: Pair) -> None:
    """The engine swallows what its handler raised, and never saw the result."""
    results: list[bool] = []

    def hold(now: str) -> None:
        if now == "combine":
            interrupt_at(pair, IN_COMBINE)

    exchange = pair.mine.exchange("decode")
    x = torch.ones((TOKENS, HIDDEN))
    with handled(stop), meanwhile(lambda: results.append(pair.step(pair.peer, hold))):
        with pair.mine.step(TOKENS) as step:
            ids = torch.tensor([[0, 3]] * TOKENS)
            recv = exchange.dispatch(0, x, ids, torch.full((TOKENS, TOPK), 0.5))
            recv.out[:] = recv.rows
            with pytest.raises(Stop):
                exchange.combine(0, recv)
            until(lambda: bool(results), "the peer has all it waits for")
        assert not step.complete
    pair.both_step()


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


def compiled(pair: Pair) -> Callable[[Any, Any, Any], Any]:
    """The exchange of rank 0 as one graph, whose experts pass their rows on."""
    exchange = pair.mine.exchange("decode")

    def model(x: Any, ids: Any, weights: Any) -> Any:
        recv = exchange.dispatch(0, x, ids, weights)
        recv.out.copy_(recv.rows * recv.weights.sum(1, keepdim=True))
        return exchange.combine(0, recv)

    pair.both_step()  # the tensors come with it
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="outside a step"):
        whole(*BATCH)
    return whole


def swallow(model: Callable[[Any, Any, Any], Any]) -> None:
    """An engine that takes errors in, and has another one when it goes on."""
    with pytest.raises(RuntimeError, match="a handler of a signal raised"):
        model(*BATCH)
    with pytest.raises(RuntimeError):
        model(*BATCH)


BATCH: Final = (
    torch.ones((TOKENS, HIDDEN)),
    torch.tensor([[0, 3]] * TOKENS),
    torch.full((TOKENS, TOPK), 0.5),
)


@pytest.mark.parametrize(("half", "phase"), [("dispatch", IN_DISPATCH), ("combine", IN_COMBINE)])
def test_a_handler_that_raises_in_a_compiled_exchange_tears_the_step_for_all(
    pair: Pair, half: str, phase: int
) -> None:
    model, left = compiled(pair), threading.Event()
    results: list[bool] = []

    def hold(now: str) -> None:
        if now == half:
            interrupt_at(pair, phase)
            assert left.wait(60.0)

    for swallows in (False, True):
        left.clear()
        results.clear()
        began = time.monotonic()
        with handled(stop), meanwhile(lambda: results.append(pair.step(pair.peer, hold))):
            try:
                with pytest.raises(Stop) as caught, pair.mine.step(TOKENS):
                    swallow(model) if swallows else model(*BATCH)
            finally:
                left.set()
        assert time.monotonic() - began < SOON_S
        assert results == [False]
        assert not hasattr(caught.value, "__notes__")
        assert any(
            frame.name == "stop" for frame in traceback.extract_tb(caught.value.__traceback__)
        )
    pair.both_step()


@pytest.mark.parametrize(("half", "phase"), [("dispatch", IN_DISPATCH), ("combine", IN_COMBINE)])
def test_a_handler_that_returns_leaves_a_compiled_exchange_as_it_was(
    pair: Pair, half: str, phase: int
) -> None:
    model = compiled(pair)
    seen: list[int] = []
    results: list[bool] = []
    torn = [session.status().torn_steps for session in (pair.mine, pair.peer)]

    def hold(now: str) -> None:
        for count in range(1, 4 if now == half else 1):
            interrupt_at(pair, phase)
            ran(seen, count)  # while the operator waits

    with (
        handled(lambda: seen.append(1)),
        meanwhile(lambda: results.append(pair.step(pair.peer, hold))),
    ):
        with pair.mine.step(TOKENS) as step:
            out = model(*BATCH)
        results.append(bool(step.complete) and torch.equal(out, BATCH[0]))
    assert results == [True, True]
    assert len(seen) == 3
    assert [session.status().torn_steps for session in (pair.mine, pair.peer)] == torn


def test_a_worker_that_answers_nothing_is_given_up_in_its_time() -> None:
    """However often the wait for it came back for signals."""
    pair = Pair(Launch.SERVICE)
    try:
        processes.stop(pair.group.worker_pid(0))
        began = time.monotonic()
        with pytest.raises(Fenced, match="did not answer"), pair.mine.step(timeout=0.2):
            raise AssertionError("the barrier was passed without a worker")
        assert time.monotonic() - began < SOON_S
    finally:
        pair.group.signal_worker(0, signal.SIGCONT)
        pair.close()


@pytest.mark.parametrize("launch", list(abi.Launch))
def test_natively_a_step_with_a_call_that_was_not_called_again_is_torn(launch: int) -> None:
    """Whatever was to come of it came meanwhile: nobody has it."""
    g = small.geometry(2, small.exchange(), launch=launch)
    with LocalGroup(g) as group, ThreadPoolExecutor(2) as threads:
        mine, peer = sessions = [group.session(rank) for rank in range(2)]
        group.stage(1, 0, [0, 1], spread(g, [0, 1]))
        x = np.ones((1, small.HIDDEN), np.float32)
        ids = np.arange(small.TOPK)[None, :]
        weights = np.ones((1, small.TOPK), np.float32)

        def send(session: RawSession) -> None:
            session.begin()
            session.dispatch(0, 0, x, ids, weights).out[:] = 0

        list(threads.map(send, sessions))
        abi.check(abi.api().ep_session_interrupts(mine._handle, 1), "")
        with pytest.raises(NativeError, match="interrupted by a signal"):
            mine.combine(0, 1)  # also without a signal, after 50 ms
        peer.combine(0, 1)
        ready = abi.WaitPhase.NONE
        if launch == abi.Launch.SERVICE:  # the worker has gone on
            until(lambda: group.status(0).wait_phase == ready, "the sums are there")
        assert not mine.end()
        assert group.status(0).wait_phase == ready
        for session in sessions:
            session.close()
