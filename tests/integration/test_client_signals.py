"""Signals that come while an engine waits in native code: their handlers run at once, and the wait
goes on as if nothing had been, or is given up in order."""

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import pytest

from elasticep.errors import Fenced, NativeError, StepTimeout
from elasticep.group import Launch
from elasticep.native import abi
from elasticep.testing import processes, small
from elasticep.testing.local_group import LocalGroup, spread
from elasticep.testing.raw import RawSession
from elasticep.testing.signalled import (
    AT_BARRIER,
    HIDDEN,
    IN_COMBINE,
    IN_DISPATCH,
    SOON_S,
    TOKENS,
    TOPK,
    Pair,
    Stop,
    handled,
    interrupt_at,
    meanwhile,
    ran,
    stop,
)
from elasticep.testing.small import until

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module", params=[Launch.SERVICE, Launch.INLINE])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    opened = Pair(request.param)
    yield opened
    opened.close()


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
