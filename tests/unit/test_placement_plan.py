"""The planner: what it promises at the size of the goals, and its contract case by case."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from elasticep.errors import ConfigError
from elasticep.placement import (
    ONE,
    Placement,
    PlanPolicy,
    RankInfo,
    SlotShortage,
    plan,
    resplit,
    round_robin,
    without,
)
from elasticep.testing.placements import check_plan, cluster

LAYERS, EXPERTS, RANKS, SLOTS = 40, 384, 64, 13


def goal_loads(kind, seed=0):
    rng = np.random.default_rng(seed)
    if kind == "zipf":
        shape = np.stack([rng.permutation(1 / np.arange(1, EXPERTS + 1)) for _ in range(LAYERS)])
    else:
        shape = rng.lognormal(0, 1, (LAYERS, EXPERTS))
    return (shape / shape.sum(axis=1, keepdims=True) * 4e6).astype(np.int64)


def holders(placement, layer, expert):
    return set(np.argwhere(placement.slot_expert[layer] == expert)[:, 0].tolist())


# ---- the goals


@pytest.mark.parametrize("kind", ["zipf", "lognormal"])
def test_goal_size_is_balanced_and_covered_and_survives_drift_and_death_without_a_move(kind):
    ranks = cluster(RANKS, SLOTS, nodes=8)
    loads = goal_loads(kind)
    first = check_plan(plan(loads, ranks), ranks)
    assert first.report.imbalance_after <= 1.001
    assert first.report.single == 0
    assert first.report.same_node == 0

    rng = np.random.default_rng(1)
    drifted = (loads * (1 + rng.uniform(-0.3, 0.3, loads.shape))).astype(np.int64)
    after = check_plan(plan(drifted, ranks, first.placement), ranks)
    assert after.report.imbalance_before > 1.1
    assert after.report.imbalance_after <= 1.03
    assert after.report.moves <= 0.01 * LAYERS * RANKS * SLOTS

    for dead in (0, 17, 63):
        alive = [info for info in ranks if info.rank != dead]
        split = check_plan(resplit(loads, alive, first.placement), alive)
        assert split.report.moves == 0
        assert split.report.lost == ()
        assert split.report.imbalance_after <= 1.03


def test_a_dead_node_uncovers_nothing_and_repair_brings_second_copies_back():
    ranks = cluster(RANKS, SLOTS, nodes=8)
    loads = goal_loads("lognormal")
    first = plan(loads, ranks)
    alive = [info for info in ranks if info.node != "n3"]
    split = check_plan(resplit(loads, alive, first.placement), alive)
    assert split.report.lost == ()
    assert split.report.single > 0
    repaired = check_plan(plan(loads, alive, split.placement), alive)
    free = 56 * SLOTS - 2 * EXPERTS
    assert free < 0  # two copies of each no longer fit: as many as do
    assert repaired.report.single <= LAYERS * -free * 1.5
    assert repaired.report.imbalance_after <= 1.03


def test_repair_after_a_death_moves_only_what_coverage_needs():
    ranks = cluster(RANKS, SLOTS, nodes=8)
    loads = goal_loads("zipf")
    first = plan(loads, ranks)
    alive = ranks[1:]
    split = resplit(loads, alive, first.placement)
    repaired = check_plan(plan(loads, alive, split.placement), alive)
    assert repaired.report.single == 0
    assert repaired.report.moves == split.report.single


# ---- exactness and bounds


def test_windows_are_exact_whenever_they_can_be():
    rng = np.random.default_rng(3)
    for ranks, slots in ((8, 5), (5, 9), (3, 13), (16, 3), (7, 6)):
        experts = (slots - 1) * ranks + 1  # the most for which the mean can be reached
        loads = (rng.lognormal(0, 2, (50, experts)) * 1e5).astype(np.int64)
        result = check_plan(plan(loads, cluster(ranks, slots)), cluster(ranks, slots))
        assert result.report.imbalance_after <= 1.001, (ranks, slots)
        assert (result.placement.slot_expert >= 0).sum() <= 50 * ranks * slots


def test_with_too_few_slots_the_bound_is_told_and_met_here():
    # One slot more than experts: the heaviest is split, nothing else can be.
    loads = np.array([[100, 10, 10, 10, 10]], np.int64)
    result = check_plan(plan(loads, cluster(3, 2)), cluster(3, 2))
    # Its two copies share their ranks with a light one each, since all six slots are needed.
    assert result.placement.rank_loads(loads).max() == pytest.approx(60, rel=1e-3)
    no_spare = plan(loads[:, :4], cluster(2, 2))
    assert no_spare.report.bound == pytest.approx(110 / 65)
    assert no_spare.report.imbalance_after == pytest.approx(110 / 65)


def test_one_expert_alone_is_shared_by_all():
    result = check_plan(plan(np.array([[1000]], np.int64), cluster(4, 1)), cluster(4, 1))
    assert result.placement.slot_weight[0, :, 0].tolist() == [ONE // 4] * 4


# ---- the contract


def test_case_18_too_few_slots_is_a_typed_error_that_says_everything():
    loads = np.ones((3, 10), np.int64)
    ranks = cluster(4, 3, draining=[3])
    with pytest.raises(SlotShortage) as caught:
        plan(loads, ranks)
    error = caught.value
    assert (error.ranks, error.slots, error.experts, error.shortfall) == ((0, 1, 2), 9, 10, 1)
    assert "layers 0..2: 3 alive ranks (0, 1, 2) have 9 slots for 10 experts, 1 too few" in str(
        error
    )
    with pytest.raises(SlotShortage, match="0 alive ranks"):
        plan(loads, [])


def test_case_19_experts_without_load_are_spread_for_coverage():
    loads = np.zeros((4, 12), np.int64)
    loads[1, 5] = 1_000
    loads[2, :2] = 10
    ranks = cluster(6, 5, nodes=3)
    result = check_plan(plan(loads, ranks), ranks)
    assert result.report.single == 0
    assert result.placement.copies().max(axis=1)[0] == 2  # not all to expert 0
    for layer in range(4):
        for expert in range(12):
            assert len(holders(result.placement, layer, expert)) >= 2, (layer, expert)
    filled = check_plan(plan(loads, cluster(6, 5), policy=PlanPolicy(fill=True)), cluster(6, 5))
    assert (filled.placement.slot_expert >= 0).all()
    assert filled.placement.copies()[0].max() <= 3


def test_case_17_every_expert_has_a_copy_in_another_node_also_when_nodes_do_not_divide():
    loads = np.arange(1, 11, dtype=np.int64)[None] * 100
    ranks = cluster(6, 5, nodes=3)
    result = check_plan(plan(loads, ranks), ranks)
    node = {info.rank: info.node for info in ranks}
    for expert in range(10):
        assert len({node[rank] for rank in holders(result.placement, 0, expert)}) >= 2, expert
    assert result.report.same_node == 0


def test_case_08_384_experts_on_7_ranks_and_unequal_slots():
    rng = np.random.default_rng(4)
    loads = rng.integers(0, 1_000, (3, 384))
    seven = cluster(7, 62)
    assert check_plan(plan(loads, seven), seven).report.imbalance_after <= 1.001
    uneven = [RankInfo(r, f"n{r}", f"n{r}", slots) for r, slots in enumerate((100, 60, 90, 80, 70))]
    result = check_plan(plan(loads, uneven), uneven)
    for info in uneven:
        assert (result.placement.slot_expert[:, info.rank, info.slots :] == -1).all()
    assert result.report.imbalance_after <= 1.001


def test_a_rank_without_slots_and_seats_beyond_the_highest():
    ranks = [RankInfo(2, "a", "a", 4), RankInfo(5, "b", "b", 0), RankInfo(7, "b", "b", 4)]
    loads = np.ones((2, 4), np.int64)
    result = check_plan(plan(loads, ranks, max_ranks=9, slots_per_rank=6), ranks)
    assert result.placement.slot_expert.shape == (2, 9, 6)


def test_a_draining_rank_keeps_copies_but_gets_no_tokens():
    loads = np.random.default_rng(5).integers(1, 100, (4, 12))
    before = plan(loads, cluster(4, 9, nodes=2))
    drained = cluster(4, 9, nodes=2, draining=[2])
    result = check_plan(plan(loads, drained, before.placement), drained)
    assert (result.placement.slot_weight[:, 2] == 0).all()
    assert np.array_equal(result.placement.slot_expert[:, 2], before.placement.slot_expert[:, 2])
    assert result.report.single == 0  # two copies without the one that leaves
    left, lost = without(result.placement, [2])
    assert lost == []
    assert np.array_equal(left.slot_weight, result.placement.slot_weight)
    for move in result.moves():
        assert move.rank != 2


def test_what_only_a_draining_rank_holds_is_copied_from_it():
    loads = np.array([[50, 60, 70, 80]], np.int64)
    held = round_robin(
        SimpleNamespace(layers=1, experts=4, slots_per_rank=2, max_ranks=3), [0, 1], spare=0
    )
    ranks = cluster(3, 2, draining=[0])
    result = check_plan(plan(loads, ranks, held), ranks)
    moves = {move.expert: move for move in result.moves()}
    assert set(moves) >= holders_inverse(held, 0, 0)
    for expert in holders_inverse(held, 0, 0):
        assert moves[expert].sources == (0,)
    assert result.report.restored == 0


def holders_inverse(placement, layer, rank):
    return {e for e in placement.slot_expert[layer, rank].tolist() if e >= 0}


def test_all_ranks_draining_carry_on_when_only_split_again():
    loads = np.ones((1, 4), np.int64)
    before = plan(loads, cluster(2, 4))
    ranks = cluster(2, 4, draining=[0, 1])
    assert check_plan(resplit(loads, ranks, before.placement), ranks).report.lost == ()


def test_never_from_a_dead_rank_and_lost_experts_come_from_a_backup():
    loads = np.random.default_rng(6).integers(1, 100, (3, 9))
    sizes = SimpleNamespace(layers=3, experts=9, slots_per_rank=4, max_ranks=4)
    held = round_robin(sizes, range(4), spare=0)
    alive = cluster(4, 4)[1:]
    lost = without(held, [0])[1]
    assert len(lost) == 9  # three experts of each layer
    result = check_plan(plan(loads, alive, held), alive)
    assert result.report.restored == 9
    backups = [(move.layer, move.expert) for move in result.moves() if not move.sources]
    assert sorted(set(backups)) == lost
    for move in result.moves():
        assert 0 not in move.sources
        assert move.rank != 0
    assert "9 from a backup" in result.report.reason


def test_sources_are_ordered_by_domain_and_draining_comes_last():
    ranks = cluster(6, 1, nodes=2, draining=[4])
    loads = np.ones((1, 1), np.int64)
    table = np.array([[[0], [0], [-1], [-1], [0], [0]]], np.int32)
    weight = np.where(table >= 0, ONE // 4, 0).astype(np.uint32)
    held = Placement(experts=1, slot_expert=table, slot_weight=weight)
    wanted = plan(loads, ranks, held, PlanPolicy(weighted=False, fill=True, min_gain=0.0))
    wider = np.where(np.arange(6)[None, :, None] == 3, 0, table).astype(np.int32)
    target = Placement(experts=1, slot_expert=wider, slot_weight=weight)
    (move,) = replace(wanted, placement=target).moves()
    assert (move.rank, move.sources) == (3, (5, 0, 1, 4))


def test_lost_experts_are_named_when_nothing_may_move():
    loads = np.ones((2, 6), np.int64)
    held = round_robin(
        SimpleNamespace(layers=2, experts=6, slots_per_rank=2, max_ranks=3), range(3), spare=0
    )
    alive = cluster(3, 2)[1:]
    result = check_plan(resplit(loads, alive, held), alive, allow_lost=True)
    assert result.report.lost == ((0, 0), (0, 3), (1, 0), (1, 3))
    assert result.report.moves == 0
    assert "4 experts have no copy" in result.report.reason


# ---- groups, even splits, determinism, words


def test_groups_stay_in_their_node_and_backups_lie_elsewhere():
    rng = np.random.default_rng(12)
    loads = rng.integers(1, 1_000, (5, 64))
    ranks = cluster(8, 18, nodes=4)
    result = check_plan(plan(loads, ranks, policy=PlanPolicy(groups=8)), ranks)
    assert result.report.grouped
    node = np.array([int(info.node[1:]) for info in ranks])
    used = result.placement.slot_weight > 0
    for layer in range(5):
        for group in range(8):
            mine = (result.placement.slot_expert[layer] // 8 == group) & used[layer]
            assert len(set(node[np.argwhere(mine)[:, 0]].tolist())) == 1, (layer, group)
    assert result.report.same_node == 0  # copies of weight 0 in another node
    assert result.report.single == 0

    # A node dies: its groups' tokens go where the copies are, then home again somewhere.
    alive = [info for info in ranks if info.node != "n1"]
    split = check_plan(resplit(loads, alive, result.placement, PlanPolicy(groups=8)), alive)
    assert split.report.lost == ()
    moved = check_plan(plan(loads, alive, split.placement, PlanPolicy(groups=8)), alive)
    assert moved.report.grouped
    assert moved.report.spilled == 0


def test_groups_that_do_not_fit_are_not_kept_and_that_is_said():
    loads = np.ones((2, 12), np.int64)
    ranks = cluster(6, 3, nodes=3)
    result = check_plan(plan(loads, ranks, policy=PlanPolicy(groups=2)), ranks)
    assert not result.report.grouped
    assert "groups do not fit into nodes" in result.report.reason


def test_replicas_that_share_evenly_are_balanced_too():
    rng = np.random.default_rng(13)
    loads = (rng.lognormal(0, 1, (8, 64)) * 1e5).astype(np.int64)
    ranks = cluster(8, 10)
    policy = PlanPolicy(weighted=False, fill=True)
    result = check_plan(plan(loads, ranks, policy=policy), ranks)
    assert (result.placement.slot_expert >= 0).all()
    copies = result.placement.copies()
    layer = np.arange(8)[:, None, None]
    share = ONE / copies[layer, result.placement.slot_expert]
    assert (abs(result.placement.slot_weight - share) <= 1).all()
    assert result.report.imbalance_after <= 1.02
    again = plan(loads, ranks, result.placement, policy)
    assert again.report.moves == 0


def test_equal_inputs_give_equal_plans_in_any_order_of_ranks():
    rng = np.random.default_rng(14)
    loads = rng.integers(0, 50, (6, 40))  # many ties
    ranks = cluster(9, 8, nodes=3)
    first = plan(loads, ranks)
    second = plan(loads.astype(np.uint16), list(reversed(ranks)))
    assert first.placement.digest() == second.placement.digest()
    assert first.report.reason == second.report.reason
    new = rng.integers(0, 50, (6, 40))
    a, b = (plan(new, order, first.placement) for order in (ranks, ranks[::-1]))
    assert a.placement.digest() == b.placement.digest()


def test_loads_of_any_magnitude_give_the_same_balance():
    shape = np.random.default_rng(15).integers(1, 1_000, (1, 40))
    small = plan(shape, cluster(8, 8))
    large = plan(shape * 2**50, cluster(8, 8))
    assert large.report.imbalance_after == pytest.approx(small.report.imbalance_after, abs=1e-4)
    assert np.array_equal(small.placement.slot_expert, large.placement.slot_expert)


def test_the_plan_explains_itself():
    ranks = cluster(8, 8, nodes=2)
    loads = np.random.default_rng(16).integers(1, 500, (4, 30))
    first = plan(loads, ranks, policy=PlanPolicy(expert_bytes=10))
    assert "4 layers placed for the first time" in first.report.reason
    assert "no single death uncovers an expert" in first.report.reason
    assert first.report.to_dict()["moves"] == first.report.moves == len(first.moves())
    again = plan(loads[:, ::-1], ranks, first.placement, PlanPolicy(expert_bytes=10))
    before, after = again.report.imbalance_before, again.report.imbalance_after
    assert f"{before:.3f} -> {after:.3f}" in again.report.reason
    assert again.report.bound == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loads": np.ones((2, 4))}, "loads are float64"),
        ({"loads": np.ones(4, np.int64)}, "loads are int64 \\(4,\\)"),
        ({"loads": np.array([[1, -1, 1, 1]] * 2)}, "negative"),
        ({"ranks": cluster(2, 4) + cluster(1, 4)}, "rank 0 is named twice among 3"),
        ({"max_ranks": 1}, "do not fit into tables of 1 ranks"),
        ({"slots_per_rank": 3}, "do not fit into tables"),
        ({"policy": PlanPolicy(groups=3)}, "do not divide into 3 groups"),
        ({"policy": PlanPolicy(expert_bytes=[1])}, "1 entries for 2 layers"),
        ({"policy": PlanPolicy(max_moves=3)}, "without a previous placement"),
    ],
)
def test_inputs_that_cannot_be_used_are_refused(change, message):
    arguments = {"loads": np.ones((2, 4), np.int64), "ranks": cluster(2, 4)} | change
    with pytest.raises(ConfigError, match=message):
        plan(**arguments)


def test_a_previous_placement_of_another_model_is_refused():
    first = plan(np.ones((2, 4), np.int64), cluster(2, 4))
    with pytest.raises(ConfigError, match="previous placement is for 2 layers of 4 experts"):
        plan(np.ones((2, 5), np.int64), cluster(2, 4), first.placement)
    twice = np.array([[[0, 0]]], np.int32)
    broken = Placement(experts=1, slot_expert=twice, slot_weight=np.array([[[ONE, 0]]], np.uint32))
    with pytest.raises(ConfigError, match="names an expert twice on a rank"):
        plan(np.ones((1, 1), np.int64), cluster(1, 2), broken)


@pytest.mark.parametrize(
    "bad", [{"target": 0.5}, {"min_gain": -1.0}, {"max_moves": -1}, {"groups": 0}]
)
def test_policies_are_checked(bad):
    with pytest.raises(ConfigError, match="policy"):
        PlanPolicy(**bad)
