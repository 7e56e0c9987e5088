"""Deaths that cannot wait for the controller: daemons tell each other at once."""

import asyncio
from collections.abc import Callable, Sequence

import grpc

from elasticep.errors import ElasticEPError
from elasticep.proto import node_pb2, node_pb2_grpc
from elasticep.rpc import open_channel
from elasticep.runtime.node import Node


class Announcer:
    """Channels to the daemons of other nodes, for deaths that cannot wait for the controller.

    Args:
        node: the daemon's shared parts.
        addresses: gRPC addresses of a group's other daemons.
    """

    def __init__(self, node: Node, addresses: Callable[[str], Sequence[str]]) -> None:
        self._node = node
        self._addresses = addresses
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def announce(self, request: node_pb2.ReportDeathRequest) -> None:
        """Send a ReportDeathRequest to every other daemon of its group; nobody waits for it."""
        for address in self._addresses(request.group):
            task = asyncio.create_task(self._report(address, request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _report(self, address: str, request: node_pb2.ReportDeathRequest) -> None:
        try:
            channel = self._channels.get(address)
            if channel is None:
                channel = open_channel(address, self._node.config.tls)
                self._channels[address] = channel
            stub = node_pb2_grpc.NodeServiceStub(channel)
            await stub.ReportDeath(request, timeout=self._node.limits.report_s)
        except grpc.aio.AioRpcError as error:
            # The controller tells them too; this was the quick way.
            self._node.log.info("peer.not_told", address=address, why=error.details())
        except ElasticEPError as error:
            self._node.log.error("peer.tls", address=address, error=str(error))

    async def close(self) -> None:
        """End what is under way."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._node.limits.report_s)
        for task in self._tasks:
            task.cancel()
        for channel in self._channels.values():
            await channel.close()
