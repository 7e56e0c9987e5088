"""Tensors that an exchange takes rows from, and leaves results in, without a copy.

Under `service` launch another process runs the kernels, so what an engine passes in and gets back
is copied into and out of the rank's region, unless the engine works there itself.
"""

from typing import TYPE_CHECKING

import torch

from elasticep.client.arguments import whole
from elasticep.client.received import WIRE
from elasticep.errors import TensorError, UsageError
from elasticep.native import abi
from elasticep.native.tensors import over

if TYPE_CHECKING:
    from elasticep.client.exchange import Exchange

FULL = {torch.float32: "FP32", torch.float16: "FP16", torch.bfloat16: "BF16"}


class Buffers:
    """The input and output tensors of one exchange, made when first asked for."""

    def __init__(self) -> None:
        self._whole: dict[tuple[str, int, torch.dtype], torch.Tensor] = {}

    def input(
        self, exchange: "Exchange", tokens: int, dtype: torch.dtype | None, channel: int
    ) -> torch.Tensor:
        """See `Exchange.input`."""
        wire = exchange.spec.dispatch_dtype
        dtype = _usual(exchange) if dtype is None else dtype
        allowed = (*FULL, WIRE[wire]) if wire.quantised else (WIRE[wire],)
        if dtype not in allowed:
            raise TensorError(
                f"rows of {dtype} are not what exchange {exchange.name!r} takes; use "
                + " or ".join(str(kind) for kind in dict.fromkeys(allowed))
            )
        hidden = exchange._session.config.geometry.hidden
        packed = wire.quantised and dtype not in FULL
        width = hidden * wire.row_format.bits // 8 if packed else hidden
        code = wire.name if packed else FULL[dtype]
        return self._of(exchange, "in", tokens, width, dtype, code, channel)

    def output(
        self, exchange: "Exchange", tokens: int, dtype: torch.dtype | None, channel: int
    ) -> torch.Tensor:
        """See `Exchange.output`."""
        dtype = _usual(exchange) if dtype is None else dtype
        if dtype not in FULL:
            raise TensorError(f"results cannot be {dtype}; use {' or '.join(map(str, FULL))}")
        hidden = exchange._session.config.geometry.hidden
        return self._of(exchange, "out", tokens, hidden, dtype, FULL[dtype], channel)

    def _of(
        self,
        exchange: "Exchange",
        which: str,
        tokens: int,
        width: int,
        dtype: torch.dtype,
        code: str,
        channel: int,
    ) -> torch.Tensor:
        exchange._session._check_usable()
        if not 0 <= whole("channel", channel) < exchange.spec.channels:
            raise UsageError(
                f"exchange {exchange.name!r} has no channel {channel}; it has "
                f"{exchange.spec.channels}"
            )
        exchange._inputs.check_cap(whole("tokens", tokens))  # one below 0 would count from the end
        rows = self._whole.get((which, channel, dtype))
        if rows is None:
            shape = (exchange.spec.max_tokens, width)
            rows = _made(exchange, which, shape, dtype, code, channel)
            self._whole[which, channel, dtype] = rows
        return rows[:tokens]


def _usual(exchange: "Exchange") -> torch.dtype:
    wire = exchange.spec.dispatch_dtype
    return torch.bfloat16 if wire.quantised else WIRE[wire]


def _made(
    exchange: "Exchange",
    which: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    code: str,
    channel: int,
) -> torch.Tensor:
    address = None
    if exchange._device.type == "cpu":
        rows, result = exchange._handle.buffers(exchange._number, channel, abi.Dtype[code].value)
        address = rows if which == "in" else result
    if address is None:  # kernels that run in this process take rows from anywhere
        return torch.empty(shape, dtype=dtype, device=exchange._device)
    return over(address, shape, dtype, exchange._device)
