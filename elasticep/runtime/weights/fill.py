"""Puts the weights of a view in place: which experts a rank's arena lacks, who has them, and what
it means when some cannot be had. How one expert gets into its slot is `Supply`'s.

An answer tells what nobody has from what this node could not get: the former is lost, the latter
may be tried again.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from elasticep.errors import ElasticEPError, Unavailable
from elasticep.runtime.node import Node
from elasticep.runtime.weights.finder import Place
from elasticep.runtime.weights.ledger import Ref
from elasticep.runtime.weights.memory import Target
from elasticep.runtime.weights.seat import SeatWeights
from elasticep.runtime.weights.supply import End, Outcome, Supply, Wish
from elasticep.runtime.weights.views import ViewTable

if TYPE_CHECKING:
    from elasticep.runtime.weights.group import GroupWeights

_BATCH: Final = 8  # units under way; between batches a later view may come first
_FIND: Final = 64  # experts looked for at a time
_FRESH_S: Final = 2.0  # where they were found may be outdated after this
_AGAIN_S: Final = 0.05  # a slot in use, or a source that could not be asked, is looked at again
_PATIENCE_S: Final = 3.0  # for experts that may be somewhere; below what the controller has
_SHOWN: Final = 8
_Missing = tuple[int, int, int]  # layer, slot, expert


class Unrestorable(ElasticEPError):
    """No replica, backup or checkpoint has these experts, or what they have is not theirs.

    Attributes:
        refs: (layer, expert) pairs.
    """

    reason = "EXPERTS_UNRESTORABLE"

    def __init__(self, refs: Sequence[Ref], why: str) -> None:
        self.refs = tuple(sorted(set(refs)))
        super().__init__(
            f"{len(self.refs)} experts cannot be restored ({_named(self.refs)}): {why}; set "
            "daemon.checkpoint and daemon.backup_bytes, or add ranks that hold them"
        )


@dataclass(slots=True)
class _Attempt:
    """One view's weights on one seat.

    Attributes:
        view: the view.
        places: where what is missing was found, at `found_at`.
        nowhere: what nobody seems to have, and why; `sure`: it was looked for a second time.
        troubled: what could not be had so far although somebody may have it, and why.
        until: when that is given up.
        sources: how many came from where.
    """

    view: ViewTable
    wanted: Callable[[], bool]
    places: dict[Ref, Place] = field(default_factory=dict)
    found_at: float = 0.0
    nowhere: dict[Ref, str] = field(default_factory=dict)
    sure: bool = False
    troubled: dict[Ref, str] = field(default_factory=dict)
    until: float = 0.0
    sources: Counter[str] = field(default_factory=Counter)

    @property
    def first(self) -> bool:
        """Whether it is the group's first view, before which nobody has anything."""
        return self.view.previous_epoch == 0

    def check(self) -> None:
        """Go on only if there is a point in it."""
        if not self.wanted():
            raise Unavailable(f"view {self.view.epoch} is not wanted any more")
        if self.troubled and time.monotonic() > self.until:
            why = next(iter(self.troubled.values()))
            raise Unavailable(  # the reason first: an engine hears 255 bytes of this
                f"{len(self.troubled)} experts could not be had within {_PATIENCE_S:g} s: {why} "
                f"({_named(sorted(self.troubled))}); they may be asked for again"
            )

    def take(self, ref: Ref, outcome: Outcome) -> None:
        """What became of one expert."""
        if outcome.end is not End.TROUBLED:
            self.troubled.pop(ref, None)
        if outcome.end is End.NOWHERE:
            self.nowhere[ref] = outcome.why
        elif outcome.end is End.TROUBLED:
            if not self.troubled:
                self.until = time.monotonic() + _PATIENCE_S
            self.troubled[ref] = outcome.why
            self.places.pop(ref, None)  # to be looked for again
        elif outcome.kind is not None:
            self.sources[outcome.kind.value] += 1


class Filler:
    """Fills arenas of one group.

    Args:
        node: the daemon's shared parts.
        weights: this node's arenas of the group.

    Attributes:
        supply: puts single experts into slots.
        busy: fills of views under way; backups wait for them.
    """

    def __init__(self, node: Node, weights: "GroupWeights") -> None:
        self._node = node
        self._weights = weights
        self._log = node.log.bind(group=weights.name)
        self.supply = Supply(node, weights)
        self.busy = 0

    async def ready(self, seat: SeatWeights, view: ViewTable, wanted: Callable[[], bool]) -> None:
        """Return when every slot that the view gives the seat's rank holds the right expert,
        verified; from then on the view's slots are in use.

        A later view of the same rank goes first: this one may never be adopted.

        Args:
            seat: whose arena.
            view: its slots.
            wanted: False when nobody needs the view any more.

        Raises:
            Unrestorable: nobody has some of its experts.
            Unavailable: the arena or some experts could not be had, though they may be had later;
                or the view was overtaken.
        """
        attempt = _Attempt(view, wanted)
        await self._arena(seat, attempt)
        if seat.memory is None:
            return  # it names nothing but what the rank computes from already
        self._begin(seat, view)
        self.busy += 1
        try:
            while missing := seat.missing(view.of(seat.rank)):
                attempt.check()
                left = [m for m in missing if m[::2] not in attempt.nowhere]
                if left:
                    await self._some(seat, attempt, left)
                elif attempt.sure:
                    self._lost(seat, attempt.nowhere)
                else:
                    # What was asked before may have died since: all are looked for once more.
                    attempt.sure = True
                    await self._find(seat, attempt, [m[::2] for m in missing])
                    attempt.nowhere.clear()
        finally:
            self.busy -= 1
            self._end(seat, attempt)
        seat.pinned.add(view.epoch)

    async def _arena(self, seat: SeatWeights, attempt: _Attempt) -> None:
        if seat.opening is not None:
            await asyncio.wait({seat.opening})
        while (memory := seat.memory) is not None:
            if memory.settled:
                return
            attempt.check()
            await seat.changed.until(lambda: False, _AGAIN_S)
        if seat.lost and seat.same_as_running(attempt.view.of(seat.rank)):
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
        lacks = left * self._weights.unit_bytes
        seat.measure(view, lacks, self._weights.unit_bytes)
        if left:
            seat.epoch, seat.done, seat.beats = view.epoch, 0, 0
            seat.total = lacks
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
            seat.epoch = seat.done = seat.total = seat.beats = 0
        seat.changed.notify()

    def _lost(self, seat: SeatWeights, nowhere: dict[Ref, str]) -> None:
        refs = sorted(nowhere)
        why = nowhere[refs[0]]
        shown = [list(ref) for ref in refs[:_SHOWN]]
        self._log.error(
            "weights.unrestorable", rank=seat.rank, experts=shown, count=len(refs), why=why
        )
        raise Unrestorable(refs, why)

    # ---- some of what is missing

    async def _some(self, seat: SeatWeights, attempt: _Attempt, left: list[_Missing]) -> None:
        """One batch of what is left, or a wait until some of it may be written."""
        later = max(seat.wanted) > attempt.view.epoch
        free = [] if later else [m for m in left if not seat.blocked(*m)]
        free.sort(key=lambda m: m[::2] in attempt.troubled)  # stable: what is in trouble comes last
        batch = free[:_BATCH]
        if not batch:
            await seat.changed.until(lambda: False, _AGAIN_S)
            return
        if attempt.troubled and batch[0][::2] in attempt.troubled:
            await seat.changed.until(lambda: False, 2 * _AGAIN_S)
        fresh = attempt.first or time.monotonic() < attempt.found_at + _FRESH_S
        if not fresh or any(m[::2] not in attempt.places for m in batch):
            await self._find(seat, attempt, [m[::2] for m in free[:_FIND]])
            return  # time has passed: look again at what is left
        await self._batch(seat, attempt, batch)

    async def _find(self, seat: SeatWeights, attempt: _Attempt, refs: Collection[Ref]) -> None:
        seat.beats += 1  # who searches is not stuck
        if attempt.first and self._weights.checkpoint and not attempt.sure:
            attempt.places.update((ref, Place()) for ref in refs)  # nobody has anything yet
        else:
            patient = attempt.sure or bool(attempt.troubled)
            attempt.places = await self._weights.finder.find(list(refs), patient=patient)
        attempt.found_at = time.monotonic()
        seat.beats += 1

    async def _batch(self, seat: SeatWeights, attempt: _Attempt, batch: list[_Missing]) -> None:
        tasks = {asyncio.create_task(self._one(seat, attempt, m)): m for m in batch}
        left = set(tasks)
        try:
            while left:
                _, left = await asyncio.wait(
                    left, timeout=_AGAIN_S, return_when=asyncio.FIRST_COMPLETED
                )
                for task in left:
                    if not self._still_wanted(seat, attempt, tasks[task]):
                        task.cancel()
        finally:
            for task in left:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            seat.changed.notify()
        for task, missing in tasks.items():
            if not task.cancelled():
                attempt.take(missing[::2], task.result())

    def _still_wanted(self, seat: SeatWeights, attempt: _Attempt, missing: _Missing) -> bool:
        """Whether an expert that is on its way is wanted by this view, or by one that overtook it
        and will join in.
        """
        latest = max(seat.wanted)
        if latest <= attempt.view.epoch:
            return attempt.wanted()
        later = self._weights.views.get(latest)
        layer, slot, expert = missing
        return later is not None and bool(later.of(seat.rank)[layer, slot] == expert)

    async def _one(self, seat: SeatWeights, attempt: _Attempt, missing: _Missing) -> Outcome:
        memory, (layer, slot, expert) = seat.memory, missing
        if memory is None:
            return Outcome(End.POSTPONED)
        place = attempt.places[layer, expert]

        def moved(size: int) -> None:
            if seat.epoch == attempt.view.epoch:
                seat.done += size

        def may() -> bool:
            return seat.memory is memory and not seat.blocked(layer, slot, expert)

        waited = attempt.first or attempt.view.awaited
        urgent = waited or not place.replicas or attempt.sure
        target = Target(memory, layer, slot, expert)
        return await self.supply.put(target, place, Wish(urgent, may, moved))


def _named(refs: Sequence[Ref]) -> str:
    shown = ", ".join(f"layer {layer} expert {expert}" for layer, expert in refs[:_SHOWN])
    return shown + (f" and {len(refs) - _SHOWN} more" if len(refs) > _SHOWN else "")
