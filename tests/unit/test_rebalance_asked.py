"""What operators ask of the background while it does something else."""

import pytest

from elasticep.control.background import Ask, Pause, Resume
from elasticep.control.operating import read_plan
from elasticep.control.placement import InvalidPlacement, Placement
from elasticep.control.planfile import export_json, import_json
from elasticep.control.rebalance import HELD, Doing
from elasticep.testing.balanced import Balanced, hot_rank, swapped


def test_what_is_asked_for_during_an_automatic_rebalance_is_done_after_it() -> None:
    """It was acknowledged, so the end of a rebalance that was not made for it does not end it."""
    group = Balanced(experts=8, slots=4)
    tokens = hot_rank(group)
    rebalancer = group.background.rebalancer
    group.until(lambda: rebalancer.run is not None, tokens)
    wanted = swapped(group.world.view.placement)
    group.operate(Ask("import", wanted))
    group.until(lambda: rebalancer.completed == 1, tokens)
    assert rebalancer.asked == "import"
    assert group.world.saved_rebalance is not None
    assert group.world.saved_rebalance.asked == "import"
    ended_ms = group.world.now_ms
    group.until(lambda: rebalancer.completed == 2, tokens)
    assert group.world.view.placement == wanted
    assert group.world.now_ms - ended_ms < 2_000, "it does not wait for min_interval"
    assert group.world.saved_rebalance.asked == ""


def test_what_is_asked_for_while_a_plan_is_made_is_not_answered_by_that_plan() -> None:
    group = Balanced(experts=8, slots=4)
    tokens = hot_rank(group)
    made: list[object] = []
    planned, group.planned = group.planned, made.append  # type: ignore[method-assign,assignment]
    group.until(lambda: bool(made), tokens)
    wanted = swapped(group.world.view.placement)
    group.operate(Ask("import", wanted))
    group.planned = planned  # type: ignore[method-assign]
    planned(made[0])  # type: ignore[arg-type]
    group.until(lambda: group.background.rebalancer.asked == "", tokens)
    assert group.world.view.placement == wanted


def test_a_pause_holds_what_was_asked_for_before_it_too() -> None:
    group = Balanced(experts=8, slots=4)
    tokens = hot_rank(group)
    group.operate(Ask("force"))
    group.operate(Pause("an audit"))
    epoch = group.world.view.epoch
    group.advance(20_000, tokens)
    rebalancer = group.background.rebalancer
    assert (rebalancer.doing, rebalancer.why) == (Doing.IDLE, "an audit")
    assert (rebalancer.asked, rebalancer.stuck, group.world.view.epoch) == ("force", 0, epoch)
    group.operate(Resume())
    group.until(lambda: rebalancer.completed == 1, tokens)
    assert rebalancer.asked == ""


def imported(group: Balanced) -> Placement:
    """A placement was imported and is in force; loads are uneven in it."""
    wanted = swapped(group.world.view.placement)
    group.operate(Ask("import", wanted))
    rebalancer = group.background.rebalancer
    group.until(lambda: not rebalancer.asked and rebalancer.completed == 1)
    assert group.world.view.placement == wanted
    return wanted


def test_an_imported_placement_is_kept_until_it_is_given_up() -> None:
    group = Balanced(experts=8, slots=4)
    imported(group)
    tokens, epoch = hot_rank(group), group.world.view.epoch
    group.advance(20_000, tokens)
    rebalancer = group.background.rebalancer
    assert (rebalancer.held, rebalancer.why) == (True, HELD)
    assert group.imbalance > 1.2
    group.next_leader()
    group.advance(20_000, tokens)
    rebalancer = group.background.rebalancer
    assert (rebalancer.held, rebalancer.why, group.world.view.epoch) == (True, HELD, epoch)
    group.operate(Resume())
    group.until(lambda: rebalancer.completed == 1, tokens)
    assert not rebalancer.held
    assert group.imbalance < 1.1


def test_who_forces_a_rebalance_does_not_keep_an_import() -> None:
    group = Balanced(experts=8, slots=4)
    imported(group)
    group.operate(Ask("force"))
    rebalancer = group.background.rebalancer
    group.until(lambda: rebalancer.completed == 2, hot_rank(group))
    assert not rebalancer.held
    assert group.world.saved_rebalance is not None
    assert not group.world.saved_rebalance.held


def test_an_import_that_cannot_be_reached_any_more_is_not_waited_for() -> None:
    group = Balanced(experts=8, slots=4)
    wanted = swapped(group.world.view.placement)
    group.operate(Pause("first the death of a rank"))
    group.operate(Ask("import", wanted))
    group.world.attach = False
    del group.counters[3]
    group.world.kill(3)
    group.operate(Resume())
    group.operate(Ask("import", wanted))
    rebalancer = group.background.rebalancer
    group.until(lambda: not rebalancer.asked)
    assert not rebalancer.held
    assert group.world.view.ranks == (0, 1, 2)


def test_the_leader_packs_no_plan_that_was_read_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest take half a second, in which it would hear of no death."""
    group = Balanced(experts=8, slots=4)
    view = group.world.view
    wanted = read_plan(export_json(swapped(view.placement), view.ranks), group.world.config, view)
    monkeypatch.setattr("elasticep.control.tables.zlib.compress", None)
    group.operate(Ask("import", wanted))
    assert group.world.saved_rebalance is not None
    assert Placement.from_bytes(group.world.saved_rebalance.placement) == wanted


def test_case_18_a_plan_that_is_nested_too_deeply_is_a_typed_error() -> None:
    with pytest.raises(InvalidPlacement, match="not JSON"):
        import_json("[" * 200_000, 8, 4, 2)
