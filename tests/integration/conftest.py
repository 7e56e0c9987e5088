"""What tests with controllers share: one real etcd, and a run of a scenario on either store."""

from collections.abc import Iterator

import pytest

from elasticep.testing.controllers import Run, run_scenario
from elasticep.testing.etcd import LocalEtcd


@pytest.fixture(scope="module")
def controllers_etcd() -> Iterator[LocalEtcd]:
    with LocalEtcd() as started:
        yield started


@pytest.fixture(params=["memory", "etcd"])
def run(request: pytest.FixtureRequest) -> Run:
    on_etcd = request.param == "etcd"
    etcd = request.getfixturevalue("controllers_etcd") if on_etcd else None
    return lambda scenario: run_scenario(etcd, scenario)


@pytest.fixture
def run_memory() -> Run:
    return lambda scenario: run_scenario(None, scenario)
