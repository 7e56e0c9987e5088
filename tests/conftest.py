"""Rules for every test: a time limit, repeatable hypothesis runs, GPU tests only with a GPU.

With ELASTICEP_REQUIRE_GPU set, a missing GPU fails these tests instead of skipping them.
"""

import ctypes
import os
import sys
from pathlib import Path

import pytest

from elasticep.testing import emulated_cuda

TEST_LIMIT_S = 240.0
GPU_TESTS = Path(__file__).parent / "gpu"
# One worker runs all of a file (`--dist loadfile`): what takes longest begins first.
FIRST = {"test_simulator.py", "test_demo.py", "test_placement_properties.py"}
TORCH = {
    "test_client.py",
    "test_case_22_capturing_and_replaying_takes_no_memory",
    "test_no_mismatch_under_random_delays",
}

try:
    from hypothesis import settings
except ImportError:  # machines that run tests/gpu alone need not have it
    pass
else:
    # The same examples every time, and no time limit per example on a loaded machine.
    settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
    settings.load_profile("repeatable")

try:
    import structlog
except ImportError:
    pass
else:
    # Not to sys.stdout, where a command under test prints what the test reads.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.__stderr__))


def cuda_devices() -> int:
    """Number of CUDA devices, asked of the driver itself so that torch need not be imported."""
    if emulated_cuda.active():
        return 2
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in FIRST)
    has_gpu = None
    for item in items:
        # Nothing may hang the suite. A test that needs longer says so with its own mark.
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_LIMIT_S))
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") is not None:
            if has_gpu is None:
                has_gpu = cuda_devices() > 0
            if not has_gpu and not os.environ.get("ELASTICEP_REQUIRE_GPU"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
            elif emulated_cuda.active() and (item.path.name in TORCH or item.name in TORCH):
                item.add_marker(pytest.mark.skip(reason="needs torch's CUDA; this one is emulated"))
