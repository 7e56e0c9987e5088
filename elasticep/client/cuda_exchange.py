"""Dispatch and combine on a GPU: kernels on the engine's current stream, over the rank's region.

The calls are those of `Exchange`. None of them waits for the GPU, except the dispatch of an
exchange with `cpu_sync`; so a step of others can be captured into a CUDA graph, which holds across
failures and views. In a torn step kernels do nothing and write nothing.
"""

from typing import TYPE_CHECKING

import torch

from elasticep.client.cuda_received import CudaReceivedTensors, slot_counts
from elasticep.client.exchange import Exchange, Flight
from elasticep.client.handle import DispatchInput
from elasticep.client.received import Received
from elasticep.errors import UsageError
from elasticep.spec import ExchangeSpec

if TYPE_CHECKING:
    from elasticep.client.cuda_session import CudaSession
    from elasticep.client.step import Step


class CudaExchange(Exchange):
    """`Exchange` on the GPU of a `CudaSession`. All of its memory is there once it is made.

    What differs in `Received`: the host knows no `tokens` (empty), `arrived` with `cpu_sync` only
    (else -1), and of `global_scale` this rank's own; `source_tokens` and `source_scales` have what
    the GPU knows. `counts` and `token_ok` are worked out when they are first looked at.
    """

    def __init__(self, session: "CudaSession", name: str, spec: ExchangeSpec, number: int) -> None:
        self._cuda = session._cuda
        self._device, self._where = self._cuda.device, str(self._cuda.device)
        super().__init__(session, name, spec, number)
        geometry = session.config.geometry
        self._slots = geometry.slots_per_rank
        self._made = [
            CudaReceivedTensors(self._cuda, spec, geometry, number, channel, session._torn_here)
            for channel in range(spec.channels)
        ]
        self._sources = [made.sources for made in self._made]
        self._scale = [1.0] * spec.channels  # of the exchange under way

    # ---- under torch.compile

    def _fixed(self, channel: int) -> Received:
        if self.spec.cpu_sync:
            return super()._fixed(channel)
        return self._made[channel].fixed

    def _traced_counts(self, fixed: Received) -> torch.Tensor:
        if self.spec.by_expert:
            return fixed.counts
        return slot_counts(fixed.ids, self._slots)  # left out by the compiler if nobody looks

    def _note_compiled(self, step: "Step", channel: int, layer: int, tokens: int) -> None:
        step._note_lost(self._lost[channel, layer, :tokens])

    # ---- calls of the plane

    def _send(self, flight: Flight, channel: int, tensors: DispatchInput, half: str) -> None:
        if self.spec.cpu_sync and torch.cuda.is_current_stream_capturing():
            raise UsageError(
                f"exchange {self.name!r} has cpu_sync: its dispatch waits on the host and "
                "cannot be captured; use an exchange without it in a CUDA graph"
            )
        flight.lost = self._lost[channel, flight.layer, : flight.tokens]
        self._scale[channel] = tensors.global_scale
        self._cuda.use_sms(self.spec.num_sms or 0)
        lost = flight.lost.data_ptr() or None
        self._cuda.dispatch(self._number, channel, flight.layer, tensors, lost, half)

    def _receive(self, flight: Flight, channel: int) -> None:
        self._cuda.receive(self._number, channel)

    def _deliver(self, flight: Flight, channel: int) -> Received:
        flight.step._note_lost(flight.lost)
        made = self._made[channel]
        flight.received = made.received(flight.layer, flight.lost, self._scale[channel])
        flight.phase = "received"
        return flight.received

    def _combine(self, channel: int, out: int | None, dtype: int, half: str) -> None:
        if half != "send":
            self._cuda.use_sms(self.spec.num_sms or 0)
        self._cuda.combine(self._number, channel, out, dtype, half)
