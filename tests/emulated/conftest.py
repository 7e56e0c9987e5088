"""Tests of csrc/cuda on emulated GPUs: skipped where the library for them was not built."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticep.testing import emulated_cuda
from tests.emulated import fleets

HERE = Path(__file__).parent
REASON = (
    "the emulated GPU was not built: it needs CUDA's headers, g++ and x86-64, "
    f"and `make build` then makes {emulated_cuda.NAME}"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if emulated_cuda.path().is_file():
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(scope="session", autouse=True)
def _pools() -> Iterator[None]:
    yield
    if fleets.pool.cache_info().currsize:
        fleets.pool().close()
