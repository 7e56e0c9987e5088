"""What every gRPC server and client of ours shares: typed errors as rich status, TLS, limits.

An error crosses as a status with `google.rpc.ErrorInfo(reason=error.reason, domain="elasticep")`;
the other side raises the same class again.
"""

import errno
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn, cast

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from elasticep import errors
from elasticep.config import TlsConfig, is_loopback, split_address
from elasticep.errors import ConfigError, ElasticEPError

DOMAIN: Final = "elasticep"
DETAILS_KEY: Final = "grpc-status-details-bin"
# What servers take. To a controller a placement may come as JSON: that of the most slots which a
# group may have takes 6 to 8 MB, and 15 to 31 MB with every number on a line of its own.
MAX_REQUEST_BYTES: Final = 4 << 20
MAX_PLAN_BYTES: Final = 32 << 20
MAX_VIEW_BYTES: Final = 64 << 20  # what a client takes: a view carries all slot tables

_CODES: Final[tuple[tuple[type[ElasticEPError], grpc.StatusCode], ...]] = (
    (errors.UnknownGroup, grpc.StatusCode.NOT_FOUND),
    (errors.UnknownRank, grpc.StatusCode.NOT_FOUND),
    (errors.SeatTaken, grpc.StatusCode.ALREADY_EXISTS),
    (errors.GroupMismatch, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.ConfigError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.Unavailable, grpc.StatusCode.UNAVAILABLE),
    (errors.UsageError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.PlacementError, grpc.StatusCode.FAILED_PRECONDITION),
)
# Keepalive finds a peer that vanished without a word; both sides must allow the pace.
_KEEPALIVE: Final = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_SERVER: Final = (
    *_KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.max_send_message_length", MAX_VIEW_BYTES),
    ("grpc.max_concurrent_streams", 4_096),
    ("grpc.so_reuseport", 0),
)
DAEMON_OPTIONS: Final = (*_SERVER, ("grpc.max_receive_message_length", MAX_REQUEST_BYTES))
CONTROLLER_OPTIONS: Final = (*_SERVER, ("grpc.max_receive_message_length", MAX_PLAN_BYTES))
CLIENT_OPTIONS: Final = (
    *_KEEPALIVE,
    ("grpc.max_receive_message_length", MAX_VIEW_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 50),
    # The least time that a connection has to come about, TLS and the first frame included.
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
)


def status_of(
    error: ElasticEPError, metadata: Mapping[str, str] | None = None
) -> tuple[grpc.StatusCode, bytes]:
    """The status code of an error, and the `google.rpc.Status` for the trailers."""
    code = next((c for kind, c in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
    info = error_details_pb2.ErrorInfo(
        reason=error.reason, domain=DOMAIN, metadata=dict(metadata or {})
    )
    packed = any_pb2.Any()
    packed.Pack(info)
    status = status_pb2.Status(code=code.value[0], message=str(error), details=[packed])
    content: bytes = status.SerializeToString()
    return code, content


async def abort(
    context: "grpc.aio.ServicerContext[Any, Any]",
    error: ElasticEPError,
    metadata: Mapping[str, str] | None = None,
) -> NoReturn:
    """End a call with a typed error."""
    code, content = status_of(error, metadata)
    await context.abort(code, str(error), ((DETAILS_KEY, content),))
    raise AssertionError("abort does not return")


def error_info(call: grpc.RpcError) -> error_details_pb2.ErrorInfo | None:
    """What a server of ours said about a failed call; None when it said nothing."""
    info = error_details_pb2.ErrorInfo()
    for key, value in cast(grpc.Call, call).trailing_metadata() or ():
        if key != DETAILS_KEY or not isinstance(value, bytes):
            continue
        try:
            status = status_pb2.Status.FromString(value)
        except DecodeError:
            return None
        for detail in status.details:
            if detail.Unpack(info) and info.domain == DOMAIN:
                return info
    return None


def told_error(call: grpc.RpcError, prefix: str = "") -> ElasticEPError | None:
    """The error that a server of ours ended a call with; None when it named none that we know.

    Args:
        call: what gRPC raised, asynchronous or not.
        prefix: goes before the server's sentence.
    """
    info = error_info(call)
    if info is None:
        return None
    sentence = prefix + (cast(grpc.Call, call).details() or info.reason)
    if info.reason in _KINDS:
        return _KINDS[info.reason](sentence)
    if info.reason.startswith(_PLACEMENT):
        return errors.PlacementError(sentence)  # its own kind belongs to the planner
    return None


def typed_error(call: grpc.aio.AioRpcError, what: str) -> ElasticEPError:
    """The error that a failed call stands for; `Unavailable` when nobody of ours answered."""
    code = call.code().name
    return told_error(call) or errors.Unavailable(f"{what}: {code}: {call.details() or code}")


def hung_up(address: str, told: str) -> bool:
    """Whether who listens there broke off before anything was said, as over certificates.

    Args:
        address: on a Unix socket no certificate is asked for: who breaks off there has ended.
        told: what gRPC said.
    """
    words = ("socket closed", "reset by peer", "handshake failed")
    tried = "failed to connect" in told and not address.startswith("unix:")
    return tried and any(word in told.lower() for word in words)


def _kinds(kind: type[ElasticEPError]) -> dict[str, type[ElasticEPError]]:
    # Fenced and ExpertsLost are made from more than a sentence; no call ends with them.
    found = {} if kind in (errors.Fenced, errors.ExpertsLost) else {kind.reason: kind}
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            found.update(_kinds(child))
    return found


_KINDS: Final = _kinds(ElasticEPError)
_PLACEMENT: Final = ("PLACEMENT_", errors.ExpertsLost.reason)


def open_channel(address: str, tls: TlsConfig) -> grpc.aio.Channel:
    """A channel to "host:port" or "unix:///path"; beyond this host only with mutual TLS."""
    if address.startswith("unix:") or (is_loopback(address) and not tls.enabled):
        return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
    if not tls.enabled:
        raise ConfigError(f"{address} is beyond this host: set tls cert, key and ca")
    key, cert, ca = tls.read()
    credentials = grpc.ssl_channel_credentials(ca, key, cert)
    return grpc.aio.secure_channel(address, credentials, options=CLIENT_OPTIONS)


def bind(server: grpc.aio.Server, address: str, tls: TlsConfig) -> int:
    """Listen on an address; returns the port (0 for a Unix socket).

    Raises:
        ConfigError: the address is taken, or TCP beyond the loopback interface without TLS.
    """
    try:
        if address.startswith("unix:"):
            server.add_insecure_port(address)
            return 0
        if tls.enabled:
            key, cert, ca = tls.read()
            credentials = grpc.ssl_server_credentials(
                [(key, cert)], root_certificates=ca, require_client_auth=True
            )
            return server.add_secure_port(address, credentials)
        if not is_loopback(address):
            raise ConfigError(f"{address} is beyond this host: set tls cert, key and ca")
        return server.add_insecure_port(address)
    except RuntimeError:  # its text does not say why
        raise ConfigError(f"cannot listen on {address}: {_why_not(address)}") from None


def _why_not(address: str) -> str:
    """What the kernel says about listening on an address, and what to do."""
    family, path = socket.AF_UNIX, address.removeprefix("unix:").removeprefix("//")
    place: Any = path
    try:
        if not address.startswith("unix:"):
            host, port = split_address(address)
            family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"{error.strerror}; stop what listens there, or choose another address"
        if family is socket.AF_UNIX:
            return f"{error.strerror}; make its folder, or choose one that this user may write"
        return f"{error.strerror}; choose an address of this host that this user may listen on"
    if family is socket.AF_UNIX:
        Path(path).unlink(missing_ok=True)
    return "gRPC refused it; try again, or choose another address"
