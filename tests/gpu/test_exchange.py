"""Every way to exchange, on 1-8 ranks, against a float64 reference that knows only the inputs."""

import math
import os
from typing import Any

import pytest

from elasticep.bench.fleet_cuda import Fleet, FleetSpec
from elasticep.native import abi
from elasticep.native import cuda as native
from tests.gpu.programs_bounds import BOUNDS
from tests.gpu.shapes import PRESETS, SHARED, exchange, geometry, gpus, places, places_apart

# Everything is slower under a sanitizer.
PATIENCE = int(os.environ.get("ELASTICEP_GPU_PATIENCE", "1"))
pytestmark = pytest.mark.timeout(180 * PATIENCE)
PROGRAMS = "tests.gpu.programs"
DTYPES = list(abi.Dtype)


def one_card(ranks: int) -> dict[str, Any]:
    """All ranks in one process on the first GPU."""
    return {"devices": (0,), "seats": (tuple(range(ranks)),)}


def fleet(shape: bytes, ranks: int, **options: Any) -> Fleet:
    limits = {"exchange_timeout_ms": 5000, "step_timeout_ms": 10_000}
    return Fleet(FleetSpec(geometry=shape, **places(ranks), **limits, **options), SHARED)


def judge(results: list[Any], bound: float) -> None:
    """Every step of every process is complete and within the bound."""
    for result in results:
        for step in result:
            assert step["complete"], step
            for index, error in step["errors"].items():
                assert math.isfinite(error), (index, step)
                assert error < bound, (index, error)


def all_presets(cap: int, dtype: abi.Dtype) -> list[abi.ExchangeConfig]:
    return [exchange(cap, dispatch=dtype, **kw) for kw in PRESETS.values()]


def sweep(ranks: int, cap: int) -> list[list[tuple[int, list[int]]]]:
    """Steps of all presets: full, empty, one, uneven batches."""
    uneven = [(cap - 1) * (r + 1) % (cap + 1) for r in range(ranks)]
    batches = [[cap] * ranks, [0] * ranks, [1] * ranks, uneven, [0] * (ranks - 1) + [cap]]
    return [[(i, tokens) for i in range(len(PRESETS))] for tokens in batches]


@pytest.mark.parametrize("cards", [1, 2])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [128, 4096])
def test_every_preset_format_and_size(ranks: int, dtype: abi.Dtype, cap: int, cards: int) -> None:
    """Presets x formats x tokens x ranks; several ranks of one GPU make progress together."""
    if gpus() < cards:
        pytest.skip("needs two GPUs")
    where = one_card(ranks) if cards == 1 else places(ranks)
    sizes = [0, 1, 63, 64, 128] if cap == 128 else [0, 4096]
    small = {"hidden": 512, "experts": 16, "topk": 3}
    shape = geometry(ranks, all_presets(cap, dtype), **small)
    plans = [[(i, [n] * ranks) for i in range(len(PRESETS))] for n in sizes]
    plans.append([(i, [sizes[(r + i) % len(sizes)] for r in range(ranks)]) for i in range(8)])
    limits = {"exchange_timeout_ms": 10_000, "step_timeout_ms": 20_000}
    with Fleet(FleetSpec(geometry=shape, **where, **limits), SHARED) as f:
        judge(f.run(f"{PROGRAMS}:steps", 150.0, plans=plans), BOUNDS[dtype])


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("cap", [64, 1024])
@pytest.mark.parametrize("halves", [1, 2])
def test_send_and_receive_halves(ranks: int, cap: int, halves: int) -> None:
    """On every rank, and on some while the others take the whole kernels."""
    shape = geometry(ranks, all_presets(cap, abi.Dtype.BF16), hidden=4096, experts=16)
    plans = [[(i, [n, *range(1, ranks)]) for i in range(len(PRESETS))] for n in (cap, 0)]
    with fleet(shape, ranks) as f:
        judge(f.run(f"{PROGRAMS}:steps", plans=plans, halves=halves), BOUNDS[abi.Dtype.BF16])


@pytest.mark.parametrize("tuning", [native.Tuning.UNFUSED, native.Tuning.VIA_REGION])
def test_other_ways_of_expanding(tuning: native.Tuning) -> None:
    kinds = ("low_latency", "expand_masked", "expand_sync", "expand_per_expert")
    shapes = [exchange(cap, **PRESETS[k]) for k in kinds for cap in (64, 1024)]
    plans = [[(i, [64, 33]) for i in range(8)], [(i, [1000, 7]) for i in range(1, 8, 2)]]
    shape = geometry(2, shapes, hidden=4096, experts=16)
    with fleet(shape, 2, tuning=tuning) as f:
        judge(f.run(f"{PROGRAMS}:steps", plans=plans), BOUNDS[abi.Dtype.BF16])


@pytest.mark.parametrize("dtype", [abi.Dtype.BF16, abi.Dtype.FP16, abi.Dtype.FP32])
@pytest.mark.parametrize("plan", [native.Plan.VECTOR, native.Plan.BULK])
def test_presets(dtype: abi.Dtype, plan: native.Plan) -> None:
    with fleet(geometry(2, all_presets(64, dtype)), 2, plan=plan) as f:
        judge(f.run(f"{PROGRAMS}:steps", plans=sweep(2, 64)), BOUNDS[dtype])


@pytest.mark.parametrize("ranks", [1, 3, 4, 7, 8])
def test_rank_counts(ranks: int) -> None:
    with fleet(geometry(ranks, all_presets(48, abi.Dtype.BF16)), ranks) as f:
        judge(f.run(f"{PROGRAMS}:steps", plans=sweep(ranks, 48)), BOUNDS[abi.Dtype.BF16])


@pytest.mark.parametrize("ranks", [2, 4])
def test_large_batches(ranks: int) -> None:
    cap = 4096 if ranks == 2 else 1024
    shape = geometry(ranks, all_presets(cap, abi.Dtype.BF16), hidden=5120, experts=64)
    plans = [[(i, [cap] * ranks) for i in range(len(PRESETS))]]
    plans += [[(i, [cap, *range(ranks - 1)]) for i in range(len(PRESETS))]]
    with fleet(shape, ranks) as f:
        judge(f.run(f"{PROGRAMS}:steps", 120.0, plans=plans), BOUNDS[abi.Dtype.BF16])


@pytest.mark.parametrize("dtype", [abi.Dtype.FP8, abi.Dtype.MXFP8, abi.Dtype.NVFP4])
def test_quantised_dispatch(dtype: abi.Dtype) -> None:
    kinds = ("routed", "expand_masked", "expand_sync", "allgather")
    exchanges = [exchange(64, dispatch=dtype, **PRESETS[kind]) for kind in kinds]
    plans = [[(i, tokens) for i in range(len(kinds))] for tokens in ([64, 63], [1, 0])]
    with fleet(geometry(2, exchanges), 2) as f:
        judge(f.run(f"{PROGRAMS}:steps", plans=plans), BOUNDS[dtype])


@pytest.mark.parametrize("ranks", [2, 4])
def test_replicas_share_tokens(ranks: int) -> None:
    shape = geometry(ranks, all_presets(64, abi.Dtype.BF16), slots=64)
    with fleet(shape, ranks) as f:
        results = f.run(f"{PROGRAMS}:steps", plans=sweep(ranks, 64), weighted=True)
        judge(results, BOUNDS[abi.Dtype.BF16])


def test_small_batches_of_every_preset_as_for_a_sanitizer() -> None:
    """In processes of their own, a rank each: tools may run the kernels of one process in turn."""
    ranks = 2
    shape = geometry(ranks, all_presets(8, abi.Dtype.BF16), hidden=512, experts=8)
    plans = [[(i, [n] * ranks) for i in range(len(PRESETS))] for n in (8, 1, 0)]
    limits = {"exchange_timeout_ms": 5000 * PATIENCE, "step_timeout_ms": 10_000 * PATIENCE}
    with Fleet(FleetSpec(geometry=shape, **places_apart(ranks), **limits)) as f:
        judge(f.run(f"{PROGRAMS}:steps", 60.0 * PATIENCE, plans=plans), BOUNDS[abi.Dtype.BF16])


def test_case_13_loads_are_counted_once_at_home() -> None:
    shape = geometry(2, [exchange(64)], topk=1)
    with fleet(shape, 2) as f:
        f.run(f"{PROGRAMS}:steps", plans=[[(0, [64, 31])], [(0, [5, 0])]])
        assert sum(f.run(f"{PROGRAMS}:loads")) == 64 + 31 + 5


def test_case_06_more_tokens_than_the_cap() -> None:
    if gpus() < 2:
        pytest.skip("needs two GPUs: a rank of its own in each process")
    with fleet(geometry(2, [exchange(16)]), 2) as f:
        for text in f.run(f"{PROGRAMS}:too_many"):
            assert "17 tokens" in text
            assert "max_tokens is 16" in text
