"""Where a group's memory is, and what its exchanges may be there."""

import enum
from collections.abc import Iterable

from elasticep.errors import ConfigError
from elasticep.spec import ExchangeSpec, ScaleLayout
from elasticep.wire import WireDtype

_ROW_ALIGNMENT = 16  # bytes: kernels move whole vectors
_SUMS = (WireDtype.FP32, WireDtype.FP16, WireDtype.BF16)


class Device(enum.StrEnum):
    """Where the data regions of a group's ranks are."""

    CPU = "cpu"
    CUDA = "cuda"


def check_cuda(
    name: str, inline: bool, hidden: int, exchanges: Iterable[tuple[str, ExchangeSpec]]
) -> None:
    """Raise `ConfigError` for the first thing that the kernels do not carry out.

    Args:
        name: the group's, for the message.
        inline: whether launch is inline and completion local.
        hidden: elements of a row.
        exchanges: (name, spec) pairs.
    """
    if not inline:
        raise ConfigError(
            f"group {name!r} has device = 'cuda', where kernels run on the engine's own stream and "
            "steps count by rank; set launch = 'inline' and completion = 'local'"
        )
    for exchange, spec in exchanges:
        for part in spec.parts():
            why = _unfit(part, hidden)
            if why:
                raise ConfigError(
                    f"group {name!r} has device = 'cuda' and exchange {exchange!r} with {why}"
                )


def _unfit(spec: ExchangeSpec, hidden: int) -> str:
    if spec.replicated_input:
        return "replicated_input, which runs on the CPU only; leave it out"
    if spec.combine_dtype not in _SUMS:
        return f"combine_dtype = {spec.combine_dtype.value!r}; use fp32, fp16 or bf16"
    if spec.scale_layout is not ScaleLayout.ROWS:
        return f"scale_layout = {spec.scale_layout.value!r}; use 'rows'"
    for dtype in (spec.dispatch_dtype, spec.combine_dtype):
        row_bytes = hidden * dtype.row_format.bits // 8
        if row_bytes % _ROW_ALIGNMENT:
            return (
                f"rows of {row_bytes} bytes; on a GPU they are a multiple of {_ROW_ALIGNMENT}, "
                f"change geometry.hidden ({hidden})"
            )
    return ""
