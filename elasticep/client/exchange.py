"""Dispatch and combine over the memory that all ranks share.

What `dispatch` returns are tensors over that memory, not copies. Everything that an engine passes
in is checked before a byte is written, so a wrong call raises here and no rank sees garbage.
"""

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from elasticep.client import compiled
from elasticep.client.arguments import whole
from elasticep.client.buffers import Buffers
from elasticep.client.handle import DispatchInput
from elasticep.client.inputs import CODES, Inputs, Rows
from elasticep.client.received import SOURCE_WORDS, Received, ReceivedTensors
from elasticep.errors import ElasticEPError, PlacementError, UsageError
from elasticep.native import abi
from elasticep.spec import ExchangeSpec

if TYPE_CHECKING:
    from elasticep.client.session import Session
    from elasticep.client.step import Step

__all__ = ["Exchange", "Received"]


class Flight:
    """One channel's exchange under way."""

    __slots__ = ("dtype", "layer", "lost", "phase", "received", "step", "tokens")

    def __init__(self, step: "Step", layer: int, tokens: int, dtype: torch.dtype) -> None:
        self.step = step
        self.layer = layer
        self.tokens = tokens
        self.dtype = dtype
        self.phase = "sent"  # then "received", "combining"
        self.received: Received | None = None
        self.lost: Any = None  # uint8 [tokens], where this exchange's memory is


class Exchange:
    """One of a group's exchanges, as `Session.exchange` gives it.

    An exchange is dispatch, then combine, on each channel, inside a step. On a torn step every call
    raises `StepTorn`, which the step's `with` block takes in.
    """

    _device = torch.device("cpu")
    _where = "the CPU"

    def __init__(self, session: "Session", name: str, spec: ExchangeSpec, number: int) -> None:
        geometry = session.config.geometry
        geometry.check_exchange(spec)
        self.name = name
        self.spec = spec
        self._session = session
        self._handle = session._handle
        self._number = number
        self._flights: list[Flight | None] = [None] * spec.channels
        self._structs = [abi.Received() for _ in range(spec.channels)]
        self._tensors = ReceivedTensors(name, spec, geometry)
        self._last: list[Received | None] = [None] * spec.channels
        self._inputs = Inputs(name, spec, geometry, self._device, self._where)
        # 1 where a token of a layer's last dispatch needed an expert that no member holds.
        shape = (spec.channels, geometry.layers, spec.max_tokens)
        self._lost = torch.zeros(shape, dtype=torch.uint8, device=self._device)
        self._lost_host: Any = self._lost.numpy() if self._device.type == "cpu" else None
        self._lost_address = self._lost.data_ptr()
        # What each source said of a channel's dispatch, where operators leave it.
        words = (geometry.max_ranks, SOURCE_WORDS)
        self._sources = [torch.zeros(words, dtype=torch.int32) for _ in range(spec.channels)]
        self._operators = compiled.Operators(self, self._handle.operators())
        self._key = self._operators.key
        self._buffers = Buffers()

    # ---- memory of the exchange

    def input(
        self, tokens: int, dtype: torch.dtype | None = None, *, channel: int = 0
    ) -> torch.Tensor:
        """`[tokens, H]`, the same memory every time: rows that `dispatch` takes without a copy.

        It may be written once the channel's last combine has returned, until the next dispatch is
        called; then it is read until the combine after it has returned. A dispatch of other rows
        overwrites it. `dtype` is one that `x` may have, by default the dispatch dtype (bf16 where
        that is quantised).
        """
        return self._buffers.input(self, tokens, dtype, channel)

    def output(
        self, tokens: int, dtype: torch.dtype | None = None, *, channel: int = 0
    ) -> torch.Tensor:
        """`[tokens, H]`, the same memory every time: as `out` of combine it saves a copy.

        The result is there until the channel's next combine, whose result takes its place.
        """
        return self._buffers.output(self, tokens, dtype, channel)

    # ---- dispatch

    def dispatch(
        self,
        layer: int,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        x_scales: torch.Tensor | None = None,
        global_scale: float = 1.0,
        channel: int = 0,
    ) -> Received:
        """Send this rank's tokens to their experts and take in those that come here.

        Args:
            layer: MoE layer, 0-based.
            x: `[tokens, H]`, contiguous, on the CPU, of the exchange's dispatch dtype; where that
                is quantised any of fp32, fp16 and bf16, or with `x_scales` rows that are quantised
                already (nvfp4: uint8 `[tokens, H / 2]`). Zero tokens are fine.
            topk_ids: int64 or int32 `[tokens, K]`: logical experts, -1 = no expert.
            topk_weights: float32 `[tokens, K]`.
            x_scales: `[tokens, H / block]`, float32 for fp8 and uint8 for mxfp8 and nvfp4: rows
                and scales are carried as they are.
            global_scale: nvfp4: value = element * scale * this. Rows are quantised by it, or were.
                A kernel that takes one for all rows needs the same on all ranks.
            channel: set of buffers, for two-batch overlap.

        Raises:
            TensorError: wrong dtype, shape, device or memory layout, or an id out of range.
            CapExceeded: more tokens than the exchange's cap.
            UsageError: outside a step, or the channel's last dispatch was not combined.
            ExpertsLost: a token needs an expert that no member holds, and the policy is `refuse`.
            StepTorn: the step is torn.
        """
        if torch.compiler.is_compiling():
            return compiled.traced_dispatch(
                self, layer, x, topk_ids, topk_weights, x_scales, global_scale, channel
            )
        rows = (x, x_scales, global_scale)
        flight, tensors = self._start(layer, rows, topk_ids, topk_weights, channel)
        try:
            self._send(flight, channel, tensors, "both")
            return self._deliver(flight, channel)
        except ElasticEPError as error:
            raise self._failed(channel, error) from None

    def dispatch_send(
        self,
        layer: int,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        x_scales: torch.Tensor | None = None,
        global_scale: float = 1.0,
        channel: int = 0,
    ) -> None:
        """The first half of `dispatch`: send, wait for nothing. Arguments and errors are its."""
        rows = (x, x_scales, global_scale)
        flight, tensors = self._start(layer, rows, topk_ids, topk_weights, channel)
        try:
            self._send(flight, channel, tensors, "send")
        except ElasticEPError as error:
            raise self._failed(channel, error) from None

    def dispatch_recv(self, *, channel: int = 0) -> Received:
        """The second half of `dispatch`: wait for the rows that come here."""
        flight = self._flight(channel, "sent", "dispatch_recv", "dispatch_send")
        try:
            self._receive(flight, channel)
            return self._deliver(flight, channel)
        except ElasticEPError as error:
            raise self._failed(channel, error) from None

    # ---- combine

    def combine(self, layer: int, recv: Received, out: torch.Tensor | None = None) -> torch.Tensor:
        """Give this rank's expert outputs back and sum those of its own tokens.

        Args:
            layer: of the dispatch.
            recv: what that dispatch returned, with `recv.out` filled.
            out: `[tokens, H]` to write to, contiguous, fp32, fp16 or bf16, such as `output`
                gives; None: a new tensor of the dtype of `x`.

        Returns:
            `[tokens, H]`.

        Raises:
            UsageError: `recv` is not what this channel's last dispatch returned.
            TensorError: `out` does not fit, or lies in what dispatch returned: peers read there
                still, or write their next rows.
            StepTorn: the step is torn.
        """
        if torch.compiler.is_compiling():
            return compiled.traced_combine(self, layer, recv, out)
        flight = self._combinable(layer, recv)
        return self._sum(flight, recv.channel, out, "both")

    def combine_send(self, layer: int, recv: Received) -> None:
        """The first half of `combine`: say that `recv.out` is ready, wait for nothing."""
        flight = self._combinable(layer, recv)
        try:
            self._combine(recv.channel, None, 0, "send")
        except ElasticEPError as error:
            raise self._failed(recv.channel, error) from None
        flight.phase = "combining"

    def combine_recv(self, out: torch.Tensor | None = None, *, channel: int = 0) -> torch.Tensor:
        """The second half of `combine`: wait for outputs and sum them into `out`."""
        flight = self._flight(channel, "combining", "combine_recv", "combine_send")
        return self._sum(flight, channel, out, "receive")

    # ---- under torch.compile

    def _fixed(self, channel: int) -> Received:
        """Tensors that stay from one dispatch of a channel to the next."""
        last = self._last[channel]
        if last is None or self.spec.cpu_sync:
            raise UsageError(
                f"exchange {self.name!r} cannot be compiled: it has cpu_sync, whose sizes change"
                if self.spec.cpu_sync
                else f"run a step on channel {channel} of exchange {self.name!r} before compiling"
            )
        return last

    def _traced_counts(self, fixed: Received) -> torch.Tensor:
        """What a traced dispatch gives as `counts`; the operator fills those of `fixed`."""
        return fixed.counts

    def _note_compiled(self, step: "Step", channel: int, layer: int, tokens: int) -> None:
        """Tell a step what an operator's dispatch found out."""
        step._note_lost(self._lost_host[channel, layer, :tokens])

    # ---- order of calls

    def _start(
        self,
        layer: int,
        rows: Rows,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        channel: int,
    ) -> tuple[Flight, DispatchInput]:
        session = self._session
        session._check_usable()
        session._check_layer(layer)
        step = session._step
        if step is None:
            raise UsageError(
                f"dispatch on exchange {self.name!r} outside a step; put it into "
                "`with session.step():`"
            )
        if not 0 <= whole("channel", channel) < len(self._flights):
            raise UsageError(
                f"exchange {self.name!r} has no channel {channel}; it has {len(self._flights)}"
            )
        flight = self._flights[channel]
        if flight is not None and flight.step is step:
            raise UsageError(
                f"dispatch for layer {layer} while the exchange of layer {flight.layer} is under "
                f"way on channel {channel} of exchange {self.name!r}; combine it first"
            )
        tensors = self._inputs.check(rows, topk_ids, topk_weights)
        result = rows[0].dtype if rows[1] is None else torch.bfloat16
        flight = self._flights[channel] = Flight(step, layer, tensors.tokens, result)
        step._open_exchanges.add((self._number, channel))
        return flight, tensors

    def _flight(self, channel: int, phase: str, call: str, before: str) -> Flight:
        self._session._check_usable()
        known = 0 <= whole("channel", channel) < len(self._flights)
        flight = self._flights[channel] if known else None
        if flight is None or flight.step is not self._session._step or flight.phase != phase:
            raise UsageError(
                f"{call} on channel {channel} of exchange {self.name!r} without {before}; a "
                "channel goes dispatch_send, dispatch_recv, combine_send, combine_recv in one step"
            )
        return flight

    def _combinable(self, layer: int, recv: Received) -> Flight:
        if not isinstance(recv, Received):
            raise UsageError(
                f"combine on exchange {self.name!r} with {type(recv).__name__}; pass what its last "
                "dispatch returned"
            )
        flight = self._flight(recv.channel, "received", "combine", "dispatch")
        if flight.received is not recv or flight.layer != layer:
            raise UsageError(
                f"combine for layer {layer} with rows of layer {recv.layer}, while channel "
                f"{recv.channel} of exchange {self.name!r} holds those of layer {flight.layer}; "
                "pass what the last dispatch returned"
            )
        return flight

    def _failed(self, channel: int, error: ElasticEPError) -> ElasticEPError:
        self._drop(channel)
        return self._session._experts_lost(error) if isinstance(error, PlacementError) else error

    def _drop(self, channel: int) -> None:
        flight, self._flights[channel] = self._flights[channel], None
        if flight is not None:
            flight.step._open_exchanges.discard((self._number, channel))

    def _sum(
        self, flight: Flight, channel: int, out: torch.Tensor | None, half: str
    ) -> torch.Tensor:
        recv = flight.received
        shared = () if out is None or recv is None else (recv.rows, recv.out)
        out = self._inputs.result(flight.tokens, flight.dtype, out, shared)
        self._drop(channel)
        try:
            self._combine(channel, out.data_ptr() or None, CODES[out.dtype], half)
        except ElasticEPError:
            raise
        except BaseException:
            # Of a signal's handler, which may run when the sums are there: their step must not
            # count, for nobody has them.
            with contextlib.suppress(ElasticEPError):
                self._handle.step_tear()
            raise
        return out

    # ---- calls of the plane; `half` is "both", "send" or "receive"

    def _send(self, flight: Flight, channel: int, tensors: DispatchInput, half: str) -> None:
        if half == "send":
            self._handle.dispatch_send(self._number, channel, flight.layer, tensors)
            return
        struct, lost = self._structs[channel], self._lost_at(flight, channel)
        self._handle.dispatch(self._number, channel, flight.layer, tensors, struct, lost)

    def _receive(self, flight: Flight, channel: int) -> None:
        struct, lost = self._structs[channel], self._lost_at(flight, channel)
        self._handle.dispatch_recv(self._number, channel, struct, lost)

    def _lost_at(self, flight: Flight, channel: int) -> int | None:
        if flight.tokens == 0:
            return None  # else always: operators change the policy at run time
        flight.lost = self._lost_host[channel, flight.layer, : flight.tokens]
        place = channel * self._lost_host.shape[1] + flight.layer
        return self._lost_address + int(place) * self.spec.max_tokens

    def _deliver(self, flight: Flight, channel: int) -> Received:
        lost = flight.lost
        if lost is None or lost.tobytes().find(1) < 0:  # the quickest look at bytes
            flight.step._note_whole(flight.tokens)
            token_ok = torch.ones(flight.tokens, dtype=torch.bool)
        else:
            flight.step._note_lost(lost)
            token_ok = torch.from_numpy(lost == 0)
        struct = self._structs[channel]
        received = self._tensors.received(struct, flight.layer, channel, token_ok)
        flight.received = self._last[channel] = received
        flight.phase = "received"
        return received

    def _combine(self, channel: int, out: int | None, dtype: int, half: str) -> None:
        match half:
            case "both":
                self._handle.combine(self._number, channel, out, dtype)
            case "send":
                self._handle.combine_send(self._number, channel)
            case _:
                self._handle.combine_recv(self._number, channel, out, dtype)
