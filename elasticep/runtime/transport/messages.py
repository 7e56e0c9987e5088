"""The messages of the SEQPACKET socket: `ep_message`, a body, and file descriptors beside them."""

import struct
from dataclasses import dataclass
from typing import Final

from elasticep.errors import ElasticEPError
from elasticep.native.structs import MESSAGE_MAGIC, TEXT_BYTES, MessageType

_HEAD: Final = struct.Struct(f"<IIiIQQQQ{TEXT_BYTES}s")
HEAD_BYTES: Final = _HEAD.size
MAX_BODY_BYTES: Final = 64 * 1024
MAX_FDS: Final = 253  # the kernel's limit for one message
_TYPES: Final = {int(kind): kind for kind in MessageType}


class BadMessage(ElasticEPError):
    """What came over the socket is no message of ours."""

    reason = "BAD_MESSAGE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message; the meaning of `a`, `b`, `c`, `d` is told beside `ep_message_type`.

    Attributes:
        kind: what it says.
        rank: the rank it is about.
        status: 0, or a negative native error.
        text: a ticket, a group's name or a sentence; at most 255 bytes of UTF-8, cut if longer.
        body: what follows the fixed part.
    """

    kind: MessageType
    rank: int = 0
    status: int = 0
    a: int = 0
    b: int = 0
    c: int = 0
    d: int = 0
    text: str = ""
    body: bytes = b""

    def pack(self) -> bytes:
        """The bytes on the wire."""
        text = self.text.encode()[: TEXT_BYTES - 1].decode("utf-8", "ignore").encode()
        numbers = (self.rank, self.a, self.b, self.c, self.d, text)
        return _HEAD.pack(MESSAGE_MAGIC, self.kind, self.status, *numbers) + self.body


def unpack(data: bytes) -> Message:
    """Read one packet.

    Raises:
        BadMessage: too short, another magic, or a type that this version does not know.
    """
    if len(data) < HEAD_BYTES:
        raise BadMessage(f"a packet of {len(data)} bytes; a message has at least {HEAD_BYTES}")
    magic, kind, status, rank, a, b, c, d, text = _HEAD.unpack_from(data)
    if magic != MESSAGE_MAGIC:
        raise BadMessage(f"a packet with magic {magic:#010x} instead of {MESSAGE_MAGIC:#010x}")
    if kind not in _TYPES:
        raise BadMessage(f"a message of type {kind}, which this version does not know")
    return Message(
        kind=_TYPES[kind],
        rank=rank,
        status=status,
        a=a,
        b=b,
        c=c,
        d=d,
        text=text.split(b"\0", 1)[0].decode("utf-8", "replace"),
        body=data[HEAD_BYTES:],
    )
