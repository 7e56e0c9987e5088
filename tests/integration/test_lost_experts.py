"""Tokens that need an expert without a live copy, under policies that change while ranks run."""

from typing import Any

import numpy as np
import pytest

from elasticep.errors import PlacementError
from elasticep.native import abi
from elasticep.testing.local_group import equal_weights, spread
from elasticep.testing.raw import RawSession
from elasticep.testing.world import Batch, World, exchange_config

RANKS, EXPERTS, LOST = 2, 6, 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "routed": {},
    "masked": {"layout": abi.RowLayout.MASKED},
    "contiguous": {"layout": abi.RowLayout.CONTIGUOUS, "cpu_sync": 1},
    "per_expert": {"reduce": abi.Reduce.PER_EXPERT},
    "replicated": {"copies": abi.Copies.ALL, "layout": abi.RowLayout.ARRIVAL, "replicated": 1},
}


def world_of(way: str, launch: int = abi.Launch.SERVICE) -> World:
    """Two ranks; expert `LOST` lies nowhere."""
    g = abi.Geometry(
        layers=1, experts=EXPERTS, topk=3, hidden=32, slots=4, max_ranks=RANKS, exchanges=1
    )
    g.launch = launch
    g.exchange[0] = exchange_config(8, **LAYOUTS[way])
    table = spread(g, range(RANKS))
    table[table == LOST] = -1
    return World(g, placement=(table, equal_weights(table, range(RANKS))))


def tokens() -> Batch:
    """Without the lost expert, with it, with nothing else, and with it and a hole."""
    ids = np.array([[0, 1, 2], [3, LOST, 5], [LOST, -1, -1], [1, LOST, -1]], np.int32)
    weights = np.array([[1, 2, 4], [0.5, 1, 0.5], [1, 7, 7], [0.25, 0.75, 9]], np.float32)
    x = np.arange(1, 4 * 32 + 1, dtype=np.float32).reshape(4, 32) % 8
    return Batch(x, ids, weights)


def run(world: World, rank: int, session: RawSession) -> tuple[list[bool], Any]:
    batch = tokens()
    session.begin(len(batch.x))
    got = session.dispatch(0, 0, batch.x, batch.ids, batch.weights)
    world.compute(got, 0, rank, 0)
    out = session.combine(0, len(batch.x))
    assert session.end()
    return list(got.lost), out


def expected(world: World, *, renormalise: bool) -> Any:
    """Sums over what is left, in fp32; the weights' sum is kept if `renormalise`."""
    batch, factors = tokens(), world.factors[0]
    there = (batch.ids >= 0) & (batch.ids != LOST)
    weights = np.where(there, batch.weights, 0)
    if renormalise:
        named = np.where(batch.ids >= 0, batch.weights, 0)
        left = weights.sum(1, keepdims=True)
        grown = weights * (named.sum(1, keepdims=True) / np.where(left == 0, 1, left))
        weights = np.where((there.sum(1) < (batch.ids >= 0).sum(1))[:, None], grown, weights)
    total = (weights * factors[np.maximum(batch.ids, 0)]).sum(1, dtype=np.float32)
    return batch.x * total[:, None]


@pytest.mark.parametrize("way", LAYOUTS)
def test_what_is_left_of_a_token_is_summed_and_grows_if_it_should(way: str) -> None:
    with world_of(way) as world:
        for renormalise in (False, True, False):
            world.group.policy(serve=True, renormalise=renormalise)
            results = world.each(lambda rank, s: run(world, rank, s))
            want = expected(world, renormalise=renormalise)
            for lost, out in results.values():
                assert lost == [False, True, True, True]
                np.testing.assert_allclose(out, want, rtol=1e-6)
                np.testing.assert_array_equal(out[0], want[0])  # what lost nothing is untouched


@pytest.mark.parametrize("launch", [abi.Launch.SERVICE, abi.Launch.INLINE])
def test_the_policy_changes_between_two_steps(launch: int) -> None:
    with world_of("routed", launch) as world:

        def refuse(rank: int, session: RawSession) -> None:
            batch = tokens()
            session.begin(len(batch.x))
            with pytest.raises(PlacementError, match="token 1 needs an expert of layer 0"):
                session.dispatch(0, 0, batch.x, batch.ids, batch.weights)
            session.tear()
            assert not session.end()

        world.each(refuse)
        world.group.policy(serve=True)
        assert all(any(lost) for lost, _ in world.each(lambda r, s: run(world, r, s)).values())
        world.group.policy(serve=False)
        world.each(refuse)
