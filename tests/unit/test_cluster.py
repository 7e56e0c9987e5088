"""What a leader knows of nodes and groups: who is heard of, and what is bounded."""

from dataclasses import replace

import numpy as np
import pytest

from elasticep.control import cluster as cluster_module
from elasticep.control import events as ev
from elasticep.control import records
from elasticep.control.cluster import FORGET_MS, TAKEOVER_GRACE_MS, Cluster
from elasticep.control.events import SeatReport, SeatState
from elasticep.control.placement import InvalidPlacement, Placement
from elasticep.control.records import Endpoint, Loaded
from elasticep.control.seats import Phase
from elasticep.control.status import cluster_status
from elasticep.errors import ConfigError, GroupMismatch, UnknownGroup, UsageError
from elasticep.geometry import GroupGeometry
from elasticep.group import Timeouts
from elasticep.runtime.limits import Limits
from elasticep.testing.membership import group_config


def endpoint(node: str) -> Endpoint:
    return Endpoint(node, "d", f"unix:///tmp/{node}", "")


def seats(*ranks: int, group: str = "g") -> list[tuple[str, SeatReport]]:
    return [(group, SeatReport(rank, 0, SeatState.EMPTY)) for rank in ranks]


def gone(outcomes: cluster_module.Outcomes) -> set[int]:
    return {
        notice.fields["rank"]
        for _, outcome in outcomes
        for notice in outcome.notices
        if notice.event == "rank.fenced"
    }


def started(now_ms: int = 1_000, **config: object) -> Cluster:
    cluster = Cluster(Loaded(), now_ms)
    cluster.create_group(group_config(flap_limit=0, **config), now_ms)  # type: ignore[arg-type]
    cluster.hello(endpoint("a"), "s1", seats(0, 1), now_ms)
    cluster.hello(endpoint("b"), "s1", seats(2, 3), now_ms)
    return cluster


def test_a_silent_node_is_gone_after_its_groups_timeout_and_loses_its_session() -> None:
    cluster = started()
    cluster.heard("a", 2_000)
    outcomes, drop = cluster.tick(2_499)
    assert (gone(outcomes), drop) == (set(), [])
    outcomes, drop = cluster.tick(2_500)
    assert (gone(outcomes), drop) == ({2, 3}, ["b"])
    outcomes, drop = cluster.tick(2_600)
    assert (gone(outcomes), drop) == (set(), []), "once is enough"


def test_a_node_is_off_when_nothing_is_heard_of_it_and_its_seats_are_free() -> None:
    cluster = started()
    with pytest.raises(UsageError, match="no node 'x'; known are: a, b"):
        cluster.node_off("x", "why", 1_000)
    with pytest.raises(UsageError, match="node 'b' is connected, so its processes may live"):
        cluster.node_off("b", "why", 9_000)
    cluster.heard("b", 2_000)
    cluster.disconnected("b", 2_000)
    with pytest.raises(UsageError, match=r"heard of 1499 ms ago.*nothing was heard of it for 1500"):
        cluster.node_off("b", "why", 3_499)
    cluster.tick(3_500)
    freed, outcomes = cluster.node_off("b", "why", 3_500)
    assert freed == {"g": [2, 3]}
    assert {seat.phase for seat in cluster.groups["g"].seats.values() if seat.rank > 1} == {"gone"}
    saved = [write for _, out in outcomes for write in out.writes if isinstance(write, ev.SaveSeat)]
    assert [(write.rank, write.phase) for write in saved] == [(2, "gone"), (3, "gone")]
    assert list(cluster.nodes) == ["a"]


def test_a_node_that_is_gone_is_forgotten_when_no_seat_is_left_of_it() -> None:
    cluster = started()
    cluster.disconnected("b", 1_000)
    assert cluster.state_of("a", 99_000) == "connected"
    assert cluster.state_of("b", 2_499) == "away"
    assert cluster.state_of("b", 2_500) == "gone"
    cluster.tick(2_500)
    assert cluster.forget(1_000 + 10 * FORGET_MS) == [], "its processes may live"
    for rank in (2, 3):  # the worker of a drained rank is seen to be gone before the daemon stops
        seat = cluster.groups["g"].seats[rank]
        seat.move(Phase.GONE, 2_500, "a test")
    assert cluster.forget(999 + FORGET_MS) == []
    assert cluster.forget(1_000 + FORGET_MS) == ["b"]
    assert list(cluster.nodes) == ["a"], "one with a session stays, however silent"
    cluster.hello(endpoint("b"), "s2", seats(2, 3), 99_000)
    assert cluster.state_of("b", 99_000) == "connected"


def test_the_status_says_since_when_a_node_is_gone() -> None:
    cluster = Cluster(Loaded(nodes={"a": endpoint("a"), "b": endpoint("b")}), 1_000)
    cluster.create_group(group_config(flap_limit=0), 1_000)
    cluster.hello(endpoint("a"), "s1", seats(0, 1), 2_000)
    cluster.disconnected("a", 3_000)
    told = cluster_status(cluster, {}, "me", "", 9_000).nodes
    assert [(n.endpoint.node, n.state, n.last_heard_ms_ago, n.unheard) for n in told] == [
        ("a", "gone", 7_000, False),
        ("b", "gone", 8_000, True),
    ]


def test_the_next_leader_does_not_take_a_node_for_off_before_it_may_have_come() -> None:
    loaded = Loaded(nodes={"b": endpoint("b")})
    cluster = Cluster(loaded, 1_000)
    with pytest.raises(UsageError, match="heard of 0 ms ago"):
        cluster.node_off("b", "why", 1_000 + TAKEOVER_GRACE_MS - 1)


def test_groups_judge_by_their_own_timeouts() -> None:
    cluster = started()
    slow = group_config(flap_limit=0, timeouts=Timeouts(node_timeout_ms=9_000))
    object.__setattr__(slow, "name", "slow")
    cluster.create_group(slow, 1_000)
    cluster.hello(endpoint("a"), "s2", [*seats(0, 1), *seats(0, group="slow")], 1_000)
    outcomes, _ = cluster.tick(3_000)
    assert {group for group, outcome in outcomes if outcome.notices} == {"g"}
    assert cluster.heartbeat_ms == 500


def test_a_long_node_timeout_does_not_make_the_leader_silent_to_its_nodes() -> None:
    cluster = started(timeouts=Timeouts(node_timeout_ms=60_000))
    assert cluster.heartbeat_ms * 3 < Limits().controller_silence_s * 1_000


def test_nodes_leave_a_leader_that_was_stopped_before_the_next_one_misses_them() -> None:
    assert Limits().controller_silence_s * 1_000 <= TAKEOVER_GRACE_MS


def test_a_new_leader_gives_nodes_time_to_come_to_it() -> None:
    records = started()
    members = tuple(s.record() for s in records.groups["g"].seats.values())
    from elasticep.control.membership import Saved

    loaded = Loaded(
        nodes={"a": endpoint("a"), "b": endpoint("b")},
        groups={"g": (records.groups["g"].config, Saved(seats=members))},
    )
    cluster = Cluster(loaded, 10_000)
    timeout_ms = records.groups["g"].config.timeouts.node_timeout_ms
    outcomes, _ = cluster.tick(10_000 + TAKEOVER_GRACE_MS + timeout_ms - 1)
    assert gone(outcomes) == set()
    outcomes, _ = cluster.tick(10_000 + TAKEOVER_GRACE_MS + timeout_ms)
    assert gone(outcomes) == {0, 1, 2, 3}


def test_reports_for_groups_that_are_not_made_yet_are_kept() -> None:
    cluster = Cluster(Loaded(), 0)
    cluster.hello(endpoint("a"), "s", seats(0, 1, 2, 3), 0)
    changed = ev.SeatChanged("a", SeatReport(0, 0, SeatState.EMPTY))
    assert cluster.report("g", changed, 0) == []
    created, outcomes = cluster.create_group(group_config(), 0)
    assert created
    grants = [s for _, o in outcomes for s in o.after if isinstance(s, ev.Grant)]
    assert [grant.rank for grant in grants] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("sizes", "refused"),
    [
        ({"layers": 64, "experts": 64, "slots_per_rank": 64, "max_ranks": 128}, ""),
        (
            {"layers": 65, "experts": 64, "slots_per_rank": 64, "max_ranks": 128},
            "group 'g' has 532480 slots.*room for 524288 of a group: lower the last two",
        ),
        (
            {"layers": 4_096, "experts": 65, "slots_per_rank": 65, "max_ranks": 1},
            "group 'g' has 266240 experts.*room for 262144",
        ),
    ],
)
def test_a_group_that_the_store_has_no_room_for_is_not_made(
    sizes: dict[str, int], refused: str
) -> None:
    cluster = Cluster(Loaded(), 1_000)
    config = replace(
        group_config(),
        geometry=GroupGeometry(topk=2, hidden=64, **sizes),
        initial_ranks=1,
        spare_copies=0,
    )
    if not refused:
        assert cluster.create_group(config, 1_000)[0]
        return
    with pytest.raises(ConfigError, match=refused):
        cluster.create_group(config, 1_000)
    assert not cluster.groups


def test_an_imported_plan_that_the_store_has_no_room_for_is_refused() -> None:
    shape = (64, 128, 64)
    expert = np.tile(np.arange(64, dtype=np.int32), (64, 128, 1))
    weight = np.random.default_rng(0).integers(0, 1 << 16, shape).astype(np.uint32)
    records.check_import(Placement(experts=64, slot_expert=expert, slot_weight=weight & 1))
    with pytest.raises(InvalidPlacement, match="bytes in the store, which takes 1400000; fill"):
        records.check_import(Placement(experts=64, slot_expert=expert, slot_weight=weight))


def test_groups_are_made_once_and_are_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = started()
    assert cluster.create_group(group_config(flap_limit=0), 0) == (False, [])
    with pytest.raises(GroupMismatch, match="flap_limit"):
        cluster.create_group(group_config(flap_limit=7), 0)
    with pytest.raises(UnknownGroup, match="no group 'h'; known are: g"):
        cluster.membership("h")
    monkeypatch.setattr(cluster_module, "MAX_GROUPS", 1)
    other = group_config()
    object.__setattr__(other, "name", "h")
    with pytest.raises(ConfigError, match="a controller has 1 at most"):
        cluster.create_group(other, 0)


def test_what_a_node_says_of_seats_that_no_group_has_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_module, "MAX_SEATS", 3)
    cluster = started()
    for rank in range(9):
        cluster.report("none", ev.SeatChanged("a", SeatReport(rank, 0, SeatState.EMPTY)), 0)
    assert len(cluster.nodes["a"].seats) == 3


def test_nodes_are_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = started()
    monkeypatch.setattr(cluster_module, "MAX_NODES", 2)
    cluster.check_node(endpoint("a"), 0)
    with pytest.raises(ConfigError, match="node 'c' is new, and 2 nodes are known"):
        cluster.check_node(endpoint("c"), 0)


def test_a_name_is_one_daemons_as_long_as_that_is_heard_of() -> None:
    cluster = started()
    cluster.hello(endpoint("a"), "first", [], 1_000)
    other = Endpoint("a", "e", "10.0.0.9:7401", "")
    last_ms = 1_000 + 2 * cluster.heartbeat_ms
    cluster.check_node(endpoint("a"), last_ms - 1)  # it started anew
    with pytest.raises(ConfigError, match=r"'a' is the daemon at unix:///tmp/a, heard of .* name"):
        cluster.check_node(other, last_ms - 1)
    cluster.check_node(other, last_ms)  # its host may be gone without a word
    cluster.heard("a", last_ms)
    with pytest.raises(ConfigError):
        cluster.check_node(other, last_ms)
    cluster.disconnected("a", last_ms)
    cluster.check_node(other, last_ms)
