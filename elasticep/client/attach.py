"""How an engine takes its rank."""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from elasticep.client.handle import NativeHandle
from elasticep.client.session import Session
from elasticep.client.step import LONGEST_S
from elasticep.config import ClientConfig, load_config
from elasticep.device import Device
from elasticep.errors import (
    AttachError,
    ConfigError,
    DaemonUnavailable,
    DescriptorsShort,
    GroupMismatch,
    NativeError,
    Unavailable,
)
from elasticep.group import GroupConfig
from elasticep.native import abi

if TYPE_CHECKING:
    from elasticep.proto import node_pb2, node_pb2_grpc

DEFAULT_TIMEOUT_S: Final = 30.0
_DETACH_TIMEOUT_S: Final = 0.8  # a daemon that is stopped hears of it by the lock of the rank
_STATUS_TIMEOUT_S: Final = 1.0
_TELL_S: Final = 1.5  # a wait that takes longer is logged, with whom it is for
_ARENA_TIMEOUT_S: Final = 5.0  # a daemon that restarts is back by then
_RETRY_S: Final = 0.05
_ANSWER_MARGIN_S: Final = 2.0  # the daemon's own deadline runs out first and says why
_log = logging.getLogger("elasticep")

_Handle = TypeVar("_Handle")


class _TicketRefusedError(AttachError):
    """The daemon does not know the ticket that it gave."""


def attach(
    group: str | None = None,
    rank: int | None = None,
    socket: str | os.PathLike[str] | None = None,
    *,
    config: GroupConfig | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> Session:
    """Take a rank of a group for this process.

    Args:
        group: the group's name; None: that of `config`, else `ELASTICEP_GROUP`.
        rank: the seat; None: `ELASTICEP_RANK`.
        socket: path of the daemon's Unix socket; None: `ELASTICEP_SOCKET`, else
            `$XDG_RUNTIME_DIR/elasticep/daemon.sock`.
        config: the group's config: creates the group, or must agree with the existing one. Not
            needed once the group exists.
        timeout: seconds until the rank must be ready for use. What takes longer than a moment is
            logged as a warning of the logger `elasticep`: who has the rank, and what ends the wait.

    Returns:
        The session; detach it, or use it with `with`. Of a group with `device = "cuda"` it is a
        `CudaSession`.

    Raises:
        DaemonUnavailable: nobody answers behind the socket.
        UnknownGroup, UnknownRank, SeatTaken: what the daemon says of group and rank.
        GroupMismatch: the group exists with another config, or another version's memory layout.
        MemoryShort: host, cgroup or GPU have too little room for the rank's region or its expert
            weights; names both numbers. At once, however long `timeout` is.
        DescriptorsShort, NativeError: this process or the daemon may open too few files; the daemon
            lacks a library for the region; the torch of this process has no CUDA.
        AttachError: the rank was not ready within `timeout`, with who has it and what ends that;
            or its worker ends whenever it starts.
        ConfigError: group or rank are not given, or cannot be used.
    """
    if not timeout > 0:
        raise ConfigError(f"timeout is {timeout!r} seconds; it must be positive")
    timeout = min(timeout, LONGEST_S)
    settings = _settings(group, rank, socket, config)
    deadline = time.monotonic() + timeout
    while True:
        try:
            return _attach_once(settings, config, deadline)
        except _TicketRefusedError:
            # The daemon has restarted since it gave it, or gave another to an attach of this
            # process that was given up by now.
            if time.monotonic() >= deadline:
                raise
            time.sleep(_RETRY_S)


def _attach_once(settings: ClientConfig, config: GroupConfig | None, deadline: float) -> Session:
    answer = _ask(settings, config, deadline - time.monotonic())
    agreed = GroupConfig.from_proto(answer.config)
    if config is not None:
        agreed.require_same(config)
    left_ms = max(1, round((deadline - time.monotonic()) * 1000))
    if agreed.device is Device.CUDA:
        return _attach_cuda(answer, agreed, settings, left_ms)
    handle = _opened(lambda: NativeHandle(answer.fd_socket, answer.ticket, left_ms))
    try:
        return Session(
            handle,
            agreed,
            rank=settings.rank,
            incarnation=answer.incarnation,
            release=lambda: _release(settings, answer.incarnation),
            open_arena=lambda: _open_arena(answer.fd_socket, agreed, settings.rank),
        )
    except BaseException:  # a signal's: nobody else would let go of the rank
        handle.close()
        raise


def _opened(opening: Callable[[], _Handle]) -> _Handle:
    try:
        return opening()
    except AttachError as error:
        if type(error) is not AttachError:  # there is no daemon, or it says something else
            raise
        raise _TicketRefusedError(str(error)) from None


def _attach_cuda(
    answer: "node_pb2.AttachResponse", agreed: GroupConfig, settings: ClientConfig, left_ms: int
) -> Session:
    from elasticep.client.cuda_handle import CudaHandle
    from elasticep.client.cuda_session import CudaSession
    from elasticep.native.cuda_session import weights_struct

    inc, layout = answer.incarnation, agreed.arena_layout()
    arena, weights = -1, None
    if layout is not None:
        arena = _open_arena(answer.fd_socket, agreed, settings.rank)
        weights = weights_struct(arena, layout)
    try:
        handle = _opened(
            lambda: CudaHandle(
                answer.fd_socket, answer.ticket, left_ms, settings.rank, inc, weights
            )
        )
    finally:
        if arena >= 0:
            os.close(arena)
    try:
        return CudaSession(
            handle,
            agreed,
            rank=settings.rank,
            incarnation=inc,
            release=lambda: _release(settings, inc),
        )
    except AssertionError as error:  # torch's for a build without CUDA
        handle.close()
        raise NativeError(
            f"rank {settings.rank} of group {agreed.name!r} has its memory on {handle.device}, "
            f"which the torch of this process cannot use: {error}; install a torch for CUDA"
        ) from error
    except BaseException:  # nobody else would let go of the rank
        handle.close()
        raise


def _settings(
    group: str | None,
    rank: int | None,
    socket: str | os.PathLike[str] | None,
    config: GroupConfig | None,
) -> ClientConfig:
    if config is not None and group not in (None, config.name):
        raise ConfigError(
            f"group is {group!r} but config is that of {config.name!r}; leave group out"
        )
    flags = {
        "group": config.name if config is not None else group,
        "rank": rank,
        "socket": None if socket is None else os.fspath(socket),
    }
    settings = load_config(ClientConfig, flags=flags)
    if not settings.group:
        raise ConfigError("which group? pass group or config, or set ELASTICEP_GROUP")
    if settings.rank < 0:
        raise ConfigError("which rank? pass rank, or set ELASTICEP_RANK")
    if config is not None and settings.rank >= config.geometry.max_ranks:
        raise ConfigError(
            f"rank {settings.rank} of group {config.name!r}, whose geometry.max_ranks is "
            f"{config.geometry.max_ranks}; ranks are 0 to {config.geometry.max_ranks - 1}"
        )
    _check_socket(settings.socket)
    return settings


def _check_socket(path: str) -> None:
    """Of what is wrong with a socket gRPC would say only that it failed to connect, and later."""
    try:
        Path(path).stat()
        allowed = os.access(path, os.W_OK, effective_ids=True)
    except PermissionError:
        allowed = False
    except OSError:
        raise DaemonUnavailable(
            f"there is no socket {path}; start `elasticep daemon` on this node, or set "
            "ELASTICEP_SOCKET to its socket"
        ) from None
    if not allowed:
        raise DaemonUnavailable(
            f"user {os.geteuid()} may not use the socket {path}; run the engine as the user that "
            "the daemon runs as, or as root"
        )


def _ask(
    settings: ClientConfig, config: GroupConfig | None, timeout: float
) -> "node_pb2.AttachResponse":
    import grpc

    from elasticep.client.rpc import require_descriptors, typed_error
    from elasticep.proto import node_pb2, node_pb2_grpc

    abi.api()  # a library of another version is refused before the seat is asked for
    request = node_pb2.AttachRequest(
        group=settings.group,
        rank=settings.rank,
        pid=os.getpid(),
        config=None if config is None else config.to_proto(),
        layout_digest=0 if config is None else _layout_digest(config),
        abi_version=abi.ABI_VERSION,
        wait_ms=round(timeout * 1000),
    )
    what = f"attach to rank {settings.rank} of group {settings.group!r}"
    require_descriptors(what)
    with grpc.insecure_channel(f"unix:{settings.socket}") as channel:
        stub = node_pb2_grpc.NodeServiceStub(channel)
        try:
            asked = stub.Attach.future(request, timeout=timeout + _ANSWER_MARGIN_S)
            try:
                return asked.result(_TELL_S)
            except grpc.FutureTimeoutError:
                _log.warning("%s waits: %s", what, _waits_for(stub, settings))
            return asked.result()
        except grpc.RpcError as error:
            raise typed_error(error, settings.socket, what) from None


def _waits_for(stub: "node_pb2_grpc.NodeServiceStub", settings: ClientConfig) -> str:
    """What the daemon says that an engine of this rank has to wait for."""
    import grpc

    from elasticep.proto import node_pb2

    try:
        status = stub.GetStatus(node_pb2.GetStatusRequest(), timeout=_STATUS_TIMEOUT_S)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return "its daemon does not answer; is that process stopped?"
        return "the daemon does not say for whom"
    for seat in status.seats:
        if (seat.seat.group, seat.seat.rank) == (settings.group, settings.rank):
            return seat.attach_waits_for or "it is about to be ready"
    return "the daemon does not say for whom"


def _layout_digest(config: GroupConfig) -> int:
    import ctypes

    from elasticep.native.convert import geometry_struct

    info = abi.LayoutInfo()
    geometry = geometry_struct(config)
    code = abi.api().ep_layout(ctypes.byref(geometry), ctypes.byref(info))
    abi.check(code, f"memory layout of group {config.name!r}")
    return int(info.digest)


def _open_arena(fd_socket: str, config: GroupConfig, rank: int) -> int:
    """A descriptor of the rank's expert weights; a daemon that is just away is waited for."""
    from elasticep.handover import fetch_arena

    deadline = time.monotonic() + _ARENA_TIMEOUT_S
    while True:
        try:
            arena = fetch_arena(fd_socket, config.name, rank, _ARENA_TIMEOUT_S)
            break
        except Unavailable:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_RETRY_S)
    layout = config.arena_layout()
    if layout is None or arena.digest != layout.digest():
        os.close(arena.fd)
        raise GroupMismatch(
            f"the daemon lays out the expert weights of group {config.name!r} in another way than "
            "this engine; install one version everywhere"
        )
    return arena.fd


def _release(settings: ClientConfig, incarnation: int) -> None:
    """Tell the daemon that this is no death; where that cannot be, it finds out by itself."""
    import grpc

    from elasticep.client.rpc import require_descriptors
    from elasticep.proto import node_pb2, node_pb2_grpc

    try:
        require_descriptors("detach")
    except DescriptorsShort:
        return
    request = node_pb2.DetachRequest(
        group=settings.group, rank=settings.rank, incarnation=incarnation
    )
    with grpc.insecure_channel(f"unix:{settings.socket}") as channel:
        try:
            node_pb2_grpc.NodeServiceStub(channel).Detach(request, timeout=_DETACH_TIMEOUT_S)
        except grpc.RpcError:
            return
