"""How the demo judges the steps that are made while experts move."""

from typing import Any

import pytest

from elasticep.demo.balance import Balance, _Phase
from elasticep.demo.report import Report


def figures(
    before: list[float], moving: list[float], asked: list[float] | None = None
) -> dict[str, Any]:
    """Two ranks step; a step takes so many ms before, while the command starts, and while experts
    move."""
    balance = Balance()
    at_ns = 0
    phases = (
        (_Phase.BEFORE, [1.0, *before]),
        (_Phase.ASKED, asked or [10.0]),
        (_Phase.MOVING, moving),
        (_Phase.AFTER, [10.0]),
    )
    for phase, times in phases:
        balance._phase = phase
        for ms in times:
            at_ns += int(ms * 1e6)
            for rank in (0, 1):
                balance.step(rank, at_ns)
    return balance.details()


@pytest.mark.parametrize(
    ("before", "moving", "waited"),
    [
        ([10.0] * 20, [10.0, 29.0, 12.0], False),
        ([10.0] * 20, [10.0, 31.0, 12.0], True),  # one step that waits for weights
        ([10.0] * 20, [31.0] * 50, True),  # all of them do: their median says nothing
        ([10.0] * 19 + [80.0], [10.0, 110.0], False),  # a busy machine
        ([10.0] * 19 + [80.0], [10.0, 130.0], True),
        ([10.0] * 20, [], True),  # none was watched
    ],
)
def test_no_step_takes_three_times_what_it_takes_otherwise(
    before: list[float], moving: list[float], waited: bool
) -> None:
    found = figures(before, moving)
    assert found["steps_waited"] is waited
    assert found["step_ms_usual"] == 10.0
    assert found["step_ms_limit"] == (120.0 if 80.0 in before else 30.0)


def test_what_the_command_costs_as_it_starts_is_no_wait() -> None:
    assert figures([10.0] * 20, [50.0], asked=[40.0])["steps_waited"] is False
    assert figures([10.0] * 20, [70.0], asked=[40.0])["steps_waited"] is True


@pytest.mark.parametrize("waited", [True, False])
def test_a_run_whose_steps_waited_for_weights_is_not_good(waited: bool) -> None:
    found = figures([10.0] * 20, [40.0 if waited else 12.0])
    moved = {"imbalance_before": 1.9, "imbalance_planned": 1.0, "imbalance_after": 1.1}
    report = Report(
        ranks=2,
        nodes=1,
        killed="none",
        detect_ms=None,
        recover_ms=None,
        steps_repeated=0,
        tokens_total=1,
        tokens_identical=True,
        requests_lost=0,
        epochs=[1, 2],
        details={"rebalance": found | moved},
    )
    assert report.good is not waited
    told = dict(report.rows())["steps meanwhile"]
    assert ("TOO LONG" in told) is waited
    assert "before: 10.0 ms" in told
