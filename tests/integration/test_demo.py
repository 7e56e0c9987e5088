"""The whole slice: `elasticep demo` with real processes and real kills, and nothing left behind."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import pytest

from elasticep.testing.demos import DemoRun, run_demo, start_demo

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(400)

CLEANUP_S = 60.0
SLOW_MS = 20_000  # nothing is waited for so long but a busy machine
KEYS = [
    *("ranks", "nodes", "killed", "detect_ms", "recover_ms", "steps_repeated"),
    *("tokens_total", "tokens_identical", "requests_lost", "epochs", "details"),
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """The temporary directory of a run; it must be empty when the run is over."""
    with tempfile.TemporaryDirectory(prefix="eep-test-") as name:
        yield Path(name)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "elasticep.cli.main", "demo", *arguments]


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(folder), **more}


def users_of(folder: Path) -> list[str]:
    """Processes that work in the folder, or whose environment or command line names it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes()
            told = line + (process / "environ").read_bytes() + os.readlink(process / "cwd").encode()
        except OSError:
            continue
        if os.fsencode(str(folder)) in told and int(process.name) != os.getpid():
            found.append(f"{process.name}: {line.replace(bytes(1), b' ').decode()}")
    return found


def left_behind(folder: Path) -> list[str]:
    """What is left of a run, after a grace."""
    end = time.monotonic() + CLEANUP_S
    while True:
        left = [*users_of(folder), *(str(path) for path in folder.iterdir())]
        if not left or time.monotonic() > end:
            return left
        select.select([], [], [], 0.05)


def good_demo(folder: Path, *arguments: str, **variables: str) -> dict[str, Any]:
    done = demo(folder, *arguments, "--output", "json", "--timeout", "360", **variables)
    return report_of(folder, done)


def demo(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    return run_demo(arguments, folder, environment(folder, **variables), timeout_s=380.0)


def report_of(folder: Path, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What a run tells that went well."""
    assert done.returncode == 0, done.stderr + done.stdout
    assert left_behind(folder) == []
    report: dict[str, Any] = json.loads(done.stdout)
    assert list(report) == KEYS
    assert report["tokens_identical"] is True
    assert report["requests_lost"] == 0
    assert report["details"]["replay_errors"] == 0
    assert report["details"]["logits_differing"] == []
    return report


@pytest.mark.long
@pytest.mark.parametrize(("scenario", "epochs"), [("rejoin", [1, 2, 3]), ("scale", [1, 2, 3, 4])])
def test_ranks_come_back_join_and_are_drained_under_load(
    folder: Path, scenario: str, epochs: list[int]
) -> None:
    """Same seat under a new incarnation; 4 ranks, then 6, then 3: nothing lost, no token changed.

    Two joiners may come in with one view or with one each, so an epoch may be missing.
    """
    report = good_demo(folder, "--ranks", "4", "--scenario", scenario, "--tokens", "12")
    assert report["epochs"][-1] in (epochs[-1], epochs[-1] - 1)
    assert report["details"]["scenario"] == scenario


@pytest.mark.long
def test_experts_move_by_their_load_and_steps_go_on(folder: Path) -> None:
    """A skewed router: the load evens out, no token changes, and nobody waits for weights.

    These move so slowly that a step which waited for them would take seconds, and no step of a busy
    machine does.
    """
    arguments = ("--ranks", "4", "--scenario", "rebalance", "--tokens", "100")
    rate = 100_000
    report = good_demo(folder, *arguments, ELASTICEP_DAEMON_WEIGHTS_RATE=str(rate))
    figures = report["details"]["rebalance"]
    assert figures["done"]
    assert figures["moves"] > 0
    assert figures["move_bytes"] > 0
    assert figures["imbalance_before"] > 1.4
    assert figures["imbalance_planned"] < 1.1
    assert figures["imbalance_after"] < 1.3
    assert figures["steps_watched"] > 0
    weights_ms = figures["move_bytes"] / report["nodes"] / figures["views"] / rate * 1e3
    assert weights_ms > 3_000
    assert figures["step_ms_longest"] < weights_ms / 2, figures
    assert figures["steps_waited"] is (figures["step_ms_longest"] > figures["step_ms_limit"])
    assert figures["step_ms_limit"] > figures["step_ms_usual"] > 0
    assert len(report["epochs"]) == 1 + figures["views"]


@pytest.mark.parametrize(("kill", "ranks"), [("worker", 8), ("engine", 4)])
def test_dead_rank_costs_no_request_and_changes_no_token(
    folder: Path, kill: str, ranks: int
) -> None:
    report = good_demo(folder, "--ranks", str(ranks), "--kill", kill, "--tokens", "10")
    assert (report["ranks"], report["nodes"], report["killed"]) == (ranks, 2, kill)
    assert report["tokens_total"] == ranks * 3 * 10
    assert report["epochs"] == [1, 2]
    assert report["steps_repeated"] >= 1
    assert report["details"]["requests_moved"] == 3
    # Far below any time-out: it was noticed, not waited for.
    assert 0 < report["detect_ms"] < 4000
    assert report["detect_ms"] < report["recover_ms"] < SLOW_MS


@pytest.mark.long
@pytest.mark.parametrize(("restore", "source"), [("backup", "backup"), ("disk", "checkpoint")])
def test_experts_that_only_the_dead_rank_had_are_restored(
    folder: Path, restore: str, source: str
) -> None:
    """No replica: survivors wait for the dead rank's 4 experts of each layer, no longer."""
    arguments = ("--scenario", "lost-expert", "--restore", restore, "--tokens", "10")
    report = good_demo(folder, *arguments)
    assert report["details"]["restored"] == {source: 16}
    assert report["epochs"] == [1, 2]
    assert report["steps_repeated"] >= 1
    assert report["detect_ms"] < report["recover_ms"] < SLOW_MS


@pytest.mark.parametrize("kill", ["daemon", "controller"])
def test_death_off_the_data_path_is_not_even_noticed(folder: Path, kill: str) -> None:
    report = good_demo(folder, "--kill", kill, "--tokens", "10")
    assert report["epochs"] == [1]
    assert report["steps_repeated"] == 0
    assert report["detect_ms"] is None
    assert report["details"]["requests_moved"] == 0


def test_one_rank_alone(folder: Path) -> None:
    """As it is typed: other runs here begin in a process that has imported everything."""
    done = subprocess.run(
        command("--ranks", "1", "--kill", "none", "--tokens", "4", "--output", "json"),
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=380,
    )
    report = report_of(folder, done)
    assert report["recover_ms"] is None
    assert report["tokens_total"] == 12


@pytest.fixture
def endless(folder: Path) -> Iterator[tuple[DemoRun, IO[str]]]:
    """A demo in the middle of decoding, without an end in sight, and what it says."""
    arguments = ("--kill", "none", "--tokens", "1000", "--output", "json", "--timeout", "360")
    reading, writing = os.pipe()
    with open(reading) as errors, open(os.devnull, "wb") as out:
        with open(writing, "wb") as told:
            environ = environment(folder)
            run = start_demo(arguments, folder, environ, stdout=out, stderr=told)
        with closing(run):
            wait_for_line(errors, "members [0, 1, 2, 3]")
            yield run, errors


def wait_for_line(stream: IO[str], words: str) -> None:
    seen = []
    for line in stream:
        seen.append(line)
        if words in line:
            return
    pytest.fail(f"no line with {words!r} in:\n{''.join(seen)}")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_demo_that_is_ended_leaves_nothing_behind(
    folder: Path, endless: tuple[DemoRun, IO[str]], number: int
) -> None:
    run, _ = endless
    users = users_of(folder)
    assert any("elasticep.runtime.worker" in user for user in users)
    assert sum("elasticep.testing.demos" in user for user in users) == 1 + 4  # and its engines
    run.send_signal(number)
    assert run.wait(120.0) != 0
    assert left_behind(folder) == []


def test_supervisor_that_is_killed_ends_the_demo_and_leaves_nothing_behind(
    folder: Path, endless: tuple[DemoRun, IO[str]]
) -> None:
    run, errors = endless
    supervisor = next(
        int(user.split(":")[0]) for user in users_of(folder) if "testing.supervisor" in user
    )
    os.kill(supervisor, signal.SIGKILL)
    wait_for_line(errors, "error: UNAVAILABLE: the supervisor of the local cluster ended")
    assert run.wait(120.0) == 1
    assert left_behind(folder) == []


@pytest.mark.parametrize(
    ("etcd", "message"),
    [
        ("/bin/false", "error: UNAVAILABLE: etcd of the local cluster ended"),
        ("/no/such/etcd", "names '/no/such/etcd', which is no program"),
    ],
)
def test_failed_start_says_why_and_leaves_nothing_behind(
    folder: Path, etcd: str, message: str
) -> None:
    done = demo(folder, "--output", "json", ELASTICEP_ETCD=etcd)
    assert done.returncode == 1
    assert message in done.stderr
    told = json.loads(done.stdout)["error"]["message"]
    assert message.removeprefix("error: UNAVAILABLE: ") in told
    assert left_behind(folder) == []


def test_settings_that_cannot_work_are_one_line(folder: Path) -> None:
    done = subprocess.run(
        command("--ranks", "3", "--nodes", "4"),
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stderr == "error: CONFIG_INVALID: --nodes is 4; use 1 to 3\n"
