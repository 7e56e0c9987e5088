"""Reports of what ranks counted, added up: who is believed, and what fades when."""

import numpy as np
import pytest

from elasticep.control import events as ev
from elasticep.control.loads import GroupLoads
from elasticep.errors import UsageError
from elasticep.testing.balanced import Balanced


def loads() -> GroupLoads:
    return GroupLoads(2, 4, 1_000, 0)


def report(group: GroupLoads, rows: list[list[int]], *, first: int = 0, **changes: int) -> int:
    given = {"rank": 0, "incarnation": 1, "memory": 5} | changes
    counters = np.array(rows, "<i8").tobytes()
    return group.report("a", given["rank"], given["incarnation"], given["memory"], first, counters)


def test_what_a_rank_counted_before_this_leader_is_past_and_no_burst() -> None:
    group = loads()
    assert report(group, [[10**9] * 4] * 2) == 0
    assert report(group, [[10**9 + 1] * 4] * 2) == 8
    assert group.window.loads().tolist() == [[1] * 4] * 2


def test_a_new_incarnation_on_the_same_memory_goes_on_where_the_last_one_stopped() -> None:
    group = loads()
    report(group, [[0] * 4] * 2)
    report(group, [[100] * 4] * 2)
    assert report(group, [[103] * 4] * 2, incarnation=2) == 24
    assert report(group, [[50] * 4] * 2, incarnation=3, memory=6) == 0, "another memory"
    assert report(group, [[51] * 4] * 2, incarnation=3, memory=6) == 8


def test_layers_may_come_one_by_one() -> None:
    group = loads()
    report(group, [[7] * 4], first=0)
    report(group, [[9] * 4], first=1)
    assert report(group, [[10, 9, 9, 9]], first=1) == 1
    assert group.window.loads().tolist() == [[0] * 4, [1, 0, 0, 0]]


def test_case_13_the_load_is_the_sum_over_all_ranks() -> None:
    group = loads()
    for rank in range(5):
        report(group, [[0] * 4] * 2, rank=rank)
        report(group, [[rank, 1, 2, 3]] * 2, rank=rank)
    assert group.window.loads().tolist() == [[10, 5, 10, 15]] * 2
    assert group.counted == 80


@pytest.mark.parametrize(
    ("rows", "first", "what"),
    [
        ([[1, 2, 3]], 0, "24 bytes"),
        ([[1] * 4], 2, "from layer 2"),
        ([[1] * 4] * 3, 0, "96 bytes"),
        ([[-1] * 4] * 2, 0, "went back"),
        ([[2**40] * 4] * 2, 0, "grew by more"),
    ],
)
def test_reports_that_make_no_sense_are_refused_and_leave_no_trace(
    rows: list[list[int]], first: int, what: str
) -> None:
    group = loads()
    report(group, [[0] * 4] * 2)
    report(group, [[3] * 4] * 2)
    with pytest.raises(UsageError, match=what):
        report(group, rows, first=first)
    assert group.window.loads().tolist() == [[3] * 4] * 2


def test_a_counter_that_went_back_begins_anew_with_the_next_report() -> None:
    group = loads()
    report(group, [[9] * 4] * 2)
    with pytest.raises(UsageError, match="went back"):
        report(group, [[1] * 4] * 2)
    assert report(group, [[2] * 4] * 2) == 0
    assert report(group, [[3] * 4] * 2) == 8


def test_windows_fade_by_what_is_counted_in_them() -> None:
    group = loads()
    report(group, [[0] * 4] * 2)
    report(group, [[1000] * 4] * 2)
    assert not group.tick(999)
    assert group.tick(1_000)
    assert not group.tick(1_500)
    before = group.window.loads()
    assert group.tick(10**9)
    assert (group.window.loads() == before).all(), "an idle group keeps what it knows"
    assert group.rolls == 1
    for window in range(4):
        report(group, [[1001 + window] * 4] * 2)
        assert group.tick(10**9 + 1_000 * (window + 1))
    left = int(group.window.loads().sum()) - 4 * 8
    assert abs(left / int(before.sum()) - 0.5) < 0.01, "half-life: four windows"


def test_few_tokens_say_nothing_about_loads() -> None:
    group = loads()
    report(group, [[0] * 4] * 2)
    report(group, [[1, 0, 0, 0]] * 2)
    assert group.tokens() is None
    report(group, [[9, 0, 0, 0]] * 2)
    tokens = group.tokens()
    assert tokens is not None
    assert tokens.tolist() == [[9, 0, 0, 0]] * 2


def test_a_node_reports_for_its_own_seats_and_the_present_incarnation_only() -> None:
    group = Balanced()
    counters = np.full((2, 8), 5, "<i8").tobytes()
    for node, rank, incarnation in (("b", 0, 1), ("a", 9, 1), ("a", 0, 2)):
        group.world.take(
            group.background.load(ev.LoadReport(node, rank, incarnation, 7, 0, counters))
        )
    assert group.background.loads.counted == 0
    assert len(group.events("report.refused")) == 2
