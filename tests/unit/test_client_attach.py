"""How an engine asks for its rank: what is sent, and which error every refusal becomes."""

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

import elasticep
from elasticep.client.attach import _release
from elasticep.config import ClientConfig
from elasticep.demo.settings import DemoSettings
from elasticep.errors import (
    AttachError,
    ConfigError,
    DaemonUnavailable,
    ElasticEPError,
    GroupMismatch,
    SeatTaken,
    UnknownGroup,
    UnknownRank,
)
from elasticep.group import GroupConfig
from elasticep.native import abi
from elasticep.proto import node_pb2, node_pb2_grpc, types_pb2

CONFIG: GroupConfig = DemoSettings(ranks=2, nodes=1).group_config()


class Daemon(node_pb2_grpc.NodeServiceServicer):
    """Answers Attach with what the test says."""

    def __init__(self) -> None:
        self.requests: list[node_pb2.AttachRequest] = []
        self.answer: Any = None
        self.asked = threading.Event()  # of its status
        self.asked.set()
        self.seats: list[node_pb2.SeatStatus] = []
        self.detached: list[node_pb2.DetachRequest] = []
        self.left_s: list[float] = []

    def Attach(self, request: node_pb2.AttachRequest, context: Any) -> Any:  # noqa: N802
        self.requests.append(request)
        self.asked.wait(60)
        if isinstance(self.answer, node_pb2.AttachResponse):
            return self.answer
        if isinstance(self.answer, grpc.StatusCode):
            return context.abort(self.answer, "as the test wants")
        info = AnyMessage()
        info.Pack(ErrorInfo(reason=self.answer.reason, domain="elasticep"))
        status = Status(
            code=grpc.StatusCode.FAILED_PRECONDITION.value[0],
            message="the daemon's sentence",
            details=[info],
        )
        return context.abort_with_status(rpc_status.to_status(status))

    def Detach(self, request: node_pb2.DetachRequest, context: Any) -> Any:  # noqa: N802
        self.detached.append(request)
        self.left_s.append(context.time_remaining())
        return node_pb2.DetachResponse()

    def GetStatus(self, request: node_pb2.GetStatusRequest, context: Any) -> Any:  # noqa: N802
        self.asked.set()
        return node_pb2.GetStatusResponse(seats=self.seats)


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not tmp_path: socket paths are short.
    with tempfile.TemporaryDirectory(prefix="eep-") as name:
        yield Path(name)


@pytest.fixture
def daemon(folder: Path) -> Iterator[Daemon]:
    servicer = Daemon()
    with futures.ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        node_pb2_grpc.add_NodeServiceServicer_to_server(servicer, server)
        server.add_insecure_port(f"unix:{folder}/daemon.sock")
        server.start()
        yield servicer
        server.stop(None).wait()


def path(folder: Path) -> str:
    return str(folder / "daemon.sock")


@pytest.mark.parametrize("kind", [UnknownGroup, UnknownRank, SeatTaken, GroupMismatch])
def test_refusal_becomes_its_typed_error(
    daemon: Daemon, folder: Path, kind: type[ElasticEPError]
) -> None:
    daemon.answer = kind
    with pytest.raises(kind, match=r"attach to rank 1 of group 'demo': the daemon's sentence"):
        elasticep.attach("demo", 1, path(folder))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, DaemonUnavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, AttachError),
        (grpc.StatusCode.UNIMPLEMENTED, DaemonUnavailable),
    ],
)
def test_refusal_without_a_reason_is_an_attach_error(
    daemon: Daemon, folder: Path, code: grpc.StatusCode, kind: type[ElasticEPError]
) -> None:
    daemon.answer = code
    with pytest.raises(kind) as caught:
        elasticep.attach("demo", 0, path(folder))
    assert type(caught.value) is kind


@pytest.mark.parametrize("told", ["it is held by engine 7", "", None])
def test_a_wait_is_logged_once_with_whom_it_is_for(
    daemon: Daemon, folder: Path, caplog: pytest.LogCaptureFixture, told: str | None
) -> None:
    daemon.asked.clear()  # the answer comes when the client has asked for whom it waits
    daemon.answer = AttachError
    for rank, text in ((0, "of another rank"), (1, told)):
        if text is not None:
            seat = types_pb2.Seat(group="demo", rank=rank)
            daemon.seats.append(node_pb2.SeatStatus(seat=seat, attach_waits_for=text))
    with pytest.raises(AttachError):
        elasticep.attach("demo", 1, path(folder))
    said = [record.getMessage() for record in caplog.records if record.name == "elasticep"]
    expected = {"": "it is about to be ready", None: "the daemon does not say for whom"}
    why = expected.get(told, told)
    assert said == [f"attach to rank 1 of group 'demo' waits: {why}"]


def test_detach_gives_a_daemon_less_than_a_second(daemon: Daemon, folder: Path) -> None:
    settings = ClientConfig(socket=path(folder), group="demo", rank=1)
    _release(settings, 3)
    (request,) = daemon.detached
    assert (request.group, request.rank, request.incarnation) == ("demo", 1, 3)
    assert 0 < daemon.left_s[0] < 1


def test_request_says_who_asks_and_for_what(daemon: Daemon, folder: Path) -> None:
    daemon.answer = UnknownGroup
    with pytest.raises(UnknownGroup):
        elasticep.attach(rank=1, socket=folder / "daemon.sock", config=CONFIG, timeout=7)
    request = daemon.requests[0]
    assert (request.group, request.rank, request.pid) == ("demo", 1, os.getpid())
    assert (request.wait_ms, request.abi_version) == (7000, abi.ABI_VERSION)
    assert request.layout_digest != 0
    assert GroupConfig.from_proto(request.config) == CONFIG


def test_environment_says_what_the_caller_does_not(
    daemon: Daemon, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.answer = UnknownGroup
    monkeypatch.setenv("ELASTICEP_SOCKET", path(folder))
    monkeypatch.setenv("ELASTICEP_GROUP", "from-env")
    monkeypatch.setenv("ELASTICEP_RANK", "5")
    for arguments, expected in (({}, ("from-env", 5)), ({"rank": 2}, ("from-env", 2))):
        with pytest.raises(UnknownGroup):
            elasticep.attach(**arguments)  # type: ignore[arg-type]
        assert (daemon.requests[-1].group, daemon.requests[-1].rank) == expected
        assert not daemon.requests[-1].HasField("config")


def test_group_of_another_config_is_refused_by_name_of_the_field(
    daemon: Daemon, folder: Path
) -> None:
    other = DemoSettings(ranks=3, nodes=1).group_config()
    daemon.answer = node_pb2.AttachResponse(config=other.to_proto(), ticket="t", fd_socket="/no")
    with pytest.raises(GroupMismatch, match="max_ranks"):
        elasticep.attach(rank=0, socket=path(folder), config=CONFIG)


def test_socket_that_vanished_between_two_calls_is_an_error_in_time(
    daemon: Daemon, folder: Path
) -> None:
    daemon.answer = node_pb2.AttachResponse(
        config=CONFIG.to_proto(), ticket="t", fd_socket=str(folder / "gone"), incarnation=1
    )
    with pytest.raises(ElasticEPError):
        elasticep.attach(rank=0, socket=path(folder), timeout=2, group="demo")


def test_no_daemon_is_said_at_once(folder: Path) -> None:
    with pytest.raises(DaemonUnavailable, match=r"there is no socket .*ELASTICEP_SOCKET"):
        elasticep.attach("demo", 0, path(folder))
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path(folder))
    with pytest.raises(
        DaemonUnavailable, match=r"behind .*sock \(Connection refused \(111\)\); start"
    ):
        elasticep.attach("demo", 0, path(folder))


AS_ANOTHER = """
import os, sys
import elasticep, elasticep.client.attach
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    elasticep.attach("demo", 0, sys.argv[1])
except elasticep.DaemonUnavailable as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_an_engine_of_another_user_is_told_so(daemon: Daemon, folder: Path, mode: int) -> None:
    folder.chmod(mode)  # the daemon's directory is closed to others; its socket is in any case
    os.chmod(path(folder), 0o660)
    done = subprocess.run(
        [sys.executable, "-c", AS_ANOTHER, path(folder)],
        capture_output=True,
        text=True,
        check=True,
        timeout=180,
    )
    assert done.stdout.startswith(f"user 65534 may not use the socket {path(folder)}; run the ")
    assert not daemon.requests


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, "which group"),
        ({"group": "demo"}, "which rank"),
        ({"group": "other", "config": CONFIG, "rank": 0}, "group is 'other' but config is that of"),
        ({"config": CONFIG, "rank": 2}, "ranks are 0 to 1"),
        ({"group": "demo", "rank": 0, "timeout": 0}, "timeout is 0 seconds"),
        ({"group": "demo", "rank": 0, "timeout": float("nan")}, "timeout is nan seconds"),
        ({"group": "demo", "rank": -2}, "^rank is -2; it must be a whole number"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(
    arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SOCKET", "GROUP", "RANK"):
        monkeypatch.delenv(f"ELASTICEP_{name}", raising=False)
    with pytest.raises(ConfigError, match=message):
        elasticep.attach(**arguments)


def test_a_wait_for_a_daemon_that_is_stopped_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket(socket.AF_UNIX) as deaf:  # the kernel takes connections, nobody else does
        deaf.bind(path(folder))
        deaf.listen()
        with pytest.raises(ElasticEPError):
            elasticep.attach("demo", 1, path(folder), timeout=0.5)
    said = [record.getMessage() for record in caplog.records if record.name == "elasticep"]
    why = "its daemon does not answer; is that process stopped?"
    assert said == [f"attach to rank 1 of group 'demo' waits: {why}"]
