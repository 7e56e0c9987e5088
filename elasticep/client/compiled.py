"""Dispatch and combine as torch operators, so that `torch.compile` takes a model with them whole.

While a call is traced, `Exchange.dispatch` and `Exchange.combine` come here and leave one operator
each in the graph, `elasticep::exchange_dispatch` and `elasticep::exchange_combine`. What arrives is
written into tensors that stay, those over the rank's region: they are arguments that the operators
change, and so the order of everything that reads or writes them is known to the compiler. Where it
hands over others in their place, the operators copy.
"""

import itertools
import weakref
from typing import TYPE_CHECKING, Final

import torch

from elasticep.client.received import Received

if TYPE_CHECKING:
    from elasticep.client.exchange import Exchange

_EXCHANGES: "weakref.WeakValueDictionary[int, Exchange]" = weakref.WeakValueDictionary()
_KEYS: Final = itertools.count(1)


def register(exchange: "Exchange") -> int:
    """The number by which operators name an exchange of this process."""
    key = next(_KEYS)
    _EXCHANGES[key] = exchange
    return key


def _copy_where_apart(given: torch.Tensor | None, real: torch.Tensor | None) -> None:
    if given is not None and real is not None and given.data_ptr() != real.data_ptr():
        given.copy_(real)


@torch.library.custom_op(
    "elasticep::exchange_dispatch",
    mutates_args=("rows", "scales", "ids", "weights", "counts", "offsets"),
)
def exchange_dispatch(
    rows: torch.Tensor,
    scales: torch.Tensor | None,
    ids: torch.Tensor,
    weights: torch.Tensor,
    counts: torch.Tensor,
    offsets: torch.Tensor | None,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    x_scales: torch.Tensor | None,
    exchange: int,
    channel: int,
    layer: int,
) -> None:
    """`Exchange.dispatch` into tensors that stay."""
    target = _EXCHANGES[exchange]
    real = target._dispatch_compiled(layer, x, topk_ids, topk_weights, x_scales, channel)
    _copy_where_apart(rows, real.rows)
    _copy_where_apart(scales, real.scales)
    _copy_where_apart(ids, real.ids)
    _copy_where_apart(weights, real.weights)
    _copy_where_apart(counts, real.counts)
    _copy_where_apart(offsets, real.offsets)


@torch.library.custom_op("elasticep::exchange_combine", mutates_args=("out", "rows"))
def exchange_combine(
    out: torch.Tensor,
    rows: torch.Tensor,
    y: torch.Tensor,
    exchange: int,
    channel: int,
    layer: int,
) -> None:
    """`Exchange.combine` of outputs `y` into `out`. The rows of the dispatch are given up by it."""
    target = _EXCHANGES[exchange]
    _copy_where_apart(target._fixed(channel).out, y)
    target._combine_compiled(layer, out, channel)


@exchange_dispatch.register_fake
def _(
    rows: torch.Tensor,
    scales: torch.Tensor | None,
    ids: torch.Tensor,
    weights: torch.Tensor,
    counts: torch.Tensor,
    offsets: torch.Tensor | None,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    x_scales: torch.Tensor | None,
    exchange: int,
    channel: int,
    layer: int,
) -> None:
    torch._check(x.dim() == 2 and topk_ids.dim() == 2)
    torch._check(topk_ids.shape == topk_weights.shape and topk_ids.shape[0] == x.shape[0])


@exchange_combine.register_fake
def _(
    out: torch.Tensor, rows: torch.Tensor, y: torch.Tensor, exchange: int, channel: int, layer: int
) -> None:
    torch._check(out.dim() == 2)


def traced_dispatch(
    exchange: "Exchange",
    layer: int,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    x_scales: torch.Tensor | None,
    channel: int,
) -> Received:
    """What a traced dispatch returns: everything at its full size, and no counts for the host."""
    fixed = exchange._fixed(channel)
    exchange_dispatch(
        fixed.rows,
        fixed.scales,
        fixed.ids,
        fixed.weights,
        fixed.counts,
        fixed.offsets,
        x,
        topk_ids,
        topk_weights,
        x_scales,
        exchange._key,
        channel,
        layer,
    )
    return Received(
        rows=fixed.rows,
        scales=fixed.scales,
        ids=fixed.ids,
        weights=fixed.weights,
        counts=fixed.counts,
        offsets=fixed.offsets,
        places=fixed.places,
        row_slots=fixed.row_slots,
        global_scale=fixed.global_scale,
        out=fixed.out,
        layout=fixed.layout,
        layer=layer,
        channel=channel,
        tokens=(),
        arrived=-1,
        token_ok=torch.ones(x.shape[0], dtype=torch.bool, device=x.device),
    )


def traced_combine(
    exchange: "Exchange", layer: int, recv: Received, out: torch.Tensor | None
) -> torch.Tensor:
    """A traced combine; without `out` its result has the dtype of `recv.out`."""
    if out is None:
        shape = (recv.token_ok.shape[0], exchange._session.config.geometry.hidden)
        out = torch.empty(shape, dtype=recv.out.dtype, device=recv.out.device)
    exchange_combine(out, recv.rows, recv.out, exchange._key, recv.channel, layer)
    return out
