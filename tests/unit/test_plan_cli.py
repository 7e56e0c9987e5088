"""`elasticep plan`: the figures it prints, and one line for what it cannot use."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from elasticep.cli.main import cli
from elasticep.errors import ConfigError
from elasticep.models import load_model, shape_from_config
from elasticep.spec import PRESET_NAMES

MIB = 2**20
FLASH = ("--model", "deepseek-v4.1-flash")
MIXTRAL = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_local_experts": 8,
    "torch_dtype": "bfloat16",
}
QWEN = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [1, 3],
}
DEEPSEEK = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "quantization_config": {"quant_method": "fp8"},
}


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *arguments])


def report(*arguments: str) -> dict[str, Any]:
    result = plan(*arguments, "--output", "json")
    assert result.exit_code == 0, result.output
    loaded: dict[str, Any] = json.loads(result.stdout)
    return loaded


def presets(loaded: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["preset"]: row for row in loaded["presets"]}


def test_json_has_every_figure() -> None:
    loaded = report(*FLASH, "--ranks", "8", "--tokens", "64")
    rows = presets(loaded)
    assert [*rows, "AUTO"] == list(PRESET_NAMES)
    assert loaded["cap"] == 128
    assert loaded["slots_per_rank"] == 48
    assert loaded["row_bytes"] == 10240
    assert loaded["expert_weight_bytes_per_step"] / 1e9 == pytest.approx(36.1, abs=0.05)
    assert rows["LOW_LATENCY"]["rows_of_room"] == 49152
    assert rows["LOW_LATENCY"]["arriving_rows"] == 384
    assert rows["ROUTED"]["copies"] == pytest.approx(4.43, abs=5e-4)
    assert rows["ROUTED"]["out_bytes"] / MIB == pytest.approx(2.77, abs=5e-3)
    assert rows["ROUTED"]["out_remote_bytes"] == pytest.approx(rows["ROUTED"]["out_bytes"] * 7 / 8)
    assert rows["EXPAND"]["back_remote_bytes"] < rows["LOW_LATENCY"]["back_remote_bytes"]
    assert [name for name, row in rows.items() if row["cpu_waits"]] == ["NORMAL", "EXPAND_SYNC"]
    both = rows["NORMAL"]["buffer_bytes"] + rows["LOW_LATENCY"]["buffer_bytes"]
    assert loaded["auto"]["buffer_bytes"] == both


def test_prefill() -> None:
    rows = presets(report(*FLASH, "--ranks", "8", "--tokens", "4096"))
    assert rows["ROUTED"]["rows_of_room"] == 32768
    delivered = [rows[name]["out_bytes"] / MIB for name in ("ALLGATHER", "LOW_LATENCY", "ROUTED")]
    assert delivered == pytest.approx([320, 240, 177.2], abs=0.05)


def test_wire_formats_slots_and_caps() -> None:
    loaded = report(
        *(*FLASH, "--ranks", "64", "--tokens", "64", "--cap", "200", "--slots", "13"),
        *("--wire", "nvfp4", "--combine-wire", "fp8"),
    )
    assert (loaded["row_bytes"], loaded["combine_row_bytes"]) == (2880, 5280)
    assert presets(loaded)["EXPAND"]["rows_of_room"] == 13 * 64 * 200


def test_sms() -> None:
    run = (*FLASH, "--ranks", "2", "--tokens", "64")
    assert presets(report(*run))["ROUTED"]["sms"] == 16
    assert presets(report(*run, "--num-sms", "20"))["ROUTED"]["sms"] == 20
    assert presets(report(*run, "--link-gbs", "100", "--sm-gbs", "100"))["ROUTED"]["sms"] == 2


def test_one_rank_moves_nothing_over_links() -> None:
    rows = presets(report(*FLASH, "--ranks", "1", "--tokens", "4"))
    assert all(row["out_remote_bytes"] == 0 == row["back_remote_bytes"] for row in rows.values())


def test_table() -> None:
    result = plan("--model", "deepseek-v3", "--ranks", "8", "--tokens", "64", "--wire", "fp8")
    assert result.exit_code == 0
    for name in PRESET_NAMES:
        assert name in result.stdout
    assert "5.29" in result.stdout  # copies per token
    assert "…" not in result.stdout  # nothing is cut off


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ranks", "0", "--tokens", "64"), "'--ranks': 0 is not in the range 1<=x<=128"),
        (("--ranks", "999", "--tokens", "64"), "1<=x<=128"),
        (("--ranks", "eight", "--tokens", "64"), "'eight' is not a valid integer"),
        (("--ranks", "8"), "Missing option '--tokens'"),
        (("--ranks", "8", "--tokens", "-1"), "'--tokens': -1"),
        (("--ranks", "8", "--tokens", "64", "--wire", "int4"), "'int4' is not one of"),
        (("--ranks", "8", "--tokens", "64", "--combine-wire", "nvfp4"), "'nvfp4' is not one of"),
        (("--ranks", "8", "--tokens", "300", "--cap", "256"), "cap of 256; raise"),
        (("--ranks", "8", "--tokens", "64", "--slots", "3"), "raise slots_per_rank"),
        (("--ranks", "8", "--tokens", "64", "--link-gbs", "nan"), "pass measured rates"),
        (("--ranks", "8", "--tokens", "64", "--num-sms", "4096"), "1 to 1024"),
        (("--ranks", "8", "--tokens", "64", "--fast"), "No such option"),
    ],
)
def test_nonsense_is_refused_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = plan(*FLASH, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_config_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    for path in (tmp_path, tmp_path / "config.json"):
        loaded = report("--model", str(path), "--ranks", "4", "--tokens", "64")
        assert loaded["model"]["experts"] == 8
        assert loaded["slots_per_rank"] == 2
        assert loaded["expert_bytes"] == 3 * 4096 * 14336 * 2
        assert loaded["arena_bytes"] == 32 * 2 * loaded["expert_bytes"]


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (MIXTRAL, (4096, 8, 2, 32, 14336, "bf16")),
        # every second of 48 layers (1, 3, 5, ...), but not layers 1 and 3
        (QWEN, (2048, 128, 8, 22, 768, "bf16")),
        ({**QWEN, "num_hidden_layers": 2, "mlp_only_layers": []}, (2048, 128, 8, 1, 768, "bf16")),
        (DEEPSEEK, (7168, 256, 8, 58, 2048, "fp8")),
        ({**DEEPSEEK, "moe_layer_freq": [0, 0, 1, 1]}, (7168, 256, 8, 2, 2048, "fp8")),
        ({**DEEPSEEK, "moe_layer_freq": 2}, (7168, 256, 8, 29, 2048, "fp8")),
        (
            {"text_config": MIXTRAL, "quantization_config": {"quant_method": "mxfp4"}},
            (4096, 8, 2, 32, 14336, "fp4"),
        ),
        ({**MIXTRAL, "torch_dtype": "float32"}, (4096, 8, 2, 32, 14336, "fp32")),
    ],
)
def test_key_names_of_model_families(
    config: dict[str, Any], shape: tuple[int, int, int, int, int, str]
) -> None:
    got = shape_from_config(config, name="m")
    assert shape == (
        got.hidden,
        got.experts,
        got.topk,
        got.moe_layers,
        got.intermediate,
        got.weights,
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 64}, "none of n_routed_experts, num_local_experts, num_experts"),
        ({**MIXTRAL, "hidden_size": None}, "none of hidden_size"),
        ({**MIXTRAL, "hidden_size": "big"}, "hidden_size is 'big'"),
        ({**MIXTRAL, "num_local_experts": 1}, "not an MoE model"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, "picks 9 of 8 experts"),
        ({**MIXTRAL, "num_hidden_layers": 10**9}, "the limit is 4096"),
        ({**DEEPSEEK, "first_k_dense_replace": 61}, "no layer with experts"),
    ],
)
def test_configs_that_describe_no_moe_model(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shape_from_config(config, name="m")


@pytest.mark.parametrize(("content", "message"), [("[1]", "no JSON object"), ("{", "as JSON")])
def test_files_that_are_no_config(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_model(str(path))


def test_oversized_and_missing_files(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"\0" * ((4 << 20) + 1))
    with pytest.raises(ConfigError, match="is it the right file"):
        load_model(str(path))
    result = plan("--model", "gpt-9", "--ranks", "8", "--tokens", "64")
    assert result.exit_code == 2
    assert "deepseek-v4.1-flash, deepseek-v3, or the path" in result.stderr
