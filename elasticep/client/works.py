"""Numbered works of coupled ranks: a result is given out once all of them have it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from elasticep.client.session import Session
    from elasticep.client.step import Step

_Batch = TypeVar("_Batch")
_Result = TypeVar("_Result")


@dataclass(slots=True)
class Held:
    """What a session's works left: the ranks go on after a loop that an error or a `break` ended.

    Attributes:
        expected: the work that comes next if all goes well.
        pending: a work and its result, complete here; the next barrier says whether everywhere.
        settled: one that is, and was not given out yet.
    """

    expected: int = 1
    pending: tuple[int, Any] | None = None
    settled: tuple[int, Any] | None = None

    def judge(self, settled: int, undo: Callable[[int], None]) -> None:
        """What a barrier said: the last work that is complete on all ranks."""
        if self.pending is None:
            return
        if self.pending[0] <= settled:
            self.settled = self.pending
        else:
            undo(self.pending[0])
        self.pending = None

    def given_out(self) -> Iterator[tuple[int, Any]]:
        """What is settled, once."""
        if self.settled is not None:
            given, self.settled = self.settled, None
            yield given


def settled_works(
    session: "Session",
    held: Held,
    forward: Callable[["Step", _Batch], _Result],
    batch_of: Callable[[int], _Batch | None],
    tokens: Callable[[int], int],
    prompt: Callable[[int], bool],
    undo: Callable[[int], None],
) -> Iterator[tuple[int, _Result]]:
    """The loop of `Session.works`, which says what each argument is; `held` is the session's."""
    yield from held.given_out()
    while True:
        ahead = {held.expected, held.pending[0] if held.pending else held.expected}
        step = session.step(max(map(tokens, ahead)), prompt=any(map(prompt, ahead)))
        result: list[_Result] = []
        batch: _Batch | None = None
        with step:
            held.judge(step.settled, undo)
            held.expected = step.work
            batch = batch_of(held.expected)
            if batch is not None:
                result.append(forward(step, batch))
        held.expected += step.complete
        if step.complete and result:
            held.pending = (step.work, result[0])
        last = batch is None and held.pending is None and step.complete
        yield from held.given_out()
        if last:
            return
