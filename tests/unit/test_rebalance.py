"""When experts are moved in the background: told to the real membership, loads and rebalancer."""

import numpy as np
import pytest

from elasticep.balance import RebalancePolicy
from elasticep.control import events as ev
from elasticep.control.arrange import expert_bytes
from elasticep.control.background import Ask, Pause, Resume
from elasticep.control.decisions import STAGE_TIMEOUT_MS
from elasticep.control.events import SeatReport, SeatState
from elasticep.control.membership import Membership
from elasticep.control.placement import EMPTY
from elasticep.control.planning import Planned
from elasticep.control.rebalance import Doing
from elasticep.control.views import View
from elasticep.errors import ConfigError
from elasticep.group import GroupConfig
from elasticep.testing.balanced import POLICY, Balanced, hot_rank, skewed, swapped
from elasticep.testing.membership import group_config

# ---- when


def test_a_skewed_load_is_balanced_view_by_view_and_a_balanced_one_is_left_alone() -> None:
    group = Balanced(experts=8, slots=4)
    tokens = hot_rank(group)
    group.count(tokens)
    assert group.imbalance > 1.2
    first = group.world.view
    group.until(lambda: group.background.rebalancer.completed == 1, tokens)
    assert group.imbalance < 1.05
    (done,) = group.events("rebalance.done")
    assert done["imbalance_after"] < done["imbalance_before"]  # type: ignore[operator]
    assert group.world.view.ranks == first.ranks
    assert group.world.view.reason.startswith("rebalance, stage ")
    epoch = group.world.view.epoch
    group.advance(6_000, tokens)
    assert group.world.view.epoch == epoch, "balanced: nothing more is moved"
    assert "balanced" in group.background.rebalancer.why


def test_case_10_map_and_weights_switch_together() -> None:
    """Every stage is a view of its own, it fills only slots that the view before leaves empty, and
    the next one is proposed only when all run in it."""
    group = Balanced(experts=8, slots=3)
    tokens = hot_rank(group)
    seen = [group.world.view]

    def watch() -> bool:
        view = group.world.view
        if view is not seen[-1]:
            assert group.world.membership.adopted_epoch >= seen[-1].epoch
            old, new = seen[-1].placement.slot_expert, view.placement.slot_expert
            filled = (new != EMPTY) & (new != old)
            assert (old[filled] == EMPTY).all(), "a slot in use would be overwritten"
            assert not view.lost
            view.placement.validate(group.world.config.geometry, view.ranks)
            seen.append(view)
        return group.background.rebalancer.completed >= 1

    group.until(watch, tokens)
    assert len(seen) >= 2


def test_case_10_the_next_stage_waits_until_all_run_in_the_one_before() -> None:
    group = Balanced(experts=8, slots=5)
    group.operate(Ask("import", swapped(group.world.view.placement)))
    rebalancer = group.background.rebalancer
    group.meets = False  # all stage it, and no engine comes to a step
    group.until(lambda: rebalancer.run is not None and rebalancer.run.open_epoch > 0)
    assert rebalancer.run is not None
    assert len(rebalancer.run.planned.path) > 1
    epoch = group.world.view.epoch
    group.advance(3_000)
    assert group.world.view.epoch == epoch
    group.meets = True
    group.until(lambda: rebalancer.completed == 1)
    assert group.world.view.epoch > epoch
    assert not group.events("rebalance.abandoned"), "it was tried too early"


def test_case_14_no_rank_holds_an_expert_twice_in_any_view() -> None:
    group = Balanced(experts=8, slots=5)
    for turn in range(4):
        group.advance(4_000, skewed(hot=turn * 2))
    assert len(group.world.proposed) > 1
    for view in group.world.proposed:
        view.placement.validate(group.world.config.geometry, view.ranks)


def test_case_19_experts_without_load_are_spread_and_keep_two_copies() -> None:
    group = Balanced(experts=8, slots=5)
    tokens = np.zeros((2, 8), np.int64)
    tokens[:, 0] = 100
    group.until(lambda: group.background.rebalancer.completed > 0, tokens)
    copies = group.world.view.placement.copies()
    assert (copies >= 2).all(), copies


def test_a_gain_that_is_too_small_moves_nothing() -> None:
    policy = RebalancePolicy(settle_ms=0, window_ms=1_000, min_gain=100.0)
    group = Balanced(rebalance=policy)
    epoch = group.world.view.epoch
    group.advance(4_000, hot_rank(group))
    assert group.world.view.epoch == epoch
    assert "not worth it" in group.background.rebalancer.why
    assert "min_gain is 100" in group.background.rebalancer.why


def test_few_tokens_that_are_uneven_by_chance_move_nothing() -> None:
    group = Balanced()
    tokens = hot_rank(group)
    group.count(tokens // 20)
    assert group.imbalance > 1.2
    group.advance(4_000)
    assert group.background.rebalancer.completed == 0
    assert "by chance" in str(group.events("rebalance.planned")[0]["reason"])


def test_at_most_so_many_copies_in_one_rebalance() -> None:
    policy = RebalancePolicy(settle_ms=0, window_ms=1_000, min_gain=0.0, max_moves=2)
    group = Balanced(rebalance=policy, experts=8, slots=4)
    group.until(lambda: group.background.rebalancer.completed > 0, skewed(hot=3))
    assert all(int(done["moves"]) <= 2 for done in group.events("rebalance.done"))  # type: ignore[call-overload]


def test_time_passes_between_two_rebalances() -> None:
    policy = RebalancePolicy(settle_ms=0, min_interval_ms=20_000, window_ms=500, min_gain=0.0)
    group = Balanced(rebalance=policy)
    group.until(lambda: group.background.rebalancer.completed == 1, hot_rank(group))
    done_ms = group.world.now_ms
    tokens = hot_rank(group)
    group.until(lambda: group.background.rebalancer.completed == 2, tokens)
    assert group.world.now_ms - done_ms >= 20_000


def test_off_means_off_and_an_operator_may_still_ask() -> None:
    policy = RebalancePolicy(automatic=False, settle_ms=0, window_ms=500)
    group = Balanced(rebalance=policy)
    tokens = hot_rank(group)
    group.advance(5_000, tokens)
    assert group.background.rebalancer.completed == 0
    group.operate(Ask("force"))
    assert group.world.saved_rebalance is not None
    assert group.world.saved_rebalance.asked == "force"
    group.until(lambda: group.background.rebalancer.completed == 1, tokens)
    assert group.world.saved_rebalance.asked == "", "it is done"


# ---- repair


def test_a_death_moves_nothing_at_once_and_redundancy_is_repaired_in_the_background() -> None:
    group = Balanced(experts=6, slots=4)
    group.world.attach = False
    before = group.world.view.placement.slot_expert
    node, seat = group.world.seat(3)
    group.world.feed(ev.SeatChanged(node.name, SeatReport(3, 1, SeatState.DEAD, cause="died")))
    seat.state = SeatState.DEAD
    after = group.world.view.placement
    assert (after.slot_expert[:, :3] == before[:, :3]).all(), "re-split only"
    assert (after.copies() == 1).any()
    del group.counters[3]
    group.until(lambda: group.background.rebalancer.completed > 0)
    assert (group.world.view.placement.copies() >= 2).all()
    assert "second copy" in str(group.events("rebalance.planned")[-1]["reason"])


def test_what_cannot_be_repaired_is_tried_once_and_not_for_ever() -> None:
    group = Balanced(experts=14, slots=4)  # 16 slots: hardly any second copies
    group.advance(10_000)
    plans = len(group.events("rebalance.planned"))
    group.advance(30_000)
    assert len(group.events("rebalance.planned")) == plans


def test_a_rank_that_joins_while_experts_move_comes_first() -> None:
    group = Balanced(config=group_config(ranks=3, max_ranks=4, flap_limit=0, rebalance=POLICY))
    assert group.world.view.ranks == (0, 1, 2, 3), "the fourth came in by itself"


def test_a_death_in_between_abandons_it_and_plans_anew() -> None:
    group = Balanced(experts=6, slots=4)
    tokens = hot_rank(group)
    group.until(lambda: bool(group.background.rebalancer.run and
                             group.background.rebalancer.run.open_epoch), tokens)  # fmt: skip
    group.world.attach = False
    del group.counters[2]
    group.world.kill(2)
    group.advance(100)
    assert group.background.rebalancer.doing is Doing.IDLE
    (abandoned,) = group.events("rebalance.abandoned")
    assert "rank 2 left" in str(abandoned["reason"])
    group.until(lambda: group.background.rebalancer.completed > 0, tokens)
    assert (group.world.view.placement.copies() >= 2).all()


# ---- pause, resume, the next leader


def test_a_pause_survives_a_change_of_the_leader_and_ends_with_resume() -> None:
    group = Balanced()
    tokens = hot_rank(group)
    group.operate(Pause("night shift"))
    group.advance(3_000, tokens)
    group.next_leader()
    epoch = group.world.view.epoch
    group.advance(6_000, tokens)
    assert group.world.view.epoch == epoch
    assert group.background.rebalancer.why == "night shift"
    group.operate(Resume())
    group.until(lambda: group.background.rebalancer.completed == 1, tokens)


def test_a_pause_stops_after_the_stage_that_is_under_way() -> None:
    group = Balanced(experts=8, slots=3)
    tokens = hot_rank(group)
    group.until(lambda: group.background.rebalancer.run is not None, tokens)
    group.operate(Pause(""))
    group.advance(1_000)
    epoch = group.world.view.epoch
    group.advance(POLICY.stuck_ms * 2)
    assert group.world.view.epoch == epoch
    assert group.background.rebalancer.stuck == 0, "a pause is not a fault"


def test_an_import_that_was_acknowledged_is_carried_out_by_the_next_leader() -> None:
    group = Balanced(experts=8, slots=4)
    wanted = swapped(group.world.view.placement)
    group.operate(Ask("import", wanted))
    group.next_leader()
    group.until(lambda: group.background.rebalancer.completed == 1)
    assert group.world.view.placement == wanted
    assert group.world.saved_rebalance is not None
    assert group.world.saved_rebalance.placement == b""


def test_the_next_leader_goes_on_from_a_stage_that_was_half_done() -> None:
    group = Balanced(experts=8, slots=3)
    tokens = hot_rank(group)
    group.until(lambda: group.world.view.epoch > 1, tokens)
    group.next_leader()
    group.until(
        lambda: group.imbalance < 1.1 and group.world.membership.quiet_ms(group.world.now_ms) > 0,
        tokens,
    )


# ---- liveness


def test_case_16_a_rebalance_that_stands_still_is_reported_and_begun_anew() -> None:
    group = Balanced()
    tokens = hot_rank(group)
    group.until(lambda: group.background.rebalancer.run is not None, tokens)
    group.meets = False  # all have staged it, and no engine comes to a step
    group.advance(POLICY.stuck_ms // 2)
    rebalancer = group.background.rebalancer
    assert group.world.now_ms - rebalancer.progress_ms >= POLICY.stuck_ms // 2 - 500, "its age"
    assert rebalancer.stuck == 0
    group.advance(POLICY.stuck_ms)
    assert rebalancer.stuck == 1
    (stuck,) = group.events("rebalance.stuck")
    assert "while running" in str(stuck["reason"])
    assert rebalancer.doing is Doing.IDLE
    group.meets = True
    tokens = hot_rank(group)
    group.until(lambda: rebalancer.completed > 0, tokens)


def test_case_16_a_plan_that_never_comes_is_given_up_and_made_anew() -> None:
    group = Balanced()
    tokens = hot_rank(group)
    lost: list[object] = []
    planned, group.planned = group.planned, lost.append  # type: ignore[method-assign,assignment]
    group.until(lambda: bool(lost), tokens)
    group.advance(POLICY.stuck_ms + 200, tokens)
    assert group.background.rebalancer.stuck == 1
    late = lost[0]
    assert isinstance(late, Planned)
    planned(late)
    assert group.background.rebalancer.run is None, "a plan that was given up counts no more"
    group.planned = planned  # type: ignore[method-assign]
    group.until(lambda: group.background.rebalancer.completed > 0, tokens)


def test_case_16_an_error_of_its_own_is_said_and_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = Balanced()
    with monkeypatch.context() as broken:
        broken.setattr(Membership, "quiet_ms", lambda self, now_ms: 1 // 0)
        group.advance(100)
    (fault,) = group.events("rebalance.fault")
    assert "ZeroDivisionError" in str(fault["reason"])
    tokens = hot_rank(group)
    group.until(lambda: group.background.rebalancer.completed > 0, tokens)


# ---- staging


def stalled(group: Balanced, rank: int) -> None:
    _, seat = group.world.seat(rank)
    seat.hung = True


def test_weights_that_load_slowly_are_no_delay_and_those_that_stop_are() -> None:
    group = Balanced()
    group.until(lambda: group.background.rebalancer.run is not None, hot_rank(group))
    stalled(group, 1)
    group.advance(200)
    run = group.background.rebalancer.run
    assert run is not None
    epoch = group.world.view.epoch
    assert run.open_epoch == epoch
    node, seat = group.world.seat(1)
    done = 0
    for _ in range(3 * STAGE_TIMEOUT_MS // 1_000):
        done += 10
        group.world.feed(
            ev.Progressed(node.name, 1, seat.incarnation, 5, False, epoch, done, 1_000)
        )
        group.advance(1_000)
    assert group.world.view.epoch == epoch, "it makes headway"
    assert group.background.rebalancer.stuck == 0
    group.advance(STAGE_TIMEOUT_MS + 1_000)
    assert group.world.view.epoch > epoch, "it stopped"


def test_headway_beyond_the_total_counts_as_none() -> None:
    group = Balanced()
    group.until(lambda: group.background.rebalancer.run is not None, hot_rank(group))
    stalled(group, 1)
    group.advance(200)
    epoch = group.world.view.epoch
    node, seat = group.world.seat(1)
    for second in range(10):
        beat = ev.Progressed(node.name, 1, seat.incarnation, 5, False, epoch, 100 + second, 100)
        group.world.feed(beat)
        group.advance(1_000)
    assert group.world.view.epoch > epoch


def test_a_move_that_nobody_can_supply_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert with one copy changes places: its old rank has it still when the new one fails."""
    group = Balanced(experts=8, slots=4, spare_copies=0)
    world = group.world
    group.operate(Ask("import", swapped(world.view.placement)))
    before, stage, refused = world.view, world.stage, []

    def refusing(rank: int, view: View) -> None:
        node, seat = world.seat(rank)
        old, new = before.placement.slot_expert[:, rank], view.placement.slot_expert[:, rank]
        places = np.argwhere((new != old) & (new != EMPTY)).tolist()
        if view.epoch != before.epoch + 1 or not places:
            stage(rank, view)
            return
        pairs = tuple((layer, int(new[layer, slot])) for layer, slot in places)
        refused.append(pairs)
        world.feed(ev.Staged(node.name, rank, seat.incarnation, view.epoch, "no source", pairs))

    monkeypatch.setattr(world, "stage", refusing)
    group.meets = False
    group.advance(1_000)
    assert refused
    group.meets = True
    group.advance(3_000)
    assert world.membership.adopted_epoch == world.view.epoch > before.epoch + 1
    assert [view.lost for view in world.proposed if view.lost] == []


def test_an_answer_that_names_what_it_was_not_given_is_the_ranks_own_fault() -> None:
    group = Balanced(experts=8, slots=4, spare_copies=0)
    world = group.world
    world.attach = False
    world.kill(3)
    view = world.view
    node, seat = world.seat(0)
    held = set(view.placement.slot_expert[0, 0].tolist())
    other = next(expert for expert in range(8) if expert not in held)
    world.feed(
        ev.Staged(node.name, 0, seat.incarnation, view.epoch, "?", ((0, other), (9, 0), (0, 99)))
    )
    assert not group.events("experts.unrestorable")
    assert len(group.events("staging.failed")) == 1


# ---- the group's options


def test_staging_slots_stay_empty_in_every_plan() -> None:
    config = group_config(
        experts=8, slots=5, staging_slots=2, flap_limit=0, rebalance=POLICY, spare_copies=2
    )
    group = Balanced(config)
    for turn in range(4):
        group.until(
            lambda seen=group.background.rebalancer.completed: (  # type: ignore[misc]
                group.background.rebalancer.completed > seen
            ),
            skewed(hot=turn * 2, weight=40),
        )
        filled = (group.world.view.placement.slot_expert != EMPTY).sum(axis=2)
        assert filled.max() <= 3, filled
    assert group.background.rebalancer.completed > 0


def test_with_staging_slots_a_move_takes_one_view() -> None:
    config = group_config(experts=8, slots=5, staging_slots=2, flap_limit=0, rebalance=POLICY)
    group = Balanced(config)
    group.until(lambda: group.background.rebalancer.run is not None, skewed(hot=3))
    assert group.background.rebalancer.run is not None
    assert len(group.background.rebalancer.run.planned.path) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target", 0.5),
        ("min_gain", -1.0),
        ("window_ms", 1),
        ("max_moves", -1),
        ("max_moves", 1.5),
        ("automatic", 1),
        ("groups", 0),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"rebalance\.{name}"):
        RebalancePolicy(**{name: value})  # type: ignore[arg-type]


def test_a_groups_policy_crosses_processes_and_files() -> None:
    config = group_config(slots=4, staging_slots=1, rebalance=RebalancePolicy(max_bytes=1 << 40))
    assert GroupConfig.from_proto(config.to_proto()) == config
    assert GroupConfig.from_toml_dict(config.to_dict()) == config
    assert expert_bytes(config) == 0
    with pytest.raises(ConfigError, match=r"rebalance has no setting|min_gian"):
        GroupConfig.from_toml_dict(config.to_dict() | {"rebalance": {"min_gian": 1.0}})
    with pytest.raises(ConfigError, match="staging_slots"):
        group_config(slots=4, staging_slots=4)
