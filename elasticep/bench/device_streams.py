"""Devices, streams and graphs for what runs on a GPU or an emulated one, behind the same names.

On an emulated GPU (`elasticep.testing.emulated_cuda`) tensors are CPU tensors: work of torch runs
at once and in no stream, so what must be in a stream's order is put there by `copy` and `pause`.
"""

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any, Final

import torch

from elasticep.testing import emulated_cuda

EMULATED: Final = emulated_cuda.active()


def device_of(index: int) -> torch.device:
    """What tensors of that GPU are made with."""
    return torch.device("cpu") if EMULATED else torch.device("cuda", index)


def use(index: int) -> torch.device:
    """Make it the device of this thread; returns `device_of`."""
    if EMULATED:
        emulated_cuda.set_device(index)
    else:
        torch.cuda.set_device(index)
    return device_of(index)


def synchronize() -> None:
    """Wait for all that was put on the device."""
    if EMULATED:
        emulated_cuda.synchronize()
    else:
        torch.cuda.synchronize()


def new_stream() -> Any:
    """A stream; `.cuda_stream` is what the data plane takes."""
    return emulated_cuda.Stream() if EMULATED else torch.cuda.Stream()


@functools.cache
def _usual() -> emulated_cuda.Stream:
    return emulated_cuda.Stream()


def current_stream() -> Any:
    """The stream that this thread works on."""
    return _usual() if EMULATED else torch.cuda.current_stream()


def copy(to: torch.Tensor, source: torch.Tensor, stream: int) -> None:
    """Copy all elements, of one shape and dtype, on the current stream, which `stream` is."""
    if not EMULATED:
        to.copy_(source)
        return
    assert to.is_contiguous()
    assert source.is_contiguous()
    assert (to.shape, to.dtype) == (source.shape, source.dtype)
    emulated_cuda.api().epe_copy(to.data_ptr(), source.data_ptr(), to.nbytes, stream)


def pause(cycles: int, stream: Any) -> None:
    """Keep the stream busy for about as many nanoseconds."""
    if EMULATED:
        emulated_cuda.api().epe_pause(cycles, stream.cuda_stream)
        return
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)


class Mark:
    """The moment at which the current stream comes here. Emulated: it is waited for."""

    def __init__(self) -> None:
        self._event: Any = None
        self._ns = 0
        if EMULATED:
            synchronize()
            self._ns = time.monotonic_ns()
        else:
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def us_until(self, later: "Mark") -> float:
        """Microseconds between two that have come."""
        if EMULATED:
            return (later._ns - self._ns) / 1e3
        return float(self._event.elapsed_time(later._event)) * 1e3


class Graph:
    """A captured sequence of what was put on one stream."""

    def __init__(self) -> None:
        self._graph: Any = emulated_cuda.Graph() if EMULATED else torch.cuda.CUDAGraph()

    @contextlib.contextmanager
    def capture(self) -> Iterator[int]:
        """Yields the stream to put it on."""
        if EMULATED:
            with self._graph.capture(_usual()):
                yield _usual().cuda_stream
            return
        with torch.cuda.graph(self._graph):
            yield int(torch.cuda.current_stream().cuda_stream)

    def replay(self) -> None:
        """Put it on the current stream."""
        if EMULATED:
            self._graph.replay(_usual())
        else:
            self._graph.replay()
