"""Which process leads, and when another may know that it is gone."""

import os
import subprocess
import sys

from elasticep.control import process
from elasticep.control.election import Candidate


def test_a_process_is_gone_when_it_is_and_not_before() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    name = process.identity(child.pid)
    assert process.is_local(name)
    assert not process.is_gone(name)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process.is_gone(name), "a zombie does nothing any more"
    child.wait()
    assert process.is_gone(name)
    assert child.stdin is not None
    child.stdin.close()


def test_a_pid_that_was_given_out_anew_is_another_process() -> None:
    place, pid, started = process.identity().rsplit(":", 2)
    assert not process.is_gone(f"{place}:{pid}:{started}")
    assert process.is_gone(f"{place}:{pid}:{int(started) - 1}")


def test_nothing_is_known_of_processes_elsewhere() -> None:
    _, pid, started = process.identity().rsplit(":", 2)
    for name in ("", "x", f"other-boot:1:{pid}:{started}", f":{pid}:0"):
        assert not process.is_local(name)
        assert not process.is_gone(name)


def test_a_candidate_survives_the_store_and_rubbish_is_nobody() -> None:
    me = Candidate.new("c", "host:1")
    assert Candidate.decode(me.encode()) == me
    assert me.process == process.identity()
    assert Candidate.new("c", "host:1").id != me.id
    for value in (b"", b"{}", b"[1]", b'{"name": 1}', b"\xff"):
        assert Candidate.decode(value) == Candidate("unknown", "", "")
