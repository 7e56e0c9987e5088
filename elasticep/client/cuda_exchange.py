"""Dispatch and combine on a GPU: kernels on the engine's current stream, over the rank's region.

The calls are those of `Exchange`. None of them waits for the GPU, except the dispatch of an
exchange with `cpu_sync`; so a step of others can be captured into a CUDA graph, which holds across
failures and views. In a torn step kernels do nothing and write nothing.
"""

from typing import TYPE_CHECKING

import torch

from elasticep.client import compiled
from elasticep.client.cuda_received import CudaReceivedTensors
from elasticep.client.exchange import CODES, Exchange, Flight
from elasticep.client.received import Received
from elasticep.errors import ElasticEPError, UsageError
from elasticep.spec import ExchangeSpec

if TYPE_CHECKING:
    from elasticep.client.cuda_session import CudaSession
    from elasticep.client.step import Step


class CudaExchange(Exchange):
    """`Exchange` on the GPU of a `CudaSession`. All of its memory is there once it is made.

    What differs in `Received`: the host knows no `tokens` (empty), and `arrived` with `cpu_sync`
    only (else -1); `counts` is there in the layouts by expert; `global_scale` is this rank's own.
    """

    def __init__(self, session: "CudaSession", name: str, spec: ExchangeSpec, number: int) -> None:
        self._cuda = session._cuda
        self._device, self._where = self._cuda.device, str(self._cuda.device)
        super().__init__(session, name, spec, number)
        geometry = session.config.geometry
        self._made = [
            CudaReceivedTensors(self._cuda, spec, geometry, number, channel)
            for channel in range(spec.channels)
        ]
        self._scale = [1.0] * spec.channels  # of the exchange under way

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
        """`Exchange.dispatch`, on the current stream."""
        if torch.compiler.is_compiling():
            return compiled.traced_dispatch(
                self, layer, x, topk_ids, topk_weights, x_scales, channel
            )
        self._send(layer, x, topk_ids, topk_weights, x_scales, global_scale, channel, "both")
        return self._deliver(channel)

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
        """`Exchange.dispatch_send`, on the current stream."""
        self._send(layer, x, topk_ids, topk_weights, x_scales, global_scale, channel, "send")

    def dispatch_recv(self, *, channel: int = 0) -> Received:
        """`Exchange.dispatch_recv`, on the current stream."""
        self._flight(channel, "sent", "dispatch_recv", "dispatch_send")
        try:
            self._cuda.receive(self._number, channel)
        except ElasticEPError:
            self._drop(channel)
            raise
        return self._deliver(channel)

    def combine(self, layer: int, recv: Received, out: torch.Tensor | None = None) -> torch.Tensor:
        """`Exchange.combine`, on the current stream."""
        if torch.compiler.is_compiling():
            return compiled.traced_combine(self, layer, recv, out)
        flight = self._combinable(layer, recv)
        return self._sum(flight, recv.channel, out, "both")

    def combine_send(self, layer: int, recv: Received) -> None:
        """`Exchange.combine_send`, on the current stream."""
        flight = self._combinable(layer, recv)
        try:
            self._cuda.combine(self._number, recv.channel, None, 0, "send")
        except ElasticEPError:
            self._drop(recv.channel)
            raise
        flight.phase = "combining"

    def combine_recv(self, out: torch.Tensor | None = None, *, channel: int = 0) -> torch.Tensor:
        """`Exchange.combine_recv`, on the current stream."""
        flight = self._flight(channel, "combining", "combine_recv", "combine_send")
        return self._sum(flight, channel, out, "receive")

    # ---- under torch.compile

    def _fixed(self, channel: int) -> Received:
        if self.spec.cpu_sync:
            return super()._fixed(channel)
        return self._made[channel].fixed

    def _note_compiled(self, step: "Step", channel: int, layer: int, tokens: int) -> None:
        step._note_lost(self._lost[channel, layer, :tokens])

    # ---- parts

    def _send(
        self,
        layer: int,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        x_scales: torch.Tensor | None,
        global_scale: float,
        channel: int,
        half: str,
    ) -> None:
        tensors = self._start(layer, (x, x_scales, global_scale), topk_ids, topk_weights, channel)
        if self.spec.cpu_sync and torch.cuda.is_current_stream_capturing():
            self._drop(channel)
            raise UsageError(
                f"exchange {self.name!r} has cpu_sync: its dispatch waits on the host and "
                "cannot be captured; use an exchange without it in a CUDA graph"
            )
        flight = self._flights[channel]
        assert flight is not None
        flight.lost = self._lost[channel, layer, : flight.tokens]
        self._scale[channel] = global_scale
        self._cuda.use_sms(self.spec.num_sms or 0)
        try:
            self._cuda.dispatch(
                self._number, channel, layer, tensors, flight.lost.data_ptr() or None, half
            )
        except ElasticEPError:
            self._drop(channel)
            raise

    def _deliver(self, channel: int) -> Received:
        flight = self._flights[channel]
        assert flight is not None
        made = self._made[channel]
        flight.step._note_lost(flight.lost)
        all_ok = made.fixed.token_ok[: flight.tokens]
        token_ok = flight.lost == 0 if self._serve_lost else all_ok
        try:
            flight.received = made.received(flight.layer, token_ok, self._scale[channel])
        except ElasticEPError:
            self._drop(channel)
            raise
        flight.phase = "received"
        return flight.received

    def _sum(
        self, flight: Flight, channel: int, out: torch.Tensor | None, half: str
    ) -> torch.Tensor:
        out = self._result(flight, out)
        self._drop(channel)
        code = CODES[out.dtype].value
        self._cuda.use_sms(self.spec.num_sms or 0)
        self._cuda.combine(self._number, channel, out.data_ptr() or None, code, half)
        return out
