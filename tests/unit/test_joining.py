"""What ranks that come in hold at first, and that finding it out needs no plan."""

from dataclasses import replace

import numpy as np
import pytest

from elasticep.control import arrange
from elasticep.control.arrange import Around, admit, first_placement, split
from elasticep.control.joining import fill_joiners
from elasticep.control.placement import EMPTY, Placement
from elasticep.control.planning import PlanJob, group_policy
from elasticep.control.repair import keep
from elasticep.control.views import Member, View
from elasticep.testing.membership import group_config

NODES = {0: "a", 1: "a", 2: "b", 3: "b"}


def table(*ranks: list[int], slots: int = 3) -> np.ndarray:
    rows = [[*row, *[EMPTY] * (slots - len(row))] for row in ranks]
    return np.array([rows], np.int32)


def filled(
    before: np.ndarray, tokens: list[int], room: dict[int, int], **how: object
) -> list[list[int]]:
    options = {"cover": True, "fill": True} | how
    staying = [rank for rank in range(4) if rank not in room and (before[0, rank] >= 0).any()]
    after = fill_joiners(before, np.array([tokens]), room, NODES, staying, **options)  # type: ignore[arg-type]
    for rank in range(4):
        if rank not in room:
            assert (after[0, rank] == before[0, rank]).all(), "who stays is not touched"
    return [after[0, rank].tolist() for rank in sorted(room)]


def test_lost_experts_come_first_then_single_ones_then_the_hottest() -> None:
    before = table([0, 1], [1, 2], [2], [])
    assert filled(before, [5, 900, 5, 1], {3: 3}) == [[3, 0, 1]]


def test_a_second_copy_goes_to_another_node_first() -> None:
    before = table([0], [], [1], [])
    assert filled(before, [1, 900], {3: 2}) == [[0, 1, EMPTY]]


def test_no_rank_gets_an_expert_twice_and_joiners_differ() -> None:
    before = table([0, 1, 2], [], [], [])
    rows = filled(before, [9, 5, 1], {1: 3, 2: 3, 3: 2})
    assert all(len({e for e in row if e != EMPTY}) == sum(e != EMPTY for e in row) for row in rows)
    assert [row[0] for row in rows] != [0, 0, 0]


def test_a_joiner_takes_its_part_of_the_tokens_and_keeps_slots_free() -> None:
    before = table([0, 1], [0, 1], [2, 3], [])
    assert filled(before, [200, 10, 1, 1], {3: 3}, cover=False, fill=False) == [[0, EMPTY, EMPTY]]


def test_what_is_found_nowhere_is_given_to_no_joiner_while_it_is_lost() -> None:
    before = table([0], [], [], [])
    refused = np.array([[True, True, False]])
    assert filled(before, [1, 1, 1], {3: 3}, refused=refused) == [[2, 0, EMPTY]]


def group(ranks: int = 8) -> tuple[Around, Placement, tuple[Member, ...]]:
    config = group_config(ranks=ranks, experts=32, slots=8)
    members = tuple(Member(rank, 1, f"n{rank // 2}") for rank in range(ranks))
    tokens = np.random.default_rng(3).zipf(1.4, (2, 32)).clip(max=1_000) * 50
    around = Around(config, {}, tokens.astype(np.int64))
    return around, first_placement(around, members), members


def test_a_joiner_is_let_in_without_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning for all takes up to a second at the largest sizes, and the loop waits for it."""
    around, placed, members = group()

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a plan is made")

    monkeypatch.setattr(arrange, "plan", never)
    monkeypatch.setattr(arrange, "target", never)
    before = keep(placed.slot_expert, range(1, 8))
    after = admit(around, before, [0], members, [])
    assert (after[:, 1:] == before[:, 1:]).all()
    placement = split(around, after, members, placed)
    placement.validate(around.config.geometry, range(8))
    loads = placement.rank_loads(around.tokens)
    assert (loads.max(axis=1) / loads.mean(axis=1) < 1.1).all()


def test_a_split_begins_with_the_one_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    around, placed, members = group()
    left = keep(placed.slot_expert, range(1, 8))
    anew = split(around, left, members[1:])
    given = []
    real = arrange.resplit
    monkeypatch.setattr(arrange, "resplit", lambda *a: (given.append(a[2]), real(*a))[1])
    after = split(around, left, members[1:], placed)
    (start,) = given
    assert (start.slot_weight[:, 1:] == placed.slot_weight[:, 1:]).all()
    assert not start.slot_weight[:, 0].any()
    most = [p.rank_loads(around.tokens).max(axis=1) for p in (anew, after)]
    assert np.allclose(*most, rtol=1e-3), "and ends as well"


def test_a_plan_that_takes_a_tenth_of_a_second_is_not_made_in_the_loop() -> None:
    """8 layers of 256 experts on 32 ranks take 140 ms."""
    around, placed, members = group()
    view = View("g", 1, 0, members, (), placed, "")
    job = PlanJob(around=around, view=view, policy=group_policy(around.config))
    assert job.small
    ranks = tuple(Member(rank, 1, "n") for rank in range(32))
    large = group_config(ranks=32, experts=256, slots=10)
    large = replace(large, geometry=replace(large.geometry, layers=8))
    placed = first_placement(Around(large, {}), ranks)
    view = View("g", 1, 0, ranks, (), placed, "")
    assert not PlanJob(around=Around(large, {}), view=view, policy=group_policy(large)).small
