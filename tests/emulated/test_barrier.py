"""Step barriers of the CUDA plane, on an emulated GPU: what earlier incarnations, groups and calls
left behind, joiners, slow ranks. Each in order, and with threads in an order that a seed gives.
"""

from typing import Any

import pytest

from elasticep.native.cuda_structs import StepStatus, Why
from tests.emulated.stand import run

SCENES = "tests.emulated.scenes_barrier"
RUN, TIMEOUT, EXPELLED = StepStatus.RUN, StepStatus.TIMEOUT, StepStatus.EXPELLED


@pytest.fixture(params=[0, 7], ids=["ordered", "shuffled"])
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def scene(name: str, seed: int, **arguments: object) -> Any:
    return run(f"{SCENES}:{name}", seed=seed, **arguments)


def test_a_group_that_is_formed_anew_is_past_all_earlier_barriers(seed: int) -> None:
    assert scene("formed_anew", seed) == [[True, 1001]] * 2 + [[True, 1002]] * 2


def test_a_joiner_whose_region_is_of_a_group_further_on_joins_a_younger_one(seed: int) -> None:
    """It enters one step as it is, which marks tear, and is ahead of all of them from then on."""
    told = scene("younger_group", seed)
    assert told["torn"] == 1
    assert told["members"] == 3
    assert 501 < told["last"] < 510


def test_a_barrier_that_is_tried_again_announces_what_its_cells_say(seed: int) -> None:
    assert scene("retry", seed) == {"status": TIMEOUT, "told": [[[5, 8]] * 2, [[7, 8]] * 2]}


@pytest.mark.parametrize("later", [40_000, 65_535])
def test_a_mark_for_an_earlier_incarnation_never_expels_a_later_one(later: int) -> None:
    epoch = 5 + later
    assert scene("old_mark", 0, later=later) == [TIMEOUT, [RUN, epoch], [RUN, epoch]]


def test_a_late_mark_of_a_view_that_has_this_incarnation_expels_nobody(seed: int) -> None:
    assert scene("mark_for_predecessor", seed) == [TIMEOUT, [RUN, 6], [RUN, 6]]


def test_a_mark_of_a_later_view_expels(seed: int) -> None:
    assert scene("left_behind", seed) == EXPELLED


def test_a_number_is_skipped_only_when_every_live_member_has_been_heard(seed: int) -> None:
    """One that is still to come may be needed by others, who ran this step."""
    told = scene("skips_nothing", seed)
    assert told["alone"] == [[TIMEOUT, 1]] * 2
    assert told["written"] == 1
    assert told["steps"] == [[3, [6, 3, 7]]] * 2


def test_a_joiner_writes_no_cell_before_it_has_a_view(seed: int) -> None:
    """Members who saw one would take its view for one that runs, and those who were not given it
    would go on without them.
    """
    told = scene("quiet_joiner", seed)
    assert told["first"] == [[RUN, 1, True]] * 2
    assert told["cells"] == [0] * 4
    assert told["joined"] == [[RUN, 2, {"0": 0, "1": 1, "2": 0}]] * 3
    assert told["complete"] == [True] * 3
    assert told["later"] == [[2, True]] * 3


def test_a_joiner_that_is_waited_for_waits_for_all_like_a_member(seed: int) -> None:
    told = scene("late_joiner", seed)
    assert told["alone"] == [[2, True]] * 2
    assert told["results"] == [[RUN, 2, 2, {"0": 7, "1": 8, "2": 9}]] * 3


def test_whoever_tries_again_at_a_barrier_waits_on() -> None:
    """A limit below `suspect_after` would hide a hang for ever."""
    ((rank, since_ns),) = scene("waits_on", 0)
    assert rank == 1
    assert since_ns > 0


def test_a_step_that_ends_inside_an_exchange_tears_it_for_all(seed: int) -> None:
    assert scene("open_end", seed) == [[False, Why.PEER_LEFT, 1], [False, Why.ENGINE, 1]]
