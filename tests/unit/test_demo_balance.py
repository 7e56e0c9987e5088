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


def test_the_step_that_a_kill_tears_is_the_recovery_and_no_wait_for_weights() -> None:
    balance = Balance()
    for at_ms in range(10, 210, 10):
        for rank in (0, 1, 2):
            balance.step(rank, at_ms * 1_000_000)
    balance._phase = _Phase.MOVING
    balance.member_killed(2, 205_000_000)
    for at_ms in (500, 512, 523):
        for rank in (0, 1):
            balance.step(rank, at_ms * 1_000_000)
    found = balance.details()
    assert found["step_ms_recovery"] == 300.0
    assert found["step_ms_longest"] == 12.0
    assert found["steps_watched"] == 4
    assert not found["steps_waited"]


@pytest.mark.parametrize(
    ("wrong", "good"),
    [
        ({}, True),
        ({"in_flight": False}, False),
        ({"done": False}, False),
        ({"requests_unfinished": 0}, False),
    ],
)
def test_a_kill_that_was_to_hit_a_migration_has_to(wrong: dict[str, Any], good: bool) -> None:
    moved = figures([10.0] * 20, [12.0]) | {"done": True, "requests_unfinished": 3}
    moved |= {"imbalance_before": 1.9, "imbalance_planned": 1.0, "imbalance_after": 1.1}
    killed = {"in_flight": True, "copies_made": 2, "copies_asked": 9, "copied_after": {}}
    killed |= {"layer": 1, "expert": 5, "source": 0, "target": 2}
    for key, value in wrong.items():
        (killed if key in killed else moved)[key] = value
    report = Report(
        ranks=3,
        nodes=1,
        killed="worker",
        detect_ms=1.0,
        recover_ms=2.0,
        steps_repeated=1,
        tokens_total=1,
        tokens_identical=True,
        requests_lost=0,
        epochs=[1, 3],
        details={"rebalance": moved, "migration": killed},
    )
    assert report.good is good
    told = dict(report.rows())["killed in mid-migration"]
    assert told.startswith("NO" if "in_flight" in wrong else "yes: 2 of 9 copies made, layer 1")


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
