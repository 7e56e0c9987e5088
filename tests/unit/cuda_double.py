"""A double of a CUDA session's handle, a group for it and batches.

It stands for one rank that is its own peer; its "GPU" is host memory, and its stream runs when it
is waited for.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from elasticep.device import Device
from elasticep.errors import DeviceFailed, Fenced, StepTimeout
from elasticep.geometry import GroupGeometry
from elasticep.group import GroupConfig, Launch
from elasticep.native.cuda_structs import StepStatus, Why
from elasticep.spec import ExchangeSpec

torch = pytest.importorskip("torch")

CAP, HIDDEN, EXPERTS, TOPK, SLOTS, LAYERS = 4, 8, 4, 2, 4, 2
CPU = torch.device("cpu")


def over(address: int, shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    from elasticep.native.tensors import over as made

    return made(address, shape, dtype, device)


class Handle:
    """`CudaHandle` without a GPU: kernels run in the order in which they were put."""

    def __init__(self) -> None:
        self.device = CPU
        self.stream = 5
        self.rows = torch.zeros(CAP, HIDDEN)
        self.out = torch.zeros(CAP, HIDDEN)
        self.ids = torch.full((CAP, TOPK), -1, dtype=torch.int32)
        self.weights = torch.zeros(CAP, TOPK)
        self.arrivals = torch.zeros(1, 16, dtype=torch.int32)
        self.table = torch.arange(SLOTS, dtype=torch.int32).repeat(LAYERS, 1)
        self.context = SimpleNamespace(received=self._received, result=self.result)
        self.calls: list[str] = []
        self.begun = self.ended = 0
        self.unsure = False
        self.status = StepStatus.RUN
        self.epoch, self.complete, self.staged = 1, True, 1
        self.why: Fenced | None = None
        self.broken = False
        self.lose: list[int] = []
        self.closed = False
        self.fault, self.torn, self.work, self.settled = Why.NONE, 0, 0, 0
        self.serves = False
        self.mirror = torch.zeros(1 << 16, dtype=torch.uint8)
        self.held = list(range(SLOTS))

    def _received(self, number: int, channel: int) -> Any:
        return SimpleNamespace(
            rows=self.rows.data_ptr(),
            scales=None,
            ids=self.ids.data_ptr(),
            weights=self.weights.data_ptr(),
            slot_counts=None,
            slot_offsets=None,
            out=self.out.data_ptr(),
            rows_count=CAP,
            source_rows=CAP,
            id_rows=CAP,
            places=None,
            row_slots=None,
            arrivals=self.arrivals.data_ptr(),
            out_dtype=0,
            scale_lead=0,
        )

    def counts(self, exchange: int, channel: int) -> Any:
        self.calls.append("counts")
        return SimpleNamespace(rows=2, arrived=2, torn=self.torn)

    def result(self) -> Any:
        return SimpleNamespace(
            status=self.status,
            step=self.begun,
            epoch=self.epoch,
            members={0: 1},
            tokens={0: 3},
            digest=9,
            work=self.work,
            settled=self.settled,
            fault=SimpleNamespace(
                step=self.begun,
                why=self.fault,
                phase=3,
                layer=1,
                exchange=0,
                rank=0,
                expert=9,
                slot=3,
                rows=7,
                room=6,
            ),
            complete=self.complete and self.status is StepStatus.RUN,
        )

    def slot_experts(self) -> int:
        return int(self.table.data_ptr())

    def enter(self, after: int, timeout_ms: int) -> None:
        self.calls.append(f"enter {after}")
        if self.staged <= after:
            raise StepTimeout("no view")

    def begin(self, tokens: int, timeout_ms: int) -> None:
        if self.why:
            raise self.why
        self.calls.append(f"begin {tokens}")
        self.unsure = True
        self.begun += 1

    def step_end(self) -> bool:
        self.calls.append("end")
        self.ended += 1
        return False

    def step_tear(self) -> None:
        self.calls.append("tear")
        self.complete = False

    def step_cancel(self) -> None:
        self.calls.append("cancel")

    def recount(self) -> int:
        self.calls.append("recount")
        self.ended = self.begun
        return self.begun

    def wait(self, what: int, count: int, stream: int) -> Any:
        if self.broken:
            raise DeviceFailed("rank 0")
        assert count <= (self.ended if what else self.begun), "waits for what was never put"
        assert stream == 5
        self.calls.append(f"wait {what.name.lower()} {count}")  # type: ignore[attr-defined]
        return self.result()

    def dispatch(
        self, exchange: int, channel: int, layer: int, tensors: Any, lost: int, half: str = "both"
    ) -> None:
        self.calls.append(f"dispatch {half}")
        self.tokens = tensors.tokens
        x = over(tensors.x, (tensors.tokens, HIDDEN), torch.float32, CPU)
        self.rows[: tensors.tokens] = x
        flags = over(lost, (tensors.tokens,), torch.uint8, CPU)
        flags.zero_()
        self.ids[: tensors.tokens] = over(
            tensors.ids, (tensors.tokens, TOPK), torch.int64, CPU
        ).int()
        self.arrivals[0, 2] = tensors.tokens
        self.arrivals[0].view(torch.float32)[4] = tensors.global_scale
        for token in self.lose:
            flags[token] = 1

    def count_slots(self, exchange: int, channel: int, counts: int) -> None:
        self.calls.append("count slots")
        found = torch.bincount(self.ids[self.ids >= 0], minlength=SLOTS)
        over(counts, (SLOTS,), torch.int32, CPU).copy_(found)

    def receive(self, exchange: int, channel: int) -> None:
        self.calls.append("receive")

    def combine(
        self, exchange: int, channel: int, out: int, dtype: int, half: str = "both"
    ) -> None:
        self.calls.append(f"combine {half}")
        if out:
            over(out, (self.tokens, HIDDEN), torch.float32, CPU).copy_(self.out[: self.tokens])

    def slots(self, epoch: int, shape: tuple[int, int, int]) -> Any:
        table = np.full(shape, -1, np.int32)
        table[:, 0] = np.arange(SLOTS)
        if self.lose:
            table[:, 0, 3] = -1
        return table

    def weights_address(self) -> int:
        return int(self.mirror.data_ptr())

    def weights_held(self, layer: int, slots: int) -> list[int]:
        self.calls.append(f"held {layer}")
        return self.held[:slots]

    def use_sms(self, count: int) -> None:
        self.sms = count

    def serves_lost(self) -> bool:
        return self.serves

    def operators(self) -> None:
        return None

    def fenced(self) -> Fenced | None:
        return self.why

    def expelled(self, epoch: int) -> Fenced:
        return self.why or Fenced(epoch, "the others went on without it")

    def close(self) -> None:
        self.closed = True


def patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no stream be captured."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def session_of(handle: Handle, **changes: Any) -> Any:
    spec = ExchangeSpec.preset(
        "ROUTED", dispatch_dtype="fp32", combine_dtype="fp32", max_tokens=CAP
    )
    geometry = GroupGeometry(
        layers=LAYERS,
        experts=EXPERTS,
        topk=TOPK,
        hidden=HIDDEN,
        slots_per_rank=SLOTS,
        max_ranks=1,
    )
    plain: dict[str, Any] = {
        "name": "double",
        "geometry": geometry,
        "exchanges": (("decode", spec),),
        "initial_ranks": 1,
        "spare_copies": 0,
        "device": Device.CUDA,
        "launch": Launch.INLINE,
        **changes,
    }
    from elasticep.client import cuda_session

    config = GroupConfig(**plain)
    return cuda_session.CudaSession(
        handle,
        config,
        rank=0,
        incarnation=1,  # type: ignore[arg-type]
    )


def inputs(tokens: int) -> tuple[Any, Any, Any]:
    x = torch.arange(tokens * HIDDEN, dtype=torch.float32).view(tokens, HIDDEN)
    return x, torch.zeros(tokens, TOPK, dtype=torch.int64), torch.ones(tokens, TOPK)


def forward(session: Any, tokens: int = 3) -> Any:
    exchange = session.exchange("decode")
    args = inputs(tokens)

    def run(step: Any, batch: None) -> Any:
        recv = exchange.dispatch(0, *args)
        recv.out.copy_(2 * recv.rows)
        return exchange.combine(0, recv)

    return run
