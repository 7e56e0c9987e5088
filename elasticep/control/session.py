"""One node's open stream: what waits to be sent to it, and how it ends."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Final

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
        if self._closed.done():
            return  # it says hello again and hears it then
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

    @property
    def why(self) -> ElasticEPError:
        """Why it was closed."""
        return self._closed.result() if self._closed.done() else Unavailable("the stream broke")

    async def outgoing(self) -> AsyncGenerator[ControllerMessage, None]:
        """What is to be sent, until the session is closed.

        A generator, so that the stream is never ended in the middle of a write: then its status
        could not be sent, and the node would wait for ever.
        """
        while not self._closed.done():
            getting = asyncio.ensure_future(self._queue.get())
            try:
                waits: list[asyncio.Future[Any]] = [getting, self._closed]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if not getting.done():
                    return
                message = getting.result()
            finally:
                getting.cancel()
            yield message
