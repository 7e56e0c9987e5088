"""Results of exchanges against a dense layer in float64 that knows of no ranks."""

from itertools import product

import numpy as np
import numpy.typing as npt
import pytest

from elasticep.native import abi
from elasticep.testing import reference
from elasticep.testing.small import CAP, EXPERTS, HIDDEN, LAYERS, LAYOUTS, TOPK, exchange, geometry
from elasticep.testing.world import Batch, World, make_batch, random_placement

TOKENS = (0, 1, CAP)
FP32, BF16 = abi.Dtype.FP32, abi.Dtype.BF16
# Half an ulp each time a value is rounded: an output, its weighting and every addition in fp32; an
# output and a rank's sum as they are in bf16.
ROUNDING = {FP32: (TOPK + 2) * 2.0**-24, BF16: 2 * 2.0**-8}

Ids = npt.NDArray[np.int32]


def random(ids: Ids) -> Ids:
    return ids


def skewed(ids: Ids) -> Ids:
    """The first choice of every token is one expert; who chose it already has no other."""
    ids = np.where(ids == 5, -1, ids)
    ids[:, 0] = 5
    return ids


def repeated(ids: Ids) -> Ids:
    """Tokens that name an expert twice, or only one."""
    ids = ids.copy()
    ids[:, 1] = ids[:, 0]
    ids[::3, 2] = ids[::3, 0]
    return ids


def nobody(ids: Ids) -> Ids:
    return np.full_like(ids, -1)


def ways(dtype: int) -> list[abi.ExchangeConfig]:
    """Every layout with sums on the experts' ranks and at home; rows everywhere; copies."""
    wire = {"dispatch_dtype": dtype, "combine_dtype": dtype}
    found = [exchange(layout=a, reduce=r, **wire) for a, r in product(LAYOUTS, abi.Reduce)]
    # In place of two that send as others do.
    found[0] = exchange(copies=abi.Copies.ALL, layout=abi.RowLayout.ARRIVAL, **wire)
    masked = {"layout": abi.RowLayout.MASKED, "reduce": abi.Reduce.PER_EXPERT}
    found[-1] = exchange(copies=abi.Copies.PER_EXPERT, **masked, **wire)
    return found


def check(world: World, number: int, brought: dict[int, Batch], layer: int) -> None:
    results, _ = world.round_trip(number, brought, layer)
    factors = world.factors[layer].astype(np.float64)
    rounding = ROUNDING[abi.Dtype(world.geometry.exchange[number].combine_dtype)]
    for rank, b in brought.items():
        dense = reference.dense(b.x, b.ids, b.weights, lambda e, x: x * factors[e])
        largest = reference.dense(abs(b.x), b.ids, b.weights, lambda e, x: x * factors[e])
        wrong = np.abs(results[rank] - dense) > rounding * largest + 1e-30
        assert not wrong.any(), (rank, np.argwhere(wrong)[0])
        assert results[rank].shape == (len(b.ids), HIDDEN)


@pytest.mark.parametrize(
    ("ranks", "launch"),
    [*((ranks, abi.Launch.INLINE) for ranks in (1, 2, 3, 5, 8)), (3, abi.Launch.SERVICE)],
)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_results_are_those_of_a_dense_layer(ranks: int, launch: int, dtype: int) -> None:
    """No token, one and as many as may be, on every rank in turn; -1 is no expert, and an expert
    that is named twice counts twice."""
    slots = EXPERTS if ranks < 3 else 8
    g = geometry(ranks, *ways(dtype), slots=slots, launch=launch)
    with World(g, placement=random_placement(g, range(ranks), ranks)) as world:
        for number, shift in product(range(g.exchanges), range(len(TOKENS))):
            for routed in (random, skewed, repeated, nobody):
                brought = {}
                for rank in range(ranks):
                    b = make_batch(g, TOKENS[(rank + shift) % len(TOKENS)], [number, shift, rank])
                    brought[rank] = Batch(b.x, routed(b.ids), b.weights)
                check(world, number, brought, (number + shift) % LAYERS)
