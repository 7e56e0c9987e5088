"""Calls to the node daemon, with the typed errors that its answers stand for."""

from typing import Final, cast

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from elasticep import errors
from elasticep.errors import AttachError, DaemonUnavailable, ElasticEPError

DOMAIN: Final = "elasticep"


def _by_reason(kind: type[ElasticEPError]) -> dict[str, type[ElasticEPError]]:
    found = {kind.reason: kind}
    for below in kind.__subclasses__():
        found.update(_by_reason(below))
    return found


# Without `Fenced` and `ExpertsLost`: they carry more than a sentence, and no call answers them.
_KINDS: Final = {
    reason: kind
    for reason, kind in _by_reason(ElasticEPError).items()
    if kind not in (errors.Fenced, errors.ExpertsLost)
}


def typed_error(error: grpc.RpcError, socket: str, what: str) -> ElasticEPError:
    """The typed error for a failed call to the daemon behind `socket`.

    Args:
        error: what gRPC raised.
        socket: path of the daemon's Unix socket.
        what: what was being done, for the message.
    """
    code: grpc.StatusCode = error.code()
    details: str = error.details() or code.name
    reason = _reason(error)
    if reason in _KINDS:
        return _KINDS[reason](f"{what}: {details}")
    if code is grpc.StatusCode.UNAVAILABLE:
        return DaemonUnavailable(
            f"{what}: no daemon answers behind {socket} ({details}); start `elasticep daemon` on "
            "this node, or set ELASTICEP_SOCKET to its socket"
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return AttachError(
            f"{what}: the daemon behind {socket} did not answer in time; see `elasticep status`, "
            "or allow more time"
        )
    return AttachError(f"{what}: {details} ({code.name})")


def _reason(error: grpc.RpcError) -> str:
    try:
        status = rpc_status.from_call(cast(grpc.Call, error))
    except ValueError:  # the trailer says something else than the status
        return ""
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            return str(info.reason)
    return ""
