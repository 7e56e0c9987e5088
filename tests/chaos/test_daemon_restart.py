"""The daemon itself dies, is restarted, or leaves: workers and engines do not notice."""

import os
import signal
from pathlib import Path

import pytest

from elasticep.group import Launch
from elasticep.proto import types_pb2
from elasticep.testing.lab import Lab, small_config
from elasticep.testing.node import DaemonProcess, wait_for
from elasticep.testing.processes import stop
from elasticep.testing.systemd import Systemd

ATTACHED = types_pb2.SEAT_STATE_ATTACHED


def hello_after_restart(lab: Lab, daemon: DaemonProcess) -> dict[int, types_pb2.Seat]:
    """Start the daemon again; the seats of its first hello, by rank."""
    lab.controller.forget()
    daemon.start()
    hello = lab.controller.wait(lambda _, m: m.HasField("hello"), "a hello").hello
    return {seat.rank: seat for seat in hello.seats}


@pytest.mark.parametrize("launch", list(Launch))
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])
def test_processes_outlive_the_daemon_and_come_back(launch: Launch, number: signal.Signals) -> None:
    with Lab() as lab:
        lab.create(small_config(launch=launch))
        daemon = lab.daemon("n0", "g:0-2")
        engines = lab.serve(daemon, [0, 1])
        lab.ready(2)
        before = {s.seat.rank: (s.worker_pid, s.engine_pid) for s in daemon.status().seats}
        status = daemon.stop(number)
        assert status == (0 if number is signal.SIGUSR1 else -signal.SIGKILL)
        assert lab.step(engines) == ["stepped 1 2 1"] * 2  # nobody is there, and nobody minds
        seats = hello_after_restart(lab, daemon)
        for rank in (0, 1):
            assert (seats[rank].state, seats[rank].incarnation) == (ATTACHED, 1)
            assert lab.staged(rank, 1).error == ""
            assert lab.adopted(rank, 1).step == 2
        wait_for(lambda: len(daemon.events("seat.reattached")) >= 2, "runners to come back")
        after = {s.seat.rank: (s.worker_pid, s.engine_pid) for s in daemon.status().seats}
        assert {rank: after[rank] for rank in (0, 1)} == {r: before[r] for r in (0, 1)}
        if launch is Launch.SERVICE:
            assert after[2] == before[2]
        assert lab.step(engines) == ["stepped 1 3 1"] * 2
        # It watches them again, and a dead one is replaced.
        victim = before[1][0] if launch is Launch.SERVICE else before[1][1]
        os.kill(victim, signal.SIGKILL)
        lab.dead(1)
        engines[1].close()
        lab.ready(1, 2)
        assert lab.engine(daemon, "g", 1).up().pid


@pytest.mark.parametrize("launch", list(Launch))
def test_who_is_unknown_to_a_daemon_that_is_back_is_told(launch: Launch) -> None:
    """Its disk was full when the seat was granted anew: the file tells of the one before."""
    with Lab() as lab:
        lab.create(small_config(launch=launch))
        daemon = lab.daemon("n0", "g:0")
        lab.ready(0)
        first = lab.engine(daemon, "g", 0).up()
        kept = daemon.folder / "daemon.state"
        before = kept.read_bytes()
        first.close()
        lab.ready(0, 2)
        second = lab.engine(daemon, "g", 0).up()
        daemon.kill()
        kept.write_bytes(before)
        daemon.start()
        heard = second.ask("step 60000")
        assert heard.startswith("error Fenced"), heard
        assert "rank 0 incarnation 2 was expelled: " in heard


def test_what_died_while_the_daemon_was_away_is_dead_when_it_is_back() -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0-2")
        engines = lab.serve(daemon, [0, 1])
        lab.ready(2)
        workers = {s.seat.rank: s.worker_pid for s in daemon.status().seats}
        daemon.kill()
        os.kill(workers[0], signal.SIGKILL)
        engines[1].close()  # SIGKILL
        os.kill(workers[2], signal.SIGKILL)
        lab.controller.forget()
        daemon.start()
        for rank in (0, 1, 2):
            lab.empty(rank, 1)
            lab.ready(rank, 2)
        assert engines[0].wait() == -signal.SIGKILL  # it did not let go of the dead worker's rank
        assert not Path(f"/proc/{workers[1]}").exists() or daemon.seat("g", 1).worker_pid


def test_an_engine_that_left_while_the_daemon_was_away_has_left() -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0")
        engine = lab.engine(daemon, "g", 0).up()
        lab.attached(0)
        daemon.kill()
        assert engine.ask("close") == "closed"
        lab.controller.forget()
        daemon.start()
        assert lab.empty(0).cause == "detached"
        lab.ready(0, 2)
        assert engine.ask("close") == "closed"  # alive


def test_an_engine_that_asks_again_after_a_restart_is_not_killed_for_lost_memory() -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0")
        engine = lab.engine(daemon, "g", 0).up()
        lab.attached(0)
        worker = daemon.seat("g", 0).worker_pid
        daemon.kill()
        os.kill(worker, signal.SIGKILL)
        assert engine.ask("close") == "closed"  # now nobody has the memory, and its lock
        lab.controller.forget()
        daemon.start()
        assert daemon.attach("g", 0, pid=engine.pid).incarnation == 2
        assert engine.ask("close") == "closed"  # alive
        assert not [e for e in daemon.events("process.kill") if e["role"] == "engine"]


def test_a_stopped_worker_is_not_doubled_by_a_restart() -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0")
        lab.ready(0)
        worker = daemon.seat("g", 0).worker_pid
        stop(worker)
        daemon.kill()
        seats = hello_after_restart(lab, daemon)
        assert (seats[0].state, seats[0].incarnation) == (types_pb2.SEAT_STATE_READY, 1)
        assert daemon.events("seat.awaited")
        assert daemon.seat("g", 0).worker_pid == worker
        os.kill(worker, signal.SIGCONT)
        wait_for(lambda: daemon.events("seat.reattached"), "the worker to come back")
        assert lab.engine(daemon, "g", 0).up().pid


def test_a_state_file_that_cannot_be_read_only_costs_the_seats_it_told_of() -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0")
        lab.ready(0)
        worker = daemon.seat("g", 0).worker_pid
        daemon.kill()
        (daemon.folder / "daemon.state").write_text("{")
        lab.controller.forget()
        daemon.start()
        lab.ready(0, 1)
        wait_for(lambda: not Path(f"/proc/{worker}").exists(), "the stranger to leave")
        assert daemon.seat("g", 0).worker_pid not in (0, worker)


def test_a_state_file_that_cannot_be_written_is_written_when_it_can_be() -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0")
        lab.ready(0)
        in_the_way = daemon.folder / "daemon.new"  # stands for a full disk

        def blocked() -> bool:
            try:
                in_the_way.mkdir()
            except FileExistsError:  # the daemon writes it at this moment
                return False
            return True

        wait_for(blocked, "the file not to be written")
        os.kill(daemon.seat("g", 0).worker_pid, signal.SIGKILL)
        lab.ready(0, 2)  # nothing waits for the file
        wait_for(lambda: daemon.events("state.not_written"), "somebody to be told")
        in_the_way.rmdir()
        wait_for(lambda: daemon.events("state.written"), "the file to be written")
        assert len(daemon.events("state.not_written")) == 1
        assert daemon.events("state.not_written")[0]["path"] == str(daemon.folder / "daemon.state")
        worker = daemon.seat("g", 0).worker_pid
        daemon.kill()
        seats = hello_after_restart(lab, daemon)
        assert seats[0].incarnation == 2
        assert daemon.seat("g", 0).worker_pid == worker


def test_orphans_leave_when_neither_daemon_nor_engine_is_there() -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0-1", "--orphan-after-s", "0.3")
        engine = lab.engine(daemon, "g", 0).up()
        lab.attached(0)
        lab.ready(1)
        workers = {s.seat.rank: s.worker_pid for s in daemon.status().seats}
        daemon.kill()
        wait_for(lambda: not Path(f"/proc/{workers[1]}").exists(), "the orphan to leave")
        assert Path(f"/proc/{workers[0]}").exists()  # its engine lives
        engine.close()
        wait_for(lambda: not Path(f"/proc/{workers[0]}").exists(), "the other to leave")
        (daemon.folder / "daemon.state").unlink()
        (daemon.folder / "daemon.lock").unlink()


def test_systemd_keeps_the_memory_when_nobody_else_does() -> None:
    with Lab() as lab:
        systemd = Systemd(lab.folder)
        lab.create(small_config(launch=Launch.INLINE))
        daemon = lab.daemon("n0", "g:0-1", start=False)
        systemd.wrap(daemon)
        daemon.start()
        for rank in (0, 1):
            lab.ready(rank)
        wait_for(lambda: len(systemd.stored) == 4, "both ranks' memory to be stored")
        assert sorted(systemd.stored) == ["data-0-g", "data-1-g", "header-0-g", "header-1-g"]
        wait_for(lambda: systemd.lines.count("WATCHDOG=1") >= 2, "the watchdog's ping")
        assert any(line == "READY=1" for line in systemd.lines)
        inode = os.fstat(systemd.stored["header-0-g"]).st_ino
        daemon.kill()
        systemd.wrap(daemon)
        seats = hello_after_restart(lab, daemon)
        assert (seats[0].state, seats[0].incarnation) == (types_pb2.SEAT_STATE_READY, 1)
        engine = lab.engine(daemon, "g", 0).up()
        maps = Path(f"/proc/{engine.pid}/maps").read_text().splitlines()
        assert inode in {int(line.split()[4]) for line in maps if "-0-header" in line}
        engine.close()
        lab.ready(0, 2)
        assert daemon.stop() == 0
        wait_for(lambda: not systemd.stored, "everything to be removed from the store")
        assert "STOPPING=1" in systemd.lines
        systemd.close()
