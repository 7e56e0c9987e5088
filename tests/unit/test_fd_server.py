"""The daemon's socket where accepting fails."""

import asyncio
import errno
import socket
from pathlib import Path

import pytest

from elasticep.runtime.limits import Limits
from elasticep.runtime.transport.connection import Connection
from elasticep.runtime.transport.messages import Message
from elasticep.runtime.transport.server import FdServer

_DEADLINE_S = 60.0
_TURNS = 50


class Opened:
    """A handler that waits for a connection."""

    def __init__(self) -> None:
        self.one = asyncio.Event()

    def opened(self, connection: Connection) -> None:
        self.one.set()

    def message(self, connection: Connection, message: Message, fds: list[int]) -> None:
        raise AssertionError("nobody says anything here")

    def closed(self, connection: Connection, why: str) -> None:
        """Nothing follows."""


def test_a_daemon_without_descriptors_does_not_turn_in_circles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who connects while none is left is served when there is one again, and until then the
    daemon's loop is not kept busy with it.
    """
    tried = []
    accept = socket.socket.accept

    def without(self: socket.socket) -> tuple[socket.socket, str]:
        tried.append(self)
        raise OSError(errno.EMFILE, "Too many open files")

    async def run() -> None:
        path = str(tmp_path / "fd")
        handler = Opened()
        server = FdServer(path, handler, Limits())
        server.start()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
            monkeypatch.setattr(socket.socket, "accept", without)
            caller.connect(path)
            async with asyncio.timeout(_DEADLINE_S):
                while not tried:
                    await asyncio.sleep(0)
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            assert len(tried) < _TURNS // 10
            monkeypatch.setattr(socket.socket, "accept", accept)
            async with asyncio.timeout(_DEADLINE_S):
                await handler.one.wait()
        server.close()

    asyncio.run(run())
