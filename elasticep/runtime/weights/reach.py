"""From where an expert can be copied, in which order: memory of this host that can be mapped first,
then what other daemons send, then disk.
"""

import asyncio
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from elasticep.errors import ElasticEPError, GroupMismatch
from elasticep.handover import ArenaFd, fetch_arena
from elasticep.runtime.node import Node
from elasticep.runtime.regions.memory import check_memory, identity_of
from elasticep.runtime.regions.peers import Endpoint
from elasticep.runtime.weights.finder import Kept, Place, Replica
from elasticep.runtime.weights.ledger import Ref
from elasticep.runtime.weights.messages import Kind, Source
from elasticep.weights import ArenaLayout

if TYPE_CHECKING:
    from elasticep.runtime.weights.group import GroupWeights


class Reach:
    """One group's.

    Args:
        node: the daemon's shared parts.
        weights: this node's arenas of the group.
    """

    def __init__(self, node: Node, weights: "GroupWeights") -> None:
        self._node = node
        self._weights = weights
        self._fetching = asyncio.Lock()
        self._peers: dict[tuple[int, int], tuple[int, str]] = {}  # (rank, inc) -> arena, node
        self._pieces: dict[tuple[str, int], int] = {}  # (node, memory) -> arena

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
        key = (kept.node, kept.memory)
        async with self._fetching:
            if key not in self._pieces:
                whole = self._weights.layout
                layout = ArenaLayout(whole.layers, kept.slots, whole.spec)
                got = await self._fetch(endpoint, kept.piece, layout, backup=True)
                if got is None:
                    return -1
                if identity_of(got.fd)[1] != kept.memory:  # another one has its number now
                    os.close(got.fd)
                    return -1
                self._pieces[key] = self._node.mover.lend_peer(got.fd, layout)
            return self._pieces[key]

    def streamed(self, source: Source) -> Source | None:
        """What was mapped of another node is not what it has now: let go of it, and have it sent
        instead; None if it was not mapped.
        """
        if source.arena < 0 or source.node in ("", self._node.config.node):
            return None
        self._peers = {k: known for k, known in self._peers.items() if known[0] != source.arena}
        self._pieces = {k: arena for k, arena in self._pieces.items() if arena != source.arena}
        self._node.mover.take_back(source.arena)
        endpoint = self._weights.endpoints.get(source.node)
        if endpoint is None:
            return None
        kind = Kind.BACKUP if source.kind is Kind.BACKUP else Kind.REMOTE
        return replace(source, kind=kind, arena=-1, slot=-1, address=endpoint.grpc_address)

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


def _rotated(replicas: Iterable[Replica], by: int) -> list[Replica]:
    """In an order that differs from expert to expert, so that no replica serves them all."""
    order = sorted(replicas, key=lambda replica: replica.rank)
    if not order:
        return order
    by %= len(order)
    return order[by:] + order[:by]
