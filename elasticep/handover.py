"""How a process on the same host gets a rank's arena of expert weights: over `daemon.fd`.

The daemon owns the arena. Engines map it to compute from it, daemons of the same domain to copy
units out of it; both ask by group and rank and get one descriptor, opened for reading only. Only
the daemon's mover writes.
"""

import array
import errno
import os
import socket
from ctypes import sizeof
from dataclasses import dataclass

from elasticep.errors import DescriptorsShort, Unavailable
from elasticep.native import structs

_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ArenaFd:
    """An arena's descriptor.

    Attributes:
        fd: read-only; the caller's.
        digest: `ArenaLayout.digest` of the daemon that owns it.
        incarnation: of the seat, when it was handed over.
    """

    fd: int
    digest: int
    incarnation: int


def fetch_arena(
    fd_socket: str, group: str, rank: int, timeout_s: float = _TIMEOUT_S, *, backup: bool = False
) -> ArenaFd:
    """Ask the daemon behind a SEQPACKET socket for a rank's arena.

    Args:
        fd_socket: its path.
        group: name of the group.
        rank: whose arena; with `backup` the number of a piece of the daemon's backup instead.
        timeout_s: how long to wait for the answer.
        backup: see `rank`.

    Raises:
        Unavailable: no daemon there, it has no such arena, or no answer in time.
        DescriptorsShort: this process may open no more files.
    """
    kind = "piece of backup" if backup else "arena of rank"
    what = f"the {kind} {rank} of group {group!r} from {fd_socket}"
    request = structs.Message(
        magic=structs.MESSAGE_MAGIC,
        type=structs.MessageType.WEIGHTS,
        rank=rank,
        b=int(backup),
        text=group.encode(),
    )
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(timeout_s)
            sock.connect(fd_socket)
            sock.sendall(bytes(request))
            data, fds = _receive(sock)
    except TimeoutError:
        raise Unavailable(f"{what}: no answer within {timeout_s:g} s") from None
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise DescriptorsShort(
                f"{what}: this process may open no more files; raise its limit (ulimit -n, "
                "LimitNOFILE=)"
            ) from None
        raise Unavailable(f"{what}: {error.strerror or error}") from None
    return _answer(what, data, fds)


def _receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    room = socket.CMSG_SPACE(4 * array.array("i").itemsize)
    data, ancillary, flags, _ = sock.recvmsg(
        sizeof(structs.Message) + 4096, room, socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) // fds.itemsize * fds.itemsize])
    if flags & socket.MSG_CTRUNC and not fds:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return data, fds.tolist()


def _answer(what: str, data: bytes, fds: list[int]) -> ArenaFd:
    if len(data) >= sizeof(structs.Message):
        message = structs.Message.from_buffer_copy(data)
        good = message.type == structs.MessageType.WEIGHTS and message.status == 0
        if message.magic == structs.MESSAGE_MAGIC and good and len(fds) == 1:
            return ArenaFd(fds[0], int(message.a), int(message.b))
        why = message.text.decode("utf-8", "replace") or f"a message of type {message.type}"
    else:
        why = "the daemon hung up"
    for fd in fds:
        os.close(fd)
    raise Unavailable(f"{what}: {why}")
