"""`elasticep checkpoint`."""

import json
import tomllib
from pathlib import Path

from click.testing import CliRunner, Result

from elasticep.checkpoint import open_checkpoint
from elasticep.cli.checkpoint import command
from elasticep.errors import CheckpointError
from elasticep.testing.checkpoints import write_checkpoint
from elasticep.weights import WeightSpec


def checkpoint(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


def test_table_says_what_an_expert_consists_of(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "deepseek", layers=3, experts=8)
    result = checkpoint(str(tmp_path))
    assert result.exit_code == 0
    for words in ("w13_scale_inv", "fp8_e4m3", "16 x 4", "the model's 1 to 3", "experts of"):
        assert words in result.output
    assert "are whole" not in result.output


def test_toml_is_what_a_group_file_takes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "deepseek")
    for flags, fused in (((), True), (("--split",), False)):
        result = checkpoint(str(tmp_path), "--output", "toml", *flags)
        tables = tomllib.loads(result.output)["weights"]
        assert WeightSpec.from_dict(tables) == open_checkpoint(tmp_path).weight_spec(fused=fused)


def test_verify_reads_everything_and_tells_checkpoints_apart(tmp_path: Path) -> None:
    sums = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_checkpoint(tmp_path / name, "qwen3", layers=2, experts=3, seed=seed, shards=seed + 1)
        result = checkpoint(str(tmp_path / name), "--verify", "--output", "json")
        report = json.loads(result.stdout)
        assert (report["layers"], report["experts"], report["unit_bytes"]) == (2, 3, 288)
        assert report["verified"]["units"] == 6
        assert report["verified"]["bytes"] == report["total_bytes"] == 6 * 288
        sums.append(report["verified"]["checksum"])
    assert sums[0] == sums[1] != sums[2]
    assert "6 experts are whole: 1.7 kB read" in checkpoint(str(tmp_path / "a"), "--verify").output


def test_what_is_wrong_is_an_error(tmp_path: Path) -> None:
    result = checkpoint(str(tmp_path / "missing"))
    assert isinstance(result.exception, CheckpointError)
    write_checkpoint(tmp_path, "qwen3", shards=2)
    last = tmp_path / "model-00002-of-00002.safetensors"
    last.write_bytes(last.read_bytes()[:-1])
    result = checkpoint(str(tmp_path), "--verify")
    assert isinstance(result.exception, CheckpointError)
    assert last.name in str(result.exception)
