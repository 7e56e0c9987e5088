"""Supervised processes: readiness, the descriptor store, restarts, and nothing left behind."""

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticep.testing.units import Unit, UnitSpec, descendants

DEADLINE_S = 60.0

# A service that keeps a memfd in the store and says what it was given back.
SERVICE = """
import array, os, socket, sys, time
def notify(text, fds=()):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.connect(os.environ["NOTIFY_SOCKET"])
        s.sendmsg([text.encode()],
                  [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])
count = int(os.environ.get("LISTEN_FDS", 0))
if count:
    assert os.environ["LISTEN_PID"] == str(os.getpid())
    names = os.environ["LISTEN_FDNAMES"].split(":")
    contents = [os.pread(3 + i, 99, 0).decode() for i in range(count)]
    print("got", *(f"{n}={c}" for n, c in zip(names, contents)), flush=True)
else:
    for name in ("a", "b", "c"):
        fd = os.memfd_create(name)
        os.write(fd, name.upper().encode())
        notify(f"FDSTORE=1\\nFDNAME={name}\\nFDPOLL=0", [fd])
        notify(f"FDSTORE=1\\nFDNAME={name}\\nFDPOLL=0", [fd])
    notify("FDSTOREREMOVE=1\\nFDNAME=b")
notify("READY=1\\nSTATUS=up")
signal = __import__("signal"); signal.pause()
"""


def wait_for(condition: Callable[[], bool], what: str, fd: int = -1) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"not in time: {what}"
        select.select([fd] if fd >= 0 else [], [], [], 0.01)


@pytest.fixture
def unit(tmp_path: Path) -> Iterator[Unit]:
    spec = UnitSpec(
        name="service", argv=(sys.executable, "-c", SERVICE), log=tmp_path / "service.log"
    )
    made = Unit(spec, tmp_path / "notify")
    yield made
    if made.signal(signal.SIGKILL):
        made.reap()
    made.close()


def test_descriptors_outlive_the_process_that_stored_them(unit: Unit) -> None:
    unit.start()
    wait_for(unit.read_notify, "ready", unit.notify.fileno())
    assert unit.stored == ("a", "c")  # each once, b removed
    first = unit.pid
    unit.signal(signal.SIGKILL)
    assert unit.reap() == -signal.SIGKILL
    unit.start()
    wait_for(unit.read_notify, "ready again", unit.notify.fileno())
    assert unit.pid != first
    assert "got a=A c=C" in unit.log_tail()


def test_a_program_that_cannot_be_run_is_seen_in_the_log(tmp_path: Path) -> None:
    spec = UnitSpec(name="x", argv=("/no/such/program",), log=tmp_path / "log")
    made = Unit(spec, tmp_path / "notify")
    made.start()
    assert made.reap() == 127
    assert "/no/such/program" in made.log_tail()
    made.close()


def test_start_limit_counts_only_recent_starts(unit: Unit) -> None:
    now = time.monotonic()
    unit._starts = [now - 1] * 4 + [now - 100]
    assert unit.may_start(now)
    unit._starts.append(now)
    assert not unit.may_start(now)


def test_descendants_are_found_and_orphans_adopted() -> None:
    code = textwrap.dedent("""
        import subprocess, sys
        from elasticep.testing.units import adopt_orphans, descendants
        import os
        adopt_orphans()
        middle = subprocess.Popen(
            ["sh", "-c", "sleep 100 & echo $!; exec sleep 100"], stdout=subprocess.PIPE, text=True)
        grandchild = int(middle.stdout.readline())
        assert set(descendants(os.getpid())) == {middle.pid, grandchild}
        middle.kill(); middle.wait()
        assert descendants(os.getpid()) == [grandchild]
        os.kill(grandchild, 9)
        assert os.waitpid(grandchild, 0)[0] == grandchild
        middle.stdout.close()
    """)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert descendants(2**22 + 1) == []


def test_a_unit_dies_with_its_supervisor(tmp_path: Path) -> None:
    code = textwrap.dedent(f"""
        import os, sys
        from pathlib import Path
        from elasticep.testing.units import Unit, UnitSpec
        unit = Unit(UnitSpec(name="s", argv=("/bin/sleep", "100"), log=Path("{tmp_path}/log")),
                    Path("{tmp_path}/notify"))
        unit.start()
        print(unit.pid, flush=True)
        sys.stdin.read()
    """)
    supervisor = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert supervisor.stdout is not None
    assert supervisor.stdin is not None
    pidfd = os.pidfd_open(int(supervisor.stdout.readline()))
    supervisor.kill()
    supervisor.wait()
    assert select.select([pidfd], [], [], DEADLINE_S)[0], "it outlived its supervisor"
    os.close(pidfd)
    supervisor.stdout.close()
    supervisor.stdin.close()
