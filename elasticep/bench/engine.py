"""The engine's side of the exchange bench: one rank, numpy only, no torch.

It also copies the bytes that cross a link with plain memcpy, all ranks at once, which is the limit
that an exchange is held against.
"""

import ctypes
import time
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from elasticep.bench import ranks
from elasticep.bench.case import WEIGHT, Case
from elasticep.native import abi
from elasticep.testing import raw

_X_DTYPE: Final = {"bf16": abi.Dtype.BF16, "fp32": abi.Dtype.FP32}


class WrongResult(ranks.BenchError):
    """The exchange ran, but what it delivered is not what the case says."""

    reason = "BENCH_WRONG_RESULT"


class Engine(raw.RawSession):
    """A session whose calls make no arrays, as an engine's operators do."""

    def prepare(self, case: Case, rank: int) -> None:
        """Inputs and buffers of one case."""
        self.case = case
        rows = case.rows(rank)
        self._plain = rows, np.zeros_like(rows)
        self.ids = case.ids(rank)
        self.weight = case.weights()
        self.x_dtype = int(_X_DTYPE[case.dtype])
        self.received = abi.Received()
        self.lost: npt.NDArray[np.uint8] = np.zeros(case.tokens, np.uint8)
        self.work_in(place=False)

    def work_in(self, *, place: bool) -> None:
        """Whether rows and results are the engine's own tensors, or lie where they travel."""
        self.x, self.result = self._plain
        rows, result = ctypes.c_void_p(), ctypes.c_void_p()
        if place:
            code = self._api.ep_exchange_buffers(
                self._handle, 0, 0, self.x_dtype, ctypes.byref(rows), ctypes.byref(result)
            )
            raw.check(code, "buffers")
        if rows.value is not None:
            self.x = raw.view(rows.value, self.x.shape, self.x.dtype)
            self.x[:] = self._plain[0]
        if result.value is not None:
            self.result = raw.view(result.value, self.x.shape, self.x.dtype)
        self._dispatch_arguments = (
            *(self._handle, 0, 0, 0, self.x.ctypes.data, self.x_dtype, self.ids.ctypes.data),
            *(self.ids.itemsize, self.weight.ctypes.data, self.case.tokens),
            *(ctypes.byref(self.received), self.lost.ctypes.data),
        )
        self._combine_arguments = (self._handle, 0, 0, self.result.ctypes.data, self.x_dtype)

    def round_trip(self) -> None:
        """One whole exchange."""
        code = self._api.ep_dispatch(*self._dispatch_arguments)
        raw.check(code, "dispatch")
        code = self._api.ep_combine(*self._combine_arguments)
        raw.check(code, "combine")

    def verify(self, rank: int) -> None:
        """One exchange whose outputs are the rows themselves; raises unless every sum is exact."""
        self.result[:] = 0
        self.begin(self.case.tokens)
        got = self.dispatch(0, 0, self.x, self.ids, self.weight, x_dtype=self.x_dtype)
        spec = self.geometry.exchange[0]
        if got.places is None:
            np.copyto(got.out, got.rows[:, None, :] if got.out.ndim == 3 else got.rows)
        else:  # of all the room only what is used
            for row in np.sort(got.places[got.places >= 0]):
                got.out[row] = got.rows[row]
        raw.check(self._api.ep_combine(*self._combine_arguments), "combine")
        if not self.end():
            raise WrongResult("the first step is not complete")
        by_rank = spec.reduce == abi.Reduce.PER_RANK and spec.layout in (
            abi.RowLayout.ROUTED,
            abi.RowLayout.ARRIVAL,
        )
        if by_rank:  # a sum of unweighted rows, one per rank that held an expert
            factor = self.case.needs(rank).sum(axis=1, keepdims=True).astype(np.float32)
        else:
            factor = np.full((self.case.tokens, 1), WEIGHT * self.case.topk, np.float32)
        for first in range(0, self.case.tokens, 512):
            part = slice(first, first + 512)
            if not np.array_equal(_floats(self.result[part]), _floats(self.x[part]) * factor[part]):
                raise WrongResult("the sums are not those of the case")


def _floats(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    return raw.from_bf16(values) if values.dtype == np.uint16 else values


class EngineRank:
    """Obeys a `RankSet`."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.session: Engine | None = None
        self._source: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._target: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)

    @classmethod
    def start(cls, path: str, rank: int) -> None:
        """Connect and serve."""
        ranks.serve(cls(rank), ranks.connect(path, rank))

    def on_prepare(self, case: dict[str, Any], socket: str, ticket: str, memcpy_bytes: int) -> None:
        """Attach, make inputs; the first exchange comes with `on_verify`."""
        self.on_leave()
        self.session = Engine(socket, ticket, 60_000)
        self.session.prepare(Case.from_dict(case), self.rank)
        self._source = np.ones(memcpy_bytes, np.uint8)
        self._target = np.zeros(memcpy_bytes, np.uint8)

    def on_verify(self) -> dict[str, int]:
        """See `Engine.verify`; answers who runs this rank's kernels."""
        assert self.session is not None
        for place in (True, False):
            self.session.work_in(place=place)
            self.session.verify(self.rank)
        return {"runner": int(self.session.status.runner_pid)}

    def on_run(self, runs: int, repeat: int, place: bool = False) -> dict[str, list[int]]:
        """`runs` steps of `repeat` exchanges: ns per exchange, per step barrier, per whole step.

        `place`: rows and results lie where they travel; see `Engine.work_in`.
        """
        session = self.session
        assert session is not None
        session.work_in(place=place)
        exchange_ns, barrier_ns, step_ns = [], [], []
        for _ in range(runs):
            before = time.monotonic_ns()
            session.begin(session.case.tokens)
            start = time.monotonic_ns()
            for _ in range(repeat):
                session.round_trip()
            end = time.monotonic_ns()
            complete = session.end()
            step_ns.append(time.monotonic_ns() - before)
            exchange_ns.append((end - start) // repeat)
            barrier_ns.append(start - before)
            if not complete:
                raise WrongResult("a step is not complete though nothing failed")
        return {
            "ns": ranks.times(exchange_ns),
            "barrier_ns": ranks.times(barrier_ns),
            "step_ns": ranks.times(step_ns),
        }

    def on_memcpy(self, runs: int, repeat: int) -> dict[str, list[int]]:
        """Plain copies of the bytes that cross a link, in step with the other ranks."""
        session = self.session
        assert session is not None
        source, target, size = self._source.ctypes.data, self._target.ctypes.data, self._source.size
        copy_ns = []
        for _ in range(runs):
            session.begin(session.case.tokens)
            session.round_trip()  # nobody leaves it long before the others
            start = time.monotonic_ns()
            for _ in range(repeat):
                ctypes.memmove(target, source, size)
            copy_ns.append((time.monotonic_ns() - start) // repeat)
            session.end()
        return {"ns": ranks.times(copy_ns)}

    def on_leave(self) -> None:
        """Give the seat back and drop the buffers."""
        if self.session is not None:
            self.session.close()
        self.session = None
        self._source = self._target = np.zeros(0, np.uint8)
