"""Who is blamed for a wait: roots, never both ends of a link, nobody in warmup or for slowness."""

from hypothesis import given
from hypothesis import strategies as st

from elasticep.control.evidence import Judgement, judge
from elasticep.control.seats import Phase, Seat
from elasticep.group import Timeouts
from elasticep.testing.membership import World, group_config

HANG_MS, FIRST_STEP_MS, DONE = 5_000, 30_000, 10


def seat(rank: int, *, waits_for: int | None = None, since: int = 0, **fields: object) -> Seat:
    made = Seat(rank, incarnation=1, node=f"n{rank}", phase=Phase.ACTIVE, attached=True)
    made.progress, made.moved_ms = DONE, 0
    for name, value in fields.items():
        setattr(made, name, value)
    if waits_for is not None:
        made.note_wait(waits_for, "dispatch", 1, since + 1)
    return made


def judged(*seats: Seat, now: int = 10_000, fresh: set[str] | None = None) -> Judgement:
    return judge(
        {s.rank: s for s in seats},
        {s.node for s in seats} if fresh is None else fresh,
        hang_ms=HANG_MS,
        first_step_ms=FIRST_STEP_MS,
        first_step_progress=DONE,
        now_ms=now,
    )


def blamed(judgement: Judgement) -> list[int]:
    return [verdict.rank for verdict in judgement.expelled]


def test_a_chain_blames_its_root_only() -> None:
    chain = [seat(0, waits_for=1), seat(1, waits_for=2), seat(2, waits_for=3), seat(3)]
    judgement = judged(*chain)
    assert blamed(judgement) == [3]
    assert judgement.suspected == {3}
    why = judgement.expelled[0].why
    assert "rank 3 hangs" in why
    assert "10000 ms" in why
    assert "ranks 2 wait for it (dispatch)" in why


def test_a_root_has_until_hang_timeout() -> None:
    assert blamed(judged(seat(0, waits_for=1), seat(1), now=HANG_MS - 1)) == []
    assert blamed(judged(seat(0, waits_for=1), seat(1), now=HANG_MS)) == [1]


def test_two_roots_are_both_blamed() -> None:
    seats = [seat(0, waits_for=2), seat(1, waits_for=3), seat(2), seat(3)]
    assert blamed(judged(*seats)) == [2, 3]


def test_a_broken_link_costs_one_of_its_ends_and_the_one_more_wait_for() -> None:
    assert blamed(judged(seat(0, waits_for=1), seat(1, waits_for=0))) == [1]
    # A <-> B with C waiting for A: without A both B and C can go on.
    seats = [seat(0, waits_for=1), seat(1, waits_for=0), seat(2, waits_for=0)]
    assert blamed(judged(*seats)) == [0]
    # ... and for B, through D.
    seats = [
        seat(0, waits_for=1),
        seat(1, waits_for=0),
        seat(2, waits_for=0),
        seat(3, waits_for=1),
        seat(4, waits_for=3),
    ]
    judgement = judged(*seats)
    assert blamed(judgement) == [1]
    assert "ranks 0 -> 1 -> 0" in judgement.expelled[0].why


def test_of_two_ranks_the_one_that_stopped_within_its_wait_goes() -> None:
    """Rank 0 waited for 1 and was stopped; 1 came, and has waited for it since."""
    assert blamed(judged(seat(0, waits_for=1), seat(1, waits_for=0, since=40))) == [0]


def test_a_longer_ring_costs_one_rank() -> None:
    ring = [seat(0, waits_for=1), seat(1, waits_for=2), seat(2, waits_for=0)]
    assert blamed(judged(*ring)) == [2]


def test_a_young_link_in_a_ring_is_waited_for() -> None:
    assert blamed(judged(seat(0, waits_for=1), seat(1, waits_for=0, since=6_000))) == []


def test_slowness_is_no_fault() -> None:
    """Its progress moved while it was waited for: slow, not hung."""
    assert blamed(judged(seat(0, waits_for=1), seat(1, moved_ms=6_000))) == []
    assert blamed(judged(seat(0, waits_for=1), seat(1, moved_ms=6_000), now=11_000)) == [1]


def test_warmup_is_not_judged() -> None:
    assert judged(seat(0, waits_for=1), seat(1, warmup=True)) == Judgement(frozenset(), ())
    ring = judged(seat(0, waits_for=1, warmup=True), seat(1, waits_for=0))
    assert blamed(ring) == []


def test_case_07_first_step_slow() -> None:
    first = [seat(0, waits_for=1), seat(1, progress=DONE - 1)]
    assert blamed(judged(*first, now=FIRST_STEP_MS - 1)) == []
    assert blamed(judged(*first, now=FIRST_STEP_MS)) == [1]


def test_reports_of_silent_nodes_and_of_ranks_that_are_over_prove_nothing() -> None:
    assert blamed(judged(seat(0, waits_for=1), seat(1), fresh={"n1"})) == []
    assert blamed(judged(seat(0, waits_for=1), seat(1), fresh={"n0"})) == []
    assert blamed(judged(seat(0, waits_for=1), seat(1, phase=Phase.FENCED))) == []
    assert blamed(judged(seat(0, waits_for=1), seat(1, phase=Phase.JOINING))) == []


def test_when_a_root_is_expelled_the_next_in_the_chain_is_not_blamed_at_once() -> None:
    chain = [seat(0, waits_for=1), seat(1, waits_for=2), seat(2, phase=Phase.FENCED, over_ms=9_900)]
    assert blamed(judged(*chain)) == []
    assert blamed(judged(*chain, now=9_900 + HANG_MS)) == [1], "but it has to let go some time"


def test_one_hung_rank_costs_one_rank() -> None:
    world = World(group_config(flap_limit=0), {"a": (0, 1), "b": (2, 3)})
    world.settle()
    for rank in range(4):
        world.progress(rank, 100)
    for rank, target in ((0, 1), (1, 2), (3, 2)):
        world.wait(rank, target, 500)
    world.attach = False
    world.advance(9_000)
    assert world.view.ranks == (0, 1, 3)


graphs = st.integers(2, 9).flatmap(
    lambda n: st.tuples(
        st.just(n),
        st.lists(st.one_of(st.none(), st.integers(0, n - 1)), min_size=n, max_size=n),
    )
)


@given(graphs)
def test_of_any_two_that_wait_for_each_other_at_most_one_goes(
    graph: tuple[int, list[int | None]],
) -> None:
    ranks, waits = graph
    seats = [seat(rank, waits_for=target) for rank, target in enumerate(waits)]
    gone = set(blamed(judged(*seats)))
    real = {r: t for r, t in enumerate(waits) if t is not None and t != r}
    for rank, target in real.items():
        assert not (rank in gone and target in gone), "both ends of a link"
    for rank in gone:
        assert rank in real.values(), "nobody waits for it"
    # The set explains all records: whoever still waits does so for somebody who goes, in the end.
    for rank in real:
        seen = set()
        while rank in real and rank not in seen and rank not in gone:
            seen.add(rank)
            rank = real[rank]
        assert rank in gone, "a wait that nothing is done about"
    roots = {t for t in real.values() if t not in real}
    assert roots <= gone
    assert len(gone) <= ranks


def test_a_suspect_is_cleared_when_nobody_waits_any_more() -> None:
    world = World(group_config(flap_limit=0), {"a": (0, 1), "b": (2, 3)})
    world.settle()
    world.progress(2, 100)
    world.wait(0, 2, 600)
    assert world.membership.seats[2].phase is Phase.SUSPECTED
    world.wait(0, 2, 0)
    assert world.membership.seats[2].phase is Phase.ACTIVE
    world.advance(20_000, step_ms=1_000)
    assert world.view.epoch == 1


def test_a_rank_that_stops_for_three_seconds_stays_and_for_eight_seconds_goes() -> None:
    for stopped_ms, expelled in ((3_000, False), (8_000, True)):
        world = World(group_config(flap_limit=0), {"a": (0, 1), "b": (2, 3)})
        world.settle()
        for beat in range(4):  # all make progress
            for rank in range(4):
                world.progress(rank, 100 + 10 * beat)
            world.advance(500)
        began = world.now_ms
        world.wait(0, 2, 500)
        while world.now_ms - began < stopped_ms - 500 and world.view.epoch == 1:
            world.advance(500)
            for rank in (0, 1, 3):
                world.progress(rank, 130)
            world.progress(2, 130)
        assert (world.view.epoch == 2) is expelled
        if expelled:
            assert world.view.ranks == (0, 1, 3)
            assert 4_500 <= world.now_ms - began + 500 <= 5_800
        else:
            world.wait(0, 2, 0)
            world.progress(2, 140)
            world.advance(20_000, step_ms=1_000)
            assert world.view.epoch == 1


def test_a_draining_rank_that_hangs_does_not_hold_the_others_back() -> None:
    timeouts = Timeouts(hang_timeout_ms=1_000, suspect_after_ms=100)
    world = World(group_config(flap_limit=0, timeouts=timeouts), {"a": (0, 1), "b": (2, 3)})
    world.settle()
    world.progress(3, 100)
    from elasticep.control import events as ev

    world.feed(ev.Drain((3,), ""))
    world.seat(3)[1].hung = True
    world.wait(0, 3, 200)
    world.advance(1_500)
    assert world.membership.seats[3].phase is Phase.FENCED
    assert (3, 1) in world.dead or any(
        isinstance(m, ev.Fence) and m.rank == 3 for m in world.nodes["a"].inbox
    )
