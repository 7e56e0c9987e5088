"""A rank dies at any point of an exchange, in every way to exchange: no wrong row, no hang."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from elasticep.errors import DaemonUnavailable, Fenced, NativeError
from elasticep.native import abi
from elasticep.testing.local_group import equal_weights, spread
from elasticep.testing.raw import RawSession, TornError
from elasticep.testing.world import World, make_batch

RANKS, CAP, VICTIM = 3, 12, 2
SITES = [
    abi.FailSite.ROWS,
    abi.FailSite.BITMAP,
    abi.FailSite.FLAG,
    abi.FailSite.SENT,
    abi.FailSite.RECEIVED,
    abi.FailSite.READY,
    abi.FailSite.READY_SENT,
    abi.FailSite.PULL,
    abi.FailSite.PULLED,
]
FP8, BF16 = abi.Dtype.FP8, abi.Dtype.BF16
WAYS: dict[str, dict[str, Any]] = {
    "allgather": {"copies": abi.Copies.ALL, "layout": abi.RowLayout.ARRIVAL},
    "replicated": {"copies": abi.Copies.ALL, "layout": abi.RowLayout.ARRIVAL, "replicated": 1},
    "normal": {"layout": abi.RowLayout.ARRIVAL, "cpu_sync": 1, "combine_dtype": FP8},
    "low_latency": {
        "copies": abi.Copies.PER_EXPERT,
        "layout": abi.RowLayout.MASKED,
        "reduce": abi.Reduce.PER_EXPERT,
        "dispatch_dtype": FP8,
    },
    "expand": {"layout": abi.RowLayout.MASKED, "combine_dtype": FP8},
    "expand_sync": {"layout": abi.RowLayout.CONTIGUOUS, "cpu_sync": 1},
    "routed": {"layout": abi.RowLayout.ROUTED, "dispatch_dtype": abi.Dtype.NVFP4},
}
# Every site meets a third of the ways, every way a third of the sites.
CASES = [
    (way, site)
    for w, way in enumerate(WAYS)
    for s, site in enumerate(SITES)
    if (w + s) % 3 == 0 and not (way == "replicated" and site == abi.FailSite.ROWS)
]


def geometry(way: dict[str, Any]) -> abi.Geometry:
    g = abi.Geometry(
        layers=2,
        experts=9,
        topk=3,
        hidden=128,
        slots=6,
        max_ranks=RANKS,
        exchanges=1,
        launch=abi.Launch.SERVICE,
    )
    plain = {"copies": abi.Copies.PER_RANK, "dispatch_dtype": BF16, "combine_dtype": BF16}
    g.exchange[0] = abi.ExchangeConfig(**{**plain, **way}, max_tokens=CAP, channels=1)
    return g


@pytest.mark.parametrize(("way", "site"), CASES, ids=[f"{w}-{s.name.lower()}" for w, s in CASES])
def test_a_death_leaves_no_wrong_row(way: str, site: abi.FailSite) -> None:
    g = geometry(WAYS[way])
    table = spread(g, range(RANKS), copies=2)
    survivors = [rank for rank in range(RANKS) if rank != VICTIM]
    left = table.copy()
    left[:, VICTIM] = -1
    with World(g, placement=(table, equal_weights(table, range(RANKS)))) as world:

        def run(rank: int, session: RawSession) -> int:
            """One step of two layers: its epoch if it was complete, and then every bit is right."""
            info = session.begin(CAP)
            step, epoch = info.step, info.epoch
            same = way == "replicated"
            batch, results = make_batch(g, CAP, [step, 0 if same else rank]), []
            try:
                for layer in range(2):
                    got = session.dispatch(0, layer, batch.x, batch.ids, batch.weights)
                    world.compute(got, 0, rank, layer, epoch)
                    results.append(session.combine(0, CAP))
            except TornError:
                assert not session.end()
                return 0
            if not session.end():
                return 0
            for layer, out in enumerate(results):
                expected = world.expected(0, batch, rank, layer, step, epoch)
                np.testing.assert_array_equal(out, expected)
            return epoch

        def serve(rank: int, session: RawSession) -> int:
            """Steps until one is complete in the view without the victim."""
            torn = 0
            while (epoch := run(rank, session)) < 2:
                torn += epoch == 0
            return torn

        def die(rank: int, session: RawSession) -> int:
            """The victim's engine goes on until it notices that its worker is gone."""
            with pytest.raises((DaemonUnavailable, Fenced, NativeError)):
                serve(rank, session)
            return 0

        assert set(world.each(run).values()) == {1}
        world.group.failpoint(VICTIM, site, abi.FailAction.KILL, after=4)
        with ThreadPoolExecutor(1) as aside:
            torn = aside.submit(
                world.each, lambda rank, s: die(rank, s) if rank == VICTIM else serve(rank, s)
            )
            world.group.wait_for(lambda: len(world.group.deaths) > 0, "the death")
            world.restage((left, equal_weights(left, survivors)), survivors)
            assert sum(torn.result().values()) <= len(survivors)
