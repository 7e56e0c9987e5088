"""The store on etcd: its own stubs on grpc.aio, several endpoints, and a watch that resumes.

Reads move on to the next endpoint until their deadline. A write is sent once: when its outcome is
unknown the caller hears `Unavailable` and reads. `etcd3.watch` is not used: it spins during an
outage and never resumes.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import grpc
import grpc.aio

from elasticep.control.store import etcd3_shim
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
from elasticep.errors import ConfigError, Unavailable

rpc, _stubs = etcd3_shim.load()

_ATTEMPT_S = 1.5  # a read asks the next endpoint after this
_BACKOFF_S = (0.05, 1.0)  # first and longest pause of a watch that cannot reach the store
_IDLE_CHECK_S = 15.0  # a silent watch asks for the revision this often
_PAGE = 64  # keys; so many of our groups in a row have less than 64 MB in all
_LEADER = (("hasleader", "true"),)  # a member cut off from the others ends its watches
_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),  # below 5 s etcd answers too_many_pings
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.use_local_subchannel_pool", 1),
)
_RETRY = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
)
_T = TypeVar("_T")


class _Endpoint:
    """Channel and stubs of one etcd member."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None) -> None:
        self.address = address
        if credentials is None:
            self.channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        else:
            self.channel = grpc.aio.secure_channel(address, credentials, options=_OPTIONS)
        self.kv = _stubs.KVStub(self.channel)
        self.lease = _stubs.LeaseStub(self.channel)
        self.watch = _stubs.WatchStub(self.channel)


class EtcdStore:
    """A client of an etcd cluster; see `elasticep.control.store.base.Store`.

    Args:
        endpoints: "host:port" of the members.
        tls: PEM (key, cert, ca) for mutual TLS, or None.
    """

    def __init__(
        self, endpoints: Sequence[str], *, tls: tuple[bytes, bytes, bytes] | None = None
    ) -> None:
        if not endpoints:
            raise ConfigError("no etcd endpoint is given")
        credentials, self._silence = None, "no endpoint answers"
        if tls is not None:
            self._silence += ", or takes these certificates"
            key, cert, ca = tls
            credentials = grpc.ssl_channel_credentials(ca, key, cert)
        self._endpoints = [_Endpoint(address, credentials) for address in endpoints]
        self._current = 0
        self._closed = asyncio.Event()

    # ---- calls

    async def get(self, key: str, *, deadline_s: float = DEFAULT_DEADLINE_S) -> KeyValue | None:
        """See `Store.get`."""
        request = rpc.RangeRequest(key=key.encode())
        reply = await self._read(f"get {key}", deadline_s, lambda e: (e.kv.Range, request))
        return _key_value(reply.kvs[0]) if reply.kvs else None

    async def list(self, prefix: str, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Snapshot:
        """See `Store.list`. In pages of one revision: there may be more than a message takes."""
        end = time.monotonic() + deadline_s
        first, revision = prefix.encode(), 0
        items: list[KeyValue] = []
        while True:
            request = rpc.RangeRequest(
                key=first, range_end=_prefix_end(prefix), limit=_PAGE, revision=revision
            )
            try:
                reply = await self._read(
                    f"list {prefix}",
                    end - time.monotonic(),
                    lambda e, r=request: (e.kv.Range, r),  # type: ignore[misc]
                )
            except StoreRefused:
                if not revision:
                    raise
                first, revision = prefix.encode(), 0  # compacted meanwhile: from the beginning
                items.clear()
                continue
            revision = revision or int(reply.header.revision)
            items += map(_key_value, reply.kvs)
            if not reply.more:
                return Snapshot(revision, tuple(items))
            first = reply.kvs[-1].key + b"\0"

    async def put(
        self, key: str, value: bytes, *, lease: int = 0, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> int:
        """See `Store.put`."""
        committed = await self.transact((), (Put(key, value, lease),), deadline_s=deadline_s)
        return committed.revision

    async def transact(
        self,
        compares: Sequence[Compare],
        operations: Sequence[Operation],
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> Committed:
        """See `Store.transact`."""
        check_operations(operations)
        request = rpc.TxnRequest(
            compare=[_compare(compare) for compare in compares],
            success=[_operation(operation) for operation in operations],
        )
        reply = await self._write("a transaction", deadline_s, lambda e: (e.kv.Txn, request))
        return Committed(reply.succeeded, reply.header.revision)

    async def lease_grant(self, ttl_s: int, *, deadline_s: float = DEFAULT_DEADLINE_S) -> int:
        """See `Store.lease_grant`."""
        if ttl_s < 1:
            raise StoreRefused(f"a lease of {ttl_s} s; at least 1 s is needed")
        request = rpc.LeaseGrantRequest(TTL=ttl_s)
        # Granting twice leaves a lease that nobody uses and that expires, so this may be repeated.
        reply = await self._read(
            "a lease grant", deadline_s, lambda e: (e.lease.LeaseGrant, request)
        )
        return int(reply.ID)

    async def lease_keepalive(self, lease: int, *, deadline_s: float = DEFAULT_DEADLINE_S) -> float:
        """See `Store.lease_keepalive`."""
        request = rpc.LeaseKeepAliveRequest(ID=lease)

        async def renew(endpoint: _Endpoint, timeout_s: float) -> Any:
            call = endpoint.lease.LeaseKeepAlive(timeout=timeout_s)
            try:
                await call.write(request)
                reply = await call.read()
            finally:
                call.cancel()
            if reply is grpc.aio.EOF:
                raise Unavailable("etcd closed the lease stream")
            return reply

        reply = await self._attempts(f"a keepalive of lease {lease}", deadline_s, renew, True)
        if reply.TTL <= 0:
            raise LeaseLost(f"lease {lease} has expired; take a new one")
        return float(reply.TTL)

    async def lease_revoke(self, lease: int, *, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        """See `Store.lease_revoke`."""
        request = rpc.LeaseRevokeRequest(ID=lease)
        try:
            await self._read(
                f"a revocation of lease {lease}",
                deadline_s,
                lambda e: (e.lease.LeaseRevoke, request),
            )
        except LeaseLost:
            return

    async def close(self) -> None:
        """See `Store.close`."""
        self._closed.set()
        for endpoint in self._endpoints:
            await endpoint.channel.close()

    # ---- watching

    async def watch(self, prefix: str, *, after_revision: int) -> AsyncGenerator[int, None]:
        """See `Store.watch`."""
        seen, cluster = after_revision, 0
        pause_s = _BACKOFF_S[0]
        while not self._closed.is_set():
            try:
                header = await self._header(prefix)
                # Another cluster, or one with less history, was put in place of the old one.
                replaced = cluster not in (0, header.cluster_id) or header.revision < seen
                cluster = header.cluster_id
                if replaced:
                    seen = int(header.revision)
                    yield seen
                async with aclosing(self._stream(prefix, seen)) as stream:
                    async for revision in stream:
                        pause_s = _BACKOFF_S[0]
                        if revision > seen:
                            seen = revision
                            yield seen
            except (grpc.aio.AioRpcError, grpc.aio.UsageError, Unavailable):
                self._current += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), pause_s)
            pause_s = min(2 * pause_s, _BACKOFF_S[1])

    async def _header(self, prefix: str) -> Any:
        request = rpc.RangeRequest(key=prefix.encode(), count_only=True)
        what = f"a watch of {prefix}"
        return (await self._read(what, DEFAULT_DEADLINE_S, lambda e: (e.kv.Range, request))).header

    async def _stream(self, prefix: str, seen: int) -> AsyncGenerator[int, None]:
        """Revisions of changes after `seen`, until etcd ends the stream or it is long silent."""
        create = rpc.WatchCreateRequest(
            key=prefix.encode(), range_end=_prefix_end(prefix), start_revision=seen + 1
        )
        call = self._endpoint().watch.Watch(metadata=_LEADER)
        try:
            await call.write(rpc.WatchRequest(create_request=create))
            while True:
                try:
                    reply = await asyncio.wait_for(call.read(), _IDLE_CHECK_S)
                except TimeoutError:
                    return
                if reply is grpc.aio.EOF:
                    return
                if reply.canceled:
                    # What was compacted away may have been a deletion, so this counts as a change.
                    yield max(int(reply.header.revision), int(reply.compact_revision))
                    return
                if reply.events:
                    yield int(reply.header.revision)
        finally:
            call.cancel()

    # ---- endpoints, deadlines, errors

    def _endpoint(self) -> _Endpoint:
        return self._endpoints[self._current % len(self._endpoints)]

    async def _read(
        self, what: str, deadline_s: float, call: Callable[[_Endpoint], tuple[Any, Any]]
    ) -> Any:
        return await self._attempts(what, deadline_s, _unary(call), True)

    async def _write(
        self, what: str, deadline_s: float, call: Callable[[_Endpoint], tuple[Any, Any]]
    ) -> Any:
        return await self._attempts(what, deadline_s, _unary(call), False)

    async def _attempts(
        self,
        what: str,
        deadline_s: float,
        call: Callable[[_Endpoint, float], Awaitable[_T]],
        repeatable: bool,
    ) -> _T:
        end = time.monotonic() + deadline_s
        last = self._silence
        while not self._closed.is_set():
            left = end - time.monotonic()
            if left <= 0:
                break
            try:
                endpoint = await self._connected(left)
                left = max(0.001, end - time.monotonic())
                return await call(endpoint, min(left, _ATTEMPT_S) if repeatable else left)
            except grpc.aio.AioRpcError as error:
                last = f"{endpoint.address}: {error.code().name} {error.details()}"
                _refuse(what, error)
                self._current += 1
                if not repeatable:
                    break
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._closed.wait(), min(0.05, max(left, 0)))
            except TimeoutError:
                break
        raise Unavailable(
            f"the store did not answer {what} within {round(deadline_s, 2)} s "
            f"({', '.join(e.address for e in self._endpoints)}; {last})"
        )

    async def _connected(self, left_s: float) -> _Endpoint:
        """The current endpoint, or the first other that connects; `TimeoutError` when none does."""
        for turn in range(len(self._endpoints)):
            endpoint = self._endpoints[(self._current + turn) % len(self._endpoints)]
            if endpoint.channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY:
                self._current += turn
                return endpoint
        waits = {asyncio.ensure_future(e.channel.channel_ready()): e for e in self._endpoints}
        try:
            done, _ = await asyncio.wait(waits, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        for task in done:
            if task.exception() is None:
                self._current = self._endpoints.index(waits[task])
                return waits[task]
        raise TimeoutError


def _unary(
    call: Callable[[_Endpoint], tuple[Any, Any]],
) -> Callable[[_Endpoint, float], Awaitable[Any]]:
    async def send(endpoint: _Endpoint, timeout_s: float) -> Any:
        method, request = call(endpoint)
        return await method(request, timeout=timeout_s)

    return send


def _refuse(what: str, error: grpc.aio.AioRpcError) -> None:
    """Raise what a retry cannot change."""
    details = error.details() or ""
    if "lease not found" in details:
        raise LeaseLost(f"{what}: {details}") from None
    if "database space exceeded" in details:  # reads and renewals of leases go on
        raise Unavailable(
            f"etcd is full and takes no writes, such as {what} ({details}); compact and "
            "defragment it, then: etcdctl alarm disarm"
        ) from None
    if error.code() not in _RETRY:
        raise StoreRefused(f"etcd refused {what}: {error.code().name} {details}") from None


def _prefix_end(prefix: str) -> bytes:
    """The first key after all that begin with `prefix` (ASCII, not empty)."""
    raw = prefix.encode()
    return raw[:-1] + bytes([raw[-1] + 1])


def _key_value(kv: Any) -> KeyValue:
    return KeyValue(kv.key.decode(), kv.value, kv.create_revision, kv.mod_revision, kv.lease)


def _compare(compare: Compare) -> Any:
    if isinstance(compare, CreateRevision):
        return rpc.Compare(
            result=rpc.Compare.EQUAL,
            target=rpc.Compare.CREATE,
            key=compare.key.encode(),
            create_revision=compare.revision,
        )
    return rpc.Compare(
        result=rpc.Compare.EQUAL,
        target=rpc.Compare.MOD,
        key=compare.key.encode(),
        mod_revision=compare.revision,
    )


def _operation(operation: Operation) -> Any:
    if isinstance(operation, Put):
        return rpc.RequestOp(
            request_put=rpc.PutRequest(
                key=operation.key.encode(), value=operation.value, lease=operation.lease
            )
        )
    return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=operation.key.encode()))
