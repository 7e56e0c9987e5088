"""Controllers and stores that die while ranks decode, and while ranks die."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from elasticep.testing.cluster import CONTROLLER, Cluster, controller_name
from elasticep.testing.decoding import Fleet, light_config
from elasticep.testing.history import Recorder, Seen, violations

pytest.importorskip("torch")
RANKS = range(4)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """Four ranks on two nodes, decoding, under two controllers and three members of etcd."""
    cluster = Cluster(group="c", ranks=4, nodes=2, controllers=2, etcd_members=3)
    with cluster, Fleet(cluster, light_config("c", 4)) as fleet:
        fleet.open(RANKS)
        fleet.members(RANKS)
        yield fleet
        fleet.check()


def other(leader: str) -> str:
    """The controller that does not lead."""
    return next(name for name in map(controller_name, range(2)) if name != leader)


def kill_worker(fleet: Fleet, rank: int) -> int:
    """SIGKILL, as when a GPU is lost; returns the clock before, nanoseconds."""
    at_ns = time.monotonic_ns()
    os.kill(fleet.engine(rank).worker, signal.SIGKILL)
    return at_ns


def test_standby_finishes_the_view_change_of_a_leader_that_dies_with_a_worker(fleet: Fleet) -> None:
    leader = fleet.leader()
    fleet.cluster.kill(leader, 0, hold=True)
    os.kill(fleet.cluster.pids[leader], signal.SIGKILL)  # by ourselves: at the same moment
    kill_worker(fleet, 1)
    fleet.members({0, 2, 3})
    fleet.ended(1, "fenced")
    assert fleet.leader() == other(leader)
    # The standby is a whole controller: the seat comes back, and again when both are there.
    fleet.open([1])
    fleet.members(RANKS)
    assert fleet.engine(1).incarnation == 2
    fleet.cluster.start_again(leader)
    fleet.cluster.wait_for(lambda: leader in fleet.cluster.pids, 60, f"{leader} is back")
    fleet.cluster.kill(other(leader))
    assert fleet.leader()
    kill_worker(fleet, 3)
    fleet.members({0, 1, 2})


def test_death_of_the_etcd_leader_is_not_noticed_and_ranks_can_die_meanwhile(fleet: Fleet) -> None:
    fleet.cluster.etcd("kill-leader")
    torn = [len(e.torn()) for e in fleet.engines(RANKS)]
    fleet.progress(RANKS)
    assert [len(e.torn()) for e in fleet.engines(RANKS)] == torn
    kill_worker(fleet, 2)
    fleet.members({0, 1, 3})
    fleet.cluster.etcd("start")
    fleet.cluster.etcd("kill-leader")  # a second one: the first must have come back whole
    fleet.open([2])
    fleet.members(RANKS)


def test_without_controller_and_etcd_decoding_goes_on_and_a_death_waits_for_them(
    fleet: Fleet,
) -> None:
    for name in (CONTROLLER, controller_name(1)):
        fleet.cluster.kill(name, hold=True)
    fleet.cluster.etcd("kill-all")
    fleet.cluster.wait_for(
        lambda: not {CONTROLLER, controller_name(1)} & set(fleet.cluster.pids), 60, "both are down"
    )
    fleet.progress(RANKS, 20)
    survivors = [0, 1, 3]
    before = {e.rank: len(e.torn()) for e in fleet.engines(survivors)}
    killed_ns = kill_worker(fleet, 2)
    # They do not finish the step on garbage, and are told so long before the exchange times out
    # after 10 s, on both nodes.
    fleet.wait(
        lambda: all(
            len(e.torn()) > before[e.rank] or e.records("timeout") for e in fleet.engines(survivors)
        ),
        "the step of every survivor is torn",
    )
    for engine in fleet.engines(survivors):
        stopped_ns = engine.complete()[-1]["at_ns"]
        assert stopped_ns - killed_ns < 5e9, "decoding went on long after a member died"
    # They wait at the barrier, and say for what.
    fleet.wait(
        lambda: all(e.records("timeout") for e in fleet.engines(survivors)), "barriers to time out"
    )
    for engine in fleet.engines(survivors):
        assert "step barrier" in engine.records("timeout")[-1]["error"]
    fleet.wait(lambda: fleet.seat(0).wait != "", "the wait to be told")
    steps = {e.rank: len(e.complete()) for e in fleet.engines(survivors)}
    fleet.cluster.etcd("start")
    for name in (CONTROLLER, controller_name(1)):
        fleet.cluster.start_again(name)
    fleet.members(survivors)
    assert all(len(e.complete()) > steps[e.rank] for e in fleet.engines(survivors))
    fleet.open([2])
    fleet.members(RANKS)


def test_what_is_seen_of_views_is_linearizable_while_leaders_and_ranks_die(fleet: Fleet) -> None:
    with Recorder(fleet.cluster.controller_addresses(), "c") as recorder:
        for turn, rank in enumerate((1, 3, 1)):
            leader = fleet.leader()
            match turn:
                case 0:
                    fleet.cluster.kill(leader)
                case 1:  # stopped for longer than its lease: it must not answer from old memory
                    fleet.cluster.kill(leader, signal.SIGSTOP)
                case 2:
                    fleet.cluster.etcd("kill-leader")
            kill_worker(fleet, rank)
            fleet.members(set(RANKS) - {rank})
            if turn == 1:
                assert fleet.leader() == other(leader)
                fleet.cluster.kill(leader, signal.SIGCONT)
            fleet.open([rank])
            fleet.members(RANKS)
    for engine in fleet.all:
        for record in engine.complete():
            recorder.add(
                Seen(
                    who=f"engine {engine.rank}.{engine.incarnation}",
                    epoch=record["epoch"],
                    begun_ns=record["at_ns"],
                    at_ns=record["at_ns"],
                    fresh=False,
                )
            )
    history = recorder.history
    assert max(seen.epoch for seen in history) >= 7  # one view without, one with, three times
    assert {"watcher-0-0", "watcher-1-1", "reader-0", "reader-1"} <= {seen.who for seen in history}
    assert violations(history) == []
