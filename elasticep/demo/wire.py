"""Messages between the parent and its engines: one JSON object per SEQPACKET message."""

import json
import socket
from collections.abc import Iterator
from typing import Any, Final

from elasticep.demo.journal import Assignment

_MAX_BYTES: Final = 1 << 18
_BUFFER_BYTES: Final = 1 << 20

Message = dict[str, Any]


class Pipe:
    """One end of the connection between the parent and an engine."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self.open = True

    def fileno(self) -> int:
        """For a selector."""
        return self._end.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Send one message. Raises `OSError` when the other side is gone."""
        self._end.send(json.dumps({"kind": kind, **fields}).encode())

    def receive(self) -> Iterator[Message]:
        """Messages that are there; `open` becomes False after the last one of a closed end."""
        while True:
            try:
                data = self._end.recv(_MAX_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data = b""
            if not data:
                self.open = False
                return
            yield json.loads(data)

    def close(self) -> None:
        """Close this end."""
        self._end.close()


def pipe() -> tuple[Pipe, Pipe]:
    """Two connected ends."""
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Pipe(first), Pipe(second)


def assignment_fields(assignment: Assignment) -> Message:
    """An assignment as plain values."""
    return {
        "request": assignment.request,
        "prompt": list(assignment.prompt),
        "tokens": list(assignment.tokens),
        "max_new": assignment.max_new,
    }


def assignment_from(fields: Message) -> Assignment:
    """What `assignment_fields` wrote."""
    return Assignment(
        fields["request"], tuple(fields["prompt"]), tuple(fields["tokens"]), fields["max_new"]
    )
