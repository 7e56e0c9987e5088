"""A session over a double of the native core, for the tests of what an engine calls."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from elasticep.client.session import Session
    from tests.unit.client_double import DoubleHandle


@pytest.fixture
def handle() -> "DoubleHandle":
    """The double behind `session`."""
    from tests.unit.client_double import DoubleHandle  # which needs torch

    return DoubleHandle()


@pytest.fixture
def session(handle: "DoubleHandle") -> "Session":
    """Rank 0 of the double's group."""
    from elasticep.client.session import Session
    from tests.unit.client_double import config

    return Session(handle, config(), rank=0, incarnation=1)
