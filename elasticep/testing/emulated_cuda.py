"""The CUDA data plane without a GPU: `csrc/cuda` compiled for the host (`csrc/emulated`).

A process that was started with `environment()` loads it in place of the CUDA library. Device
addresses are host addresses there, and tensors are CPU tensors; streams and graphs are these.
"""

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, Final, Self

import elasticep
from elasticep.errors import UsageError
from elasticep.native import library

NAME: Final = "libelasticep_cuda_emulated.so"
VARIABLE: Final = "ELASTICEP_CUDA_LIBRARY"
FAILING_VARIABLE: Final = "ELASTICEP_EMULATED_FAILING"
CALL: Final = CFUNCTYPE(None)
PROTOTYPES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "epe_set_seed": (None, (c_uint64,)),
    "epe_set_device": (c_int, (c_int,)),
    "epe_stream_create": (c_void_p, ()),
    "epe_stream_destroy": (c_int, (c_void_p,)),
    "epe_stream_synchronize": (c_int, (c_void_p,)),
    "epe_synchronize": (c_int, ()),
    "epe_copy": (c_int, (c_void_p, c_void_p, c_uint64, c_void_p)),
    "epe_pause": (c_int, (c_uint64, c_void_p)),
    "epe_call": (c_int, (CALL, c_void_p)),
    "epe_hold_blocks": (None, (c_uint32, c_uint32)),
    "epe_let_blocks_begin": (None, ()),
    "epe_held_blocks": (c_uint32, ()),
    "epe_hold_copies": (None, (c_int,)),
    "epe_held_copies": (c_uint32, ()),
    "epe_let_copies": (None, (c_uint32,)),
    "epe_set_free_bytes": (None, (c_uint64,)),
    "epe_fail_call": (None, (c_char_p, c_int, c_uint32)),
    "epe_capture_begin": (c_int, (c_void_p,)),
    "epe_capture_end": (c_int, (c_void_p, POINTER(c_void_p))),
    "epe_graph_launch": (c_int, (c_void_p, c_void_p)),
    "epe_graph_destroy": (None, (c_void_p,)),
}


PUTS: Final = ("epe_copy", "epe_pause", "epe_call", "epe_graph_launch")  # something on a stream


def path() -> Path:
    """Where `make build` puts the library in a checkout; it need not be there."""
    return Path(elasticep.__file__).parent.parent / "build" / "native" / "emulated" / NAME


def environment(*, devices: int = 2, sms: int = 4, seed: int = 0) -> dict[str, str]:
    """Variables of a process that shall see emulated GPUs.

    Args:
        devices: GPUs that it sees.
        sms: multiprocessors of each; grids are at most as large.
        seed: 0: threads and blocks run in order; else in an order that follows from it.
    """
    return {
        VARIABLE: str(path()),
        "OMP_NUM_THREADS": "1",  # torch's threads would wait on the cores of the emulated GPU
        "ELASTICEP_EMULATED_DEVICES": str(devices),
        "ELASTICEP_EMULATED_SMS": str(sms),
        "ELASTICEP_EMULATED_SEED": str(seed),
    }


def active() -> bool:
    """Whether this process was told to load it."""
    return Path(os.environ.get(VARIABLE, "")).name == NAME


@functools.cache
def api() -> ctypes.CDLL:
    """The loaded library with the prototypes of what only it has."""
    loaded = library.cuda()
    for name, (result, arguments) in PROTOTYPES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    for name in PUTS:
        getattr(loaded, name).errcheck = _put
    return loaded


def _check(status: int, what: str) -> None:
    if status:
        raise UsageError(f"emulated GPU: {what} failed with CUDA error {status}")


def _put(status: int, function: Any, arguments: Any) -> None:
    _check(status, f"{function.__name__} on the stream {arguments[-1]}")


def set_seed(seed: int) -> None:
    """What blocks that begin from now on follow; see `environment`."""
    api().epe_set_seed(seed)


class Stream:
    """Runs what is put on it in order; `cuda_stream` is what the data plane takes."""

    def __init__(self) -> None:
        self.cuda_stream: int = api().epe_stream_create()

    def synchronize(self) -> None:
        """Wait until all that was put on it has run."""
        _check(api().epe_stream_synchronize(self.cuda_stream), "waiting for a stream")

    def close(self) -> None:
        """It ends when it has run what it has."""
        if self.cuda_stream:
            api().epe_stream_destroy(self.cuda_stream)
            self.cuda_stream = 0

    def __del__(self) -> None:
        self.close()


def hold_blocks(skip: int, first: int) -> None:
    """Let blocks begin late: those from index `first` on, of the kernel after the next `skip` ones
    that begin on the current device. They wait for `let_blocks_begin`.
    """
    api().epe_hold_blocks(skip, first)


def held_blocks() -> int:
    """How many blocks wait."""
    return int(api().epe_held_blocks())


def let_blocks_begin() -> None:
    """End what `hold_blocks` began."""
    api().epe_let_blocks_begin()


def hold_copies(shut: bool) -> None:
    """Let copies from pinned host memory to a GPU wait, or go on."""
    api().epe_hold_copies(int(shut))


def let_copies(count: int) -> None:
    """While they wait: so many of them run."""
    api().epe_let_copies(count)


def held_copies() -> int:
    """How many streams wait with such a copy."""
    return int(api().epe_held_copies())


def set_free_bytes(count: int) -> None:
    """The memory that every GPU says it has free."""
    api().epe_set_free_bytes(count)


@contextlib.contextmanager
def failing(call: str, status: int, skip: int = 0) -> Iterator[None]:
    """Inside, calls of a function of CUDA fail, after the next `skip` ones of it.

    Args:
        call: its name; those that do (`epe::failing` in `csrc/emulated`) allocate, map and load.
            `FAILING_VARIABLE`, as "name=status", is the same for a process from its beginning.
        status: the `cudaError_t`. For `cudaDeviceCanAccessPeer` any: it answers no.
        skip: calls that do not fail yet.
    """
    api().epe_fail_call(call.encode(), status, skip)
    try:
        yield
    finally:
        api().epe_fail_call(call.encode(), 0, 0)


def synchronize() -> None:
    """Wait for all streams of the current device."""
    _check(api().epe_synchronize(), "waiting for the device")


def set_device(device: int) -> None:
    """The device of this thread's calls."""
    _check(api().epe_set_device(device), f"choosing device {device}")


class Graph:
    """What was put on a stream while it was captured, to be run again."""

    def __init__(self) -> None:
        self._graph = c_void_p()

    @contextlib.contextmanager
    def capture(self, stream: Stream) -> Iterator[Self]:
        """Everything inside is noted, not run."""
        _check(api().epe_capture_begin(stream.cuda_stream), "beginning a capture")
        try:
            yield self
        finally:
            status = api().epe_capture_end(stream.cuda_stream, ctypes.byref(self._graph))
        _check(status, "a capture")

    def replay(self, stream: Stream) -> None:
        """Put it on the stream."""
        api().epe_graph_launch(self._graph, stream.cuda_stream)

    def __del__(self) -> None:
        if self._graph:
            api().epe_graph_destroy(self._graph)
