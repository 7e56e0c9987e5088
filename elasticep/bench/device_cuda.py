"""Torch tensors over the CUDA data plane, for tests and benchmarks."""

from dataclasses import dataclass
from typing import Any, Final

import torch

from elasticep.bench.device_streams import device_of
from elasticep.native import abi
from elasticep.native import cuda as native
from elasticep.native.tensors import over

TORCH_DTYPES: Final[dict[abi.Dtype, torch.dtype]] = {
    abi.Dtype.FP32: torch.float32,
    abi.Dtype.FP16: torch.float16,
    abi.Dtype.BF16: torch.bfloat16,
    abi.Dtype.FP8: torch.float8_e4m3fn,
    abi.Dtype.MXFP8: torch.float8_e4m3fn,
    abi.Dtype.NVFP4: torch.uint8,
}


@dataclass(frozen=True, slots=True)
class Arrived:
    """Tensors of `native.Received`; absent parts are None.

    Attributes:
        rows: [rows, row elements] of the dispatch dtype (bytes for nvfp4).
        scales: [rows, scale_bytes] uint8.
        ids: [source rows of all ranks, topk] int32.
        weights: the same shape, float32.
        counts: int32 rows per slot (or one count of arrived rows).
        offsets: int32 [slots + 1].
        places: int32 [source rows of all ranks, topk] row of each pair (contiguous, masked).
        row_slots: int32 [rows] slot of each row (contiguous).
        out: [out rows, hidden] of the combine dtype (bf16 where that is fp8).
    """

    rows: torch.Tensor
    scales: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor | None
    offsets: torch.Tensor | None
    places: torch.Tensor | None
    row_slots: torch.Tensor | None
    out: torch.Tensor


def arrived(context: native.CudaContext, exchange: int, channel: int = 0) -> Arrived:
    """The fixed tensors of one channel of an exchange."""
    g, device = context.geometry, device_of(context.config.device)
    raw: Any = context.received(exchange, channel)
    config = g.exchange[exchange]
    dtype = TORCH_DTYPES[abi.Dtype(config.dispatch_dtype)]
    out_dtype = TORCH_DTYPES[abi.Dtype(raw.out_dtype)]
    sources = 1 if config.replicated else g.max_ranks
    entries = (sources * raw.source_rows, g.topk)
    contiguous = config.layout == abi.RowLayout.CONTIGUOUS
    offsets = row_slots = None
    if contiguous:
        offsets = over(raw.slot_offsets, (g.slots + 1,), torch.int32, device)
        row_slots = over(raw.row_slots, (raw.rows_count,), torch.int32, device)
    one_run = config.layout == abi.RowLayout.ARRIVAL
    scales = None
    if raw.scales:
        scales = _scales(raw, config, g.slots, device)
    counts = None
    if raw.slot_counts:
        counts = over(raw.slot_counts, (1 if one_run else g.slots,), torch.int32, device)
    return Arrived(
        rows=over(raw.rows, (raw.rows_count, raw.row_bytes // dtype.itemsize), dtype, device),
        scales=scales,
        ids=over(raw.ids, entries, torch.int32, device),
        weights=over(raw.weights, entries, torch.float32, device),
        counts=counts,
        offsets=offsets,
        places=over(raw.places, entries, torch.int32, device) if raw.places else None,
        row_slots=row_slots,
        out=over(raw.out, (raw.out_rows, g.hidden), out_dtype, device),
    )


def _scales(raw: Any, config: Any, slots: int, device: torch.device) -> torch.Tensor:
    """[rows, scale_bytes] uint8; other scale layouts [blocks, columns, lead] int32, as they lie."""
    if not raw.scale_lead:
        return over(raw.scales, (raw.rows_count, raw.scale_bytes), torch.uint8, device)
    blocks = slots if config.layout == abi.RowLayout.MASKED else 1
    shape = (blocks, raw.scale_columns, raw.scale_lead)
    return over(raw.scales, shape, torch.int32, device)


def dispatch_args(
    exchange: int,
    layer: int,
    x: torch.Tensor,
    x_dtype: abi.Dtype,
    ids: torch.Tensor,
    weights: torch.Tensor,
    lost: torch.Tensor | None = None,
    channel: int = 0,
    global_scale: float = 0.0,
    x_scales: torch.Tensor | None = None,
) -> native.DispatchArgs:
    """Arguments of a dispatch; the tensors must live until it has run."""
    return native.DispatchArgs(
        exchange=exchange,
        channel=channel,
        layer=layer,
        tokens=x.shape[0],
        x_dtype=int(x_dtype),
        ids_bytes=ids.element_size(),
        x=x.data_ptr(),
        x_scales=x_scales.data_ptr() if x_scales is not None else None,
        ids=ids.data_ptr(),
        weights=weights.data_ptr(),
        lost=lost.data_ptr() if lost is not None else None,
        global_scale=global_scale,
    )
