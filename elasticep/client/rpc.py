"""Calls to the node daemon, with the typed errors that its answers stand for."""

import os
import resource
from typing import Final

import grpc

from elasticep.errors import AttachError, DaemonUnavailable, DescriptorsShort, ElasticEPError
from elasticep.rpc import told_error

_CHANNEL_FDS: Final = 16  # more than gRPC opens for one, and than a session holds


def require_descriptors(what: str) -> None:
    """Raise before gRPC finds that it may open no file: it ends the process then.

    Args:
        what: is about to be done.

    Raises:
        DescriptorsShort: names how many there are, and the limit.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    held = len(os.listdir("/proc/self/fd"))
    if limit != resource.RLIM_INFINITY and held + _CHANNEL_FDS > limit:
        raise DescriptorsShort(
            f"{what} takes up to {_CHANNEL_FDS} file descriptors; this process has {held} of "
            f"{limit}. Raise its limit (ulimit -n, LimitNOFILE=), or close what it does not need"
        )


def typed_error(error: grpc.RpcError, socket: str, what: str) -> ElasticEPError:
    """The typed error for a failed call to the daemon behind `socket`.

    Args:
        error: what gRPC raised.
        socket: path of the daemon's Unix socket.
        what: what was being done, for the message.
    """
    told = told_error(error, f"{what}: ")
    if told is not None:
        return told
    code: grpc.StatusCode = error.code()
    details: str = error.details() or code.name
    if code is grpc.StatusCode.UNAVAILABLE:
        details = details.rpartition("connect: ")[2]  # the kernel's word, without gRPC's around it
        return DaemonUnavailable(
            f"{what}: no daemon answers behind {socket} ({details}); start `elasticep daemon` on "
            "this node, or set ELASTICEP_SOCKET to its socket"
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return AttachError(
            f"{what}: the daemon behind {socket} did not answer in time; see `elasticep status`, "
            "or allow more time"
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return DaemonUnavailable(
            f"{what}: what answers behind {socket} is no daemon of this version ({details}); set "
            "ELASTICEP_SOCKET to the daemon's socket, and install one version everywhere"
        )
    return AttachError(f"{what}: {details} ({code.name})")
