"""Fetches a rank's memory from the daemon that owns it, over that daemon's SEQPACKET socket."""

import asyncio
import socket

from elasticep.errors import Unavailable
from elasticep.native.structs import MessageType
from elasticep.runtime.transport.connection import close_all, receive, send
from elasticep.runtime.transport.messages import BadMessage, Message


async def fetch_region(
    fd_socket: str, node: str, group: str, rank: int, timeout_s: float
) -> tuple[int, int, int]:
    """Header fd, data fd (both the caller's) and layout digest of a peer's rank.

    Raises:
        Unavailable: refused, gone, or no answer in time; names the node and the rank.
    """
    what = f"memory of rank {rank} of group {group!r} from node {node!r} at {fd_socket}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        async with asyncio.timeout(timeout_s):
            await _connect(sock, fd_socket)
            request = Message(kind=MessageType.FETCH, rank=rank, text=group)
            send(sock, request.pack(), ())
            return await _answer(sock, what)
    except TimeoutError:
        raise Unavailable(f"{what}: no answer within {timeout_s:g} s") from None
    except (OSError, BadMessage) as error:
        raise Unavailable(f"{what}: {error}") from None
    finally:
        sock.close()


async def _connect(sock: socket.socket, path: str) -> None:
    while True:
        try:
            sock.connect(path)
        except BlockingIOError:  # its backlog is full; there is nothing to wait on
            await asyncio.sleep(0.01)
        else:
            return


async def _answer(sock: socket.socket, what: str) -> tuple[int, int, int]:
    loop = asyncio.get_running_loop()
    while True:
        readable = loop.create_future()
        loop.add_reader(sock, _set, readable)
        try:
            await readable
        finally:
            loop.remove_reader(sock)
        try:
            received = receive(sock)
        except BlockingIOError:
            continue
        break
    if received is None:
        raise Unavailable(f"{what}: the daemon hung up")
    message, fds = received
    expected = message.kind is MessageType.FETCHED and message.status == 0 and len(fds) == 2
    if not expected:
        close_all(fds)
        raise Unavailable(f"{what}: {message.text or f'answered with {message.kind.name}'}")
    return fds[0], fds[1], message.a


def _set(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
