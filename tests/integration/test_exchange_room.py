"""Rows beyond the room of their expert: none is dropped, none is written past it."""

import numpy as np
import pytest

from elasticep.errors import CapExceeded
from elasticep.native import abi
from elasticep.testing.raw import RawSession, TornError
from elasticep.testing.small import HIDDEN, TOPK, agrees, exchange, geometry
from elasticep.testing.world import World, make_batch


def test_an_expert_named_again_and_again_does_not_write_past_its_runs() -> None:
    """Runs have room for the distinct experts of a token; with fewer slots than top-k, repeats of
    one expert can need more. The step is torn, and the next one is right."""
    tokens = 200
    spec = exchange(layout=abi.RowLayout.CONTIGUOUS, max_tokens=tokens)
    with World(geometry(2, spec, experts=4, slots=2)) as world:
        x = np.ones((tokens, HIDDEN), np.float32)
        ids = np.zeros((tokens, TOPK), np.int32)

        def round_trip(session: RawSession) -> None:
            session.dispatch(0, 0, x, ids, np.ones(ids.shape, np.float32))
            session.combine(0, tokens)

        def crowd(_rank: int, session: RawSession) -> str:
            session.begin(tokens)
            with pytest.raises((CapExceeded, TornError)) as caught:
                round_trip(session)
            assert not session.end()
            return str(caught.value)

        said = world.each(crowd)
        assert any("gets 1200 rows, for which there is no room" in text for text in said.values())
        batches = {r: make_batch(world.geometry, 20, r) for r in range(2)}
        results, step = world.round_trip(0, batches)
        for rank, batch in batches.items():
            expected = world.expected(0, batch, rank, 0, step)
            np.testing.assert_array_equal(results[rank], expected)


@pytest.mark.parametrize("launch", list(abi.Launch))
def test_a_full_masked_block_tears_and_says_which(launch: int) -> None:
    """No row is dropped: the step is torn for all, and the error has expert, count and setting."""
    spec = exchange(layout=abi.RowLayout.MASKED, masked_room=4, reduce=abi.Reduce.PER_EXPERT)
    g = geometry(2, spec, launch=launch)
    with World(g) as world:
        owner = int(np.argwhere(world.table()[0] == 5)[0, 0])
        slot = int(np.argwhere(world.table()[0] == 5)[0, 1])

        def run(rank: int, session: RawSession) -> str:
            b = make_batch(g, 3, rank)
            b.ids[:] = [5, 6 + rank, 8 + rank]
            session.begin(3)
            text = ""
            try:
                got = session.dispatch(0, 0, b.x, b.ids, b.weights)
                world.compute(got, 0, rank, 0)
                session.combine(0, 3)
            except CapExceeded as error:
                text = str(error)
            except TornError:
                text = "torn"
            assert not session.end()
            return text

        said = world.each(run)
        assert said[1 - owner] == "torn"
        expected = (
            f"expert 5 (slot {slot} of rank {owner}, layer 0) gets 6 rows, but masked_room is 4"
        )
        assert expected in said[owner]
        two = {r: make_batch(g, 2, r) for r in range(2)}
        agrees(world, 0, two)
