"""What the background does about loads that are old, few or not known."""

import numpy as np
import pytest

from elasticep.control import events as ev
from elasticep.control import records
from elasticep.control.background import SAVE_LOADS_MS, Ask
from elasticep.control.records import Moment
from elasticep.control.store import KeyValue
from elasticep.testing.balanced import Balanced, hot_rank, skewed


@pytest.mark.parametrize(("experts", "slots", "spare"), [(8, 4, 1), (16, 8, 1), (24, 8, 0)])
def test_an_idle_group_is_left_as_it_is(experts: int, slots: int, spare: int) -> None:
    """Nobody asks anything for a minute: that is no reason to plan for even loads."""
    group = Balanced(experts=experts, slots=slots, spare_copies=spare)
    tokens = hot_rank(group)
    group.until(lambda: group.background.rebalancer.completed >= 1, tokens)
    group.advance(5_000, tokens)
    epoch, imbalance = group.world.view.epoch, group.imbalance
    group.advance(60_000)
    assert group.world.view.epoch == epoch
    assert abs(group.imbalance - imbalance) < 1e-3
    group.advance(10_000, tokens)
    assert group.world.view.epoch == epoch, "and when the load returns it is still right"


def test_a_trickle_of_tokens_does_not_make_loads_unknown() -> None:
    group = Balanced()
    tokens = hot_rank(group)
    group.until(lambda: group.background.rebalancer.completed >= 1, tokens)
    group.advance(5_000, tokens)
    epoch = group.world.view.epoch
    one = np.zeros_like(tokens)
    one[0, 3] = 1
    for _ in range(60):
        group.count(one)
        group.advance(1_000)
    assert group.background.loads.tokens() is not None
    assert group.world.view.epoch == epoch


def test_the_next_leader_knows_the_load_and_moves_nothing_before_it_hears_more() -> None:
    group = Balanced(experts=8, slots=4)
    tokens = hot_rank(group)
    group.until(lambda: group.background.rebalancer.completed == 1, tokens)
    group.advance(SAVE_LOADS_MS, tokens)
    epoch = group.world.view.epoch
    weights = group.world.view.placement.slot_weight
    group.next_leader()
    known = group.background.loads.tokens()
    assert known is not None
    shares = known / known.sum()
    assert np.allclose(shares, tokens / tokens.sum(), atol=1e-3)
    group.advance(8_000)
    assert group.world.view.epoch == epoch
    group.world.attach = False
    del group.counters[3]
    group.world.kill(3)
    group.advance(200)
    assert group.world.view.epoch > epoch
    assert group.imbalance < 1.6, "a death is answered by the load that is known"
    assert (group.world.view.placement.slot_weight[:, :3] != weights[:, :3]).any()


def test_while_no_load_was_ever_known_only_copies_are_repaired() -> None:
    group = Balanced(experts=6, slots=4)
    assert group.background.around.loads is None
    epoch = group.world.view.epoch
    group.advance(10_000)
    assert group.world.view.epoch == epoch
    assert "no load is known" in group.background.rebalancer.why
    group.world.attach = False
    del group.counters[3]
    group.world.kill(3)
    group.until(lambda: group.background.rebalancer.completed > 0)
    assert (group.world.view.placement.copies() >= 2).all()
    assert "second copy" in str(group.events("rebalance.planned")[-1]["reason"])
    group.operate(Ask("force"))
    group.until(lambda: group.background.rebalancer.asked == "")


def test_loads_are_saved_at_once_and_then_now_and_then() -> None:
    group = Balanced()
    saved = []
    for second in range(30):
        group.advance(1_000, skewed())
        if group.world.saved_loads is not None and group.world.saved_loads not in saved[-1:]:
            saved.append(group.world.saved_loads)
        assert second < 2 or saved
    assert len(saved) == 1


def test_saved_loads_come_back_and_broken_ones_are_named() -> None:
    group = Balanced()
    config = group.world.config
    tokens = np.arange(16, dtype=np.int64).reshape(2, 8) << 33
    moment = Moment(0, 0)
    (put,) = records.operations("g", ev.SaveLoads(tokens), moment)
    keys = [(p.key, p.value) for p in (records.put_config(config), put)]  # type: ignore[union-attr]
    items = [KeyValue(key, value, 1, 1) for key, value in keys]
    _, saved = records.load(items, moment).groups["g"]
    assert saved.loads is not None
    assert (saved.loads == tokens).all()
    for broken in (b"", b"x", records.operations("g", ev.SaveLoads(-tokens), moment)[0].value):  # type: ignore[union-attr]
        items[1] = KeyValue(put.key, broken, 1, 1)
        with pytest.raises(records.StoreCorrupt, match="/loads cannot be read"):
            records.load(items, moment)
