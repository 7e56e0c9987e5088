"""Formats and rules that the GPU has in common with the CPU plane, one by one."""

from typing import Any

import pytest

from elasticep.bench.fleet_cuda import Fleet, FleetSpec
from elasticep.errors import NativeError
from elasticep.native import abi, cuda_library
from elasticep.native import cuda as native
from tests.gpu.programs_bounds import BOUNDS, FP8_OUTPUTS
from tests.gpu.shapes import PRESETS, SHARED, exchange, geometry
from tests.gpu.test_exchange import fleet, judge, one_card

pytestmark = pytest.mark.timeout(180)
STEPS = "tests.gpu.programs:steps"
FORMATS = "tests.gpu.programs_formats"
D, S, L = abi.Dtype, abi.ScaleLayout, abi.RowLayout


def on_one_card(shape: bytes, ranks: int, *, alone: bool = False, **options: Any) -> Fleet:
    limits = {"exchange_timeout_ms": 5000, "step_timeout_ms": 10_000}
    spec = FleetSpec(geometry=shape, **one_card(ranks), **limits, **options)
    return Fleet(spec, None if alone else SHARED)


def test_the_structures_have_one_size_on_both_sides() -> None:
    assert cuda_library.api().epc_abi_version() == cuda_library.ABI_VERSION


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("cap", [64, 512])
def test_outputs_in_fp8(ranks: int, cap: int) -> None:
    kinds = [*PRESETS.values()]
    shapes = [exchange(cap, combine=D.FP8, **kind) for kind in kinds]
    plans = [[(i, [n, *range(ranks - 1)]) for i in range(len(kinds))] for n in (cap, 0, 1)]
    with fleet(geometry(ranks, shapes, hidden=1024, experts=16), ranks) as f:
        judge(f.run(STEPS, plans=plans), FP8_OUTPUTS)


@pytest.mark.parametrize("ranks", [2, 4])
def test_replicated_input(ranks: int) -> None:
    kind = PRESETS["allgather"]
    shapes = [exchange(64, replicated=True, **kind)]
    shapes.append(exchange(64, replicated=True, reduce=abi.Reduce.PER_EXPERT, **kind))
    shapes.append(exchange(64, replicated=True, combine=D.FP8, **kind))
    plans = [[(i, [n] * ranks) for i in range(3)] for n in (64, 0, 1, 63)]
    for weighted in (False, True):
        shape = geometry(ranks, shapes, experts=16, slots=32 if weighted else 0)
        with fleet(shape, ranks) as f:
            judge(f.run(STEPS, plans=plans, weighted=weighted), FP8_OUTPUTS)


def test_case_13_replicated_tokens_are_counted_by_one_rank() -> None:
    shape = geometry(2, [exchange(64, replicated=True, **PRESETS["allgather"])], topk=1)
    with fleet(shape, 2) as f:
        f.run(STEPS, plans=[[(0, [64, 64])], [(0, [5, 5])]])
        assert sum(f.run("tests.gpu.programs:loads")) == 64 + 5


@pytest.mark.parametrize("cap", [64, 1024])
def test_scales_as_kernels_read_them(cap: int) -> None:
    shapes = [
        exchange(cap, layout=layout, dispatch=dtype, scales=scales)
        for layout in (L.CONTIGUOUS, L.MASKED)
        for dtype, scales in ((D.FP8, S.COLUMNS), (D.FP8, S.PACKED), (D.MXFP8, S.PACKED))
    ]
    plans = [[(i, tokens) for i in range(6)] for tokens in ([cap, 3], [0, cap], [1, 0])]
    with fleet(geometry(2, shapes, hidden=1152 * 2, experts=16), 2) as f:
        judge(f.run(STEPS, plans=plans), BOUNDS[D.MXFP8])


@pytest.mark.parametrize(
    ("dtype", "scales", "global_scale"),
    [
        (D.FP8, S.ROWS, 0.0),
        (D.FP8, S.PACKED, 0.0),
        (D.MXFP8, S.ROWS, 0.0),
        (D.NVFP4, S.ROWS, 0.0),
        (D.NVFP4, S.ROWS, 0.03125),
        (D.NVFP4, S.ROWS, 7.5),
    ],
)
def test_quantised_rows_have_the_bits_of_the_cpu_plane(
    dtype: abi.Dtype, scales: abi.ScaleLayout, global_scale: float
) -> None:
    packed = scales == S.PACKED
    layout = L.CONTIGUOUS if packed else L.ROUTED
    one = exchange(16, layout=layout, dispatch=dtype, scales=scales)
    shape = geometry(1, [one], topk=1, experts=4)
    with on_one_card(shape, 1) as f:
        arguments = {"dtype": int(dtype), "packed": packed, "global_scale": global_scale}
        (result,) = f.run(f"{FORMATS}:quantised_bits", **arguments)
    assert result == {"rows": 0, "scales": 0, "arrival": True}


@pytest.mark.parametrize(
    ("dtype", "hidden"), [(D.MXFP8, 2880), (D.MXFP8, 512), (D.NVFP4, 96), (D.NVFP4, 512)]
)
@pytest.mark.parametrize("off", [0, 1])
def test_scales_of_rows_quantised_before_arrive_whole(
    dtype: abi.Dtype, hidden: int, off: int
) -> None:
    shape = geometry(1, [exchange(16, dispatch=dtype)], topk=1, experts=4, hidden=hidden)
    with on_one_card(shape, 1) as f:
        for tokens in (9, 0):
            arguments = {"dtype": int(dtype), "off": off, "tokens": tokens}
            (result,) = f.run(f"{FORMATS}:rows_quantised_before", **arguments)
            assert result == {"rows": 0, "scales": 0}


@pytest.mark.parametrize("scale", [2.0, 0.125, 1.5, -1.0])
def test_packed_scales_that_are_no_powers_of_two_end_the_step(scale: float) -> None:
    one = exchange(16, layout=L.MASKED, dispatch=D.FP8, scales=S.PACKED)
    with on_one_card(geometry(1, [one], topk=1, experts=4), 1) as f:
        (result,) = f.run(f"{FORMATS}:scales_brought", scale=scale)
    good = scale in (2.0, 0.125)
    assert result == {"complete": good, "why": 0 if good else native.Why.SCALES}


@pytest.mark.parametrize(("count", "complete"), [(4095, True), (4096, False)])
def test_a_step_has_as_many_exchanges_as_tags_can_number(count: int, complete: bool) -> None:
    with on_one_card(geometry(1, [exchange(1)], topk=1, experts=4), 1) as f:
        (result,) = f.run(f"{FORMATS}:many_exchanges", count=count)
    assert result["complete"] == [complete, True]
    if not complete:
        assert result["why"] == native.Why.SEQUENCE


@pytest.mark.parametrize(("cap", "slots"), [(64, 6), (4096, 6), (64, 9000), (4096, 9000)])
def test_rows_of_every_slot_are_counted(cap: int, slots: int) -> None:
    """By one block and by several, which have room for 4,096 slots at once."""
    shape = geometry(1, [exchange(cap)], experts=6, slots=slots, hidden=64, topk=5)
    with on_one_card(shape, 1) as f:
        assert f.run(f"{FORMATS}:slots_counted", tokens=cap)[0] > cap


def test_more_slots_than_fit_into_shared_memory_are_refused() -> None:
    shape = geometry(1, [exchange(1, layout=L.MASKED)], topk=1, experts=4, slots=12_001)
    with pytest.raises(NativeError, match="at most 12000"):
        on_one_card(shape, 1)


def test_case_22_capturing_and_replaying_takes_no_memory() -> None:
    shapes = [exchange(64, **kind) for kind in PRESETS.values() if not kind.get("cpu_sync")]
    with on_one_card(geometry(1, shapes, experts=16), 1, alone=True) as f:
        (result,) = f.run(f"{FORMATS}:captured_memory")
    assert result["complete"] == 50
    assert result["torch"] == 0
    assert result["lost"] <= 32 << 20  # the graph itself


@pytest.mark.parametrize(("cap", "hidden"), [(64, 512), (2048, 4096)])
def test_two_channels_on_two_streams(cap: int, hidden: int) -> None:
    """Large batches take an SM for each block of a kernel: four kernels must fit together."""
    shape = geometry(2, [exchange(cap, channels=2)], experts=16, hidden=hidden)
    with on_one_card(shape, 2) as f:
        tokens = 8 if cap == 64 else cap - 3
        (result,) = f.run(f"{FORMATS}:two_channels", rounds=20, tokens=tokens)
    assert result == {"wrong": 0}


def faults(shape: bytes, exchange_index: int, what: str) -> list[dict[str, Any]]:
    with on_one_card(shape, 2) as f:
        (result,) = f.run(f"{FORMATS}:tear_with", exchange=exchange_index, what=what)
        after = f.run(STEPS, plans=[[(exchange_index, [5, 5])]])
        assert all(step["complete"] for steps in after for step in steps)
    return list(result)


@pytest.mark.parametrize("cap", [64, 1024])
def test_more_rows_than_masked_room_tear_the_step_and_are_named(cap: int) -> None:
    shape = geometry(2, [exchange(cap, layout=L.MASKED, masked_room=15)], experts=8, hidden=4096)
    both = faults(shape, 0, "repeat")
    full = [f for f in both if f["why"] == native.Why.ROOM]
    assert full, both
    assert (full[0]["rows"], full[0]["room"]) == (64, 15)
    assert not any(f["complete"] for f in both)
    assert all(f["counted"] <= 4 * 15 for f in both), both  # expert kernels run in torn steps, too


@pytest.mark.parametrize("cap", [100, 1024])
def test_an_expert_named_repeatedly_beyond_the_room_tears_the_step(cap: int) -> None:
    shape = geometry(
        2, [exchange(cap, layout=L.CONTIGUOUS)], experts=8, slots=4, hidden=4096, topk=8
    )
    with on_one_card(shape, 2) as f:
        (both,) = f.run(f"{FORMATS}:tear_with", exchange=0, what="repeat", tokens=cap)
    full = [x for x in both if x["why"] == native.Why.ROOM]
    assert full, both
    assert (full[0]["slot"], full[0]["rows"]) == (1, 2 * cap * 8)
    assert all(x["counted"] == 0 for x in both), both  # expert kernels run in torn steps, too
    assert full[0]["room"] == -(-(2 * cap * 4 + 4 * 127) // 128) * 128


def test_ids_that_are_no_experts_are_refused() -> None:
    both = faults(geometry(2, [exchange(64)], experts=8), 0, "id")
    assert both[0]["why"] == native.Why.IDS
    assert both[0]["expert"] == 12
    assert both[1]["why"] in (native.Why.PEER_LEFT, native.Why.PASSED_BY)


@pytest.mark.parametrize("serve", [0, 1])
def test_lost_experts_end_the_step_unless_the_group_serves_without_them(serve: int) -> None:
    with on_one_card(geometry(2, [exchange(64)], experts=8, serve_lost=serve), 2) as f:
        f.run(f"{FORMATS}:without_last_expert")
        (both,) = f.run(f"{FORMATS}:tear_with", exchange=0, what="lost")
    assert all(x["complete"] for x in both) == bool(serve)
    if not serve:
        blamed = [x for x in both if x["why"] == native.Why.LOST]
        assert blamed, both
        assert blamed[0]["expert"] == 7


@pytest.mark.parametrize("what", ["layer", "tokens"])
def test_ranks_that_disagree_tear_the_step(what: str) -> None:
    replicated = what == "tokens"
    kind = PRESETS["allgather"] if replicated else {}
    shape = geometry(2, [exchange(64, replicated=replicated, **kind)], experts=8)
    both = faults(shape, 0, what)
    assert any(x["why"] == native.Why.DISAGREE for x in both), both
    assert not any(x["complete"] for x in both)


def test_agreed_works_are_repeated_by_all_and_settled_by_a_barrier() -> None:
    with on_one_card(geometry(2, [exchange(64)], experts=8, agreed=1), 2) as f:
        (lines,) = f.run(f"{FORMATS}:agreed_works")
    works = [(1, 0), (2, 1), (3, 2), (3, 2), (4, 3), (5, 4)]
    for rank in (0, 1):
        mine = lines[6 * rank : 6 * rank + 6]
        assert [line[:2] for line in mine] == works, (rank, mine)
    assert [line[2] for line in lines[:6]] == [True] * 6  # rank 0 had the torn work complete
    assert not lines[6 + 2][2]


def test_the_daemon_is_told_when_a_wait_began() -> None:
    shape = geometry(2, [exchange(8)], experts=8)
    with Fleet(FleetSpec(geometry=shape, **one_card(2), step_timeout_ms=1200), SHARED) as f:
        (found,) = f.run(f"{FORMATS}:lone_barrier")
        since = f.headers[0].status().wait_since_ns
    assert found["status"] == native.StepStatus.TIMEOUT
    assert 0 <= since - found["began"] < 50_000_000  # of the host's clock, in nanoseconds


def test_a_rank_that_is_slow_in_steps_without_exchanges_skips_none() -> None:
    with on_one_card(geometry(3, [exchange(8)], experts=8), 3) as f:
        (ends,) = f.run(f"{FORMATS}:empty_steps", count=100)
    assert ends == [[100, native.StepStatus.RUN]] * 3
