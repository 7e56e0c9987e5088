"""The rules of the data plane while views come and go at random, on an emulated GPU.

A complete step has the right rows, all that complete it ran it in one view, and nobody completes
one after it was left behind. Ranks die, are drained, join, are slow and tear; views reach members
one by one. When joiners still wrote cells, steps were complete in two views.
"""

import os

import pytest

from tests.emulated.stand import run

SOAK = "tests.emulated.scenes_soak:soak"
LONG_S = float(os.environ.get("ELASTICEP_TEST_SOAK_S", "30"))


@pytest.mark.parametrize(("ranks", "chance"), [(3, 1), pytest.param(4, 4, marks=pytest.mark.long)])
def test_random_views(ranks: int, chance: int) -> None:
    told = run(SOAK, sms=8, seed=chance, ranks=ranks, seconds=6.0, chance=chance)
    assert told["views"] > 5
    assert told["complete"] > 20


@pytest.mark.long
@pytest.mark.parametrize("chance", range(8))
def test_random_views_for_long(chance: int) -> None:
    told = run(SOAK, sms=8, seed=chance, ranks=3 + chance % 2, seconds=LONG_S, chance=chance)
    assert told["complete"] > 100 / 30 * LONG_S
