"""Memory of a group's other ranks in this domain, fetched from their daemons and kept."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from elasticep.errors import GroupMismatch, Unavailable
from elasticep.native.region import Layout
from elasticep.native.watcher import Watcher
from elasticep.runtime.descriptors import PER_PEER, require
from elasticep.runtime.regions.fetch import fetch_region
from elasticep.runtime.regions.memory import SeatMemory


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How to reach a node's daemon; the fields of `NodeEndpoint`."""

    node: str
    domain: str
    grpc_address: str
    fd_socket: str


@dataclass(slots=True)
class _Kept:
    memory: SeatMemory
    incarnation: int
    node: str


class PeerRegions:
    """One group's cache. A rank's memory can be another one under a new incarnation only, so that
    is when it is asked for again.

    Args:
        group: the group's name.
        domain: this node's.
        layout: what the memory must be.
        watcher: takes the headers, so that deaths of this node's ranks reach them at once.
        group_key: the group's number there.
        fetch_s: deadline of one fetch.
    """

    def __init__(
        self,
        group: str,
        domain: str,
        layout: Layout,
        watcher: Watcher,
        group_key: int,
        fetch_s: float,
    ) -> None:
        self._group = group
        self._domain = domain
        self._layout = layout
        self._watcher = watcher
        self._group_key = group_key
        self._fetch_s = fetch_s
        self._kept: dict[int, _Kept] = {}
        self._locks: dict[int, asyncio.Lock] = {}

    async def get(self, rank: int, incarnation: int, endpoint: Endpoint) -> SeatMemory:
        """The memory of a rank under this incarnation.

        Raises:
            Unavailable: its daemon did not hand it over in time, or is in another domain.
            GroupMismatch: what it handed over does not fit this group.
            DescriptorsShort: this process has too few left for it.
        """
        async with self._locks.setdefault(rank, asyncio.Lock()):
            kept = self._kept.get(rank)
            if kept and (kept.incarnation, kept.node) == (incarnation, endpoint.node):
                return kept.memory
            if endpoint.domain != self._domain:
                raise Unavailable(
                    f"rank {rank} is on node {endpoint.node!r} in domain {endpoint.domain!r} and "
                    f"this node is in {self._domain!r}; no transport between domains is configured"
                )
            require(PER_PEER, f"the memory of rank {rank} of group {self._group!r}")
            header_fd, data_fd, digest = await fetch_region(
                endpoint.fd_socket, endpoint.node, self._group, rank, self._fetch_s
            )
            memory = SeatMemory.adopt(header_fd, data_fd, rank, self._layout)
            if digest != self._layout.digest:
                memory.close()
                raise GroupMismatch(
                    f"node {endpoint.node!r} has layout digest {digest:#018x} for group "
                    f"{self._group!r}, this node {self._layout.digest:#018x}; install one version "
                    "everywhere"
                )
            return self._keep(rank, incarnation, endpoint.node, memory)

    def _keep(self, rank: int, incarnation: int, node: str, memory: SeatMemory) -> SeatMemory:
        kept = self._kept.get(rank)
        if kept is not None and kept.memory.identity == memory.identity:
            memory.close()
            self._kept[rank] = _Kept(kept.memory, incarnation, node)
            return kept.memory
        self.drop((rank,))
        self._watcher.peer_add(self._group_key, memory.header)
        self._kept[rank] = _Kept(memory, incarnation, node)
        return memory

    def mark_dead(self, rank: int, incarnation: int) -> None:
        """Set the dead word of a rank in every header kept here."""
        for kept in self._kept.values():
            kept.memory.header.mark_dead(rank, incarnation)

    def keep_only(self, ranks: Iterable[int]) -> None:
        """Let go of all others, so that their daemons' memory can be freed."""
        self.drop(set(self._kept) - set(ranks))

    def drop(self, ranks: Iterable[int]) -> None:
        """Let go of these, if they are here."""
        for rank in list(ranks):
            kept = self._kept.pop(rank, None)
            if kept is not None:
                self._watcher.peer_remove(self._group_key, kept.memory.header)
                kept.memory.close()

    def close(self) -> None:
        """Let go of everything."""
        self.drop(list(self._kept))

    def __len__(self) -> int:
        return len(self._kept)
