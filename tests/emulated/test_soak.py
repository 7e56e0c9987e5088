"""The rules of the data plane while views come and go at random, on an emulated GPU.

A complete step has the right rows, all that complete it ran it in one view, and nobody completes
one after it was left behind. Ranks die, are drained, join, are slow and tear; views reach members
one by one. When joiners still wrote cells, steps were complete in two views.
"""

import os
from typing import Any

import pytest

from tests.emulated.stand import run

LONG_S = float(os.environ.get("ELASTICEP_TEST_SOAK_S", "30"))


def soak(ranks: int, chance: int, seconds: float, complete: int) -> dict[str, Any]:
    world = {"ranks": ranks, "chance": chance, "seconds": seconds, "complete": complete}
    target = "tests.emulated.scenes_soak:soak"
    return dict(run(target, sms=8, seed=chance, limit_s=seconds + 180, **world))


@pytest.mark.parametrize(("ranks", "chance"), [(3, 1), pytest.param(4, 4, marks=pytest.mark.long)])
def test_random_views(ranks: int, chance: int) -> None:
    told = soak(ranks, chance, seconds=6.0, complete=20)
    assert told["views"] > 5
    assert told["complete"] >= 20


@pytest.mark.long
@pytest.mark.timeout(LONG_S + 240)
@pytest.mark.parametrize("chance", range(8))
def test_random_views_for_long(chance: int) -> None:
    complete = int(100 / 30 * LONG_S)
    told = soak(3 + chance % 2, chance, seconds=LONG_S, complete=complete)
    assert told["complete"] >= complete
