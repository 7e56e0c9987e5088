"""`elasticep status --daemon`: a daemon's own view, over its Unix socket."""

import socket as sockets
import tempfile
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from elasticep.cli.main import cli
from elasticep.proto import node_pb2, node_pb2_grpc, types_pb2

ANSWER = node_pb2.GetStatusResponse(
    node="n0",
    domain="boot-1234567890",
    controller_connected=True,
    mover_pid=77,
    seats=[
        node_pb2.SeatStatus(
            seat=types_pb2.Seat(group="decode", rank=3, incarnation=2, epoch=5),
            worker_pid=11,
            step=40,
            wait="step barrier for rank 1, 12 ms",
        )
    ],
    arenas=[
        node_pb2.ArenaStatus(
            group="decode", rank=3, bytes=5_000_000, slots=8, valid=6, filling=1,
            staging_epoch=6, done_bytes=1_500_000, total_bytes=2_000_000,
        ),
        node_pb2.ArenaStatus(
            group="decode", rank=4, bytes=5_000_000, slots=8, valid=8,
            copying_epoch=6, copied_bytes=500_000, copying_bytes=3_000_000,
        ),
        node_pb2.ArenaStatus(
            group="decode", backup=True, bytes=3_000_000, slots=4, valid=4,
            done_bytes=2_000_000, total_bytes=2_000_000,
        ),
    ],
    checkpoints=[
        node_pb2.CheckpointStatus(group="decode", path="/m", problem="there is no /m; [mount it]"),
        node_pb2.CheckpointStatus(group="other", path="/n"),
    ],
)  # fmt: skip


class Daemon(node_pb2_grpc.NodeServiceServicer):
    def GetStatus(self, request: Any, context: Any) -> node_pb2.GetStatusResponse:  # noqa: N802
        return ANSWER


@contextmanager
def listening(path: str) -> Iterator[str]:
    """A socket on which nobody accepts, as of a process that is stopped."""
    with sockets.socket(sockets.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        yield path


@pytest.fixture
def socket() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder, futures.ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        node_pb2_grpc.add_NodeServiceServicer_to_server(Daemon(), server)  # type: ignore[abstract]
        path = f"{folder}/daemon.sock"
        server.add_insecure_port(f"unix:{path}")
        server.start()
        yield path
        server.stop(None).wait()


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["status", *words])
    return done.exit_code, done.output + str(done.exception or "")


def test_seats_arenas_and_backups_are_shown(socket: str) -> None:
    code, text = run("--daemon", socket)
    assert code == 0, text
    assert "node n0, domain boot-1234567; controller: connected" in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert any(line.startswith("decode/3 2 11 - 5 40 0 ") for line in lines), text
    assert "decode/3 5.0 8 6 1 loads for epoch 6: 1.5 of 2.0 MB" in lines
    assert "decode/4 5.0 8 8 0 to GPU for epoch 6: 0.5 of 3.0 MB" in lines
    assert "decode/backup 3.0 4 4 0 holds 2.0 of 2.0 MB" in lines
    assert "mover: process 77" in text
    told = "group decode cannot be loaded from its checkpoint: there is no /m; [mount it]"
    assert [line for line in lines if "checkpoint" in line] == [told]


def test_a_daemon_that_is_not_there_is_named() -> None:
    code, text = run("--daemon", "/nowhere/daemon.sock", "--timeout", "1")
    assert code == 1
    assert "no daemon answers at /nowhere/daemon.sock" in text
    assert "is `elasticep daemon` running on this host" in text


def test_a_group_and_a_daemon_do_not_go_together() -> None:
    code, text = run("decode", "--daemon", "/nowhere/daemon.sock")
    assert code == 1
    assert "leave the group 'decode' away" in text


def test_a_daemon_that_is_stopped_is_not_taken_for_none() -> None:
    with tempfile.TemporaryDirectory() as folder, listening(f"{folder}/d.sock") as path:
        code, text = run("--daemon", path, "--timeout", "0.5")
    assert code == 1
    assert f"the daemon at {path} did not answer within 0.5 s: is its process stopped" in text


def test_a_line_of_a_daemons_status_is_a_line_in_a_pipe(socket: str) -> None:
    _, text = run("--daemon", socket)
    lines = text.splitlines()
    assert all(line == line.rstrip() for line in lines)
    assert any(line.endswith("step barrier for rank 1, 12 ms") for line in lines)
