"""Which process leads, and when another may know that it is gone."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

import pytest
import structlog

from elasticep.control import election, process
from elasticep.control.election import Candidate, Election
from elasticep.control.records import LEADER
from elasticep.control.store import Delete, KeyValue, MemoryStore, Put
from elasticep.control.store.memory import MemoryBackend
from elasticep.errors import Unavailable


def test_a_process_is_gone_when_it_is_and_not_before() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    name = process.identity(child.pid)
    assert process.is_local(name)
    assert not process.is_gone(name)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process.is_gone(name), "a zombie does nothing any more"
    child.wait()
    assert process.is_gone(name)
    assert child.stdin is not None
    child.stdin.close()


def test_a_pid_that_was_given_out_anew_is_another_process() -> None:
    place, pid, started = process.identity().rsplit(":", 2)
    assert not process.is_gone(f"{place}:{pid}:{started}")
    assert process.is_gone(f"{place}:{pid}:{int(started) - 1}")


def test_a_process_that_is_hidden_from_this_user_is_not_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As by ProtectProc=invisible in the unit, of a controller that another user runs."""
    place, _, started = process.identity().rsplit(":", 2)

    def denied(pid: int, number: int) -> None:
        assert number == 0
        raise PermissionError

    monkeypatch.setattr(process, "_started", lambda pid: "")
    assert process.is_gone(f"{place}:{2**22 + 1}:{started}"), "beyond any pid"
    monkeypatch.setattr(os, "kill", denied)
    assert not process.is_gone(f"{place}:{2**22 + 1}:{started}")


def test_nothing_is_known_of_processes_elsewhere() -> None:
    _, pid, started = process.identity().rsplit(":", 2)
    for name in ("", "x", f"other-boot:1:{pid}:{started}", f":{pid}:0"):
        assert not process.is_local(name)
        assert not process.is_gone(name)


def test_a_candidate_survives_the_store_and_rubbish_is_nobody() -> None:
    me = Candidate.new("c", "host:1")
    assert Candidate.decode(me.encode()) == me
    assert me.process == process.identity()
    assert Candidate.new("c", "host:1").id != me.id
    for value in (b"", b"{}", b"[1]", b'{"name": 1}', b"\xff"):
        assert Candidate.decode(value) == Candidate("unknown", "", "")


@pytest.mark.parametrize("when", ["before", "while it is waited for"])
def test_nobody_waits_for_the_lease_of_a_process_that_is_gone(when: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    holder = Candidate("old", "host:1", "1", process.identity(child.pid))

    def die() -> None:
        child.kill()
        child.communicate()

    async def scenario() -> None:
        backend = MemoryBackend(clock=lambda: 0.0)  # no lease ever ends
        store = MemoryStore(backend)
        lease = await store.lease_grant(60, deadline_s=60.0)
        await store.transact((), (Put(LEADER, holder.encode(), lease),), deadline_s=60.0)
        standby = Election(store, Candidate.new("new", "host:2"), 60, structlog.get_logger())
        if when == "before":
            die()
        async with asyncio.timeout(60.0):
            campaign = asyncio.ensure_future(standby.campaign())
            if when != "before":
                await waits(lambda: standby.leader is not None, "it stands by")
                assert not campaign.done()
                die()
            lead = await campaign
        held = await store.get(LEADER, deadline_s=60.0)
        assert held is not None
        assert Candidate.decode(held.value).name == "new"
        assert held.create_revision == lead.revision

    try:
        asyncio.run(scenario())
    finally:
        die()


class Deaf(MemoryStore):
    """Reads have no answer as often as `missed` says, and then they have."""

    missed = 0

    async def get(self, key: str, *, deadline_s: float = 5.0) -> KeyValue | None:
        if self.missed:
            self.missed -= 1
            raise Unavailable("a test")
        return await super().get(key, deadline_s=deadline_s)


@pytest.mark.parametrize("missed", [0, 2])
def test_a_leader_whose_key_was_taken_away_gives_up_without_writing_anything(missed: int) -> None:
    async def scenario() -> None:
        backend = MemoryBackend(clock=lambda: 0.0)  # no lease ever ends
        store = Deaf(backend)
        leader = Election(store, Candidate.new("c", "host:1"), 60, structlog.get_logger())
        lead = await leader.campaign()
        holding = asyncio.ensure_future(leader.hold(lead))
        await waits(lambda: bool(backend.changes()._waiters), "it watches its key")
        store.missed = missed
        await store.transact((), (Delete(LEADER),), deadline_s=60.0)
        async with asyncio.timeout(60.0):
            await holding

    asyncio.run(scenario())


class Silent(MemoryStore):
    """Its watches never tell of anything, as one on an etcd member whose host is gone."""

    watching = False

    async def watch(self, prefix: str, *, after_revision: int) -> AsyncGenerator[int, None]:
        self.watching = True
        await asyncio.Event().wait()
        yield 0


def test_a_standby_whose_watch_is_silent_takes_over_all_the_same() -> None:
    async def scenario() -> None:
        backend = MemoryBackend()
        log = structlog.get_logger()
        elsewhere = Candidate("old", "host:1", "1", "another boot:1:2:3")
        lease = backend.grant(60)
        backend.transact((), (Put(LEADER, elsewhere.encode(), lease),))
        store = Silent(backend)
        standby = Election(store, Candidate.new("new", "host:2"), 1, log)
        campaign = asyncio.ensure_future(standby.campaign())
        await waits(lambda: store.watching, "it stands by")
        backend.revoke(lease)
        async with asyncio.timeout(60.0):
            assert (await campaign).revision == backend.revision

    asyncio.run(scenario())


async def waits(condition: Callable[[], bool], what: str) -> None:
    """Until the condition holds, for a minute."""
    event = asyncio.Event()
    async with asyncio.timeout(60.0):
        while not condition():
            with suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), 0.005)
    assert condition(), what


def test_a_standby_says_once_that_the_store_is_lost_and_once_that_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its watch is silent meanwhile, and nobody else asks for anything."""
    monkeypatch.setattr(election, "_CALL_S", 0.02)
    heard = structlog.testing.LogCapture()
    answers: list[bool] = []
    lost: list[bool] = []

    def events() -> list[str]:
        return [entry["event"] for entry in heard.entries]

    async def scenario() -> None:
        backend = MemoryBackend()
        log = structlog.wrap_logger(None, processors=[heard])

        def candidate(name: str) -> Election:
            told = answers.append if name == "standby" else lambda answers: None
            me = Candidate.new(name, name)
            ttl_s = 1 if name == "standby" else 60
            return Election(MemoryStore(backend), me, ttl_s, log, on_store=told)

        leader, standby = candidate("leader"), candidate("standby")
        holding = asyncio.ensure_future(leader.hold(await leader.campaign()))
        standing_by = asyncio.ensure_future(standby.campaign())
        await waits(lambda: standby.leader is not None, "it stands by")
        holding.cancel()  # the store alone is to tell
        await asyncio.gather(holding, return_exceptions=True)
        heard.entries.clear()
        for round_ in (1, 2):
            backend.set_available(False)
            await waits(lambda: answers[-3:] == [False] * 3, "asked again and again")
            lost.append(standby.store_lost)
            assert events().count("store.lost") == round_
            backend.set_available(True)
            await waits(lambda: events()[-1] == "store.back", "it is back")
            lost.append(standby.store_lost)
            assert heard.entries[-1]["away_ms"] > 0
            assert answers[-1]
        assert events() == ["store.lost", "store.back"] * 2
        assert lost == [True, False] * 2
        standing_by.cancel()
        await asyncio.gather(standing_by, return_exceptions=True)

    asyncio.run(scenario())
