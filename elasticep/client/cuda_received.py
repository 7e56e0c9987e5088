"""What a dispatch delivers on a GPU: tensors over the rank's region, made once per channel."""

import math
from dataclasses import dataclass, replace

import torch

from elasticep.client.cuda_handle import CudaHandle
from elasticep.client.received import WIRE, Received
from elasticep.geometry import GroupGeometry
from elasticep.spec import ExchangeSpec, Layout, Reduce
from elasticep.wire import WireDtype

UNKNOWN = -1
"""`Received.arrived` where the host does not wait for the count."""


class _Bytes:
    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def over(
    address: int | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor over device memory that somebody else owns."""
    count = math.prod(shape) * dtype.itemsize
    if count == 0 or not address:
        return torch.empty(shape if count == 0 else (0,), dtype=dtype, device=device)
    flat = torch.as_tensor(_Bytes(address, count), device=device)
    return flat.view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class _Count:
    """Where the number of rows that came is, for exchanges whose host waits for it."""

    cell: torch.Tensor  # int32 [1]


class CudaReceivedTensors:
    """The tensors of one channel of an exchange.

    Args:
        handle: of the session.
        spec: of the exchange.
        geometry: of the group.
        number: of the exchange.
        channel: of the exchange.

    Attributes:
        fixed: everything at its full size.
    """

    def __init__(
        self,
        handle: CudaHandle,
        spec: ExchangeSpec,
        geometry: GroupGeometry,
        number: int,
        channel: int,
    ) -> None:
        raw = handle.context.received(number, channel)
        device, slots = handle.device, geometry.slots_per_rank
        self._spec = spec
        rows, topk, hidden = int(raw.rows_count), geometry.topk, geometry.hidden
        wire = spec.dispatch_dtype
        masked, contiguous = spec.layout is Layout.MASKED, spec.layout is Layout.CONTIGUOUS
        room = (slots, rows // slots) if masked else (rows,)
        by_choice = spec.reduce is Reduce.PER_EXPERT and not spec.by_expert
        elements = hidden // 2 if wire is WireDtype.NVFP4 else hidden
        pairs = (geometry.max_ranks * int(raw.source_rows), topk)
        scales = None
        if raw.scales:
            kind = torch.float32 if wire.row_format.scale_bytes == 4 else torch.uint8
            scales = over(raw.scales, (*room, hidden // wire.row_format.block), kind, device)
        counts = over(raw.slot_counts, (slots if spec.by_expert else 1,), torch.int32, device)
        offsets = over(raw.slot_offsets, (slots + 1,), torch.int32, device) if contiguous else None
        self.fixed = Received(
            rows=over(raw.rows, (*room, elements), WIRE[wire], device),
            scales=scales,
            ids=over(raw.ids, pairs, torch.int32, device),
            weights=over(raw.weights, pairs, torch.float32, device),
            counts=counts if spec.by_expert else counts[:0],
            offsets=offsets,
            places=None,
            row_slots=None,
            global_scale=(1.0,) * geometry.max_ranks,
            out=over(
                raw.out,
                (rows, topk, hidden) if by_choice else (*room, hidden),
                WIRE[spec.combine_dtype],
                device,
            ),
            layout=spec.layout,
            layer=0,
            channel=channel,
            tokens=(),
            arrived=UNKNOWN,
            token_ok=torch.ones(spec.max_tokens, dtype=torch.bool, device=device),
        )
        self._count = None
        if spec.cpu_sync:
            self._count = _Count(counts if offsets is None else offsets[-1:])

    def received(self, layer: int, token_ok: torch.Tensor) -> Received:
        """What a dispatch that is on the stream delivers; waits for it where `cpu_sync` says so."""
        if self._count is None:
            return replace(self.fixed, layer=layer, token_ok=token_ok)
        count = int(self._count.cell.item())
        full = self.fixed
        arrived = self._spec.layout is Layout.ARRIVAL
        return replace(
            full,
            rows=full.rows[:count],
            scales=None if full.scales is None else full.scales[:count],
            ids=full.ids[:count] if arrived else full.ids,
            weights=full.weights[:count] if arrived else full.weights,
            out=full.out[:count],
            layer=layer,
            arrived=count if arrived else UNKNOWN,
            token_ok=token_ok,
        )
