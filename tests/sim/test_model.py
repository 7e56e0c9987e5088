"""The models hold, and spin finds every bug that is planted in them."""

import shutil
import subprocess
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[2] / "docs" / "model" / "check.sh"


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("spin") is None, reason="spin is not installed (Debian: spin)")
def test_model_holds_and_planted_bugs_are_found() -> None:
    done = subprocess.run(["bash", CHECK, "quick"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("12 passed, 0 failed\n")
