"""An engine that waits for a seat is told for whom, and so is the daemon's log."""

import os
import signal
import threading

import grpc
import pytest

import elasticep
from elasticep.errors import AttachError
from elasticep.proto import types_pb2
from elasticep.testing.lab import Lab, small_config
from elasticep.testing.node import DaemonProcess, wait_for
from elasticep.testing.processes import stop


def refused(daemon: DaemonProcess, rank: int, wait_ms: int) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        daemon.attach("g", rank, wait_ms=wait_ms)
    return str(caught.value.details())


def test_an_attach_that_waits_names_who_has_not_let_go(caplog: pytest.LogCaptureFixture) -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0", "--engine-grace-s", "300")
        engine = lab.clinging(daemon, 0)
        with pytest.raises(AttachError) as caught:
            elasticep.attach("g", 0, daemon.grpc_socket, timeout=4)
        told = [record.getMessage() for record in caplog.records if record.name == "elasticep"]
        assert len(told) == 1
        (event,) = daemon.events("attach.waits")
        assert (event["group"], event["rank"], event["pid"]) == ("g", 0, os.getpid())
        for text in (str(caught.value), told[0], event["why"]):
            assert "incarnation 1 has ended (worker died)" in text
            assert f"engine {engine.pid}" in text
            assert "within 300 s" in text
        # Whoever asked first has it as soon as the engine is gone.
        answers: list[object] = []
        waiter = threading.Thread(
            target=lambda: answers.append(daemon.attach("g", 0, wait_ms=60_000)), daemon=True
        )
        waiter.start()
        engine.signal(signal.SIGKILL)
        waiter.join(60)
        assert [answer.incarnation for answer in answers] == [2]  # type: ignore[attr-defined]


def test_a_seat_whose_processes_did_not_come_back_says_so() -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0-1")
        engine = lab.engine(daemon, "g", 0).up()
        lab.attached(0)
        worker = daemon.seat("g", 0).worker_pid
        for pid in (engine.pid, worker):
            stop(pid)
        daemon.kill()
        daemon.start()
        text = refused(daemon, 0, 100)
        assert f"incarnation 1 is held by engine {engine.pid} and worker {worker}" in text
        assert "started anew" in text
        assert daemon.seat("g", 0).attach_waits_for in text
        for pid in (engine.pid, worker):
            os.kill(pid, signal.SIGCONT)
        wait_for(
            lambda: "end that process" in daemon.seat("g", 0).attach_waits_for,
            "the engine to be back",
        )
        assert daemon.seat("g", 0).seat.state == types_pb2.SEAT_STATE_ATTACHED


def test_a_seat_that_is_not_given_out_says_what_to_look_at() -> None:
    with Lab() as lab:
        daemon = lab.daemon("n0", "g:0-1")
        wait_for(lambda: daemon.status().controller_connected, "the daemon to be connected")
        assert "group create" in daemon.seat("g", 0).attach_waits_for
        lab.create(small_config())
        lab.ready(0)
        assert daemon.seat("g", 0).attach_waits_for == ""
        lab.controller.auto_grant = False
        engine = lab.engine(daemon, "g", 0).up()
        lab.attached(0)
        assert engine.ask("close") == "closed"
        lab.empty(0)
        text = refused(daemon, 0, 50)
        assert "detached" in text
        assert "elasticep undrain" in text
        lab.controller.close()
        wait_for(lambda: not daemon.status().controller_connected, "the daemon to notice")
        assert "no controller answers" in daemon.seat("g", 0).attach_waits_for
