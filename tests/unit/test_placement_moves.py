"""What plans cost: weights before moves, few and bounded moves, slots that stay what they are."""

from types import SimpleNamespace

import numpy as np
import pytest

from elasticep.placement import (
    ONE,
    Placement,
    PlanPolicy,
    plan,
    round_robin,
    without,
)
from elasticep.testing.placements import check_plan, cluster


def test_a_placement_that_is_good_enough_is_left_alone():
    ranks = cluster(8, 8, nodes=2)
    loads = np.random.default_rng(7).integers(100, 200, (5, 30))
    first = plan(loads, ranks)
    again = plan(loads, ranks, first.placement)
    assert again.report.moves == 0
    assert np.array_equal(again.placement.slot_expert, first.placement.slot_expert)
    assert {layer.method for layer in again.report.layers} == {"kept"}


def test_tokens_are_split_anew_before_anything_moves():
    # Two experts with two copies each; loads turn round: weights alone restore balance.
    table = np.array([[[0, 1], [0, 1]]], np.int32)
    weight = np.array([[[ONE, 0], [0, ONE]]], np.uint32)
    held = Placement(experts=2, slot_expert=table, slot_weight=weight)
    result = plan(np.array([[300, 100]], np.int64), cluster(2, 2), held)
    assert result.report.moves == 0
    assert result.report.imbalance_before == pytest.approx(1.5)
    assert result.report.imbalance_after == pytest.approx(1.0, abs=1e-4)


def test_one_copy_is_added_where_one_is_enough():
    # Expert 0 takes all; rank 1 has a free slot.
    table = np.array([[[0, 1], [2, -1]]], np.int32)
    weight = np.where(table >= 0, ONE, 0).astype(np.uint32)
    held = Placement(experts=3, slot_expert=table, slot_weight=weight)
    result = plan(
        np.array([[1000, 10, 10]], np.int64), cluster(2, 2), held, PlanPolicy(cover=False)
    )
    (move,) = result.moves()
    assert (move.expert, move.rank, move.slot, move.sources) == (0, 1, 1, (0,))
    assert result.report.imbalance_after <= 1.03


def test_moves_are_bounded_and_bytes_counted_per_layer():
    ranks = cluster(16, 6, nodes=4)
    rng = np.random.default_rng(8)
    old, new = (rng.lognormal(0, 1.5, (2, 10, 48)) * 1e5).astype(np.int64)
    first = plan(old, ranks)
    sizes = [100 + layer for layer in range(10)]
    free = plan(new, ranks, first.placement, PlanPolicy(expert_bytes=sizes))
    assert free.report.moves > 12
    assert free.report.move_bytes == sum(move.size_bytes for move in free.moves())
    for limit in (0, 1, 5, 12):
        some = plan(new, ranks, first.placement, PlanPolicy(max_moves=limit))
        check_plan(some, ranks)
        assert some.report.moves <= limit
        assert some.report.mean_imbalance_after <= some.report.imbalance_before
    assert free.report.mean_imbalance_after < some.report.mean_imbalance_after


def test_many_ranks_and_loads_that_turned_round_take_a_bounded_number_of_splits():
    """Several copies per split there; every rule still holds, limits too."""
    loads = (np.random.default_rng(17).lognormal(0, 1, (2, 100)) * 1e4).astype(np.int64)
    ranks = cluster(256, 1, nodes=32)
    first = check_plan(plan(loads, ranks), ranks)
    for limit in (None, 7):
        policy = PlanPolicy(max_moves=limit)
        again = check_plan(plan(loads[:, ::-1], ranks, first.placement, policy), ranks)
        assert again.report.imbalance_after < again.report.imbalance_before
        assert limit is None or again.report.moves <= limit


def test_lost_experts_come_first_when_moves_are_few():
    loads = np.random.default_rng(9).integers(1, 1_000, (6, 9))
    sizes = SimpleNamespace(layers=6, experts=9, slots_per_rank=5, max_ranks=4)
    held = round_robin(sizes, range(4), spare=0)
    lost = len(without(held, [0])[1])
    alive = cluster(4, 5)[1:]
    result = plan(loads, alive, held, PlanPolicy(max_moves=lost))
    assert result.report.lost == ()
    assert result.report.moves == lost


def test_a_new_world_is_built_anew_only_when_that_pays():
    rng = np.random.default_rng(10)
    ranks = cluster(8, 4)
    old = (rng.lognormal(0, 1, (6, 32)) * 1e5).astype(np.int64)  # no spare slot at all
    new = rng.permuted(old, axis=1)
    first = plan(old, ranks)
    result = check_plan(plan(new, ranks, first.placement), ranks)
    anew = plan(new, ranks)
    assert result.report.mean_imbalance_after <= anew.report.mean_imbalance_after * 1.03
    assert result.report.moves < anew.report.moves


def test_what_stays_on_a_rank_keeps_its_slot():
    rng = np.random.default_rng(11)
    ranks = cluster(8, 6, nodes=2)
    placement = None
    for _ in range(6):
        loads = (rng.lognormal(0, 1.5, (12, 30)) * 1e4).astype(np.int64)
        result = plan(loads, ranks, placement)
        if placement is not None:
            for layer in range(12):
                for rank in range(8):
                    old = placement.slot_expert[layer, rank]
                    new = result.placement.slot_expert[layer, rank]
                    for expert in set(old.tolist()) & set(new.tolist()) - {-1}:
                        assert np.argmax(old == expert) == np.argmax(new == expert)
        placement = result.placement
