"""Whoever was held up by a hang is not blamed for it once the hang is over."""

from elasticep.group import Timeouts
from elasticep.testing.membership import World, group_config

HANG_MS = 1_000


def test_a_rank_released_by_an_expulsion_is_not_blamed_by_reports_of_before() -> None:
    timeouts = Timeouts(suspect_after_ms=200, hang_timeout_ms=HANG_MS)
    world = World(group_config(flap_limit=0, timeouts=timeouts), {"a": (0, 1), "b": (2, 3)})
    world.settle()
    for rank in range(4):
        world.progress(rank, 500)
    world.advance(HANG_MS)
    # 3 is stopped. 1 waits for it; 2, whose node looks at other times, waits for 1.
    world.wait(1, 3, HANG_MS + 100, progress=500)
    world.wait(2, 1, HANG_MS + 100, progress=500)
    world.advance(100)
    assert world.view.ranks == (0, 1, 2)
    # The view without 3 runs: 1 waits no more. What 2 said of it is not withdrawn yet.
    world.wait(1, 3, 0, progress=500)
    world.advance(200)
    assert 1 in world.view.ranks
    assert world.membership.seats[1].incarnation == 1
    # Who then really stands still is still found.
    world.wait(0, 1, HANG_MS, progress=500)
    world.advance(HANG_MS)
    expelled = [e for e in world.membership.seats.values() if e.rank == 1 and e.incarnation == 1]
    assert not any(seat.live for seat in expelled)
