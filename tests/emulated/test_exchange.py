"""Every way to exchange rows through the CUDA kernels, on emulated GPUs, against float64."""

from typing import Any

import pytest

from elasticep.native import abi
from elasticep.native import cuda as native
from tests.emulated.fleets import fleet
from tests.gpu.programs_bounds import BOUNDS, FP8_OUTPUTS
from tests.gpu.shapes import PRESETS, C, D, L, R, S, exchange, geometry
from tests.gpu.test_exchange import all_presets, judge

STEPS = "tests.gpu.programs:steps"
SIZES = (0, 1, 63, 64)
SMALL: dict[str, Any] = {"hidden": 256, "experts": 8, "topk": 3}
WHOLE = {**SMALL, "hidden": 512}  # rows of fp8 with their scales are whole 16 bytes


def mixed(
    ranks: int, exchanges: int = len(PRESETS), uneven: int = 1
) -> list[list[tuple[int, list[int]]]]:
    """Full batches, and steps in which every rank brings another number of rows."""
    steps = [
        [(i, [SIZES[(step + r + i) % 4] for r in range(ranks)]) for i in range(exchanges)]
        for step in range(uneven)
    ]
    return [[(i, [64] * ranks) for i in range(exchanges)], *steps]


@pytest.mark.parametrize("dtype", list(D))
def test_every_preset_and_format(dtype: abi.Dtype) -> None:
    with fleet(geometry(2, all_presets(64, dtype), **SMALL), 2) as f:
        judge(f.run(STEPS, 180.0, plans=mixed(2, uneven=2)), BOUNDS[dtype])


@pytest.mark.parametrize("processes", [1, 3])
def test_three_ranks(processes: int) -> None:
    with fleet(geometry(3, all_presets(64, D.BF16), **SMALL), 3, processes) as f:
        judge(f.run(STEPS, 180.0, plans=mixed(3), weighted=processes == 1), BOUNDS[D.BF16])


@pytest.mark.parametrize(("dtype", "seed"), [(D.FP32, 0), (D.FP16, 0), (D.BF16, 4)])
def test_bulk_copies(dtype: abi.Dtype, seed: int) -> None:
    """Rows of more than one piece, which is 8 KiB on the way out and 2 KiB on the way back."""
    shape = geometry(2, all_presets(16, dtype), hidden=4608, experts=8, topk=3)
    plans = [[(i, [16, 3]) for i in range(len(PRESETS))], [(i, [0, 1]) for i in range(8)]]
    with fleet(shape, 2, seed=seed, plan=native.Plan.BULK) as f:
        judge(f.run(STEPS, 180.0, plans=plans), BOUNDS[dtype])


@pytest.mark.parametrize(
    ("tuning", "seed"),
    [
        (native.Tuning.NONE, 0),
        pytest.param(native.Tuning.VIA_REGION, 5, marks=pytest.mark.long),
    ],
)
def test_batches_that_are_expanded_while_others_are_on_the_link(
    tuning: native.Tuning, seed: int
) -> None:
    """From 4 MiB of a full batch on; what is sent here is far less."""
    shapes = [
        exchange(1024, layout=L.MASKED, masked_room=300),
        exchange(1024, layout=L.CONTIGUOUS, cpu_sync=True),
        exchange(512, layout=L.MASKED, masked_room=300, dispatch=D.FP32),
    ]
    shape = geometry(2, shapes, hidden=2048, experts=4, topk=2, slots=2)
    plans = [[(i, [70, 3]) for i in range(3)], [(i, [0, 130]) for i in range(3)]]
    with fleet(shape, 2, seed=seed, tuning=tuning) as f:
        judge(f.run(STEPS, 180.0, plans=plans), BOUNDS[D.BF16])


@pytest.mark.parametrize(("halves", "seed"), [(0, 3), (1, 0)])
def test_outputs_of_quantised_batches_are_summed_while_others_are_on_the_link(
    halves: int, seed: int
) -> None:
    """As without quantising, from a cap on that is too large for the kernels of small batches."""
    shapes = [exchange(4160, layout=L.CONTIGUOUS, dispatch=D.FP8)]
    shape = geometry(2, shapes, hidden=512, experts=4, topk=2, slots=2)
    plans = [[(0, [70, 3])], [(0, [0, 130])]]
    with fleet(shape, 2, seed=seed) as f:
        judge(f.run(STEPS, 180.0, plans=plans, halves=halves), BOUNDS[D.FP8])


@pytest.mark.parametrize(("hidden", "seed"), [(1152, 0), (256, 5), (12_288, 3)])
def test_blocks_that_quantise_several_rows(hidden: int, seed: int) -> None:
    """From 129 rows on; 72 units of a row are no whole warps, 768 more than a block has threads."""
    dtypes = (D.FP8, D.MXFP8, D.NVFP4)
    layouts = (L.ROUTED, L.CONTIGUOUS) if hidden < 12_288 else (L.ROUTED,)
    shapes = [exchange(600, dispatch=d, layout=layout) for d in dtypes for layout in layouts]
    shape = geometry(2, shapes, hidden=hidden, experts=4, topk=2, slots=2)
    sizes = [[300, 7], [129, 128]] if hidden < 12_288 else [[140, 3]]
    plans = [[(i, n) for i in range(len(shapes))] for n in sizes]
    with fleet(shape, 2, seed=seed) as f:
        judge(f.run(STEPS, 180.0, plans=plans), BOUNDS[D.NVFP4])


def test_small_batches_as_separate_kernels() -> None:
    kinds = ("low_latency", "expand_masked", "expand_sync", "expand_per_expert")
    shapes = [exchange(64, dispatch=d, **PRESETS[k]) for k in kinds for d in (D.BF16, D.FP8)]
    with fleet(geometry(2, shapes, **SMALL), 2, tuning=native.Tuning.UNFUSED) as f:
        judge(f.run(STEPS, 180.0, plans=mixed(2, len(shapes))), BOUNDS[D.FP8])


@pytest.mark.parametrize("halves", [1, 2])
def test_halves_on_some_ranks_and_on_all(halves: int) -> None:
    with fleet(geometry(3, all_presets(64, D.BF16), **SMALL), 3, 1) as f:
        judge(f.run(STEPS, 180.0, plans=mixed(3), halves=halves), BOUNDS[D.BF16])


def test_outputs_in_fp8() -> None:
    shapes = [exchange(64, combine=D.FP8, **kind) for kind in PRESETS.values()]
    with fleet(geometry(2, shapes, **WHOLE), 2) as f:
        judge(f.run(STEPS, 180.0, plans=mixed(2)), FP8_OUTPUTS)


def test_replicated_input() -> None:
    all_ranks: dict[str, Any] = {"copies": C.ALL, "layout": L.ARRIVAL, "replicated": True}
    shapes = [
        exchange(64, **all_ranks),
        exchange(64, reduce=R.PER_EXPERT, **all_ranks),
        exchange(64, combine=D.FP8, **all_ranks),
    ]
    plans = [[(i, [n] * 3) for i in range(3)] for n in SIZES]
    with fleet(geometry(3, shapes, **WHOLE, slots=16), 3, 3) as f:
        judge(f.run(STEPS, 180.0, plans=plans, weighted=True), FP8_OUTPUTS)


def test_scales_as_kernels_read_them() -> None:
    shapes = [
        exchange(64, layout=layout, dispatch=dtype, scales=scales)
        for layout in (L.CONTIGUOUS, L.MASKED)
        for dtype, scales in ((D.FP8, S.COLUMNS), (D.FP8, S.PACKED), (D.MXFP8, S.PACKED))
    ]
    shape = geometry(2, shapes, hidden=1152, experts=8, topk=3)
    with fleet(shape, 2) as f:
        judge(f.run(STEPS, 180.0, plans=mixed(2, len(shapes))), BOUNDS[D.MXFP8])


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3, 4))])
def test_in_random_order(seed: int) -> None:
    """Threads, blocks and stores in an order that the hardware allows, too."""
    dtype = (D.BF16, D.FP8)[seed % 2]
    with fleet(geometry(3, all_presets(64, dtype), **SMALL), 3, 3, seed) as f:
        judge(f.run(STEPS, 180.0, plans=mixed(3)), BOUNDS[dtype])
