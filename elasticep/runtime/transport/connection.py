"""One SEQPACKET connection on the event loop: whole messages in and out, with descriptors."""

import array
import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from elasticep.runtime.limits import MAX_PENDING_MESSAGES
from elasticep.runtime.transport.messages import (
    HEAD_BYTES,
    MAX_BODY_BYTES,
    MAX_FDS,
    BadMessage,
    Message,
    unpack,
)

SO_PEERPIDFD: Final = 77  # Linux 6.5; not in Python's socket module
_INT_BYTES: Final = array.array("i").itemsize
_MESSAGES_PER_WAKE: Final = 16  # so that one busy peer does not keep the loop from the others


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, as the kernel says (SO_PEERCRED), in this process's namespaces."""

    pid: int
    uid: int
    gid: int


def peer_of(sock: socket.socket) -> Peer:
    """Credentials that the kernel recorded when the peer connected."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return Peer(*struct.unpack("3i", raw))


def pidfd_of(sock: socket.socket) -> int:
    """A pidfd of the peer's process: without a race by SO_PEERPIDFD, else by its pid.

    Raises:
        OSError: the process is gone, or in a namespace that this one does not see.
    """
    try:
        return sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        return os.pidfd_open(peer_of(sock).pid)


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors that nobody took."""
    for fd in fds:
        os.close(fd)


def receive(sock: socket.socket) -> tuple[Message, list[int]] | None:
    """Read one message with its descriptors, which the caller closes; None at the end.

    Raises:
        BlockingIOError: nothing is there.
        BadMessage: garbage, or cut; its descriptors are closed.
        OSError: the connection broke.
    """
    data, ancillary, flags, _ = sock.recvmsg(
        HEAD_BYTES + MAX_BODY_BYTES,
        socket.CMSG_SPACE(MAX_FDS * _INT_BYTES),
        socket.MSG_CMSG_CLOEXEC,
    )
    fds: list[int] = []
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(content[: len(content) // _INT_BYTES * _INT_BYTES])
            fds.extend(numbers)
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise BadMessage("a message longer than this version reads")
        if not data:
            close_all(fds)
            return None
        return unpack(data), fds
    except BadMessage:
        close_all(fds)
        raise


def send(sock: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    """Write one packet; `BlockingIOError` when the peer does not read."""
    rights: list[tuple[int, int, Any]] = []
    if fds:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
    sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)


class Connection:
    """A connected peer. `close` may be called at any time and more than once.

    Args:
        sock: non-blocking SEQPACKET socket; owned from now on.
        on_message: called with every message and its descriptors, which it takes over.
        on_close: called once, with the reason, when the connection is over.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_message: "Callable[[Connection, Message, list[int]], None]",
        on_close: "Callable[[Connection, str], None]",
    ) -> None:
        self.sock = sock
        self.peer = peer_of(sock)
        self.owner: Any = None  # whom the server's handler made it belong to
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_close = on_close
        self._pending: deque[tuple[bytes, list[int]]] = deque()
        self._closing = False
        self._loop.add_reader(sock, self._readable)

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self.sock.fileno() < 0

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send now or as soon as the peer reads; descriptors are duplicated if it has to wait.

        A peer that leaves `MAX_PENDING_MESSAGES` unread is disconnected.
        """
        if self.closed:
            return
        data = message.pack()
        if not self._pending:
            try:
                send(self.sock, data, fds)
            except BlockingIOError:
                self._loop.add_writer(self.sock, self._writable)
            except OSError as error:
                self.close(f"sending failed: {error.strerror}")
                return
            else:
                return
        if len(self._pending) >= MAX_PENDING_MESSAGES:
            self.close("the peer does not read")
            return
        self._pending.append((data, [os.dup(fd) for fd in fds]))

    def close_after_sending(self, why: str) -> None:
        """Close when what is pending was written; what comes in is not read any more."""
        if self.closed:
            return
        if not self._pending:
            self.close(why)
            return
        self._closing = True
        self._loop.remove_reader(self.sock)

    def close(self, why: str) -> None:
        """Close at once."""
        if self.closed:
            return
        self._loop.remove_reader(self.sock)
        self._loop.remove_writer(self.sock)
        for _, fds in self._pending:
            close_all(fds)
        self._pending.clear()
        self.sock.close()
        self._on_close(self, why)

    def _readable(self) -> None:
        for _ in range(_MESSAGES_PER_WAKE):
            if self.closed or self._closing:
                return
            try:
                received = receive(self.sock)
            except BlockingIOError:
                return
            except BadMessage as error:
                self.close(str(error))
                return
            except OSError as error:
                self.close(f"receiving failed: {error.strerror}")
                return
            if received is None:
                self.close("closed by the peer")
                return
            self._on_message(self, *received)

    def _writable(self) -> None:
        while self._pending:
            data, fds = self._pending[0]
            try:
                send(self.sock, data, fds)
            except BlockingIOError:
                return
            except OSError as error:
                self.close(f"sending failed: {error.strerror}")
                return
            self._pending.popleft()
            close_all(fds)
        self._loop.remove_writer(self.sock)
        if self._closing:
            self.close("done")
