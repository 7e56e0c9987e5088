"""Dispatch and combine under `torch.compile`, which takes a model with them whole.

While a call is traced, `Exchange.dispatch` and `Exchange.combine` come here and leave one operator
each in the graph (`elasticep.ops`). What arrives is written into tensors that stay, those over the
rank's region: they are arguments that the operators change, and so the order of everything that
reads or writes them is known to the compiler. Where it hands over others in their place, the
operators copy.

The operators run without Python. What only a session knows is done at the end of its step, once for
all of them (`Operators.after`): which error was raised, which dispatch was not combined, and which
tokens needed a lost expert. The order of calls, which eager ones look at before they begin, is left
to the native core.
"""

import ctypes
from typing import TYPE_CHECKING, Final

import torch

from elasticep import ops
from elasticep.client.received import Received
from elasticep.errors import PlacementError
from elasticep.native import abi
from elasticep.native.operators import ExchangeSpec, Rank, Taken
from elasticep.spec import Reduce, ScaleLayout

if TYPE_CHECKING:
    from elasticep.client.exchange import Exchange
    from elasticep.client.step import Step

_ELEMENT_BYTES: Final = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 2}  # of `out`; fp8: bf16 there


class Operators:
    """What the torch operators know of an exchange, and what they did in a step.

    Args:
        exchange: that they stand for.
        rank: what they call; None: nothing can be compiled.

    Attributes:
        key: the number by which they name it; 0: nothing can be compiled.

    Raises:
        ElasticEPError: the CUDA library does not know the exchange.
    """

    def __init__(self, exchange: "Exchange", rank: Rank | None) -> None:
        self._exchange = exchange
        self._layers = exchange._session.config.geometry.layers
        self._taken = Taken()
        self._tokens = (ctypes.c_int32 * (exchange.spec.channels * self._layers))()
        self._rank = rank  # holds what the operators point to
        self.key = 0
        if rank is not None:
            key = ops.open_exchange(_spec(exchange, rank))
            if key < 0:
                raise abi.error_of(key, f"exchange {exchange.name!r}")
            self.key = key

    def close(self) -> None:
        """Operators of this exchange raise from now on."""
        ops.close_exchange(self.key)

    def forget(self) -> None:
        """Nothing that operators did until now belongs to a step: they ran outside of one."""
        ops.take(self.key, self._taken, self._tokens)

    def after(self, step: "Step", error: BaseException | None) -> BaseException | None:
        """Tell a step what operators did in it.

        Returns:
            The error with which its block ends: `error`, but an operator's RuntimeError as what an
            eager call would have raised. What a handler of a signal raised comes first, also if the
            engine has taken that RuntimeError in: it could not know.
        """
        if not ops.take(self.key, self._taken, self._tokens):
            return error
        exchange, session = self._exchange, self._exchange._session
        for place, tokens in enumerate(self._tokens):
            if tokens >= 0:
                exchange._note_compiled(step, *divmod(place, self._layers), tokens)
        for channel in range(exchange.spec.channels):
            if self._taken.open >> channel & 1:
                step._open_exchanges.add((exchange._number, channel))
        if self._taken.code == abi.Error.EINTR:
            raised = ops.raised(self.key)
            if raised is not None:
                return raised
        text = self._taken.text.decode("utf-8", "replace")
        if not self._taken.code or not isinstance(error, RuntimeError) or text not in str(error):
            return error
        typed = session._handle.failure(self._taken.code, text)
        return session._experts_lost(typed) if isinstance(typed, PlacementError) else typed


def _spec(exchange: "Exchange", rank: Rank) -> ExchangeSpec:
    spec, geometry = exchange.spec, exchange._session.config.geometry
    wire = spec.dispatch_dtype
    form, hidden = wire.row_format, geometry.hidden
    packed = hidden * form.bits // 8
    by_choice = spec.reduce is Reduce.PER_EXPERT and not spec.by_expert
    of_row = geometry.topk if by_choice else 1
    raw = ExchangeSpec(
        rank=rank.address,
        calls=ctypes.addressof(rank.calls),
        plane=rank.plane,
        device=rank.device,
        number=exchange._number,
        channels=spec.channels,
        layers=geometry.layers,
        ranks=geometry.max_ranks,
        max_tokens=spec.max_tokens,
        topk=geometry.topk,
        hidden=hidden,
        slots=geometry.slots_per_rank,
        num_sms=spec.num_sms or 0,
        wire=abi.Dtype[wire.name].value,
        block=form.block,
        float_scale=form.scale_bytes == 4,
        width=packed,
        by_column=spec.scale_layout is not ScaleLayout.ROWS,
        row_bytes=packed,
        scale_bytes=hidden // form.block * form.scale_bytes if wire.quantised else 0,
        out_bytes=of_row * hidden * _ELEMENT_BYTES[spec.combine_dtype.value],
        name=exchange.name.encode()[:63],
    )
    if rank.sms is not None:
        raw.sms = ctypes.pointer(rank.sms)
    return raw


def traced_dispatch(
    exchange: "Exchange",
    layer: int,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    x_scales: torch.Tensor | None,
    global_scale: float,
    channel: int,
) -> Received:
    """What a traced dispatch returns: everything at its full size, and no numbers for the host."""
    fixed, sources = exchange._fixed(channel), exchange._sources[channel]
    exchange._inputs.check_cap(x.shape[0])
    lost = exchange._lost[channel, layer]
    torch.ops.elasticep.exchange_dispatch(
        fixed.rows,
        fixed.scales,
        fixed.ids,
        fixed.weights,
        fixed._counts,
        fixed.offsets,
        fixed.places,
        fixed.row_slots,
        lost,
        x,
        topk_ids,
        topk_weights,
        x_scales,
        exchange._key,
        channel,
        layer,
        global_scale,
        sources,
    )
    return Received(
        rows=fixed.rows,
        scales=fixed.scales,
        ids=fixed.ids,
        weights=fixed.weights,
        _counts=exchange._traced_counts(fixed),
        offsets=fixed.offsets,
        places=fixed.places,
        row_slots=fixed.row_slots,
        global_scale=(global_scale,) * len(fixed.global_scale),
        out=fixed.out,
        layout=fixed.layout,
        layer=layer,
        channel=channel,
        tokens=(),
        arrived=-1,
        _token_ok=lost.narrow(0, 0, x.shape[0]) == 0,
        _sources=sources,
    )


def traced_combine(
    exchange: "Exchange", layer: int, recv: Received, out: torch.Tensor | None
) -> torch.Tensor:
    """A traced combine; without `out` its result has the dtype of `recv.out`."""
    if out is None:
        shape = (recv.token_ok.shape[0], exchange._session.config.geometry.hidden)
        out = torch.empty(shape, dtype=recv.out.dtype, device=recv.out.device)
    torch.ops.elasticep.exchange_combine(
        out, recv.rows, recv.out, exchange._key, recv.channel, layer
    )
    return out
