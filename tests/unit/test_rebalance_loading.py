"""What the background does when a rank cannot load, and when a view is held up."""

from collections.abc import Callable

import numpy as np
import pytest

from elasticep.control import events as ev
from elasticep.control.events import Notice
from elasticep.control.metrics import ControllerMetrics
from elasticep.control.placement import EMPTY
from elasticep.control.refusals import given
from elasticep.control.repair import cover_single
from elasticep.control.state import CANNOT_LOAD_MS, LOST_AGAIN_MS
from elasticep.control.views import View
from elasticep.group import LostExperts
from elasticep.testing.balanced import Balanced, hot_rank, skewed


def unable(group: Balanced, rank: int) -> Callable[[], None]:
    """From now on a rank cannot load anything; returns what ends that."""
    world = group.world
    real = world.stage

    def stage(other: int, view: View) -> None:
        node, seat = world.seat(other)
        runs = next((v for v in world.proposed if v.epoch == seat.epoch), None)
        if other == rank and runs is not None:
            tables = view.placement.slot_expert, runs.placement.slot_expert
            if given(*tables, [rank], view.placement.experts).any():
                why = "its disk is broken"
                world.feed(ev.Staged(node.name, rank, seat.incarnation, view.epoch, why))
                return
        real(other, view)

    world.stage = stage  # type: ignore[method-assign]

    def able() -> None:
        world.stage = real  # type: ignore[method-assign]

    return able


def found_out(group: Balanced, rank: int) -> None:
    """A rank fails to load what a rebalance gives it."""
    for hot in range(20):
        group.advance(1_000, skewed(hot=hot % 8, weight=60))
        if rank in group.world.membership.cannot_load:
            return
    raise AssertionError("it was given nothing")


def test_case_16_one_rank_that_cannot_load_does_not_stop_all_others() -> None:
    group = Balanced(experts=8, slots=4)
    unable(group, 1)
    found_out(group, 1)
    done = group.background.rebalancer.completed
    first = group.world.view.placement
    for hot in (5, 2, 7):
        group.advance(8_000, skewed(hot=hot, weight=60))
    assert group.background.rebalancer.completed > done
    assert 1 in group.world.membership.cannot_load, "and it was left alone meanwhile"
    now = group.world.view.placement
    new = (now.slot_expert != first.slot_expert) & (now.slot_expert != EMPTY)
    assert new[:, [0, 2, 3]].any()
    assert not new[:, 1].any()
    assert not group.world.view.lost
    told = [str(planned["reason"]) for planned in group.events("rebalance.planned")]
    assert told
    assert "rank 1 failed to load" in group.background.rebalancer.why or any(
        window["cannot_load"] == 1 for window in group.events("load.window")
    )


def test_redundancy_is_repaired_around_a_rank_that_cannot_load() -> None:
    group = Balanced(experts=7, slots=5)
    world = group.world
    _, seat = world.seat(1)
    world.membership._s.cannot_load[1, seat.incarnation] = world.now_ms
    world.attach = False
    del group.counters[3]
    world.kill(3)
    before = world.view.placement.slot_expert[:, 1].copy()
    single = int((world.view.placement.copies() == 1).sum())
    assert single
    group.until(lambda: group.background.rebalancer.completed > 0)
    assert int((world.view.placement.copies() == 1).sum()) < single
    held = world.view.placement.slot_expert[:, 1]
    assert ((held == before) | (held == EMPTY)).all()


def test_second_copies_go_to_free_slots_then_in_place_of_third_ones() -> None:
    table = np.array([[[0, 1, 2], [0, 3, EMPTY], [0, 4, 4]]], np.int32)
    covered = cover_single(table, [1, 2], 5, 0, 9)
    assert covered[0, 1].tolist() == [2, 3, 1], "a free slot first, then the third copy of 0"
    assert covered[0, 0].tolist() == [0, 1, 2], "not among those that may be given something"
    assert (cover_single(table, [1, 2], 5, 0, 1) != table).sum() == 1
    assert (cover_single(table, [1], 5, 1, 9)[0, 1] == [1, 3, EMPTY]).all(), "a slot stays free"


def test_when_its_node_says_hello_it_is_given_something_again() -> None:
    """As when its daemon was started anew in the middle of a copy."""
    group = Balanced(experts=8, slots=4)
    able = unable(group, 1)
    found_out(group, 1)
    able()
    node, _ = group.world.seat(1)
    group.world.cut(node.name)
    assert 1 in group.world.membership.cannot_load
    group.world.connect(node.name)
    assert not group.world.membership.cannot_load


def test_after_a_time_it_is_given_something_again() -> None:
    group = Balanced(experts=8, slots=4)
    able = unable(group, 1)
    found_out(group, 1)
    able()
    group.world.now_ms += CANNOT_LOAD_MS
    group.advance(200)
    assert not group.world.membership.cannot_load
    first = group.world.view.placement.slot_expert
    for hot in (5, 2, 7, 0):
        group.advance(8_000, skewed(hot=hot, weight=60))
    now = group.world.view.placement.slot_expert
    assert ((now != first) & (now != EMPTY))[:, 1].any()
    assert not group.world.membership.cannot_load


@pytest.mark.parametrize("policy", list(LostExperts))
def test_who_could_not_load_is_soon_asked_again_where_nothing_is_served(
    policy: LostExperts,
) -> None:
    """The others die: what only they had is asked of the one that failed once, not 5 minutes on."""
    group = Balanced(experts=8, slots=8, lost_experts=policy)
    world = group.world
    _, seat = world.seat(1)
    world.membership._s.cannot_load[1, seat.incarnation] = world.now_ms
    world.attach = False
    for rank in (0, 2, 3):
        del group.counters[rank]
        world.kill(rank)
    group.until(lambda: group.world.view.ranks == (1,))
    assert group.world.view.lost
    group.advance(LOST_AGAIN_MS)
    assert bool(group.world.view.lost) == (policy is LostExperts.SERVE)


def test_a_disk_that_stays_broken_is_asked_less_and_less_often_and_named() -> None:
    """Each try costs two views, and nobody may find the cause among thousands of them."""
    group = Balanced(experts=8, slots=8, lost_experts=LostExperts.REFUSE)
    world = group.world
    able = unable(group, 1)
    world.attach = False
    for rank in (0, 2, 3):
        del group.counters[rank]
        world.kill(rank)
    group.until(lambda: world.view.ranks == (1,) and 1 in world.membership.cannot_load)
    first = world.view.epoch
    group.advance(60_000)
    soon = world.view.epoch
    assert soon - first >= 2, "soon at first"
    group.advance(1_800_000)
    assert world.view.epoch - soon <= 2 * (3 + 1_800_000 // CANNOT_LOAD_MS)
    assert world.view.ranks == (1,), "it is not ended for it"
    waits = "8 experts have no replica: rank 1 failed to load something; tried again in a while"
    assert world.membership.waiting == waits
    able()
    group.advance(CANNOT_LOAD_MS + 1_000)
    assert not world.view.lost
    assert world.membership.waiting == ""
    assert not world.membership._s.failures, "it begins anew"


def test_a_view_that_is_held_up_is_no_progress() -> None:
    """An engine that never comes to a step holds up a drain; nothing is moved, and it shows."""
    group = Balanced(experts=8, slots=4)
    tokens = hot_rank(group)
    group.until(lambda: group.background.rebalancer.completed == 1, tokens)
    group.advance(20_000, tokens)
    rebalancer = group.background.rebalancer
    assert group.world.now_ms - rebalancer.progress_ms <= 100, "idle is progress"
    group.meets = False
    group.world.feed(ev.Drain((3,), "an audit"))
    group.advance(20_000)
    assert group.world.now_ms - rebalancer.progress_ms >= 19_000
    assert "a view is under way" in rebalancer.why
    group.meets = True
    group.advance(3_000)
    assert group.world.now_ms - rebalancer.progress_ms <= 2_000


@pytest.mark.parametrize("known", [True, False])
def test_the_gauges_follow_the_windows(known: bool) -> None:
    metrics = ControllerMetrics()
    fields = {"known": known, "imbalance": 1.5, "worst": 2.5, "cannot_load": 2}
    metrics.count("g", Notice("load.window", fields))

    def value(name: str) -> float | None:
        return metrics.registry.get_sample_value(f"elasticep_controller_{name}", {"group": "g"})

    assert value("ranks_not_loading") == 2
    assert value("imbalance") == (1.5 if known else None)
