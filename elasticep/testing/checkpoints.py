"""Small seeded checkpoints in the forms of known families, written without torch.

`write_checkpoint` makes a folder as Hugging Face has them (config.json, an index, shards) with the
tensors of the experts and a few others around them that nobody should read.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from elasticep.weights import TensorSpec, WeightSpec

_SAFETENSORS_DTYPE: Final = {
    "fp32": "F32", "fp16": "F16", "bf16": "BF16", "fp8_e4m3": "F8_E4M3", "fp8_e5m2": "F8_E5M2",
    "fp8_e8m0": "F8_E8M0", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint8": "U8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family:
    """How one family writes its experts down.

    Attributes:
        name: of the tensors of one expert, with `{layer}`, `{expert}` and `{tensor}`; of all
            experts where it has no `{expert}`.
        tensors: per expert: the family's name of a tensor -> (our name, dtype, shape).
        config: what config.json says besides the numbers of layers and experts.
        experts_key: what config.json calls the number of experts.
    """

    name: str
    tensors: Mapping[str, tuple[str, str, tuple[int, ...]]]
    config: Mapping[str, Any] = field(default_factory=dict)
    experts_key: str = "num_experts"

    def spec(self) -> WeightSpec:
        """One expert as it is stored, nothing fused, in the order of `tensors`."""
        return WeightSpec(tuple(TensorSpec.of(*tensor) for tensor in self.tensors.values()))


def _gate_up_down(
    dtype: str, rows: int, hidden: int
) -> dict[str, tuple[str, str, tuple[int, ...]]]:
    return {
        "gate_proj.weight": ("w1", dtype, (rows, hidden)),
        "up_proj.weight": ("w3", dtype, (rows, hidden)),
        "down_proj.weight": ("w2", dtype, (hidden, rows)),
    }


FAMILIES: Final[Mapping[str, Family]] = {
    "mixtral": Family(
        "model.layers.{layer}.block_sparse_moe.experts.{expert}.{tensor}",
        {
            "w1.weight": ("w1", "bf16", (6, 4)),
            "w3.weight": ("w3", "bf16", (6, 4)),
            "w2.weight": ("w2", "bf16", (4, 6)),
        },
        experts_key="num_local_experts",
    ),
    "qwen3": Family(
        "model.layers.{layer}.mlp.experts.{expert}.{tensor}", _gate_up_down("fp32", 6, 4)
    ),
    "deepseek": Family(
        "model.layers.{layer}.mlp.experts.{expert}.{tensor}",
        {
            **_gate_up_down("fp8_e4m3", 8, 4),
            "gate_proj.weight_scale_inv": ("w1_scale_inv", "fp32", (2, 1)),
            "up_proj.weight_scale_inv": ("w3_scale_inv", "fp32", (2, 1)),
            "down_proj.weight_scale_inv": ("w2_scale_inv", "fp32", (1, 2)),
        },
        {"first_k_dense_replace": 1},
        experts_key="n_routed_experts",
    ),
    "gpt-oss": Family(
        "model.layers.{layer}.mlp.experts.{tensor}",
        {
            "gate_up_proj_blocks": ("gate_up_proj_blocks", "uint8", (12, 1, 16)),
            "gate_up_proj_scales": ("gate_up_proj_scales", "uint8", (12, 1)),
            "gate_up_proj_bias": ("gate_up_proj_bias", "bf16", (12,)),
            "down_proj_blocks": ("down_proj_blocks", "uint8", (4, 2, 16)),
            "down_proj_scales": ("down_proj_scales", "uint8", (4, 2)),
            "down_proj_bias": ("down_proj_bias", "bf16", (4,)),
        },
        experts_key="num_local_experts",
    ),
}
"""By name; sizes are a few elements."""


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """What was written.

    Attributes:
        path: the folder.
        family: of it.
        units: (MoE layer, expert) -> our name of a tensor -> its bytes.
    """

    path: Path
    family: Family
    units: Mapping[tuple[int, int], Mapping[str, bytes]]


def write_checkpoint(
    folder: Path,
    family: str | Family = "qwen3",
    *,
    layers: int = 2,
    experts: int = 4,
    shards: int = 2,
    seed: int = 0,
) -> WrittenCheckpoint:
    """Write a checkpoint of random bytes.

    Args:
        folder: made if it is not there.
        family: a name of `FAMILIES`, or one of your own.
        layers: MoE layers; with `first_k_dense_replace` as many dense ones come before them, and a
            layer that predicts further tokens after them.
        experts: per layer.
        shards: files, among which tensors are dealt out in turn.
        seed: of the bytes.
    """
    kind = FAMILIES[family] if isinstance(family, str) else family
    rng = random.Random(seed)
    dense = int(kind.config.get("first_k_dense_replace", 0))
    extra = 1 if dense else 0
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    units: dict[tuple[int, int], dict[str, bytes]] = {}
    for layer in range(dense + layers + extra):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = ("bf16", (64,), rng.randbytes(128))
        if layer < dense:
            tensors[prefix + "mlp.gate_proj.weight"] = ("bf16", (64,), rng.randbytes(128))
            continue
        tensors[prefix + "mlp.gate.weight"] = ("bf16", (experts, 64), rng.randbytes(128 * experts))
        shared = prefix + "mlp.shared_experts.gate_proj.weight"
        tensors[shared] = ("bf16", (64,), rng.randbytes(128))
        for name, (ours, dtype, shape) in kind.tensors.items():
            size = TensorSpec.of(ours, dtype, shape).nbytes
            parts = [rng.randbytes(size) for _ in range(experts)]
            if "{expert}" not in kind.name:
                full = kind.name.format(layer=layer, tensor=name)
                tensors[full] = (dtype, (experts, *shape), b"".join(parts))
            for expert, part in enumerate(parts):
                if "{expert}" in kind.name:
                    full = kind.name.format(layer=layer, expert=expert, tensor=name)
                    tensors[full] = (dtype, shape, part)
                if layer < dense + layers:
                    units.setdefault((layer - dense, expert), {})[ours] = part
    config = {**kind.config, "num_hidden_layers": dense + layers, kind.experts_key: experts}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    _write_shards(folder, tensors, shards)
    return WrittenCheckpoint(folder, kind, units)


def _write_shards(
    folder: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]], shards: int
) -> None:
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return
    files = [f"model-{n + 1:05}-of-{shards:05}.safetensors" for n in range(shards)]
    where = {name: files[index % shards] for index, name in enumerate(tensors)}
    for file in files:
        chosen = {name: tensor for name, tensor in tensors.items() if where[name] == file}
        write_safetensors(folder / file, chosen)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_safetensors(
    path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]
) -> None:
    """Write a safetensors file.

    Args:
        path: of the file.
        tensors: name -> (dtype as in `WeightDtype`, shape, bytes).
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {
            "dtype": _SAFETENSORS_DTYPE[dtype],
            "shape": list(shape),
            "data_offsets": [at, at + len(data)],
        }
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    body = b"".join(data for _, _, data in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
