"""Shapes of MoE models: known ones by name, others from a Hugging Face `config.json`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from elasticep.errors import ConfigError
from elasticep.geometry import MAX_LAYERS
from elasticep.traffic import expert_bytes, experts_read
from elasticep.wire import RowFormat

MAX_CONFIG_BYTES: Final = 4 << 20

WEIGHT_FORMATS: Final[Mapping[str, RowFormat]] = {
    "fp32": RowFormat(32),
    "bf16": RowFormat(16),
    "fp16": RowFormat(16),
    "fp8": RowFormat(8, block=128 * 128, scale_bytes=4),
    "fp4": RowFormat(4, block=32, scale_bytes=1),
}
"""How expert weights are stored: fp8 with an fp32 scale per 128 x 128 block, fp4 (MXFP4) with a
one-byte scale per 32 elements."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What an exchange needs to know of a model.

    Attributes:
        name: for messages.
        hidden: elements of a hidden state.
        experts, topk: routed experts per layer, and how many the router picks per token.
        moe_layers: layers with routed experts.
        intermediate: columns of an expert's matrices; 0 when not known.
        matrices: matrices of an expert, hidden x intermediate elements each.
        weights: key of `WEIGHT_FORMATS`.
    """

    name: str
    hidden: int
    experts: int
    topk: int
    moe_layers: int
    intermediate: int
    matrices: int = 3
    weights: str = "bf16"

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert in one layer, scales included."""
        weights = WEIGHT_FORMATS[self.weights]
        return expert_bytes(self.hidden, self.intermediate, self.matrices, weights)

    def weight_bytes_per_step(self, ranks: int, tokens: int) -> float:
        """Expert weights that a rank reads in a step of `tokens` rows per rank, all layers.

        moe_layers * experts that any token picked * expert bytes (`traffic.experts_read`).
        """
        read = experts_read(self.experts, self.topk, ranks, tokens)
        return self.moe_layers * read * self.expert_bytes


KNOWN_MODELS: Final[Mapping[str, ModelShape]] = {
    "deepseek-v4.1-flash": ModelShape(
        name="deepseek-v4.1-flash",
        hidden=5120,
        experts=384,
        topk=6,
        moe_layers=40,
        intermediate=2304,
        weights="fp4",
    ),
    "deepseek-v3": ModelShape(
        name="deepseek-v3",
        hidden=7168,
        experts=256,
        topk=8,
        moe_layers=58,
        intermediate=2048,
        weights="fp8",
    ),
}


def load_model(name_or_path: str) -> ModelShape:
    """A known model by name, or the shape in a `config.json` (or in a folder that has one).

    Raises `ConfigError` when there is no such model or file, or when the file describes no MoE
    model.
    """
    known = KNOWN_MODELS.get(name_or_path.lower())
    if known is not None:
        return known
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        names = ", ".join(KNOWN_MODELS)
        raise ConfigError(
            f"there is no model or file {name_or_path!r}; use one of {names}, or the path of a "
            "Hugging Face config.json"
        )
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ConfigError(
            f"{path} has {path.stat().st_size} bytes, a config.json has at most "
            f"{MAX_CONFIG_BYTES}; is it the right file?"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}); give a config.json") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no JSON object; give a Hugging Face config.json")
    return shape_from_config(config, name=str(path))


def shape_from_config(config: Mapping[str, Any], *, name: str) -> ModelShape:
    """Read the key names of Mixtral, Qwen-MoE, DeepSeek and their relatives.

    Multimodal configs are read at their `text_config`. Raises `ConfigError` naming the keys that
    were looked for.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        quantised = {key: config[key] for key in ("quantization_config",) if key in config}
        config = {**quantised, **text}
    experts = _whole(config, name, "n_routed_experts", "num_local_experts", "num_experts")
    topk = _whole(config, name, "num_experts_per_tok", "num_experts_per_token", "experts_per_token")
    if experts < 2:
        raise ConfigError(f"{name} has {experts} routed experts: it is not an MoE model")
    if topk > experts:
        raise ConfigError(f"{name} picks {topk} of {experts} experts; its config.json is broken")
    layers = _whole(config, name, "num_hidden_layers")
    if layers > MAX_LAYERS:
        raise ConfigError(f"{name} has {layers} layers, the limit is {MAX_LAYERS}; check the file")
    moe_layers = _moe_layers(config, layers)
    if moe_layers < 1:
        raise ConfigError(f"{name} has no layer with experts; its config.json is broken")
    return ModelShape(
        name=name,
        hidden=_whole(config, name, "hidden_size"),
        experts=experts,
        topk=topk,
        moe_layers=moe_layers,
        intermediate=_whole(config, name, "moe_intermediate_size", "intermediate_size"),
        weights=_weights(config),
    )


def _whole(config: Mapping[str, Any], name: str, *keys: str) -> int:
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name}: {key} is {value!r}; it must be a whole number above 0")
        return value
    raise ConfigError(
        f"{name} has none of {', '.join(keys)}; give the config.json of a mixture-of-experts model"
    )


def _moe_layers(config: Mapping[str, Any], layers: int) -> int:
    # DeepSeek: from `first_k_dense_replace` on, every `moe_layer_freq`-th (or a list of flags).
    # Qwen: every `decoder_sparse_step`-th that is not in `mlp_only_layers`.
    first = _optional(config, "first_k_dense_replace", 0)
    frequency = config.get("moe_layer_freq", 1)
    if isinstance(frequency, list):
        return sum(1 for flag in frequency[:layers] if flag)
    every = max(1, frequency) if isinstance(frequency, int) else 1
    step = max(1, _optional(config, "decoder_sparse_step", 1))
    listed = config.get("mlp_only_layers")
    dense = set(listed) if isinstance(listed, list) else set()
    return sum(
        1
        for layer in range(layers)
        if layer >= first and layer % every == 0 and (layer + 1) % step == 0 and layer not in dense
    )


def _optional(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key)
    return value if isinstance(value, int) else default


def _weights(config: Mapping[str, Any]) -> str:
    quantised = config.get("quantization_config")
    method = str(quantised.get("quant_method", "")) if isinstance(quantised, Mapping) else ""
    if "fp4" in method:
        return "fp4"
    if "fp8" in method:
        return "fp8"
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return {"float32": "fp32", "float16": "fp16"}.get(dtype, "bf16")
