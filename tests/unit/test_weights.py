"""Specs of expert weights, units as plain bytes, the layout of an arena."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticep.device import Device
from elasticep.errors import ConfigError, GroupMismatch, WeightsError
from elasticep.geometry import GroupGeometry
from elasticep.group import GroupConfig, Launch
from elasticep.proto import types_pb2
from elasticep.spec import ExchangeSpec
from elasticep.weights import (
    MAX_ARENA_BYTES,
    PAGE_BYTES,
    TENSOR_ALIGNMENT,
    ArenaLayout,
    TensorSpec,
    UnitHasher,
    WeightDtype,
    WeightSpec,
    join_unit,
    split_unit,
    unit_checksum,
)

FP8 = WeightSpec(
    (
        TensorSpec("w13", WeightDtype.FP8_E4M3, (8, 4)),
        TensorSpec("w2", WeightDtype.FP8_E4M3, (4, 4)),
        TensorSpec("w13_scale_inv", WeightDtype.FP32, (2, 1)),
        TensorSpec("w2_scale_inv", WeightDtype.FP32, (1, 1)),
        TensorSpec("w2_input_scale", WeightDtype.FP32, ()),
    )
)

tensors = st.builds(
    TensorSpec.of,
    st.sampled_from(["w1", "w13", "w2", "w2_bias", "w2_scale"]),
    st.sampled_from(list(WeightDtype)),
    st.lists(st.integers(1, 9), max_size=3).map(tuple),
)
specs = st.lists(tensors, min_size=1, max_size=5, unique_by=lambda tensor: tensor.name).map(
    lambda found: WeightSpec(tuple(found))
)
layouts = st.builds(ArenaLayout, st.integers(1, 4), st.integers(1, 5), specs)


def test_a_unit_is_all_tensors_of_an_expert() -> None:
    assert FP8.unit_bytes == 32 + 16 + 8 + 4 + 4
    assert FP8.offsets == (0, 32, 48, 56, 60, 64)


@given(specs)
def test_a_spec_survives_its_plain_form(spec: WeightSpec) -> None:
    assert WeightSpec.from_dict(spec.to_dict()) == spec
    assert WeightSpec.from_dict(spec.to_dict()).canonical_json() == spec.canonical_json()


def test_the_order_of_tensors_counts() -> None:
    turned = WeightSpec(FP8.tensors[::-1])
    assert turned.canonical_json() != FP8.canonical_json()
    assert ArenaLayout(1, 1, turned).digest() != ArenaLayout(1, 1, FP8).digest()


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "words"),
    [
        ("w/1", "bf16", (1,), "'w/1'"),
        ("w1", "bf17", (1,), "weights.w1.dtype is 'bf17'; use one of fp32"),
        ("w1", "bf16", (0, 4), r"weights.w1.shape is \(0, 4\)"),
        ("w1", "bf16", (1,) * 9, "at most 8"),
        ("w1", "bf16", (True,), "whole"),
        ("w1", "bf16", "12", "whole"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(name: str, dtype: str, shape: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TensorSpec.of(name, dtype, shape)


def test_a_spec_that_cannot_be_is_refused() -> None:
    tensor = TensorSpec("w1", WeightDtype.BF16, (1,))
    with pytest.raises(ConfigError, match="1 to 64"):
        WeightSpec(())
    with pytest.raises(ConfigError, match="twice: w1"):
        WeightSpec((tensor, tensor))
    with pytest.raises(ConfigError, match="those of one expert"):
        WeightSpec((TensorSpec("w1", WeightDtype.FP32, (1 << 20, 1 << 20)),))
    with pytest.raises(ConfigError, match="needs dtype and shape"):
        WeightSpec.from_dict({"w1": {"dtype": "bf16"}})


@given(specs, st.randoms(use_true_random=False))
def test_a_unit_splits_into_its_tensors_and_joins_again(spec: WeightSpec, rng: Any) -> None:
    data = rng.randbytes(spec.unit_bytes)
    parts = split_unit(spec, data)
    assert {name: part.shape for name, part in parts.items()} == {
        tensor.name: tensor.shape for tensor in spec.tensors
    }
    assert join_unit(spec, parts) == data


def test_a_unit_without_its_scales_is_none() -> None:
    parts = dict(split_unit(FP8, bytes(FP8.unit_bytes)))
    scales = parts.pop("w13_scale_inv")
    with pytest.raises(WeightsError, match="lacks tensor 'w13_scale_inv'"):
        join_unit(FP8, parts)
    with pytest.raises(WeightsError, match=r"fp32 \[2, 1\]"):
        join_unit(FP8, {**parts, "w13_scale_inv": scales.T})
    with pytest.raises(WeightsError, match="w9"):
        join_unit(FP8, {**parts, "w13_scale_inv": scales, "w9": scales})
    with pytest.raises(WeightsError, match="63 bytes are no unit, which has 64"):
        split_unit(FP8, bytes(63))


def test_a_checksum_is_of_the_bytes_and_of_whose_they_are() -> None:
    data = bytes(range(64))
    checksum = unit_checksum(3, 5, [data])
    assert len(checksum) == 16
    assert unit_checksum(3, 5, [data[:7], data[7:]]) == checksum
    hasher = UnitHasher(3, 5)
    hasher.update(memoryview(data))
    assert hasher.digest() == checksum
    others = {unit_checksum(3, 6, [data]), unit_checksum(4, 5, [data])}
    # One bit of a scale, the last bytes of a unit, is enough.
    others.add(unit_checksum(3, 5, [data[:-1] + bytes([data[-1] ^ 1])]))
    assert checksum not in others
    assert len(others) == 3


# ---- the arena's layout


@given(layouts)
def test_nothing_overlaps_in_an_arena_and_everything_is_aligned(layout: ArenaLayout) -> None:
    blocks = [(0, layout.labels_offset)]
    blocks += [
        (layout.label_offset(layer, slot), 128)
        for layer in range(layout.layers)
        for slot in range(layout.slots)
    ]
    for layer in range(layout.layers):
        assert layout.tensor_offset(layer, 0) % PAGE_BYTES == 0
        for index, tensor in enumerate(layout.spec.tensors):
            start = layout.tensor_offset(layer, index)
            assert start % TENSOR_ALIGNMENT == 0
            blocks.append((start, tensor.nbytes * layout.slots))
    ends = [start + size for start, size in blocks]
    begins = [*(start for start, _ in blocks[1:]), layout.total_bytes]
    assert all(end <= begin for end, begin in zip(ends, begins, strict=True))


@given(layouts)
def test_a_tensor_of_a_layer_is_contiguous_by_slot(layout: ArenaLayout) -> None:
    for layer in range(layout.layers):
        for slot in range(layout.slots):
            pieces = layout.unit_pieces(layer, slot)
            assert sum(size for _, size in pieces) == layout.spec.unit_bytes
            for index, (start, size) in enumerate(pieces):
                assert start == layout.tensor_offset(layer, index) + slot * size


def test_an_arena_too_large_is_refused_with_the_setting_to_change() -> None:
    spec = WeightSpec((TensorSpec("w1", WeightDtype.FP32, (1 << 16, 1 << 14)),))
    with pytest.raises(ConfigError, match=rf"{MAX_ARENA_BYTES}; lower geometry.slots_per_rank"):
        ArenaLayout(64, 65, spec)
    with pytest.raises(ConfigError, match="0 slots"):
        ArenaLayout(1, 0, spec)


def test_a_slot_outside_is_refused() -> None:
    layout = ArenaLayout(2, 3, FP8)
    for layer, slot in ((2, 0), (0, 3), (-1, 0), (0, -1)):
        with pytest.raises(WeightsError, match="2 layers x 3 slots"):
            layout.unit_pieces(layer, slot)


def test_dtypes_have_the_bytes_of_their_format() -> None:
    assert {dtype.value: dtype.item_bytes for dtype in WeightDtype} == {
        "fp32": 4, "fp16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_e8m0": 1,
        "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    }  # fmt: skip
    assert WeightDtype.FP32.numpy == np.dtype(np.float32)


# ---- as part of a group's config


def group(weights: WeightSpec | None, slots: int = 3, **changes: Any) -> GroupConfig:
    return GroupConfig(
        name="g",
        geometry=GroupGeometry(2, 4, 2, 64, slots, 2),
        exchanges=(("decode", ExchangeSpec.preset("ROUTED")),),
        initial_ranks=2,
        weights=weights,
        **changes,
    )


@given(specs)
def test_a_group_carries_its_spec_through_every_form(spec: WeightSpec) -> None:
    config = group(spec)
    assert GroupConfig.from_toml_dict(config.to_dict()) == config
    wire = types_pb2.GroupConfig.FromString(config.to_proto().SerializeToString())
    again = GroupConfig.from_proto(wire)
    assert again == config
    assert again.digest() == config.digest()
    assert again.arena_layout() == ArenaLayout(2, 3, spec)


def test_a_group_without_weights_has_no_arena() -> None:
    config = group(None)
    assert "weights" not in config.to_dict()
    assert config.arena_layout() is None
    assert GroupConfig.from_proto(config.to_proto()) == config


def test_engines_must_agree_on_what_an_expert_is() -> None:
    turned = WeightSpec((FP8.tensors[1], FP8.tensors[0], *FP8.tensors[2:]))
    other = WeightSpec((TensorSpec("w13", WeightDtype.BF16, (8, 4)), *FP8.tensors[1:]))
    for mine, theirs, words in (
        (FP8, None, "weights is"),
        (FP8, other, "weights.w13.dtype is 'fp8_e4m3' in the group and 'bf16' here"),
        (FP8, turned, "the order of the exchanges, or of the tensors in weights"),
    ):
        assert group(mine).digest() != group(theirs).digest()
        with pytest.raises(GroupMismatch, match=words):
            group(mine).require_same(group(theirs))


def test_a_group_that_could_not_hold_its_weights_is_refused() -> None:
    large = WeightSpec((TensorSpec("w1", WeightDtype.FP32, (1 << 17, 1 << 17)),))
    with pytest.raises(ConfigError, match=r"2 layers x 400 slots.*lower geometry.slots_per_rank"):
        group(large, slots=400)


def test_a_group_on_gpus_has_the_same_arena() -> None:
    on_gpus = group(FP8, device=Device.CUDA, launch=Launch.INLINE)
    assert on_gpus.arena_layout() == group(FP8).arena_layout()
    assert GroupConfig.from_proto(on_gpus.to_proto()) == on_gpus


def test_a_message_with_weights_that_cannot_be_is_refused() -> None:
    message = group(FP8).to_proto()
    message.weights.tensors[0].dtype = "fp9"
    with pytest.raises(ConfigError, match=r"weights.w13.dtype is 'fp9'"):
        GroupConfig.from_proto(message)
    message.weights.tensors.add(name="w13", dtype="bf16", shape=[1])
    message.weights.tensors[0].dtype = "bf16"
    with pytest.raises(ConfigError, match="twice: w13"):
        GroupConfig.from_proto(message)
    del message.weights.tensors[:]
    with pytest.raises(ConfigError, match="0 tensors"):
        GroupConfig.from_proto(message)
