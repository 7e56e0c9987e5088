"""Typed errors as gRPC status: code, sentence, and ErrorInfo with the reason."""

from typing import Any, Final, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from elasticep import errors

DOMAIN: Final = "elasticep"
DETAILS_KEY: Final = "grpc-status-details-bin"

_CODES: Final[tuple[tuple[type[errors.ElasticEPError], grpc.StatusCode], ...]] = (
    (errors.UnknownGroup, grpc.StatusCode.NOT_FOUND),
    (errors.UnknownRank, grpc.StatusCode.NOT_FOUND),
    (errors.SeatTaken, grpc.StatusCode.ALREADY_EXISTS),
    (errors.GroupMismatch, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.ConfigError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.MemoryShort, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.Unavailable, grpc.StatusCode.UNAVAILABLE),
    (errors.UsageError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.AttachError, grpc.StatusCode.FAILED_PRECONDITION),
)


def code_of(error: errors.ElasticEPError) -> grpc.StatusCode:
    """The status code that stands for an error."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.INTERNAL


def details_of(error: errors.ElasticEPError) -> bytes:
    """The `google.rpc.Status` that travels in the trailers."""
    info = AnyMessage()
    info.Pack(ErrorInfo(reason=error.reason, domain=DOMAIN))
    status = Status(code=code_of(error).value[0], message=str(error), details=[info])
    content: bytes = status.SerializeToString()
    return content


async def abort(
    context: "grpc.aio.ServicerContext[Any, Any]", error: errors.ElasticEPError
) -> NoReturn:
    """End a call with a typed error."""
    trailers = ((DETAILS_KEY, details_of(error)),)
    await context.abort(code_of(error), str(error), trailers)
    raise AssertionError("abort does not return")


def error_from(call: grpc.aio.AioRpcError, what: str) -> errors.ElasticEPError:
    """The typed error that another process of ours answered with, or `Unavailable`."""
    text = f"{what}: {call.details() or call.code().name}"
    for key, value in call.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            return _kind_of(value)(text)
    return errors.Unavailable(text)


def _kind_of(details: bytes) -> type[errors.ElasticEPError]:
    info = ErrorInfo()
    try:
        status = Status.FromString(details)
    except DecodeError:
        return errors.Unavailable
    for detail in status.details:
        if detail.Unpack(info) and info.domain == DOMAIN:
            return _REASONS.get(info.reason, errors.Unavailable)
    return errors.Unavailable


def _reasons(kind: type[errors.ElasticEPError]) -> dict[str, type[errors.ElasticEPError]]:
    # Fenced and ExpertsLost are made from more than a sentence; no call ends with them.
    found = {} if kind in (errors.Fenced, errors.ExpertsLost) else {kind.reason: kind}
    for child in kind.__subclasses__():
        found.update(_reasons(child))
    return found


_REASONS: Final = _reasons(errors.ElasticEPError)
