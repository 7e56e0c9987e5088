"""The planning mirror of buffer sizes against the native layout, which is what is reserved."""

import ctypes
from itertools import product

import pytest

from elasticep.geometry import GroupGeometry, buffers
from elasticep.group import GroupConfig, Launch
from elasticep.native import abi, convert
from elasticep.spec import PRESET_NAMES, ExchangeSpec

GEOMETRY = GroupGeometry(layers=2, experts=24, topk=4, hidden=256, slots_per_rank=7, max_ranks=5)
PARTS_PER_CHANNEL = 32
ROUNDING = 256


def reserved(exchanges: list[ExchangeSpec], launch: Launch) -> int:
    config = GroupConfig(
        name="g",
        geometry=GEOMETRY,
        exchanges=tuple((f"x{number}", spec) for number, spec in enumerate(exchanges)),
        initial_ranks=4,
        launch=launch,
    )
    info = abi.LayoutInfo()
    struct = convert.geometry_struct(config)
    abi.check(abi.api().ep_layout(ctypes.byref(struct), ctypes.byref(info)), "layout")
    return int(info.data_bytes)


@pytest.mark.parametrize("launch", list(Launch))
@pytest.mark.parametrize(
    ("preset", "reduce", "channels"),
    list(product(PRESET_NAMES, ("per_rank", "per_expert"), (1, 2))),
)
def test_buffers_are_what_is_reserved(
    preset: str, reduce: str, channels: int, launch: Launch
) -> None:
    spec = ExchangeSpec.preset(
        preset,
        max_tokens=100,
        dispatch_dtype="fp8",
        combine_dtype="fp16",
        reduce=reduce,
        channels=channels,
    )
    check(spec, launch)


@pytest.mark.parametrize("launch", list(Launch))
@pytest.mark.parametrize("reduce", ["per_rank", "per_expert"])
@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("ROUTED", {"combine_dtype": "fp8"}),
        ("EXPAND", {"combine_dtype": "fp8", "dispatch_dtype": "nvfp4"}),
        ("NORMAL", {"combine_dtype": "fp8", "dispatch_dtype": "mxfp8"}),
        ("EXPAND", {"dispatch_dtype": "fp8", "scale_layout": "columns", "masked_room": 67}),
        ("EXPAND", {"dispatch_dtype": "fp8", "scale_layout": "packed", "masked_room": 67}),
        ("EXPAND_SYNC", {"dispatch_dtype": "mxfp8", "scale_layout": "packed"}),
        ("ALLGATHER", {"replicated_input": True}),
    ],
)
def test_buffers_of_formats_and_scale_layouts(
    preset: str, changes: dict[str, object], reduce: str, launch: Launch
) -> None:
    check(ExchangeSpec.preset(preset, max_tokens=100, reduce=reduce, **changes), launch)


def check(spec: ExchangeSpec, launch: Launch) -> None:
    base = ExchangeSpec.preset("ROUTED", max_tokens=1)
    channels = spec.channels
    grown = reserved([base, spec], launch) - reserved([base], launch)
    planned = buffers(spec, GEOMETRY, service=launch is Launch.SERVICE).total
    slack = len(spec.parts()) * channels * PARTS_PER_CHANNEL * ROUNDING + 4096
    assert planned - 4096 <= grown <= planned + slack
