"""What others use: the public EPLB's function, maps for engines, load windows, the yardstick."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticep.bench.greedy_eplb import greedy_rebalance
from elasticep.control.loads import LoadWindow
from elasticep.errors import ConfigError, UsageError
from elasticep.placement import (
    ONE,
    InvalidPlacement,
    PlanPolicy,
    RankInfo,
    SlotShortage,
    export_json,
    import_json,
    plan,
    rebalance_experts,
)

torch = pytest.importorskip("torch")


def even_imbalance(physical, count, loads, gpus):
    rows = np.arange(len(loads))[:, None]
    of_gpu = (loads[rows, physical] / count[rows, physical]).reshape(len(loads), gpus, -1).sum(2)
    return of_gpu.max(axis=1) / of_gpu.mean(axis=1)


# ---- the drop-in


@pytest.mark.parametrize(
    ("experts", "replicas", "groups", "nodes", "gpus"),
    [
        (12, 16, 4, 2, 8),
        (256, 288, 8, 4, 32),
        (60, 64, 1, 1, 8),
        (60, 64, 3, 2, 8),
        (8, 24, 2, 2, 6),
    ],
)
def test_the_drop_in_has_the_shapes_and_the_meaning_of_the_public_one(
    experts, replicas, groups, nodes, gpus
):
    generator = torch.Generator().manual_seed(0)
    weight = torch.rand(3, experts, generator=generator) ** 3
    physical, logical, count = rebalance_experts(weight, replicas, groups, nodes, gpus)
    assert physical.shape == (3, replicas)
    assert count.shape == (3, experts)
    assert logical.shape == (3, experts, int(count.max()))
    assert {t.dtype for t in (physical, logical, count)} == {torch.int64}
    assert (count.sum(dim=1) == replicas).all()
    assert count.min() >= 1
    for layer in range(3):
        assert torch.equal(torch.bincount(physical[layer], minlength=experts), count[layer])
        for expert in range(experts):
            slots = logical[layer, expert]
            used = slots[: count[layer, expert]]
            assert (physical[layer, used] == expert).all()
            assert (slots[count[layer, expert] :] == -1).all()
        for gpu in physical[layer].reshape(gpus, -1):
            assert len(set(gpu.tolist())) == len(gpu)  # case 14
        if groups % nodes == 0 and groups > 1:
            node_of_group = {}
            for slot, expert in enumerate(physical[layer].tolist()):
                node = slot // (replicas // nodes)
                assert node_of_group.setdefault(expert // (experts // groups), node) == node


@pytest.mark.parametrize(
    ("experts", "replicas", "gpus"), [(256, 288, 32), (384, 832, 64), (32, 48, 8), (64, 64, 8)]
)
def test_the_drop_in_is_never_behind_the_greedy(experts, replicas, gpus):
    rng = np.random.default_rng(1)
    for loads in (rng.lognormal(0, 1, (6, experts)), rng.uniform(0.5, 1.5, (6, experts))):
        physical, _, count = rebalance_experts(torch.from_numpy(loads), replicas, 1, 1, gpus)
        ours = even_imbalance(physical.numpy(), count.numpy(), loads, gpus)
        theirs = even_imbalance(*greedy_rebalance(loads, replicas, 1, 1, gpus), loads, gpus)
        assert (ours <= theirs * 1.01 + 1e-9).all()
        assert ours.mean() <= theirs.mean() + 1e-9


def test_the_drop_in_takes_any_real_dtype_and_refuses_what_makes_no_sense():
    weight = torch.tensor([[3, 1, 2, 2]])
    same = [
        rebalance_experts(weight.to(dtype), 8, 1, 1, 4)[0]
        for dtype in (torch.int32, torch.int64, torch.float32, torch.bfloat16)
    ]
    assert all(torch.equal(same[0], other) for other in same[1:])
    with pytest.raises(ConfigError, match=r"num_replicas \(9\) must be a multiple of num_gpus"):
        rebalance_experts(weight, 9, 1, 1, 4)
    with pytest.raises(ConfigError, match="would hold an expert twice"):
        rebalance_experts(weight, 20, 1, 1, 4)
    with pytest.raises(ConfigError, match="non-finite"):
        rebalance_experts(torch.tensor([[1.0, float("nan")]]), 2, 1, 1, 2)
    with pytest.raises(ConfigError, match="weight is a list; it must be a tensor"):
        rebalance_experts([[1.0, 2.0]], 2, 1, 1, 2)
    with pytest.raises(SlotShortage):
        rebalance_experts(torch.ones(1, 9), 8, 1, 1, 4)


def test_case_19_the_drop_in_spreads_spare_slots_when_there_is_no_load():
    _, _, count = rebalance_experts(torch.zeros(2, 12), 24, 1, 1, 6)
    assert (count == 2).all()


# ---- the yardstick


def test_the_greedy_does_what_its_description_says():
    # Loads 6 and 2 of two experts, 4 replicas: the heavier one gets both spare ones (6/3 = 2).
    physical, count = greedy_rebalance(np.array([[6.0, 2.0]]), 4, 1, 1, 2)
    assert count.tolist() == [[3, 1]]
    assert sorted(physical[0].tolist()) == [0, 0, 0, 1]
    # Heaviest first, each to the lightest GPU with a place: 5 | 4, then 3 to the second, 1 left.
    physical, _ = greedy_rebalance(np.array([[5.0, 4.0, 3.0, 1.0]]), 4, 1, 1, 2)
    assert physical.tolist() == [[0, 3, 1, 2]]
    # Groups {0,1} and {2,3} stay together on their nodes.
    physical, _ = greedy_rebalance(np.array([[9.0, 1.0, 8.0, 1.0]]), 4, 2, 2, 2)
    assert sorted(map(sorted, physical.reshape(2, 2).tolist())) == [[0, 1], [2, 3]]


# ---- JSON


def even_plan(layers=3, experts=12, ranks=4, slots=5):
    infos = [RankInfo(r, f"n{r}", f"n{r}", slots) for r in range(ranks)]
    loads = np.random.default_rng(2).integers(1, 100, (layers, experts))
    return plan(loads, infos, policy=PlanPolicy(weighted=False, fill=True)).placement


@pytest.mark.parametrize("form", ["elasticep", "sglang", "vllm", "vllm-ascend"])
def test_every_form_comes_back(form):
    placement = even_plan()
    text = export_json(placement, range(4), form)
    assert import_json(text, experts=12, ranks=4, layers=3) == placement


def test_our_form_keeps_weights_and_empty_slots():
    infos = [RankInfo(r, f"n{r}", f"n{r}", 6) for r in (0, 3)]
    placement = plan(np.array([[5, 1, 1]], np.int64), infos).placement
    assert (placement.slot_expert == -1).any()
    assert import_json(export_json(placement, (0, 3)), experts=3, ranks=2) == placement


def test_sglang_gets_one_key_and_every_slot_in_rank_order():
    placement = even_plan()
    plain = json.loads(export_json(placement, range(4), "sglang"))
    assert list(plain) == ["physical_to_logical_map"]
    assert plain["physical_to_logical_map"] == placement.slot_expert.reshape(3, -1).tolist()
    assert json.loads(export_json(placement, range(4), "vllm")) == plain["physical_to_logical_map"]
    ascend = json.loads(export_json(placement, range(4), "vllm-ascend"))
    assert ascend["moe_layer_count"] == 3
    device = ascend["layer_list"][1]["device_list"][2]
    assert device == {"device_id": 2, "device_expert": placement.slot_expert[1, 2].tolist()}


def test_engines_get_no_empty_slots():
    infos = [RankInfo(r, f"n{r}", f"n{r}", 6) for r in range(2)]
    placement = plan(np.ones((1, 3), np.int64), infos).placement
    with pytest.raises(InvalidPlacement, match=r"is empty.*weighted=False, fill=True"):
        export_json(placement, range(2), "sglang")
    with pytest.raises(ConfigError, match="form 'yaml' is not known"):
        export_json(placement, range(2), "yaml")


def test_one_list_stands_for_all_layers():
    placement = import_json("[0, 1, 2, 0]", experts=3, ranks=2, layers=4)
    assert placement.slot_expert.tolist() == [[[0, 1], [2, 0]]] * 4
    assert placement.slot_weight[0].tolist() == [[ONE // 2, ONE], [ONE, ONE // 2]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("3", "neither slot_expert"),
        ("{}", "neither slot_expert"),
        ("[[0, 1], [0]]", "not equally long"),
        ("[[0, 1.5]]", "not integers"),
        ("[[0, 1, 2]]", "a multiple of the 2 ranks"),
        ("[[0, 3], [0, 1], [1, 2]]", "names expert 3; the group has 0 to 2"),
        ("[[0, 1], [1, 2]]", "has 2 layers, the group has 3"),
        ('{"physical_to_logical_map": []}', "not integers"),
        ('{"slot_expert": [], "slot_weight": [], "experts": 3}', "not integers"),
        ('{"layer_list": [{"device_list": [{}]}]}', "neither slot_expert"),
    ],
)
def test_files_that_are_no_placement_are_refused(text, message):
    with pytest.raises(InvalidPlacement, match=message):
        import_json(text, experts=3, ranks=2, layers=3)


# ---- loads


def test_case_13_the_sum_over_ranks_is_exact():
    rng = np.random.default_rng(3)
    window = LoadWindow(2, 5)
    total = np.zeros((2, 5), np.int64)
    counters = np.zeros((4, 2, 5), np.int64)
    for _ in range(10):
        for rank in range(4):
            step = rng.integers(0, 1_000, (2, 5))
            counters[rank] += step
            total += step
            assert window.observe(rank, 1, counters[rank]) == step.sum()
    assert np.array_equal(window.roll(), total)


def test_a_new_incarnation_counts_from_zero_and_an_old_one_is_refused():
    window = LoadWindow(1, 2)
    window.observe(0, 1, np.array([[5, 5]]))
    assert window.observe(0, 2, np.array([[1, 0]])) == 1
    assert window.observe(0, 2, np.array([[1, 0]])) == 0
    with pytest.raises(UsageError, match="incarnation 1 is over"):
        window.observe(0, 1, np.array([[9, 9]]))
    with pytest.raises(UsageError, match="layer 0 expert 0 went back by 1"):
        window.observe(0, 2, np.array([[0, 4]]))
    with pytest.raises(UsageError, match="the group has"):
        window.observe(0, 2, np.array([1, 0]))
    assert window.loads().tolist() == [[6, 5]]
    window.forget(0)
    assert window.observe(0, 1, np.array([[1, 1]])) == 2


@given(half_life=st.integers(1, 50), load=st.integers(0, 2**40))
def test_a_load_halves_in_its_half_life(half_life, load):
    window = LoadWindow(1, 1, half_life)
    window.observe(0, 1, np.array([[load]]))
    for _ in range(half_life):
        window.roll()
    assert window.loads()[0, 0] == pytest.approx(load / 2, rel=1e-3, abs=1)


def test_only_the_current_window_without_a_past():
    window = LoadWindow(1, 1, half_life=0)
    window.observe(0, 1, np.array([[8]]))
    assert window.loads()[0, 0] == 8
    window.roll()
    assert window.loads()[0, 0] == 0
    with pytest.raises(ConfigError, match="half-life"):
        LoadWindow(1, 1, half_life=-1)


def test_imbalance_per_layer_of_what_was_counted():
    infos = [RankInfo(r, f"n{r}", f"n{r}", 1) for r in range(2)]
    placement = plan(np.ones((2, 2), np.int64), infos).placement
    window = LoadWindow(2, 2)
    window.observe(0, 1, np.array([[3, 1], [0, 0]]))
    assert window.imbalance(placement).tolist() == [1.5, 1.0]
