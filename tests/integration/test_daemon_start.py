"""How a daemon starts, quickly or not at all."""

import os
import re
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

import grpc
import pytest

from elasticep.geometry import GroupGeometry
from elasticep.proto import types_pb2
from elasticep.spec import ExchangeSpec
from elasticep.testing.lab import Lab, small_config
from elasticep.testing.node import DaemonProcess, reason_of, wait_for


def failed(daemon: DaemonProcess) -> str:
    """The one line that a daemon which could not start wrote."""
    assert daemon.process is not None
    assert daemon.process.wait(120) == 2
    lines = [x for x in daemon.log_path.read_text().splitlines() if x and not x.startswith("{")]
    assert len(lines) == 1, lines
    return lines[0]


def test_failed_starts_are_one_line_and_leave_nothing() -> None:
    with Lab() as lab, socket.create_server(("127.0.0.1", 0)) as busy:
        first = lab.daemon("n0", "g:0")
        files = set(first.folder.iterdir())
        port = busy.getsockname()[1]
        (lab.folder / "file.log").touch()
        junk = __file__
        cases = (
            ("n0", (), "another daemon runs in"),
            ("file.log", (), "cannot use the socket directory"),
            ("f0", ("--metrics-port", str(port)), "cannot serve /metrics"),
            ("f7", ("--metrics-port", "0", "--metrics-host", "no.host.invalid"),
             "set metrics_host to an address of this host"),
            ("f8", ("--metrics-port", "0", "--metrics-host", "a" * 80), "set metrics_host to"),
            ("f1", ("--listen", f"127.0.0.1:{port}"), "Address already in use; stop"),
            ("f2", ("--listen", "0.0.0.0:7000"), "without TLS"),
            ("f3", ("--tls-cert", "/none", "--tls-key", "/none", "--tls-ca", "/none",
                    "--listen", "127.0.0.1:0"), "cannot read the TLS file"),
            ("f6", ("--tls-cert", junk, "--tls-key", junk, "--tls-ca", junk), "cannot be used"),
            ("f4", ("--orphan-after-s", "0"), "orphan_after_s"),
            ("f5", ("--seats", "nonsense"), "seats such as"),
        )  # fmt: skip
        daemons = []
        for number, (folder, flags, _) in enumerate(cases):
            daemon = lab.daemon(folder, "g:0", *flags, start=False)
            daemon.log_path = lab.folder / f"{number}.log"
            daemons.append(daemon.start(wait=False))
        for daemon, (folder, _, text) in zip(daemons, cases, strict=True):
            line = failed(daemon)
            assert line.startswith("error: CONFIG_INVALID: "), line
            assert text in line
            assert folder[0] != "f" or not daemon.folder.is_dir()
        assert set(first.folder.iterdir()) == files
        assert first.status().node == "n0"


def test_a_checkpoint_that_cannot_be_one_is_told_before_anything_is_loaded() -> None:
    with Lab() as lab:
        code = lab.folder / "code.log"
        code.mkdir()
        (code / "readme.log").touch()
        bad = lab.daemon("n0", "g:0", "--checkpoint", f"g={code}", start=False).start(wait=False)
        line = failed(bad)
        assert line.startswith("error: CONFIG_INVALID: daemon.checkpoint of group g: ")
        assert f"{code} has no model.safetensors.index.json" in line
        assert "elasticep checkpoint" in line
        assert not bad.folder.is_dir()
        # One that may be mounted later is waited for, in log and status.
        daemon = lab.daemon("n1", "g:0", "--checkpoint", f"g={code}/later,h={code}")
        (event,) = daemon.events("checkpoint.away")
        assert (event["path"], event["groups"]) == (f"{code}/later", ["g"])
        assert [event["group"] for event in daemon.events("checkpoint.unused")] == ["h"]
        (told,) = daemon.status().checkpoints
        assert (told.group, told.path) == ("g", f"{code}/later")
        assert "mount the checkpoint there" in told.problem
        # A daemon that others' engines wait for starts all the same.
        lab.create(small_config())
        lab.engine(daemon, "g", 0).up()
        lab.attached(0)
        daemon.kill()
        (code / "later").mkdir()
        (code / "later" / "notes.log").touch()
        daemon.start()
        event = daemon.events("checkpoint.away")[-1]
        assert event["level"] == "error"
        assert event["why"] == daemon.status().checkpoints[0].problem
        assert daemon.seat("g", 0).seat.incarnation == 1


def refused(daemon: DaemonProcess, group: str, rank: int, wait_ms: int) -> tuple[str, str]:
    """The word and the sentence of an attach that fails, long before the time it may take."""
    began = time.monotonic()
    with pytest.raises(grpc.RpcError) as caught:
        daemon.attach(group, rank, wait_ms=wait_ms)
    assert time.monotonic() - began < wait_ms / 2000
    return reason_of(caught.value), cast(grpc.Call, caught.value).details() or ""


def test_memory_that_is_short_ends_the_seat_with_both_numbers_and_pauses() -> None:
    huge = ExchangeSpec.preset("ROUTED", max_tokens=65_536)
    geometry = GroupGeometry(
        layers=1, experts=4, topk=2, hidden=16_384, slots_per_rank=4, max_ranks=128
    )
    with Lab() as lab:
        lab.create(small_config(geometry=geometry, exchanges=(("x", huge),)))
        daemon = lab.daemon("n0", "g:0")
        cause = lab.dead(0, 1).cause
        # What is available changes from one try to the next.
        wanted, available = r"memory '[\w-]+' needs \d+ bytes", r" and \d+ are available; lower "
        assert (told := re.match(wanted + available, cause)), cause
        for _ in range(2):  # also who asks while it is tried again
            word, text = refused(daemon, "g", 0, wait_ms=120_000)
            assert word == "MEMORY_SHORT"
            assert (again := re.match(wanted + available, text)), text
            assert again[0].split(" and ")[0] == told[0].split(" and ")[0]
        lab.dead(0, 3)
        times = [e["timestamp"] for e in daemon.events("seat.start_failed")]
        assert len(times) >= 3
        from datetime import datetime

        first, second, third = (datetime.fromisoformat(t.replace("Z", "")) for t in times[:3])
        assert (second - first).total_seconds() >= 0.1
        assert (third - second).total_seconds() >= 0.2


def limits_of(pid: int) -> tuple[int, int]:
    """Soft and hard limit of a process's descriptors."""
    return resource.prlimit(pid, resource.RLIMIT_NOFILE)


def limited(soft: int, hard: int, *arguments: str) -> subprocess.Popen[str]:
    """`elasticep` under these limits of descriptors; its log comes from `stderr`."""
    code = (
        "import os, resource, sys;"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}));"
        "os.execv(sys.executable, [sys.executable, '-m', 'elasticep.cli.main', *sys.argv[1:]])"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("daemon", "--seats", "g:0-1", "--socket-dir", "{folder}/d"),
        ("controller", "--store", "memory", "--listen", "unix://{folder}/c.sock"),
    ],
    ids=["daemon", "controller"],
)
def test_what_serves_takes_the_hard_limit_of_descriptors(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    filled = [argument.format(folder=tmp_path) for argument in arguments]
    with limited(100, 500, *filled) as process:
        assert process.stderr is not None
        while ".listening" not in (line := process.stderr.readline()):
            assert line, "it ended"
        try:
            assert limits_of(process.pid) == (500, 500)
        finally:
            process.terminate()
            process.communicate(timeout=60)


def test_a_daemon_that_knows_no_controller_says_so(tmp_path: Path) -> None:
    with limited(100, 500, "daemon", "--seats", "g:0", "--socket-dir", str(tmp_path)) as process:
        assert process.stderr is not None
        said = ""
        while "daemon.ready" not in said:
            line = process.stderr.readline()
            assert line, "it ended"
            said += line
        process.terminate()
        process.communicate(timeout=60)
    assert '"controller.none"' in said
    assert "daemon.controllers" in said


def test_seats_that_need_more_descriptors_than_there_can_be_are_refused(tmp_path: Path) -> None:
    process = limited(100, 100, "daemon", "--seats", "g:0-3;h:0-3", "--socket-dir", str(tmp_path))
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "8 seats in 2 groups need 144 file descriptors and this process may have 100" in said
    assert "LimitNOFILE" in said


def test_a_seat_that_finds_no_descriptors_ends_with_the_reason() -> None:
    """A group that comes when the others have taken them; those are not disturbed."""
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0;h:0")
        engines = lab.serve(daemon, [0])
        assert daemon.process is not None
        pid = daemon.process.pid
        held = len(os.listdir(f"/proc/{pid}/fd"))
        soft, hard = limits_of(pid)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (held + 32, hard))
        lab.create(small_config("h", initial_ranks=1))
        cause = lab.dead(0, 1, "h").cause
        assert "a seat of group 'h' needs 8 file descriptors; this process has" in cause
        assert "LimitNOFILE" in cause
        assert lab.step(engines)[0].startswith("stepped 1 ")
        word, text = refused(daemon, "h", 0, wait_ms=120_000)
        assert (word, text) == ("DESCRIPTORS_SHORT", cause)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
        ready = types_pb2.SEAT_STATE_READY  # under which incarnation is the tries' affair
        wait_for(lambda: daemon.seat("h", 0).seat.state == ready, "its seat of h is ready")


def test_the_daemon_starts_quickly_and_without_torch() -> None:
    code = (
        "import sys, time; t = time.process_time();"
        "import grpc.aio, numpy, prometheus_client, structlog;"
        "print(time.process_time() - t);"
        "import elasticep.cli.daemon, elasticep.runtime.daemon, elasticep.runtime.logs;"
        "print(time.process_time() - t);"
        "print(sorted({'torch', 'etcd3', 'elasticep.client', 'elasticep.control'}"
        " & set(sys.modules)))"
    )
    done = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    outputs = [d.stdout.splitlines() for d in done]
    assert outputs[0][2] == "[]"
    # Seconds of CPU, so that a busy machine does not matter, and of what it cannot do without, so
    # that a slow one does not either.
    assert min(float(lines[1]) / float(lines[0]) for lines in outputs) < 4.0


def test_a_worker_imports_next_to_nothing() -> None:
    code = (
        "import sys, elasticep.runtime.worker;"
        "print(sorted({'torch', 'numpy', 'grpc', 'asyncio', 'google', 'structlog', 'subprocess'}"
        " & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    usage = subprocess.run(
        [sys.executable, "-m", "elasticep.runtime.worker"], capture_output=True, text=True
    )
    assert usage.returncode == 2
    assert "started by the daemon" in usage.stderr


def test_the_log_of_a_daemon_is_events_with_keys(tmp_path: Path) -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0")
        lab.ready(0)
        events = {event["event"] for event in daemon.events()}
        assert {"daemon.ready", "controller.connected", "memory.reserved", "seat.ready"} <= events
        assert all(event["node"] == "n0" for event in daemon.events())
