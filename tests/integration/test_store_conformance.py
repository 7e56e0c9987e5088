"""Memory and etcd behave alike: one suite, run on both (etcd is a real child process)."""

import asyncio
import signal
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing
from typing import Any

import pytest

from elasticep.control.store import (
    CreateRevision,
    Delete,
    LeaseLost,
    MemoryBackend,
    MemoryStore,
    ModRevision,
    Put,
    Store,
    StoreRefused,
)
from elasticep.control.store import etcd as etcd_module
from elasticep.control.store.etcd import EtcdStore, rpc
from elasticep.errors import Unavailable
from elasticep.testing.etcd import LocalEtcd
from elasticep.testing.processes import stop

LIMIT_S = 60.0
Scenario = Callable[["Bench"], Coroutine[Any, Any, None]]


class Bench:
    """A store under test, with the faults that the suite needs."""

    def __init__(self, etcd: LocalEtcd | None) -> None:
        self.etcd = etcd
        self.memory = MemoryBackend()
        self._opened: list[Store] = []

    def store(self) -> Store:
        store: Store = EtcdStore(self.etcd.endpoints) if self.etcd else MemoryStore(self.memory)
        self._opened.append(store)
        return store

    def stop_answering(self) -> None:
        if self.etcd:
            stop(self.etcd.members[0].pid)
        self.memory.set_available(False)

    def answer_again(self) -> None:
        if self.etcd:
            self.etcd.members[0].signal(signal.SIGCONT)
        self.memory.set_available(True)

    def crash(self) -> None:
        if self.etcd:
            self.etcd.members[0].kill()
        self.memory.set_available(False)

    def restart(self) -> None:
        if self.etcd:
            self.etcd.restart(self.etcd.members[0])
            self.etcd.wait_ready()
        self.memory.set_available(True)

    async def compact(self, store: Store, revision: int) -> None:
        if isinstance(store, EtcdStore):
            request = rpc.CompactionRequest(revision=revision, physical=True)
            await store._endpoint().kv.Compact(request, timeout=60)
        self.memory.compact()

    async def close(self) -> None:
        for store in self._opened:
            await store.close()


@pytest.fixture(scope="module")
def etcd() -> Iterator[LocalEtcd]:
    with LocalEtcd() as started:
        yield started


@pytest.fixture(params=["memory", "etcd"])
def run(request: pytest.FixtureRequest) -> Callable[[Scenario], None]:
    etcd = request.getfixturevalue("etcd") if request.param == "etcd" else None

    async def limited(scenario: Scenario) -> None:
        bench = Bench(etcd)
        try:
            async with asyncio.timeout(LIMIT_S):
                await scenario(bench)
        finally:
            await bench.close()

    return lambda scenario: asyncio.run(limited(scenario))


Run = Callable[[Scenario], None]
_names = iter(range(10**6))


def fresh() -> str:
    """A prefix that no other test uses."""
    return f"/test/{next(_names)}/"


async def notice(watch: AsyncGenerator[int, None]) -> int:
    return await asyncio.wait_for(anext(watch), LIMIT_S)


def test_what_is_put_can_be_read_with_its_revisions(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        store, key = bench.store(), fresh() + "a"
        assert await store.get(key) is None
        first = await store.put(key, b"1")
        second = await store.put(key, b"\x00\xff")
        item = await store.get(key)
        assert item is not None
        assert (item.key, item.value, item.lease) == (key, b"\x00\xff", 0)
        assert (item.create_revision, item.mod_revision) == (first, second)
        assert second == first + 1

    run(scenario)


def test_a_list_holds_the_prefix_in_order_and_nothing_else(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        store, prefix = bench.store(), fresh()
        for name in ("b", "a", "a/x", "c"):
            await store.put(prefix + name, name.encode())
        last = await store.put(prefix[:-1] + "-beside", b"no")
        snapshot = await store.list(prefix)
        assert [item.key for item in snapshot.items] == [prefix + n for n in ("a", "a/x", "b", "c")]
        assert snapshot.revision >= last
        assert (await store.list(fresh())).items == ()

    run(scenario)


def test_a_list_may_hold_more_than_a_message_and_is_of_one_revision(
    etcd: LocalEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = "grpc.max_receive_message_length"
    others = tuple(option for option in etcd_module._OPTIONS if option[0] != limit)
    monkeypatch.setattr(etcd_module, "_OPTIONS", (*others, (limit, 2_000_000)))
    monkeypatch.setattr(etcd_module, "_PAGE", 3)
    prefix, values = fresh(), [bytes([n]) * 500_000 for n in range(10)]

    async def scenario() -> None:
        store, other = EtcdStore(etcd.endpoints), EtcdStore(etcd.endpoints)
        for number, value in enumerate(values):
            await store.put(f"{prefix}{number}", value)
        read, pages = store._read, 0

        async def changed_between(what: str, deadline_s: float, call: Any) -> Any:
            nonlocal pages
            pages += 1
            reply = await read(what, deadline_s, call)
            if pages in (1, 2):
                await other.put(f"{prefix}{pages * 4}", b"changed")
            if pages == 2:  # and what the list is of is forgotten, once
                endpoint = other._endpoint()
                compact = rpc.CompactionRequest(revision=reply.header.revision, physical=True)
                await endpoint.kv.Compact(compact)
            return reply

        monkeypatch.setattr(store, "_read", changed_between)
        snapshot = await store.list(prefix, deadline_s=LIMIT_S)
        expected = {f"{prefix}{n}": value for n, value in enumerate(values)}
        expected |= {f"{prefix}4": b"changed", f"{prefix}8": b"changed"}
        assert {item.key: item.value for item in snapshot.items} == expected
        assert all(item.mod_revision <= snapshot.revision for item in snapshot.items)
        assert pages == 2 + 1 + 4, "two, one that was refused, and all anew"
        await store.close()
        await other.close()

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


def test_a_transaction_applies_all_or_nothing(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        store, prefix = bench.store(), fresh()
        a, b = prefix + "a", prefix + "b"
        done = await store.transact((CreateRevision(a, 0),), (Put(a, b"1"), Put(b, b"1")))
        assert done.succeeded
        item = await store.get(a)
        assert item is not None
        assert item.mod_revision == done.revision

        refused = await store.transact((CreateRevision(a, 0),), (Put(a, b"2"), Delete(b)))
        assert not refused.succeeded
        both = (CreateRevision(a, item.create_revision), ModRevision(a, item.mod_revision - 1))
        assert not (await store.transact(both, (Put(a, b"2"),))).succeeded
        assert [i.value for i in (await store.list(prefix)).items] == [b"1", b"1"]

        both = (CreateRevision(a, item.create_revision), ModRevision(a, item.mod_revision))
        changed = await store.transact(both, (Put(a, b"2"), Delete(b)))
        assert changed.succeeded
        assert changed.revision == done.revision + 1
        assert [i.value for i in (await store.list(prefix)).items] == [b"2"]

        await store.transact((), (Delete(a),))
        created = await store.transact((ModRevision(a, 0),), (Put(a, b"3"),))
        again = await store.get(a)
        assert again is not None
        assert created.succeeded
        assert again.create_revision == created.revision

    run(scenario)


def test_of_two_that_create_a_key_one_succeeds(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        key = fresh() + "leader"
        stores = [bench.store() for _ in range(4)]
        outcomes = await asyncio.gather(
            *(
                store.transact((CreateRevision(key, 0),), (Put(key, str(i).encode()),))
                for i, store in enumerate(stores)
            )
        )
        assert sum(outcome.succeeded for outcome in outcomes) == 1

    run(scenario)


def test_a_transaction_that_etcd_would_refuse_is_refused(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        store, prefix = bench.store(), fresh()
        for operations in (
            [Put(prefix + "a", b""), Delete(prefix + "a")],
            [Put(f"{prefix}{i}", b"") for i in range(200)],
            [Put(prefix + "big", bytes(1_500_000))],
            [Put(prefix + "a", b"", lease=987_654_321)],
        ):
            with pytest.raises((StoreRefused, LeaseLost)):
                await store.transact((), operations)
        assert (await store.list(prefix)).items == ()

    run(scenario)


def test_a_lease_holds_its_keys_while_it_is_renewed(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        store, key = bench.store(), fresh() + "held"
        lease = await store.lease_grant(3)
        revision = await store.put(key, b"", lease=lease)
        granted = time.monotonic()
        async with aclosing(store.watch(key, after_revision=revision)) as watch:
            gone = asyncio.ensure_future(anext(watch))
            while time.monotonic() - granted < 4.5:
                assert await store.lease_keepalive(lease) >= 1
                await asyncio.wait({gone}, timeout=0.3)
            assert not gone.done(), "a lease that was renewed expired"
            await asyncio.wait_for(gone, LIMIT_S)
        assert await store.get(key) is None
        with pytest.raises(LeaseLost):
            await store.lease_keepalive(lease)

    run(scenario)


def test_a_revoked_lease_takes_its_keys_along(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        store, prefix = bench.store(), fresh()
        lease = await store.lease_grant(60)
        await store.put(prefix + "leased", b"", lease=lease)
        await store.put(prefix + "free", b"")
        await store.lease_revoke(lease)
        assert [item.key for item in (await store.list(prefix)).items] == [prefix + "free"]
        with pytest.raises(LeaseLost):
            await store.lease_keepalive(lease)
        await store.lease_revoke(lease)

    run(scenario)


def test_a_watch_tells_puts_and_deletions_under_its_prefix_only(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        store, writer, prefix = bench.store(), bench.store(), fresh()
        revision = await writer.put(prefix + "a", b"1")
        async with aclosing(store.watch(prefix, after_revision=revision)) as watch:
            await writer.put(fresh() + "elsewhere", b"")
            wanted = await writer.put(prefix + "a", b"2")
            assert await notice(watch) == wanted
            wanted = (await writer.transact((), (Delete(prefix + "a"),))).revision
            assert await notice(watch) == wanted

    run(scenario)


@pytest.mark.parametrize("change", ["put", "delete"])
def test_a_watch_that_begins_late_hears_of_what_it_missed(run: Run, change: str) -> None:
    async def scenario(bench: Bench) -> None:
        store, prefix = bench.store(), fresh()
        revision = await store.put(prefix + "a", b"1")
        operation = Put(prefix + "a", b"2") if change == "put" else Delete(prefix + "a")
        await store.transact((), (operation,))
        await store.put(fresh(), b"")
        async with aclosing(store.watch(prefix, after_revision=revision)) as watch:
            assert await notice(watch) > revision

    run(scenario)


def test_a_watch_survives_compaction_of_what_it_missed(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        store, prefix = bench.store(), fresh()
        revision = await store.put(prefix + "a", b"1")
        await store.transact((), (Delete(prefix + "a"),))
        await bench.compact(store, await store.put(fresh(), b""))
        async with aclosing(store.watch(prefix, after_revision=revision)) as watch:
            assert await notice(watch) > revision
            wanted = await store.put(prefix + "b", b"")
            while await notice(watch) < wanted:
                pass

    run(scenario)


def test_a_watch_survives_a_crash_of_the_store(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        store, prefix = bench.store(), fresh()
        revision = await store.put(prefix + "a", b"1")
        async with aclosing(store.watch(prefix, after_revision=revision)) as watch:
            wanted = await store.put(prefix + "a", b"2")
            assert await notice(watch) == wanted
            waiting = asyncio.ensure_future(anext(watch))
            bench.crash()
            bench.restart()
            wanted = await store.put(prefix + "b", b"")
            assert await asyncio.wait_for(waiting, LIMIT_S) >= wanted
        assert [item.key for item in (await store.list(prefix)).items] == [
            prefix + "a",
            prefix + "b",
        ]

    run(scenario)


def test_every_call_keeps_its_deadline(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        store, key = bench.store(), fresh() + "a"
        await store.put(key, b"1")
        lease = await store.lease_grant(60)
        bench.stop_answering()
        try:
            for call in (
                lambda: store.get(key, deadline_s=0.2),
                lambda: store.list(key, deadline_s=0.2),
                lambda: store.put(key, b"2", deadline_s=0.2),
                lambda: store.transact((), (Delete(key),), deadline_s=0.2),
                lambda: store.lease_grant(5, deadline_s=0.2),
                lambda: store.lease_keepalive(lease, deadline_s=0.2),
                lambda: store.lease_revoke(lease, deadline_s=0.2),
            ):
                began = time.monotonic()
                with pytest.raises(Unavailable, match=r"within 0\.2 s"):
                    await call()
                assert time.monotonic() - began < 10.0
        finally:
            bench.answer_again()
        await store.put(key, b"3")  # and it works again

    run(scenario)


def test_a_store_that_is_absent_is_unavailable() -> None:
    async def scenario() -> None:
        store = EtcdStore(["127.0.0.1:1"])
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
            await store.get("/a", deadline_s=0.2)
        await store.close()

    asyncio.run(scenario())


def test_reads_and_writes_go_on_when_the_leading_member_dies() -> None:
    async def scenario(etcd: LocalEtcd) -> None:
        store = EtcdStore(etcd.endpoints)
        try:
            revision = await store.put("/a", b"1")
            async with aclosing(store.watch("/a", after_revision=revision)) as watch:
                waiting = asyncio.ensure_future(anext(watch))
                leader = etcd.leader()
                leader.kill()
                item = await store.get("/a", deadline_s=60)
                assert item is not None
                assert item.value == b"1"
                done = False
                while not done:  # a write is sent once: whoever wants more tries again
                    try:
                        await store.put("/a", b"2", deadline_s=2)
                        done = True
                    except Unavailable:
                        pass
                assert await asyncio.wait_for(waiting, LIMIT_S) > revision
                etcd.restart(leader)
                etcd.wait_ready()
        finally:
            await store.close()

    with LocalEtcd(3) as etcd:
        asyncio.run(asyncio.wait_for(scenario(etcd), 2 * LIMIT_S))
