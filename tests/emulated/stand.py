"""Ranks of one process on emulated GPUs, and their memory, which tests read and write.

Programs (`scenes*.py`) run in a process of their own, because a process has one CUDA library:
`run("tests.emulated.scenes_barrier:retry")` returns what that function returns there.
"""

import ctypes
import importlib
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from elasticep.native import abi, cuda_library, region
from elasticep.native import cuda as native
from elasticep.testing import emulated_cuda
from elasticep.testing.placements import equal_weights

MS = 1_000_000
EXPELLED = 2  # of a leave mark
_ROOT = Path(__file__).parent.parent.parent
_LIMIT_S = 120.0
_RUN = native.StepStatus.RUN


def run(
    target: str, *, seed: int = 0, sms: int = 4, limit_s: float = _LIMIT_S, **arguments: object
) -> Any:
    """What `target`, "module:function", returns (as JSON), called with keyword arguments."""
    environment = {
        **os.environ,
        **emulated_cuda.environment(seed=seed, sms=sms),
        "PYTHONPATH": str(_ROOT),
    }
    call = json.dumps([target, arguments])
    done = subprocess.run(
        [sys.executable, "-m", "tests.emulated.stand", call],
        env=environment,
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    assert done.returncode == 0, f"{target} ended with {done.returncode}:\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition."""
    tick, end = threading.Event(), time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, f"{what}: not within a minute"
        tick.wait(0.002)


class Seat:
    """One rank's memory, and the context of its present incarnation."""

    def __init__(self, geometry: abi.Geometry, rank: int, timeouts: abi.Timeouts) -> None:
        layout = region.layout(geometry)
        self.geometry, self.rank = geometry, rank
        self.header_fd = region.create_memory(f"header-{rank}", layout.header_bytes)
        region.format_header(self.header_fd, geometry, rank, timeouts)
        self.header = region.Header(self.header_fd, layout.digest)
        self.data_fd = cuda_library.create_region(geometry, 0)
        self._map = mmap.mmap(self.data_fd, 0)
        self.data: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.context: native.CudaContext | None = None
        self.stream = emulated_cuda.Stream()

    def open(self, incarnation: int, peers: Iterable["Seat"], sharing: int = 1) -> None:
        """A context for this incarnation, which has all peers mapped."""
        self.close()
        self.header.grant(incarnation)
        config = native.ContextConfig(
            rank=self.rank,
            incarnation=incarnation,
            device=0,
            ranks_on_device=sharing,
            hold=False,
        )
        self.context = native.CudaContext(self.geometry, config, self.data_fd, self.header_fd)
        for peer in peers:
            if peer is not self:
                self.context.map_peer(peer.rank, peer.data_fd)

    def close(self) -> None:
        """End the context, whose kernels must be able to end."""
        if self.context is not None:
            self.stream.synchronize()
            self.context.close()
            self.context = None

    @property
    def here(self) -> native.CudaContext:
        """The context."""
        assert self.context is not None
        return self.context

    def begin(self, tokens: int = 0) -> None:
        """Put a barrier on the stream."""
        self.here.step_begin(tokens, self.stream.cuda_stream)

    def end(self) -> None:
        """Put the end of a step on the stream."""
        self.here.step_end(self.stream.cuda_stream)

    def result(self) -> native.StepResult:
        """Wait for the stream; what the last step left behind."""
        self.stream.synchronize()
        return self.here.result()

    def meanwhile(self) -> Iterator[region.HeaderStatus]:
        """What the header says, again and again until the stream has run out."""
        waiter = threading.Thread(target=self.stream.synchronize)
        waiter.start()
        while waiter.is_alive():
            yield self.header.status()
            waiter.join(0.001)

    # ---- memory

    @property
    def marks(self) -> npt.NDArray[np.uint64]:
        """Leave marks by rank, [ranks, 8]; the first word counts."""
        ranks = self.geometry.max_ranks
        end = region.loads_offset(self.geometry)
        begin = end - (64 * ranks + 255) // 256 * 256
        return self.data[begin : begin + 64 * ranks].view(np.uint64).reshape(ranks, 8)

    def cell(self, parity: int, source: int) -> npt.NDArray[np.uint64]:
        """Words of a barrier cell: version, number, incarnation | tokens << 32, views, ..."""
        ranks = self.geometry.max_ranks
        views = 4
        words = 5 + 2 * views  # struct Cell
        size = (8 * words + views * ranks * 4 + 63) // 64 * 64
        whole = (2 * ranks * size + 255) // 256 * 256
        marks = (64 * ranks + 255) // 256 * 256
        begin = region.loads_offset(self.geometry) - marks - whole
        at = begin + (parity * ranks + source) * size
        return self.data[at : at + size].view(np.uint64)


def mark(step: int, epoch: int, why: int = EXPELLED) -> int:
    """`ep::make_leave`."""
    return step << 24 | (epoch & 0xFFFF) << 8 | why


class Stand:
    """Seats of one group, all on one emulated GPU.

    Args:
        geometry: of the group.
        suspect_ms, exchange_ms, step_ms: time-outs.
    """

    def __init__(
        self,
        geometry: abi.Geometry,
        *,
        suspect_ms: int = 500,
        exchange_ms: int = 60_000,
        step_ms: int = 60_000,
    ) -> None:
        self.geometry = geometry
        timeouts = abi.Timeouts(
            suspect_after_ns=suspect_ms * MS,
            hang_timeout_ns=5_000 * MS,
            exchange_timeout_ns=exchange_ms * MS,
            step_timeout_ns=step_ms * MS,
        )
        self.seats = [Seat(geometry, rank, timeouts) for rank in range(geometry.max_ranks)]

    def open(self, *ranks: int, incarnation: int = 1) -> None:
        """Contexts for these ranks."""
        for rank in ranks:
            self.seats[rank].open(incarnation, self.seats, len(self.seats))

    def stage(
        self,
        epoch: int,
        previous: int,
        members: Iterable[int] | dict[int, int],
        table: npt.NDArray[np.int32],
        *,
        on: Iterable[int] | None = None,
    ) -> None:
        """Give the view to its members, or to `on` alone."""
        incarnations = members if isinstance(members, dict) else dict.fromkeys(members, 1)
        weights = equal_weights(table, list(incarnations))
        for rank in incarnations if on is None else on:
            self.seats[rank].here.stage(
                epoch,
                previous,
                incarnations,
                table.reshape(-1).tolist(),
                weights.reshape(-1).tolist(),
            )

    def step(self, *ranks: int) -> list[native.StepResult]:
        """An empty step of these ranks."""
        for rank in ranks:
            self.seats[rank].begin()
            self.seats[rank].end()
        return [self.seats[rank].result() for rank in ranks]

    def enter(self, *ranks: int, tokens: int = 0) -> list[native.StepResult]:
        """A barrier of these ranks that announce tokens, tokens + 1, ...; what it said. Whom it
        gave up on tries again, while the others are in the step.
        """
        entered: dict[int, native.StepResult] = {}
        while outside := [rank for rank in ranks if rank not in entered]:
            for rank in outside:
                self.seats[rank].begin(tokens + ranks.index(rank))
            results = {rank: self.seats[rank].result() for rank in outside}
            entered |= {r: told for r, told in results.items() if told.status is _RUN}
        return [entered[rank] for rank in ranks]

    def together(self, *ranks: int, tokens: int = 0) -> list[native.StepResult]:
        """The same, and the end of that step, which must be complete."""
        results = self.enter(*ranks, tokens=tokens)
        for rank in ranks:
            self.seats[rank].end()
            assert self.seats[rank].result().complete
        return results

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            for seat in self.seats:
                seat.close()


def over(address: int | None, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    """An array over memory of a context."""
    assert address
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = (ctypes.c_uint8 * size).from_address(address)
    return np.frombuffer(raw, np.uint8).view(dtype).reshape(shape)


def main() -> None:
    """Run what the command line says; the process ends without waiting for kernels."""
    target, arguments = json.loads(sys.argv[1])
    module, _, name = target.partition(":")
    value = getattr(importlib.import_module(module), name)(**arguments)
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
