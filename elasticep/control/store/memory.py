"""A store in memory: for tests, the simulator and trials on one machine.

`MemoryBackend` is the server, shared by any number of `MemoryStore` clients in one event loop. Its
clock is an argument, and it can be made unavailable, compacted and restarted as etcd can.
"""

import asyncio
import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress

from elasticep.control.store.base import (
    DEFAULT_DEADLINE_S,
    Committed,
    Compare,
    CreateRevision,
    KeyValue,
    LeaseLost,
    Operation,
    Put,
    Snapshot,
    StoreRefused,
    check_operations,
)
from elasticep.errors import Unavailable

_MAX_DELETED = 10_000  # remembered deletions; beyond that the history is compacted


class MemoryBackend:
    """The data and leases behind `MemoryStore` clients.

    Args:
        clock: seconds, monotonic; what leases expire by.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._data: dict[str, KeyValue] = {}
        self._revision = 1
        self._deleted: dict[str, int] = {}  # key -> revision, for watches that resume
        self._compacted = 0
        self._leases: dict[int, tuple[int, float]] = {}  # id -> (ttl_s, expires at)
        self._next_lease = 1
        self._available = True
        self._changed = asyncio.Event()

    # ---- what tests and the simulator do to it

    def set_available(self, available: bool) -> None:
        """An outage begins or ends; leases do not expire during one, as etcd's do not."""
        if available and not self._available:
            now = self._clock()
            self._leases = {i: (ttl, now + ttl) for i, (ttl, _) in self._leases.items()}
        self._available = available
        self._wake()

    def compact(self) -> None:
        """Forget the history up to now: watches that are behind learn of it."""
        self._compacted = self._revision
        self._deleted.clear()
        self._wake()

    def expire(self) -> None:
        """Drop leases whose time has passed, with their keys."""
        if not self._available:
            return
        now = self._clock()
        for lease in [i for i, (_, end) in self._leases.items() if end <= now]:
            self.revoke(lease)

    def next_expiry_s(self) -> float | None:
        """Seconds until the first lease expires; None when none will."""
        if not self._leases or not self._available:
            return None
        return max(0.0, min(end for _, end in self._leases.values()) - self._clock())

    # ---- what clients do

    @property
    def available(self) -> bool:
        """Whether calls are answered."""
        return self._available

    @property
    def revision(self) -> int:
        """Revision of the last change."""
        return self._revision

    def get(self, key: str) -> KeyValue | None:
        """The key, or None."""
        self.expire()
        return self._data.get(key)

    def list(self, prefix: str) -> Snapshot:
        """All keys that begin with `prefix`."""
        self.expire()
        keys = sorted(self._data)
        first = bisect_left(keys, prefix)
        items = []
        for key in keys[first:]:
            if not key.startswith(prefix):
                break
            items.append(self._data[key])
        return Snapshot(self._revision, tuple(items))

    def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Committed:
        """Apply all operations if all compares hold."""
        self.expire()
        check_operations(operations)
        for compare in compares:
            item = self._data.get(compare.key)
            if isinstance(compare, CreateRevision):
                held = item.create_revision if item else 0
            else:
                held = item.mod_revision if item else 0
            if held != compare.revision:
                return Committed(False, self._revision)
        for operation in operations:
            if isinstance(operation, Put) and operation.lease not in (0, *self._leases):
                raise StoreRefused(f"{operation.key}: lease {operation.lease} does not exist")
        if any(isinstance(op, Put) or op.key in self._data for op in operations):
            self._revision += 1
        for operation in operations:
            self._apply(operation)
        self._wake()
        return Committed(True, self._revision)

    def _apply(self, operation: Operation) -> None:
        old = self._data.get(operation.key)
        if isinstance(operation, Put):
            self._data[operation.key] = KeyValue(
                operation.key,
                operation.value,
                old.create_revision if old else self._revision,
                self._revision,
                operation.lease,
            )
            self._deleted.pop(operation.key, None)
        elif old is not None:
            del self._data[operation.key]
            self._deleted[operation.key] = self._revision
            if len(self._deleted) > _MAX_DELETED:
                self.compact()

    def grant(self, ttl_s: int) -> int:
        """A new lease."""
        if ttl_s < 1:
            raise StoreRefused(f"a lease of {ttl_s} s; at least 1 s is needed")
        lease, self._next_lease = self._next_lease, self._next_lease + 1
        self._leases[lease] = (ttl_s, self._clock() + ttl_s)
        self._wake()
        return lease

    def keepalive(self, lease: int) -> float:
        """Renew a lease."""
        self.expire()
        if lease not in self._leases:
            raise LeaseLost(f"lease {lease} has expired; take a new one")
        ttl = self._leases[lease][0]
        self._leases[lease] = (ttl, self._clock() + ttl)
        return float(ttl)

    def revoke(self, lease: int) -> None:
        """End a lease and delete its keys."""
        if self._leases.pop(lease, None) is None:
            return
        held = [key for key, item in self._data.items() if item.lease == lease]
        if held:
            self._revision += 1
            for key in held:
                del self._data[key]
                self._deleted[key] = self._revision
        self._wake()

    def changed_after(self, prefix: str, revision: int) -> bool:
        """Whether anything under `prefix` changed after `revision`, or may have."""
        self.expire()
        if revision < self._compacted or revision > self._revision:
            return True
        return any(
            item.mod_revision > revision
            for key, item in self._data.items()
            if key.startswith(prefix)
        ) or any(at > revision for key, at in self._deleted.items() if key.startswith(prefix))

    def changes(self) -> asyncio.Event:
        """An event that is set at the next change of anything."""
        return self._changed

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class MemoryStore:
    """A client of a `MemoryBackend`; see `elasticep.control.store.base.Store`."""

    def __init__(self, backend: MemoryBackend | None = None) -> None:
        self._backend = backend or MemoryBackend()
        self._closed = asyncio.Event()

    async def _ready(self, what: str, deadline_s: float) -> MemoryBackend:
        """Give way once, as a network would, and wait until the backend answers."""
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(deadline_s):
                while not self._backend.available:
                    await self._backend.changes().wait()
        except TimeoutError:
            raise Unavailable(f"the store did not answer {what} within {deadline_s} s") from None
        return self._backend

    async def get(self, key: str, *, deadline_s: float = DEFAULT_DEADLINE_S) -> KeyValue | None:
        """See `Store.get`."""
        return (await self._ready(f"get {key}", deadline_s)).get(key)

    async def list(self, prefix: str, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Snapshot:
        """See `Store.list`."""
        return (await self._ready(f"list {prefix}", deadline_s)).list(prefix)

    async def put(
        self, key: str, value: bytes, *, lease: int = 0, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> int:
        """See `Store.put`."""
        backend = await self._ready(f"put {key}", deadline_s)
        return backend.transact((), (Put(key, value, lease),)).revision

    async def transact(
        self,
        compares: Sequence[Compare],
        operations: Sequence[Operation],
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> Committed:
        """See `Store.transact`."""
        return (await self._ready("a transaction", deadline_s)).transact(compares, operations)

    async def lease_grant(self, ttl_s: int, *, deadline_s: float = DEFAULT_DEADLINE_S) -> int:
        """See `Store.lease_grant`."""
        return (await self._ready("a lease grant", deadline_s)).grant(ttl_s)

    async def lease_keepalive(self, lease: int, *, deadline_s: float = DEFAULT_DEADLINE_S) -> float:
        """See `Store.lease_keepalive`."""
        return (await self._ready("a lease keepalive", deadline_s)).keepalive(lease)

    async def lease_revoke(self, lease: int, *, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        """See `Store.lease_revoke`."""
        (await self._ready("a lease revocation", deadline_s)).revoke(lease)

    async def watch(self, prefix: str, *, after_revision: int) -> AsyncGenerator[int, None]:
        """See `Store.watch`."""
        seen = after_revision
        closed = asyncio.ensure_future(self._closed.wait())
        try:
            while not self._closed.is_set():
                changes = self._backend.changes()
                if self._backend.available and self._backend.changed_after(prefix, seen):
                    seen = self._backend.revision
                    yield seen
                    continue
                changed = asyncio.ensure_future(changes.wait())
                try:
                    await asyncio.wait(
                        (changed, closed),
                        timeout=self._backend.next_expiry_s(),
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                finally:
                    changed.cancel()
        finally:
            closed.cancel()
            with suppress(asyncio.CancelledError):
                await closed

    async def close(self) -> None:
        """See `Store.close`."""
        self._closed.set()
