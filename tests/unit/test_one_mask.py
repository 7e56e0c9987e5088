"""Who is alive is said in one way only: rank -> incarnation, of the group's size, or refused."""

import inspect
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from elasticep.client.view import View
from elasticep.errors import ConfigError
from elasticep.geometry import GroupGeometry
from elasticep.group import GroupConfig
from elasticep.native.convert import ViewTables, geometry_struct
from elasticep.spec import ExchangeSpec

RANKS, SLOTS = 4, 3
GEOMETRY = geometry_struct(
    GroupConfig(
        name="g",
        geometry=GroupGeometry(
            layers=1, experts=6, topk=2, hidden=16, slots_per_rank=SLOTS, max_ranks=RANKS
        ),
        exchanges=(("decode", ExchangeSpec.preset("ROUTED", max_tokens=4)),),
        initial_ranks=RANKS,
    )
)


def tables(members: dict[int, int], ranks: int = RANKS) -> ViewTables:
    size = ranks * SLOTS
    return ViewTables(
        GEOMETRY,
        epoch=2,
        previous_epoch=1,
        members=members,
        slot_expert=np.zeros(size, "<i4").tobytes(),
        slot_weight=np.zeros(size, "<u4").tobytes(),
    )


def test_case_09_alive_is_an_incarnation_and_cannot_be_said_the_other_way_round() -> None:
    # A member is named with an incarnation from 1 on; "0 = alive" and "False = dead" do not exist.
    assert list(tables({0: 1, 3: 2}).struct.incarnation[:RANKS]) == [1, 0, 0, 2]
    for wrong in (0, False, -1):
        with pytest.raises(ConfigError, match="incarnations start at 1"):
            tables({0: 1, 1: wrong})
    # The same type where engines read it.
    assert inspect.get_annotations(View)["members"] == MappingProxyType[int, int]


@pytest.mark.parametrize("ranks", [0, RANKS - 1, RANKS + 1, 8])
def test_case_24_tables_of_another_size_are_refused(ranks: int) -> None:
    with pytest.raises(ConfigError, match=r"\[layers\]\[max_ranks\]\[slots\]"):
        tables({0: 1}, ranks)


@pytest.mark.parametrize("rank", [-1, RANKS, 63])
def test_case_24_members_beyond_the_group_are_refused(rank: int) -> None:
    members: dict[Any, int] = {0: 1, rank: 1}
    with pytest.raises(ConfigError, match=f"member rank {rank} .*ranks are 0 to {RANKS - 1}"):
        tables(members)
