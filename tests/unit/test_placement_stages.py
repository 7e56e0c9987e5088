"""Views on the way to a placement: nothing in use is overwritten, nothing is ever uncovered."""

from types import SimpleNamespace

import numpy as np
import pytest

from elasticep.control.placement import ONE, Placement, PlanPolicy, RankInfo, plan
from elasticep.control.stages import StagingImpossible, stages
from elasticep.errors import ConfigError


def cluster(ranks, slots):
    return [RankInfo(r, f"n{r % 2}", f"n{r % 2}", slots) for r in range(ranks)]


def placed(rows):
    """One layer from rows of slots; weights do not matter here beyond summing up."""
    table = np.array([rows], np.int32)
    experts = int(table.max()) + 1
    weight = np.zeros(table.shape, np.uint32)
    for expert in range(experts):
        where = np.argwhere(table == expert)
        if len(where):
            weight[tuple(where[0])] = ONE
    return Placement(experts=experts, slot_expert=table, slot_weight=weight)


def check_path(previous, path, ranks, loads):
    members = [info.rank for info in ranks]
    sizes = SimpleNamespace(
        layers=previous.layers,
        experts=previous.experts,
        slots_per_rank=previous.slots_per_rank,
        max_ranks=previous.max_ranks,
    )
    now = previous
    for after in path:
        after.validate(sizes, members)
        filled = (after.slot_expert != now.slot_expert) & (after.slot_expert >= 0)
        assert (now.slot_expert[filled] == -1).all(), "a slot in use was overwritten"
        now = after


def go(previous, target, ranks):
    loads = np.ones((previous.layers, previous.experts), np.int64)
    path = stages(previous, target, ranks, loads)
    check_path(previous, path, ranks, loads)
    assert path[-1] == target
    return path


def test_free_slots_take_one_view():
    assert len(go(placed([[0, -1], [1, -1]]), placed([[0, 1], [1, -1]]), cluster(2, 2))) == 1


def test_a_slot_in_use_is_left_first_and_filled_next():
    path = go(placed([[0, 1], [0, 2]]), placed([[0, 1], [1, 2]]), cluster(2, 2))
    assert [p.slot_expert[0].tolist() for p in path] == [
        [[0, 1], [-1, 2]],
        [[0, 1], [1, 2]],
    ]


def test_experts_change_places_through_a_free_slot():
    path = go(placed([[0], [1], [-1]]), placed([[1], [0], [-1]]), cluster(3, 1))
    assert len(path) > 2


def test_experts_change_places_over_a_copy_that_is_not_the_only_one():
    path = go(placed([[0], [1], [2], [2]]), placed([[1], [0], [2], [2]]), cluster(4, 1))
    assert len(path) > 2


def test_changing_places_without_a_slot_to_pass_through_is_refused():
    with pytest.raises(StagingImpossible, match="layers 0: experts with one copy") as caught:
        go(placed([[0], [1]]), placed([[1], [0]]), cluster(2, 1))
    assert caught.value.layers == (0,)


def test_a_relabelled_rank_is_sorted_out_too():
    path = go(placed([[0, 1, -1]]), placed([[1, 0, -1]]), cluster(1, 3))
    assert len(path) > 2


def test_placements_of_other_sizes_are_refused():
    with pytest.raises(ConfigError, match="plan the target with the sizes"):
        stages(placed([[0]]), placed([[0, -1]]), cluster(1, 2), np.ones((1, 1), np.int64))


def test_plans_of_the_planner_are_reached_whenever_a_slot_is_spare():
    rng = np.random.default_rng(1)
    reached = 0
    for _ in range(150):
        ranks, slots = int(rng.integers(1, 7)), int(rng.integers(1, 6))
        experts = int(rng.integers(1, ranks * slots + 1))
        policy = PlanPolicy(
            cover=bool(rng.integers(2)), fill=bool(rng.integers(2)), weighted=bool(rng.integers(2))
        )
        infos = cluster(ranks, slots)
        old, new = (rng.lognormal(0, 1.5, (2, 3, experts)) * 1e3).astype(np.int64)
        previous = plan(old, infos, policy=policy).placement
        # Planned from nothing, on purpose: worst for the way, best for this test.
        target = plan(new, infos, policy=policy).placement
        try:
            path = stages(previous, target, infos, new, policy)
        except StagingImpossible:
            assert experts == ranks * slots, "with a spare slot there is always a way"
            continue
        check_path(previous, path, infos, new)
        assert path[-1] == target
        reached += 1
    assert reached > 100


def test_on_the_way_tokens_are_split_as_well_as_the_copies_allow():
    # Expert 0 leaves rank 1 for expert 1; meanwhile rank 0 and 2 share it evenly.
    previous = placed([[0, -1], [0, 2], [0, 1]])
    target = placed([[0, -1], [1, 2], [0, 1]])
    first, _ = stages(previous, target, cluster(3, 2), np.array([[300, 10, 10]], np.int64))
    loads = first.rank_loads(np.array([[300, 10, 10]], np.int64))
    assert loads.max() < 160
