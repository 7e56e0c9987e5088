"""`[rebalance]`, `spare_copies` and `staging_slots` of a running group: what a change does."""

from dataclasses import replace

from elasticep.balance import RebalancePolicy
from elasticep.control import events as ev
from elasticep.control.placement import EMPTY
from elasticep.control.rebalance import Doing
from elasticep.policies import change_from_text
from elasticep.testing.balanced import POLICY, Balanced, hot_rank, skewed
from elasticep.testing.membership import group_config


def change(group: Balanced, **settings: str) -> None:
    """What an operator types after `elasticep rebalance --set`."""
    text = {f"rebalance.{name}": value for name, value in settings.items()}
    policies = group.world.membership.policies.changed(change_from_text(text))
    group.world.feed(ev.SetPolicies(policies))


def change_policy(group: Balanced, **settings: str) -> None:
    """The same after `elasticep policy --set`."""
    policies = group.world.membership.policies.changed(change_from_text(settings))
    group.world.feed(ev.SetPolicies(policies))


def test_automatic_rebalancing_is_switched_off_and_on_again() -> None:
    group = Balanced()
    change(group, automatic="false")
    tokens = hot_rank(group)
    group.advance(5_000, tokens)
    assert group.background.rebalancer.completed == 0
    assert group.background.rebalancer.why == "automatic rebalancing is off"
    change(group, automatic="true")
    group.until(lambda: group.background.rebalancer.completed == 1, tokens)


def test_a_lower_target_is_judged_without_waiting_for_new_loads() -> None:
    group = Balanced(rebalance=replace(POLICY, target=100.0))
    tokens = hot_rank(group)
    group.advance(4_000, tokens)
    assert group.background.rebalancer.completed == 0
    assert "balanced" in group.background.rebalancer.why
    group.advance(2_000)  # nobody asks anything any more
    assert group.background.rebalancer.doing is Doing.IDLE
    change(group, target="1.03")
    group.until(lambda: group.background.rebalancer.completed == 1)
    assert group.imbalance < 1.05


def test_a_shorter_pause_between_two_rebalances_holds_from_the_last_one_on() -> None:
    group = Balanced(rebalance=replace(POLICY, min_interval_ms=3_600_000, min_gain=0.0))
    group.until(lambda: group.background.rebalancer.completed == 1, hot_rank(group))
    done_ms = group.world.now_ms
    tokens = hot_rank(group)
    group.advance(10_000, tokens)
    assert group.background.rebalancer.completed == 1
    change(group, min_interval_ms="20000")
    group.until(lambda: group.background.rebalancer.completed == 2, tokens)
    assert 20_000 <= group.world.now_ms - done_ms < 30_000


def test_a_limit_of_copies_holds_from_the_next_plan_on_and_so_does_its_end() -> None:
    group = Balanced(experts=14, slots=8, spare_copies=0)
    change(group, max_moves="2", min_interval_ms="3600000")
    change_policy(group, spare_copies="1")
    group.until(lambda: group.background.rebalancer.completed == 1)
    (first,) = group.events("rebalance.done")
    assert first["moves"] == 2
    change(group, max_moves="0", min_interval_ms="0")
    group.until(lambda: group.background.rebalancer.completed == 2)
    assert (group.world.view.placement.copies() >= 2).all()


def test_windows_are_as_long_as_the_setting_says() -> None:
    group = Balanced(rebalance=replace(POLICY, automatic=False, window_ms=60_000))
    group.advance(3_000, hot_rank(group))
    assert group.background.loads.rolls == 0
    change(group, window_ms="500")
    group.advance(3_000, hot_rank(group))
    assert group.background.loads.rolls >= 4


def test_second_copies_are_made_once_they_are_wanted() -> None:
    group = Balanced(
        group_config(experts=6, slots=4, spare_copies=0, flap_limit=0, rebalance=POLICY)
    )
    group.advance(3_000)
    assert (group.world.view.placement.copies() == 1).any()
    change_policy(group, spare_copies="1")
    group.until(lambda: group.background.rebalancer.completed == 1)
    assert (group.world.view.placement.copies() >= 2).all()


def test_staging_slots_are_emptied_by_the_next_rebalance() -> None:
    group = Balanced(
        group_config(experts=8, slots=5, spare_copies=2, flap_limit=0, rebalance=POLICY)
    )
    assert (group.world.view.placement.slot_expert != EMPTY).all()
    change_policy(group, staging_slots="2")
    group.until(lambda: group.background.rebalancer.completed >= 1, skewed(hot=3, weight=40))
    filled = (group.world.view.placement.slot_expert != EMPTY).sum(axis=2)
    assert filled.max() <= 3, filled


def test_a_rebalance_under_way_goes_on_as_it_was_planned() -> None:
    group = Balanced(experts=8, slots=5)
    group.until(lambda: group.background.rebalancer.run is not None, hot_rank(group))
    change(group, automatic="false", max_moves="1", target="1000")
    group.until(lambda: group.background.rebalancer.completed == 1)
    assert not group.events("rebalance.abandoned")


def test_the_next_leader_plans_by_the_settings_that_were_changed() -> None:
    group = Balanced()
    change(group, automatic="false", window_ms="2500")
    group.next_leader()
    assert group.background.loads.window_ms == 2_500
    assert group.world.membership.in_force.rebalance == replace(
        POLICY, automatic=False, window_ms=2_500
    )
    assert group.world.membership.config.rebalance == POLICY, "as it was created"
    group.count(hot_rank(group) * 0)
    group.advance(5_000, hot_rank(group))
    assert group.background.rebalancer.completed == 0


def test_a_dry_run_uses_the_settings_that_hold_now() -> None:
    group = Balanced(rebalance=RebalancePolicy(automatic=False, window_ms=1_000))
    group.count(hot_rank(group) * 10)
    assert group.background.job(asked="force").run().after.mean < 1.1
    change(group, max_moves="1")
    planned = group.background.job(asked="force").run()
    assert planned.plan is not None
    assert planned.plan.report.moves <= 1
