"""How a group forms, loses members and takes others in: stories told by simulated nodes."""

from elasticep.control import events as ev
from elasticep.control.decisions import STAGE_TIMEOUT_MS
from elasticep.control.events import Fence, Grant, Propose, SeatReport, SeatState
from elasticep.control.proposals import REFORM_PATIENCE_MS
from elasticep.control.seats import Phase
from elasticep.group import Timeouts
from elasticep.testing.membership import TWO_NODES, World, formed, group_config, members, phases

# ---- forming


def test_the_first_view_waits_for_every_initial_rank() -> None:
    world = World(group_config(), TWO_NODES, attach=False)
    world.run()
    for rank in (0, 1, 3):
        world.attach_engine(rank)
    assert world.membership.view is None
    assert world.membership.waiting == "the first view waits for rank 2 to attach"
    world.attach_engine(2)
    view = world.view
    assert (view.epoch, view.previous_epoch, view.expelled) == (1, 0, ())
    assert members(world) == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert not view.lost


def test_the_first_view_has_the_initial_ranks_and_others_join_after() -> None:
    world = World(group_config(ranks=2, max_ranks=4, flap_limit=0), {"a": (0, 1, 2)})
    world.run()
    assert world.view.ranks == (0, 1)
    world.settle()
    assert world.view.ranks == (0, 1, 2)
    assert world.membership.adopted_epoch == 2


def test_a_member_that_dies_before_the_first_step_is_left_out() -> None:
    world = World(group_config(flap_limit=0), TWO_NODES)
    while world.membership.view is None:
        assert world.deliver("a") or world.deliver("b")
    assert world.view.epoch == 1
    world.kill(1)
    assert world.view.ranks == (0, 2, 3)
    world.settle()
    assert members(world) == [(0, 1), (1, 2), (2, 1), (3, 1)]


# ---- deaths


def test_a_death_is_answered_at_once_and_moves_nothing() -> None:
    world = formed()
    before = world.view.placement
    out = world.feed(ev.SeatChanged("b", SeatReport(3, 1, SeatState.DEAD, cause="worker died")))
    view = world.view
    assert view.epoch == 2
    assert view.ranks == (0, 1, 2)
    assert [(m.rank, m.incarnation) for m in view.expelled] == [(3, 1)]
    assert view.reason == "rank 3 left: worker died"
    assert not view.lost
    kept, old = view.placement.slot_expert[:, :3], before.slot_expert[:, :3]
    assert (kept == old).all()
    assert {send.node for send in out.now if isinstance(send, Fence)} == {"a", "b"}
    assert [send.node for send in out.after if isinstance(send, Propose)] == ["a", "b"]
    assert any(isinstance(write, ev.SaveView) for write in out.writes)


def test_a_rank_comes_back_as_the_next_incarnation_only_when_it_is_confirmed_gone() -> None:
    world = formed()
    world.feed(ev.SeatChanged("b", SeatReport(3, 1, SeatState.DEAD, cause="killed")))
    world.advance(2_000)
    assert world.membership.seats[3].phase is Phase.FENCED
    out = world.feed(ev.SeatChanged("b", SeatReport(3, 1, SeatState.EMPTY, cause="killed")))
    assert [s for s in out.after if isinstance(s, Grant)] == [Grant("b", 3, 2)]
    assert next(w for w in out.writes if isinstance(w, ev.SaveSeat)).incarnation == 2


def test_case_02_the_dead_rank_goes_and_no_healthy_one() -> None:
    world = formed()
    world.progress(2, 500)
    world.wait(0, 2, 4_900)  # two others blame a healthy rank, which itself waits for the dead one
    world.wait(1, 2, 4_900)
    world.wait(2, 3, 4_900)
    world.kill(3)
    assert world.view.ranks == (0, 1, 2)
    for rank in (0, 1, 2):
        world.wait(rank, 0, 0)
    world.settle()
    assert members(world) == [(0, 1), (1, 1), (2, 1), (3, 2)]
    assert world.membership.adopted_epoch == world.view.epoch


def test_two_deaths_in_a_row_take_the_two_views_there_may_be_and_a_third_waits() -> None:
    world = formed(experts=4)
    for rank in (3, 2):
        world.kill(rank)
    assert world.view.epoch == 3
    assert world.membership.adopted_epoch == 1
    world.kill(1)
    assert world.view.epoch == 3, "a third view would be unadopted"
    assert "epoch 3 is not adopted yet" in world.membership.waiting
    assert (1, 1) in world.dead, "its dead word is set without a view"
    world.run()
    assert world.barrier() == 3
    assert world.view.epoch == 4
    assert world.view.ranks == (0,)
    expelled = [(m.rank, m.incarnation) for m in world.view.expelled]
    assert expelled == [(1, 1)], "those of adopted epochs need not be told again"


def test_expelled_incarnations_are_told_until_the_epoch_is_adopted() -> None:
    world = formed()
    world.kill(3)
    world.kill(2)
    assert [(m.rank, m.incarnation) for m in world.view.expelled] == [(2, 1), (3, 1)]


def test_min_ranks_is_a_floor_for_views() -> None:
    world = formed(min_ranks=3)
    world.attach = False  # nobody comes back for now
    world.kill(3)
    assert world.view.ranks == (0, 1, 2)
    world.run()
    world.barrier()
    world.kill(1)
    assert world.view.ranks == (0, 1, 2)
    assert "min_ranks is 3" in world.membership.waiting
    world.run()
    world.attach_engine(3)
    world.settle()
    assert len(world.view.ranks) >= 3
    assert (1, 1) not in members(world)


def test_after_all_members_died_the_group_forms_anew() -> None:
    world = formed()
    for rank in range(4):
        world.kill(rank)
    world.settle()
    view = world.view
    assert view.ranks == (0, 1, 2, 3)
    assert view.previous_epoch == 0
    assert view.epoch > 1
    assert all(m.incarnation == 2 for m in view.members)
    assert not view.lost


def test_a_group_that_loses_members_twice_while_it_forms_begins_anew() -> None:
    """No step is run with somebody dead, and there are two open views already."""
    world = World(group_config(flap_limit=0), TWO_NODES)
    world.run()
    world.attach = False
    for dead in ((2,), (0, 1)):
        for rank in dead:
            world.kill(rank)
        world.run()
    assert (world.view.epoch, world.membership.adopted_epoch) == (2, 0)
    assert world.view.ranks == (0, 1, 3)
    alone = world.membership.seats[3]
    world.advance(STAGE_TIMEOUT_MS - 500)
    assert alone.live, "word that it runs may be on its way"
    world.advance(1_000)
    assert (alone.incarnation, alone.live) != (1, True)
    world.run()
    for rank in range(4):
        world.attach_engine(rank)
    world.settle()
    assert world.view.ranks == (0, 1, 2, 3)
    assert world.view.epoch == world.membership.adopted_epoch == 3


def test_a_group_that_forms_anew_does_not_wait_for_ever_for_a_lost_node() -> None:
    world = formed(experts=4)
    world.cut("b", gone=True)
    world.kill(0)
    world.kill(1)
    world.settle()
    assert "all members died" in world.membership.waiting
    world.advance(REFORM_PATIENCE_MS, step_ms=1_000)
    assert members(world) == [(0, 2), (1, 2)]


# ---- joins


def test_a_joiner_stages_first_and_the_others_hear_of_it_after() -> None:
    world = formed()
    world.kill(3)
    world.run()
    world.barrier()
    assert world.view.epoch == 3
    waiting = {
        n: [m for m in node.inbox if isinstance(m, Propose)] for n, node in world.nodes.items()
    }
    assert waiting["a"] == []
    assert [(m.view.epoch, m.ranks) for m in waiting["b"]] == [(3, (3,))]
    world.deliver("b")
    shown = {
        n: [m for m in node.inbox if isinstance(m, Propose)] for n, node in world.nodes.items()
    }
    assert [(m.view.epoch, m.ranks) for m in shown["a"]] == [(3, (0, 1))]
    assert [(m.view.epoch, m.ranks) for m in shown["b"]] == [(3, (2,))]


def test_a_death_calls_off_a_join_that_nobody_else_heard_of() -> None:
    world = formed()
    world.kill(3)
    world.run()
    world.barrier()  # epoch 3 with rank 3 is proposed to rank 3 alone
    assert world.membership.seats[3].since == 3
    world.kill(0)
    assert world.view.epoch == 4
    assert world.view.ranks == (1, 2)
    assert (3, 2) not in [(m.rank, m.incarnation) for m in world.view.expelled]
    world.settle()
    assert (3, 2) in members(world), "the incarnation was not used up"


def test_a_death_does_not_call_off_a_join_that_others_may_have_adopted() -> None:
    world = formed()
    world.kill(3)
    world.run()
    world.barrier()
    world.run()  # all staged epoch 3
    world.kill(0)
    assert world.view.epoch == 4
    assert world.view.ranks == (1, 2, 3)
    world.settle()
    assert members(world) == [(0, 2), (1, 1), (2, 1), (3, 2)]


def test_a_joiner_that_dies_before_it_staged_costs_nothing() -> None:
    world = formed()
    world.kill(3)
    world.run()
    world.barrier()
    assert world.view.epoch == 3
    world.kill(3)
    assert world.view.ranks == (0, 1, 2)
    world.settle()
    assert members(world) == [(0, 1), (1, 1), (2, 1), (3, 3)]


def test_scaling_up_and_down_any_ranks_without_a_restart() -> None:
    world = World(group_config(max_ranks=6, flap_limit=0), {"a": (0, 1), "b": (2, 3), "c": ()})
    world.settle()
    world.nodes["c"].seats.update({r: type(world.seat(0)[1])(r) for r in (4, 5)})
    world.connect("c")
    world.settle()
    assert world.view.ranks == (0, 1, 2, 3, 4, 5)
    assert not world.view.lost
    assert all(world.view.placement.slot_expert[:, rank].max() >= 0 for rank in (4, 5))
    world.feed(ev.Drain((0, 2, 5), "smaller"))
    world.settle()
    assert world.view.ranks == (1, 3, 4)
    assert not world.view.lost
    assert {m.incarnation for m in world.view.members} == {1}
    assert [phases(world)[rank] for rank in (0, 2, 5)] == ["gone"] * 3


def test_case_25_scale_then_fault_then_scale_works() -> None:
    world = World(group_config(max_ranks=6, flap_limit=0), {"a": (0, 1, 4), "b": (2, 3, 5)})
    world.settle()
    assert len(world.view.ranks) == 6
    world.kill(4)
    world.settle()
    assert members(world)[4] == (4, 2)
    world.feed(ev.Drain((1,), ""))
    world.settle()
    world.kill(3)
    world.settle()
    world.feed(ev.Undrain((1,)))
    world.settle()
    assert members(world) == [(0, 1), (1, 2), (2, 1), (3, 2), (4, 2), (5, 1)]
    assert not world.view.lost
    assert world.membership.adopted_epoch == world.view.epoch


def test_case_26_twenty_cycles_of_scaling_leave_nothing_over() -> None:
    world = World(group_config(max_ranks=6, flap_limit=3), {"a": (0, 1, 4), "b": (2, 3, 5)})
    world.settle()
    for cycle in range(20):
        world.feed(ev.Drain((4, 5), ""))
        world.settle()
        assert world.view.ranks == (0, 1, 2, 3), cycle
        world.feed(ev.Undrain((4, 5)))
        world.settle()
        assert world.view.ranks == (0, 1, 2, 3, 4, 5), cycle
    state = world.membership._s
    assert (state.pending, state.left, state.revoked) == ([], [], set())
    assert len(state.in_use or []) == 1
    assert not any(node.inbox for node in world.nodes.values())


# ---- staging that fails


def test_a_member_that_does_not_stage_in_time_leads_to_another_view() -> None:
    world = formed()
    world.seat(1)[1].hung = True
    world.kill(3)
    world.run()
    world.advance(STAGE_TIMEOUT_MS - 200)
    assert world.view.ranks == (0, 1, 2)
    world.advance(400)
    assert world.view.ranks == (0, 2)
    assert "did not stage epoch 2 within 5000 ms" in world.view.reason
    world.run()
    assert world.barrier() == 3


def test_when_an_old_member_cannot_stage_with_a_joiner_the_joiner_goes() -> None:
    world = formed()
    world.kill(3)
    world.run()
    world.barrier()
    world.deliver("b")  # the joiner staged epoch 3
    world.feed(ev.Staged("a", 0, 1, 3, "cannot map the memory of rank 3"))
    assert world.view.ranks == (0, 1, 2)
    assert "could not stage epoch 3: cannot map the memory of rank 3" in world.view.reason
    assert world.membership.seats[0].phase is Phase.ACTIVE


def test_a_joiner_whose_engine_never_comes_to_its_step_is_dropped() -> None:
    world = formed(timeouts=Timeouts(step_timeout_ms=6_000, hang_timeout_ms=5_500))
    world.kill(3)
    world.run()
    world.barrier()
    world.seat(3)[1].hung = True
    world.run()
    world.advance(5_800)
    assert world.view.epoch == 3
    world.advance(400)
    assert world.view.ranks == (0, 1, 2)
    assert "did not stage epoch 3 within 6000 ms" in world.view.reason
