"""Single rules of the CUDA data plane, on emulated GPUs: tests of tests/gpu, or smaller ones."""

from typing import Any

import pytest

from elasticep.bench.fleet_cuda import FleetSpec
from elasticep.native import cuda as native
from elasticep.native import cuda_library
from tests.emulated.fleets import PATIENCE, fleet, pool
from tests.gpu import test_exchange, test_formats
from tests.gpu.shapes import D, exchange, geometry

STEPS = "tests.gpu.programs:steps"
FORMATS = "tests.gpu.programs_formats"
AS_ON_GPUS = {
    test_exchange: (
        "test_case_06_more_tokens_than_the_cap",
        "test_case_13_loads_are_counted_once_at_home",
    ),
    test_formats: (
        "test_agreed_works_are_repeated_by_all_and_settled_by_a_barrier",
        "test_an_expert_named_repeatedly_beyond_the_room_tears_the_step",
        "test_case_13_replicated_tokens_are_counted_by_one_rank",
        "test_ids_that_are_no_experts_are_refused",
        "test_lost_experts_end_the_step_unless_the_group_serves_without_them",
        "test_more_rows_than_masked_room_tear_the_step_and_are_named",
        "test_more_slots_than_fit_into_shared_memory_are_refused",
        "test_packed_scales_that_are_no_powers_of_two_end_the_step",
        "test_quantised_rows_have_the_bits_of_the_cpu_plane",
        "test_ranks_that_disagree_tear_the_step",
        "test_rows_of_every_slot_are_counted",
        "test_scales_of_rows_quantised_before_arrive_whole",
    ),
}
for _module, _names in AS_ON_GPUS.items():
    globals().update({name: getattr(_module, name) for name in _names})


def patient(**options: Any) -> FleetSpec:
    return FleetSpec(**{**options, **PATIENCE})


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above take their children from here, and have time for a slow machine."""
    monkeypatch.setattr(cuda_library, "device_count", lambda: 2)
    for module in AS_ON_GPUS:
        monkeypatch.setattr(module, "SHARED", pool())
        monkeypatch.setattr(module, "FleetSpec", patient)


def test_the_structures_have_one_size_on_both_sides() -> None:
    with fleet(geometry(1, [exchange(1)]), 1, 1) as f:
        assert f.run("tests.emulated.programs:abi_version") == [cuda_library.ABI_VERSION]


@pytest.mark.parametrize("seed", [1, 3])
def test_a_rank_that_is_slow_in_steps_without_exchanges_skips_none(seed: int) -> None:
    with fleet(geometry(3, [exchange(8)], experts=8), 3, 1, seed) as f:
        (ends,) = f.run(f"{FORMATS}:empty_steps", 120.0, count=60)
    assert ends == [[60, native.StepStatus.RUN]] * 3


@pytest.mark.parametrize("seed", [0, 3])
def test_two_channels_on_two_streams(seed: int) -> None:
    shape = geometry(2, [exchange(64, channels=2)], experts=8, hidden=256)
    with fleet(shape, 2, 1, seed) as f:
        assert f.run(f"{FORMATS}:two_channels", rounds=6) == [{"wrong": 0}]


@pytest.mark.parametrize(("count", "complete"), [(4095, True), (4096, False)])
def test_a_step_has_as_many_exchanges_as_tags_can_number(count: int, complete: bool) -> None:
    with fleet(geometry(1, [exchange(1)], topk=1, experts=4, hidden=64), 1, 1) as f:
        (result,) = f.run(f"{FORMATS}:many_exchanges", 180.0, count=count)
    assert result["complete"] == [complete, True]
    if not complete:
        assert result["why"] == native.Why.SEQUENCE


def test_the_daemon_is_told_when_a_wait_began() -> None:
    shape = geometry(2, [exchange(8)], experts=8)
    with fleet(shape, 2, 1, step_timeout_ms=2500) as f:
        (found,) = f.run(f"{FORMATS}:lone_barrier")
        since = f.headers[0].status().wait_since_ns
    assert found["status"] == native.StepStatus.TIMEOUT
    assert since >= found["began"]  # in nanoseconds of the host's clock


def test_a_graph_of_every_preset_without_a_count_is_replayed() -> None:
    with fleet(
        geometry(1, test_exchange.all_presets(64, D.BF16), experts=8, hidden=256), 1, 1
    ) as f:
        assert f.run("tests.emulated.programs:captured", replays=5) == [5]
