"""Ranks and daemons that die, two at once, or stop, while the others decode."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from elasticep.group import Timeouts
from elasticep.testing.cluster import Cluster, daemon_name
from elasticep.testing.decoding import Fleet, light_config

pytest.importorskip("torch")
RANKS = range(4)
HANG_S = 6.0
TIMEOUTS = Timeouts(
    hang_timeout_ms=int(HANG_S * 1e3), exchange_timeout_ms=20_000, node_timeout_ms=15_000
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(group="r", ranks=4, nodes=2) as running:
        yield running


@pytest.fixture
def fleet(cluster: Cluster) -> Iterator[Fleet]:
    """Four ranks on two nodes, decoding."""
    with Fleet(cluster, light_config("r", 4, timeouts=TIMEOUTS)) as fleet:
        fleet.open(RANKS)
        fleet.members(RANKS)
        yield fleet
        for engine in fleet.engines(RANKS):
            engine.order("leave")
        fleet.wait(
            lambda: all(e.end is not None or e.gone for e in fleet.all), "all engines have left"
        )
        fleet.check()


def kill_worker(fleet: Fleet, rank: int) -> None:
    os.kill(fleet.engine(rank).worker, signal.SIGKILL)


def test_two_workers_that_die_at_once_are_left_out_and_come_back(fleet: Fleet) -> None:
    kill_worker(fleet, 1)
    kill_worker(fleet, 2)  # the other node's
    fleet.members({0, 3})
    for rank in (1, 2):
        fleet.ended(rank, "fenced")
    old = {rank: fleet.engine(rank).incarnation for rank in RANKS}
    fleet.open([1, 2])
    fleet.members(RANKS)
    now = {rank: fleet.engine(rank).incarnation for rank in RANKS}
    assert now == {0: old[0], 1: old[1] + 1, 2: old[2] + 1, 3: old[3]}


def test_death_of_a_daemon_is_not_noticed_and_what_dies_meanwhile_is_dead(fleet: Fleet) -> None:
    epoch = fleet.engine(0).epoch
    name = daemon_name(1)
    fleet.cluster.kill(name, hold=True)
    fleet.cluster.wait_for(lambda: name not in fleet.cluster.pids, 60, "the daemon is gone")
    fleet.progress(RANKS, 20)
    assert {e.epoch for e in fleet.engines(RANKS)} == {epoch}
    kill_worker(fleet, 3)  # nobody watches it
    fleet.cluster.start_again(name)
    fleet.members({0, 1, 2})
    assert fleet.ended(3, "fenced")["why"] != ""
    fleet.open([3])
    fleet.members(RANKS)


@pytest.mark.parametrize("half", ["engine", "worker"])
def test_case_02_the_dead_one_goes_and_nobody_else_is_blamed(fleet: Fleet, half: str) -> None:
    before = {e.rank: e.incarnation for e in fleet.engines(RANKS)}
    epoch = fleet.engine(0).epoch
    if half == "worker":
        kill_worker(fleet, 2)
    else:
        fleet.engine(2).signal(signal.SIGKILL)
    fleet.members({0, 1, 3})
    fleet.progress({0, 1, 3})
    assert fleet.engine(0).epoch == epoch + 1
    assert fleet.engine(0).view == {rank: before[rank] for rank in (0, 1, 3)}

    def states() -> dict[int, str]:
        status = fleet.status()
        return {r.rank: r.state for r in status.ranks if r.rank != 2} if status else {}

    # Who waited for the dead one is suspected for as long as it takes to hear of its next step.
    fleet.wait(lambda: states() == dict.fromkeys((0, 1, 3), "active"), "the others are active")


def test_case_23_a_rank_that_dies_idle_is_noticed_when_it_dies(fleet: Fleet) -> None:
    for engine in fleet.engines(RANKS):
        engine.order("pause")
    # One may pause while others wait for it in the next step: all are idle when it has died.
    fleet.wait(lambda: any(e.records("paused") for e in fleet.engines(RANKS)), "engines idle")
    kill_worker(fleet, 1)
    survivors = [0, 2, 3]

    def noticed() -> bool:
        status = fleet.status()
        return status is not None and 1 not in {m.rank for m in status.view.members}

    fleet.wait(noticed, "a view without the dead rank, proposed while nobody steps")
    assert all(fleet.engine(rank).end is None for rank in survivors)
    torn = {rank: len(fleet.engine(rank).torn()) for rank in survivors}
    for rank in RANKS:
        fleet.engine(rank).order("resume")
    fleet.members(survivors)
    for rank in survivors:
        # At most the step in which it was when the others had paused.
        assert len(fleet.engine(rank).torn()) <= torn[rank] + 1


def test_engine_that_stops_for_three_seconds_is_not_expelled(fleet: Fleet) -> None:
    epoch, engine = fleet.engine(0).epoch, fleet.engine(2)
    at_ns = engine.signal(signal.SIGSTOP)

    def suspected() -> bool:
        status = fleet.status()
        ranks = status.ranks if status is not None else ()
        return any(r.rank == 2 and r.state == "suspected" for r in ranks)

    fleet.wait(suspected, "rank 2 is suspected")
    fleet.wait(lambda: time.monotonic_ns() - at_ns > 3e9, "three seconds are over")
    engine.signal(signal.SIGCONT)
    fleet.progress(RANKS)
    assert {e.epoch for e in fleet.engines(RANKS)} == {epoch}
    assert not any(e.torn() for e in fleet.engines(RANKS))


def test_engine_that_stops_for_eight_seconds_learns_that_it_was_expelled_and_completes_nothing(
    fleet: Fleet,
) -> None:
    engine, others = fleet.engine(2), {0, 1, 3}
    at_ns = engine.signal(signal.SIGSTOP)
    fleet.members(others)
    assert time.monotonic_ns() - at_ns > HANG_S * 1e9 * 0.9
    fleet.wait(lambda: time.monotonic_ns() - at_ns > 8e9, "eight seconds are over")
    assert not engine.gone
    assert fleet.seat(2).seat.incarnation == engine.incarnation, "it still holds its seat"
    fleet.progress(others)
    engine.signal(signal.SIGCONT)
    assert "rank" in fleet.ended(2, "fenced")["why"]
    assert fleet.completed_alone(2, at_ns, others) == []
    fleet.open([2])
    fleet.members(RANKS)
    assert fleet.engine(2).incarnation == engine.incarnation + 1
