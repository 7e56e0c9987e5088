"""Stories of a group, told to the real membership by simulated nodes."""

import pytest

from elasticep.control import events as ev
from elasticep.control.decisions import STAGE_TIMEOUT_MS
from elasticep.control.events import Fence, Grant, Propose, SeatReport, SeatState
from elasticep.control.membership import Membership
from elasticep.control.placement import SlotShortage
from elasticep.control.proposals import REFORM_PATIENCE_MS
from elasticep.control.seats import InvalidTransition, Phase, Seat
from elasticep.errors import UnknownRank, UsageError
from elasticep.group import LostExperts, Timeouts
from elasticep.testing.membership import World, group_config

TWO_NODES = {"a": (0, 1), "b": (2, 3)}


def formed(nodes: dict[str, tuple[int, ...]] | None = None, **config: object) -> World:
    """Four ranks on two nodes that run in epoch 1."""
    config.setdefault("flap_limit", 0)
    world = World(group_config(**config), nodes or TWO_NODES)  # type: ignore[arg-type]
    world.settle()
    assert world.membership.adopted_epoch == world.view.epoch == 1
    return world


def members(world: World) -> list[tuple[int, int]]:
    return [(m.rank, m.incarnation) for m in world.view.members]


def phases(world: World) -> list[str]:
    return [str(seat.phase) for seat in world.membership.seats.values()]


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


def test_a_seat_belongs_to_the_node_that_has_it() -> None:
    world = formed()
    hello = ev.NodeHello("c", (SeatReport(3, 7, SeatState.ATTACHED, 1),))
    out = world.membership.handle(hello, world.now_ms)
    assert [s for s in out.now if isinstance(s, Fence)] == [
        Fence("c", 3, 7, 0, "the seat is held by node b")
    ]
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
    world = World(group_config(flap_limit=0), TWO_NODES, attach=False)
    world.run()
    granted = []
    for _ in range(6):
        began = world.now_ms
        seat = world.membership.seats[0]
        incarnation = seat.incarnation
        world.kill(0, "cannot start")
        while seat.incarnation == incarnation:
            world.advance(50, step_ms=50)
        world.run()
        granted.append(world.now_ms - began)
    assert granted == sorted(granted)
    assert granted[0] <= 150
    assert granted[-1] >= 3_000


# ---- operators


def test_a_drained_rank_serves_until_the_others_have_left_it() -> None:
    world = formed()
    out = world.feed(ev.Drain((1,), "new card"))
    assert world.view.ranks == (0, 2, 3)
    assert world.view.expelled == ()
    assert world.view.reason == "rank 1 leaves: drained: new card"
    assert phases(world)[1] == "draining"
    assert not [s for s in (*out.now, *out.after) if isinstance(s, Fence)]
    world.run()
    world.barrier()
    assert phases(world)[1] == "fenced"
    world.settle()
    assert phases(world)[1] == "gone"
    assert world.membership.seats[1].incarnation == 1
    world.feed(ev.Undrain((1,)))
    world.settle()
    assert members(world) == [(0, 1), (1, 2), (2, 1), (3, 1)]


def test_a_drain_that_is_taken_back_in_time_changes_nothing() -> None:
    world = formed(experts=4)
    world.kill(3)
    world.kill(2)  # two unadopted views: the drain has to wait
    world.feed(ev.Drain((1,), ""))
    assert phases(world)[1] == "draining"
    world.feed(ev.Undrain((1,)))
    assert phases(world)[1] == "active"
    world.settle()
    assert (1, 1) in members(world)


def test_the_last_copy_of_an_expert_is_moved_before_its_rank_leaves() -> None:
    # No spare copies: every expert lies once, on ranks whose other slots are free.
    world = formed(spare_copies=0)
    world.feed(ev.Drain((0,), ""))
    world.settle()
    assert world.view.ranks == (1, 2, 3)
    assert not world.view.lost
    for view in world.proposed:
        assert not view.lost, view.describe()


def test_full_slots_are_emptied_in_one_view_and_filled_in_the_next() -> None:
    # 4 ranks x 4 slots, 8 experts twice: full. After two ranks drain, 8 slots hold 8 experts.
    world = formed()
    world.feed(ev.Drain((2, 3), ""))
    world.settle()
    assert world.view.ranks == (0, 1)
    assert not world.view.lost
    for before, after in zip(world.proposed, world.proposed[1:], strict=False):
        assert not after.lost, after.describe()
        for rank in set(before.ranks) & set(after.ranks):
            old = before.placement.slot_expert[:, rank]
            new = after.placement.slot_expert[:, rank]
            assert ((old == new) | (old == -1) | (new == -1)).all(), "a slot in use was overwritten"


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
def test_a_slot_that_an_unadopted_view_freed_gets_nothing_else_yet(victim: int) -> None:
    world = formed({"a": tuple(range(6))}, ranks=6, experts=12)  # all 24 slots are full
    alive = tuple(world.seat(rank)[1].report() for rank in range(4))
    empty = tuple(SeatReport(rank, 0, SeatState.EMPTY) for rank in (4, 5))
    world.feed(ev.NodeHello("a", alive + empty))  # two at once: some experts lose both copies
    first, second = world.proposed
    assert second.lost
    freed = (second.placement.slot_expert != first.placement.slot_expert)[:, :4]
    assert freed.any(), "room is made for them"
    world.kill(victim)
    third = world.view
    assert third.epoch == 3
    for rank in third.ranks:
        before, after = (v.placement.slot_expert[:, rank] for v in (first, third))
        assert ((before == after) | (after == -1)).all(), "it may still run in epoch 1"


def test_drains_that_cannot_be_are_refused_before_anything_happens() -> None:
    world = formed(experts=12, min_ranks=2)
    for event, error, text in (
        (ev.Drain((7,), ""), UnknownRank, "ranks 0 to 3"),
        (ev.Drain((), ""), UnknownRank, "no rank"),
        (ev.Undrain((9,)), UnknownRank, "rank 9"),
        (ev.Drain((0, 1, 2), ""), UsageError, "would leave 1 members"),
        (ev.Drain((0, 1), ""), SlotShortage, "8 slots for 12 experts"),
    ):
        with pytest.raises(error, match=text):
            world.feed(event)
    assert world.view.epoch == 1
    assert phases(world) == ["active"] * 4


def test_a_rank_that_dies_three_times_in_ten_minutes_waits_for_a_person() -> None:
    world = formed(flap_limit=3)
    for _ in range(3):
        world.kill(3, "ECC error")
        world.settle()
    assert world.view.ranks == (0, 1, 2)
    seat = world.membership.seats[3]
    assert seat.phase is Phase.GONE
    assert seat.held.startswith("ended 3 times in 10 minutes, the last time because ECC error")
    world.restart_controller()
    world.settle()
    assert world.view.ranks == (0, 1, 2), "that survives a change of the leader"
    world.feed(ev.Undrain((3,)))
    world.settle()
    assert members(world)[3] == (3, 4)


def test_engines_that_are_restarted_in_order_are_no_flapping() -> None:
    world = formed(flap_limit=3)
    for _ in range(5):
        world.kill(3, "detached")
        world.settle()
    assert (3, 6) in members(world)


def test_deaths_that_lie_far_apart_are_no_flapping() -> None:
    world = formed(flap_limit=3)
    for _ in range(5):
        world.kill(3)
        world.settle()
        world.advance(400_000, step_ms=50_000)
    assert (3, 6) in members(world)


def test_with_manual_readmission_an_expelled_rank_waits_for_a_person() -> None:
    world = formed(manual_readmission=True)
    world.kill(3)
    world.settle()
    assert world.view.ranks == (0, 1, 2)
    assert "until an operator lets it in" in world.membership.seats[3].held
    world.feed(ev.Undrain((3,)))
    world.settle()
    assert world.view.ranks == (0, 1, 2, 3)


# ---- lost experts


def test_lost_experts_are_loaded_into_free_slots_of_the_same_view_under_refuse() -> None:
    world = formed(spare_copies=0)
    world.kill(3)
    view = world.view
    assert view.epoch == 2
    assert not view.lost
    assert "lost experts" not in view.reason


def test_under_serve_the_survivors_go_on_first_and_lost_experts_follow() -> None:
    world = formed(spare_copies=0, lost_experts=LostExperts.SERVE)
    world.kill(3)
    view = world.view
    assert len(view.lost) == 2 * 2  # two experts of each of two layers
    assert "4 experts have no replica" in view.reason
    world.attach = False
    world.run()
    world.barrier()
    assert world.view.epoch == 3
    assert not world.view.lost
    assert "4 lost experts are loaded again" in world.view.reason


def test_a_rank_that_cannot_load_a_lost_expert_is_not_expelled_for_it() -> None:
    world = formed(spare_copies=0)
    world.attach = False
    world.kill(3)
    filled = [
        rank
        for rank in world.view.ranks
        if (
            world.view.placement.slot_expert[:, rank]
            != world.proposed[0].placement.slot_expert[:, rank]
        ).any()
    ]
    victim = filled[0]
    node, seat = world.seat(victim)
    world.feed(ev.Staged(node.name, victim, seat.incarnation, 2, "no such file"))
    assert world.view.epoch == 3
    assert victim in world.view.ranks
    assert world.membership.seats[victim].phase is Phase.ACTIVE
    mine = world.view.placement.slot_expert[:, victim]
    assert (mine == world.proposed[0].placement.slot_expert[:, victim]).all()
    assert f"rank {victim} could not load what it was given" in world.view.reason


def test_with_too_few_slots_the_lost_are_named_and_the_survivors_stay_together() -> None:
    world = formed(experts=16)  # every slot of all four ranks is needed
    world.attach = False
    world.kill(3)
    assert world.view.ranks == (0, 1, 2)
    assert len(world.view.lost) == 2 * 4
    world.run()
    world.barrier()
    epoch = world.view.epoch
    world.advance(5_000)
    assert world.view.epoch == epoch, "no view after view that changes nothing"
    world.attach_engine(3)
    world.settle()
    assert not world.view.lost


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
