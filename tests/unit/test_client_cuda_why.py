"""Why a step on a GPU does not count: its words and its errors, by what its kernels left behind."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from elasticep.errors import (
    CapExceeded,
    DeviceFailed,
    ExpertsLost,
    TensorError,
    UsageError,
)
from elasticep.native.cuda_structs import StepStatus, Why
from tests.unit.cuda_double import Handle, forward, patch, session_of

pytest.importorskip("torch")


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    patch(monkeypatch)
    return session_of


@pytest.mark.parametrize(
    ("why", "error", "words"),
    [
        (Why.ROOM, CapExceeded, "slot 3 gets 7 rows and has room for 6"),
        (Why.LOST, ExpertsLost, "expert"),
        (Why.IDS, TensorError, "names expert 9"),
        (Why.DISAGREE, UsageError, "another layer"),
        (Why.SEQUENCE, UsageError, "at most 4,095 exchanges"),
        (Why.SCALES, TensorError, "a scale of token 7"),
    ],
)
def test_what_no_repeat_can_mend_is_raised(
    make: Callable[..., Any], why: Why, error: type[Exception], words: str
) -> None:
    handle = Handle()
    handle.complete, handle.fault = False, why
    session = make(handle)
    torn: list[Any] = []
    with pytest.raises(error, match=words) as raised:
        session.run(forward(session), None, tokens=3, on_torn=torn.append)
    assert torn == []
    with session.step() as step:
        pass
    assert step.why == f"{error.__name__}: {raised.value}"  # asked before `complete` raises
    with pytest.raises(error, match=words):
        _ = step.complete
    handle.fault = Why.PEER_LEFT  # that a repeat can mend
    with session.step() as step:
        pass
    assert step.complete is False


@pytest.mark.parametrize(
    ("why", "words"),
    [
        (Why.PASSED_BY, "rank 0 went on to a later step or disagrees on the exchange{}"),
        (Why.PEER_LEFT, "rank 0 left step 1{}"),
        (Why.PEER_DEAD, "rank 0 incarnation 1 is dead{}"),
        (Why.FENCED, "this rank was fenced{}"),
        (Why.TIMEOUT, "rank 0 did not answer within 10000 ms{}"),
        (Why.ENDED, "rank 0 ended step 1 without this exchange{}"),
        (Why.ENGINE, "the engine tore it, or ended it inside an exchange"),
        (Why.NONE, "a rank left it before its end"),
    ],
)
def test_a_step_says_why_it_does_not_count(make: Callable[..., Any], why: Why, words: str) -> None:
    handle = Handle()
    handle.complete, handle.fault = False, why
    session = make(handle)
    with session.step() as step:
        assert step.why == ""
    reason = words.format(" (in the combine of exchange 'decode')")
    assert step.why == f"step 1 is torn: {reason}; it must be repeated"
    assert handle.calls.count("wait ended 1") == 1
    assert not step.complete
    assert handle.calls.count("wait ended 1") == 1
    handle.complete = True
    with session.step() as step:
        pass
    assert step.why == ""
    assert step.complete

    def replay() -> None:
        handle.begin(0, 0)
        handle.step_end()

    step = session.replay(SimpleNamespace(replay=replay))
    handle.complete = False
    assert "step 3 is torn" in step.why


def test_why_nothing_ran(make: Callable[..., Any]) -> None:
    handle = Handle()
    session = make(handle)
    said = {}
    handle.fault = Why.TIMEOUT
    for status in (StepStatus.DOOMED, StepStatus.TIMEOUT, StepStatus.EXPELLED, StepStatus.NO_VIEW):
        handle.status = status
        with session.step() as step:
            pass
        said[status] = step.why
    assert "step 1 did not run: rank 0 incarnation 1 is dead" in said[StepStatus.DOOMED]
    assert said[StepStatus.TIMEOUT].startswith("StepTimeout: step barrier: rank 0 did not reach ba")
    assert "went on without it" in said[StepStatus.EXPELLED]
    assert "rank 0 incarnation 1 has been given no view" in said[StepStatus.NO_VIEW]
    handle.epoch, handle.status = 0, StepStatus.TIMEOUT
    with session.step() as step:
        pass
    assert "no view with rank 0 incarnation 1 was adopted in time" in step.why
    handle.epoch, handle.status, handle.broken = 1, StepStatus.RUN, True
    with session.step() as first:
        pass
    with pytest.raises(DeviceFailed):
        _ = first.why
    handle.broken = False
    with session.step():
        pass
    with pytest.raises(UsageError, match="a later step has begun"):
        _ = first.why
