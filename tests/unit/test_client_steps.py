"""Steps and `Session.run`, against a double of the native session."""

import pytest

from elasticep.client.session import Session, Step
from elasticep.errors import (
    CapExceeded,
    ElasticEPError,
    ExpertsLost,
    Fenced,
    PlacementError,
    StepTimeout,
    StepTorn,
    UsageError,
)
from tests.unit.client_double import DoubleHandle, batch


def test_step_is_complete_only_after_its_end(session: Session) -> None:
    with session.step(2) as step:
        assert not step.complete
        assert (step.number, step.epoch, dict(step.members)) == (1, 1, {0: 1, 1: 3})
    assert step.complete


def test_torn_exchange_leaves_the_block_and_an_incomplete_step(
    session: Session, handle: DoubleHandle
) -> None:
    handle.fail("dispatch_send", StepTorn("rank 1 is dead"))
    handle.complete.append(False)
    exchange = session.exchange("decode")
    reached = []
    with session.step() as step:
        exchange.dispatch(0, *batch())
        reached.append("after")
    assert not step.complete
    assert reached == []
    assert handle.names[-1] == "step_end"
    assert "step_tear" not in handle.names


def test_a_signal_between_barrier_and_block_leaves_no_step_open(
    session: Session, handle: DoubleHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its handler runs when the barrier returns, which others have passed, too."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(handle, "slots", interrupted)
        with pytest.raises(KeyboardInterrupt), session.step():
            raise AssertionError("the block was entered")
    assert handle.names[-1] == "step_cancel"
    with session.step() as again:
        pass
    assert again.complete


def test_error_in_the_engine_tears_the_step_and_propagates(
    session: Session, handle: DoubleHandle
) -> None:
    with pytest.raises(ZeroDivisionError), session.step() as step:
        _ = 1 / 0
    assert handle.names[-2:] == ["step_tear", "step_end"]
    assert not step.complete
    with session.step() as again:
        pass
    assert again.complete


def test_engines_error_stays_the_one_raised_when_tearing_fails(
    session: Session, handle: DoubleHandle
) -> None:
    handle.fail("step_tear", Fenced(3, "left behind"))
    with pytest.raises(ZeroDivisionError) as caught, session.step():
        _ = 1 / 0
    assert any("left behind" in note for note in caught.value.__notes__)


def test_missing_combine_tears_the_step(session: Session, handle: DoubleHandle) -> None:
    exchange = session.exchange("decode")
    with pytest.raises(UsageError, match="no combine followed"), session.step():
        exchange.dispatch(0, *batch())
    assert handle.names[-2:] == ["step_tear", "step_end"]


def test_barrier_errors_leave_no_step_open(session: Session, handle: DoubleHandle) -> None:
    handle.fail("step_begin", StepTimeout("rank 1 did not come"))
    with pytest.raises(StepTimeout), session.step(timeout=0.25):
        pass
    assert handle.calls[0] == ("step_begin", 0, 250)
    with session.step() as step:
        pass
    assert step.complete


def test_timeouts_are_numbers_and_the_longest_fits(session: Session, handle: DoubleHandle) -> None:
    for timeout in (0.0, -1.0, float("nan")):
        with pytest.raises(UsageError, match="it must be positive, or None"):
            session.step(timeout=timeout)
    for timeout in (float("inf"), 5e6):
        with session.step(timeout=timeout):
            pass
        assert ("step_begin", 0, 4_000_000_000) in handle.calls
        handle.calls.clear()


def test_steps_do_not_nest_and_are_used_once(session: Session) -> None:
    step = session.step()
    with step, pytest.raises(UsageError, match="open already"), session.step():
        pass
    with pytest.raises(UsageError, match="entered before"), step:
        pass


def test_a_step_that_does_not_count_says_why(session: Session, handle: DoubleHandle) -> None:
    exchange = session.exchange("decode")
    handle.fail("dispatch_send", StepTorn("step 1 is torn: rank 1 is dead"))
    with session.step() as torn:
        exchange.dispatch(0, *batch())
    assert torn.why == "step 1 is torn: rank 1 is dead"
    handle.complete.extend([False, True])
    with session.step() as left:
        pass
    assert "another rank left it" in left.why
    with session.step() as complete:
        pass
    assert (complete.complete, complete.why) == (True, "")
    with pytest.raises(ZeroDivisionError), session.step() as failed:
        raise ZeroDivisionError("of the engine")
    assert failed.why == "ZeroDivisionError: of the engine"


@pytest.mark.parametrize("tokens", [-1, 129])
def test_step_refuses_more_tokens_than_any_exchange_takes(session: Session, tokens: int) -> None:
    with pytest.raises(CapExceeded, match=f"{tokens} tokens.*takes 0 to 128"):
        session.step(tokens)


# ---- run


def test_run_repeats_with_the_same_batch_until_complete(
    session: Session, handle: DoubleHandle
) -> None:
    handle.complete.extend([False, False, True])
    seen: list[tuple[int, str]] = []
    torn: list[int] = []

    def forward(step: Step, words: str) -> str:
        seen.append((step.number, words))
        return f"{words} {step.number}"

    result = session.run(forward, "batch", tokens=2, on_torn=lambda step: torn.append(step.number))
    assert result == "batch 3"
    assert seen == [(1, "batch"), (2, "batch"), (3, "batch")]
    assert torn == [1, 2]


def test_run_repeats_when_the_forward_pass_was_cut_short(
    session: Session, handle: DoubleHandle
) -> None:
    handle.fail("dispatch_send", StepTorn("torn"), None)
    handle.complete.extend([False, True])
    exchange = session.exchange("decode")

    def forward(step: Step, _: None) -> int:
        exchange.combine(1, exchange.dispatch(1, *batch()))
        return step.number

    assert session.run(forward, None) == 2


@pytest.mark.parametrize("error", [Fenced(4, "hung"), StepTimeout("nobody came")])
def test_run_raises_what_a_repeat_cannot_mend(
    session: Session, handle: DoubleHandle, error: ElasticEPError
) -> None:
    handle.complete.append(False)
    handle.fail("step_begin", None, error)
    with pytest.raises(type(error)):
        session.run(lambda step, _: None, None)


def test_lost_experts_are_named(session: Session, handle: DoubleHandle) -> None:
    handle.placement[1, 1, 0] = -1  # expert 1 of layer 1
    handle.fail("dispatch_send", PlacementError("token 0 needs an expert"))
    exchange = session.exchange("decode")

    def forward(step: Step, _: None) -> None:
        exchange.dispatch(1, *batch())

    with pytest.raises(ExpertsLost, match="layer 1 expert 1") as caught:
        session.run(forward, None)
    assert caught.value.lost == ((1, 1),)
    assert handle.names[-2:] == ["step_tear", "step_end"]
