"""The expert weights of one group on one node: arenas, backup, what is known of them, who asks."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

from elasticep.errors import ElasticEPError, Unavailable
from elasticep.proto import node_pb2, types_pb2
from elasticep.runtime.node import Node
from elasticep.runtime.regions.peers import Endpoint
from elasticep.runtime.seats import Half
from elasticep.runtime.weights.backup import Backup
from elasticep.runtime.weights.fill import Filler
from elasticep.runtime.weights.finder import Finder
from elasticep.runtime.weights.ledger import Ledger
from elasticep.runtime.weights.memory import ArenaMemory
from elasticep.runtime.weights.reach import Reach
from elasticep.runtime.weights.seat import SeatWeights
from elasticep.runtime.weights.views import ViewBook, ViewTable
from elasticep.weights import ArenaLayout

if TYPE_CHECKING:
    from elasticep.runtime.group import Group
    from elasticep.runtime.keeper import SeatKeeper

_MOST_ENDPOINTS = 1024


class GroupWeights:
    """Made for a group whose config has weights.

    Args:
        node: the daemon's shared parts.
        group: the group.
        layout: of a seat's arena.

    Attributes:
        seats: rank -> its arena.
        views: slot tables of the last views.
        ledger: what experts must sum up to.
        endpoints: node -> daemon, of every node that was ever a member's.
    """

    def __init__(self, node: Node, group: "Group", layout: ArenaLayout) -> None:
        self._node = node
        self._group = group
        self.name = group.name
        self.layout = layout
        self.unit_bytes = layout.spec.unit_bytes
        self.experts = group.config.geometry.experts
        self.checkpoint = node.config.checkpoint_of(group.name)
        self.metrics = node.mover.metrics
        self.views = ViewBook()
        self.ledger = Ledger()
        self.endpoints: dict[str, Endpoint] = {}
        self.seats = {
            rank: SeatWeights(keeper, self.views, on_gpu=group.on_gpu)
            for rank, keeper in group.keepers.items()
        }
        self._dead: dict[int, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._compared = 0
        self.finder = Finder(node, self)
        self.reach = Reach(node, self)
        self.filler = Filler(node, self)
        self.backup = Backup(node, self)

    @property
    def max_ranks(self) -> int:
        """Of the group."""
        return self._group.config.geometry.max_ranks

    @property
    def nodes(self) -> set[str]:
        """Those of the latest view."""
        views = self.views.all()
        return set(views[-1].node_of.values()) if views else set()

    @property
    def _shape(self) -> tuple[int, int, int]:
        geometry = self._group.config.geometry
        return geometry.layers, geometry.max_ranks, geometry.slots_per_rank

    # ---- seats

    def open(self, keeper: "SeatKeeper") -> None:
        """A new incarnation has the seat; reserve its arena if it has none yet."""
        seat = self.seats[keeper.rank]
        seat.granted()
        if seat.memory is None and (seat.opening is None or seat.opening.done()):
            seat.opening = asyncio.create_task(self._open(seat))

    async def _open(self, seat: SeatWeights) -> None:
        keeper = seat.keeper
        try:
            name = f"rank {seat.rank} of group {self.name!r}"
            memory = await self.reserve(self.layout, seat.rank, name)
        except (ElasticEPError, OSError) as error:
            keeper.apply(keeper.start_failed(error))
            return
        finally:
            seat.opening = None
            seat.changed.notify()
        self._take(seat, memory)
        self._node.fd_store.put_one(_arena_name(self.name, seat.rank), memory.fd)
        keeper.changed.notify()

    async def reserve(self, layout: ArenaLayout, rank: int, name: str) -> ArenaMemory:
        """Memory for an arena, every page of it; one at a time, so that what is counted as free
        is free.

        Raises:
            MemoryShort: names the bytes asked for and available.
        """
        async with self._node.reserving:
            making = asyncio.create_task(asyncio.to_thread(ArenaMemory.create, layout, rank, name))
            try:
                memory = await asyncio.shield(making)
            except asyncio.CancelledError:
                making.add_done_callback(_close_made)
                raise
        self._node.log.info(
            "memory.reserved", group=self.name, arena=name, arena_bytes=layout.total_bytes
        )
        return memory

    def _take(self, seat: SeatWeights, memory: ArenaMemory) -> None:
        seat.memory = memory
        self.lend(memory)
        seat.changed.notify()

    def lend(self, memory: ArenaMemory) -> None:
        """Hand an arena to the mover."""
        self._node.mover.lend(memory, lambda: self._used(memory))

    def _used(self, memory: ArenaMemory) -> None:
        """No earlier mover writes into an arena any more: its labels count now."""
        if not memory.settled:
            self._later(self._settle(memory))

    async def _settle(self, memory: ArenaMemory) -> None:
        for layer in range(memory.layout.layers):
            await asyncio.sleep(0)  # others get their turn
            if memory.closed:
                return
            memory.read_layer(layer, self._node.mover.places(memory))
        self._learn_sums(memory)
        memory.settled = True
        for seat in self.seats.values():
            seat.changed.notify()

    def opened(self, rank: int) -> bool:
        """Whether an engine that attaches finds its arena."""
        seat = self.seats[rank]
        return seat.memory is not None or seat.lost

    def memory_of(self, rank: int) -> ArenaMemory | None:
        """The arena of a seat of this node."""
        seat = self.seats.get(rank)
        return None if seat is None else seat.memory

    def live(self) -> Iterator[tuple[int, int, ArenaMemory]]:
        """(rank, incarnation, arena) of seats that may be copied from: those that run or have
        staged a view. What an incarnation that is over left in an arena is not copied before the
        next one serves from it.
        """
        for rank, seat in self.seats.items():
            keeper = seat.keeper
            serves = bool(seat.pinned or seat.running)
            if seat.memory is not None and keeper.seat.live and serves:
                yield rank, keeper.seat.incarnation, seat.memory

    def mark_dead(self, rank: int, incarnation: int) -> None:
        """Nothing is copied from this incarnation any more."""
        if incarnation > self._dead.get(rank, 0):
            self._dead[rank] = incarnation
            self._node.mover.cancel_from(
                lambda source: (
                    source.rank >= 0
                    and source.group == self.name
                    and self.is_dead(source.rank, source.incarnation)
                )
            )
            self.reach.drop(self.is_dead)
            own = self.seats.get(rank)
            if own is not None and own.keeper.seat.incarnation <= incarnation:
                own.copies_ended()

    def is_dead(self, rank: int, incarnation: int) -> bool:
        """Whether an incarnation is known to be over."""
        return incarnation <= self._dead.get(rank, 0)

    # ---- views

    def learn(self, view: types_pb2.View, endpoints: dict[str, Endpoint]) -> None:
        """A view was proposed.

        Raises:
            ConfigError: its tables are not this group's.
        """
        running = [seat.running for seat in self.seats.values() if seat.running]
        self.views.add(
            ViewTable.read(view, self._shape, self.experts), min(running, default=view.epoch)
        )
        self.endpoints.update(endpoints)
        self.reach.keep_only({member.node for member in view.members})
        while len(self.endpoints) > _MOST_ENDPOINTS:
            del self.endpoints[next(iter(self.endpoints))]

    async def ready(self, rank: int, epoch: int, wanted: Callable[[], bool]) -> None:
        """Return when the rank holds what a view gives it; see `Filler.ready`."""
        view = self.views.get(epoch)
        if view is None:
            raise Unavailable(f"view {epoch} was forgotten: too many came after it")
        await self.filler.ready(self.seats[rank], view, wanted)

    def adopted(self, epoch: int) -> None:
        """A rank of this node runs a view."""
        for seat in self.seats.values():
            seat.changed.notify()
        view = self.views.get(epoch)
        if view is None:
            return
        self.backup.update(view)
        if view.previous_epoch == 0 and self.checkpoint and epoch != self._compared:
            self._compared = epoch
            refs = {
                (layer, expert)
                for seat in self.seats.values()
                if seat.memory is not None
                for layer, _, expert, _ in seat.memory.units()
            }
            self._later(self.filler.supply.compare(refs))

    def _later(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- what is told

    def progress(self, rank: int) -> tuple[int, int, int]:
        """(epoch, bytes done, bytes in all) of what is being staged; zeros when nothing is.

        Whoever waits for its turn while the node copies for another seat, or for other nodes'
        answers, makes headway, too: a byte for each time that was seen.
        """
        seat = self.seats[rank]
        if seat.epoch and seat.memory is not None and self._node.mover.filling(seat.memory):
            seat.note_headway(self._node.mover.headway)
        return seat.staging()

    def status(self) -> Iterator[node_pb2.ArenaStatus]:
        """Every arena of the group on this node."""
        for rank, seat in self.seats.items():
            if seat.memory is not None:
                yield node_pb2.ArenaStatus(
                    group=self.name,
                    rank=rank,
                    bytes=self.layout.total_bytes,
                    slots=seat.memory.slots,
                    valid=seat.memory.valid,
                    filling=self._node.mover.filling(seat.memory),
                    staging_epoch=seat.epoch,
                    done_bytes=seat.done,
                    total_bytes=seat.total,
                    copying_epoch=seat.copying.epoch,
                    copied_bytes=seat.copying.done,
                    copying_bytes=seat.copying.total,
                )
        if self.backup.wanted or self.backup.segments:
            yield node_pb2.ArenaStatus(
                group=self.name,
                backup=True,
                bytes=sum(memory.layout.total_bytes for memory in self.backup.segments),
                slots=sum(memory.slots for memory in self.backup.segments),
                valid=sum(memory.valid for memory in self.backup.segments),
                filling=sum(self._node.mover.filling(memory) for memory in self.backup.segments),
                done_bytes=self.backup.held * self.unit_bytes,
                total_bytes=len(self.backup.wanted) * self.unit_bytes,
            )

    def count(self) -> None:
        """Bring the metrics of slots and of copies to GPUs up to date."""
        for rank, seat in self.seats.items():
            memory, copying = seat.memory, seat.copying
            if seat.on_gpu:
                for state, number in (("copied", copying.done), ("wanted", copying.total)):
                    self.metrics.gpu.labels(self.name, str(rank), state).set(number)
            if memory is None:
                continue
            filling = self._node.mover.filling(memory)
            for state, number in (
                ("valid", memory.valid),
                ("filling", filling),
                ("empty", memory.slots - memory.valid - filling),
            ):
                self.metrics.slots.labels(self.name, str(rank), state).set(number)

    # ---- over a restart

    def kept(self) -> dict[str, Any]:
        """What the next daemon has to know, as plain values."""
        return {
            "views": [view.kept for view in self.views.all()],
            "pinned": {str(rank): sorted(seat.pinned) for rank, seat in self.seats.items()},
        }

    def restore(self, plain: dict[str, Any], endpoints: dict[str, Endpoint]) -> None:
        """Take over what the last daemon knew and what memory was kept for it.

        Raises:
            ValueError: it cannot be used.
        """
        self.endpoints.update(endpoints)
        for seat in self.seats.values():
            self._restore_seat(seat)
        self.backup.restore()
        for rank, epochs in plain.get("pinned", {}).items():
            if int(rank) in self.seats:
                self.seats[int(rank)].pinned = {int(epoch) for epoch in epochs}
        for view in plain.get("views", ()):
            self.views.add(ViewTable.from_kept(view, self._shape), 0)

    def _restore_seat(self, seat: SeatWeights) -> None:
        name = _arena_name(self.name, seat.rank)
        fd = self._node.fd_store.take_one(name)
        if fd is not None:
            try:
                memory = ArenaMemory(fd, self.layout, f"rank {seat.rank} of group {self.name!r}")
            except ElasticEPError as error:
                seat.keeper.log.warning("memory.not_restored", error=str(error))
            else:
                self.read_labels(memory)
                self._take(seat, memory)
                self._node.fd_store.put_one(name, memory.fd)
                return
        state = seat.keeper.seat
        if state.live and state.engine is not Half.GONE:
            seat.lost = True  # the engine goes on with the arena that it has mapped
        elif state.live:
            seat.opening = asyncio.create_task(self._open(seat))

    def resume(self) -> None:
        """After a restart: go on with the backup of the view that runs."""
        for seat in self.seats.values():
            view = self.views.get(seat.running)
            if view is not None:
                self.backup.update(view)
                return

    def read_labels(self, memory: ArenaMemory) -> None:
        """Mirror the labels of an arena of before, and learn checksums from them: they were
        verified when they were written. They are read again when the earlier mover is surely gone.
        """
        memory.settled = False
        for layer in range(memory.layout.layers):
            memory.read_layer(layer)
        self._learn_sums(memory)

    def _learn_sums(self, memory: ArenaMemory) -> None:
        for layer, _, expert, checksum in memory.units():
            self.ledger.note(layer, expert, checksum)

    # ---- the end

    def drop(self) -> None:
        """Let all memory be freed: this node needs it no more."""
        for rank, seat in self.seats.items():
            self._node.fd_store.remove_one(_arena_name(self.name, rank))
            seat.close()
        self.backup.drop()

    async def leave(self) -> None:
        """Close what is open to other nodes; `close` follows."""
        await self.finder.close()

    def close(self) -> None:
        """Stop what is under way, and let go of everything."""
        for task in self._tasks:
            task.cancel()
        self.backup.close()
        for seat in self.seats.values():
            seat.close()
        self.reach.drop(lambda *_: True)
        self.reach.keep_only(())


def _arena_name(group: str, rank: int) -> str:
    return f"arena-{rank}-{group}"


def _close_made(task: "asyncio.Task[ArenaMemory]") -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()
