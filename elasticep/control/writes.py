"""The writes of a term of office: one transaction at a time, in the order of the decisions, and
none without the lead.

Every transaction compares the leader key, and for `/view` the revision that this leader wrote or
read last. One of which nothing was heard is tried again; whatever else goes wrong ends the term.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from structlog.typing import FilteringBoundLogger

from elasticep.control import events as ev
from elasticep.control import records
from elasticep.control.election import STORE_ERRORS, Deposed, Lead
from elasticep.control.metrics import ControllerMetrics
from elasticep.control.outage import Outage
from elasticep.control.records import LEADER
from elasticep.control.store import Delete, ModRevision, Put, Store
from elasticep.control.views import View
from elasticep.errors import NotLeader, Unavailable

_WRITE_S: Final = 1.0  # one attempt of a transaction
_PAUSE_S: Final = 0.05  # between attempts while the store does not answer
OPERATIONS: Final = 100  # of one transaction
_MOST_QUEUED: Final = 10_000


@dataclass(slots=True)
class Commit:
    """Writes of one outcome, and what follows when they are in the store; with `sweeps` all other
    keys of the group go after them.
    """

    group: str
    operations: list[Put | Delete]
    view: View | None = None
    after: Sequence[ev.Send] = ()
    sweeps: bool = False
    done: "asyncio.Future[None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


async def durable(*commits: Commit) -> None:
    """Return when all are in the store; `NotLeader` when the lead was lost before."""
    for commit in commits:
        try:
            await asyncio.shield(commit.done)
        except asyncio.CancelledError:
            if not commit.done.cancelled():
                raise
            raise NotLeader("the lead was lost before this was written; ask again") from None


class Writes:
    """A term's queue of commits.

    Args:
        store: where they go.
        lead: the term's guard.
        revisions: group -> mod revision of its view, as it was read.
        metrics: counters.
        log: where events go.
        clock: seconds, monotonic.
        written: called with each commit when it is in the store.
    """

    def __init__(
        self,
        store: Store,
        lead: Lead,
        revisions: Mapping[str, int],
        metrics: ControllerMetrics,
        log: FilteringBoundLogger,
        clock: Callable[[], float],
        written: Callable[[Commit], None],
    ) -> None:
        self._store = store
        self._lead = lead
        self._revisions = dict(revisions)
        self._metrics = metrics
        self._outage = Outage(log, "store.unavailable", "store.written", clock)
        self._clock = clock
        self._written = written
        self._queue: asyncio.Queue[Commit] = asyncio.Queue(_MOST_QUEUED)
        self._over = False
        self._began_s: float | None = None  # with the write that is under way

    @property
    def waits_s(self) -> float:
        """How long the write that is under way has waited for the store; 0: none is."""
        began_s = self._began_s
        return 0.0 if began_s is None or self._over else max(0.0, self._clock() - began_s)

    def add(self, commit: Commit) -> None:
        """Queue a commit; `Unavailable` when too many wait for the store. One that comes when the
        term is over is never written, and whoever waits for it hears so at once.
        """
        if self._over:
            commit.done.cancel()
            return
        try:
            self._queue.put_nowait(commit)
        except asyncio.QueueFull:
            commit.done.cancel()
            raise Unavailable(f"{_MOST_QUEUED} writes wait for the store") from None

    def abandon(self) -> None:
        """The term is over: what waits is never written."""
        self._over = True
        while not self._queue.empty():
            self._queue.get_nowait().done.cancel()

    async def run(self) -> None:
        """Write until something ends the term; raises what did."""
        while True:
            commit = await self._queue.get()
            try:
                began_s = self._began_s = self._clock()
                await self._commit(commit)
                if commit.operations:
                    self._metrics.write_seconds.observe(self._clock() - began_s)
            except BaseException:
                commit.done.cancel()
                raise
            self._began_s = None
            self._outage.over()
            self._written(commit)
            if not commit.done.done():
                commit.done.set_result(None)

    async def _commit(self, commit: Commit) -> None:
        """Write all, the view last; what is too much for one transaction goes in several."""
        last = [op for op in commit.operations if commit.view and _of_view(commit, op)]
        first = [op for op in commit.operations if op not in last]
        while len(first) + len(last) > OPERATIONS:
            await self._transact(commit, first[:OPERATIONS], None)
            first = first[OPERATIONS:]
        if first or last:
            await self._transact(commit, [*first, *last], commit.view)
        if commit.sweeps:
            await self._sweep(commit)

    async def _sweep(self, commit: Commit) -> None:
        """Delete what is left of a group; what was queued before is written by now."""
        while True:
            try:
                prefix = records.group_prefix(commit.group)
                left = (await self._store.list(prefix)).items
                break
            except STORE_ERRORS as error:
                self._outage.failed(error)
                await asyncio.sleep(_PAUSE_S)
        keys: list[Put | Delete] = [Delete(item.key) for item in left]
        for first in range(0, len(keys), OPERATIONS):
            await self._transact(commit, keys[first : first + OPERATIONS], None)
        self._revisions.pop(commit.group, None)

    async def _transact(
        self, commit: Commit, operations: list[Put | Delete], view: View | None
    ) -> None:
        key = records.view_key(commit.group)
        compares: list[ModRevision] = []
        if view is not None:
            compares.append(ModRevision(key, self._revisions.get(commit.group, 0)))
        while True:
            try:
                done = await self._store.transact(
                    (self._lead.guard(), *compares), operations, deadline_s=_WRITE_S
                )
            except Unavailable as error:
                self._outage.failed(error)
                await asyncio.sleep(_PAUSE_S)
                continue
            if done.succeeded:
                if view is not None:
                    self._revisions[commit.group] = done.revision
                return
            if await self._written_already(key, view):
                return
            raise Deposed("the leader key or a view was written by another controller")

    async def _written_already(self, key: str, view: View | None) -> bool:
        """Whether we still lead, and an attempt of which nothing was heard had succeeded."""
        while True:
            try:
                leader = await self._store.get(LEADER, deadline_s=_WRITE_S)
                stored = await self._store.get(key, deadline_s=_WRITE_S)
                break
            except STORE_ERRORS as error:
                self._outage.failed(error)
                await asyncio.sleep(_PAUSE_S)
        if leader is None or leader.create_revision != self._lead.revision or view is None:
            return False
        if stored is None or stored.value != records.view_bytes(view):
            return False
        self._revisions[view.group] = stored.mod_revision
        return True


def _of_view(commit: Commit, operation: Put | Delete) -> bool:
    return operation.key == records.view_key(commit.group) or "/history/" in operation.key
