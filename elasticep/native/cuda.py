"""A rank's context on its GPU: the exchange of `csrc/cuda`, bound with ctypes.

A `CudaContext` is one rank's end of the exchange on its GPU. Device addresses and streams are plain
integers; this module imports no torch. Nothing here waits for the GPU unless it says so.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_uint32, c_uint64, c_void_p
from dataclasses import dataclass

from elasticep import errors
from elasticep.native import abi
from elasticep.native.cuda_library import api, check
from elasticep.native.cuda_structs import (
    Config,
    Counts,
    DispatchArgs,
    Fault,
    Plan,
    Received,
    StepInfo,
    StepStatus,
    Tuning,
    Why,
)

__all__ = [
    "Config",
    "ContextConfig",
    "Counts",
    "CudaContext",
    "DispatchArgs",
    "Fault",
    "Plan",
    "Received",
    "StepInfo",
    "StepResult",
    "StepStatus",
    "Tuning",
    "Why",
]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the last executed barrier and step end left behind.

    Attributes:
        status: what the barrier decided.
        epoch: view of the step.
        step: number of the step.
        members: {rank: incarnation} of the view.
        tokens: {rank: tokens} that members announced.
        complete: the step ended and counts.
        fault: of the last torn step; `fault.step` tells which.
        barrier_ns: time the barrier took, in nanoseconds.
        work: agreed completion: the work that this step runs (1, 2, ...); local: 0.
        settled: agreed completion: the last work that may be released.
        digest: of the view.
    """

    status: StepStatus
    epoch: int
    step: int
    members: dict[int, int]
    tokens: dict[int, int]
    complete: bool
    fault: Fault
    barrier_ns: int
    digest: int = 0
    work: int = 0
    settled: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextConfig:
    """How one rank runs on its GPU.

    Attributes:
        rank: seat, below the geometry's max_ranks.
        incarnation: of the seat, at least 1.
        device: CUDA device index.
        ranks_on_device: ranks whose kernels share this GPU; grids are capped accordingly.
        num_sms: SMs that a kernel may take; 0 means the formula.
        count_loads: count the load of every expert when a step completes.
        plan: how rows move.
        hold: take the header's runner lock, so that the daemon sees this process die.
    """

    rank: int
    incarnation: int
    device: int
    ranks_on_device: int = 1
    num_sms: int = 0
    count_loads: bool = True
    plan: Plan = Plan.AUTOMATIC
    hold: bool = True


class CudaContext:
    """One rank's data plane on its GPU.

    Args:
        geometry: of the group; every rank has the same.
        config: of this rank.
        data_fd: own region, from `create_region`.
        header_fd: own header memfd, formatted. Both descriptors stay the caller's.

    Raises:
        ConfigError, GroupMismatch, UsageError, MemoryShort: with the reason.
    """

    def __init__(
        self, geometry: abi.Geometry, config: ContextConfig, data_fd: int, header_fd: int
    ) -> None:
        raw = Config(
            geometry=geometry,
            rank=config.rank,
            incarnation=config.incarnation,
            device=config.device,
            ranks_on_device=config.ranks_on_device,
            num_sms=config.num_sms,
            count_loads=int(config.count_loads),
            pinned_plan=int(config.plan),
        )
        self.geometry = geometry
        self.config = config
        self._what = f"rank {config.rank} on device {config.device}"
        out = c_void_p()
        hold = int(config.hold)
        check(api().epc_context_create(raw, data_fd, header_fd, hold, out), self._what)
        self._context: int = out.value or 0
        self._owned = True

    @classmethod
    def borrowed(cls, address: int, geometry: abi.Geometry, config: ContextConfig) -> "CudaContext":
        """One that belongs to a session: `close` only forgets it."""
        context = cls.__new__(cls)
        context.geometry, context.config = geometry, config
        context._what = f"rank {config.rank} on device {config.device}"
        context._context = address
        context._owned = False
        return context

    def close(self) -> None:
        """Wait for the device, unmap and free everything."""
        if not self._owned:
            self._context = 0
        if self._context:
            api().epc_context_destroy(self._context)
            self._context = 0

    @property
    def address(self) -> int:
        """Of the `epc_context`."""
        return self._context

    def map_peer(self, rank: int, data_fd: int) -> None:
        """Map a peer's region at its fixed address."""
        check(api().epc_peer_map(self._context, rank, data_fd), self._what)

    def drop_peer(self, rank: int) -> None:
        """Unmap a peer's region; no view that has it may be used any more."""
        check(api().epc_peer_drop(self._context, rank), self._what)

    def stage(
        self,
        epoch: int,
        previous: int,
        members: dict[int, int],
        slot_expert: Sequence[int],
        slot_weight: Sequence[int],
    ) -> None:
        """Write a view's bank; the next barrier may adopt it. Safe beside running kernels and
        graph capture.

        Args:
            epoch: number of the view, at least 1.
            previous: epoch of the view it follows, 0 for the first.
            members: {rank: incarnation}.
            slot_expert: [layers * max_ranks * slots] expert in each slot, -1 for none.
            slot_weight: the same shape, dispatch weights; 65536 per expert in all.
        """
        g = self.geometry
        count = g.layers * g.max_ranks * g.slots
        if len(slot_expert) != count or len(slot_weight) != count:
            raise errors.ConfigError(
                f"slot tables have {len(slot_expert)} and {len(slot_weight)} entries; layers x "
                f"max_ranks x slots is {count}"
            )
        experts = (ctypes.c_int32 * count)(*slot_expert)
        weights = (c_uint32 * count)(*slot_weight)
        view = abi.View(epoch=epoch, previous_epoch=previous)
        for rank, incarnation in members.items():
            view.incarnation[rank] = incarnation
        view.slot_expert = ctypes.addressof(experts)
        view.slot_weight = ctypes.addressof(weights)
        check(api().epc_stage(self._context, view), f"{self._what}, view {epoch}")

    def step_begin(self, tokens: int, stream: int) -> None:
        """Enqueue the step barrier."""
        check(api().epc_step_begin(self._context, tokens, stream), self._what)

    def step_end(self, stream: int) -> None:
        """Enqueue the end-of-step check."""
        check(api().epc_step_end(self._context, stream), self._what)

    def dispatch(self, args: DispatchArgs, stream: int, *, half: str = "both") -> None:
        """Enqueue a dispatch or one half of it.

        Args:
            args: rows, routing and exchange.
            stream: cudaStream_t.
            half: "both", "send" or "receive".

        Raises:
            CapExceeded: more tokens than the exchange's max_tokens; nothing was enqueued.
            ConfigError: an argument does not fit the exchange.
        """
        names = {
            "both": "epc_dispatch",
            "send": "epc_dispatch_send",
            "receive": "epc_dispatch_recv",
        }
        check(getattr(api(), names[half])(self._context, args, stream), self._what)

    def combine(
        self,
        exchange: int,
        channel: int,
        tokens: int,
        out: int,
        out_dtype: abi.Dtype,
        stream: int,
        *,
        half: str = "both",
    ) -> None:
        """Enqueue a combine into `out` [tokens, hidden] of `out_dtype`, or one half of it."""
        if half == "send":
            code = api().epc_combine_send(self._context, exchange, channel, stream)
        else:
            name = "epc_combine" if half == "both" else "epc_combine_recv"
            function = getattr(api(), name)
            code = function(self._context, exchange, channel, tokens, out, int(out_dtype), stream)
        check(code, self._what)

    def received(self, exchange: int, channel: int = 0) -> Received:
        """Where rows of an exchange arrive and where outputs go."""
        out = Received()
        check(api().epc_received_of(self._context, exchange, channel, out), self._what)
        return out

    def count_slots(self, exchange: int, channel: int, counts: int, stream: int) -> None:
        """Enqueue counting the last dispatch's rows per slot into device memory, int32 [slots]."""
        check(api().epc_count_slots(self._context, exchange, channel, counts, stream), self._what)

    def tear(self, stream: int) -> None:
        """Enqueue tearing the running step for all."""
        check(api().epc_tear(self._context, stream), self._what)

    def wait_counts(self, exchange: int, channel: int = 0) -> Counts:
        """Wait on the host for the exact count of the last dispatch of an exchange with cpu_sync.

        Raises:
            UsageError: the exchange has none, or its dispatch was captured in a graph.
        """
        out = Counts()
        check(api().epc_wait_counts(self._context, exchange, channel, out), self._what)
        return out

    def tune(
        self, plan: Plan = Plan.AUTOMATIC, num_sms: int = 0, tuning: Tuning = Tuning.NONE
    ) -> None:
        """How rows move and how many SMs a kernel may take, from the next launch on."""
        check(api().epc_tune(self._context, int(plan) | int(tuning), num_sms), self._what)

    def result(self) -> StepResult:
        """The last step the stream has executed; synchronise the stream first."""
        info, fault = StepInfo(), Fault()
        check(api().epc_step_result(self._context, info, fault), self._what)
        ranks = range(self.geometry.max_ranks)
        members = {r: info.incarnation[r] for r in ranks if info.incarnation[r]}
        return StepResult(
            status=StepStatus(info.status),
            epoch=info.epoch,
            step=info.step,
            members=members,
            tokens={r: info.tokens[r] for r in members},
            complete=bool(info.complete),
            fault=fault,
            barrier_ns=info.barrier_ns,
            work=info.work,
            settled=info.settled,
            digest=info.digest,
        )

    def complete_flag(self) -> int:
        """Device address of a u32 that is 1 when the last ended step was complete."""
        out = c_void_p()
        check(api().epc_complete_flag(self._context, out), self._what)
        return out.value or 0

    def loads(self) -> list[list[int]]:
        """Tokens per [layer][expert] of complete steps; waits for the device."""
        g = self.geometry
        raw = (c_uint64 * (g.layers * g.experts))()
        check(api().epc_loads(self._context, ctypes.addressof(raw)), self._what)
        return [list(raw[i * g.experts : (i + 1) * g.experts]) for i in range(g.layers)]
