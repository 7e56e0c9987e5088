"""One process's client of the shared store, on a network that loses requests and answers.

A request that was sent may be carried out long after its caller gave up or died, as with etcd. The
data and leases are `MemoryBackend`'s.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Final, TypeVar

from elasticep.control.records import LEADER, PREFIX
from elasticep.control.store import (
    Committed,
    CreateRevision,
    KeyValue,
    MemoryBackend,
    MemoryStore,
    Put,
    Snapshot,
)
from elasticep.control.store.base import DEFAULT_DEADLINE_S, Compare, Operation
from elasticep.errors import ElasticEPError, Unavailable
from elasticep.sim.checks import Checker
from elasticep.sim.loop import Process, VirtualLoop
from elasticep.sim.net import STORE, Net

_T = TypeVar("_T")
_GUARDED: Final = (f"{PREFIX}groups/", f"{PREFIX}nodes/")


class StoreServer:
    """The store as all processes share it.

    Attributes:
        backend: data and leases.
        slow_s: what a slow disk adds to every call.
        full: it takes no writes; reads and renewals of leases go on, as with etcd.
        trusting: planted bug: nobody's right to write is looked at.
    """

    def __init__(self, loop: VirtualLoop, net: Net, checker: Checker) -> None:
        self.loop = loop
        self.net = net
        self.checker = checker
        self.backend = MemoryBackend(loop.time)
        self.slow_s = 0.0
        self.full = False
        self._overflowed = False  # by the write that filled it, which it has
        self.trusting = False

    def transact(
        self, who: str, compares: Sequence[Compare], operations: Sequence[Operation]
    ) -> Committed:
        """Carry out a transaction, and see that no deposed leader's succeeds."""
        writes = any(isinstance(op, Put) for op in operations)
        self._overflowed = self._overflowed and self.full
        if self.full and writes and self._overflowed:
            raise Unavailable("the store is full")
        done = self._transact(who, compares, operations)
        if self.full and writes and done.succeeded:
            self._overflowed = True
            raise Unavailable("the store is full")  # and yet it was carried out
        return done

    def grant(self, ttl_s: int) -> int:
        """A lease."""
        if self.full:
            raise Unavailable("the store is full")
        return self.backend.grant(ttl_s)

    def _transact(
        self, who: str, compares: Sequence[Compare], operations: Sequence[Operation]
    ) -> Committed:
        guard = next((c for c in compares if c.key == LEADER), None)
        held = self.backend.get(LEADER)
        done = self.backend.transact(() if self.trusting else compares, operations)
        if done.succeeded and any(op.key.startswith(_GUARDED) for op in operations):
            leads = held.create_revision if held is not None else 0
            if not isinstance(guard, CreateRevision) or guard.revision != leads:
                self.checker.fail("I4", f"{who} wrote without the lead: {operations[0].key}")
            for op in operations:
                if isinstance(op, Put):
                    self.checker.written(op)
        return done


class SimStore:
    """A `Store`; see `elasticep.control.store.base.Store`.

    Args:
        server: the shared store.
        process: whose client it is.
    """

    def __init__(self, server: StoreServer, process: Process) -> None:
        self._server = server
        self._process = process

    async def _call(self, what: str, deadline_s: float, work: Callable[[], _T]) -> _T:
        """One request: on its way, carried out, answered; each may fail alone."""
        server, process = self._server, self._process
        answer: asyncio.Future[_T] = server.loop.create_future()
        if process.alive:
            server.loop.call_later(server.net.delay_s(), self._arrive, work, answer)
        else:
            raise Unavailable(f"{process.name} is gone")
        try:
            async with asyncio.timeout(deadline_s):
                return await answer
        except TimeoutError:
            raise Unavailable(f"the store did not answer {what} within {deadline_s:g} s") from None

    def _arrive(self, work: Callable[[], Any], answer: "asyncio.Future[Any]") -> None:
        server = self._server
        if not server.backend.available or not server.net.arrives(self._process.name, STORE):
            return
        if server.slow_s:
            server.loop.call_later(server.slow_s, self._carry_out, work, answer)
        else:
            self._carry_out(work, answer)

    def _carry_out(self, work: Callable[[], Any], answer: "asyncio.Future[Any]") -> None:
        server = self._server
        if not server.backend.available:
            return
        result: Any = None
        error: ElasticEPError | None = None
        try:
            result = work()
        except ElasticEPError as refused:
            error = refused
        server.loop.call_later(server.net.delay_s(), self._answer, answer, result, error)

    def _answer(
        self, answer: "asyncio.Future[Any]", result: Any, error: ElasticEPError | None
    ) -> None:
        if answer.done() or not self._server.net.arrives(self._process.name, STORE):
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)

    # ---- the protocol

    async def get(self, key: str, *, deadline_s: float = DEFAULT_DEADLINE_S) -> KeyValue | None:
        """See `Store.get`."""
        backend = self._server.backend
        return await self._call(f"get {key}", deadline_s, lambda: backend.get(key))

    async def list(self, prefix: str, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Snapshot:
        """See `Store.list`."""
        backend = self._server.backend
        return await self._call(f"list {prefix}", deadline_s, lambda: backend.list(prefix))

    async def put(
        self, key: str, value: bytes, *, lease: int = 0, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> int:
        """See `Store.put`."""
        return (await self.transact((), (Put(key, value, lease),), deadline_s=deadline_s)).revision

    async def transact(
        self,
        compares: Sequence[Compare],
        operations: Sequence[Operation],
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> Committed:
        """See `Store.transact`."""
        server, who = self._server, self._process.name
        work = lambda: server.transact(who, compares, operations)  # noqa: E731
        return await self._call("a transaction", deadline_s, work)

    async def lease_grant(self, ttl_s: int, *, deadline_s: float = DEFAULT_DEADLINE_S) -> int:
        """See `Store.lease_grant`."""
        server = self._server
        return await self._call("a lease grant", deadline_s, lambda: server.grant(ttl_s))

    async def lease_keepalive(self, lease: int, *, deadline_s: float = DEFAULT_DEADLINE_S) -> float:
        """See `Store.lease_keepalive`."""
        backend = self._server.backend
        return await self._call("a keepalive", deadline_s, lambda: backend.keepalive(lease))

    async def lease_revoke(self, lease: int, *, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        """See `Store.lease_revoke`."""
        backend = self._server.backend
        await self._call("a revocation", deadline_s, lambda: backend.revoke(lease))

    async def watch(self, prefix: str, *, after_revision: int) -> AsyncGenerator[int, None]:
        """See `Store.watch`."""
        server, name = self._server, self._process.name
        inner = MemoryStore(server.backend)
        async with aclosing(inner.watch(prefix, after_revision=after_revision)) as changes:
            async for revision in changes:
                await asyncio.sleep(server.net.delay_s() + server.slow_s)
                while not server.net.connected(name, STORE):
                    mended = server.loop.create_future()
                    server.net.healed.append(
                        lambda m=mended: None if m.done() else m.set_result(None)  # type: ignore[misc]
                    )
                    await mended
                yield revision

    async def close(self) -> None:
        """See `Store.close`."""
