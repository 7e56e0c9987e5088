"""`elasticep up`: says where everything is, starts again what ends, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from elasticep.cli.up import _follow
from elasticep.testing.cluster import Cluster
from elasticep.testing.etcd import LocalEtcd
from elasticep.testing.units import descendants

_ELASTICEP = [sys.executable, "-m", "elasticep.cli.main"]


@contextmanager
def up(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*_ELASTICEP, "up", *arguments], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next event; the test's own limit ends a wait for one that does not come."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "it ended"
    event: dict[str, Any] = json.loads(line)
    return event


def ask(where: dict[str, Any], *command: str) -> str:
    done = subprocess.run(
        [*_ELASTICEP, *command, "--controllers", ",".join(where["controllers"])],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout


def etcd_below(pid: int) -> list[int]:
    """The etcd processes of a cluster."""
    return [
        below
        for below in descendants(pid)
        if b"--listen-peer-urls" in Path(f"/proc/{below}/cmdline").read_bytes().split(b"\0")
    ]


def test_what_ends_is_started_again_and_a_stop_leaves_nothing() -> None:
    with up("mine", "--ranks", "3", "--nodes", "2", "--output", "json") as process:
        where = told(process)
        assert (where["event"], where["group"]) == ("up", "mine")
        assert [node["ranks"] for node in where["nodes"]] == [[0], [1, 2]]
        assert all(Path(node["socket"]).is_socket() for node in where["nodes"])
        assert "node-1" in ask(where, "status")

        os.kill(where["pids"]["daemon-1"], signal.SIGKILL)
        ended, again = told(process), told(process)
        assert ended == {"event": "exited", "name": "daemon-1", "status": -signal.SIGKILL}
        assert (again["event"], again["name"]) == ("ready", "daemon-1")
        assert again["pid"] != where["pids"]["daemon-1"]

        (etcd,) = etcd_below(process.pid)
        os.kill(etcd, signal.SIGKILL)
        assert told(process) == {"event": "exited", "name": "etcd m0", "status": -signal.SIGKILL}
        ask(where, "group", "show")  # it answers when a controller leads again

        below = [os.pidfd_open(pid) for pid in descendants(process.pid)]
        assert len(below) >= 5  # supervisor, etcd, controller, daemons
        process.send_signal(signal.SIGTERM)
        assert told(process) == {"event": "stopped"}
        assert process.wait(120) == 0
        assert not Path(where["logs"]).exists()
        for pidfd in below:
            with pytest.raises(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, 0)
            os.close(pidfd)


def test_an_etcd_that_runs_already_is_used_and_left_alone() -> None:
    with LocalEtcd() as etcd:
        arguments = ("--ranks", "1", "--etcd-endpoints", ",".join(etcd.endpoints))
        with up(*arguments, "--output", "json") as process:
            where = told(process)
            assert where["etcd"] == list(etcd.endpoints)
            process.send_signal(signal.SIGINT)
            assert told(process) == {"event": "stopped"}
            assert process.wait(120) == 0
        assert etcd.leader().pid


def test_a_signal_that_comes_just_before_a_wait_is_heard_within_a_second() -> None:
    """Such a signal does not end the wait: Python acts on it when that is over."""
    waits: list[float] = []

    class Quiet:
        def events(self, timeout: float) -> list[dict[str, Any]]:
            waits.append(timeout)
            if len(waits) == 3:
                raise KeyboardInterrupt
            return []

    with pytest.raises(KeyboardInterrupt):
        _follow(cast(Cluster, Quiet()), lambda _: None)
    assert len(waits) == 3
    assert max(waits) <= 1.0


def test_a_person_reads_what_to_set() -> None:
    with up("mine", "--ranks", "2") as process:
        assert process.stdout is not None
        lines: list[str] = []
        while not lines or "Ctrl-C" not in lines[-1]:
            lines.append(process.stdout.readline())
            assert lines[-1], "it ended"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "everything is stopped\n"
    text = "".join(lines)
    for rank in range(2):
        assert f"ELASTICEP_RANK={rank} ELASTICEP_SOCKET=/" in text
    assert "export ELASTICEP_CONTROLLERS=unix:///" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["Mine"], "'Mine' is no group"),
        (["mine", "--ranks", "2", "--nodes", "3"], "3 nodes for 2 ranks"),
        (["mine", "--ranks", "70000"], "ascending and at most"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_started(
    arguments: list[str], says: str
) -> None:
    done = subprocess.run(
        [*_ELASTICEP, "up", *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 1
    assert says in done.stderr
    assert done.stdout == ""
