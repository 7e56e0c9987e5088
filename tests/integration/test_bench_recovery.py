"""The recovery bench: kills, survivors that go on, and a rank that comes back, every time."""

import json
from pathlib import Path

import pytest

from elasticep.bench import recovery, recovery_planes
from elasticep.bench.ranks import BenchError

# Nobody hangs: who is not scheduled for a second on a busy machine is not to be expelled.
SMALL = ["--ranks", "3", "--layers", "2", "--hang-timeout-ms", "20000"]


def recoveries(tmp_path: Path, *words: str) -> list[dict[str, float]]:
    output = tmp_path / "recovery.json"
    assert recovery.main([*SMALL, *words, "--output", str(output)]) == 0
    found: list[dict[str, float]] = json.loads(output.read_text())["figures"]["recoveries"]
    return found


@pytest.mark.parametrize(("what", "launch"), [("worker", "service"), ("engine", "inline")])
def test_local_plane_recovers_from_every_kill(tmp_path: Path, what: str, launch: str) -> None:
    found = recoveries(
        tmp_path, "--plane", "local", "--kill", what, "--launch", launch, "--kills", "3"
    )
    assert len(found) == 3
    for one in found:
        assert 0 < one["dead word"] <= one["proposed"] <= one["adopted by the first"]
        assert one["adopted by the last"] <= one["recovery"]


@pytest.mark.timeout(400)
def test_cluster_plane_recovers_and_tells_its_moments(tmp_path: Path) -> None:
    (one,) = recoveries(tmp_path, "--kills", "1")
    assert 0 < one["daemon knows"] <= one["proposed"] <= one["adopted by the first"]
    assert one["adopted by the last"] <= one["recovery"]


@pytest.mark.timeout(400)
def test_experts_that_a_death_lost_are_in_place_before_the_survivors_go_on(tmp_path: Path) -> None:
    words = ("--case", "lost-experts", "--kills", "1", "--unit-bytes", "4096")
    (one,) = recoveries(tmp_path, *words)
    assert one["proposed"] <= one["lost experts in place"] <= one["adopted by the last"]
    assert one["adopted by the last"] <= one["recovery"]


def test_what_makes_no_sense_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert recovery.main(["--plane", "local", "--kill", "hang"]) == 1
    assert "use --plane cluster" in capsys.readouterr().err
    assert recovery.main(["--plane", "local", "--case", "lost-experts"]) == 1
    assert "use --plane cluster" in capsys.readouterr().err
    assert recovery.main(["--launch", "inline"]) == 1
    assert "use --kill engine" in capsys.readouterr().err


@pytest.mark.parametrize("pid", [-1, 0, 1])
def test_process_groups_are_never_killed(pid: int) -> None:
    with pytest.raises(BenchError, match="may kill"):
        recovery_planes.kill(pid, 0)
