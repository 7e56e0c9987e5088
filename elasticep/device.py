"""Where a group's memory is, and what its exchanges may be there."""

import enum
from collections.abc import Iterable

from elasticep.errors import ConfigError
from elasticep.spec import ExchangeSpec

_ROW_ALIGNMENT = 16  # bytes: kernels move whole vectors


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
        inline: whether launch is inline.
        hidden: elements of a row.
        exchanges: (name, spec) pairs.
    """
    if not inline:
        raise ConfigError(
            f"group {name!r} has device = 'cuda', where kernels run on the engine's own stream; "
            "set launch = 'inline'"
        )
    for exchange, spec in exchanges:
        for part in spec.parts():
            why = _unfit(part, hidden)
            if why:
                raise ConfigError(
                    f"group {name!r} has device = 'cuda' and exchange {exchange!r} with {why}"
                )


def _unfit(spec: ExchangeSpec, hidden: int) -> str:
    dispatched = spec.dispatch_dtype.row_format.payload_bytes(hidden)
    for row_bytes in (dispatched, spec.combine_dtype.row_bytes(hidden)):
        if row_bytes % _ROW_ALIGNMENT:
            return (
                f"rows of {row_bytes} bytes; on a GPU they are a multiple of {_ROW_ALIGNMENT}, "
                f"change geometry.hidden ({hidden})"
            )
    return ""
