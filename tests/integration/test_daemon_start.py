"""How a daemon starts, quickly or not at all."""

import socket
import subprocess
import sys
from pathlib import Path

from elasticep.geometry import GroupGeometry
from elasticep.spec import ExchangeSpec
from elasticep.testing.lab import Lab, small_config
from elasticep.testing.node import DaemonProcess


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


def test_memory_that_is_short_ends_the_seat_with_both_numbers_and_pauses() -> None:
    huge = ExchangeSpec.preset("ROUTED", max_tokens=65_536)
    geometry = GroupGeometry(
        layers=1, experts=4, topk=2, hidden=16_384, slots_per_rank=4, max_ranks=128
    )
    with Lab() as lab:
        lab.create(small_config(geometry=geometry, exchanges=(("x", huge),)))
        daemon = lab.daemon("n0", "g:0")
        cause = lab.dead(0, 1).cause
        assert "needs" in cause
        assert "are available" in cause
        lab.dead(0, 3)
        times = [e["timestamp"] for e in daemon.events("seat.start_failed")]
        assert len(times) >= 3
        from datetime import datetime

        first, second, third = (datetime.fromisoformat(t.replace("Z", "")) for t in times[:3])
        assert (second - first).total_seconds() >= 0.1
        assert (third - second).total_seconds() >= 0.2


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
