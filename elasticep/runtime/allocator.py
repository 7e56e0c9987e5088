"""Makes one rank's GPU memory: `python -m elasticep.runtime.allocator --socket PATH GROUP/RANK`.

The daemon starts it when a seat on a GPU has no memory yet, with a ticket in `ELASTICEP_TICKET`. It
asks for the group's sizes, allocates, hands the descriptor over and leaves: the daemon, which never
makes a CUDA context itself, holds the descriptor, and that alone keeps the memory.
"""

import os
import socket
import sys

from elasticep.errors import ElasticEPError, UsageError
from elasticep.native import abi, cuda_library
from elasticep.native.structs import Geometry, MessageType, Role
from elasticep.runtime.transport.connection import close_all, receive, send
from elasticep.runtime.transport.messages import Message

_USAGE = (
    "usage: python -m elasticep.runtime.allocator --socket PATH GROUP/RANK (started by the daemon)"
)


def run(arguments: list[str]) -> int:
    """Allocate; the exit status: 0 when the daemon has the memory, else 1 with a line on stderr."""
    ticket = os.environ.pop("ELASTICEP_TICKET", "")
    if len(arguments) != 3 or arguments[0] != "--socket" or not ticket:
        sys.stderr.write(f"{_USAGE}\n")
        return 2
    _, path, label = arguments
    try:
        _serve(path, ticket)
    except (ElasticEPError, OSError) as error:
        sys.stderr.write(f"allocator {label}: {error}\n")
        return 1
    return 0


def _serve(path: str, ticket: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(path)
        hello = Message(kind=MessageType.HELLO, a=Role.WORKER, b=os.getpid(), text=ticket)
        send(sock, hello.pack(), ())
        answer = receive(sock)
        if answer is None:
            raise ConnectionResetError(f"the daemon at {path} hung up")
        order, fds = answer
        close_all(fds)
        if order.kind is not MessageType.WELCOME:
            raise ConnectionRefusedError(order.text or f"answered with {order.kind.name}")
        geometry = Geometry.from_buffer_copy(order.body)
        try:
            fd = _region(geometry, order.d)
        except ElasticEPError as error:
            failed = Message(
                kind=MessageType.MEMORY,
                rank=order.rank,
                status=abi.code_of(error),
                body=str(error).encode(),  # whole: its end is the remedy
            )
            send(sock, failed.pack(), ())
            raise
        try:
            send(sock, Message(kind=MessageType.MEMORY, rank=order.rank).pack(), (fd,))
            sock.recv(1)  # the daemon hangs up when it has taken it
        finally:
            os.close(fd)


def _region(geometry: Geometry, device: int) -> int:
    try:
        return cuda_library.create_region(geometry, device)
    except UsageError as error:  # the driver's word, as of a device that is not there
        raise UsageError(
            f"{error}; this node has {cuda_library.device_count()} usable GPUs, and daemon.devices "
            "says which of them seats take"
        ) from None


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
