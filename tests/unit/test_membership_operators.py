"""Drains, damping, lost experts: what operators want, in stories told by simulated nodes."""

import pytest

from elasticep.control import events as ev
from elasticep.control.events import Fence, SeatReport, SeatState
from elasticep.control.placement import SlotShortage
from elasticep.control.seats import Phase
from elasticep.errors import UnknownRank, UsageError
from elasticep.group import LostExperts
from elasticep.testing.membership import formed, members, phases

# ---- operators


def test_a_drained_rank_serves_until_the_others_have_left_it() -> None:
    world = formed()
    out = world.feed(ev.Drain((1,), "new card"))
    assert world.view.ranks == (0, 2, 3)
    assert world.view.expelled == ()
    assert world.view.reason == "rank 1 leaves: drained: new card"
    assert phases(world)[1] == "draining"
    assert not [s for s in (*out.now, *out.after) if isinstance(s, Fence)]
    told = {s.node: s.leaving for s in out.after if isinstance(s, ev.Propose)}
    assert told == {"a": ((1, "drained: new card"),), "b": ()}, "its own node hears why"
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
