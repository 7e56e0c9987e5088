"""What a leader does when a group is deleted, and when one of its name is created anew."""

from dataclasses import replace

import pytest

from elasticep.control import cluster as cluster_module
from elasticep.control import events as ev
from elasticep.control import records
from elasticep.control.cluster import Cluster, Outcomes
from elasticep.control.events import SeatReport, SeatState
from elasticep.control.records import Endpoint, Loaded, Moment
from elasticep.control.state import Past
from elasticep.control.status import cluster_status
from elasticep.control.store import KeyValue, Put
from elasticep.errors import ConfigError, UnknownGroup, UsageError
from elasticep.group import GroupConfig
from elasticep.testing.membership import group_config

CONFIG = group_config(flap_limit=0)
EMPTY, ATTACHED = SeatState.EMPTY, SeatState.ATTACHED


def endpoint(node: str) -> Endpoint:
    return Endpoint(node, "d", f"unix:///tmp/{node}", "")


def seats(
    *ranks: int, incarnation: int = 0, state: SeatState = EMPTY
) -> list[tuple[str, SeatReport]]:
    return [("g", SeatReport(rank, incarnation, state)) for rank in ranks]


def sends(outcomes: Outcomes) -> list[ev.Send]:
    return [send for _, out in outcomes for send in (*out.now, *out.after)]


def started(config: GroupConfig = CONFIG) -> Cluster:
    cluster = Cluster(Loaded(), 1_000)
    cluster.create_group(config, 1_000)
    cluster.hello(endpoint("a"), "s1", seats(0, 1), 1_000)
    cluster.hello(endpoint("b"), "s1", seats(2, 3), 1_000)
    return cluster


def say(cluster: Cluster, node: str, rank: int, incarnation: int, state: SeatState) -> Outcomes:
    report = ev.SeatChanged(node, SeatReport(rank, incarnation, state))
    return cluster.report("g", report, 2_000)


def test_it_is_refused_while_engines_hold_ranks_and_names_them() -> None:
    cluster = started()
    say(cluster, "a", 1, 1, ATTACHED)
    say(cluster, "b", 2, 1, ATTACHED)
    with pytest.raises(UsageError) as caught:
        cluster.delete_group("g", "why", force=False)
    said = "ranks 1-2 of group 'g' are held by engines on a, b; end these engines"
    assert str(caught.value).startswith(said)
    assert str(caught.value).endswith("elasticep group delete g --force")
    assert "g" in cluster.groups
    deleted = cluster.delete_group("g", "why", force=True)
    assert deleted is not None
    assert deleted.fenced == (1, 2)
    assert "g" not in cluster.groups


def test_workers_without_engines_keep_no_group_unless_their_node_was_not_heard_of() -> None:
    assert started().delete_group("g", "why", force=False) is not None
    saved = tuple(ev.SaveSeat(rank, 1, "a", "joining", 0, "", "") for rank in range(4))
    loaded = Loaded(
        nodes={"a": endpoint("a")},
        groups={"g": (CONFIG, records.Saved(seats=saved))},
    )
    cluster = Cluster(loaded, 1_000)
    with pytest.raises(UsageError, match="ranks 0-3 of group 'g' are held"):
        cluster.delete_group("g", "why", force=False)
    cluster.hello(
        endpoint("a"), "s", seats(0, 1, 2, 3, incarnation=1, state=SeatState.READY), 2_000
    )
    assert cluster.delete_group("g", "why", force=False) is not None


def test_nodes_hear_of_it_their_ranks_ends_first() -> None:
    cluster = started()
    cluster.disconnected("b", 1_500)
    deleted = cluster.delete_group("g", "why", force=False)
    assert deleted is not None
    assert deleted.past == Past(2, 1)
    assert deleted.after == (
        ev.Fence("a", 0, 1, 1, "why"),
        ev.Fence("a", 1, 1, 1, "why"),
        ev.Forget("a", 2, 1, "why"),
    )
    # Whatever is said of it from now on leads to nothing, and it is in no answer.
    assert say(cluster, "a", 0, 1, ATTACHED) == []
    assert cluster.tick(3_000) == ([], [])
    assert not cluster_status(cluster, {}, "me", "", 3_000).groups
    # A node that was away hears of it at its hello.
    outcomes = cluster.hello(endpoint("b"), "s2", seats(2, 3, incarnation=1, state=ATTACHED), 3_000)
    told = sends(outcomes)
    assert [type(send).__name__ for send in told] == ["Fence", "Fence", "Forget"]
    assert told[-1] == ev.Forget("b", 2, 1, "group 'g' was deleted while its node was away")
    assert cluster.hello(endpoint("b"), "s3", seats(2, 3), 3_000) == []


def test_asking_again_is_no_error_and_another_name_is() -> None:
    cluster = started()
    assert cluster.delete_group("g", "why", force=False) is not None
    assert cluster.delete_group("g", "why", force=False) is None
    assert cluster.delete_group("g", "why", force=True) is None
    with pytest.raises(UnknownGroup, match="no group 'h'; known are: none"):
        cluster.delete_group("h", "why", force=True)


def test_a_group_created_anew_has_no_number_of_the_old_one() -> None:
    cluster = started()
    say(cluster, "a", 0, 1, SeatState.READY)
    say(cluster, "b", 3, 1, SeatState.DEAD)
    say(cluster, "b", 3, 1, EMPTY)
    for node in ("a", "b"):
        cluster.heard(node, 2_400)
    cluster.tick(2_500)
    assert cluster.groups["g"].seats[3].incarnation == 2, "it was taken more often than the others"
    cluster.delete_group("g", "why", force=False)
    created, outcomes = cluster.create_group(group_config(ranks=2, experts=4), 2_500)
    assert created
    seats = cluster.groups["g"].seats
    granted = [send for send in sends(outcomes) if isinstance(send, ev.Grant)]
    assert granted == [ev.Grant("a", 1, 4)], "node a has the old group's rank 0 still"
    shown = cluster_status(cluster, {}, "", "g", 0).groups[0].ranks
    assert [rank.rank for rank in shown] == [1]
    assert sends(say(cluster, "a", 0, 1, EMPTY)) == [ev.Grant("a", 0, 4)]
    assert {seat.incarnation for seat in seats.values()} == {4}


def test_a_node_that_was_away_for_both_is_given_a_seat_when_its_old_rank_has_ended() -> None:
    """Of a larger group, so that one of its ranks is none of the new group's."""
    cluster = started()
    say(cluster, "a", 1, 1, ATTACHED)
    cluster.disconnected("a", 1_500)
    cluster.delete_group("g", "why", force=True)
    cluster.create_group(group_config(ranks=1, experts=4, flap_limit=0), 2_000)
    old = seats(0, 1, incarnation=1, state=ATTACHED)
    told = sends(cluster.hello(endpoint("a"), "s2", old, 3_000))
    fences = {(send.rank, send.incarnation) for send in told if isinstance(send, ev.Fence)}
    assert fences == {(0, 1), (1, 1)}
    assert ev.Forget("a", 2, 1, "group 'g' was deleted while its node was away") in told
    assert not any(isinstance(send, ev.Grant) for send in told)
    say(cluster, "a", 0, 1, SeatState.DEAD)
    assert sends(say(cluster, "a", 0, 1, EMPTY)) == [ev.Grant("a", 0, 3)]


def test_a_grant_that_the_node_never_heard_of_keeps_no_seat() -> None:
    """It was lost with the session, and at its next hello the node has the old rank still."""
    cluster = started()
    cluster.delete_group("g", "why", force=True)
    cluster.create_group(CONFIG, 2_000)
    say(cluster, "a", 0, 1, EMPTY)
    seat = cluster.groups["g"].seats[0]
    assert (seat.phase, seat.incarnation) == ("joining", 3)
    cluster.disconnected("a", 2_500)
    cluster.tick(60_000)
    assert seat.phase == "fenced"
    cluster.hello(endpoint("a"), "s2", seats(0, 1, incarnation=1, state=ATTACHED), 61_000)
    assert seat.phase == "gone", "the node has not started what it has not heard of"
    assert sends(cluster.report("g", ev.SeatChanged("a", SeatReport(0, 1, EMPTY)), 99_000)) == [
        ev.Grant("a", 0, 4)
    ]


def test_a_group_that_an_older_controller_created_from_one_on_is_not_taken_for_a_deleted_one() -> (
    None
):
    saved = records.Saved(seats=(ev.SaveSeat(0, 1, "a", "joining", 0, "", ""),))
    loaded = Loaded(groups={"g": (CONFIG, saved)}, past={"g": Past(7, 8)})
    cluster = Cluster(loaded, 1_000)
    told = sends(cluster.hello(endpoint("a"), "s", seats(0, incarnation=1, state=ATTACHED), 2_000))
    assert not any(isinstance(send, ev.Fence | ev.Forget) for send in told)
    deleted = cluster.delete_group("g", "why", force=True)
    assert deleted is not None
    assert cluster.past["g"] == deleted.past == Past(7, 8)


def test_numbers_of_deleted_groups_are_in_the_store_and_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at = Moment(5, 6)
    delete, put = records.delete_group("g", Past(7, 8), at)
    assert delete.key == "/elasticep/v1/groups/g/config"
    assert isinstance(put, Put)
    rest = KeyValue("/elasticep/v1/groups/g/adopted", b"4", 1, 1)
    loaded = records.load([KeyValue(put.key, put.value, 1, 1), rest], at)
    assert (loaded.past, loaded.remains, loaded.groups) == ({"g": Past(7, 8)}, {"g"}, {})
    [by_hand] = [records.load([rest], at)]
    assert by_hand.remains == set(), "what somebody does by hand is theirs"
    again = records.put_config(CONFIG)
    loaded = records.load([KeyValue(each.key, each.value, 1, 1) for each in (put, again)], at)
    cluster = Cluster(loaded, 0)
    assert {seat.incarnation for seat in cluster.groups["g"].seats.values()} == {7}
    assert cluster.groups["g"].past == Past(8, 8)
    monkeypatch.setattr(cluster_module, "MAX_PAST", 1)
    other = replace(CONFIG, name="h")
    cluster.create_group(other, 0)
    with pytest.raises(ConfigError, match="the numbers of 1 names are kept"):
        cluster.delete_group("h", "why", force=False)
    assert cluster.delete_group("g", "why", force=False) is not None, "a name that was used before"
