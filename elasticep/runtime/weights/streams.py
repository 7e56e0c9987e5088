"""In the mover: units through other nodes' daemons. Imported only when one is asked for, since gRPC
takes longer to import than all the rest of the mover.
"""

import asyncio
import time
from typing import Final

import grpc
import grpc.aio

from elasticep.arena import Fill
from elasticep.config import TlsConfig
from elasticep.errors import Busy
from elasticep.proto import node_pb2, node_pb2_grpc
from elasticep.rpc import open_channel, typed_error
from elasticep.runtime.weights.messages import Failure, Kind, Source
from elasticep.runtime.weights.sources import LEAST_BYTES_PER_S, SourceFailed, Went
from elasticep.weights import CHECKSUM_BYTES

CHUNK_S: Final = 1.0
"""A daemon that sends nothing for this long has stalled."""

_WINDOW_S: Final = 2.0
_GONE: Final = (
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNIMPLEMENTED,
)


class Rate:
    """Notices a source that trickles: in a window of waiting for it, too little came.

    Every unit is over in time because of it: after its bytes at the least rate and one window.
    """

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._came = 0

    def add(self, waited_s: float, came: int) -> None:
        """So many bytes came after waiting for them; what the receiver itself takes does not count.

        Raises:
            SourceFailed: too few.
        """
        self._waited_s += waited_s
        self._came += came
        if self._waited_s < _WINDOW_S:
            return
        rate = self._came / self._waited_s
        self._waited_s, self._came = 0.0, 0
        if rate < LEAST_BYTES_PER_S:
            raise SourceFailed(
                Failure.STALLED,
                f"{rate:.0f} bytes per second came, less than {LEAST_BYTES_PER_S}",
            )


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
            SourceFailed: the daemon does not have it, is gone or busy, sends nothing or hardly
                anything, or sends too much or too little.
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
        rate = Rate()
        try:
            while True:
                began = time.monotonic()
                chunk = await asyncio.wait_for(call.read(), CHUNK_S)
                if chunk is grpc.aio.EOF:
                    break
                assert isinstance(chunk, node_pb2.ReadExpertChunk)
                rate.add(time.monotonic() - began, len(chunk.data))
                if not chunk.data:
                    raise SourceFailed(Failure.FAILED, "a chunk of no bytes came")
                promised = promised or chunk.checksum
                if len(promised) != CHECKSUM_BYTES:
                    raise SourceFailed(Failure.FAILED, f"no checksum of {CHECKSUM_BYTES} bytes")
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
            said = typed_error(error, source.address)
            kind = Failure.GONE if error.code() in _GONE else Failure.FAILED
            kind = Failure.BUSY if isinstance(said, Busy) else kind
            raise SourceFailed(kind, str(said)) from None
        finally:
            call.cancel()
        if at != total:
            raise SourceFailed(Failure.FAILED, f"{at} of a unit's {total} bytes came")
        return promised
