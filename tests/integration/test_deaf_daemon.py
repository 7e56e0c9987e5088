"""An engine gives its rank back although its daemon is stopped and takes no messages."""

import os
import signal
import socket
import threading
import time

import elasticep
from elasticep.native import abi
from elasticep.testing.fd_socket import message_of
from elasticep.testing.lab import Lab, small_config
from elasticep.testing.local_group import LocalGroup
from elasticep.testing.node import wait_for
from elasticep.testing.processes import stop
from elasticep.testing.small import exchange, geometry, until

ENOUGH_S = 1.5  # a message that waits for room does so for 2 s, or as long as the attach might take


class Deaf(LocalGroup):
    """A daemon that reads nothing until it is told to."""

    reads = threading.Event()

    def _heard(self, rank: int, message: abi.Message) -> None:
        self.reads.wait()
        super()._heard(rank, message)


def test_a_session_ends_at_once_though_its_thread_waits_for_room_in_the_daemons_socket() -> None:
    with Deaf(geometry(1, exchange())) as group:
        session = group.session(0)
        group.wait_for(lambda: group._seats[0].runner is not None, "the engine")
        runner = group._seats[0].runner
        assert runner is not None
        refused = bytes(message_of(abi.MessageType.STAGE, a=1))  # no descriptors come with it
        stuck = 0

        def full() -> bool:
            """Each has an answer that nobody takes, until the session takes no more of them."""
            nonlocal stuck
            try:
                while runner.send(refused, socket.MSG_DONTWAIT):
                    stuck = 0
            except BlockingIOError:
                stuck += 1
            return stuck > 200

        until(full, "the session to have no room for more answers")
        began = time.monotonic()
        session.close()
        took = time.monotonic() - began
        group.reads.set()
    assert took < ENOUGH_S


def test_an_engine_detaches_from_a_daemon_that_is_stopped() -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0")
        session = elasticep.attach("g", 0, daemon.grpc_socket, timeout=60)
        lab.attached(0)
        stop(daemon.pid)
        began = time.monotonic()
        session.detach()
        took = time.monotonic() - began
        os.kill(daemon.pid, signal.SIGCONT)
        assert took < 20
        assert lab.dead(0).cause == "detached"
        wait_for(lambda: daemon.seat("g", 0).seat.incarnation == 2, "the seat to be given out anew")
