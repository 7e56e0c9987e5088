"""What a dispatch delivers on a GPU: tensors over the rank's region, made once per channel."""

import math
from dataclasses import replace

import torch

from elasticep.client.cuda_handle import CudaHandle
from elasticep.client.received import BY_CODE, WIRE, Received
from elasticep.errors import StepTorn
from elasticep.geometry import GroupGeometry
from elasticep.native import cuda as native
from elasticep.spec import ExchangeSpec, Layout, Reduce, ScaleLayout
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
        self._handle, self._number, self._channel = handle, number, channel
        self._spec = spec
        rows, topk, hidden = int(raw.rows_count), geometry.topk, geometry.hidden
        wire = spec.dispatch_dtype
        room = (slots, rows // slots) if spec.layout is Layout.MASKED else (rows,)
        by_choice = spec.reduce is Reduce.PER_EXPERT and not spec.by_expert
        elements = hidden // 2 if wire is WireDtype.NVFP4 else hidden
        pairs = (int(raw.id_rows), topk)

        def ints(address: int | None, *shape: int) -> torch.Tensor | None:
            return over(address, shape, torch.int32, device) if address else None

        ids, counts = ints(raw.ids, *pairs), ints(raw.slot_counts, slots)
        none = torch.empty(0, dtype=torch.int32, device=device)
        self.fixed = Received(
            rows=over(raw.rows, (*room, elements), WIRE[wire], device),
            scales=self._scales(raw, room, hidden) if raw.scales else None,
            ids=none if ids is None else ids,
            weights=over(raw.weights, pairs, torch.float32, device),
            counts=counts if counts is not None and spec.by_expert else none,
            offsets=ints(raw.slot_offsets, slots + 1),
            places=ints(raw.places, *pairs),
            row_slots=ints(raw.row_slots, rows),
            global_scale=(1.0,) * geometry.max_ranks,
            out=over(
                raw.out,
                (rows, topk, hidden) if by_choice else (*room, hidden),
                BY_CODE[raw.out_dtype],
                device,
            ),
            layout=spec.layout,
            layer=0,
            channel=channel,
            tokens=(),
            arrived=UNKNOWN,
            token_ok=torch.ones(spec.max_tokens, dtype=torch.bool, device=device),
        )

    def _scales(self, raw: native.Received, room: tuple[int, ...], hidden: int) -> torch.Tensor:
        wire, device = self._spec.dispatch_dtype.row_format, self._handle.device
        dtype = torch.float32 if wire.scale_bytes == 4 else torch.uint8
        if self._spec.scale_layout is ScaleLayout.ROWS:
            return over(raw.scales, (*room, hidden // wire.block), dtype, device)
        if self._spec.scale_layout is ScaleLayout.PACKED:
            dtype = torch.int32
        columns = (*room[:-1], int(raw.scale_columns), int(raw.scale_lead))
        whole = over(raw.scales, columns, dtype, device)
        return whole.transpose(-1, -2)[..., : room[-1], :]

    def received(self, layer: int, token_ok: torch.Tensor, global_scale: float) -> Received:
        """What a dispatch that is on the stream delivers; waits for its count where `cpu_sync`
        says so.

        Raises:
            StepTorn: it was waited for and the step is torn.
        """
        full = replace(
            self.fixed,
            layer=layer,
            token_ok=token_ok,
            global_scale=(global_scale,) * len(self.fixed.global_scale),
        )
        if not self._spec.cpu_sync:
            return full
        counts = self._handle.counts(self._number, self._channel)
        if counts.torn:
            raise StepTorn("this step is torn; leave the `with session.step()` block and repeat it")
        if self._spec.layout is Layout.MASKED:
            return replace(full, arrived=int(counts.arrived))
        rows = int(counts.rows)
        sent = self._spec.layout is Layout.ARRIVAL  # ids go with the rows
        return replace(
            full,
            rows=full.rows[:rows],
            scales=None if full.scales is None else full.scales[:rows],
            ids=full.ids[:rows] if sent else full.ids,
            weights=full.weights[:rows] if sent else full.weights,
            row_slots=None if full.row_slots is None else full.row_slots[:rows],
            out=full.out[:rows],
            arrived=int(counts.arrived),
        )
