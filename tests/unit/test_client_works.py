"""Coupled ranks: results come out once, in order, and only after a barrier settled them."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from elasticep.client.session import Session, Step
from elasticep.errors import StepTimeout, UsageError
from elasticep.geometry import GroupGeometry
from elasticep.group import Completion, GroupConfig
from elasticep.native import abi
from elasticep.spec import ExchangeSpec


class Script:
    """Barriers that say (work, settled), and steps that end complete or torn."""

    def __init__(self, steps: list[tuple[int, int, bool]]) -> None:
        self.steps: deque[tuple[int, int, bool] | StepTimeout] = deque(steps)
        self.announced: list[int] = []
        self.complete = False

    def step_begin(self, tokens: int, timeout_ms: int) -> abi.StepInfo:
        self.announced.append(tokens)
        said = self.steps.popleft()
        if isinstance(said, StepTimeout):
            raise said
        work, settled, self.complete = said
        return abi.StepInfo(epoch=1, step=1, work=work, settled=settled)

    def step_end(self) -> bool:
        return self.complete

    def step_tear(self) -> None: ...

    def slots(self, epoch: int, shape: tuple[int, ...]) -> Any:
        return np.zeros(shape, np.int32)

    def close(self) -> None: ...


def session(script: Script, completion: Completion) -> Session:
    config = GroupConfig(
        name="coupled",
        geometry=GroupGeometry(
            layers=1, experts=2, topk=1, hidden=8, slots_per_rank=1, max_ranks=2
        ),
        exchanges=(("decode", ExchangeSpec.preset("ROUTED")),),
        initial_ranks=2,
        completion=completion,
    )
    return Session(script, config, rank=0, incarnation=1)  # type: ignore[arg-type]


def run(steps: list[tuple[int, int, bool]], last: int) -> tuple[list[int], list[str]]:
    log: list[str] = []

    def forward(step: Step, batch: int) -> int:
        log.append(f"run {batch}")
        return batch * 10

    works: Iterator[tuple[int, int]] = session(Script(steps), Completion.AGREED).works(
        forward,
        lambda work: work if work <= last else None,
        undo=lambda work: log.append(f"undo {work}"),
    )
    return [result for _, result in works], log


def test_a_result_comes_out_after_the_next_barrier_settled_it() -> None:
    assert run([(1, 0, True), (2, 1, True), (3, 2, True)], 2) == ([10, 20], ["run 1", "run 2"])


def test_a_torn_work_is_run_again() -> None:
    steps = [(1, 0, False), (1, 0, True), (2, 1, True)]
    assert run(steps, 1) == ([10], ["run 1", "run 1"])


def test_a_work_that_another_rank_did_not_complete_is_undone_and_repeated() -> None:
    steps = [(1, 0, True), (1, 0, True), (2, 1, True)]
    assert run(steps, 1) == ([10], ["run 1", "undo 1", "run 1"])


def test_what_the_next_work_and_one_to_repeat_bring_is_announced() -> None:
    script = Script([(1, 0, False), (1, 0, True), (2, 1, True), (3, 2, True)])
    coupled = session(script, Completion.AGREED)
    works = coupled.works(
        lambda step, batch: batch,
        lambda work: work if work <= 2 else None,
        tokens=lambda work: {1: 7, 2: 1}.get(work, 0),
        prompt=lambda work: work == 1,
    )
    assert [work for work, _ in works] == [1, 2]
    # Work 1 twice; then work 2, while 1 may still come back; then nothing, while 2 may.
    prefill = abi.TOKENS_PROMPT
    assert script.announced == [7 | prefill, 7 | prefill, 7 | prefill, 1]


def test_a_result_survives_the_loop_that_computed_it() -> None:
    """The ranks agree on works, not on loops: one that ended early is gone on with."""
    script = Script([(1, 0, True), (2, 1, True), (3, 2, True), (4, 3, True), (5, 4, True)])
    coupled = session(script, Completion.AGREED)
    failing = {3}

    def forward(step: Step, batch: int) -> int:
        if batch in failing:
            failing.discard(batch)
            script.steps.appendleft((3, 2, True))  # it was torn, so it is run again
            raise ZeroDivisionError
        return batch * 10

    def works() -> Iterator[tuple[int, int]]:
        return coupled.works(forward, lambda work: work if work <= 4 else None)

    for work in works():
        assert work == (1, 10)
        break  # while 2 was complete here, and not settled yet
    with pytest.raises(ZeroDivisionError):
        next(works())
    script.steps.appendleft(StepTimeout("rank 1 did not come"))
    loop = works()
    assert next(loop) == (2, 20)
    with pytest.raises(StepTimeout):
        next(loop)
    assert list(works()) == [(3, 30), (4, 40)]


def test_local_completion_has_no_works() -> None:
    with pytest.raises(UsageError, match="completion = 'local'"):
        next(
            session(Script([]), Completion.LOCAL).works(
                lambda step, batch: batch, lambda work: work
            )
        )
