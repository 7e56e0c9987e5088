"""Children that the tests of the data plane share; they end with the session."""

from collections.abc import Iterator

import pytest

from tests.gpu.shapes import SHARED


@pytest.fixture(scope="session", autouse=True)
def _children() -> Iterator[None]:
    yield
    SHARED.close()
