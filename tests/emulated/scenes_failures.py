"""Calls of CUDA that fail, and what whoever made a rank's context, region or session hears."""

import contextlib
import resource
from collections.abc import Iterator
from typing import Any, Final

from elasticep.errors import ElasticEPError
from elasticep.native import cuda_library
from elasticep.testing import emulated_cuda
from elasticep.testing.placements import spread
from elasticep.testing.small import exchange, geometry
from tests.emulated.scenes_weights import Stage
from tests.emulated.stand import Stand

OUT_OF_MEMORY: Final = 2
INVALID_VALUE: Final = 1
NO_DEVICE: Final = 100
NO_KERNEL_IMAGE: Final = 209
ECC: Final = 214
NVLINK: Final = 220
OPERATING_SYSTEM: Final = 304


@contextlib.contextmanager
def told(into: list[list[str]]) -> Iterator[None]:
    """What is raised inside, by kind and sentence."""
    try:
        yield
    except ElasticEPError as error:
        into.append([type(error).__name__, str(error)])
    else:
        into.append(["nothing", ""])


def contexts() -> Any:
    """A rank's context, with one call after another failing; then none fails."""
    said: list[list[str]] = []
    with Stand(geometry(2, exchange())) as stand:
        for call, status, skip in (
            ("cudaHostAlloc", OUT_OF_MEMORY, 0),
            ("cudaHostRegister", OUT_OF_MEMORY, 0),
            ("cudaHostRegister", OPERATING_SYSTEM, 0),
            ("cudaMalloc", OUT_OF_MEMORY, 0),
            ("cudaMalloc", OUT_OF_MEMORY, 12),
            ("cudaFuncGetAttributes", NO_KERNEL_IMAGE, 0),
            ("cuMemAddressReserve", OUT_OF_MEMORY, 0),
            ("cuMemImportFromShareableHandle", INVALID_VALUE, 0),
            ("cuMemImportFromShareableHandle", INVALID_VALUE, 1),  # the peer's
            ("cuMemMap", OUT_OF_MEMORY, 0),
            ("cuMemSetAccess", INVALID_VALUE, 0),
        ):
            with told(said), emulated_cuda.failing(call, status, skip):
                stand.seats[0].open(1 + len(said), stand.seats)
        stand.seats[0].open(100, stand.seats)
        stand.seats[0].close()
    return said


def limits() -> Any:
    """Pinned memory where processes may lock little."""
    said: list[list[str]] = []
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, hard))
    with (
        Stand(geometry(2, exchange())) as stand,
        told(said),
        emulated_cuda.failing("cudaHostAlloc", OUT_OF_MEMORY),
    ):
        stand.seats[0].open(1, stand.seats)
    return said


def far_peer() -> Any:
    """A peer's memory is on a GPU that this rank's cannot access."""
    said: list[list[str]] = []
    g = geometry(2, exchange())
    with Stand(g) as stand:
        stand.seats[0].open(1, [])
        far = cuda_library.create_region(g, 1)
        with (
            told(said),
            emulated_cuda.failing("cuMemSetAccess", INVALID_VALUE),
            emulated_cuda.failing("cudaDeviceCanAccessPeer", INVALID_VALUE),
        ):
            stand.seats[0].here.map_peer(1, far)
        stand.seats[0].here.map_peer(1, far)
    return said


def regions() -> Any:
    """A region, on a device that is not there and with calls that fail."""
    said: list[list[str]] = []
    g = geometry(2, exchange())
    with told(said):
        cuda_library.create_region(g, 9)
    for call, status in (
        ("cuMemCreate", OUT_OF_MEMORY),
        ("cuMemExportToShareableHandle", OPERATING_SYSTEM),
        ("cuMemAddressReserve", OUT_OF_MEMORY),
        ("cuMemMap", INVALID_VALUE),
    ):
        with told(said), emulated_cuda.failing(call, status):
            cuda_library.create_region(g, 0)
    return said


def broken_regions() -> Any:
    """A region on a device that one call after another finds broken."""
    said: list[list[str]] = []
    for call, status in (
        ("cudaSetDevice", ECC),
        ("cudaMemGetInfo", NVLINK),
        ("cuMemCreate", ECC),
        ("cuMemExportToShareableHandle", NVLINK),
        ("cuMemMap", ECC),
        ("cudaMemset", NVLINK),
    ):
        with told(said), emulated_cuda.failing(call, status):
            cuda_library.create_region(geometry(2, exchange()), 1)
    return said


def no_driver(status: int) -> Any:
    """No entry point of the driver can be had; asked twice, since it is looked for once."""
    said: list[list[str]] = []
    with emulated_cuda.failing("cudaGetDriverEntryPointByVersion", status):
        for _ in range(2):
            with told(said):
                cuda_library.create_region(geometry(2, exchange()), 1)
    return said


def no_device() -> Any:
    """How many GPUs there are where the driver finds none."""
    with emulated_cuda.failing("cudaGetDeviceCount", NO_DEVICE):
        return cuda_library.device_count()


def broken_device() -> Any:
    """A call that finds the device in an error, while a view is staged."""
    said: list[list[str]] = []
    g = geometry(2, exchange())
    with Stand(g) as stand:
        stand.open(0, 1)
        with told(said), emulated_cuda.failing("cudaMemsetAsync", NVLINK):
            stand.stage(1, 0, [0, 1], spread(g, [0, 1]))
    return said


def staging_buffers() -> Any:
    """The buffers through which weights come, all or some of which cannot be pinned."""
    said: list[list[str]] = []
    with Stage() as group:
        for skip in (0, 3):
            with told(said), emulated_cuda.failing("cudaHostAlloc", OUT_OF_MEMORY, skip):
                group.open()
            assert group.status(0).engine_pid == 0
        group.open()
        group.stage(1, 0, [0], group.table)
        group.check(group.table)
        group.end()
    return said
