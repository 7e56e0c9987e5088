"""Kinds of faults that users of other systems reported, on real processes."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import elasticep
from elasticep.control import records
from elasticep.control.store.etcd import EtcdStore
from elasticep.errors import AttachError
from elasticep.group import Timeouts
from elasticep.testing.cluster import Cluster, daemon_name
from elasticep.testing.decoding import Fleet, light_config
from elasticep.testing.processes import stop

pytest.importorskip("torch")
SLACK_S = 10  # of a busy machine, and far less than an engine waits that is not told otherwise
QUICK = Timeouts(
    suspect_after_ms=100, hang_timeout_ms=3_000, exchange_timeout_ms=3_000, node_timeout_ms=15_000
)


@pytest.fixture
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """Engines of a group with the given number of nodes, seats, first ranks and time-outs."""
    nodes, ranks, initial, timeouts = request.param
    config = light_config("case", ranks, initial, timeouts=timeouts)
    with Cluster(group="case", ranks=ranks, nodes=nodes) as cluster, Fleet(cluster, config) as it:
        yield it
        it.check()


def scene(nodes: int, ranks: int, initial: int, timeouts: Timeouts | None = None) -> object:
    slow = Timeouts(node_timeout_ms=15_000, hang_timeout_ms=10_000)
    given = (nodes, ranks, initial, timeouts or slow)
    return pytest.mark.parametrize("fleet", [given], indirect=True, ids=[f"{ranks}-ranks"])


@scene(3, 3, 2)  # type: ignore[operator]
def test_case_03_whoever_is_gone_is_named_within_the_deadline(fleet: Fleet) -> None:
    fleet.open([0, 1])
    fleet.members([0, 1])
    # A daemon that is gone, and one that is there and does not answer.
    name = daemon_name(2)
    pid = fleet.cluster.pids[name]
    socket = fleet.cluster.socket_of(2)
    stop(pid)
    begin = time.monotonic()
    with pytest.raises(AttachError, match="rank 2 of group 'case'"):
        elasticep.attach(rank=2, socket=socket, config=fleet.config, timeout=0.5)
    assert time.monotonic() - begin < 0.5 + 2 + SLACK_S
    os.kill(pid, signal.SIGCONT)
    fleet.cluster.kill(name, hold=True)
    fleet.cluster.wait_for(lambda: name not in fleet.cluster.pids, 60, "the daemon is gone")
    begin = time.monotonic()
    with pytest.raises(AttachError, match=socket):
        elasticep.attach(rank=2, socket=socket, config=fleet.config, timeout=0.5)
    assert time.monotonic() - begin < 0.5 + 2 + SLACK_S
    fleet.cluster.start_again(name)
    fleet.cluster.wait_for(lambda: name in fleet.cluster.pids, 60, "the daemon is back")
    # A joiner cannot get the memory of a peer whose daemon does not answer: said by name, and the
    # others go on; when the daemon answers again, the next joiner comes in.
    peer = fleet.cluster.pids[daemon_name(0)]
    stop(peer)
    (joiner,) = fleet.open([2])
    fleet.wait(lambda: "view.not_staged" in fleet.cluster.log(name), "the join fails")
    told = next(x for x in fleet.cluster.log(name).splitlines() if "view.not_staged" in x)
    assert "rank 0" in told
    assert "memory of rank 0" in fleet.ended(2, "fenced")["why"]
    assert joiner.complete() == []
    fleet.progress([0, 1])
    os.kill(peer, signal.SIGCONT)
    fleet.open([2])
    fleet.members(range(3))


@scene(2, 3, 3, QUICK)  # type: ignore[operator]
def test_case_07_first_step_slow(fleet: Fleet) -> None:
    # Longer than the hang and exchange time-outs: one rank before its first exchange.
    fleet.open([0, 1])
    fleet.open([2], slow_s=6.0, warm=True)
    fleet.members(range(3))
    fleet.progress(range(3))
    assert [e.incarnation for e in fleet.engines(range(3))] == [1, 1, 1]
    assert {e.epoch for e in fleet.engines(range(3))} == {1}
    # What the others had of it is a torn step, repeated, and no time-out after the barrier.
    assert fleet.engine(0).torn()


@scene(2, 5, 3)  # type: ignore[operator]
def test_case_25_scale_then_fault_then_scale(fleet: Fleet) -> None:
    fleet.open(range(3))
    fleet.members(range(3))
    fleet.open([3, 4])
    fleet.members(range(5))
    os.kill(fleet.engine(1).worker, signal.SIGKILL)
    fleet.members([0, 2, 3, 4])
    torn = sum(len(e.torn()) for e in fleet.engines([0, 2, 3, 4]))
    fleet.progress([0, 2, 3, 4], 20)
    assert sum(len(e.torn()) for e in fleet.engines([0, 2, 3, 4])) == torn, "one fault, one repeat"
    epoch = fleet.drain([0, 4])  # not just the last
    fleet.members([2, 3])
    for rank in (0, 4):
        fenced = fleet.ended(rank, "fenced")
        assert (fenced["why"], fenced["epoch"]) == ("drained: a test", epoch)
    fleet.undrain([0, 4])
    fleet.open([0, 1, 4])
    fleet.members(range(5))
    fleet.progress(range(5), 20)


def descriptors(pids: list[int]) -> dict[str, int]:
    """Open descriptors and shared memory mappings of these processes, in all."""
    kinds = {"fds": 0, "memory": 0}
    for pid in pids:
        kinds["fds"] += len(os.listdir(f"/proc/{pid}/fd"))
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        kinds["memory"] += sum("memfd:" in line for line in lines)
    return kinds


def keys(fleet: Fleet) -> list[str]:
    """Keys in the store, without the history, which has a bound of its own, and without the loads,
    which come when their first window is over.
    """

    async def read() -> list[str]:
        store = EtcdStore(fleet.cluster.etcd_endpoints)
        try:
            snapshot = await store.list(records.PREFIX)
        finally:
            await store.close()
        passing = ("/history/", "/loads")
        return sorted(i.key for i in snapshot.items if not any(part in i.key for part in passing))

    return asyncio.run(read())


@scene(2, 3, 2)  # type: ignore[operator]
def test_case_26_twenty_joins_and_leaves_leave_nothing_over(fleet: Fleet) -> None:
    fleet.open([0, 1])
    fleet.members([0, 1])

    def turn() -> None:
        fleet.open([2])
        fleet.members(range(3))
        fleet.engine(2).order("leave")
        fleet.members([0, 1])
        fleet.ended(2, "left")
        fleet.wait(lambda: fleet.engine(2).gone, "the engine's process has ended")
        # Its seat is ready anew: the old worker is gone, the next one is there.
        fleet.wait(
            lambda: (
                fleet.seat(2).seat.incarnation == fleet.engine(2).incarnation + 1
                and fleet.seat(2).worker_pid > 0
            ),
            "the seat is ready under the next incarnation",
        )

    def left() -> tuple[int, dict[str, int], list[str]]:
        below = fleet.cluster.processes()
        lasting = [*fleet.cluster.pids.values(), *(e.pid for e in fleet.engines([0, 1]))]
        lasting += [e.worker for e in fleet.engines([0, 1])]
        return len(below), descriptors(lasting), keys(fleet)

    for _ in range(4):  # until everything that is kept is there
        turn()
    processes, held, stored = left()
    for _ in range(16):
        turn()
    assert fleet.engine(2).incarnation == 20
    fleet.wait(lambda: left()[0] <= processes, f"no more than {processes} processes")
    fleet.wait(
        lambda: all(count <= held[kind] + 2 for kind, count in left()[1].items()),
        f"no more descriptors and mappings than {held}",
    )
    fleet.wait(lambda: left()[2] == stored, f"no other keys than {stored}")


@scene(2, 3, 3, Timeouts(node_timeout_ms=4_000, hang_timeout_ms=10_000))  # type: ignore[operator]
def test_expelled_engine_completes_nothing_also_when_no_daemon_can_tell_it(fleet: Fleet) -> None:
    fleet.open(range(3))
    fleet.members(range(3))
    fleet.progress(range(3))
    daemon = fleet.cluster.pids[daemon_name(0)]  # of rank 0 alone
    engine = fleet.engine(0)
    stop(daemon)
    stopped_ns = engine.signal(signal.SIGSTOP)
    fleet.members([1, 2])
    engine.signal(signal.SIGCONT)
    assert "went on without it" in fleet.ended(0, "fenced")["why"]
    assert fleet.completed_alone(0, stopped_ns, [1, 2]) == []
    os.kill(daemon, signal.SIGCONT)
    fleet.open([0])
    fleet.members(range(3))
    assert fleet.engine(0).incarnation == 2
