"""The daemon's SEQPACKET server: checks who connects, bounds how many, hands on whole messages."""

import asyncio
import contextlib
import os
import socket
from pathlib import Path
from typing import Protocol

from elasticep.errors import ConfigError
from elasticep.native.abi import Error
from elasticep.native.structs import MessageType
from elasticep.runtime.limits import MAX_CONNECTIONS, Limits
from elasticep.runtime.transport.connection import Connection, close_all, peer_of, send
from elasticep.runtime.transport.messages import Message

SOCKET_MODE = 0o660
_BACKLOG = 128
_ACCEPT_AGAIN_S = 0.2


class Handler(Protocol):
    """What the server hands its messages to; calls must not block and must not raise."""

    def opened(self, connection: Connection) -> None:
        """Somebody with the right uid connected."""

    def message(self, connection: Connection, message: Message, fds: list[int]) -> None:
        """A message came; the descriptors belong to the handler."""

    def closed(self, connection: Connection, why: str) -> None:
        """The connection is over."""


def refuse(connection: Connection, status: int, text: str) -> None:
    """Say why, then hang up."""
    connection.send(Message(kind=MessageType.REFUSED, status=status, text=text))
    connection.close_after_sending(f"refused: {text}")


class FdServer:
    """Listens on a SEQPACKET path.

    Args:
        path: where; an existing socket file there must be stale, see `runtime.sockets`.
        handler: gets what comes.
        limits: `hello_s` is how long a connection may stay without an owner.
    """

    def __init__(self, path: str, handler: Handler, limits: Limits) -> None:
        self.path = path
        self._handler = handler
        self._limits = limits
        self._listener: socket.socket | None = None
        self._rest: asyncio.TimerHandle | None = None
        self._connections: set[Connection] = set()
        self._allowed_uids = (0, os.getuid())

    def start(self) -> None:
        """Bind and accept.

        Raises:
            ConfigError: the path cannot be bound.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            old_mask = os.umask(0o777 & ~SOCKET_MODE)
            try:
                listener.bind(self.path)
            finally:
                os.umask(old_mask)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise ConfigError(f"cannot listen on {self.path}: {error.strerror}") from None
        self._listener = listener
        self._listen()

    def _listen(self) -> None:
        self._rest = None
        assert self._listener is not None
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Close every connection and remove the socket file."""
        if self._listener is None:
            return
        if self._rest is not None:
            self._rest.cancel()
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        self._listener = None
        for connection in list(self._connections):
            connection.close("the daemon leaves")
        with contextlib.suppress(FileNotFoundError):
            Path(self.path).unlink()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:
            # Out of descriptors. Who knocks stays in line, and the loop would hear of nothing else.
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener)
            self._rest = loop.call_later(_ACCEPT_AGAIN_S, self._listen)
            return
        sock.setblocking(False)
        peer = peer_of(sock)
        if peer.uid not in self._allowed_uids:
            self._turn_away(
                sock, f"user {peer.uid} may not use the daemon of user {self._allowed_uids[1]}"
            )
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            self._turn_away(sock, f"{MAX_CONNECTIONS} connections are open; try again later")
            return
        connection = Connection(sock, self._message, self._closed)
        self._connections.add(connection)
        asyncio.get_running_loop().call_later(self._limits.hello_s, self._close_silent, connection)
        self._handler.opened(connection)

    @staticmethod
    def _turn_away(sock: socket.socket, text: str) -> None:
        refusal = Message(kind=MessageType.REFUSED, status=Error.EINVAL, text=text)
        with contextlib.suppress(OSError):
            send(sock, refusal.pack(), ())
        sock.close()

    def _close_silent(self, connection: Connection) -> None:
        if connection.owner is None:
            connection.close("it said no hello")

    def _message(self, connection: Connection, message: Message, fds: list[int]) -> None:
        if connection.closed:
            close_all(fds)
            return
        self._handler.message(connection, message, fds)

    def _closed(self, connection: Connection, why: str) -> None:
        self._connections.discard(connection)
        self._handler.closed(connection, why)
