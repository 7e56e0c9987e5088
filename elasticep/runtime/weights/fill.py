"""Puts the weights of a view in place: finds each missing expert, tries its sources in order.

What is copied is verified by the mover; here it is decided from where, and what a failure means.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from elasticep.errors import ElasticEPError, Unavailable
from elasticep.runtime.node import Node
from elasticep.runtime.weights.driver import CopyFailed
from elasticep.runtime.weights.finder import Place
from elasticep.runtime.weights.ledger import Ref
from elasticep.runtime.weights.memory import Target
from elasticep.runtime.weights.messages import Failure, Kind, Source
from elasticep.runtime.weights.seat import SeatWeights
from elasticep.runtime.weights.views import ViewTable

if TYPE_CHECKING:
    from elasticep.runtime.weights.group import GroupWeights

_BATCH: Final = 8  # units under way; between batches a later view may come first
_AGAIN_S: Final = 0.05  # a slot in use is looked at again
_SHOWN: Final = 8


class Unrestorable(ElasticEPError):
    """No replica, backup or checkpoint has these experts, or what they have is not theirs.

    Attributes:
        refs: (layer, expert) pairs.
    """

    reason = "EXPERTS_UNRESTORABLE"

    def __init__(self, refs: Sequence[Ref], why: str) -> None:
        self.refs = tuple(sorted(set(refs)))
        shown = ", ".join(f"layer {layer} expert {expert}" for layer, expert in self.refs[:_SHOWN])
        more = f" and {len(self.refs) - _SHOWN} more" if len(self.refs) > _SHOWN else ""
        super().__init__(
            f"{len(self.refs)} experts cannot be restored ({shown}{more}): {why}; set "
            "daemon.checkpoint and daemon.backup_bytes, or add ranks that hold them"
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of putting an expert somewhere: where it came from, or why no source had it."""

    kind: Kind | None
    why: str = ""


@dataclass(slots=True)
class _Attempt:
    """One view's weights on one seat."""

    view: ViewTable
    places: dict[Ref, Place] = field(default_factory=dict)
    failed: dict[Ref, str] = field(default_factory=dict)
    sources: Counter[str] = field(default_factory=Counter)


class Filler:
    """Fills arenas and backups of one group.

    Args:
        node: the daemon's shared parts.
        weights: this node's arenas of the group.
    """

    def __init__(self, node: Node, weights: "GroupWeights") -> None:
        self._node = node
        self._weights = weights
        self._log = node.log.bind(group=weights.name)
        self.busy = 0
        """Fills of views under way; backups wait for them."""

    async def ready(self, seat: SeatWeights, view: ViewTable, wanted: Callable[[], bool]) -> None:
        """Return when every slot that the view gives the seat's rank holds the right expert,
        verified; from then on the view's slots are in use.

        A later view of the same rank goes first: this one may never be adopted.

        Args:
            seat: whose arena.
            view: its slots.
            wanted: False when nobody needs the view any more.

        Raises:
            Unrestorable: nothing can supply some of its experts.
            Unavailable: the arena could not be had, or the view was overtaken.
        """
        await self._arena(seat, view, wanted)
        if seat.memory is None:
            return  # it names nothing but what the rank computes from already
        attempt = _Attempt(view)
        table = view.of(seat.rank)
        self._begin(seat, view)
        self.busy += 1
        try:
            while True:
                if not wanted():
                    raise Unavailable(f"view {view.epoch} is not wanted any more")
                left = [m for m in seat.missing(table) if m[::2] not in attempt.failed]
                if not left:
                    break
                await self._some(seat, attempt, left)
        finally:
            self.busy -= 1
            self._end(seat, attempt)
        if attempt.failed:
            refs = list(attempt.failed)
            raise Unrestorable(refs, attempt.failed[refs[0]])
        seat.pinned.add(view.epoch)

    async def _arena(self, seat: SeatWeights, view: ViewTable, wanted: Callable[[], bool]) -> None:
        if seat.opening is not None:
            await asyncio.wait({seat.opening})
        while (memory := seat.memory) is not None:
            if memory.settled:
                return
            if not wanted():
                raise Unavailable(f"view {view.epoch} is not wanted any more")
            await seat.changed.until(lambda: False, _AGAIN_S)
        if seat.lost and seat.same_as_running(view.of(seat.rank)):
            return
        raise Unavailable(
            f"rank {seat.rank} has no arena for its weights"
            + (
                ": it was lost with the daemon before, whose descriptors nobody kept; run the "
                "daemon under a service manager that keeps them"
                if seat.lost
                else ""
            )
        )

    def _begin(self, seat: SeatWeights, view: ViewTable) -> None:
        seat.wanted.add(view.epoch)
        left = len(seat.missing(view.of(seat.rank)))
        if left:
            seat.epoch, seat.done = view.epoch, 0
            seat.total = left * self._weights.unit_bytes
            self._log.info(
                "weights.filling",
                rank=seat.rank,
                epoch=view.epoch,
                experts=left,
                bytes=seat.total,
            )

    def _end(self, seat: SeatWeights, attempt: _Attempt) -> None:
        view = attempt.view
        seat.wanted.discard(view.epoch)
        if seat.epoch == view.epoch:
            if seat.memory is not None and not seat.missing(view.of(seat.rank)):
                self._log.info(
                    "weights.filled",
                    rank=seat.rank,
                    epoch=view.epoch,
                    bytes=seat.total,
                    sources=dict(attempt.sources),
                )
            seat.epoch = seat.done = seat.total = 0
        seat.changed.notify()

    async def _some(
        self, seat: SeatWeights, attempt: _Attempt, left: list[tuple[int, int, int]]
    ) -> None:
        """One batch of what is left, or a wait until some of it may be written."""
        epoch = attempt.view.epoch
        later = max(seat.wanted) > epoch
        free = [] if later else [m for m in left if not seat.blocked(*m)][:_BATCH]
        if not free:
            await seat.changed.until(lambda: False, _AGAIN_S)
            return
        unknown = [(layer, expert) for layer, _, expert in left]
        if not attempt.places:
            attempt.places = await self._find(attempt.view, unknown)
            return  # time has passed: look again at what is left
        memory = seat.memory
        assert memory is not None

        def moved(size: int) -> None:
            if seat.epoch == epoch:
                seat.done += size

        async with asyncio.TaskGroup() as tasks:
            for layer, slot, expert in free:
                target = Target(memory, layer, slot, expert)
                tasks.create_task(self._one(target, attempt, seat.rank, moved))
        seat.changed.notify()

    async def _find(self, view: ViewTable, refs: list[Ref]) -> dict[Ref, Place]:
        if view.previous_epoch == 0 and self._weights.checkpoint:
            return {ref: Place() for ref in refs}  # nobody has anything yet, or no newer
        return await self._weights.finder.find(refs)

    async def _one(
        self, target: Target, attempt: _Attempt, rank: int, moved: Callable[[int], None]
    ) -> None:
        place = attempt.places.get(target.ref, Place())
        urgent = attempt.view.previous_epoch == 0 or not place.replicas
        outcome = await self.put(target, place, urgent=urgent, moved=moved)
        if outcome.kind is None:
            # What was asked before may have died since: ask once more before it is given up.
            place = (await self._weights.finder.find([target.ref]))[target.ref]
            outcome = await self.put(target, place, urgent=True, moved=moved)
        if outcome.kind is not None:
            attempt.sources[outcome.kind.value] += 1
        else:
            attempt.failed[target.ref] = outcome.why
            self._log.error(
                "weights.unrestorable",
                rank=rank,
                layer=target.layer,
                expert=target.expert,
                why=outcome.why,
            )

    # ---- one expert

    async def put(
        self,
        target: Target,
        place: Place,
        *,
        urgent: bool,
        moved: Callable[[int], None] = lambda _: None,
    ) -> Outcome:
        """Put an expert into a slot from the first source that gives it whole.

        Args:
            target: what goes where.
            place: where it can be had.
            urgent: beyond the rate limit.
            moved: called with bytes as they arrive.
        """
        ledger = self._weights.ledger
        verdict = self._weights.finder.verdict(target.ref, place, ledger)
        if verdict.outvoted:
            self._log.error(
                "weights.checksums_differ",
                layer=target.layer,
                expert=target.expert,
                nodes=list(verdict.outvoted),
                disputed=verdict.disputed,
            )
        sources = await self._weights.finder.sources(target.ref, place, self._weights.is_dead)
        if verdict.disputed:
            sources = [source for source in sources if source.kind is Kind.CHECKPOINT]
        why = "no replica, backup or checkpoint is known"
        for source in sources:
            checksum = ledger.get(*target.ref) or verdict.checksum
            error = await self._try(target, source, checksum, urgent=urgent, moved=moved)
            if not error:
                return Outcome(source.kind)
            why = f"{source}: {error}"
        return Outcome(None, why)

    async def _try(
        self,
        target: Target,
        source: Source,
        checksum: bytes,
        *,
        urgent: bool,
        moved: Callable[[int], None],
    ) -> str:
        """One source; "" when the expert is in place, else why not."""
        why = ""
        for _ in range(2):
            if source.rank >= 0 and self._weights.is_dead(source.rank, source.incarnation):
                return "it is dead"
            try:
                found = await self._node.mover.copy(
                    target, checksum, source, urgent=urgent, moved=moved
                )
            except CopyFailed as error:
                self._failed(target, source, error)
                why = str(error)
                if error.failure is Failure.MOVER:
                    continue  # it may have died of something else: once more
                return why
            self._weights.metrics.units.labels(self._weights.name, source.kind.value).inc()
            self._weights.ledger.note(*target.ref, found)
            return ""
        return why

    def _failed(self, target: Target, source: Source, error: CopyFailed) -> None:
        self._log.warning(
            "weights.source_failed",
            layer=target.layer,
            expert=target.expert,
            source=str(source),
            kind=source.kind.value,
            failure=error.failure.value,
            error=str(error),
        )
