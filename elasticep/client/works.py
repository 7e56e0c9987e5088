"""Numbered works of coupled ranks: a result is given out once all of them have it."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from elasticep.client.session import Session
    from elasticep.client.step import Step

_Batch = TypeVar("_Batch")
_Result = TypeVar("_Result")


def settled_works(
    session: "Session",
    forward: Callable[["Step", _Batch], _Result],
    batch_of: Callable[[int], _Batch | None],
    tokens: Callable[[int], int],
    prompt: Callable[[int], bool],
    undo: Callable[[int], None],
) -> Iterator[tuple[int, _Result]]:
    """The loop of `Session.works`, which says what each argument is."""
    pending: tuple[int, _Result] | None = None
    expected = 1
    while True:
        ahead = {expected, pending[0] if pending else expected}
        step = session.step(max(map(tokens, ahead)), prompt=any(map(prompt, ahead)))
        result: list[_Result] = []
        settled: tuple[int, _Result] | None = None
        batch: _Batch | None = None
        with step:
            if pending is not None:
                if pending[0] <= step.settled:
                    settled = pending
                else:
                    undo(pending[0])
                pending = None
            expected = step.work
            batch = batch_of(expected)
            if batch is not None:
                result.append(forward(step, batch))
        expected += step.complete
        if step.complete and result:
            pending = (step.work, result[0])
        if settled is not None:
            yield settled
        if batch is None and pending is None and step.complete:
            return
