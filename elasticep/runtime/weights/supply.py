"""Puts one expert into one slot, from the first source that gives it whole.

Into a slot goes one expert at a time: who asks for what is on its way already joins in, who asks
for another one waits until that has ended. Before every try it is looked at again whether the slot
may be written, and whether it holds the expert by now. What is copied is verified by the mover;
here it is decided from where, what it must sum up to, and what a failure means.
"""

import asyncio
import enum
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from elasticep.runtime.node import Node
from elasticep.runtime.weights.driver import CopyFailed
from elasticep.runtime.weights.finder import Place
from elasticep.runtime.weights.ledger import Ref, Verdict
from elasticep.runtime.weights.memory import ArenaMemory, Target
from elasticep.runtime.weights.messages import Failure, Kind, Source

if TYPE_CHECKING:
    from elasticep.runtime.weights.group import GroupWeights

_Slot = tuple[ArenaMemory, int, int]
_SHOWN: Final = 8
_SHUN_S: Final = 10.0  # a source that failed is tried last for so long
_HERE: Final = frozenset(
    {Failure.MOVER, Failure.CANCELLED, Failure.BUSY, Failure.AWAY, Failure.STALLED}
)
"""Failures that do not say that the source lacks the expert."""


class End(enum.Enum):
    """How it went."""

    PLACED = enum.auto()
    POSTPONED = enum.auto()  # the slot must not be written now
    TROUBLED = enum.auto()  # somebody may have it, but this node could not get it now
    NOWHERE = enum.auto()  # nobody has it, or what they have is not it


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of putting an expert somewhere.

    Attributes:
        end: how it went.
        kind: where it came from, if it was copied for this.
        why: a sentence, if it is not in place.
    """

    end: End
    kind: Kind | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Wish:
    """Who asks for an expert in a slot.

    Attributes:
        urgent: beyond the rate limit.
        may: whether the slot may be written now.
        moved: called with bytes as they arrive; negative when those before were in vain.
    """

    urgent: bool
    may: Callable[[], bool] = lambda: True
    moved: Callable[[int], None] = lambda _: None


@dataclass(slots=True, eq=False)
class _Work:
    """An expert on its way into a slot."""

    target: Target
    place: Place
    urgent: bool
    wishes: list[Wish] = field(default_factory=list)
    done: int = 0

    def may(self) -> bool:
        return any(wish.may() for wish in self.wishes)

    def moved(self, size: int) -> None:
        self.done += size
        for wish in self.wishes:
            wish.moved(size)


class Supply:
    """Of one group on one node.

    Args:
        node: the daemon's shared parts.
        weights: this node's arenas of the group.
    """

    def __init__(self, node: Node, weights: "GroupWeights") -> None:
        self._node = node
        self._weights = weights
        self._log = node.log.bind(group=weights.name)
        self._works: dict[_Slot, tuple[_Work, asyncio.Task[Outcome]]] = {}
        self._shunned: dict[tuple[Kind, str, int], float] = {}  # source -> until when

    async def put(self, target: Target, place: Place, wish: Wish) -> Outcome:
        """Put an expert into a slot from the first source that gives it whole.

        If the caller is cancelled, it is called off unless somebody else waits for it.

        Args:
            target: what goes where.
            place: where it can be had.
            wish: who asks.
        """
        key = (target.memory, target.layer, target.slot)
        while (there := self._works.get(key)) is not None and there[0].target.ref != target.ref:
            await asyncio.wait({there[1]})  # what else goes in there has to end first
        if there is None:
            if target.memory.held[target.layer, target.slot] == target.expert:
                return Outcome(End.PLACED)
            work = _Work(target, place, wish.urgent)
            there = self._works[key] = (work, asyncio.create_task(self._run(key, work)))
        work, task = there
        work.wishes.append(wish)
        if work.done:
            wish.moved(work.done)
        if wish.urgent and not work.urgent:
            work.urgent = True
            self._node.mover.hurry(target)
        try:
            return await asyncio.shield(task)
        finally:
            work.wishes.remove(wish)
            if not work.wishes:
                task.cancel()
                if self._works.get(key) is there:
                    del self._works[key]

    async def _run(self, key: _Slot, work: _Work) -> Outcome:
        try:
            return await self._work(work)
        finally:
            if self._works.get(key, (None,))[0] is work:
                del self._works[key]

    async def _work(self, work: _Work) -> Outcome:
        verdict = self._judge(work.target, work.place)
        sources = await self._sources(work, verdict)
        silent, trouble = work.place.silent, ""
        why = "no replica, backup or checkpoint is known"
        if silent:
            trouble = f"no answer from {', '.join(silent)}"
        left = deque(sources)
        while left:
            source = left.popleft()
            if source.rank >= 0 and self._weights.is_dead(source.rank, source.incarnation):
                why = f"{source}: it is dead"
                continue
            if not work.may():
                return Outcome(End.POSTPONED, why="the slot is in use")
            error = await self._try(work, source, verdict)
            if error is None:
                return Outcome(End.PLACED, source.kind)
            why = f"{source}: {error}"
            if error.failure in _HERE:
                trouble = why
            if error.failure is Failure.GONE and (sent := self._weights.reach.streamed(source)):
                left.appendleft(sent)
            else:
                self._shun(source)
        if trouble:
            return Outcome(End.TROUBLED, why=trouble)
        return Outcome(End.NOWHERE, why=why)

    # ---- what it must sum up to

    def _judge(self, target: Target, place: Place) -> Verdict:
        own = self._weights.ledger.get(*target.ref)
        verdict = self._weights.ledger.judge(*target.ref, place.said)
        differ = list(verdict.outvoted)
        if own and verdict.checksum not in (b"", own):
            differ.append(self._node.config.node)
        if differ:
            self._differ(target, differ, disputed=verdict.disputed)
        return verdict

    def _differ(self, target: Target, nodes: list[str], *, disputed: bool) -> None:
        self._log.error(
            "weights.checksums_differ",
            layer=target.layer,
            expert=target.expert,
            nodes=nodes,
            disputed=disputed,
        )

    async def compare(self, refs: Collection[Ref]) -> None:
        """Say which nodes noted other checksums than this one: as when each loaded from its own
        checkpoint, and they are not the same.
        """
        places = await self._weights.finder.find(list(refs), patient=True)
        ledger = self._weights.ledger
        differ = {ref: ledger.judge(*ref, place.said).outvoted for ref, place in places.items()}
        wrong = sorted(ref for ref, nodes in differ.items() if nodes)
        if wrong:
            self._log.error(
                "weights.checkpoints_differ",
                nodes=sorted({node for nodes in differ.values() for node in nodes}),
                experts=[list(ref) for ref in wrong[:_SHOWN]],
                count=len(wrong),
            )

    async def _sources(self, work: _Work, verdict: Verdict) -> list[Source]:
        ref, place = work.target.ref, work.place
        sources = await self._weights.reach.sources(ref, place, self._weights.is_dead)
        doubted = verdict.disputed or not verdict.checksum
        if verdict.disputed and not verdict.checksum:
            return [source for source in sources if source.kind is Kind.CHECKPOINT]
        now = time.monotonic()
        self._shunned = {key: until for key, until in self._shunned.items() if until > now}

        def order(source: Source) -> tuple[bool, bool]:
            disk = source.kind is Kind.CHECKPOINT
            return doubted and not disk, _key(source) in self._shunned

        return sorted(sources, key=order)  # otherwise as they came

    def _shun(self, source: Source) -> None:
        if source.kind is not Kind.CHECKPOINT:
            self._shunned[_key(source)] = time.monotonic() + _SHUN_S

    # ---- one source

    async def _try(self, work: _Work, source: Source, verdict: Verdict) -> CopyFailed | None:
        """One source; None when the expert is in place."""
        target, ledger = work.target, self._weights.ledger
        disk = source.kind is Kind.CHECKPOINT
        error: CopyFailed | None = None
        for _ in range(2):
            before = work.done
            try:
                found = await self._node.mover.copy(
                    target,
                    b"" if disk else verdict.checksum,  # what the checkpoint has is the truth
                    source,
                    urgent=work.urgent,
                    moved=work.moved,
                )
            except CopyFailed as failed:
                work.moved(before - work.done)
                self._failed(target, source, failed)
                error = failed
                if failed.failure is Failure.MOVER and work.may():
                    continue  # it may have died of something else: once more
                return error
            self._weights.metrics.units.labels(self._weights.name, source.kind.value).inc()
            if disk and verdict.checksum not in (b"", found):
                wrong = sorted(node for node, said in work.place.said.items() if said != found)
                if ledger.get(*target.ref) not in (b"", found):
                    wrong.append(self._node.config.node)
                self._differ(target, wrong, disputed=True)
            ledger.replace(*target.ref, found)
            return None
        return error

    def _failed(self, target: Target, source: Source, error: CopyFailed) -> None:
        self._log.warning(
            "weights.source_failed",
            into=target.memory.name,
            layer=target.layer,
            expert=target.expert,
            source=str(source),
            kind=source.kind.value,
            failure=error.failure.value,
            error=str(error),
        )


def _key(source: Source) -> tuple[Kind, str, int]:
    return source.kind, source.node, source.rank
