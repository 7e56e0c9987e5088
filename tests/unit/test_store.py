"""What no conformance suite can see: the shim under etcd3, the memory store's clock, limits."""

import asyncio
import subprocess
import sys
from contextlib import aclosing

import pytest

from elasticep.control.store import (
    LeaseLost,
    MemoryBackend,
    MemoryStore,
    Put,
    StoreRefused,
    etcd3_shim,
)
from elasticep.control.store.base import check_operations
from elasticep.control.store.etcd import EtcdStore, _prefix_end
from elasticep.errors import ConfigError


def test_the_shim_makes_etcd3_importable_as_it_is() -> None:
    """In a process of its own, with warnings as errors: the messages, the stubs, the client."""
    code = """
from elasticep.control.store import etcd3_shim
messages, stubs = etcd3_shim.load()
assert etcd3_shim.load() == (messages, stubs)
request = messages.RangeRequest(key=b"a", sort_order=messages.RangeRequest.ASCEND)
assert messages.RangeRequest.FromString(request.SerializeToString()) == request
assert messages.TxnRequest(compare=[messages.Compare(key=b"k", create_revision=3)])
import etcd3
assert etcd3.etcdrpc.PutRequest is messages.PutRequest
assert etcd3.client and stubs.KVStub
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_another_etcd3_is_refused(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "kv_pb2.py").write_text("nothing of the kind")
    with pytest.raises(ConfigError, match=r"holds no schema; elasticep works with etcd3 0\.12\.0"):
        etcd3_shim._install(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install etcd3"):
        etcd3_shim._folder()


def test_a_prefix_ends_before_its_neighbour() -> None:
    assert _prefix_end("/a/") == b"/a0"
    assert b"/a/\xff" < _prefix_end("/a/") <= b"/a0"


def test_a_store_without_endpoints_is_refused() -> None:
    with pytest.raises(ConfigError, match="no etcd endpoint"):
        EtcdStore([])


def test_limits_are_checked_before_anything_is_sent() -> None:
    check_operations([Put(str(i), b"") for i in range(120)])
    with pytest.raises(StoreRefused, match="has 121 operations; at most 120"):
        check_operations([Put(str(i), b"") for i in range(121)])
    with pytest.raises(StoreRefused, match="names a key twice"):
        check_operations([Put("a", b""), Put("a", b"")])
    with pytest.raises(StoreRefused, match="the store takes 1400000"):
        check_operations([Put("a", bytes(1_400_001))])


def test_leases_in_memory_expire_by_the_given_clock() -> None:
    now = [0.0]
    backend = MemoryBackend(lambda: now[0])

    async def scenario() -> None:
        store = MemoryStore(backend)
        lease = await store.lease_grant(5)
        revision = await store.put("/a", b"", lease=lease)
        now[0] = 4.9
        assert await store.lease_keepalive(lease) == 5
        now[0] = 9.8
        assert await store.get("/a") is not None
        now[0] = 9.9
        assert await store.get("/a") is None
        with pytest.raises(LeaseLost):
            await store.lease_keepalive(lease)
        async with aclosing(store.watch("/a", after_revision=revision)) as watch:
            assert await asyncio.wait_for(anext(watch), 60) > revision
        with pytest.raises(StoreRefused, match="at least 1 s"):
            await store.lease_grant(0)

    asyncio.run(scenario())


def test_leases_do_not_expire_while_the_store_is_away() -> None:
    now = [0.0]
    backend = MemoryBackend(lambda: now[0])

    async def scenario() -> None:
        store = MemoryStore(backend)
        lease = await store.lease_grant(5)
        await store.put("/a", b"", lease=lease)
        backend.set_available(False)
        now[0] = 100.0
        backend.set_available(True)
        assert await store.get("/a") is not None
        now[0] = 105.0
        assert await store.get("/a") is None

    asyncio.run(scenario())


def test_closing_ends_watches() -> None:
    async def scenario() -> None:
        store = MemoryStore()
        revision = await store.put("/a", b"")
        watch = store.watch("/a", after_revision=revision)
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.wait({waiting}, timeout=0)
        await store.close()
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(waiting, 60)

    asyncio.run(scenario())
