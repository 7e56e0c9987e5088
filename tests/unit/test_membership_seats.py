"""Nodes that go and come, seats and their incarnations: stories told by simulated nodes."""

import pytest

from elasticep.control import events as ev
from elasticep.control.events import Fence, Grant, SeatReport, SeatState
from elasticep.control.membership import Membership
from elasticep.control.seats import InvalidTransition, Phase, Seat
from elasticep.testing.membership import TWO_NODES, World, formed, group_config, members, phases

# ---- nodes


def test_a_node_that_is_gone_loses_its_ranks_and_they_stay_ungranted() -> None:
    world = formed()
    world.cut("b", gone=True)
    assert world.view.ranks == (0, 1)
    assert phases(world) == ["active", "active", "fenced", "fenced"]
    world.settle()
    world.advance(60_000, step_ms=1_000)
    assert phases(world)[2:] == ["fenced", "fenced"]
    assert [w.rank for w in world.saved_seats.values() if w.phase == "fenced"] == [2, 3]


def test_a_node_that_returns_is_fenced_and_starts_anew() -> None:
    world = formed()
    world.cut("b", gone=True)
    world.run()
    world.barrier()
    world.connect("b")
    fences = [m for m in world.nodes["b"].inbox if isinstance(m, Fence)]
    assert [(f.rank, f.incarnation) for f in fences] == [(2, 1), (3, 1)]
    world.settle()
    assert members(world) == [(0, 1), (1, 1), (2, 2), (3, 2)]


def test_a_short_cut_changes_nothing() -> None:
    world = formed()
    world.cut("b")
    world.advance(1_000)
    world.connect("b")
    world.settle()
    assert world.view.epoch == 1
    assert phases(world) == ["active"] * 4


def test_a_replacement_node_takes_free_seats() -> None:
    world = World(group_config(max_ranks=6, flap_limit=0), {"a": (0, 1), "b": (2, 3), "c": ()})
    world.settle()
    world.cut("b", gone=True)
    world.nodes["c"].seats.update({r: type(world.seat(0)[1])(r) for r in (2, 4, 5)})
    world.connect("c")
    world.settle()
    assert members(world) == [(0, 1), (1, 1), (4, 1), (5, 1)]
    assert world.membership.seats[2].node == "b", "an unreachable node keeps its seats"


def test_seats_of_a_node_that_is_off_are_given_to_another() -> None:
    world = World(group_config(flap_limit=0), {"a": (0, 1), "b": (2, 3), "c": ()})
    world.settle()
    world.cut("b", gone=True)
    world.nodes["c"].seats.update({r: type(world.seat(0)[1])(r) for r in (2, 3)})
    world.connect("c")
    world.settle()
    assert world.view.ranks == (0, 1), "its processes may live"
    world.feed(ev.NodeOff("b", "an operator said that node b is off"))
    world.restart_controller()  # whoever leads by then knows of it
    world.settle()
    assert world.view.ranks == (0, 1, 2, 3)
    assert [world.membership.seats[rank].node for rank in (2, 3)] == ["c", "c"]


def test_a_node_that_was_said_to_be_off_and_is_not_is_fenced() -> None:
    world = World(group_config(flap_limit=0), {"a": (0, 1), "b": (2, 3), "c": ()})
    world.settle()
    world.cut("b", gone=True)
    world.feed(ev.NodeOff("b", "an operator said that node b is off"))
    world.nodes["c"].seats.update({r: type(world.seat(0)[1])(r) for r in (2,)})
    world.connect("c")
    world.settle()
    world.connect("b")
    fences = {(m.rank, m.incarnation) for m in world.nodes["b"].inbox if isinstance(m, Fence)}
    assert fences >= {(2, 1), (3, 1)}
    world.settle()
    assert members(world) == [(0, 1), (1, 1), (2, 2), (3, 2)]
    assert (world.membership.seats[2].node, world.membership.seats[3].node) == ("c", "b")


def test_a_seat_belongs_to_the_node_that_has_it() -> None:
    world = formed()
    hello = ev.NodeHello("c", (SeatReport(3, 7, SeatState.ATTACHED, 1),))
    out = world.membership.handle(hello, world.now_ms)
    assert Fence("c", 3, 7, 0, "the seat is held by node b") in out.after
    assert members(world)[3] == (3, 1)


def test_a_new_daemon_that_knows_nothing_confirms_that_its_ranks_are_gone() -> None:
    world = formed()
    world.feed(
        ev.NodeHello("b", (SeatReport(2, 0, SeatState.EMPTY), SeatReport(3, 0, SeatState.EMPTY)))
    )
    assert world.view.ranks == (0, 1)
    assert world.membership.seats[2].incarnation == 2


def test_a_grant_that_was_lost_is_sent_again_under_its_number() -> None:
    world = World(group_config(), TWO_NODES)
    world.nodes["b"].inbox.clear()  # the grants are lost with the session
    starting = (SeatReport(2, 1, SeatState.EMPTY), SeatReport(3, 1, SeatState.EMPTY))
    out = world.feed(ev.NodeHello("b", starting))
    assert [s for s in out.after if isinstance(s, Grant)] == [Grant("b", 2, 1), Grant("b", 3, 1)]
    assert world.membership.seats[2].incarnation == 1


def test_workers_that_fail_to_start_are_tried_again_more_and_more_slowly() -> None:
    world = World(group_config(flap_limit=3), TWO_NODES, attach=False)
    world.run()
    granted = []
    for _ in range(6):
        began = world.now_ms
        seat = world.membership.seats[0]
        incarnation = seat.incarnation
        world.kill(0, "cannot start")
        while seat.incarnation == incarnation:
            assert not seat.held, "whoever mends it need not ask for the seat, too"
            world.advance(50, step_ms=50)
        world.run()
        granted.append(world.now_ms - began)
    assert granted == sorted(granted)
    assert granted[0] <= 150
    assert granted[-1] >= 3_000


# ---- changes of the leader


def test_the_next_leader_goes_on_with_a_half_staged_view() -> None:
    world = formed()
    world.kill(3)
    world.deliver("a")
    world.restart_controller()
    assert world.view.epoch == 2
    world.settle()
    assert members(world) == [(0, 1), (1, 1), (2, 1), (3, 2)]
    assert [v.epoch for v in world.proposed] == [1, 2, 3]


def test_the_next_leader_does_not_count_adopted_epochs_as_open() -> None:
    world = formed(experts=4)
    world.attach = False
    world.kill(3)
    world.run()
    world.barrier()
    world.restart_controller()
    world.kill(2)
    assert world.view.ranks == (0, 1)


def test_a_store_that_lost_everything_never_sees_a_number_twice() -> None:
    world = formed()
    world.kill(3)
    world.settle()
    highest = world.view.epoch
    world.membership = Membership(world.config, world.now_ms)
    world.saved_view = None
    for name in TWO_NODES:
        world.connect(name)
    world.settle()
    assert world.view.epoch > highest
    assert [m.incarnation for m in world.view.members] == [2, 2, 2, 3]


# ---- the seat itself


def test_a_step_that_a_seats_life_does_not_have_tells_its_story() -> None:
    seat = Seat(3)
    seat.grant("a", 10)
    seat.end(20, "worker died", counts=True, window_ms=1_000)
    with pytest.raises(InvalidTransition) as caught:
        seat.move(Phase.ACTIVE, 30, "it says so")
    assert "rank 3 (incarnation 1) cannot go from fenced to active because it says so" in str(
        caught.value
    )
    assert "10 ms: gone -> joining: incarnation 1 is granted to a" in str(caught.value)
    assert "20 ms: joining -> fenced: worker died" in str(caught.value)


def test_echoes_of_ended_incarnations_change_nothing() -> None:
    world = formed()
    world.kill(3)
    world.settle()
    before = (members(world), world.view.epoch, phases(world))
    for event in (
        ev.SeatChanged("b", SeatReport(3, 1, SeatState.DEAD, cause="again")),
        ev.SeatChanged("b", SeatReport(3, 1, SeatState.EMPTY, cause="again")),
        ev.Staged("b", 3, 1, 3),
        ev.Staged("b", 3, 1, 3, "no"),
        ev.Adopted("b", 3, 1, 9),
        ev.Waits("b", 3, 1, 0, "barrier", 9_000, 0),
    ):
        world.feed(event)
    world.advance(20_000)
    assert (members(world), world.view.epoch, phases(world)) == before


def test_same_events_give_same_decisions() -> None:
    def story() -> list[str]:
        world = formed()
        world.kill(2)
        world.settle()
        world.cut("a", gone=True)
        world.settle()
        world.connect("a")
        world.settle()
        return [f"{view.digest} {view.describe()}" for view in world.proposed]

    assert story() == story()


def test_nobody_hears_of_an_end_before_its_incarnation_is_in_the_store() -> None:
    # A grant whose write is on its way, and a node that comes back without having heard of it. The
    # next leader gives the same number out again: nobody may hold it for dead.
    world = formed()
    world.attach = False
    world.kill(3)
    world.run()
    seat = world.membership.seats[3]
    assert (seat.phase, seat.incarnation) == (Phase.JOINING, 2)
    seat.written = False
    reports = (
        SeatReport(2, 1, SeatState.ATTACHED, world.view.epoch),
        SeatReport(3, 0, SeatState.EMPTY),
    )
    out = world.membership.handle(ev.NodeHello("b", reports), world.now_ms)
    ended = Fence("b", 3, 2, world.view.epoch + 1, "its node holds no worker")
    assert ended not in out.now
    assert ended in out.after


@pytest.mark.parametrize("next_leader", [False, True])
def test_a_node_that_was_away_hears_who_ended_meanwhile(next_leader: bool) -> None:
    """Also when no view can say so because two are open: its ranks would wait for the dead."""
    world = formed({"a": (0, 1), "b": (2, 3)}, flap_limit=0)
    world.cut("b")
    world.kill(0)
    world.run()  # the seat is given out again before anybody on b knows
    assert world.seat(0)[1].incarnation == 2
    if next_leader:
        world.restart_controller()
    world.connect("b")
    fences = [send for send in world.nodes["b"].inbox if isinstance(send, ev.Fence)]
    assert [(fence.rank, fence.incarnation) for fence in fences] == [(0, 1)]
