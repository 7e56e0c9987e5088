"""What other daemons may ask: which experts lie here, and the bytes of one."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

import numpy as np

from elasticep.errors import Busy, ConfigError, Unavailable, UnknownGroup, UsageError
from elasticep.proto import node_pb2
from elasticep.runtime.group import Registry
from elasticep.runtime.weights.finder import MAX_REFS
from elasticep.runtime.weights.group import GroupWeights
from elasticep.runtime.weights.lookup import look_up
from elasticep.runtime.weights.memory import NOTHING, ArenaMemory
from elasticep.runtime.weights.sources import CHUNK_BYTES

MAX_READS: Final = 8
CHUNK_READ_S: Final = 5.0
"""A reader that takes nothing for this long has stopped."""

_LEAST_READ_BYTES_PER_S: Final = 64 * 1024
_BREATH: Final = 256  # experts looked up before others get their turn


class WeightsService:
    """Answers for the groups of a node.

    Args:
        node: this node's name.
        registry: its groups.
    """

    def __init__(self, node: str, registry: Registry) -> None:
        self._node = node
        self._registry = registry
        self._reads = 0

    def _weights(self, name: str) -> GroupWeights:
        group = self._registry.groups.get(name)
        if group is None or group.weights is None:
            raise UnknownGroup(f"node {self._node!r} keeps no weights of group {name!r}")
        return group.weights

    async def find(self, request: node_pb2.FindExpertsRequest) -> node_pb2.FindExpertsResponse:
        """Which of the experts lie here.

        Raises:
            UnknownGroup, ConfigError: a request that cannot be answered.
        """
        weights = self._weights(request.group)
        if len(request.layers) != len(request.experts) or len(request.layers) > MAX_REFS:
            raise ConfigError(
                f"{len(request.layers)} layers and {len(request.experts)} experts; they go in "
                f"pairs, at most {MAX_REFS}"
            )
        layers = np.array(request.layers, np.int64)
        experts = np.array(request.experts, np.int64)
        odd = np.flatnonzero((layers >= weights.layout.layers) | (experts >= weights.experts))
        if odd.size:
            layer, expert = layers[odd[0]], experts[odd[0]]
            raise ConfigError(f"group {request.group!r} has no layer {layer} expert {expert}")
        here = look_up(weights, layers, experts)
        answer = node_pb2.FindExpertsResponse()
        for index, ref in enumerate(zip(request.layers, request.experts, strict=True)):
            if index % _BREATH == _BREATH - 1:
                await asyncio.sleep(0)
            checksum = weights.ledger.get(*ref)
            replicas, kept = here.replicas_of(index), here.backup_of(index)
            if not checksum and not replicas and kept is None:
                continue
            found = answer.found.add(index=index, checksum=checksum)
            for rank, incarnation, slot in replicas:
                found.replicas.add(rank=rank, incarnation=incarnation, slot=slot)
            if kept is not None and not kept[1].closed:
                found.backup, found.backup_piece, found.backup_slot = True, kept[0], kept[2]
                found.backup_slots = kept[1].layout.slots
                found.backup_memory = kept[1].number
        return answer

    def read_s(self, name: str) -> float:
        """How long sending one expert of a group may take; a reader that is slower is left. Far
        more than a reader who keeps to a rate takes.
        """
        return CHUNK_READ_S + self._weights(name).unit_bytes / _LEAST_READ_BYTES_PER_S

    async def read(
        self, request: node_pb2.ReadExpertRequest
    ) -> AsyncGenerator[node_pb2.ReadExpertChunk, None]:
        """One expert in chunks; its label is looked at before and after.

        Raises:
            UnknownGroup, UsageError: it does not lie here, or its rank is over.
            Busy: as many are read already as may be.
            Unavailable: the slot was filled anew.
        """
        weights = self._weights(request.group)
        memory, slot = self._place(weights, request)
        if self._reads >= MAX_READS:
            raise Busy(f"node {self._node!r} sends {MAX_READS} experts already; try again")
        self._reads += 1
        try:
            label = memory.arena.require(request.layer, slot, request.expert)
            total = weights.unit_bytes
            for at in range(0, total, CHUNK_BYTES):
                if memory.closed:
                    raise Unavailable(f"the arena of {memory.name} was let go of")
                size = min(CHUNK_BYTES, total - at)
                data = b"".join(memory.arena.pieces(request.layer, slot, at, size))
                yield node_pb2.ReadExpertChunk(data=data, checksum=b"" if at else label.checksum)
            if memory.closed or memory.arena.label(request.layer, slot) != label:
                raise Unavailable(f"slot {slot} of {memory.name} was filled anew meanwhile")
        finally:
            self._reads -= 1

    def _place(
        self, weights: GroupWeights, request: node_pb2.ReadExpertRequest
    ) -> tuple[ArenaMemory, int]:
        layer, expert = request.layer, request.expert
        what = f"layer {layer} expert {expert}"
        if layer >= weights.layout.layers or expert >= weights.experts:
            raise ConfigError(f"group {request.group!r} has no {what}")
        if request.backup:
            held = weights.backup.find(layer, expert)
            if held is None:
                raise UsageError(f"node {self._node!r} has no backup of {what}")
            return held
        for rank, incarnation, memory in weights.live():
            if (rank, incarnation) == (request.rank, request.incarnation):
                slot = memory.slot_of(layer, expert)
                if slot != NOTHING:
                    return memory, slot
        raise UsageError(
            f"rank {request.rank} incarnation {request.incarnation} on node {self._node!r} does "
            f"not hold {what}"
        )
