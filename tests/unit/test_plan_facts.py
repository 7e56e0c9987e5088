"""Known figures of two models, out of `elasticep plan`: those that papers and engines give."""

import json
from typing import Any

import pytest
from click.testing import CliRunner

from elasticep.cli.main import cli

MIB = 2**20
FLASH, V3 = "deepseek-v4.1-flash", "deepseek-v3"
HIDDEN = 5120


def plan(model: str, ranks: int, tokens: int, *more: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The report, and its rows by preset."""
    words = ["plan", "--model", model, "--ranks", str(ranks), "--tokens", str(tokens), *more]
    result = CliRunner().invoke(cli, [*words, "--output", "json"])
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report, {row["preset"]: row for row in report["presets"]}


@pytest.mark.parametrize(
    ("model", "ranks", "copies"),
    [
        (FLASH, 4, 3.297),
        (FLASH, 8, 4.43),
        (FLASH, 16, 5.166),
        (FLASH, 32, 5.584),
        (FLASH, 64, 5.807),
        (V3, 2, 1.993),
        (V3, 4, 3.614),
        (V3, 8, 5.295),
        (V3, 64, 7.676),
    ],
)
def test_copies_of_a_token(model: str, ranks: int, copies: float) -> None:
    report, rows = plan(model, ranks, 64)
    for preset in ("NORMAL", "EXPAND", "EXPAND_SYNC", "ROUTED"):
        assert rows[preset]["copies"] == pytest.approx(copies, abs=6e-4)
    assert rows["ALLGATHER"]["copies"] == ranks
    assert rows["LOW_LATENCY"]["copies"] == report["model"]["topk"]


@pytest.mark.parametrize(
    ("tokens", "everyone", "per_expert", "per_rank", "digits"),
    [(4096, 320.0, 240.0, 177.2, 0.05), (64, 5.0, 3.75, 2.77, 0.005)],
)
def test_delivered_bytes(
    tokens: int, everyone: float, per_expert: float, per_rank: float, digits: float
) -> None:
    _, rows = plan(FLASH, 8, tokens)
    mib = {name: row["out_bytes"] / MIB for name, row in rows.items()}
    assert mib["ALLGATHER"] == everyone
    assert mib["LOW_LATENCY"] == per_expert
    for preset in ("NORMAL", "EXPAND", "EXPAND_SYNC", "ROUTED"):
        assert mib[preset] == pytest.approx(per_rank, abs=digits)


@pytest.mark.parametrize(
    ("wire", "row"), [("bf16", 10240), ("fp8", 5280), ("mxfp8", 5280), ("nvfp4", 2880)]
)
def test_bytes_of_a_row(wire: str, row: int) -> None:
    report, _ = plan(FLASH, 8, 64, "--wire", wire)
    assert report["row_bytes"] == row
    assert report["combine_row_bytes"] == 10240


def test_round_trips() -> None:
    """fp8 out and bf16 back to six ranks, without scales; four bits out and eight back."""
    report, rows = plan(FLASH, 8, 64, "--wire", "fp8")
    scales = HIDDEN // 128 * 4
    there_and_back = report["row_bytes"] - scales + report["combine_row_bytes"]
    assert rows["LOW_LATENCY"]["copies"] * there_and_back == 92160
    four_bits, _ = plan(FLASH, 8, 64, "--wire", "nvfp4")
    assert 2 * 10240 / (four_bits["row_bytes"] + HIDDEN) == 2.56


def test_room() -> None:
    report, rows = plan(FLASH, 8, 64)
    assert report["cap"] == 128  # the engines' default too
    assert report["slots_per_rank"] == 48
    assert rows["LOW_LATENCY"]["rows_of_room"] == 49152
    assert rows["LOW_LATENCY"]["arriving_rows"] == 384
    assert rows["EXPAND_SYNC"]["rows_of_room"] % 128 == 0
    _, rows = plan(FLASH, 8, 4096)
    assert rows["ROUTED"]["rows_of_room"] == 32768
    # DeepEP's low-latency mode ends at 1024 rows per rank; there is no such limit here.
    _, rows = plan(FLASH, 8, 64, "--cap", "1025")
    assert rows["LOW_LATENCY"]["rows_of_room"] == 48 * 8 * 1025


def test_expert_weights() -> None:
    for ranks, gigabytes in ((8, 36.1), (64, 4.5)):
        report, _ = plan(FLASH, ranks, 64)
        model = report["model"]
        elements = model["matrices"] * model["hidden"] * model["intermediate"]
        assert elements / 1e6 == pytest.approx(35.4, abs=0.05)
        assert report["expert_bytes"] / 1e6 == pytest.approx(18.8, abs=0.05)
        read = report["expert_weight_bytes_per_step"] / 1e9
        assert read == pytest.approx(gigabytes, abs=0.05)
    # Seven redundant experts per GPU on 64 GPUs.
    report, _ = plan(FLASH, 64, 64, "--slots", str(384 // 64 + 7))
    assert report["slots_per_rank"] == 13


def test_sms() -> None:
    """One SM stores 45.8 GB/s of the 358 that the link carries: eight fill it."""
    _, rows = plan(FLASH, 8, 64, "--num-sms", "8")
    assert {row["sms"] for row in rows.values()} == {8}
    for ranks, sms in ((2, 16), (8, 9), (64, 8)):
        _, rows = plan(FLASH, ranks, 64)
        assert rows["ROUTED"]["sms"] == sms
