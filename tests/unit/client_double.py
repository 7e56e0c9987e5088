"""A double of the native session, one rank that is its own peer, and a group and batches for it."""

import ctypes
from collections import deque
from typing import Any

import numpy as np
import pytest

from elasticep.client.handle import DispatchInput
from elasticep.errors import ElasticEPError, UsageError
from elasticep.geometry import GroupGeometry
from elasticep.group import GroupConfig
from elasticep.native import abi
from elasticep.spec import ExchangeSpec

torch = pytest.importorskip("torch")

CAP, RANKS, HIDDEN, EXPERTS, TOPK, SLOTS, LAYERS = 4, 2, 8, 4, 2, 3, 2


def config(**changes: Any) -> GroupConfig:
    spec = ExchangeSpec.preset(
        "ROUTED",
        dispatch_dtype="fp32",
        combine_dtype="fp32",
        reduce="per_expert",
        max_tokens=CAP,
        channels=2,
    )
    return GroupConfig(
        **{
            "name": "double",
            "geometry": GroupGeometry(
                layers=LAYERS,
                experts=EXPERTS,
                topk=TOPK,
                hidden=HIDDEN,
                slots_per_rank=SLOTS,
                max_ranks=RANKS,
            ),
            "exchanges": (("decode", spec), ("wide", ExchangeSpec.preset("ALLGATHER"))),
            "initial_ranks": 2,
            **changes,
        }
    )


class DoubleHandle:
    """Delivers what was sent to where it came from. Calls are logged; answers can be scripted."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.failures: dict[str, deque[BaseException | None]] = {}
        self.complete: deque[bool] = deque()
        self.epoch = 1
        self.placement = np.full((LAYERS, RANKS, SLOTS), -1, np.int32)
        self.placement[:, 0, :2] = (0, 2)
        self.placement[:, 1, :2] = (1, 3)
        self.lost = b""
        rooms = RANKS * CAP
        self.rows = np.zeros((rooms, HIDDEN), np.float32)
        self.ids = np.full((rooms, TOPK), -1, np.int32)
        self.weights = np.zeros((rooms, TOPK), np.float32)
        self.counts = np.zeros(SLOTS, np.int32)
        self.out = np.zeros((rooms, TOPK, HIDDEN), np.float32)
        self.step = 0

    def fail(self, call: str, *errors: BaseException | None) -> None:
        self.failures[call] = deque(errors)

    def _log(self, call: str, *what: Any) -> None:
        self.calls.append((call, *what) if what else call)
        waiting = self.failures.get(call)
        error = waiting.popleft() if waiting else None
        if error is not None:
            raise error

    def close(self) -> None:
        self._log("close")

    def step_begin(self, tokens: int, timeout_ms: int) -> abi.StepInfo:
        self._log("step_begin", tokens, timeout_ms)
        self.step += 1
        info = abi.StepInfo(epoch=self.epoch, step=self.step, digest=7, members=2)
        info.incarnation[0], info.incarnation[1] = 1, 3
        return info

    def step_end(self) -> bool:
        self._log("step_end")
        return self.complete.popleft() if self.complete else True

    def step_tear(self) -> None:
        self._log("step_tear")

    def step_cancel(self) -> None:
        self._log("step_cancel")

    def dispatch_send(self, exchange: int, channel: int, layer: int, t: DispatchInput) -> None:
        self._log("dispatch_send", exchange, channel, layer, t.tokens)
        if t.tokens:
            assert t.x is not None
            count = t.tokens * HIDDEN
            sent = np.ctypeslib.as_array((ctypes.c_float * count).from_address(t.x))
            self.rows[: t.tokens] = sent.reshape(t.tokens, HIDDEN)

    def dispatch_recv(
        self, exchange: int, channel: int, out: abi.Received, lost: int | None
    ) -> None:
        self._log("dispatch_recv", exchange, channel)
        if lost is not None:
            ctypes.memmove(lost, self.lost, len(self.lost))
        out.rows, out.out = self.rows.ctypes.data, self.out.ctypes.data
        out.ids = self.ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        out.weights = self.weights.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        out.slot_counts = self.counts.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        out.rows_count, out.id_rows, out.arrived = RANKS * CAP, RANKS * CAP, 2
        out.row_dtype = out.out_dtype = abi.Dtype.FP32

    def dispatch(
        self,
        exchange: int,
        channel: int,
        layer: int,
        tensors: DispatchInput,
        out: abi.Received,
        lost: int | None,
    ) -> None:
        self.dispatch_send(exchange, channel, layer, tensors)
        self.dispatch_recv(exchange, channel, out, lost)

    def combine_send(self, exchange: int, channel: int) -> None:
        self._log("combine_send", exchange, channel)

    def combine_recv(self, exchange: int, channel: int, out: int | None, dtype: int) -> None:
        self._log("combine_recv", exchange, channel, dtype)
        if out is not None:
            ctypes.memmove(out, self.out[:, 0].copy().ctypes.data, HIDDEN * 4)

    def combine(self, exchange: int, channel: int, out: int | None, dtype: int) -> None:
        self.combine_send(exchange, channel)
        self.combine_recv(exchange, channel, out, dtype)

    def slots(self, epoch: int, shape: tuple[int, int, int]) -> Any:
        self._log("slots", epoch)
        assert shape == self.placement.shape
        return self.placement.copy()

    def loads(self, shape: tuple[int, int]) -> Any:
        return np.arange(np.prod(shape), dtype=np.uint64).reshape(shape)

    def warmup(self, on: bool) -> None:
        self._log("warmup", on)

    def status(self) -> abi.Status:
        return abi.Status(rank=0)

    def operators(self) -> None:
        return None

    def failure(self, code: int, text: str) -> ElasticEPError:
        return UsageError(text)

    @property
    def names(self) -> list[str]:
        return [call if isinstance(call, str) else call[0] for call in self.calls]


def batch(tokens: int = 2) -> tuple[Any, Any, Any]:
    x = torch.arange(tokens * HIDDEN, dtype=torch.float32).view(tokens, HIDDEN)
    return x, torch.zeros((tokens, TOPK), dtype=torch.int64), torch.ones((tokens, TOPK))
