"""Group geometry and what follows from it: caps, rows of room, buffer sizes, SM counts.

Everything here is a closed formula on sizes; nothing is tuned and nothing is measured at run time.
A row is one copy of a token in a tensor. What moves on average is in `elasticep.traffic`.

This module imports neither torch nor grpc.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from elasticep.errors import CapExceeded, GeometryError
from elasticep.spec import Copies, ExchangeSpec, Layout, Reduce, ScaleLayout

MAX_LAYERS: Final = 4096
MAX_EXPERTS: Final = 65_535
MAX_TOPK: Final = 32
MAX_HIDDEN: Final = 65_536
MAX_SLOTS_PER_RANK: Final = 65_535
MAX_RANKS: Final = 128
MAX_ROWS: Final = 2**31 - 1
"""Rows are counted in 32-bit integers by the kernels."""

CONTIGUOUS_ALIGNMENT: Final = 128
"""Rows to which each expert's run is padded in the contiguous layout (as DeepGEMM wants it)."""

DEEPEP_LOW_LATENCY_CAP: Final = 1024
"""Largest cap of DeepEP's low-latency mode, in rows per rank. Ours has no such limit."""

LINK_GB_S: Final = 358.0
"""Stores over NVLink per direction, measured on two H200 (NV18) with all 132 SMs."""
SM_STORE_GB_S: Final = 45.8
"""Stores over NVLink of a single SM, measured on the same machine."""

_ROUTE_BYTES: Final = 8  # slot or id (int32) and weight (float32) of one routing entry
_INDEX_BYTES: Final = 4
_FLAG_BYTES: Final = 64  # a flag has a cache line of its own


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """Sizes that every rank of a group shares; checked when made.

    Attributes:
        layers: MoE layers of the model.
        experts: logical experts per layer.
        topk: experts that the router picks per token.
        hidden: elements of a token's hidden state.
        slots_per_rank: places for experts on a rank, per layer. More slots than
            experts / ranks leave room for replicas.
        max_ranks: seats of the group.
    """

    layers: int
    experts: int
    topk: int
    hidden: int
    slots_per_rank: int
    max_ranks: int

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise `GeometryError` naming the number, its limit and what to do about it."""
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
                raise GeometryError(
                    f"{name} is {value!r}; it must be a whole number from 1 to {limit}"
                )
        if self.topk > self.experts:
            raise GeometryError(
                f"topk is {self.topk} but there are only {self.experts} experts; "
                "lower topk or check the model's number of experts"
            )
        if self.hidden % 8:
            raise GeometryError(
                f"hidden is {self.hidden}, which is not a multiple of 8 (16 bytes of bf16, one "
                f"vector store); pad rows to {self.hidden + -self.hidden % 8}"
            )
        room = self.max_ranks * self.slots_per_rank
        if self.experts > room:
            needed = -(-self.experts // self.max_ranks)
            raise GeometryError(
                f"{self.experts} experts do not fit into {room} slots ({self.max_ranks} ranks x "
                f"{self.slots_per_rank}); raise slots_per_rank to at least {needed}, or max_ranks"
            )

    def check_exchange(self, spec: ExchangeSpec) -> None:
        """Raise `GeometryError` if a group of these sizes cannot have this exchange."""
        for part in spec.parts():
            for name, dtype in (
                ("dispatch_dtype", part.dispatch_dtype),
                ("combine_dtype", part.combine_dtype),
            ):
                block = dtype.row_format.block
                if block and self.hidden % block:
                    raise GeometryError(
                        f"hidden is {self.hidden}, which is not a multiple of {block}, the "
                        f"elements that share a scale in {name}={dtype.value!r}; use bf16"
                    )
            most = self.max_ranks * part.max_tokens
            if part.masked_room is not None and part.masked_room > most:
                raise GeometryError(
                    f"masked_room is {part.masked_room} but no expert can get more than {most} "
                    f"rows ({self.max_ranks} ranks x {part.max_tokens}); lower it, or leave it out"
                )
            rows = max(
                rows_of_room(part, self, self.max_ranks),
                self.max_ranks * source_rows(part, self),
            )
            if rows > MAX_ROWS:
                raise GeometryError(
                    f"an exchange with max_tokens={part.max_tokens} on {self.max_ranks} ranks "
                    f"needs room for {rows} rows, the limit is {MAX_ROWS}; lower max_tokens, "
                    "max_ranks or slots_per_rank, or use layout='routed'"
                )


_LIMITS: Final = {
    "layers": MAX_LAYERS,
    "experts": MAX_EXPERTS,
    "topk": MAX_TOPK,
    "hidden": MAX_HIDDEN,
    "slots_per_rank": MAX_SLOTS_PER_RANK,
    "max_ranks": MAX_RANKS,
}


# ---- caps


def check_cap(spec: ExchangeSpec, tokens: int) -> None:
    """Raise `CapExceeded` if a rank brings more rows than the exchange's cap."""
    if tokens > spec.max_tokens:
        raise CapExceeded(
            f"{tokens} rows on a rank exceed the exchange's cap of {spec.max_tokens}; raise "
            "max_tokens (rows = requests x draft tokens, or the prompt chunk), or split the batch"
        )


def decode_rows(requests: int, draft_tokens: int = 1) -> int:
    """Rows that `requests` requests bring to a decode step: each brings all its draft tokens."""
    return requests * draft_tokens


def batch_slice(tokens: int, rank: int, members: Sequence[int]) -> slice:
    """The part of a batch that `rank` brings to an exchange when every member holds all of it.

    Under tensor-parallel attention a batch is on every rank. Instead of exchanging nothing and
    summing on all ranks (`replicated_input`), each member may bring its own slice and keep its own
    results. Slices are consecutive in the order of `members`, disjoint, cover the batch and differ
    by at most one token.

    Raises `GeometryError` when `rank` is not among `members`.
    """
    order = sorted(members)
    if rank not in order:
        raise GeometryError(f"rank {rank} is not among the members {order}; pass the view's")
    place = order.index(rank)
    return slice(tokens * place // len(order), tokens * (place + 1) // len(order))


# ---- rows of room and buffers


def source_rows(spec: ExchangeSpec, geometry: GroupGeometry) -> int:
    """Rows of room for what one rank sends another: cap, or cap * k with one copy per expert.

    A row's place is its token's index (and which of its experts), so nobody counts before sending.
    """
    return spec.max_tokens * (geometry.topk if spec.copies is Copies.PER_EXPERT else 1)


def rows_of_room(spec: ExchangeSpec, geometry: GroupGeometry, ranks: int) -> int:
    """Rows of the tensor that the expert kernel is given, whatever arrives.

    arrival, routed: G * cap, with replicated input cap. masked: slots * room, where room is
    G * cap unless `masked_room` is set. contiguous: all (token, expert) pairs,
    G * cap * min(k, slots), and 127 rows of padding for each slot, as a multiple of 128.
    With `cpu_sync` the tensor is cut to the rows that came; the room behind it stays reserved.
    """
    arriving = (1 if spec.replicated_input else ranks) * spec.max_tokens
    slots = geometry.slots_per_rank
    if spec.layout is Layout.MASKED:
        return slots * (arriving if spec.masked_room is None else spec.masked_room)
    if spec.layout is Layout.CONTIGUOUS:
        padding = slots * (CONTIGUOUS_ALIGNMENT - 1)
        return _up(arriving * min(geometry.topk, slots) + padding, CONTIGUOUS_ALIGNMENT)
    return arriving


def _up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


@dataclass(frozen=True, slots=True)
class Buffers:
    """Bytes that one exchange reserves on each rank, all channels together.

    The native layout (`csrc/common/layout`) is what is really reserved; this mirrors it, but for
    the rounding of each part to 256 bytes.

    Attributes:
        received: rows from other ranks with their scales and routing.
        expanded: rows copied into the order that the expert kernel wants (contiguous, masked, and
            arrival with `cpu_sync`); 0 otherwise.
        outputs: what the expert kernel writes and home ranks read.
        flags: bitmaps, flags and counts.
        staging: what the engine hands over and gets back, when a worker runs the kernels.
    """

    received: int
    expanded: int
    outputs: int
    flags: int
    staging: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.received + self.expanded + self.outputs + self.flags + self.staging


def buffers(
    spec: ExchangeSpec, geometry: GroupGeometry, ranks: int | None = None, *, service: bool = False
) -> Buffers:
    """What an exchange reserves on each rank of a group with `ranks` seats (default: max_ranks).

    With n = G * source rows (with replicated input just the source rows), k entries of routing per
    row and room = `rows_of_room`: received: n * (row + 2 * 8k), once as sent and once checked.
    expanded: room * row + n * 4k, and 4 per row for the labels of the contiguous layout.
    outputs: room * output row, or n * k of them where routed and arrival rows are returned per
    expert; a layout by expert that is reduced per rank has G * cap more, for the sums. Where
    outputs travel quantised, what the kernel writes is bf16: room * 2 * hidden in addition, or
    instead where only the sums travel.
    staging: cap * (8k + 1), and with `service` two tensors of cap * hidden floats.
    A spec with a prefill part is the sum of its parts.
    """
    seats = geometry.max_ranks if ranks is None else ranks
    parts = [_part_buffers(part, geometry, seats, service) for part in spec.parts()]
    return Buffers(
        received=sum(part.received for part in parts),
        expanded=sum(part.expanded for part in parts),
        outputs=sum(part.outputs for part in parts),
        flags=sum(part.flags for part in parts),
        staging=sum(part.staging for part in parts),
    )


def _part_buffers(
    spec: ExchangeSpec, geometry: GroupGeometry, ranks: int, service: bool
) -> Buffers:
    topk, cap, slots = geometry.topk, spec.max_tokens, geometry.slots_per_rank
    row = spec.dispatch_dtype.row_bytes(geometry.hidden)
    per_source = source_rows(spec, geometry)
    received = (1 if spec.replicated_input else ranks) * per_source
    bitmap = -(-per_source // 64) * 8
    staged = cap * (_ROUTE_BYTES * topk + 1) + (2 * cap * geometry.hidden * 4 if service else 0)
    return Buffers(
        received=spec.channels * received * (row + 2 * _ROUTE_BYTES * topk),
        expanded=spec.channels * _expanded_bytes(spec, geometry, ranks),
        outputs=spec.channels * _output_bytes(spec, geometry, ranks, received),
        flags=spec.channels * (ranks * (bitmap + 2 * _FLAG_BYTES) + (2 * slots + 1) * _INDEX_BYTES),
        staging=spec.channels * staged,
    )


def _expanded_bytes(spec: ExchangeSpec, geometry: GroupGeometry, ranks: int) -> int:
    if not (spec.by_expert or spec.cpu_sync):
        return 0
    room = rows_of_room(spec, geometry, ranks)
    wire, hidden = spec.dispatch_dtype, geometry.hidden
    scales = wire.row_bytes(hidden) - wire.row_format.payload_bytes(hidden)
    scale_bytes = room * scales
    if spec.scale_layout is not ScaleLayout.ROWS:
        blocks = hidden // wire.row_format.block
        columns = blocks if spec.scale_layout is ScaleLayout.COLUMNS else -(-blocks // 4)
        runs = geometry.slots_per_rank if spec.layout is Layout.MASKED else 1
        scale_bytes = runs * columns * _up(room // runs, 4) * 4
    labels = room * _INDEX_BYTES if spec.layout is Layout.CONTIGUOUS else 0
    places = ranks * source_rows(spec, geometry) * geometry.topk * _INDEX_BYTES
    return room * wire.row_format.payload_bytes(hidden) + scale_bytes + labels + places


def _output_bytes(spec: ExchangeSpec, geometry: GroupGeometry, ranks: int, received: int) -> int:
    travelling = spec.combine_dtype.row_bytes(geometry.hidden)
    per_expert = spec.reduce is Reduce.PER_EXPERT
    room = rows_of_room(spec, geometry, ranks)
    written = room if spec.by_expert else received * (geometry.topk if per_expert else 1)
    summed = spec.by_expert and not per_expert
    sums = ranks * spec.max_tokens * travelling if summed else 0
    if not spec.combine_dtype.quantised:
        return written * travelling + sums
    return written * 2 * geometry.hidden + (sums if summed else written * travelling)


# ---- SMs


def sm_count(
    *,
    num_sms: int | None = None,
    link_gb_s: float = LINK_GB_S,
    sm_gb_s: float = SM_STORE_GB_S,
    remote: float = 1.0,
    available: int | None = None,
) -> int:
    """SMs that fill the link and no more: ceil(link / (store rate of one SM * remote share)).

    Args:
        num_sms: taken as it is, instead of the formula, when given.
        link_gb_s: what the link carries per direction.
        sm_gb_s: what one SM stores over it.
        remote: share of the stored rows that crosses the link; an SM that stores to its own GPU
            does not fill the link meanwhile.
        available: SMs of the device; never exceeded.

    The default rates were measured on two H200: one SM 45.8 GB/s, 8 SMs 345 and all of them
    358 GB/s. Pass the rates of other devices. Raises `GeometryError` for rates or shares that are
    not positive, or an override above what is available.
    """
    if not (0 < link_gb_s < math.inf and 0 < sm_gb_s < math.inf and 0 < remote <= 1):
        raise GeometryError(
            f"link_gb_s={link_gb_s}, sm_gb_s={sm_gb_s}, remote={remote}: rates must be above 0 "
            "and the remote share in (0, 1]; pass measured rates"
        )
    if num_sms is not None and available is not None and num_sms > available:
        raise GeometryError(
            f"num_sms is {num_sms} but the device has {available} SMs; lower it or leave it out"
        )
    count = math.ceil(link_gb_s / (sm_gb_s * remote)) if num_sms is None else num_sms
    return count if available is None else min(count, available)
