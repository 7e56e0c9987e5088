"""The native session, one typed method per C function.

`SessionHandle` is the seam between the client's rules (order of calls, checks, errors that name
the remedy) and the native core: tests put a double of a few lines behind it.
"""

import ctypes
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from elasticep.errors import DaemonUnavailable, ElasticEPError, Fenced, StepTorn, TensorError
from elasticep.native import abi, operators

_TEXT_BYTES = 512
_DISPATCH = "dispatch"
_EINTR = int(abi.Error.EINTR)
"""What a wait answers so that Python's handlers of signals run; the same call then goes on."""


class SessionHandle(Protocol):
    """What a session asks of the native core; see `csrc/elasticep.h` for each function."""

    def close(self) -> None:
        """Give the rank back and unmap its memory."""

    def step_begin(self, tokens: int, timeout_ms: int) -> abi.StepInfo:
        """Pass the step barrier."""

    def step_end(self) -> bool:
        """End the step; True if every exchange of it was complete."""

    def step_tear(self) -> None:
        """Tear the step for all members."""

    def step_cancel(self) -> None:
        """Give up a barrier at which a signal's handler raised, and the step if it was passed."""

    def dispatch_send(
        self, exchange: int, channel: int, layer: int, tensors: "DispatchInput"
    ) -> None:
        """Send rows."""

    def dispatch_recv(
        self, exchange: int, channel: int, out: abi.Received, lost: int | None
    ) -> None:
        """Wait for rows."""

    def dispatch(  # the C function's own argument list, with one doorbell for both halves
        self,
        exchange: int,
        channel: int,
        layer: int,
        tensors: "DispatchInput",
        out: abi.Received,
        lost: int | None,
    ) -> None:
        """Send rows and wait for rows."""

    def combine_send(self, exchange: int, channel: int) -> None:
        """Say that this rank's outputs are ready."""

    def combine_recv(self, exchange: int, channel: int, out: int | None, dtype: int) -> None:
        """Wait for outputs and sum them."""

    def combine(self, exchange: int, channel: int, out: int | None, dtype: int) -> None:
        """Both halves of combine."""

    def buffers(self, exchange: int, channel: int, x_dtype: int) -> tuple[int | None, int | None]:
        """Where rows of a dtype, and results, lie without a copy; None: anywhere."""

    def slots(self, epoch: int, shape: tuple[int, int, int]) -> NDArray[np.int32]:
        """Slot table of a view that is still in its bank."""

    def loads(self, shape: tuple[int, int]) -> NDArray[np.uint64]:
        """Tokens per layer and expert since the start."""

    def warmup(self, on: bool) -> None:
        """Suspend or resume hang detection for this rank."""

    def status(self) -> abi.Status:
        """What the header says of this rank."""

    def operators(self) -> operators.Rank | None:
        """What torch operators call for this rank; None: they cannot be used."""

    def failure(self, code: int, text: str) -> ElasticEPError:
        """The typed error for what a torch operator's call of this rank answered."""


class DispatchInput:
    """Addresses and types of what one rank brings to an exchange."""

    __slots__ = (
        *("global_scale", "ids", "ids_bytes", "scales", "tokens", "weights", "x", "x_dtype"),
    )

    def __init__(
        self,
        x: int | None,
        x_dtype: int,
        ids: int | None,
        ids_bytes: int,
        weights: int | None,
        tokens: int,
        scales: int | None = None,
        global_scale: float = 1.0,
    ) -> None:
        self.scales = scales
        self.global_scale = global_scale
        self.x = x
        self.x_dtype = x_dtype
        self.ids = ids
        self.ids_bytes = ids_bytes
        self.weights = weights
        self.tokens = tokens


class NativeHandle:
    """`SessionHandle` over the native library.

    Args:
        fd_socket: path of the daemon's SEQPACKET socket.
        ticket: what Attach answered; good once, for a few seconds.
        timeout_ms: how long to wait for the daemon's file descriptors.

    Raises:
        ElasticEPError: the daemon refused the ticket, or layout or memory do not fit.
    """

    def __init__(self, fd_socket: str, ticket: str, timeout_ms: int) -> None:
        self._api: Any = abi.api()
        session = ctypes.c_void_p()
        try:
            code = self._api.ep_session_open(
                fd_socket.encode(), ticket.encode(), timeout_ms, ctypes.byref(session)
            )
            abi.check(code, "attach")
            self._api.ep_session_interrupts(session, 1)
        except BaseException:  # also a signal's, which may come when the rank is taken
            if session:
                self._api.ep_session_close(session)
            raise
        self._session: ctypes.c_void_p | None = session

    def close(self) -> None:
        """Give the rank back and unmap its memory; tensors over it must not be used any more."""
        session, self._session = self._session, None
        if session is not None:
            self._api.ep_session_close(session)

    def step_begin(self, tokens: int, timeout_ms: int) -> abi.StepInfo:
        """Pass the step barrier."""
        info = abi.StepInfo()
        code = _EINTR
        while code == _EINTR:
            code = self._api.ep_step_begin(self._session, tokens, timeout_ms, ctypes.byref(info))
        self._check(code, "step barrier")
        return info

    def step_end(self) -> bool:
        """End the step; True if every exchange of it was complete."""
        complete = ctypes.c_uint32(0)
        code = self._api.ep_step_end(self._session, ctypes.byref(complete))
        if code == abi.Error.ETORN:
            return False
        self._check(code, "end of step")
        return bool(complete.value)

    def step_tear(self) -> None:
        """Tear the step for all members."""
        self._check(self._api.ep_step_tear(self._session), "tearing the step")

    def step_cancel(self) -> None:
        """Give up a barrier at which a signal's handler raised, and the step if it was passed."""
        self._check(self._api.ep_step_cancel(self._session), "giving up the step barrier")

    def dispatch_send(
        self, exchange: int, channel: int, layer: int, tensors: DispatchInput
    ) -> None:
        """Send rows."""
        t = tensors
        rows = abi.Rows(t.x, t.scales, t.x_dtype, t.global_scale)
        code = self._api.ep_dispatch_send_rows(
            self._session, exchange, channel, layer, ctypes.byref(rows), t.ids, t.ids_bytes,
            t.weights, t.tokens,
        )  # fmt: skip
        self._check(code, _DISPATCH)

    def dispatch_recv(
        self, exchange: int, channel: int, out: abi.Received, lost: int | None
    ) -> None:
        """Wait for rows."""
        session, into, code = self._session, ctypes.byref(out), _EINTR
        while code == _EINTR:
            code = self._api.ep_dispatch_recv(session, exchange, channel, into, lost)
        self._check(code, _DISPATCH)

    def dispatch(
        self,
        exchange: int,
        channel: int,
        layer: int,
        tensors: DispatchInput,
        out: abi.Received,
        lost: int | None,
    ) -> None:
        """Send rows and wait for rows; under `service` the one doorbell is in the sending half."""
        self.dispatch_send(exchange, channel, layer, tensors)
        self.dispatch_recv(exchange, channel, out, lost)

    def combine_send(self, exchange: int, channel: int) -> None:
        """Say that this rank's outputs are ready."""
        code = _EINTR
        while code == _EINTR:
            code = self._api.ep_combine_send(self._session, exchange, channel)
        self._check(code, "combine")

    def combine_recv(self, exchange: int, channel: int, out: int | None, dtype: int) -> None:
        """Wait for outputs and sum them."""
        code = _EINTR
        while code == _EINTR:
            code = self._api.ep_combine_recv(self._session, exchange, channel, out, dtype)
        self._check(code, "combine")

    def combine(self, exchange: int, channel: int, out: int | None, dtype: int) -> None:
        """Both halves of combine, with one doorbell."""
        code = _EINTR
        while code == _EINTR:
            code = self._api.ep_combine(self._session, exchange, channel, out, dtype)
        self._check(code, "combine")

    def buffers(self, exchange: int, channel: int, x_dtype: int) -> tuple[int | None, int | None]:
        """Where rows of a dtype, and results, lie without a copy; None: anywhere."""
        rows, result = ctypes.c_void_p(), ctypes.c_void_p()
        code = self._api.ep_exchange_buffers(
            self._session, exchange, channel, x_dtype, ctypes.byref(rows), ctypes.byref(result)
        )
        self._check(code, "buffers of an exchange")
        return rows.value, result.value

    def slots(self, epoch: int, shape: tuple[int, int, int]) -> NDArray[np.int32]:
        """Slot table of a view that is still in its bank."""
        table = np.empty(shape, np.int32)
        code = self._api.ep_session_slots(self._session, epoch, table.ctypes.data)
        self._check(code, f"slot table of epoch {epoch}")
        return table

    def loads(self, shape: tuple[int, int]) -> NDArray[np.uint64]:
        """Tokens per layer and expert since the start."""
        table = np.empty(shape, np.uint64)
        code = self._api.ep_session_loads(self._session, table.ctypes.data)
        self._check(code, "load counters")
        return table

    def warmup(self, on: bool) -> None:
        """Suspend or resume hang detection for this rank."""
        self._check(self._api.ep_session_warmup(self._session, int(on)), "warm-up")

    def status(self) -> abi.Status:
        """What the header says of this rank."""
        status = abi.Status()
        self._check(
            self._api.ep_session_status(self._session, ctypes.byref(status)), "status of the rank"
        )
        return status

    def operators(self) -> operators.Rank | None:
        """What torch operators call for this rank."""
        api, address_of = self._api, operators.address_of
        calls = operators.CpuCalls(
            send=address_of(api.ep_dispatch_send_rows),
            receive=address_of(api.ep_dispatch_recv),
            combine=address_of(api.ep_combine),
            last_error=address_of(api.ep_last_error),
            python=ctypes.pointer(operators.interpreter()),
        )
        session = 0 if self._session is None else self._session.value or 0
        return operators.Rank(operators.Plane.CPU, session, calls)

    def failure(self, code: int, text: str) -> ElasticEPError:
        """The typed error for what a torch operator's call of this rank answered."""
        return self._error(code, _DISPATCH, text)

    def _check(self, code: int, what: str) -> None:
        if code < 0:
            raise self._error(code, what)

    def _error(self, code: int, what: str, text: str | None = None) -> ElasticEPError:
        if code == abi.Error.ETORN:
            return StepTorn(abi.error_text(code) if text is None else text)
        error = abi.error_of(code, what, text)
        if code == abi.Error.EINVAL and what == _DISPATCH:
            return TensorError(str(error))
        if code in (abi.Error.EFENCED, abi.Error.EGONE):
            return expulsion(self._api.ep_session_fenced, self._session) or _gone(error)
        return error


def expulsion(fenced: Any, session: Any) -> Fenced | None:
    """Why a rank was expelled, if it was.

    Args:
        fenced: `ep_session_fenced` or `epc_session_fenced`.
        session: of the rank.
    """
    epoch = ctypes.c_uint64(0)
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    if fenced(session, ctypes.byref(epoch), ctypes.addressof(text), _TEXT_BYTES) != 1:
        return None
    return Fenced(epoch.value, text.value.decode("utf-8", "replace") or "no reason given")


def _gone(error: ElasticEPError) -> ElasticEPError:
    # A rank whose worker is gone is over, whether or not its daemon has said so yet.
    if isinstance(error, DaemonUnavailable):
        return Fenced(0, str(error))
    return error
