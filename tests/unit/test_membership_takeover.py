"""What a new leader does with what it finds: views that nobody heard of, ranks that load."""

import pytest

from elasticep.control import events as ev
from elasticep.control.decisions import STAGE_TIMEOUT_MS
from elasticep.control.events import Fence, Propose, SeatReport, SeatState
from elasticep.control.heard import MOST_EPOCH, MOST_INCARNATION
from elasticep.control.metrics import ControllerMetrics
from elasticep.control.seats import Phase
from elasticep.group import Timeouts
from elasticep.testing.membership import TWO_NODES, World, formed, group_config, members

MINUTE_MS = 60_000


def test_engines_of_a_group_that_forms_may_load_as_long_as_before() -> None:
    world = World(group_config(), TWO_NODES, attach=False)
    for rank in range(4):
        world.run()
        world.attach_engine(rank)
        world.seat(rank)[1].hung = True  # it does not come to its first step yet
    world.run()
    assert world.view.epoch == 1
    world.restart_controller()
    world.run()
    world.advance(MINUTE_MS)
    assert world.view.epoch == 1
    assert all(seat.live for seat in world.membership.seats.values())
    for rank in range(4):
        world.wake(rank)
    world.settle()
    assert members(world) == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert world.membership.adopted_epoch == 1


def test_a_joiner_has_its_time_under_the_next_leader_too() -> None:
    world = formed(timeouts=Timeouts(step_timeout_ms=20_000))
    world.kill(3)
    world.run()
    world.barrier()
    world.seat(3)[1].hung = True
    world.run()
    assert world.view.epoch == 3
    world.restart_controller()
    world.run()
    world.advance(20_000 - 200)
    assert world.view.epoch == 3
    assert world.membership.seats[3].live
    world.wake(3)
    world.settle()
    assert members(world) == [(0, 1), (1, 1), (2, 1), (3, 2)]


def test_a_joiner_whose_engine_left_meanwhile_is_left_out() -> None:
    world = formed()
    world.kill(3)
    world.run()
    world.barrier()
    world.seat(3)[1].hung = True
    world.run()
    world.seat(3)[1].state = SeatState.READY
    world.restart_controller()
    world.run()
    assert world.view.ranks == (0, 1, 2)


def test_a_view_that_nobody_heard_of_is_sent_by_the_next_leader() -> None:
    world = formed()
    out = world.membership.handle(
        ev.SeatChanged("b", SeatReport(3, 1, SeatState.DEAD, cause="worker died")), world.now_ms
    )
    assert [send.view.epoch for send in out.after if isinstance(send, Propose)] == [2, 2]
    out.now.clear()
    out.after.clear()  # written, and then it died
    world.take(out)
    _, seat = world.seat(3)
    seat.state, seat.cause, seat.epoch = SeatState.EMPTY, "worker died", 0
    world.attach = False
    world.restart_controller()
    world.settle()
    assert [view.epoch for view in world.proposed] == [1, 2]
    assert world.membership.adopted_epoch == 2
    assert members(world) == [(0, 1), (1, 1), (2, 1)]
    assert (3, 1) in world.dead


@pytest.mark.parametrize("first", ["a", "b"])
def test_whoever_comes_first_to_a_new_leader_nobody_healthy_is_blamed(first: str) -> None:
    world = formed()
    world.attach = False
    _, seat = world.seat(3)
    seat.state, seat.cause, seat.epoch = SeatState.EMPTY, "worker died", 0  # heard by nobody
    for name in world.nodes:
        world.nodes[name].up = False
    world.restart_controller()
    world.connect(first)
    world.run()
    world.advance(STAGE_TIMEOUT_MS * 3)  # the other node takes its time
    world.connect("b" if first == "a" else "a")
    world.settle()
    assert members(world) == [(0, 1), (1, 1), (2, 1)]
    assert world.dead == {(3, 1)}
    assert [view.epoch for view in world.proposed] == [1, 2]


def test_waits_from_before_blame_nobody_under_the_next_leader_without_new_ones() -> None:
    world = formed()
    timeout_ms = world.config.timeouts.hang_timeout_ms
    world.feed(ev.Waits("a", 0, 1, 2, "exchange", timeout_ms - 500, 40))
    world.restart_controller()
    world.advance(2 * timeout_ms)
    assert world.membership.seats[2].phase is Phase.ACTIVE
    # Reported anew, with all the time that it has waited: the root had no chance yet to show to
    # this leader that it moves.
    world.feed(ev.Waits("a", 0, 1, 2, "exchange", 3 * timeout_ms, 40))
    world.progress(2, 500)
    world.advance(timeout_ms - 500)
    assert world.membership.seats[2].live
    world.advance(1_000)
    assert not world.membership.seats[2].live


def test_an_end_that_may_not_be_in_the_store_is_told_after_the_store() -> None:
    # A leader that is cut from the store: by its own clock a node was gone, and now says hello.
    # The next leader knows nothing of that end; nobody may act on it before it is written.
    world = formed()
    world.membership.handle(ev.NodeGone("b", "it was not heard of"), world.now_ms)
    hello = ev.NodeHello("b", tuple(s.report() for s in world.nodes["b"].seats.values()))
    out = world.membership.handle(hello, world.now_ms)
    assert not [send for send in out.now if isinstance(send, Fence)]
    fenced = {(send.rank, send.incarnation) for send in out.after if isinstance(send, Fence)}
    assert fenced == {(2, 1), (3, 1)}


@pytest.mark.parametrize("by_hello", [False, True])
def test_who_reports_an_epoch_that_there_never_was_is_named(by_hello: bool) -> None:
    """Who cannot stage a view so far ahead is expelled: whose word it was has to be seen."""
    world = formed()
    metrics, group = ControllerMetrics(), world.config.name
    event: ev.Event = ev.Adopted("b", 2, 1, 3)
    if by_hello:
        world.seat(2)[1].epoch = 3
        reports = tuple(seat.report() for seat in world.nodes["b"].seats.values())
        event = ev.NodeHello("b", reports)
    out = world.membership.handle(event, world.now_ms)
    (told,) = (notice for notice in out.notices if notice.event == "epoch.unknown")
    assert told.fields == {"node": "b", "rank": 2, "epoch": 3, "latest": 1}
    metrics.count(group, told)
    assert metrics.unknown_epochs.labels(group)._value.get() == 1
    world.take(out)
    world.attach = False
    world.kill(3)
    world.settle()
    said = "node b says that rank 2 runs epoch 3, where 1 was the latest known here"
    assert world.view.epoch == 4
    assert said in world.view.reason
    assert said in world.membership.history[-1]
    world.kill(1)
    world.settle()
    assert said not in world.view.reason, "once"


def test_a_store_that_was_restored_from_a_backup_is_gone_on_from() -> None:
    world = formed()
    backup = (world.saved_view, world.saved_adopted, dict(world.saved_seats))
    for rank in (1, 3, 3):  # since then incarnations ended, and views came that it does not have
        world.kill(rank)
        world.settle()
    assert members(world) == [(0, 1), (1, 2), (2, 1), (3, 3)]
    before = world.view.epoch
    world.saved_view, world.saved_adopted, world.saved_seats = backup
    world.restart_controller()
    world.settle(30)
    assert members(world) == [(0, 1), (1, 3), (2, 1), (3, 4)], "whom it does not know attaches anew"
    assert world.membership.adopted_epoch == world.view.epoch > before


def test_numbers_go_on_from_the_highest_that_is_taken_over() -> None:
    world = formed()
    world.seat(3)[1].incarnation = MOST_INCARNATION
    for rank in range(4):
        world.seat(rank)[1].epoch = MOST_EPOCH
    world.restart_controller()
    world.settle(30)
    assert members(world)[3] == (3, MOST_INCARNATION + 1)
    assert world.view.epoch == world.membership.adopted_epoch > MOST_EPOCH


def test_nobody_is_late_with_a_view_that_waits_for_the_store() -> None:
    world = formed()
    world.attach = False
    dead = ev.SeatChanged("b", SeatReport(3, 1, SeatState.DEAD, cause="worker died"))
    out = world.decide(dead)  # its writes have no answer for a minute
    world.advance(MINUTE_MS)
    world.seat(0)[1].hung = True
    world.take(out)
    world.run()
    world.advance(STAGE_TIMEOUT_MS - 200)
    assert members(world) == [(0, 1), (1, 1), (2, 1)]
    world.advance(200)
    assert members(world) == [(1, 1), (2, 1)], "from then on time counts"


def test_an_end_by_which_a_second_epoch_is_adopted_at_once_is_one_write() -> None:
    world = formed()
    world.attach = False
    world.kill(3)
    world.run()  # rank 1 stages epoch 2, and nothing after it
    world.seat(1)[1].hung = True
    world.kill(2)
    world.run()
    world.feed(ev.Adopted("a", 0, 1, 3))
    world.now_ms += STAGE_TIMEOUT_MS
    out = world.feed(ev.Adopted("a", 1, 1, 2))
    assert [write.epoch for write in out.writes if isinstance(write, ev.SaveAdopted)] == [3]
    assert world.membership.adopted_epoch == 3
