"""A policy that is changed under decoding load, with experts that no live rank has room for."""

import os
import signal
from collections.abc import Iterator

import pytest

from elasticep.group import GroupConfig
from elasticep.testing.cluster import Cluster
from elasticep.testing.decoding import Fleet, light_config

pytest.importorskip("torch")


def tight_config() -> GroupConfig:
    """Two ranks with one copy of every expert and no slot to spare."""
    plain = light_config("tight", 2, spare_copies=0).to_dict()
    geometry = {**plain["geometry"], "slots_per_rank": 4}
    return GroupConfig.from_toml_dict({**plain, "geometry": geometry})


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Cluster(group="tight", ranks=2, nodes=2) as cluster, Fleet(cluster, tight_config()) as it:
        it.open([0, 1])
        it.members([0, 1])
        yield it
        it.check()


def test_lost_experts_are_refused_then_served_then_refused(fleet: Fleet) -> None:
    engine = fleet.engine(0)
    os.kill(fleet.engine(1).worker, signal.SIGKILL)
    fleet.wait(lambda: bool(engine.records("lost")), "steps are refused for want of experts")
    fleet.set_policies(lost_experts="serve")
    fleet.progress([0])
    assert any(step["flagged"] for step in engine.complete()[-5:])
    assert all(step["right"] for step in engine.complete()), "of what is not flagged"
    refused = len(engine.records("lost"))
    fleet.set_policies(lost_experts="refuse")
    fleet.wait(lambda: len(engine.records("lost")) > refused, "steps are refused again")
    # When the rank is back all experts are, and nothing is flagged any more.
    fleet.open([1])
    fleet.members([0, 1])
    fleet.progress([0, 1])
    assert not any(step["flagged"] for step in engine.complete()[-3:])
