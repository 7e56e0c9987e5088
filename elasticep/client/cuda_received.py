"""What a dispatch delivers on a GPU: tensors over the rank's region, made once per channel."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from elasticep.client.cuda_handle import CudaHandle
from elasticep.client.received import BY_CODE, SOURCE_WORDS, WIRE, Once, Received
from elasticep.errors import StepTorn
from elasticep.geometry import GroupGeometry
from elasticep.native import cuda as native
from elasticep.native.tensors import over
from elasticep.spec import ExchangeSpec, Layout, Reduce, ScaleLayout
from elasticep.wire import WireDtype

UNKNOWN = -1
"""`Received.arrived` where the host does not wait for the count."""


def slot_counts(ids: torch.Tensor, slots: int) -> torch.Tensor:
    """Int32 `[slots]`: how often each slot is in `ids`, in operations that a compiler knows."""
    places = ids.flatten().long() + 1  # -1 is counted, too, and left out
    ones = torch.ones_like(places, dtype=torch.int32)
    counts = torch.zeros(slots + 1, dtype=torch.int32, device=ids.device)
    return counts.scatter_add(0, places, ones)[1:]


class CudaReceivedTensors:
    """The tensors of one channel of an exchange.

    Args:
        handle: of the session.
        spec: of the exchange.
        geometry: of the group.
        number: of the exchange.
        channel: of the exchange.
        torn: the error for a dispatch that was waited for and whose step is torn.

    Attributes:
        fixed: everything at its full size.
        sources: int32 `[R, SOURCE_WORDS]`: what each source said of its dispatch.
    """

    def __init__(
        self,
        handle: CudaHandle,
        spec: ExchangeSpec,
        geometry: GroupGeometry,
        number: int,
        channel: int,
        torn: Callable[[], StepTorn],
    ) -> None:
        raw = handle.context.received(number, channel)
        device, slots = handle.device, geometry.slots_per_rank
        self._handle, self._number, self._channel = handle, number, channel
        self._spec, self._torn = spec, torn
        rows, topk, hidden = int(raw.rows_count), geometry.topk, geometry.hidden
        wire = spec.dispatch_dtype
        room = (slots, rows // slots) if spec.layout is Layout.MASKED else (rows,)
        by_choice = spec.reduce is Reduce.PER_EXPERT and not spec.by_expert
        elements = hidden // 2 if wire is WireDtype.NVFP4 else hidden
        pairs = (int(raw.id_rows), topk)

        def ints(address: int | None, *shape: int) -> torch.Tensor | None:
            return over(address, shape, torch.int32, device) if address else None

        ids, none = ints(raw.ids, *pairs), torch.empty(0, dtype=torch.int32, device=device)
        # Elsewhere no kernel counts before the engine asks.
        counts = ints(raw.slot_counts, slots) if spec.by_expert else None
        self.sources = over(raw.arrivals, (geometry.max_ranks, SOURCE_WORDS), torch.int32, device)
        self._counts = torch.zeros(slots, dtype=torch.int32, device=device)
        self.fixed = Received(
            rows=over(raw.rows, (*room, elements), WIRE[wire], device),
            scales=self._scales(raw, room, hidden) if raw.scales else None,
            ids=none if ids is None else ids,
            weights=over(raw.weights, pairs, torch.float32, device),
            _counts=self._counts if counts is None else counts,
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
            _token_ok=none,
            _sources=self.sources,
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

    def received(self, layer: int, lost: torch.Tensor, global_scale: float) -> Received:
        """What a dispatch that is on the stream delivers; waits for its count where `cpu_sync`
        says so.

        Args:
            layer: of the dispatch.
            lost: uint8 `[tokens]`, where its kernel notes tokens that need a lost expert.
            global_scale: of this rank's rows.

        Raises:
            StepTorn: it was waited for and the step is torn.
        """
        same = self.fixed
        full = Received(
            same.rows,
            same.scales,
            same.ids,
            same.weights,
            same._counts if self._spec.by_expert else self._later(same.ids),
            same.offsets,
            same.places,
            same.row_slots,
            (global_scale,) * len(same.global_scale),
            same.out,
            same.layout,
            layer,
            self._channel,
            same.tokens,
            UNKNOWN,
            Once(partial(torch.eq, lost, 0)),
            same._sources,
        )
        return self._cut(full) if self._spec.cpu_sync else full

    def _counted(self) -> torch.Tensor:
        self._handle.count_slots(self._number, self._channel, self._counts.data_ptr())
        return self._counts

    def _later(self, ids: torch.Tensor) -> Once:
        return Once(self._counted, partial(slot_counts, ids, self._counts.shape[0]))

    def _cut(self, full: Received) -> Received:
        counts = self._handle.counts(self._number, self._channel)
        if counts.torn:
            raise self._torn()
        if self._spec.layout is Layout.MASKED:
            return replace(full, arrived=int(counts.arrived))
        rows = int(counts.rows)
        sent = self._spec.layout is Layout.ARRIVAL  # ids go with the rows
        ids = full.ids[:rows] if sent else full.ids
        return replace(
            full,
            rows=full.rows[:rows],
            scales=None if full.scales is None else full.scales[:rows],
            ids=ids,
            _counts=self._later(ids) if sent else full._counts,
            weights=full.weights[:rows] if sent else full.weights,
            row_slots=None if full.row_slots is None else full.row_slots[:rows],
            out=full.out[:rows],
            arrived=int(counts.arrived),
        )
