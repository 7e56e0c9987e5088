"""What a dispatch delivers, as tensors over the region of this rank."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Union

import torch

from elasticep.errors import UsageError
from elasticep.geometry import GroupGeometry
from elasticep.native import abi
from elasticep.native.tensors import over
from elasticep.spec import ExchangeSpec, Layout, Reduce, ScaleLayout
from elasticep.wire import WireDtype

WIRE: Final = {
    WireDtype.FP32: torch.float32,
    WireDtype.FP16: torch.float16,
    WireDtype.BF16: torch.bfloat16,
    WireDtype.FP8: torch.float8_e4m3fn,
    WireDtype.MXFP8: torch.float8_e4m3fn,
    WireDtype.NVFP4: torch.uint8,  # two e2m1 elements in a byte
}
"""Element types of rows on the wire."""

SOURCE_WORDS: Final = 16
"""Of 4 bytes: what a region has of each source's dispatch (`struct Arrival`)."""

_CPU: Final = torch.device("cpu")
_TOKENS_WORD: Final = 2
_SCALE_WORD: Final = 4

BY_CODE: Final = {abi.Dtype[wire.name].value: dtype for wire, dtype in WIRE.items()}
_Pointer = Union["ctypes._Pointer[ctypes.c_int32]", "ctypes._Pointer[ctypes.c_float]"]


class Once:
    """A tensor that is made when it is first asked for.

    Args:
        make: gives it; on a GPU by kernels on the stream that is current then.
        traced: the same in operations that a compiler knows, for code that it traces; None: `make`
            has no others.
    """

    __slots__ = ("_made", "_make", "_traced")

    def __init__(
        self, make: Callable[[], torch.Tensor], traced: Callable[[], torch.Tensor] | None = None
    ) -> None:
        self._make = make
        self._traced = make if traced is None else traced
        self._made: torch.Tensor | None = None

    def get(self) -> torch.Tensor:
        """The tensor."""
        if torch.compiler.is_compiling():
            return self._traced()
        if self._made is None:
            self._made = self._make()
        return self._made


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    """What a dispatch delivered. The tensors lie in the rank's region, for use until combine, or
    its sending half, is called: then other ranks may send their next `rows` and `scales` (routed
    and arrival layouts). All else stays until the channel's next dispatch is called, and nothing
    after the session is detached.

    R: ranks of the group, C: the exchange's cap, K: top-k, H: hidden, S: slots per rank. N, the
    rows of room, is R * C in the routed layout, in the others what `geometry.rows_of_room` says;
    with `cpu_sync` it is exactly what came.

    Attributes:
        rows: `[N, H]` of the wire dtype (nvfp4: `[N, H / 2]`); masked: `[S, room, H]`. Routed: row
            `r * C + t` is token t of rank r. Contiguous: what pads a run is zero. Other rows that
            did not come are undefined.
        scales: scales of quantised rows, else None: `[N, H / block]`, float32 for fp8 and bytes for
            the others (masked `[S, room, H / block]`); with another `scale_layout` a view of the
            same shape (packed: int32, four to a word) whose memory is column-major.
        ids: int32 `[M, K]`: local slot of each of a row's choices, -1 = none here. M is N, or in
            the layouts by expert the rows as they were sent.
        weights: float32 `[M, K]`.
        counts: int32 `[S]`: rows per local slot. On a GPU, in the routed and arrival layouts, they
            are counted when they are first looked at, on the stream that is current then.
        offsets: contiguous layout: int32 `[S + 1]`, first row of each slot's run, else None.
        places: layouts by expert: int32 `[M, K]`, the row of each pair, -1 = none, else None.
        row_slots: contiguous layout: int32 `[N]`, local slot of each row, -1 = padding, else None.
        global_scale: nvfp4: by source rank; value = element * scale * this. On a GPU, and in a
            compiled model, this rank's own for all: see `source_scales`.
        out: where the experts' outputs go, of the combine dtype (bf16 where that is fp8): `[N, H]`
            (masked `[S, room, H]`), or `[N, K, H]` with `reduce="per_expert"` in the routed and
            arrival layouts.
        layout: how the rows are ordered.
        layer: of the dispatch.
        tokens: how many tokens each rank brought; empty where the host does not know, as on a GPU
            and in a compiled model: see `source_tokens`.
        arrived: how many rows came; -1 where the host does not know.
        token_ok: bool `[tokens]` of this rank's own tokens: False where a lost expert was needed.
        source_tokens, source_scales: `tokens` and `global_scale` as tensors, beside the rows.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor
    _counts: torch.Tensor | Once
    offsets: torch.Tensor | None
    places: torch.Tensor | None
    row_slots: torch.Tensor | None
    global_scale: tuple[float, ...]
    out: torch.Tensor
    layout: Layout
    layer: int
    channel: int
    tokens: tuple[int, ...]
    arrived: int
    _token_ok: torch.Tensor | Once
    _sources: torch.Tensor | None = None  # int32 [R, SOURCE_WORDS], where the host does not know

    @property
    def counts(self) -> torch.Tensor:
        """Int32 `[S]`: rows per local slot."""
        counts = self._counts
        return counts.get() if isinstance(counts, Once) else counts

    @property
    def token_ok(self) -> torch.Tensor:
        """Bool `[tokens]` of this rank's own: False where a lost expert was needed."""
        token_ok = self._token_ok
        return token_ok.get() if isinstance(token_ok, Once) else token_ok

    @property
    def source_tokens(self) -> torch.Tensor:
        """Int32 `[R]`: how many tokens each rank brought, 0 of those that are no members."""
        if self._sources is None:
            return torch.tensor(self.tokens, dtype=torch.int32, device=self.rows.device)
        return self._sources[:, _TOKENS_WORD]

    @property
    def source_scales(self) -> torch.Tensor:
        """Float32 `[R]`: the global scale of each member's rows (nvfp4)."""
        if self._sources is None:
            return torch.tensor(self.global_scale, dtype=torch.float32, device=self.rows.device)
        return self._sources[:, _SCALE_WORD].view(torch.float32)


class ReceivedTensors:
    """Makes the tensors of one exchange, which stay: a region does not move, only sizes change."""

    def __init__(self, name: str, spec: ExchangeSpec, geometry: GroupGeometry) -> None:
        self._name = name
        self._spec = spec
        self._geometry = geometry
        self._made: dict[int | None, torch.Tensor] = {}
        self._last: dict[int, tuple[tuple[Any, ...], Received]] = {}  # by channel, with its sizes
        self._scaled = spec.dispatch_dtype is WireDtype.NVFP4

    def received(
        self, struct: abi.Received, layer: int, channel: int, token_ok: torch.Tensor
    ) -> Received:
        """The tensors of what the native core has just delivered."""
        sizes = (struct.rows, struct.rows_count, struct.id_rows)
        last = self._last.get(channel)
        if last is None or last[0] != sizes:
            last = self._last[channel] = (sizes, self._made_of(struct, channel, token_ok))
        same, ranks = last[1], self._geometry.max_ranks
        # Not by dataclasses.replace, which takes several times as long.
        return Received(
            same.rows,
            same.scales,
            same.ids,
            same.weights,
            same._counts,
            same.offsets,
            same.places,
            same.row_slots,
            tuple(struct.global_scale[:ranks]) if self._scaled else same.global_scale,
            same.out,
            same.layout,
            layer,
            channel,
            tuple(struct.tokens[:ranks]),
            struct.arrived,
            token_ok,
        )

    def _made_of(self, struct: abi.Received, channel: int, token_ok: torch.Tensor) -> Received:
        geometry = self._geometry
        rows, topk, hidden = int(struct.rows_count), geometry.topk, geometry.hidden
        wire, slots = self._spec.dispatch_dtype, geometry.slots_per_rank
        by_choice = self._spec.reduce is Reduce.PER_EXPERT and not self._spec.by_expert
        row_elements = hidden // 2 if wire is WireDtype.NVFP4 else hidden
        room = (slots, rows // slots) if self._spec.layout is Layout.MASKED else (rows,)
        out_shape = (rows, topk, hidden) if by_choice else (*room, hidden)
        pairs = (int(struct.id_rows), topk)

        def ints(pointer: _Pointer, shape: tuple[int, ...]) -> torch.Tensor:
            return self._at(_address(pointer), shape, torch.int32)

        return Received(
            rows=self._at(struct.rows, (*room, row_elements), BY_CODE[struct.row_dtype]),
            scales=self._scales(struct, room),
            ids=ints(struct.ids, pairs),
            weights=self._at(_address(struct.weights), pairs, torch.float32),
            _counts=ints(struct.slot_counts, (slots,)),
            offsets=ints(struct.slot_offsets, (slots + 1,)) if struct.slot_offsets else None,
            places=ints(struct.places, pairs) if struct.places else None,
            row_slots=ints(struct.row_slots, (rows,)) if struct.row_slots else None,
            global_scale=(1.0,) * geometry.max_ranks,
            out=self._at(struct.out, out_shape, BY_CODE[struct.out_dtype]),
            layout=self._spec.layout,
            layer=0,
            channel=channel,
            tokens=(),
            arrived=0,
            _token_ok=token_ok,
        )

    def _scales(self, struct: abi.Received, room: tuple[int, ...]) -> torch.Tensor | None:
        if not struct.scales:
            return None
        wire = self._spec.dispatch_dtype.row_format
        dtype = torch.float32 if wire.scale_bytes == 4 else torch.uint8
        if self._spec.scale_layout is ScaleLayout.ROWS:
            per_row = self._geometry.hidden // wire.block
            return self._at(struct.scales, (*room, per_row), dtype)
        if self._spec.scale_layout is ScaleLayout.PACKED:
            dtype = torch.int32
        columns = (*room[:-1], int(struct.scale_columns), int(struct.scale_lead))
        return self._at(struct.scales, columns, dtype).transpose(-1, -2)[..., : room[-1], :]

    def _at(self, address: int | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor over `address`."""
        if 0 in shape:  # nothing came, and the size is exact
            return torch.empty(shape, dtype=dtype)
        largest, rows = self._made.get(address), shape[0]
        fits = largest is not None and largest.dtype == dtype and largest.shape[1:] == shape[1:]
        if largest is None or not fits or largest.shape[0] < rows:
            if address is None:
                raise UsageError(
                    f"exchange {self._name!r}: the native core gave no address for a tensor of "
                    f"{list(shape)}; this build does not do layout {self._spec.layout.value!r}"
                )
            largest = self._made[address] = over(address, shape, dtype, _CPU)
        # With cpu_sync sizes change all the time, and a slice is made in a tenth of the time.
        return largest if largest.shape[0] == rows else largest[:rows]


def _address(pointer: _Pointer) -> int | None:
    return ctypes.cast(pointer, ctypes.c_void_p).value
