"""Experts that a node finds nobody to supply: told to the real membership and background."""

import numpy as np
import pytest

from elasticep.control import events as ev
from elasticep.control.events import SeatState
from elasticep.control.placement import EMPTY
from elasticep.control.refusals import REFUSAL_MS, Refusals, given, refused_slots
from elasticep.control.repair import fill_lost
from elasticep.group import LostExperts
from elasticep.testing.balanced import Balanced


def killed(nowhere: str = "ab", **changes: object) -> tuple[Balanced, set[tuple[int, int]]]:
    """Rank 3 of four dies with the only copies of some experts; these nodes find them nowhere."""
    group = Balanced(experts=8, slots=4, spare_copies=0, **changes)
    world = group.world
    table = world.view.placement.slot_expert
    gone = {(layer, int(e)) for layer in range(2) for e in table[layer, 3] if e != EMPTY}
    world.unsupplied = {node: set(gone) for node in nowhere}
    world.attach = False
    del group.counters[3]
    world.kill(3)
    return group, gone


@pytest.mark.parametrize("policy", list(LostExperts))
def test_an_expert_is_lost_for_good_only_when_every_node_was_asked(policy: LostExperts) -> None:
    group, gone = killed(lost_experts=policy)
    world = group.world
    group.advance(5_000)
    assert {pair for rank, pair in world.asked if rank in (0, 1)} == gone, "node a was asked"
    assert {pair for rank, pair in world.asked if rank == 2} == gone, "and node b"
    assert len(world.asked) == 2 * len(gone), "once each"
    assert set(world.view.lost) == gone
    assert world.membership.adopted_epoch == world.view.epoch
    assert all(world.seat(rank)[1].state is SeatState.ATTACHED for rank in (0, 1, 2))
    assert any("found nowhere" in view.reason for view in world.proposed)


@pytest.mark.parametrize("policy", list(LostExperts))
def test_what_one_node_finds_nowhere_another_is_asked_for(policy: LostExperts) -> None:
    group, _ = killed("a", lost_experts=policy)
    world = group.world
    group.advance(5_000)
    assert world.asked, "the node was asked"
    assert not world.view.lost
    assert world.membership.adopted_epoch == world.view.epoch
    assert all(world.seat(rank)[1].state is SeatState.ATTACHED for rank in (0, 1, 2))


def test_nobody_is_asked_again_and_again() -> None:
    group, gone = killed()
    world = group.world
    group.advance(5_000)
    epoch = world.view.epoch
    group.advance(60_000)
    assert world.view.epoch == epoch
    assert set(world.view.lost) == gone
    assert not group.events("rebalance.abandoned")


def test_a_rank_that_comes_in_is_not_given_them_either() -> None:
    group, gone = killed()
    world = group.world
    group.advance(5_000)
    epoch, asked = world.view.epoch, len(world.asked)
    world.attach = True
    world.attach_engine(3)
    group.advance(10_000)
    assert world.view.ranks == (0, 1, 2, 3)
    assert all(set(view.lost) == gone for view in world.proposed if view.epoch > epoch)
    assert len(world.asked) == asked


def test_they_are_asked_for_again_after_a_time_by_an_operator_and_when_a_node_comes() -> None:
    for again in ("time", "operator", "node"):
        group, gone = killed()
        world = group.world
        group.advance(5_000)
        assert set(world.view.lost) == gone
        world.unsupplied.clear()
        if again == "time":
            world.now_ms += REFUSAL_MS - 20_000
            group.advance(1_000)
            assert set(world.view.lost) == gone
            world.now_ms += 20_000
        elif again == "operator":
            world.feed(ev.Retry())
        else:
            world.connect("b")
        group.advance(3_000)
        assert not world.view.lost, again


def test_what_a_view_gives_to_a_node_is_tried_whatever_it_could_not_get_before() -> None:
    """A copy that a node could not get is not lost, so a plan may give it to the node again: its
    view must not be taken back before the node was asked."""
    group = Balanced(experts=8, slots=4, spare_copies=0)
    world = group.world
    view = world.view
    (expert,) = [int(e) for e in view.placement.slot_expert[0, 3] if e != EMPTY][:1]
    world.membership._s.refusals.add("a", [(0, expert)], world.now_ms)
    table, weight = view.placement.slot_expert.copy(), view.placement.slot_weight.copy()
    slot = int(np.argmax(table[0, 0] == EMPTY))
    table[0, 0, slot] = expert
    placement = type(view.placement)(experts=8, slot_expert=table, slot_weight=weight)
    world.feed(ev.Rearrange(view.epoch, placement, "a copy more"))
    world.settle()
    assert world.view.epoch == view.epoch + 1
    assert world.view.placement == placement
    assert world.membership.adopted_epoch == world.view.epoch


def test_refusals_are_kept_by_node_and_fade() -> None:
    refusals = Refusals(2, 4)
    assert not refusals
    assert refusals.by_any() is None
    assert refusals.add("a", [(0, 1), (1, 2)], 0) == 2
    assert refusals.add("a", [(0, 1)], 10) == 0
    refusals.add("b", [(1, 3)], 20)
    assert refusals.of("c") is None
    assert np.argwhere(refusals.by_any()).tolist() == [[0, 1], [1, 2], [1, 3]]  # type: ignore[arg-type]
    assert not refusals.expire(REFUSAL_MS)
    assert refusals.expire(REFUSAL_MS + 10)
    assert np.argwhere(refusals.by_any()).tolist() == [[1, 3]]  # type: ignore[arg-type]
    mask = np.zeros((2, 4), np.bool_)
    mask[1] = True
    refusals.forget("b", mask)
    assert not refusals


def test_a_lost_expert_goes_to_a_rank_that_is_not_barred() -> None:
    table = np.full((1, 3, 2), EMPTY, np.int32)
    lost = np.array([[True, True, True]])
    barred = {0: np.array([[True, False, False]]), 1: np.array([[True, True, False]])}
    filled = fill_lost(
        table, lost, np.array([[[True, True], [True, True], [False, False]]]), barred
    )
    assert [sorted(row) for row in filled[0].tolist()] == [[EMPTY, 1], [EMPTY, 2], [EMPTY, EMPTY]]
    assert given(filled, table, [0, 1, 2], 3).tolist() == [[False, True, True]]
    refused = refused_slots(filled, table, {1: np.array([[False, False, True]])})
    assert refused.sum() == 1
    assert filled[refused].tolist() == [2]
