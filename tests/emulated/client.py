"""Lets sessions of the client run on an emulated GPU, in a process that has loaded one.

Tensors are CPU tensors there (`elasticep.bench.device_streams`). What stands for a kernel of the
engine is a function that the stream calls in its turn, also in replays of a graph.
"""

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from elasticep.bench import device_streams
from elasticep.client import cuda_handle
from elasticep.testing import emulated_cuda

failures: list[str] = []
_kept: list[Any] = []
_capturing = [False]


def install() -> None:
    """Once, before the first session."""
    begin = cuda_handle.CudaHandle.__init__

    def on_host(self: Any, *arguments: Any) -> None:
        begin(self, *arguments)
        emulated_cuda.set_device(self.device.index)
        self.device = torch.device("cpu")

    cuda_handle.CudaHandle.__init__ = on_host  # type: ignore[method-assign]
    stream = property(lambda self: device_streams.current_stream().cuda_stream)
    cuda_handle.CudaHandle.stream = stream  # type: ignore[assignment,method-assign]
    torch.cuda.is_current_stream_capturing = lambda: _capturing[0]


@contextlib.contextmanager
def capture(graph: device_streams.Graph) -> Iterator[None]:
    """What is put on the current stream goes into the graph."""
    with graph.capture():
        _capturing[0] = True
        try:
            yield
        finally:
            _capturing[0] = False


def kernel(function: Callable[[], None]) -> None:
    """Call it when the current stream comes to it; errors go to `failures`."""

    def call() -> None:
        try:
            function()
        except Exception:
            failures.append(traceback.format_exc())

    made = emulated_cuda.CALL(call)
    _kept.append(made)
    emulated_cuda.api().epe_call(made, device_streams.current_stream().cuda_stream)
