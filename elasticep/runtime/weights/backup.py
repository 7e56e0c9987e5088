"""This node's part of a group's backup: experts in host memory, for when no rank has them left.

It is filled in the background after a view was adopted, one expert at a time, and gives way to the
filling of views. Memory comes in pieces as it is needed, up to `backup_bytes`, and is kept over
restarts of the daemon like the arenas. What is not this node's to keep any more stays until its
place is needed and another node has it, too.
"""

import asyncio
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from elasticep.errors import ElasticEPError
from elasticep.runtime.node import Node
from elasticep.runtime.weights.backups import holders, live_nodes, share
from elasticep.runtime.weights.ledger import Ref
from elasticep.runtime.weights.memory import NOTHING, ArenaMemory, Target
from elasticep.runtime.weights.supply import End, Wish
from elasticep.runtime.weights.views import ViewTable
from elasticep.weights import ArenaLayout

if TYPE_CHECKING:
    from elasticep.runtime.weights.group import GroupWeights

_SETTLE_S: Final = 0.05  # several ranks of a node adopt a view at about the same time
_GIVE_WAY_S: Final = 0.01
_RETRY_S: Final = 2.0
_FIND: Final = 256  # experts looked for at a time


class Backup:
    """Of one group on one node.

    Args:
        node: the daemon's shared parts; `backup_bytes` of its config is the bound.
        weights: this node's arenas of the group.

    Attributes:
        segments: the memory, as arenas of the same layers and fewer slots.
        wanted: (layer, expert) pairs that this node is to keep.
    """

    def __init__(self, node: Node, weights: "GroupWeights") -> None:
        self._node = node
        self._weights = weights
        self._log = node.log.bind(group=weights.name)
        self._task: asyncio.Task[None] | None = None
        self._epoch = 0
        self.segments: list[ArenaMemory] = []
        self.wanted: set[Ref] = set()
        self._mask = np.zeros((weights.layout.layers, weights.experts), np.bool_)  # the same

    # ---- questions

    def find(self, layer: int, expert: int) -> tuple[ArenaMemory, int] | None:
        """Where an expert lies here, if it does."""
        for memory in self.segments:
            slot = memory.slot_of(layer, expert)
            if slot != NOTHING:
                return memory, slot
        return None

    def piece_of(self, memory: ArenaMemory) -> int:
        """The number of a piece of memory."""
        return self.segments.index(memory)

    @property
    def held(self) -> int:
        """Wanted experts that lie here, whole."""
        return int(np.count_nonzero(self._present() & self._mask))

    def _present(self) -> NDArray[np.bool_]:
        """What lies here: bool [layers, experts]."""
        there = np.zeros_like(self._mask)
        for memory in self.segments:
            there |= memory.present(self._weights.experts)
        return there

    # ---- filling

    def update(self, view: ViewTable) -> None:
        """A view is in force: keep what is this node's to keep now."""
        config = self._node.config
        if not config.backup_bytes or config.node not in set(view.node_of.values()):
            return
        if view.epoch == self._epoch and self._task is not None and not self._task.done():
            return
        self._epoch = view.epoch
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.create_task(self._run(view))

    async def _run(self, view: ViewTable) -> None:
        await asyncio.sleep(_SETTLE_S)
        again = False
        while not await self._once(view, again=again):
            again = True
            await asyncio.sleep(_RETRY_S)

    async def _once(self, view: ViewTable, *, again: bool) -> bool:
        """Fill what is missing; False when it has to be tried again."""
        try:
            wanted = await self._assign(view)
            await self._reserve(wanted)
            there = self._present().tolist()
            left = [(layer, expert) for layer, expert in wanted if not there[layer][expert]]
            missing = await self._fill(left, again=again)
        except ElasticEPError as error:
            self._log.error("backup.failed", epoch=view.epoch, error=str(error))
            return False
        except Exception:  # what runs in the background does not end silently
            self._log.exception("backup.failed", epoch=view.epoch)
            return False
        self._count()
        if missing:
            self._log.warning("backup.incomplete", epoch=view.epoch, missing=missing)
            return False
        self._log.info("backup.complete", epoch=view.epoch, experts=len(wanted))
        return True

    async def _assign(self, view: ViewTable) -> list[Ref]:
        mine, chosen = await asyncio.to_thread(self._share, view)
        short = int(mine.sum()) - len(chosen)
        if short:
            self._log.warning(
                "backup.short",
                experts=short,
                backup_bytes=self._node.config.backup_bytes,
                needed_bytes=int(mine.sum()) * self._weights.unit_bytes,
            )
        self.wanted = set(chosen)
        self._mask[:] = False
        if chosen:
            self._mask[tuple(np.array(chosen).T)] = True
        self._count()
        return chosen

    def _share(self, view: ViewTable) -> tuple[NDArray[np.bool_], list[Ref]]:
        """What this node is to hold, and what of it there is room for. In a thread: large groups
        take some ten milliseconds.
        """
        experts = self._weights.experts
        nodes = sorted(set(view.node_of.values()))
        holder = holders(nodes, view.slots, view.node_of, experts)
        mine = holder == nodes.index(self._node.config.node)
        single = live_nodes(view.slots, view.node_of, experts) <= 1
        return mine, share(mine, single, self._most_slots())

    def _most_slots(self) -> int:
        """Slots per layer that `backup_bytes` allow."""
        limit = self._node.config.backup_bytes
        low, high = 0, self._weights.experts
        while low < high:
            middle = (low + high + 1) // 2
            if self._layout(middle).total_bytes <= limit:
                low = middle
            else:
                high = middle - 1
        return low

    def _layout(self, slots: int) -> ArenaLayout:
        layout = self._weights.layout
        return ArenaLayout(layout.layers, slots, layout.spec)

    async def _reserve(self, wanted: list[Ref]) -> None:
        if not wanted:
            return
        layers = np.bincount([layer for layer, _ in wanted], minlength=1)
        have = sum(memory.layout.slots for memory in self.segments)
        more = min(int(layers.max()), self._most_slots()) - have
        if more > 0:
            name = f"backup {len(self.segments)} of group {self._weights.name!r}"
            memory = await self._weights.reserve(self._layout(more), 0, name)
            self.add(memory)
            self._node.fd_store.put_one(self._name(len(self.segments) - 1, more), memory.fd)

    def _name(self, index: int, slots: int) -> str:
        return f"backup-{index}-{slots}-{self._weights.name}"

    def add(self, memory: ArenaMemory) -> None:
        """Another piece of memory."""
        self.segments.append(memory)
        self._weights.lend(memory)

    def restore(self) -> None:
        """Take over what the last daemon's service manager kept."""
        store = self._node.fd_store
        for name in store.names("backup-", f"-{self._weights.name}"):
            index, slots, *_ = name.removeprefix("backup-").split("-", 2)
            fd = store.take_one(name)
            if fd is None or name != f"backup-{index}-{slots}-{self._weights.name}":
                continue
            try:
                memory = ArenaMemory(fd, self._layout(int(slots)), name)
            except ElasticEPError as error:
                self._log.warning("memory.not_restored", error=str(error))
                continue
            self._weights.read_labels(memory)
            self.add(memory)

    async def _fill(self, left: list[Ref], *, again: bool) -> int:
        """Try to get each of them once; how many were not to be had."""
        failed = 0
        for at in range(0, len(left), _FIND):
            part = left[at : at + _FIND]
            places = await self._weights.finder.find(part)
            spare = await self._spare({layer for layer, _ in part}, again=again)
            for ref, place in places.items():
                while self._weights.filler.busy:
                    await asyncio.sleep(_GIVE_WAY_S)
                free = self._free(ref[0], spare)
                if free is None:
                    failed += 1
                    continue
                target = Target(free[0], ref[0], free[1], ref[1])
                outcome = await self._weights.filler.supply.put(target, place, Wish(urgent=False))
                failed += outcome.end is not End.PLACED
            self._count()
        return failed

    async def _spare(self, layers: set[int], *, again: bool) -> set[Ref]:
        """What lies here in these layers, is not this node's to keep any more, and may go because
        another node has it: in its backup, or on a live rank. Nodes may wait for each other's
        place; so the second time a live rank of this node will do.
        """
        surplus = self._present() & ~self._mask
        for layer in range(len(surplus)):
            full = all((memory.held[layer] != NOTHING).all() for memory in self.segments)
            surplus[layer] &= full and layer in layers
        refs = [(int(layer), int(expert)) for layer, expert in np.argwhere(surplus)]
        own = self._node.config.node
        return {
            ref
            for ref, place in (await self._weights.finder.find(refs)).items()
            if any(kept.node != own for kept in place.backups)
            or any(again or replica.node != own for replica in place.replicas)
        }

    def _free(self, layer: int, spare: set[Ref]) -> tuple[ArenaMemory, int] | None:
        """A slot of the layer that holds nothing, or else what may go."""
        choice = None
        for memory in self.segments:
            for slot, expert in enumerate(memory.held[layer].tolist()):
                if expert == NOTHING:
                    return memory, slot
                if (layer, expert) in spare and not self._mask[layer, expert]:
                    choice = choice or (memory, slot)
        return choice

    def _count(self) -> None:
        gauge = self._weights.metrics.backup
        gauge.labels(self._weights.name, "wanted").set(len(self.wanted))
        gauge.labels(self._weights.name, "held").set(self.held)

    def drop(self) -> None:
        """Let the memory be freed: the group is no more."""
        for index, memory in enumerate(self.segments):
            self._node.fd_store.remove_one(self._name(index, memory.layout.slots))
        self.close()

    def close(self) -> None:
        """Stop, and let go."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        for memory in self.segments:
            self._node.mover.give_up(memory)
            memory.close()
        self.segments.clear()
