"""Engines against a whole local cluster: seats taken, refused, given back and taken again."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import elasticep
from elasticep.errors import (
    AttachError,
    GroupMismatch,
    SeatTaken,
    Unavailable,
    UnknownGroup,
    UnknownRank,
)
from elasticep.geometry import GroupGeometry
from elasticep.group import GroupConfig, Timeouts
from elasticep.spec import ExchangeSpec
from elasticep.testing.cluster import CONTROLLER, Cluster, daemon_name

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(400)
HIDDEN, EXPERTS, TOPK = 16, 4, 2
JOIN_S = 120.0
BACK_S = 110.0  # for a process that was killed: less than node_timeout
CONFIG = GroupConfig(
    name="attach",
    geometry=GroupGeometry(
        layers=1, experts=EXPERTS, topk=TOPK, hidden=HIDDEN, slots_per_rank=EXPERTS, max_ranks=2
    ),
    exchanges=(
        (
            "decode",
            ExchangeSpec.preset(
                "ROUTED", dispatch_dtype="fp32", combine_dtype="fp32", max_tokens=4
            ),
        ),
    ),
    initial_ranks=2,
    # A killed daemon is back before, also on a machine that gives it a hundredth of the 0.7 s that
    # it takes, and nobody hangs so long on a busy one: an engine that is expelled is killed, and
    # that is this process.
    timeouts=Timeouts(node_timeout_ms=120_000, hang_timeout_ms=120_000),
    flap_limit=0,  # seats change hands here more often than in ten minutes of any service
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(group="attach", ranks=2, nodes=2) as running:
        yield running


def attach(cluster: Cluster, rank: int, **arguments: Any) -> elasticep.Session:
    given = {"socket": cluster.socket_of(rank), "config": CONFIG, "timeout": 60, **arguments}
    return elasticep.attach(rank=rank, **given)


def together(*work: Callable[[], Any]) -> list[Any]:
    results: list[Any] = [None] * len(work)

    def one(number: int) -> None:
        try:
            results[number] = work[number]()
        except Exception as error:
            results[number] = error

    threads = [
        threading.Thread(target=one, args=(number,), daemon=True) for number in range(len(work))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive(), "a rank hangs"
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def one_step(session: elasticep.Session) -> int:
    """A complete step whose experts add their number; returns its epoch."""
    exchange = session.exchange("decode")
    x = torch.full((2, HIDDEN), float(session.rank))
    ids, weights = torch.tensor([[0, 3], [1, -1]]), torch.ones((2, TOPK))

    def forward(step: elasticep.Step, _: None) -> Any:
        recv = exchange.dispatch(0, x, ids, weights)
        slots = session.slots(0)
        for row in (recv.ids >= 0).any(1).nonzero().flatten().tolist():
            picks = (recv.ids[row] >= 0).nonzero().flatten().tolist()
            recv.out[row] = sum(recv.rows[row] + slots[recv.ids[row, pick]] for pick in picks)
        return step.epoch, exchange.combine(0, recv)

    epoch, out = session.run(forward, None, tokens=2)
    assert out[:, 0].tolist() == [2.0 * session.rank + 3, session.rank + 1.0]
    return int(epoch)


@pytest.fixture
def sessions(cluster: Cluster) -> Iterator[list[elasticep.Session]]:
    attached = together(*(lambda rank=rank: attach(cluster, rank) for rank in range(2)))
    yield attached
    for session in attached:
        session.detach()


def test_ranks_step_together_and_seats_are_held_by_one(
    cluster: Cluster, sessions: list[elasticep.Session]
) -> None:
    epochs = together(*(lambda s=s: one_step(s) for s in sessions))
    assert epochs[0] == epochs[1] >= 1
    begin = time.monotonic()
    with pytest.raises(SeatTaken, match=r"rank 0 .*this very process; detach"):
        attach(cluster, 0, timeout=2)
    assert time.monotonic() - begin < 20
    together(*(lambda s=s: one_step(s) for s in sessions))


def test_rank_that_is_given_back_is_taken_again_under_a_new_incarnation(
    cluster: Cluster, sessions: list[elasticep.Session]
) -> None:
    before = together(*(lambda s=s: one_step(s) for s in sessions))[0]
    old = sessions[1].incarnation
    sessions[1].detach()
    assert one_step(sessions[0]) > before
    assert 1 not in sessions[0].view.members

    def step_until_joined() -> int:
        while True:
            epoch = one_step(sessions[0])
            if 1 in sessions[0].view.members:
                return epoch

    def join() -> int:
        sessions[1] = attach(cluster, 1)
        return one_step(sessions[1])

    joined = together(step_until_joined, join)
    assert joined[0] == joined[1]
    assert sessions[1].incarnation == old + 1
    assert dict(sessions[1].view.members)[1] == old + 1
    epochs = together(*(lambda s=s: one_step(s) for s in sessions))
    assert epochs[0] == epochs[1] >= joined[0]


def test_sessions_outlive_a_kill_of_daemon_and_controller(
    cluster: Cluster, sessions: list[elasticep.Session]
) -> None:
    before = together(*(lambda s=s: one_step(s) for s in sessions))
    for name in (daemon_name(1), CONTROLLER):
        old = cluster.pids[name]
        cluster.kill(name)
        cluster.wait_for(lambda n=name, p=old: cluster.pids.get(n) != p, BACK_S, f"{name} ends")  # type: ignore[misc]
        assert together(*(lambda s=s: one_step(s) for s in sessions)) == before
        cluster.wait_for(lambda n=name: n in cluster.pids, BACK_S, f"{name} is back")  # type: ignore[misc]
    assert together(*(lambda s=s: one_step(s) for s in sessions)) == before
    # The daemon that came back watches what the dead one watched.
    sessions[1].detach()
    assert one_step(sessions[0]) > before[0]


def test_wrong_group_rank_and_config_are_refused(cluster: Cluster) -> None:
    with pytest.raises(UnknownGroup, match="'nobody'"):
        attach(cluster, 0, config=None, group="nobody", timeout=30)
    with pytest.raises(UnknownRank):
        elasticep.attach("attach", 1, cluster.socket_of(0), timeout=30)
    other = dataclasses.replace(CONFIG, spare_copies=0)
    with pytest.raises(GroupMismatch, match="spare_copies"):
        attach(cluster, 0, config=other, timeout=30)


def test_group_that_nobody_created_is_not_waited_for_longer_than_asked() -> None:
    with Cluster(group="empty", ranks=1) as cluster:
        begin = time.monotonic()
        with pytest.raises((AttachError, Unavailable), match="group 'empty'"):
            elasticep.attach("empty", 0, cluster.socket_of(0), timeout=1)
        assert time.monotonic() - begin < 60
