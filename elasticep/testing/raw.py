"""A session at the level of the C ABI, with numpy arrays: for tests and benchmarks.

Engines use `elasticep.attach`; this one needs neither torch nor a controller.
"""

import ctypes
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from elasticep import errors
from elasticep.native import abi

ROW_DTYPES: Final[dict[int, Any]] = {
    abi.Dtype.FP32: np.float32,
    abi.Dtype.FP16: np.float16,
    abi.Dtype.BF16: np.uint16,
    abi.Dtype.FP8: np.uint8,
    abi.Dtype.MXFP8: np.uint8,
    abi.Dtype.NVFP4: np.uint8,
}


def scale_bytes(dtype: int, hidden: int) -> int:
    """Bytes of a row's scales on the wire."""
    blocks = {abi.Dtype.FP8: hidden // 128 * 4, abi.Dtype.MXFP8: hidden // 32}
    return blocks.get(abi.Dtype(dtype), hidden // 16 if dtype == abi.Dtype.NVFP4 else 0)


class TornError(errors.ElasticEPError):
    """The running step is torn: end it and repeat it."""

    reason = "TORN"


def check(code: int, what: str) -> None:
    """Raise `TornError` for EP_ETORN and the typed error for any other negative code."""
    if code == abi.Error.ETORN:
        raise TornError(abi.error_text(code))
    abi.check(code, what)


def bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round float32 to bfloat16 bits, to nearest even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """bfloat16 bits as float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True, slots=True)
class Delivered:
    """What a dispatch delivered, views of the region: rows until combine, all else until dispatch.

    Attributes:
        rows: [rows of room, row elements] in the dispatch dtype (bf16 and fp8 as unsigned ints).
            masked: slot s has its rows from s * room on.
        ids: int32 [id rows, topk], local slot or -1; id rows are the rows above, or in the layouts
            by expert the rows as sent.
        weights: float32 [id rows, topk].
        counts: int32 [slots], rows per local slot.
        offsets: int32 [slots + 1] in the contiguous layout, else None.
        places: int32 [id rows, topk], row of each pair in the layouts by expert, else None.
        row_slots: int32 [rows of room] in the contiguous layout, -1 = padding, else None.
        scales: uint8 [rows of room, scale bytes], or uint32 [runs, columns, lead] in the scale
            layouts that are column-major, or None.
        global_scale: float32 [max ranks], of nvfp4 rows by source.
        out: where expert outputs go, in the combine dtype (bf16 where that is fp8).
        arrived: rows that arrived.
        tokens: per source rank, its tokens.
        lost: bool [tokens], True where this rank's own token needed a lost expert.
    """

    rows: npt.NDArray[Any]
    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    counts: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int32] | None
    places: npt.NDArray[np.int32] | None
    row_slots: npt.NDArray[np.int32] | None
    scales: npt.NDArray[Any] | None
    global_scale: npt.NDArray[np.float32]
    out: npt.NDArray[Any]
    arrived: int
    tokens: list[int]
    lost: npt.NDArray[np.bool_]


def view(address: int | None, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    """The array at an address of a mapped region; an empty one where there is nothing."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if not size or address is None:
        return np.empty(shape, dtype)
    buffer = (ctypes.c_char * size).from_address(address)
    return np.frombuffer(buffer, dtype).reshape(shape)


class RawSession:
    """One rank's session. Not thread-safe, but each thread may hold a session of its own."""

    def __init__(self, socket_path: str, ticket: str, timeout_ms: int = 60_000) -> None:
        self._api = abi.api()
        handle = ctypes.c_void_p()
        abi.check(
            self._api.ep_session_open(
                socket_path.encode(), ticket.encode(), timeout_ms, ctypes.byref(handle)
            ),
            "opening a session",
        )
        self._handle: ctypes.c_void_p | None = handle
        self.geometry = abi.Geometry()
        self._api.ep_session_geometry(handle, ctypes.byref(self.geometry))
        self.info = abi.StepInfo()
        self._lost: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)

    def close(self) -> None:
        """Give the seat back. Closing twice is fine."""
        if self._handle is not None:
            self._api.ep_session_close(self._handle)
            self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def status(self) -> abi.Status:
        """A snapshot of the rank's header."""
        status = abi.Status()
        self._api.ep_session_status(self._handle, ctypes.byref(status))
        return status

    def begin(self, tokens: int = 0, timeout_ms: int = 0) -> abi.StepInfo:
        """Pass the step barrier; returns what it decided."""
        check(
            self._api.ep_step_begin(self._handle, tokens, timeout_ms, ctypes.byref(self.info)),
            "",
        )
        return self.info

    def end(self) -> bool:
        """End the step; True when it is complete."""
        complete = ctypes.c_uint32()
        check(self._api.ep_step_end(self._handle, ctypes.byref(complete)), "")
        return bool(complete.value)

    def tear(self) -> None:
        """Tear the step for all ranks."""
        check(self._api.ep_step_tear(self._handle), "")

    def slots(self, epoch: int) -> npt.NDArray[np.int32]:
        """int32 [layers, max_ranks, slots]: which expert each slot holds in that view."""
        g = self.geometry
        table = np.empty((g.layers, g.max_ranks, g.slots), np.int32)
        check(self._api.ep_session_slots(self._handle, epoch, table.ctypes.data), "")
        return table

    def loads(self) -> npt.NDArray[np.uint64]:
        """uint64 [layers, experts]: tokens routed by this rank in complete steps."""
        table = np.empty((self.geometry.layers, self.geometry.experts), np.uint64)
        check(self._api.ep_session_loads(self._handle, table.ctypes.data), "")
        return table

    def dispatch_send(
        self,
        exchange: int,
        layer: int,
        x: npt.NDArray[Any],
        ids: npt.NDArray[Any],
        weights: npt.NDArray[np.float32],
        *,
        x_dtype: int = abi.Dtype.FP32,
        channel: int = 0,
    ) -> None:
        """Hand over x [tokens, hidden], ids [tokens, topk] (int32 or int64) and weights."""
        x, ids = np.ascontiguousarray(x), np.ascontiguousarray(ids)
        weights = np.ascontiguousarray(weights, np.float32)
        self._lost = np.zeros(len(x), np.uint8)
        check(
            self._api.ep_dispatch_send(
                self._handle,
                exchange,
                channel,
                layer,
                x.ctypes.data,
                x_dtype,
                ids.ctypes.data,
                ids.itemsize,
                weights.ctypes.data,
                len(x),
            ),
            "",
        )

    def dispatch_send_rows(
        self,
        exchange: int,
        layer: int,
        rows: abi.Rows,
        ids: npt.NDArray[Any],
        weights: npt.NDArray[np.float32],
        *,
        channel: int = 0,
    ) -> None:
        """`dispatch_send` of rows that are quantised already, or with a global scale.

        `rows` holds addresses; what they point to has been read when this returns.
        """
        ids, weights = np.ascontiguousarray(ids), np.ascontiguousarray(weights, np.float32)
        self._lost = np.zeros(len(ids), np.uint8)
        check(
            self._api.ep_dispatch_send_rows(
                self._handle,
                exchange,
                channel,
                layer,
                ctypes.byref(rows),
                ids.ctypes.data,
                ids.itemsize,
                weights.ctypes.data,
                len(ids),
            ),
            "",
        )

    def dispatch_recv(self, exchange: int, *, channel: int = 0) -> Delivered:
        """Wait for the rows of every member."""
        got = abi.Received()
        check(
            self._api.ep_dispatch_recv(
                self._handle, exchange, channel, ctypes.byref(got), self._lost.ctypes.data
            ),
            "",
        )
        return self._delivered(exchange, got)

    def _delivered(self, exchange: int, got: abi.Received) -> Delivered:
        g, spec = self.geometry, self.geometry.exchange[exchange]
        room, ids, slots = got.rows_count, got.id_rows, g.slots
        elements = g.hidden // 2 if got.row_dtype == abi.Dtype.NVFP4 else g.hidden
        routed = spec.layout in (abi.RowLayout.ROUTED, abi.RowLayout.ARRIVAL)
        per_pair = routed and spec.reduce == abi.Reduce.PER_EXPERT
        out_shape = (room, g.topk, g.hidden) if per_pair else (room, g.hidden)

        def table(pointer: Any, shape: tuple[int, ...], dtype: Any) -> Any:
            address = ctypes.cast(pointer, ctypes.c_void_p).value
            return None if address is None else view(address, shape, dtype)

        return Delivered(
            rows=view(got.rows, (room, elements), ROW_DTYPES[got.row_dtype]),
            ids=table(got.ids, (ids, g.topk), np.int32),
            weights=table(got.weights, (ids, g.topk), np.float32),
            counts=table(got.slot_counts, (slots,), np.int32),
            offsets=table(got.slot_offsets, (slots + 1,), np.int32),
            places=table(got.places, (ids, g.topk), np.int32),
            row_slots=table(got.row_slots, (room,), np.int32),
            scales=self._scales(exchange, got),
            global_scale=np.array(got.global_scale[: g.max_ranks], np.float32),
            out=view(got.out, out_shape, ROW_DTYPES[got.out_dtype]),
            arrived=got.arrived,
            tokens=list(got.tokens[: g.max_ranks]),
            lost=self._lost.astype(bool),
        )

    def _scales(self, exchange: int, got: abi.Received) -> npt.NDArray[Any] | None:
        if not got.scales:
            return None
        g = self.geometry
        if got.scale_lead:
            masked = g.exchange[exchange].layout == abi.RowLayout.MASKED
            shape = (g.slots if masked else 1, got.scale_columns, got.scale_lead)
            return view(got.scales, shape, np.uint32)
        width = scale_bytes(got.row_dtype, g.hidden)
        return view(got.scales, (got.rows_count, width), np.uint8)

    def dispatch(
        self,
        exchange: int,
        layer: int,
        x: npt.NDArray[Any],
        ids: npt.NDArray[Any],
        weights: npt.NDArray[np.float32],
        *,
        x_dtype: int = abi.Dtype.FP32,
        channel: int = 0,
    ) -> Delivered:
        """Both halves of a dispatch."""
        self.dispatch_send(exchange, layer, x, ids, weights, x_dtype=x_dtype, channel=channel)
        return self.dispatch_recv(exchange, channel=channel)

    def combine_send(self, exchange: int, *, channel: int = 0) -> None:
        """Say that the outputs are written."""
        check(self._api.ep_combine_send(self._handle, exchange, channel), "")

    def combine_recv(self, exchange: int, tokens: int, *, channel: int = 0) -> npt.NDArray[Any]:
        """Wait for every member's outputs and sum them: float32 [tokens, hidden]."""
        out = np.empty((tokens, self.geometry.hidden), np.float32)
        check(
            self._api.ep_combine_recv(
                self._handle, exchange, channel, out.ctypes.data, abi.Dtype.FP32
            ),
            "",
        )
        return out

    def combine(self, exchange: int, tokens: int, *, channel: int = 0) -> npt.NDArray[Any]:
        """Both halves of a combine: float32 [tokens, hidden]."""
        out = np.empty((tokens, self.geometry.hidden), np.float32)
        check(
            self._api.ep_combine(self._handle, exchange, channel, out.ctypes.data, abi.Dtype.FP32),
            "",
        )
        return out
