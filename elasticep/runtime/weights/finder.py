"""Finds where experts can be had: here, and by asking the daemons of the other nodes."""

import asyncio
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import grpc
import grpc.aio

from elasticep.errors import ElasticEPError, GroupMismatch
from elasticep.handover import ArenaFd, fetch_arena
from elasticep.proto import node_pb2, node_pb2_grpc
from elasticep.rpc import open_channel
from elasticep.runtime.node import Node
from elasticep.runtime.regions.memory import check_memory
from elasticep.runtime.regions.peers import Endpoint
from elasticep.runtime.weights.ledger import Ledger, Ref, Verdict
from elasticep.runtime.weights.memory import NOTHING
from elasticep.runtime.weights.messages import Kind, Source
from elasticep.weights import ArenaLayout

if TYPE_CHECKING:
    from elasticep.runtime.weights.group import GroupWeights

MAX_REFS: Final = 65_536
_GRACE_S: Final = 0.02  # for further answers, once everything has been found


@dataclass(frozen=True, slots=True)
class Replica:
    """A live rank that holds an expert whole."""

    node: str
    rank: int
    incarnation: int
    slot: int


@dataclass(frozen=True, slots=True)
class Kept:
    """A node's backup that holds an expert: in which piece of memory, of how many slots per layer,
    and where in it.
    """

    node: str
    piece: int
    slots: int
    slot: int


@dataclass(slots=True)
class Place:
    """What is known of one expert.

    Attributes:
        replicas: live ranks that hold it.
        backups: host memory that holds it.
        said: node -> what its ledger says.
    """

    replicas: list[Replica] = field(default_factory=list)
    backups: list[Kept] = field(default_factory=list)
    said: dict[str, bytes] = field(default_factory=dict)

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
        self._peers: dict[tuple[int, int], tuple[int, str]] = {}  # (rank, inc) -> arena, node
        self._fetching = asyncio.Lock()
        self._pieces: dict[tuple[str, int, int], int] = {}  # (node, piece, slots) -> arena

    # ---- who has it

    async def find(self, refs: Sequence[Ref]) -> dict[Ref, Place]:
        """Ask every node; those that do not answer within `find_s` have nothing."""
        places = {ref: Place() for ref in refs}
        self._here(places)
        others = [e for e in self._weights.endpoints.values() if e.node != self._node.config.node]
        if not others or not refs:
            return places
        tasks = {asyncio.create_task(self._ask(e, refs, places)) for e in others}
        end = time.monotonic() + self._node.limits.find_s
        try:
            while tasks and (left := end - time.monotonic()) > 0:
                _, tasks = await asyncio.wait(
                    tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED
                )
                if all(place.found for place in places.values()):
                    end = min(end, time.monotonic() + _GRACE_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return places

    def _here(self, places: dict[Ref, Place]) -> None:
        own = self._node.config.node
        for (layer, expert), place in places.items():
            for rank, incarnation, memory in self._weights.live():
                slot = memory.slot_of(layer, expert)
                if slot != NOTHING:
                    place.replicas.append(Replica(own, rank, incarnation, slot))
            held = self._weights.backup.find(layer, expert)
            if held is not None:
                piece = self._weights.backup.piece_of(held[0])
                place.backups.append(Kept(own, piece, held[0].layout.slots, held[1]))

    async def _ask(self, endpoint: Endpoint, refs: Sequence[Ref], places: dict[Ref, Place]) -> None:
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
                    timeout=self._node.limits.find_s,
                )
                self._note(endpoint.node, part, answer, places)
        except grpc.aio.AioRpcError as error:
            self._node.log.info("weights.node_silent", node=endpoint.node, why=error.details())
        except ElasticEPError as error:
            self._node.log.error("weights.node_silent", node=endpoint.node, why=str(error))

    def _note(
        self,
        node: str,
        refs: Sequence[Ref],
        answer: node_pb2.FindExpertsResponse,
        places: dict[Ref, Place],
    ) -> None:
        for found in answer.found:
            if found.index >= len(refs):
                continue
            place = places[refs[found.index]]
            if found.checksum:
                place.said[node] = found.checksum
            if found.backup:
                place.backups.append(
                    Kept(node, found.backup_piece, found.backup_slots, found.backup_slot)
                )
            place.replicas += [Replica(node, r.rank, r.incarnation, r.slot) for r in found.replicas]

    def _channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address, self._node.config.tls)
        return channel

    def verdict(self, ref: Ref, place: Place, ledger: Ledger) -> Verdict:
        """What the expert must sum up to."""
        return ledger.judge(*ref, place.said)

    # ---- from where to copy

    async def sources(
        self, ref: Ref, place: Place, dead: Callable[[int, int], bool]
    ) -> list[Source]:
        """Where to copy from, in the order in which to try."""
        layer, expert = ref
        own, domain = self._node.config.node, self._node.config.domain
        near: list[Source] = []
        far: list[Source] = []
        for replica in _rotated(place.replicas, layer + expert):
            if dead(replica.rank, replica.incarnation):
                continue
            endpoint = self._weights.endpoints.get(replica.node)
            common = {
                "node": replica.node,
                "rank": replica.rank,
                "incarnation": replica.incarnation,
                "group": self._weights.name,
            }
            arena = -1
            if replica.node == own:
                memory = self._weights.memory_of(replica.rank)
                arena = -1 if memory is None else self._node.mover.number_of(memory)
            elif endpoint is not None and endpoint.domain == domain:
                arena = await self._peer_arena(replica, endpoint)
            if arena >= 0:
                near.append(
                    Source(kind=Kind.REPLICA, arena=arena, slot=replica.slot, **common)  # type: ignore[arg-type]
                )
            elif endpoint is not None and replica.node != own:
                far.append(
                    Source(kind=Kind.REMOTE, address=endpoint.grpc_address, **common)  # type: ignore[arg-type]
                )
        near.sort(key=lambda source: source.node != own)
        return [*near, *far, *await self._backups(ref, place), *self._checkpoints()]

    async def _backups(self, ref: Ref, place: Place) -> list[Source]:
        own, domain = self._node.config.node, self._node.config.domain
        found = []
        for kept in sorted(place.backups, key=lambda kept: kept.node != own):
            endpoint = self._weights.endpoints.get(kept.node)
            arena, slot = -1, kept.slot
            if kept.node == own:
                held = self._weights.backup.find(*ref)
                if held is None:
                    continue
                arena, slot = self._node.mover.number_of(held[0]), held[1]
            elif endpoint is None:
                continue
            elif endpoint.domain == domain:
                arena = await self._piece(kept, endpoint)
            found.append(
                Source(
                    kind=Kind.BACKUP,
                    arena=arena,
                    slot=slot if arena >= 0 else -1,
                    address="" if endpoint is None else endpoint.grpc_address,
                    group=self._weights.name,
                    node=kept.node,
                )
            )
        return found

    def _checkpoints(self) -> list[Source]:
        path = self._weights.checkpoint
        return [Source(kind=Kind.CHECKPOINT, path=path)] if path else []

    async def _peer_arena(self, replica: Replica, endpoint: Endpoint) -> int:
        """The mover's number of a peer's arena; -1 when it cannot be had."""
        key = (replica.rank, replica.incarnation)
        known = self._peers.get(key)
        if known is not None and known[1] == replica.node:
            return known[0]
        layout = self._weights.layout
        async with self._fetching:
            if key in self._peers:  # whoever waited before had it fetched
                return self._peers[key][0]
            got = await self._fetch(endpoint, replica.rank, layout, backup=False)
            if got is None:
                return -1
            if got.incarnation != replica.incarnation:  # granted anew meanwhile
                os.close(got.fd)
                return -1
            self._peers[key] = (self._node.mover.lend_peer(got.fd, layout), replica.node)
            return self._peers[key][0]

    async def _piece(self, kept: Kept, endpoint: Endpoint) -> int:
        """The mover's number of a piece of another node's backup; -1 when it cannot be had."""
        key = (kept.node, kept.piece, kept.slots)
        async with self._fetching:
            if key not in self._pieces:
                whole = self._weights.layout
                layout = ArenaLayout(whole.layers, max(1, kept.slots), whole.spec)
                got = await self._fetch(endpoint, kept.piece, layout, backup=True)
                if got is not None:
                    self._pieces[key] = self._node.mover.lend_peer(got.fd, layout)
            return self._pieces.get(key, -1)

    async def _fetch(
        self, endpoint: Endpoint, number: int, layout: ArenaLayout, *, backup: bool
    ) -> ArenaFd | None:
        """A descriptor from another daemon; None when there is none of this layout."""
        got = None
        what = f"{'piece of backup' if backup else 'arena of rank'} {number} on {endpoint.node!r}"
        try:
            got = await asyncio.to_thread(
                fetch_arena,
                endpoint.fd_socket,
                self._weights.name,
                number,
                self._node.limits.find_s,
                backup=backup,
            )
            if got.digest != layout.digest():
                raise GroupMismatch(f"{what} is laid out otherwise; install one version everywhere")
            check_memory(what, got.fd, layout.total_bytes)
        except ElasticEPError as error:
            if got is not None:
                os.close(got.fd)
            self._node.log.warning("weights.arena_not_mapped", what=what, why=str(error))
            return None
        return got

    def drop(self, gone: Callable[[int, int], bool]) -> None:
        """Let go of the arenas of peers that are dead."""
        for key in [key for key in self._peers if gone(*key)]:
            number, _ = self._peers.pop(key)
            self._node.mover.take_back(number)

    def keep_only(self, nodes: Collection[str]) -> None:
        """Let go of the backups of other nodes."""
        for key in [key for key in self._pieces if key[0] not in nodes]:
            self._node.mover.take_back(self._pieces.pop(key))

    async def close(self) -> None:
        """Close channels."""
        self.drop(lambda *_: True)
        self.keep_only(())
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()


def _rotated(replicas: Iterable[Replica], by: int) -> list[Replica]:
    """In an order that differs from expert to expert, so that no replica serves them all."""
    order = sorted(replicas, key=lambda replica: replica.rank)
    if not order:
        return order
    by %= len(order)
    return order[by:] + order[:by]
