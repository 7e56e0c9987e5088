"""Replays of a captured step by a CUDA session, against a double of its handle."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from elasticep.errors import UsageError
from tests.unit.cuda_double import Handle, forward, patch, session_of

torch = pytest.importorskip("torch")


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    patch(monkeypatch)
    return session_of


def test_a_graph_is_replayed_until_it_is_complete(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = Handle()
    session = make(handle)
    run = forward(session)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with session.step(3) as captured:
        run(captured, None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.raises(UsageError, match="was captured"):
        _ = captured.epoch
    assert captured.complete is False
    handle.begun = handle.ended = 0  # a capture runs nothing
    handle.calls.clear()
    handle.complete = False

    def replay() -> None:
        handle.calls.append("graph")
        handle.begun += 1
        handle.ended += 1
        handle.complete = handle.begun == 3

    step = session.run_graph(SimpleNamespace(replay=replay), captured)
    assert (step.number, step.complete) == (3, True)
    assert handle.calls.count("graph") == 3
    assert step.token_ok.shape == (3,)


def test_a_replay_that_nobody_noted_is_not_taken_for_the_next(make: Callable[..., Any]) -> None:
    """A handler of a signal raised when it had been launched: the next one is the third."""
    handle = Handle()
    session = make(handle)

    def replay() -> None:
        handle.begun += 1
        handle.ended += 1

    def interrupted() -> None:
        replay()
        raise KeyboardInterrupt

    first = session.replay(SimpleNamespace(replay=replay))
    with pytest.raises(KeyboardInterrupt):
        session.replay(SimpleNamespace(replay=interrupted))
    with pytest.raises(UsageError, match="a later step has begun"):
        _ = first.complete  # it would be told what became of the second
    third = session.replay(SimpleNamespace(replay=replay))
    assert third.complete
    assert handle.calls.count("recount") == 1
    assert "wait ended 3" in handle.calls
    with pytest.raises(UsageError, match="a later step has begun"):
        _ = first.complete


def test_who_is_interrupted_while_counting_counts_again(make: Callable[..., Any]) -> None:
    handle = Handle()
    session = make(handle)
    handle.begun = handle.ended = 2  # of which nobody has noted any
    handle.unsure = True
    count = handle.recount

    def interrupted() -> int:
        count()
        raise KeyboardInterrupt

    handle.recount = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt), session.step(1):
        raise AssertionError("it did not raise")
    handle.recount = count  # type: ignore[method-assign]
    with session.step(1) as step:
        pass
    assert step.complete
    assert "wait ended 3" in handle.calls
