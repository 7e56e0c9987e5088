"""In the mover: how the bytes of one unit come out of a source and into a slot being filled.

Every function here fills `fill` from begin to end, calls `went(bytes)` after each chunk (which
keeps the pace, reports, and raises when the copy was called off), and returns what the source
promises the unit to sum up to, or None. Nothing is believed: the caller sums up what lies in the
slot afterwards.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import grpc
import grpc.aio

from elasticep.arena import Arena, Fill
from elasticep.config import TlsConfig
from elasticep.errors import ElasticEPError, SlotInvalid
from elasticep.proto import node_pb2, node_pb2_grpc
from elasticep.rpc import open_channel, typed_error
from elasticep.runtime.weights.messages import Failure, Kind, Source

CHUNK_BYTES: Final = 256 * 1024
CHUNK_S: Final = 1.0
"""A daemon that sends nothing for this long has stalled."""

Went = Callable[[int], None]
_GONE: Final = (
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNIMPLEMENTED,
)


class SourceFailed(ElasticEPError):
    """The source did not give the unit.

    Attributes:
        failure: in which way.
    """

    reason = "SOURCE_FAILED"

    def __init__(self, failure: Failure, text: str) -> None:
        super().__init__(text)
        self.failure = failure


def copy_arena(source: Arena, slot: int, fill: Fill, chunk: int, went: Went) -> bytes:
    """Out of another arena of this host; its label is looked at before and after.

    Raises:
        SourceFailed: the slot does not hold the expert, or was filled anew meanwhile.
    """
    try:
        label = source.require(fill.layer, slot, fill.expert)
    except SlotInvalid as error:
        raise SourceFailed(Failure.GONE, str(error)) from None
    total = fill.arena.layout.spec.unit_bytes
    for at in range(0, total, chunk):
        size = min(chunk, total - at)
        pairs = zip(source.pieces(fill.layer, slot, at, size), fill.pieces(at, size), strict=True)
        for old, new in pairs:
            new[:] = old
        went(size)
    if source.label(fill.layer, slot) != label:
        raise SourceFailed(
            Failure.GONE, f"slot {slot} was filled anew while expert {fill.expert} was copied"
        )
    return label.checksum


class Daemons:
    """Reads units through other nodes' daemons; one event loop and one channel for each.

    Args:
        tls: for addresses beyond this host.
    """

    def __init__(self, tls: TlsConfig) -> None:
        self._tls = tls
        self._runner = asyncio.Runner()
        self._channels: dict[str, grpc.aio.Channel] = {}

    def copy(self, source: Source, fill: Fill, went: Went) -> bytes:
        """Stream one unit.

        Raises:
            SourceFailed: the daemon does not have it, is gone, sends nothing, or sends too much or
                too little.
        """
        return self._runner.run(self._copy(source, fill, went))

    async def _copy(self, source: Source, fill: Fill, went: Went) -> bytes:
        channel = self._channels.get(source.address)
        if channel is None:
            channel = self._channels[source.address] = open_channel(source.address, self._tls)
        request = node_pb2.ReadExpertRequest(
            group=source.group,
            layer=fill.layer,
            expert=fill.expert,
            backup=source.kind is Kind.BACKUP,
            rank=max(0, source.rank),
            incarnation=source.incarnation,
        )
        call = node_pb2_grpc.NodeServiceStub(channel).ReadExpert(request)
        total, at, promised = fill.arena.layout.spec.unit_bytes, 0, b""
        try:
            while True:
                chunk = await asyncio.wait_for(call.read(), CHUNK_S)
                if chunk is grpc.aio.EOF:
                    break
                assert isinstance(chunk, node_pb2.ReadExpertChunk)
                promised = promised or chunk.checksum
                if at + len(chunk.data) > total:
                    raise SourceFailed(Failure.FAILED, f"more than a unit's {total} bytes came")
                fill.write(at, chunk.data)
                at += len(chunk.data)
                went(len(chunk.data))
        except TimeoutError:
            raise SourceFailed(
                Failure.STALLED, f"nothing came for {CHUNK_S:g} s after {at} of {total} bytes"
            ) from None
        except grpc.aio.AioRpcError as error:
            kind = Failure.GONE if error.code() in _GONE else Failure.FAILED
            text = str(typed_error(error, source.address))
            raise SourceFailed(kind, text) from None
        finally:
            call.cancel()
        if at != total:
            raise SourceFailed(Failure.FAILED, f"{at} of a unit's {total} bytes came")
        return promised
