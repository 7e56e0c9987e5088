"""The preset `AUTO`: two exchanges, of which each step's barrier picks one for all ranks."""

from typing import TYPE_CHECKING, TypeAlias

import torch

from elasticep.client.exchange import Exchange
from elasticep.client.received import Received
from elasticep.device import Device
from elasticep.errors import UsageError
from elasticep.spec import ExchangeSpec

if TYPE_CHECKING:
    from elasticep.client.session import Session


class AutoExchange:
    """Decode and prefill under one name.

    Prefill in steps where any rank has prompt tokens (`Step.prompt`), decode in
    all others. Calls are those of `Exchange`; what `dispatch` returns says its layout, so that the
    engine can pick the expert kernel.

    Attributes:
        decode: the exchange of steps without prompt tokens.
        prefill: the exchange of steps with some.
    """

    def __init__(
        self, session: "Session", name: str, spec: ExchangeSpec, numbers: tuple[int, ...]
    ) -> None:
        decode, prefill = spec.parts()
        self.name = name
        self.spec = spec
        kind = _kind_of(session)
        self.decode = kind(session, name, decode, numbers[0])
        self.prefill = kind(session, name, prefill, numbers[1])
        self._session = session

    @property
    def current(self) -> Exchange:
        """The one of the running step.

        Raises:
            UsageError: outside a step.
        """
        step = self._session._step
        if step is None:
            raise UsageError(
                f"exchange {self.name!r} outside a step, which decides between decode and prefill; "
                "put it into `with session.step():`"
            )
        return self.prefill if step.prompt else self.decode

    def input(
        self, tokens: int, dtype: torch.dtype | None = None, *, channel: int = 0
    ) -> torch.Tensor:
        """`Exchange.input` of the running step's exchange."""
        return self.current.input(tokens, dtype, channel=channel)

    def output(
        self, tokens: int, dtype: torch.dtype | None = None, *, channel: int = 0
    ) -> torch.Tensor:
        """`Exchange.output` of the running step's exchange."""
        return self.current.output(tokens, dtype, channel=channel)

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
        """`Exchange.dispatch` of the running step's exchange."""
        return self.current.dispatch(
            layer,
            x,
            topk_ids,
            topk_weights,
            x_scales=x_scales,
            global_scale=global_scale,
            channel=channel,
        )

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
        """`Exchange.dispatch_send` of the running step's exchange."""
        self.current.dispatch_send(
            layer,
            x,
            topk_ids,
            topk_weights,
            x_scales=x_scales,
            global_scale=global_scale,
            channel=channel,
        )

    def dispatch_recv(self, *, channel: int = 0) -> Received:
        """`Exchange.dispatch_recv` of the running step's exchange."""
        return self.current.dispatch_recv(channel=channel)

    def combine(self, layer: int, recv: Received, out: torch.Tensor | None = None) -> torch.Tensor:
        """`Exchange.combine` of the running step's exchange."""
        return self.current.combine(layer, recv, out)

    def combine_send(self, layer: int, recv: Received) -> None:
        """`Exchange.combine_send` of the running step's exchange."""
        self.current.combine_send(layer, recv)

    def combine_recv(self, out: torch.Tensor | None = None, *, channel: int = 0) -> torch.Tensor:
        """`Exchange.combine_recv` of the running step's exchange."""
        return self.current.combine_recv(out, channel=channel)


AnyExchange: TypeAlias = Exchange | AutoExchange
"""What `Session.exchange` gives."""


def make_exchange(
    session: "Session", name: str, spec: ExchangeSpec, numbers: tuple[int, ...]
) -> AnyExchange:
    """The exchange of a spec; one with a prefill part has two native numbers."""
    if len(numbers) > 1:
        return AutoExchange(session, name, spec, numbers)
    return _kind_of(session)(session, name, spec, numbers[0])


def _kind_of(session: "Session") -> type[Exchange]:
    if session.config.device is Device.CPU:
        return Exchange
    from elasticep.client.cuda_exchange import CudaExchange

    return CudaExchange
