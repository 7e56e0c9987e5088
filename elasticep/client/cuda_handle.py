"""The native session of a rank on a GPU: what a `CudaSession` asks of it.

Kernels are put on the stream that is current when a call is made. Nothing here waits for the GPU
but `wait`, and nothing but `enter` waits for the daemon.
"""

import ctypes
import os
import threading
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from elasticep.client.handle import DispatchInput, expulsion
from elasticep.errors import (
    ConfigError,
    ElasticEPError,
    Fenced,
    TensorError,
    UsageError,
)
from elasticep.native import abi, cuda_library, operators
from elasticep.native import cuda as native
from elasticep.native import cuda_session as sessions
from elasticep.native.cuda_session import Wait
from elasticep.native.cuda_structs import Copied, Weights

_WORD_S: Final = 1.0
POLICY_SERVE: Final = 1  # EP_POLICY_SERVE
_EINTR: Final = int(abi.Error.EINTR)  # what a wait answers so that handlers of signals run


class CudaHandle:
    """`SessionHandle` over the CUDA library.

    Args:
        fd_socket: path of the daemon's SEQPACKET socket.
        ticket: what Attach answered; good once, for a few seconds.
        timeout_ms: how long to wait for the daemon's file descriptors.
        rank: the seat.
        incarnation: of the seat.
        weights: the rank's arena, if its experts shall lie on the GPU, too.

    Attributes:
        device: the GPU that holds this rank's memory.
        context: the kernels' context.

    Raises:
        MemoryShort: the GPU has too little room for the weights; names both numbers.
        ElasticEPError: the daemon refused the ticket, or GPU, layout or memory do not fit.
    """

    def __init__(
        self,
        fd_socket: str,
        ticket: str,
        timeout_ms: int,
        rank: int,
        incarnation: int,
        weights: Weights | None = None,
    ) -> None:
        self._api: Any = sessions.session_api()
        self._session: int | None = sessions.open_session(
            fd_socket, ticket, timeout_ms, weights=weights
        )
        self.context = sessions.context_of(self._session, rank, incarnation)
        self.device = torch.device("cuda", self.context.config.device)
        self._begun = False  # a barrier is on the stream without its step's end
        self.unsure = False  # a barrier or an end may be on a stream that nobody has noted
        self._sms = ctypes.c_uint32(0)  # what the context was told last, also by torch operators
        self._args: dict[tuple[int, int], native.DispatchArgs] = {}  # of the exchange under way

    def close(self) -> None:
        """Wait for the GPU, give the rank back and unmap; tensors over it must not be used."""
        session, self._session = self._session, None
        if session is not None:
            self._api.epc_session_close(session)

    @property
    def stream(self) -> int:
        """The current stream of this rank's device.

        Raises:
            UsageError: another device is current.
        """
        if torch.cuda.current_device() != self.device.index:
            raise UsageError(
                f"this rank's memory is on {self.device} and the current device is "
                f"cuda:{torch.cuda.current_device()}; call torch.cuda.set_device(session.device)"
            )
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    # ---- steps

    def enter(self, after: int, timeout_ms: int) -> None:
        """Wait until a view later than epoch `after` is staged. Raises Fenced, StepTimeout."""
        code = self._api.epc_session_enter(self._session, after, timeout_ms, 0)
        while code == _EINTR:
            code = self._api.epc_session_enter(self._session, after, timeout_ms, 1)
        self._check(code, "step barrier")

    def begin(self, tokens: int, timeout_ms: int) -> None:
        """Put the step barrier on the stream; `unsure` until the caller has noted it."""
        self.unsure = True
        code = self._api.epc_session_step_begin(self._session, tokens, timeout_ms, self.stream)
        if code:
            self.unsure = False
        self._check(code, "step barrier")
        self._begun = True

    def step_end(self) -> bool:
        """Put the end of the step on the stream; whether it counts is not known yet."""
        self._begun = False
        self.context.step_end(self.stream)
        return False

    def step_tear(self) -> None:
        """Tear the step for all: at once, also where a kernel of it waits ahead on the stream."""
        if self._session is not None:
            self._api.epc_session_call_off(self._session)
        self.context.tear(self.stream)

    def step_cancel(self) -> None:
        """After a signal's handler raised: end a step whose barrier is on the stream, torn."""
        if self._begun:
            self.step_tear()
            self.step_end()

    def recount(self) -> int:
        """How many steps have been put on streams, when all of them have run. One that has no end
        gets it, torn. `unsure` until the caller has noted it.
        """
        steps = ctypes.c_uint64()
        code = self._api.epc_session_recount(self._session, self.stream, ctypes.byref(steps))
        self._check(code, "step barrier")
        self._begun = False
        return steps.value

    def wait(self, what: Wait, count: int, stream: int) -> native.StepResult:
        """Wait until the stream has run that many barriers or step ends; what the last one said.

        Raises:
            DeviceFailed: the device failed before.
            UsageError: the stream has run out without it.
        """
        code = _EINTR
        while code == _EINTR:
            code = self._api.epc_session_wait(self._session, int(what), count, stream)
        self._check(code, f"step {count} of rank {self.context.config.rank}")
        return self.context.result()

    # ---- exchanges

    def use_sms(self, count: int) -> None:
        """How many SMs the kernels may take from the next call on; 0: the formula."""
        if count != self._sms.value:
            self.context.tune(num_sms=count)
            self._sms.value = count

    def dispatch(
        self,
        exchange: int,
        channel: int,
        layer: int,
        tensors: DispatchInput,
        lost: int | None,
        half: str = "both",
    ) -> None:
        """Put a dispatch, or its sending half, on the stream."""
        args = native.DispatchArgs(
            exchange=exchange,
            channel=channel,
            layer=layer,
            tokens=tensors.tokens,
            x_dtype=tensors.x_dtype,
            ids_bytes=tensors.ids_bytes,
            x=tensors.x,
            x_scales=tensors.scales,
            ids=tensors.ids,
            weights=tensors.weights,
            lost=lost,
            global_scale=tensors.global_scale,
        )
        self._args[exchange, channel] = args
        try:
            self.context.dispatch(args, self.stream, half=half)
        except ConfigError as error:
            raise TensorError(str(error)) from None

    def receive(self, exchange: int, channel: int) -> None:
        """Put the receiving half of a dispatch on the stream."""
        self.context.dispatch(self._args[exchange, channel], self.stream, half="receive")

    def counts(self, exchange: int, channel: int) -> native.Counts:
        """Wait for the exact count of a dispatch with `cpu_sync`."""
        code = _EINTR
        while code == _EINTR:
            code = self._api.epc_session_await_counts(self._session, exchange, channel)
        return self.context.wait_counts(exchange, channel)

    def count_slots(self, exchange: int, channel: int, counts: int) -> None:
        """Put counting the rows of each slot on the stream, into int32 [slots] at `counts`."""
        if self._session is None:
            raise UsageError("this session is detached; its tensors must not be used any more")
        self.context.count_slots(exchange, channel, counts, self.stream)

    def combine(
        self, exchange: int, channel: int, out: int | None, dtype: int, half: str = "both"
    ) -> None:
        """Put a combine, or one half of it, on the stream."""
        tokens = self._args[exchange, channel].tokens
        code = abi.Dtype(dtype)
        self.context.combine(exchange, channel, tokens, out or 0, code, self.stream, half=half)

    # ---- the rest

    def slots(self, epoch: int, shape: tuple[int, int, int]) -> NDArray[np.int32]:
        """Slot table of a view that is still in its bank."""
        table = np.empty(shape, np.int32)
        code = self._api.epc_session_slots(self._session, epoch, table.ctypes.data)
        self._check(code, f"slot table of epoch {epoch}")
        return table

    def serves_lost(self) -> bool:
        """Whether steps count now although a token needed a lost expert (policy `serve`)."""
        policy = ctypes.c_uint32(0)
        self._check(self._api.epc_session_policy(self._session, ctypes.byref(policy)), "policy")
        return bool(policy.value & POLICY_SERVE)

    def slot_experts(self) -> int:
        """Device address of int32 [layers, slots]: the experts in this rank's slots now."""
        out = ctypes.c_void_p()
        code = self._api.epc_session_slot_experts(self._session, ctypes.byref(out))
        self._check(code, "slot table")
        return out.value or 0

    def weights_address(self) -> int:
        """Device address of the expert weights: what is at `data_offset` in the arena."""
        out = ctypes.c_void_p()
        code = self._api.epc_session_weights(self._session, ctypes.byref(out))
        self._check(code, "expert weights")
        return out.value or 0

    def weights_held(self, layer: int, slots: int) -> list[int]:
        """The expert that lies whole in each slot of a layer on the GPU, -1: none."""
        held = (ctypes.c_int32 * slots)()
        code = self._api.epc_session_weights_held(self._session, layer, ctypes.addressof(held))
        self._check(code, "expert weights")
        return list(held)

    def weights_copied(self) -> Copied:
        """What was copied from the arena to the GPU so far."""
        out = Copied()
        code = self._api.epc_session_weights_copied(self._session, ctypes.byref(out))
        self._check(code, "expert weights")
        return out

    def loads(self, shape: tuple[int, int]) -> NDArray[np.uint64]:
        """Tokens per layer and expert since the start; waits for the device."""
        return np.array(self.context.loads(), np.uint64).reshape(shape)

    def warmup(self, on: bool) -> None:
        """Suspend or resume hang detection for this rank."""
        self._check(self._api.epc_session_warmup(self._session, int(on)), "warm-up")

    def status(self) -> abi.Status:
        """What the header says of this rank."""
        status = abi.Status()
        code = self._api.epc_session_status(self._session, ctypes.byref(status))
        self._check(code, "status of the rank")
        return status

    def operators(self) -> operators.Rank | None:
        """What torch operators call for this rank; None: torch does not say its current stream."""
        stream = _current_stream()
        if not stream:
            return None
        api, address_of = self._api, operators.address_of
        calls = operators.CudaCalls(
            dispatch=address_of(api.epc_dispatch),
            combine=address_of(api.epc_combine),
            tune=address_of(api.epc_tune),
            received_of=address_of(api.epc_received_of),
            last_error=address_of(api.epc_last_error),
            stream=stream,
        )
        address, device = self.context.address, self.device.index
        return operators.Rank(operators.Plane.CUDA, address, calls, device, self._sms)

    def failure(self, code: int, text: str) -> ElasticEPError:
        """The typed error for what a torch operator's call of this rank answered."""
        fenced = self.fenced() if code == abi.Error.EFENCED else None
        error = fenced or cuda_library.error_of(code, "", text)
        return TensorError(str(error)) if isinstance(error, ConfigError) else error

    def fenced(self) -> Fenced | None:
        """Why this rank was expelled, if it was."""
        return expulsion(self._api.epc_session_fenced, self._session)

    def expelled(self, epoch: int) -> Fenced:
        """What a rank raises without which the others went on in `epoch`. Why, its daemon hears
        from the controller when they have said so; that is waited for, for a second.
        """
        end, turn = time.monotonic() + _WORD_S, threading.Event()
        while (fenced := self.fenced()) is None and time.monotonic() < end:
            turn.wait(0.005)
        text = "the others went on without it, and its daemon has not said why"
        return fenced or Fenced(epoch, f"{text}; see `elasticep status`")

    def _check(self, code: int, what: str) -> None:
        if code == abi.Error.EFENCED:
            fenced = self.fenced()
            if fenced is not None:
                raise fenced
        cuda_library.check(code, what)


def _current_stream() -> int:
    """Address of the C function that says which stream is current, in what torch has loaded."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    name = str(path) if path.is_file() else path.name
    try:
        library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        return operators.address_of(library.aoti_torch_get_current_cuda_stream)
    except (OSError, AttributeError):
        return 0
