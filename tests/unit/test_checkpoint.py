"""Experts out of checkpoints of each known family, and what is refused."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticep.arena import Arena
from elasticep.checkpoint import expert_tensors, open_checkpoint
from elasticep.checkpoint.files import TensorFile
from elasticep.checkpoint.names import fuse, in_order, parts_of
from elasticep.errors import CheckpointError, ConfigError
from elasticep.testing.checkpoints import (
    FAMILIES,
    Family,
    WrittenCheckpoint,
    write_checkpoint,
    write_safetensors,
)
from elasticep.weights import ArenaLayout, TensorSpec, WeightSpec, unit_checksum

FUSED = {
    "mixtral": ["w13", "w2"],
    "qwen3": ["w13", "w2"],
    "deepseek": ["w13", "w2", "w13_scale_inv", "w2_scale_inv"],
    "gpt-oss": [
        *("gate_up_proj_bias", "down_proj_bias", "gate_up_proj_blocks", "down_proj_blocks"),
        *("gate_up_proj_scales", "down_proj_scales"),
    ],
}


def unit_of(written: WrittenCheckpoint, spec: WeightSpec, layer: int, expert: int) -> bytes:
    tensors = written.units[layer, expert]
    return b"".join(tensors[part] for t in spec.tensors for part in parts_of(t.name))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("fused", [True, False])
def test_each_family_gives_the_units_that_were_written(
    tmp_path: Path, family: str, shards: int, fused: bool
) -> None:
    written = write_checkpoint(tmp_path, family, layers=3, experts=5, shards=shards)
    checkpoint = open_checkpoint(tmp_path)
    assert (len(checkpoint.layers), checkpoint.experts) == (3, 5)
    spec = checkpoint.weight_spec(fused=fused)
    if fused:
        assert [tensor.name for tensor in spec.tensors] == FUSED[family]
    else:
        assert {*spec.tensors} == {*written.family.spec().tensors}
    units = checkpoint.units(spec)
    for layer, expert in written.units:
        assert units.read(layer, expert) == unit_of(written, spec, layer, expert)


def test_only_the_asked_for_bytes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = write_checkpoint(tmp_path, "deepseek", layers=2, experts=6, shards=4)
    checkpoint = open_checkpoint(tmp_path)
    units = checkpoint.units(checkpoint.weight_spec())
    counted: list[int] = []
    real = os.preadv

    def counting(fd: int, buffers: Any, offset: int) -> int:
        got = real(fd, buffers, offset)
        counted.append(got)
        return got

    monkeypatch.setattr(os, "preadv", counting)
    assert checkpoint.bytes_read == 0
    units.read(1, 4)
    assert sum(counted) == checkpoint.bytes_read == units.unit_bytes
    assert units.unit_bytes < sum(p.stat().st_size for p in tmp_path.iterdir()) / 12
    assert units.read(0, 0) == unit_of(written, units.spec, 0, 0)
    assert checkpoint.bytes_read == 2 * units.unit_bytes


def test_dense_layers_and_those_beyond_the_model_do_not_count(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "deepseek", layers=2, experts=2)
    assert open_checkpoint(tmp_path).layers == (1, 2)
    (tmp_path / "config.json").unlink()  # then nothing says where the model ends
    assert open_checkpoint(tmp_path).layers == (1, 2, 3)


def test_a_single_file_an_index_and_a_text_config_are_checkpoints(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, "qwen3", shards=1)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    alone = open_checkpoint(tmp_path / "model.safetensors")
    assert alone.units(alone.weight_spec()).read(1, 3) == unit_of(
        written, alone.weight_spec(), 1, 3
    )
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    assert open_checkpoint(tmp_path).experts == 4
    two = tmp_path / "two"
    write_checkpoint(two, "qwen3", shards=2)
    assert open_checkpoint(two / "model.safetensors.index.json").experts == 4


def test_a_unit_is_read_in_pieces_straight_into_an_arena(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, "deepseek", experts=3)
    checkpoint = open_checkpoint(tmp_path)
    units = checkpoint.units(checkpoint.weight_spec())
    layout = ArenaLayout(2, 2, units.spec)
    arena = Arena.format(bytearray(layout.total_bytes), layout, 0)
    for step in (1, 7, 32, 33, units.unit_bytes):
        fill = arena.fill(1, 1, 2)
        for offset in range(0, units.unit_bytes, step):
            length = min(step, units.unit_bytes - offset)
            units.read_into(1, 2, fill.pieces(offset, length), offset)
        checksum = unit_checksum(1, 2, [unit_of(written, units.spec, 1, 2)])
        assert fill.finish(checksum) == checksum
    with pytest.raises(CheckpointError, match="were asked of a unit"):
        units.read_into(0, 0, [memoryview(bytearray(units.unit_bytes))], 1)


# ---- what is refused


def rewrite_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


EXPERT_1 = "model.layers.1.mlp.experts.1."


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.pop(EXPERT_1 + "up_proj.weight"), "layer 1 expert 1 lacks w3"),
        (
            lambda m: [m.pop(EXPERT_1 + f"{p}_proj.weight") for p in ("gate", "up", "down")],
            r"layer 1 expert 1 lacks .*w1",
        ),
        (
            lambda m: m.update({EXPERT_1 + "up_proj.weight_scale": "a.safetensors"}),
            "layer 1 expert 1 has more than others: w3_scale",
        ),
        (
            lambda m: m.update({"model.layers.0.mlp.experts.gate_up_proj": "a.safetensors"}),
            "this form is not known",
        ),
        (
            lambda m: m.update({EXPERT_1 + "w1.weight": "a.safetensors"}),
            "the same tensor of one expert",
        ),
        (lambda m: m.update({"a": "../secret.safetensors"}), "files lie beside the index"),
        (lambda m: m.clear(), "no table weight_map"),
        (
            lambda m: [m.pop(name) for name in list(m) if ".experts." in name],
            "no tensors of routed experts",
        ),
    ],
)
def test_an_index_that_is_odd_is_refused(
    tmp_path: Path, change: Callable[[dict[str, str]], object], words: str
) -> None:
    write_checkpoint(tmp_path, "qwen3")
    rewrite_index(tmp_path, change)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path)


def test_fewer_experts_than_config_says_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3", layers=1, experts=4)
    rewrite_index(tmp_path, lambda m: [m.pop(name) for name in list(m) if ".experts.3." in name])
    with pytest.raises(CheckpointError, match=r"tensors of 3 experts per layer, its config.json"):
        open_checkpoint(tmp_path)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        open_checkpoint(tmp_path / "missing")
    with pytest.raises(CheckpointError, match="nothing to read"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="only pickles, which are not read"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no other format"):
        open_checkpoint(tmp_path / "pytorch_model.bin")
    for name in ("a.safetensors", "b.safetensors"):
        write_safetensors(tmp_path / name, {})
    with pytest.raises(CheckpointError, match="2 safetensors files but no "):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match="is no JSON"):
        open_checkpoint(tmp_path)


def test_a_file_that_was_cut_off_or_changed_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mixtral", shards=1)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    checkpoint = open_checkpoint(path)
    units = checkpoint.units(checkpoint.weight_spec())
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="was changed since it was opened"):
        units.read(1, 3)
    for keep, words in (
        (len(whole) - 1, "incomplete or broken"),
        (40, "cut off within its header"),
        (4, "cut off within its header"),
        (0, "cut off within its header"),
    ):
        path.write_bytes(whole[:keep])
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(path)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        units.read(0, 0)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mixtral", shards=2)
    second = tmp_path / "model-00002-of-00002.safetensors"
    second.unlink()
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=rf"there is no file .*{second.name}"):
        checkpoint.weight_spec()
    os.mkfifo(second)
    with pytest.raises(CheckpointError, match=rf"there is no file .*{second.name}"):
        checkpoint.weight_spec()


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, "needs 12 bytes"),
        ({"dtype": "F77", "shape": [2], "data_offsets": [0, 8]}, "of dtype 'F77'"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}, "makes no sense"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}, "makes no sense"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0]}, "makes no sense"),
        ({"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}, "makes no sense"),
        ("nothing", "makes no sense"),
    ],
)
def test_a_header_that_makes_no_sense_is_refused(tmp_path: Path, entry: Any, words: str) -> None:
    text = json.dumps({"t": entry}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CheckpointError, match=words):
        TensorFile(tmp_path / "x.safetensors").tensor("t")


@given(st.data())
def test_a_file_with_any_bytes_changed_is_read_or_refused(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        write_checkpoint(Path(folder), "qwen3", layers=1, experts=1, shards=1)
        content = bytearray(path.read_bytes())
        header = 8 + int.from_bytes(content[:8], "little")
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(content)
        try:
            checkpoint = open_checkpoint(path)
            units = checkpoint.units(checkpoint.weight_spec())
            assert len(units.read(0, 0)) == units.unit_bytes
        except (CheckpointError, ConfigError):
            return


def test_a_header_of_nothing_but_brackets_is_refused(tmp_path: Path) -> None:
    text = b"[" * 200_000
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError, match="no JSON header"):
        TensorFile(tmp_path / "x.safetensors")


def test_an_expert_of_another_shape_is_named(tmp_path: Path) -> None:
    odd = Family(
        "model.layers.{layer}.mlp.experts.{expert}.{tensor}",
        {**FAMILIES["qwen3"].tensors, "down_proj.weight": ("w2", "fp32", (4, 7))},
    )
    write_checkpoint(tmp_path / "good", "qwen3", layers=1, experts=2, shards=1)
    write_checkpoint(tmp_path / "odd", odd, layers=1, experts=2, shards=1)
    index = {
        f"model.layers.0.mlp.experts.{expert}.{projection}_proj.weight": f"{expert}.safetensors"
        for expert in range(2)
        for projection in ("gate", "up", "down")
    }
    os.link(tmp_path / "good" / "model.safetensors", tmp_path / "0.safetensors")
    os.link(tmp_path / "odd" / "model.safetensors", tmp_path / "1.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    checkpoint = open_checkpoint(tmp_path)
    units = checkpoint.units(checkpoint.weight_spec())
    units.read(0, 0)
    with pytest.raises(CheckpointError, match=r"experts.1.down_proj.weight is fp32 \[4, 7\]"):
        units.read(0, 1)
    assert checkpoint.bytes_read == units.unit_bytes


def test_a_spec_that_the_checkpoint_does_not_have_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "deepseek", layers=2, experts=2)
    checkpoint = open_checkpoint(tmp_path)
    spec = checkpoint.weight_spec()
    for tensor, words in (
        (TensorSpec.of("w13", "bf16", (16, 4)), "gate_proj.weight is fp8_e4m3 .* w13 bf16"),
        (TensorSpec.of("w13", "fp8_e4m3", (8, 8)), r"fp8_e4m3 \[8, 4\], which does not make w13"),
        (TensorSpec.of("w1_bias", "bf16", (4,)), "no tensor 'w1_bias' of experts; it has w1, w3"),
    ):
        with pytest.raises(CheckpointError, match=words):
            checkpoint.units(WeightSpec((tensor, *spec.tensors[1:])))
    units = checkpoint.units(spec)
    for layer, expert in ((2, 0), (0, 2), (-1, 0)):
        with pytest.raises(CheckpointError, match="2 MoE layers of 2 experts"):
            units.read(layer, expert)


def test_scales_of_several_kinds_and_single_numbers_go_along(tmp_path: Path) -> None:
    """As nvfp4 has them: two elements in a byte, scales by 16, a factor for each matrix."""
    tensors = {}
    for name, ours, rows, columns in (
        ("gate_proj", "w1", 8, 32),
        ("up_proj", "w3", 8, 32),
        ("down_proj", "w2", 32, 16),
    ):
        tensors[f"{name}.weight"] = (ours, "uint8", (rows, columns // 2))
        tensors[f"{name}.weight_scale"] = (f"{ours}_scale", "fp8_e4m3", (rows, columns // 16))
        tensors[f"{name}.weight_scale_2"] = (f"{ours}_scale_2", "fp32", ())
        tensors[f"{name}.input_scale"] = (f"{ours}_input_scale", "fp32", ())
    written = write_checkpoint(tmp_path, Family(FAMILIES["qwen3"].name, tensors))
    checkpoint = open_checkpoint(tmp_path)
    spec = checkpoint.weight_spec()
    assert {tensor.name: tensor.shape for tensor in spec.tensors} == {
        "w13": (16, 16), "w2": (32, 8), "w13_scale": (16, 2), "w2_scale": (32, 1),
        "w13_scale_2": (2,), "w2_scale_2": (), "w13_input_scale": (2,), "w2_input_scale": (),
    }  # fmt: skip
    assert [tensor.name for tensor in spec.tensors][:2] == ["w13", "w2"]
    assert checkpoint.units(spec).read(1, 2) == unit_of(written, spec, 1, 2)


def test_scales_whose_blocks_would_span_gate_and_up_are_not_fused(tmp_path: Path) -> None:
    tensors = dict(FAMILIES["deepseek"].tensors)
    tensors["gate_proj.weight_scale_inv"] = ("w1_scale_inv", "fp32", (3, 1))
    tensors["up_proj.weight_scale_inv"] = ("w3_scale_inv", "fp32", (3, 1))
    write_checkpoint(tmp_path, Family(FAMILIES["deepseek"].name, tensors))
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="a block would span both parts of w13"):
        checkpoint.weight_spec()
    assert len(checkpoint.weight_spec(fused=False).tensors) == 6


# ---- names, and the library's own files


def test_names_of_experts_are_told_from_all_others() -> None:
    names = {
        "model.layers.3.mlp.experts.17.gate_proj.weight": (3, 17, "w1"),
        "language_model.model.layers.3.mlp.experts.17.up_proj.weight_scale_inv": (
            *(3, 17, "w3_scale_inv"),
        ),
        "layers.0.block_sparse_moe.experts.1.w2.bias": (0, 1, "w2_bias"),
        "model.layers.2.mlp.experts.down_proj": (2, None, "down_proj"),
        "model.layers.2.mlp.experts.gate_up_proj_scales": (2, None, "gate_up_proj_scales"),
        "model.layers.3.mlp.gate.weight": None,
        "model.layers.3.mlp.shared_experts.gate_proj.weight": None,
        "model.layers.3.mlp.shared_expert.down_proj.weight": None,
        "model.layers.0.mlp.gate_proj.weight": None,
        "model.layers.3.self_attn.q_proj.weight": None,
    }
    found = {t.name: (t.layer, t.expert, t.kind) for t in expert_tensors(names)}
    assert found == {name: what for name, what in names.items() if what is not None}


def test_fusing_takes_what_has_both_gate_and_up() -> None:
    assert fuse(["w1", "w3", "w2"]) == ["w13", "w2"]
    assert fuse(["w1_bias", "w1", "w2", "w3", "w3_bias"]) == ["w13", "w2", "w13_bias"]
    assert fuse(["w1", "w2", "w1_scale"]) == ["w1", "w2", "w1_scale"]
    assert in_order(["w2_bias", "w2", "w3", "w1"]) == ["w1", "w3", "w2", "w2_bias"]
    assert parts_of("w31_bias") == ("w3_bias", "w1_bias")
    assert parts_of("w11") == ("w11",)
    assert parts_of("w1_scale_2") == ("w1_scale_2",)


def test_up_before_gate_is_a_spec_too(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, "qwen3")
    checkpoint = open_checkpoint(tmp_path)
    spec = WeightSpec((TensorSpec.of("w31", "fp32", (12, 4)), TensorSpec.of("w2", "fp32", (4, 6))))
    tensors = written.units[0, 2]
    wanted = tensors["w3"] + tensors["w1"] + tensors["w2"]
    assert checkpoint.units(spec).read(0, 2) == wanted


def test_files_of_the_safetensors_library_are_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("safetensors.torch")
    base = "model.layers.0.mlp.experts."
    e4m3, e8m0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
    tensors = {
        f"{base}{expert}.{name}": (torch.rand(4, 4) + expert).to(dtype)
        for expert in range(2)
        for name, dtype in (
            ("gate_proj.weight", torch.bfloat16),
            ("up_proj.weight", torch.bfloat16),
            ("down_proj.weight", e4m3),
            ("down_proj.weight_scale", e8m0),
        )
    }
    library.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    spec = checkpoint.weight_spec()
    assert [(t.name, t.dtype.value) for t in spec.tensors] == [
        ("w13", "bf16"), ("w2", "fp8_e4m3"), ("w2_scale", "fp8_e8m0"),
    ]  # fmt: skip
    parts = ("gate_proj.weight", "up_proj.weight", "down_proj.weight", "down_proj.weight_scale")
    wanted = b"".join(
        tensors[f"{base}1.{part}"].view(torch.uint8).numpy().tobytes() for part in parts
    )
    assert checkpoint.units(spec).read(0, 1) == wanted


def test_the_library_reads_what_the_test_writer_writes(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    write_checkpoint(tmp_path, "mixtral", shards=1)
    with safetensors.safe_open(tmp_path / "model.safetensors", "np") as opened:
        name = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
        assert opened.get_slice(name).get_shape() == [6, 4]
        assert opened.get_slice(name).get_dtype() == "BF16"
