"""Checkpoints that transformers itself wrote: units are the tensors that models compute with."""

from pathlib import Path
from typing import Any

import pytest

from elasticep.checkpoint import open_checkpoint
from elasticep.weights import split_unit

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
DEEPSEEK = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
FAMILIES: dict[str, tuple[dict[str, Any], int]] = {  # config, columns of an expert's matrices
    "Mixtral": ({"num_local_experts": 4}, 24),
    "Qwen2Moe": ({"num_experts": 4, "shared_expert_intermediate_size": 8}, 8),
    "Qwen3Moe": ({"num_experts": 4}, 8),
    "DeepseekV2": (DEEPSEEK, 8),
    "DeepseekV3": (DEEPSEEK, 8),
    "Olmoe": ({"num_experts": 4}, 24),
    "Glm4Moe": ({"n_routed_experts": 4, "first_k_dense_replace": 1, "head_dim": 8}, 8),
}


def build(family: str, changes: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    return getattr(transformers, f"{family}ForCausalLM")(config)


def save(model: Any, folder: Path) -> None:
    transformers.logging.disable_progress_bar()
    model.save_pretrained(folder, max_shard_size="8KB")
    assert (folder / "model.safetensors.index.json").exists(), "many files"


def experts_of(model: Any) -> list[Any]:
    found = [m for n, m in model.named_modules() if n.endswith("mlp.experts")]
    assert found
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_units_are_what_the_model_computes_with(tmp_path: Path, family: str, dtype: Any) -> None:
    changes, inner = FAMILIES[family]
    model = build(family, changes).to(dtype)
    save(model, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    blocks = experts_of(model)
    first = changes.get("first_k_dense_replace", 0)
    assert checkpoint.layers == tuple(range(first, SIZES["num_hidden_layers"]))
    assert (len(blocks), checkpoint.experts) == (len(checkpoint.layers), 4)
    spec = checkpoint.weight_spec()
    assert [(t.name, t.shape) for t in spec.tensors] == [
        ("w13", (2 * inner, 16)),
        ("w2", (16, inner)),
    ]
    units = checkpoint.units(spec)
    for layer, block in enumerate(blocks):
        for expert in range(4):
            parts = split_unit(spec, units.read(layer, expert))
            for name, weight in (("w13", block.gate_up_proj), ("w2", block.down_proj)):
                got = torch.from_numpy(parts[name].copy().view("uint8")).view(dtype)
                assert torch.equal(got.view(weight[expert].shape), weight[expert]), (layer, expert)
    assert checkpoint.bytes_read == len(blocks) * 4 * spec.unit_bytes


def test_experts_that_lie_in_one_tensor_are_taken_apart(tmp_path: Path) -> None:
    changes = {"num_local_experts": 4, "head_dim": 8, "layer_types": ["full_attention"] * 3}
    model = build("GptOss", changes)
    save(model, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.layers, checkpoint.experts) == ((0, 1, 2), 4)
    spec = checkpoint.weight_spec()
    for layer, block in enumerate(experts_of(model)):
        for expert in range(4):
            parts = split_unit(spec, checkpoint.units(spec).read(layer, expert))
            for name, array in parts.items():
                wanted = getattr(block, name)[expert]
                got = torch.from_numpy(array.copy())
                assert torch.equal(got, wanted), (name, layer, expert)
