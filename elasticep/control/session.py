"""One node's open stream: what waits to be sent to it, and how it ends."""

import asyncio
from typing import Any, Final

import grpc.aio

from elasticep.control.records import Endpoint
from elasticep.errors import ElasticEPError, Unavailable
from elasticep.proto.controller_pb2 import ControllerMessage

MAX_QUEUED: Final = 1_024


class NodeSession:
    """The outgoing half of a node's stream.

    Args:
        endpoint: the node.
        session_id: what the node calls its process.
    """

    def __init__(self, endpoint: Endpoint, session_id: str) -> None:
        self.endpoint = endpoint
        self.session_id = session_id
        self._queue: asyncio.Queue[ControllerMessage] = asyncio.Queue(MAX_QUEUED)
        self._closed: asyncio.Future[ElasticEPError] = asyncio.get_running_loop().create_future()

    @property
    def node(self) -> str:
        """The node's name."""
        return self.endpoint.node

    def send(self, message: ControllerMessage) -> None:
        """Queue a message; a node that does not read loses its session."""
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            self.close(
                Unavailable(
                    f"node {self.node} did not read {MAX_QUEUED} messages; it must connect anew"
                )
            )

    def close(self, why: ElasticEPError) -> None:
        """End the stream with an error; the first reason counts."""
        if not self._closed.done():
            self._closed.set_result(why)

    async def pump(self, context: "grpc.aio.ServicerContext[Any, Any]") -> ElasticEPError:
        """Send until the session is closed; returns why."""
        while not self._closed.done():
            getting = asyncio.ensure_future(self._queue.get())
            try:
                waits: list[asyncio.Future[Any]] = [getting, self._closed]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if getting.done():
                    await context.write(getting.result())
            finally:
                getting.cancel()
        return self._closed.result()
