"""One group on one node: sizes, seats, peers' memory, and who its members are."""

import asyncio
import dataclasses
from collections.abc import Callable, Iterable

from elasticep.device import Device
from elasticep.errors import ElasticEPError
from elasticep.group import GroupConfig
from elasticep.native.convert import geometry_struct, timeouts_struct
from elasticep.native.region import layout
from elasticep.proto import controller_pb2, types_pb2
from elasticep.runtime import descriptors, seats
from elasticep.runtime.keeper import SeatKeeper
from elasticep.runtime.node import Node
from elasticep.runtime.regions.keep import KeptGroup
from elasticep.runtime.regions.memory import SeatMemory
from elasticep.runtime.regions.peers import Endpoint, PeerRegions
from elasticep.runtime.stager import Stager
from elasticep.runtime.weights.group import GroupWeights

_SEAT_KEYS = 1 << 16  # ranks fit below


class Group:
    """A group that this node has seats of.

    Args:
        node: the daemon's shared parts.
        config: the group's config, as the controller granted it.
        ranks: this node's seats.
        key: the group's number, unique on this node.

    Attributes:
        keepers: rank -> its keeper.
        peers: memory of the other members in this domain.
        stager: carries proposed views to the runners.
        members: rank -> (incarnation, node) in the newest proposed view.
        nodes: node -> its daemon.
        weights: expert weights; None when engines keep their own.
        on_gpu: whether the data regions are GPU memory.
        leaving: whether it was deleted: it stays while something of it runs.
        grants: rank -> grant of a group that was created anew under the name, until then.

    Raises:
        ConfigError: the native core cannot do this geometry.
    """

    def __init__(self, node: Node, config: GroupConfig, ranks: Iterable[int], key: int) -> None:
        self.node = node
        self.config = config
        self.name = config.name
        self.key = key
        self.geometry = geometry_struct(config)
        self.layout = layout(self.geometry)
        self.on_gpu = config.device is Device.CUDA
        if self.on_gpu:
            self.layout = dataclasses.replace(self.layout, data_bytes=0)
        self.keepers: dict[int, SeatKeeper] = {
            rank: SeatKeeper(node, self, rank, key * _SEAT_KEYS + rank)
            for rank in ranks
            if rank < config.geometry.max_ranks
        }
        self.peers = PeerRegions(
            self.name,
            node.config.domain,
            self.layout,
            node.watcher,
            key,
            node.limits.fetch_s,
        )
        self.members: dict[int, tuple[int, str]] = {}
        self.nodes: dict[str, Endpoint] = {}
        self._policies = controller_pb2.GroupPolicies()
        self.stager = Stager(node, self)
        arena = config.arena_layout()
        self.weights = None if arena is None else GroupWeights(node, self, arena)
        self.leaving = False
        self.grants: dict[int, controller_pb2.SeatGrant] = {}
        self._gone: Callable[[Group], None] | None = None

    def create_memory(self, rank: int) -> SeatMemory:
        """Reserve a seat's memory.

        Raises:
            MemoryShort: names the bytes asked for and available.
            DescriptorsShort: this process has too few left for another seat.
        """
        descriptors.require(descriptors.PER_SEAT, f"a seat of group {self.name!r}")
        timeouts = timeouts_struct(self.config.timeouts)
        memory = SeatMemory.create(self.name, rank, self.geometry, self.layout, timeouts)
        self.node.log.info(
            "memory.reserved",
            group=self.name,
            rank=rank,
            header_bytes=self.layout.header_bytes,
            data_bytes=self.layout.data_bytes,
        )
        self._tell(memory)
        return memory

    def memory_on_device(self, rank: int, data_fd: int) -> SeatMemory:
        """A seat's memory around data that an allocator made; the descriptor is taken over.

        Raises:
            MemoryShort: no room for the header.
        """
        timeouts = timeouts_struct(self.config.timeouts)
        memory = SeatMemory.around(data_fd, self.name, rank, self.geometry, self.layout, timeouts)
        self.node.log.info("memory.taken", group=self.name, rank=rank, device=self.device_of(rank))
        self._tell(memory)
        return memory

    def device_of(self, rank: int) -> int:
        """The CUDA device of a seat: the seats of a group take this node's devices in turn."""
        place = sorted(self.keepers).index(rank)
        devices = self.node.config.devices
        return devices[place % len(devices)] if devices else place

    def ranks_on_device(self, rank: int) -> int:
        """Seats of this node whose kernels share the GPU of `rank`; 0 without GPUs."""
        if not self.on_gpu:
            return 0
        device = self.device_of(rank)
        return sum(self.device_of(other) == device for other in self.keepers)

    def set_policies(self, policies: controller_pb2.GroupPolicies) -> None:
        """What holds now; runners follow at once."""
        self._policies = policies
        for keeper in self.keepers.values():
            if keeper.memory is not None:
                self._tell(keeper.memory)

    def _tell(self, memory: SeatMemory) -> None:
        policies = self._policies
        if policies.HasField("lost_experts"):  # else the config's, which is in the header
            serve = policies.lost_experts == types_pb2.LOST_EXPERTS_POLICY_SERVE
            memory.header.set_policy(serve=serve, renormalise=policies.renormalise)

    def mark_dead(self, rank: int, incarnation: int) -> None:
        """Set the dead word of an incarnation in every header that this node knows."""
        for keeper in self.keepers.values():
            if keeper.memory is not None:
                keeper.memory.header.mark_dead(rank, incarnation)
        self.peers.mark_dead(rank, incarnation)
        if self.weights is not None:
            self.weights.mark_dead(rank, incarnation)

    def drop_memory(self) -> None:
        """Let all memory be freed: this node needs it no more."""
        for keeper in self.keepers.values():
            keeper.drop_memory()
        if self.weights is not None:
            self.weights.drop()

    def kept(self) -> KeptGroup:
        """What the next daemon has to know of this group."""
        return KeptGroup(
            config=self.config,
            seats=tuple(keeper.kept() for keeper in self.keepers.values()),
            members=dict(self.members),
            nodes=tuple(self.nodes.values()),
            weights={} if self.weights is None else self.weights.kept(),
        )

    def leave(self, below: int, epoch: int, why: str, gone: "Callable[[Group], None]") -> None:
        """It was deleted: end what runs of it.

        Args:
            below: incarnations that are over; a later one was granted since, and stays.
            epoch: for engines, from which on they are no members.
            why: for engines and logs.
            gone: called when nothing runs any more.
        """
        old = [keeper for keeper in self.keepers.values() if keeper.seat.incarnation < below]
        if len(old) == len(self.keepers):
            self.leaving, self._gone = True, gone
        for keeper in old:
            keeper.apply(seats.Ended(keeper.seat.incarnation, why, epoch))
        self.look()

    def look(self) -> None:
        """A seat has changed; a group that was deleted may be let go of."""
        if self._gone is not None and self.idle:
            # Not in the middle of what the last seat is about.
            asyncio.get_running_loop().call_soon(self._gone, self)
            self._gone = None

    @property
    def idle(self) -> bool:
        """Whether no seat of it has a process."""
        return all(keeper.seat.state.value == "empty" for keeper in self.keepers.values())

    def close(self) -> None:
        """Let go of everything; processes are not touched."""
        self.stager.close()
        if self.weights is not None:
            self.weights.close()
        for keeper in self.keepers.values():
            keeper.close()
        self.peers.close()


class Registry:
    """The groups of a node, by name.

    Args:
        node: the daemon's shared parts; its config says which seats it offers.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._next_key = 1
        self.offered: dict[str, tuple[int, ...]] = {
            seats.group: seats.ranks for seats in node.config.seats
        }
        self.groups: dict[str, Group] = {}

    def ensure(self, config: GroupConfig) -> Group:
        """The group with this config, made if there is none.

        Raises:
            GroupMismatch: it exists with another config and still has processes.
            ConfigError: it cannot be made.
        """
        group = self.groups.get(config.name)
        if group is not None:
            try:
                group.config.require_same(config)
            except ElasticEPError:
                if not group.idle:
                    raise
                # The group is another one now: nothing of the old one is in use.
                self.remove(group.name)
            else:
                return group
        group = Group(self._node, config, self.offered.get(config.name, ()), self._next_key)
        self._next_key += 1
        self.groups[config.name] = group
        return group

    def remove(self, name: str) -> None:
        """Forget a group and let its memory be freed."""
        group = self.groups.pop(name, None)
        if group is not None:
            group.drop_memory()
            group.close()
            self._node.metrics.forget(name)

    def present(self, name: str) -> Group | None:
        """A group that is known here and was not deleted."""
        group = self.groups.get(name)
        return None if group is None or group.leaving else group

    def keeper(self, group: str, rank: int) -> SeatKeeper | None:
        """A seat's keeper, if its group is known here and the seat is this node's."""
        known = self.groups.get(group)
        return None if known is None else known.keepers.get(rank)

    def keepers(self) -> list[SeatKeeper]:
        """Every seat of every known group."""
        return [keeper for group in self.groups.values() for keeper in group.keepers.values()]

    def close(self) -> None:
        """Let go of everything; processes are not touched."""
        for group in self.groups.values():
            group.close()
        self.groups.clear()
