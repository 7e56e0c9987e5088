"""Errors that cross gRPC: the caller raises what the server did, whichever side of ours it is."""

import asyncio

import grpc
import grpc.aio
import pytest

from elasticep import errors
from elasticep.client import rpc as client
from elasticep.config import TlsConfig
from elasticep.errors import ConfigError, ElasticEPError
from elasticep.rpc import DETAILS_KEY, bind, hung_up, status_of, told_error, typed_error


class Failed(grpc.RpcError):
    """A call that a server ended, or that nobody answered."""

    def __init__(self, code: grpc.StatusCode, details: str, *trailer: tuple[str, bytes]) -> None:
        self._code, self._details, self._trailer = code, details, trailer

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return self._trailer


def ended_with(error: ElasticEPError) -> Failed:
    code, content = status_of(error)
    return Failed(code, str(error), (DETAILS_KEY, content))


KINDS = [
    errors.UnknownRank,
    errors.SeatTaken,
    errors.GroupMismatch,
    errors.ConfigError,
    errors.Unavailable,
    errors.UsageError,
    errors.NotLeader,
    errors.AttachError,
]


@pytest.mark.parametrize("kind", KINDS)
def test_both_sides_raise_what_the_server_did(kind: type[ElasticEPError]) -> None:
    call = ended_with(kind("rank 9 is not there"))
    for raised in (client.typed_error(call, "/s", "attaching"), typed_error(call, "attaching")):  # type: ignore[arg-type]
        assert type(raised) is kind
        assert "rank 9 is not there" in str(raised)
    assert str(client.typed_error(call, "/s", "attaching")).startswith("attaching: ")


def test_errors_that_are_made_of_more_than_a_sentence_are_not_made_up() -> None:
    assert told_error(ended_with(errors.Fenced(3, "it hung"))) is None
    lost = told_error(ended_with(errors.ExpertsLost([(0, 1)])))
    assert lost is None or type(lost) is errors.PlacementError


def test_who_does_not_answer_is_named() -> None:
    nobody = Failed(grpc.StatusCode.UNAVAILABLE, "refused")
    assert isinstance(client.typed_error(nobody, "/s.sock", "x"), errors.DaemonUnavailable)
    assert "/s.sock" in str(client.typed_error(nobody, "/s.sock", "x"))
    assert isinstance(typed_error(nobody, "x"), errors.Unavailable)  # type: ignore[arg-type]
    late = Failed(grpc.StatusCode.DEADLINE_EXCEEDED, "")
    assert isinstance(client.typed_error(late, "/s", "x"), errors.AttachError)
    rubbish = Failed(grpc.StatusCode.INTERNAL, "", (DETAILS_KEY, b"\xff"))
    assert told_error(rubbish) is None


@pytest.mark.parametrize(
    ("address", "told", "yes"),
    [
        ("h:1", "failed to connect to all addresses; last error: UNAVAILABLE: Socket closed", True),
        ("h:1", "failed to connect to all addresses; Ssl handshake failed: CERTIFICATE", True),
        ("h:1", "failed to connect to all addresses; recvmsg:Connection reset by peer", True),
        ("h:1", "failed to connect to all addresses; Connection refused", False),
        ("h:1", "Socket closed", False),  # of a call that was under way
        ("unix:///c", "failed to connect to all addresses; recvmsg: reset by peer", False),
    ],
)
def test_who_may_want_other_certificates(address: str, told: str, yes: bool) -> None:
    assert hung_up(address, f"the session: UNAVAILABLE: {told}") is yes


def test_a_socket_without_a_folder_is_told_with_what_to_do() -> None:
    async def listen() -> None:
        bind(grpc.aio.server(), "unix:///nowhere/c.sock", TlsConfig())

    with pytest.raises(ConfigError, match="No such file or directory; make its folder"):
        asyncio.run(listen())
