"""Who leads: a leased key in the store. Whoever creates it leads until it is gone.

Every write of a leader compares the key's create revision, so one that was deposed without noticing
writes nothing. By its own clock a leader gives up when it could not renew its lease for as long as
the lease lasts, so that nodes look for another. Nobody waits for the lease of a process that is
seen to be gone: a controller that is restarted leads again at once.
"""

import asyncio
import json
import uuid
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass
from typing import Final

from structlog.typing import FilteringBoundLogger

from elasticep.control import process
from elasticep.control.outage import Outage
from elasticep.control.records import LEADER
from elasticep.control.store import (
    CreateRevision,
    Delete,
    KeyValue,
    LeaseLost,
    Put,
    Store,
    StoreRefused,
)
from elasticep.errors import ElasticEPError, Unavailable

_CALL_S: Final = 1.0
_RETRY_S: Final = 0.2
_ASK_S: Final = 2.0  # how often a standby asks the store for an answer, at least
_LOOK_S: Final = 0.1  # how often a standby looks whether a leader on its host is still there
# What may go wrong with a store for a while.
STORE_ERRORS: Final = (Unavailable, LeaseLost, StoreRefused)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A controller that may lead. `id` is new for every one, `process` see `control.process`."""

    name: str
    address: str
    id: str
    process: str = ""

    @classmethod
    def new(cls, name: str, address: str) -> "Candidate":
        """A candidate of this process."""
        return cls(name, address, uuid.uuid4().hex, process.identity())

    def encode(self) -> bytes:
        """What lies under the leader key."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def decode(cls, value: bytes) -> "Candidate":
        """Inverse of `encode`; unreadable content is somebody without a name."""
        try:
            plain = json.loads(value)
            return cls(*(str(plain[name]) for name in ("name", "address", "id", "process")))
        except (ValueError, KeyError, TypeError):
            return cls("unknown", "", "")


class Deposed(ElasticEPError):
    """This controller does not lead any more."""

    reason = "NOT_LEADER"


@dataclass(frozen=True, slots=True)
class Lead:
    """One term of office: the create revision of the leader key, and its lease."""

    revision: int
    lease: int

    def guard(self) -> CreateRevision:
        """The compare that every write of this term carries."""
        return CreateRevision(LEADER, self.revision)


class Election:
    """Campaigns, holds the lead, and gives it back.

    Args:
        store: where the leader key lies.
        me: this controller.
        ttl_s: time of the lease, seconds.
        log: where events go.
        clock: seconds, monotonic; None: the running loop's.
        on_store: told whether the store answers, each time that it was asked.

    Attributes:
        leader: who leads, as last seen.
        store_lost: whether the store did not answer when it was asked last.
    """

    def __init__(
        self,
        store: Store,
        me: Candidate,
        ttl_s: int,
        log: FilteringBoundLogger,
        clock: Callable[[], float] | None = None,
        on_store: Callable[[bool], None] = lambda answers: None,
    ) -> None:
        self._clock = clock or asyncio.get_running_loop().time
        self._log = log
        self._store = store
        self._me = me
        self._ttl_s = ttl_s
        self._on_store = on_store
        self._store_lost = Outage(log, "store.lost", "store.back", self._clock)
        self._failing = Outage(log, "election.failed", "", self._clock)
        self.leader: Candidate | None = None
        self._good_until_s = 0.0

    @property
    def overdue(self) -> bool:
        """Whether another may lead by now, for all that this controller knows of its lease.

        One that was stopped asks this before it answers: it may run again before it hears that
        the lead is lost.
        """
        return self._clock() >= self._good_until_s

    @property
    def store_lost(self) -> bool:
        """Whether the store did not answer when it was asked last."""
        return self._store_lost.lasts

    def _answered(self) -> None:
        self._store_lost.over()
        self._on_store(True)

    def _unanswered(self, error: Unavailable) -> None:
        self._store_lost.failed(error)
        self._on_store(False)

    async def campaign(self) -> Lead:
        """Wait until this controller leads."""
        while True:
            try:
                lead = await self._try()
                self._answered()
                self._failing.over()
                if lead is not None:
                    self.leader = self._me
                    return lead
                await self._until_free()
            except Unavailable as error:
                self._unanswered(error)
                await asyncio.sleep(_RETRY_S)
            except STORE_ERRORS as error:
                self._failing.failed(error)
                await asyncio.sleep(_RETRY_S)

    async def _try(self) -> Lead | None:
        held = await self._store.get(LEADER, deadline_s=_CALL_S)
        if held is not None:
            self.leader = Candidate.decode(held.value)
            if self.leader.id != self._me.id:
                if not process.is_gone(self.leader.process):
                    return None
                self._log.info("leader.gone", name=self.leader.name)
            # Else a term of our own that we gave up, or a write whose outcome we did not hear.
            await self._store.transact(
                (CreateRevision(LEADER, held.create_revision),),
                (Delete(LEADER),),
                deadline_s=_CALL_S,
            )
        good_until_s = self._clock() + self._ttl_s
        lease = await self._store.lease_grant(self._ttl_s, deadline_s=_CALL_S)
        done = await self._store.transact(
            (CreateRevision(LEADER, 0),),
            (Put(LEADER, self._me.encode(), lease),),
            deadline_s=_CALL_S,
        )
        if done.succeeded:
            self._good_until_s = good_until_s
            return Lead(done.revision, lease)
        await self._revoke(lease)
        return None

    async def _until_free(self) -> None:
        """Wait until the leader key is gone, or the process that holds it is."""
        held = await self._store.get(LEADER, deadline_s=_CALL_S)
        if held is None:
            return
        async with aclosing(self._store.watch(LEADER, after_revision=held.mod_revision)) as changes:
            while held is not None:
                self.leader = Candidate.decode(held.value)
                change = asyncio.ensure_future(anext(changes))
                try:
                    if not await self._changed(change, held, self.leader.process):
                        return
                finally:
                    change.cancel()
                    await asyncio.gather(change, return_exceptions=True)
                held = await self._store.get(LEADER, deadline_s=_CALL_S)

    async def _changed(self, change: "asyncio.Future[int]", held: KeyValue, holder: str) -> bool:
        """Wait for a change; False when the holder is seen to be gone before.

        A watch that cannot reach the store is silent. So is one on a member of etcd that was lost
        with its host, on which the leader may have been, until its connection is given up.
        """
        ask_s = min(_ASK_S, self._ttl_s / 3)
        look_s = min(_LOOK_S, ask_s) if process.is_local(holder) else ask_s
        asked_s = self._clock()
        while not (await asyncio.wait({change}, timeout=look_s))[0]:
            if process.is_gone(holder):
                return False
            if self._clock() - asked_s >= ask_s:
                if await self._is_other(held):
                    return True
                asked_s = self._clock()
        return True

    async def _is_other(self, held: KeyValue) -> bool:
        """Whether the store answers, and no longer with this leader."""
        try:
            now = await self._store.get(LEADER, deadline_s=_CALL_S)
        except Unavailable as error:
            self._unanswered(error)
            return False
        self._answered()
        return now is None or now.create_revision != held.create_revision

    async def hold(self, lead: Lead) -> None:
        """Renew the lease until it cannot be; returns when the lead is lost."""
        watcher = asyncio.create_task(self._watch_own(lead))
        try:
            while (left_s := self._good_until_s - self._clock()) > 0:
                began = self._clock()
                try:
                    ttl_s = await self._store.lease_keepalive(
                        lead.lease, deadline_s=max(0.05, min(_CALL_S, left_s))
                    )
                    self._good_until_s = began + ttl_s
                    self._answered()
                except LeaseLost as error:
                    self._log.warning("lead.lost", reason=str(error))
                    return
                except STORE_ERRORS as error:
                    if isinstance(error, Unavailable):
                        self._unanswered(error)
                    self._log.warning("lease.unrenewed", error=str(error), left_s=round(left_s, 2))
                done, _ = await asyncio.wait({watcher}, timeout=self._ttl_s / 3)
                if done:
                    return
            self._log.warning("lead.lost", reason=f"the lease was not renewed for {self._ttl_s} s")
        finally:
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher

    async def _watch_own(self, lead: Lead) -> None:
        """Return when the leader key is not ours any more."""
        async with aclosing(self._store.watch(LEADER, after_revision=lead.revision)) as changes:
            async for _ in changes:
                if not await self._is_ours(lead):
                    self._log.warning("lead.lost", reason="the leader key is not ours any more")
                    return

    async def _is_ours(self, lead: Lead) -> bool:
        """Look at the leader key until the store answers: a change is told once, and the lease may
        outlast the key.
        """
        while True:
            try:
                held = await self._store.get(LEADER, deadline_s=_CALL_S)
                return held is not None and held.create_revision == lead.revision
            except STORE_ERRORS:
                await asyncio.sleep(_RETRY_S)

    async def resign(self, lead: Lead) -> None:
        """Give the lead back at once, so that a standby need not wait for the lease."""
        if self.leader is self._me:
            self.leader = None
        await self._revoke(lead.lease)

    async def _revoke(self, lease: int) -> None:
        with suppress(*STORE_ERRORS):
            await self._store.lease_revoke(lease, deadline_s=0.5)
