"""The daemon's side of the SEQPACKET socket: it hands out file descriptors and takes answers."""

import array
import contextlib
import ctypes
import os
import select
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from elasticep.native import abi

_DEADLINE_S: Final = 60.0
_MAX_MESSAGE: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a holder of a good ticket gets.

    Attributes:
        rank: the seat.
        body: the message and the geometry.
        fds: descriptors of the header and of the data region.
    """

    rank: int
    body: bytes
    fds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Handlers:
    """Calls made by the socket's thread.

    Attributes:
        welcome: `(ticket, role)`; None refuses the connection.
        arrived: `(rank, role, connection)`, after the welcome was sent.
        heard: `(rank, message)`, for each message after the first.
        gone: `(rank, connection)`, before a welcomed connection is closed.
        event: another descriptor is readable.
        changed: after each round of all these.
    """

    welcome: Callable[[str, int], Welcome | None]
    arrived: Callable[[int, int, socket.socket], None]
    heard: Callable[[int, abi.Message], None]
    gone: Callable[[int, socket.socket], None]
    event: Callable[[], None]
    changed: Callable[[], None]


class FdSocket:
    """Listens at a path and serves it from a thread of its own until `close`.

    Args:
        path: of the socket.
        event_fd: another descriptor to wait on, for `handlers.event`.
        handlers: what to call.
    """

    def __init__(self, path: str, event_fd: int, handlers: Handlers) -> None:
        self._event_fd = event_fd
        self._handlers = handlers
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(64)
        self._connections: dict[int, tuple[socket.socket, int]] = {}  # fd -> socket, rank or -1
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="fd-socket", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        poll = select.poll()
        for fd in (self._listener.fileno(), self._event_fd, self._stop_read):
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._stop_read:
                    return
                if fd == self._listener.fileno():
                    connection, _peer = self._listener.accept()
                    self._connections[connection.fileno()] = (connection, -1)
                    poll.register(connection.fileno(), select.POLLIN)
                elif fd == self._event_fd:
                    self._handlers.event()
                else:
                    self._take_message(fd, poll)
            self._handlers.changed()

    def _take_message(self, fd: int, poll: select.poll) -> None:
        connection, rank = self._connections[fd]
        try:
            data = connection.recv(_MAX_MESSAGE)
        except OSError:
            data = b""
        if len(data) < ctypes.sizeof(abi.Message):
            poll.unregister(fd)
            self._connections.pop(fd)
            if rank >= 0:
                self._handlers.gone(rank, connection)
            connection.close()
            return
        message = abi.Message.from_buffer_copy(data[: ctypes.sizeof(abi.Message)])
        if message.type == abi.MessageType.HELLO:
            self._greet(connection, message)
        elif rank >= 0:
            self._handlers.heard(rank, message)

    def _greet(self, connection: socket.socket, hello: abi.Message) -> None:
        welcome = self._handlers.welcome(hello.text.decode(), hello.a)
        if welcome is None:
            refusal = message_of(abi.MessageType.REFUSED, status=-1, text=b"unknown ticket")
            send(connection, bytes(refusal), [])
            return
        self._connections[connection.fileno()] = (connection, welcome.rank)
        send(connection, welcome.body, welcome.fds)
        self._handlers.arrived(welcome.rank, hello.a, connection)

    def close(self) -> None:
        """End the thread, then close every connection and the listener."""
        os.write(self._stop_write, b"x")
        self._thread.join(_DEADLINE_S)
        for connection, _ in self._connections.values():
            connection.close()
        self._listener.close()
        os.close(self._stop_read)
        os.close(self._stop_write)


def message_of(kind: int, **values: Any) -> abi.Message:
    """A message with the magic number set."""
    return abi.Message(magic=abi.MESSAGE_MAGIC, type=kind, **values)


def send(connection: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    """One packet, with descriptors; to a peer that is gone already it is lost without an error."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendmsg([data], rights)
