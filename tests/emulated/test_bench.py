"""`bench gpus` as on a machine of several GPUs, from one end to the other."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elasticep.testing import emulated_cuda

ROOT = Path(__file__).parent.parent.parent


def rehearse(out: Path, ranks: int, *variants: str) -> None:
    """A run of so many ranks, on a GPU each."""
    command = [sys.executable, "-m", "elasticep.bench", "gpus", "--out", str(out)]
    command += ["--models", "rehearsal", "--tokens", "4", "130", "--runs", "1"]
    command += ["--kill-rounds", "1", "--variants", *variants]
    environment = {**os.environ, **emulated_cuda.environment(devices=ranks, sms=2)}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    found = json.loads((out / "gpus.json").read_text())
    timed = {(x["variant"], x["tokens"]) for x in found["exchange"]}
    assert timed == {(v, n) for v in variants for n in (4, 130) if n == 4 or "LOW" not in v}
    assert all(x["total_us"] > 0 and x["nccl_us"] == 0 for x in found["exchange"])
    assert [(k["ranks"], k["killed"]) for k in found["kills"]] == [(ranks, 1), (ranks, 2)]
    assert {t["state"] for t in found["tasks"]} == {"done"}
    assert "| ROUTED fp8 | 4 |" in (out / "gpus.md").read_text()


@pytest.mark.timeout(180)
def test_exchanges_and_kills_of_one_and_of_two_ranks(tmp_path: Path) -> None:
    rehearse(tmp_path, 3, "ROUTED fp8")


@pytest.mark.long
@pytest.mark.timeout(180)
def test_all_of_it_with_eight_ranks(tmp_path: Path) -> None:
    rehearse(tmp_path, 8, "ROUTED fp8", "LOW_LATENCY fp8", "NORMAL")
