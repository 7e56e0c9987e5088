"""Workers, engines and controllers that die or stop under a daemon."""

import os
import signal
from pathlib import Path

import pytest

from elasticep.group import Launch
from elasticep.proto import controller_pb2, types_pb2
from elasticep.testing.fake_controller import FakeController
from elasticep.testing.lab import Lab, small_config
from elasticep.testing.node import DaemonProcess, view_of, wait_for
from elasticep.testing.processes import alive, stop


def memory_of(pid: int) -> set[int]:
    """Inodes of the headers that a process maps; a daemon maps nothing else."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {int(x.split()[4]) for x in lines if "memfd:elasticep-" in x and "-header" in x}


def descriptors(daemon: DaemonProcess) -> int:
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


def test_a_killed_worker_is_replaced_on_the_same_memory() -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0-1")
        engines = lab.serve(daemon, [0, 1])
        old = daemon.seat("g", 1).worker_pid
        memory = memory_of(daemon.pid)
        engines[0].say("step")
        os.kill(old, signal.SIGKILL)
        assert lab.dead(1).cause == "worker died"
        assert engines[1].ask("step").startswith("error Fenced")
        assert engines[1].ask("close") == "closed"
        lab.empty(1)
        lab.ready(1, 2)
        assert engines[1].ask("close") == "closed"  # it let go in time and lives
        new = daemon.seat("g", 1).worker_pid
        assert new != old
        assert memory_of(daemon.pid) == memory
        assert memory_of(new) <= memory
        again = lab.engine(daemon, "g", 1).up()
        both = {0: (1, "n0"), 1: (2, "n0")}
        lab.controller.propose(view_of(small_config(), 2, 1, both, {1: 1}), {"n0": [1]})
        again.say("step")
        assert lab.staged(1, 2).error == ""
        lab.controller.propose(view_of(small_config(), 2, 1, both, {1: 1}), {"n0": [0]})
        lab.joined([engines[0], again], 2)


def test_an_engine_that_does_not_let_go_is_killed_after_its_grace() -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0", "--engine-grace-s", "1")
        engine = lab.engine(daemon, "g", 0).up()
        lab.attached(0)
        stop(engine.pid)
        worker = daemon.seat("g", 0).worker_pid
        os.kill(worker, signal.SIGKILL)
        lab.dead(0)
        assert engine.wait() == -signal.SIGKILL
        lab.empty(0)
        assert not alive(worker)
        lab.ready(0, 2)
        events = daemon.events()
        dead = next(e for e in events if e["event"] == "rank.dead")
        kill = next(e for e in events if e["event"] == "process.kill" and e["role"] == "engine")
        assert seconds(kill) - seconds(dead) >= 0.9


def seconds(event: dict[str, str]) -> float:
    from datetime import datetime

    return datetime.fromisoformat(event["timestamp"].replace("Z", "+00:00")).timestamp()


def test_a_stopped_worker_that_is_expelled_is_killed() -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0-1")
        engines = lab.serve(daemon, [0, 1])
        worker = daemon.seat("g", 1).worker_pid
        stop(worker)
        fence = controller_pb2.Fence(group="g", rank=1, incarnation=1, epoch=2, reason="hung")
        lab.controller.fence("n0", fence)
        assert lab.dead(1).cause == "hung"
        wait_for(lambda: not alive(worker), "the stopped worker to be gone")
        assert engines[1].ask("close") == "closed"
        lab.ready(1, 2)


@pytest.mark.parametrize("launch", list(Launch))
def test_twenty_deaths_leave_no_process_and_no_descriptor(launch: Launch) -> None:
    with Lab() as lab:
        lab.create(small_config(launch=launch, initial_ranks=1))
        daemon = lab.daemon("n0", "g:0")
        lab.ready(0)
        settled = 0
        for incarnation in range(1, 21):
            lab.ready(0, incarnation)
            if launch is Launch.SERVICE and incarnation % 4:
                os.kill(daemon.seat("g", 0).worker_pid, signal.SIGKILL)
            else:
                engine = lab.engine(daemon, "g", 0).up()
                lab.attached(0, incarnation)
                engine.signal(signal.SIGKILL)
            lab.empty(0, incarnation)
            if incarnation == 4:
                settled = descriptors(daemon)
        lab.ready(0, 21)
        wait_for(lambda: descriptors(daemon) <= settled + 2, "descriptors to be closed")
        workers = [p for p in lab.processes() if p != daemon.pid]
        wait_for(
            lambda: (
                len([p for p in lab.processes() if p != daemon.pid and alive(p)])
                == (launch is Launch.SERVICE)
            ),
            f"one worker at most, not {workers}",
        )


def test_without_its_controller_a_node_goes_on_and_says_later_what_happened() -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0-1")
        engines = lab.serve(daemon, [0, 1])
        lab.controller.close()
        wait_for(lambda: daemon.events("controller.lost"), "the daemon to notice")
        assert lab.step(engines) == ["stepped 1 2 1"] * 2
        engines[1].signal(signal.SIGKILL)
        wait_for(lambda: daemon.events("rank.dead"), "the death to be seen")
        answer = engines[0].ask("step 300")
        assert answer.startswith("error StepTimeout"), answer
        wait_for(
            lambda: daemon.seat("g", 1).seat.state == types_pb2.SEAT_STATE_EMPTY,
            "the seat to be empty",
        )
        lab.controller = FakeController(lab.folder)
        lab.controller.auto_grant = False
        hello = lab.controller.wait(lambda _, m: m.HasField("hello"), "a hello").hello
        seats = {seat.rank: seat for seat in hello.seats}
        assert (seats[0].state, seats[0].incarnation, seats[0].epoch) == (
            types_pb2.SEAT_STATE_ATTACHED,
            1,
            1,
        )
        assert (seats[1].state, seats[1].incarnation) == (types_pb2.SEAT_STATE_EMPTY, 1)
        assert seats[1].cause == "engine died"
        # What no hello carries follows it.
        assert lab.staged(0, 1).error == ""
        assert lab.adopted(0, 1).incarnation == 1


def test_a_daemon_finds_the_controller_that_leads() -> None:
    with Lab() as lab:
        standby = FakeController(lab.folder, "standby")
        addresses = ["unix:///nowhere.sock", standby.address, lab.controller.address]
        daemon = DaemonProcess(lab.folder / "n0", "n0", addresses, "g:0")
        lab.daemons.append(daemon.start())
        standby.wait(lambda _, m: m.HasField("hello"), "a hello to the first that answers")
        standby.close()
        lab.controller.wait(lambda _, m: m.HasField("hello"), "a hello to the next")
        lab.create(small_config())
        lab.ready(0)
