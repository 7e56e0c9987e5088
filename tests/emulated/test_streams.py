"""What streams of an emulated GPU own: they may be destroyed while others wait for them."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.emulated.stand import run

SCENES = "tests.emulated.scenes_streams"
INVALID_HANDLE = 400
ROOT = Path(__file__).parents[2]


def test_a_destroyed_stream_runs_what_it_has_and_the_device_is_waited_for_till_then() -> None:
    early, statuses, said = run(f"{SCENES}:ended")
    assert early == [False]
    assert statuses == [INVALID_HANDLE] * 3
    assert said.endswith(f"failed with CUDA error {INVALID_HANDLE}")


def test_a_stream_is_waited_for_no_longer_than_for_what_it_had() -> None:
    assert run(f"{SCENES}:fed")


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, built with a sanitiser."""
    cache = (ROOT / "build" / "native" / "CMakeCache.txt").read_text()
    found = re.search(r"^ELASTICEP_CUDA_HEADERS:PATH=(.+)$", cache, re.MULTILINE)
    compiler = shutil.which("g++")
    if found is None or compiler is None:
        pytest.skip("neither CUDA's headers nor g++ are where the build had them")
    program = tmp_path_factory.mktemp("stress") / "streams"
    sources = sorted((ROOT / "csrc" / "emulated").glob("*.cpp"))
    built = subprocess.run(
        [
            *(compiler, "-std=c++17", "-g", "-fsanitize=address", "-pthread"),
            *("-isystem", found[1], "-o", str(program)),
            *map(str, (Path(__file__).parent / "streams_stress.cpp", *sources)),
        ],
        capture_output=True,
        text=True,
    )
    if built.returncode and "asan" in built.stderr:
        pytest.skip("g++ has no AddressSanitizer here")
    assert built.returncode == 0, built.stderr
    return program


@pytest.mark.long
def test_streams_and_graphs_come_and_go_while_others_wait_for_them(stress: Path) -> None:
    """When a stream's thread deleted it, this was a use after free in each of its runs."""
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}  # what lives till the end
    done = subprocess.run([stress], capture_output=True, text=True, env=environment, timeout=120)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-4000:]
