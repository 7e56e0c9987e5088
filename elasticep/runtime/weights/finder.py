"""Finds who has experts: this node, and by asking the daemons of the other nodes."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import grpc
import grpc.aio
import numpy as np

from elasticep.errors import ElasticEPError, UnknownGroup, WeightsError
from elasticep.proto import node_pb2, node_pb2_grpc
from elasticep.rpc import open_channel, typed_error
from elasticep.runtime.node import Node
from elasticep.runtime.regions.peers import Endpoint
from elasticep.runtime.weights.ledger import Ref
from elasticep.runtime.weights.lookup import look_up
from elasticep.weights import CHECKSUM_BYTES

if TYPE_CHECKING:
    from elasticep.runtime.weights.group import GroupWeights

MAX_REFS: Final = 65_536
_GRACE_S: Final = 0.05  # for further answers, once everything has been found
_REFS_PER_LIMIT: Final = 8192  # so many take as long again as `find_s`
_SILENT_TIMES: Final = 3
_MOST_PIECES: Final = 4096


@dataclass(frozen=True, slots=True)
class Replica:
    """A live rank that holds an expert whole."""

    node: str
    rank: int
    incarnation: int
    slot: int


@dataclass(frozen=True, slots=True)
class Kept:
    """A node's backup that holds an expert: in which piece of memory (its number there, and what
    tells it from any other memory), of how many slots per layer, and where in it.
    """

    node: str
    piece: int
    memory: int
    slots: int
    slot: int


@dataclass(slots=True)
class Place:
    """What is known of one expert.

    Attributes:
        replicas: live ranks that hold it.
        backups: host memory that holds it.
        said: node -> what its ledger says.
        silent: nodes of the group that were asked and did not answer.
    """

    replicas: list[Replica] = field(default_factory=list)
    backups: list[Kept] = field(default_factory=list)
    said: dict[str, bytes] = field(default_factory=dict)
    silent: tuple[str, ...] = ()

    @property
    def found(self) -> bool:
        """Whether memory of some node holds it."""
        return bool(self.replicas or self.backups)


class Finder:
    """One group's.

    Args:
        node: the daemon's shared parts.
        weights: this node's arenas of the group.
    """

    def __init__(self, node: Node, weights: "GroupWeights") -> None:
        self._node = node
        self._weights = weights
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._silent: Counter[str] = Counter()  # nodes -> how often in a row they did not answer

    async def find(self, refs: Sequence[Ref], *, patient: bool = False) -> dict[Ref, Place]:
        """Ask every node, for at most `find_s` (more if there is much to look for).

        Nodes that did not answer the last time are asked, but hardly waited for.

        Args:
            refs: which experts.
            patient: wait for everybody, also if all have been found.
        """
        places = {ref: Place() for ref in refs}
        self._here(places)
        others = [e for e in self._weights.endpoints.values() if e.node != self._node.config.node]
        if not others or not refs:
            return places
        heard: set[str] = set()
        tasks = {asyncio.create_task(self._ask(e, refs, places, heard)): e.node for e in others}
        left = set(tasks)
        end = time.monotonic() + self._limit_s(len(refs))
        try:
            while left:
                found = not patient and all(place.found for place in places.values())
                if found or all(tasks[task] in self._silent for task in left):
                    end = min(end, time.monotonic() + _GRACE_S)
                wait_s = end - time.monotonic()
                if wait_s <= 0:
                    break
                _, left = await asyncio.wait(
                    left, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        self._not_heard({e.node for e in others} - heard, places)
        return places

    def _limit_s(self, count: int) -> float:
        return self._node.limits.find_s * (1 + count / _REFS_PER_LIMIT)

    def _not_heard(self, nodes: set[str], places: dict[Ref, Place]) -> None:
        """Those of the latest view may have what nobody else has; of others that stay silent there
        is nothing to be hoped.
        """
        members = self._weights.nodes
        silent = tuple(sorted(nodes & members))
        for place in places.values():
            place.silent = silent
        for node in nodes:
            self._silent[node] += 1
            if node not in members and self._silent[node] >= _SILENT_TIMES:
                self._weights.endpoints.pop(node, None)
                del self._silent[node]

    def _here(self, places: dict[Ref, Place]) -> None:
        own = self._node.config.node
        refs = np.array(list(places), np.int64).reshape(-1, 2)
        here = look_up(self._weights, refs[:, 0], refs[:, 1])
        for index, place in enumerate(places.values()):
            place.replicas += [Replica(own, *found) for found in here.replicas_of(index)]
            kept = here.backup_of(index)
            if kept is not None:
                piece, memory, slot = kept
                place.backups.append(Kept(own, piece, memory.number, memory.layout.slots, slot))

    async def _ask(
        self,
        endpoint: Endpoint,
        refs: Sequence[Ref],
        places: dict[Ref, Place],
        heard: set[str],
    ) -> None:
        try:
            stub = node_pb2_grpc.NodeServiceStub(self._channel(endpoint.grpc_address))
            for at in range(0, len(refs), MAX_REFS):
                part = refs[at : at + MAX_REFS]
                answer = await stub.FindExperts(
                    node_pb2.FindExpertsRequest(
                        group=self._weights.name,
                        layers=[layer for layer, _ in part],
                        experts=[expert for _, expert in part],
                    ),
                    timeout=self._limit_s(len(part)),
                )
                self._check(endpoint.node, len(part), answer)
                self._note(endpoint.node, part, answer, places)
        except grpc.aio.AioRpcError as error:
            if isinstance(typed_error(error, endpoint.node), UnknownGroup):
                heard.add(endpoint.node)  # it has nothing
            self._node.log.info("weights.node_silent", node=endpoint.node, why=error.details())
        except ElasticEPError as error:
            self._node.log.error("weights.node_silent", node=endpoint.node, why=str(error))
        else:
            heard.add(endpoint.node)
            self._silent.pop(endpoint.node, None)

    def _check(self, node: str, asked: int, answer: node_pb2.FindExpertsResponse) -> None:
        """Raises `WeightsError` if numbers in an answer are out of all bounds."""
        layout, ranks = self._weights.layout, self._weights.max_ranks
        for found in answer.found:
            good = (
                found.index < asked
                and len(found.checksum) in (0, CHECKSUM_BYTES)
                and len(found.replicas) <= ranks
                and all(r.rank < ranks and r.slot < layout.slots for r in found.replicas)
                and (
                    not found.backup
                    or (
                        found.backup_slot < found.backup_slots <= self._weights.experts
                        and found.backup_piece < _MOST_PIECES
                    )
                )
            )
            if not good:
                raise WeightsError(
                    f"node {node!r} answers nonsense about experts ({found!s:.200}); install one "
                    "version everywhere"
                )

    def _note(
        self,
        node: str,
        refs: Sequence[Ref],
        answer: node_pb2.FindExpertsResponse,
        places: dict[Ref, Place],
    ) -> None:
        for found in answer.found:
            place = places[refs[found.index]]
            if found.checksum:
                place.said[node] = found.checksum
            if found.backup:
                place.backups.append(
                    Kept(
                        node,
                        found.backup_piece,
                        found.backup_memory,
                        found.backup_slots,
                        found.backup_slot,
                    )
                )
            place.replicas += [Replica(node, r.rank, r.incarnation, r.slot) for r in found.replicas]

    def _channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address, self._node.config.tls)
        return channel

    async def close(self) -> None:
        """Close channels."""
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()
