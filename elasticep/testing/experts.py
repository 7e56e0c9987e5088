"""Experts that multiply, for tests of the exchange: their outputs in every layout.

Expert e of a layer multiplies each element by `factors[e]`, in fp32. So every bit of a token's
result can be predicted from the order in which the exchange rounds and adds.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticep.native import abi
from elasticep.testing import reference
from elasticep.testing.raw import Delivered, bf16, from_bf16, scale_bytes
from elasticep.testing.reference import Floats


def narrow(values: Floats, dtype: int) -> npt.NDArray[Any]:
    """float32 rounded to fp32, fp16 or bf16 (as bits)."""
    if dtype == abi.Dtype.BF16:
        return bf16(values)
    return values.astype(np.float16) if dtype == abi.Dtype.FP16 else values


def widen(values: npt.NDArray[Any], dtype: int) -> Floats:
    """The inverse of `narrow`, exact."""
    return from_bf16(values) if dtype == abi.Dtype.BF16 else values.astype(np.float32)


@dataclass(frozen=True, slots=True)
class Wire:
    """Rows as they travel under one exchange, and back.

    Attributes:
        dtype: of the rows.
        powers: fp8 scales are powers of two.
        global_scale: of nvfp4.
    """

    dtype: int
    powers: bool = False
    global_scale: float = 1.0

    @classmethod
    def of(cls, spec: abi.ExchangeConfig, global_scale: float = 1.0) -> "Wire":
        """The format of an exchange's rows."""
        packed = spec.scale_layout == abi.ScaleLayout.PACKED
        return cls(spec.dispatch_dtype, packed, global_scale)

    def pack(self, x: Floats) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint8] | None]:
        """Rows [n, ...] in the format and their scales uint8 [n, scale bytes], or None."""
        if self.dtype not in reference.BLOCK:
            return narrow(x, self.dtype), None
        return reference.quantise(self.dtype, x, powers=self.powers, global_scale=self.global_scale)

    def unpack(self, rows: npt.NDArray[Any], scales: npt.NDArray[np.uint8] | None) -> Floats:
        """float32 of what `pack` gave."""
        if scales is None:
            return widen(rows, self.dtype)
        return reference.dequantise(self.dtype, rows, scales, global_scale=self.global_scale)


def output_dtype(spec: abi.ExchangeConfig) -> int:
    """What the expert kernel writes."""
    return abi.Dtype.BF16 if spec.combine_dtype == abi.Dtype.FP8 else int(spec.combine_dtype)


def by_expert(spec: abi.ExchangeConfig) -> bool:
    """Whether rows come one per (token, expert)."""
    return spec.layout in (abi.RowLayout.CONTIGUOUS, abi.RowLayout.MASKED)


def plain_scales(
    got: Delivered, spec: abi.ExchangeConfig, hidden: int
) -> npt.NDArray[np.uint8] | None:
    """Scales as on the wire, uint8 [rows, scale bytes], whatever the scale layout."""
    if got.scales is None or spec.scale_layout == abi.ScaleLayout.ROWS:
        return got.scales
    width, runs = scale_bytes(spec.dispatch_dtype, hidden), len(got.scales)
    rows = got.scales.transpose(0, 2, 1)[:, : len(got.rows) // runs]
    flat = np.ascontiguousarray(rows.reshape(len(got.rows), -1))
    if spec.scale_layout == abi.ScaleLayout.PACKED and spec.dispatch_dtype == abi.Dtype.FP8:
        power = flat.view(np.uint8).astype(np.uint32) << 23
        return np.ascontiguousarray(power[:, : width // 4]).view(np.uint8)
    return flat.view(np.uint8)[:, :width]


def compute(
    got: Delivered, spec: abi.ExchangeConfig, wire: Wire, factors: Floats, hidden: int
) -> None:
    """Be the expert kernel: fill `got.out` for every row that came, and nothing else.

    `factors` is float32 [slots], of the experts in this rank's slots.
    """
    out_dtype = output_dtype(spec)
    scales = plain_scales(got, spec, hidden)

    def rows_at(rows: npt.NDArray[np.intp]) -> Floats:
        return wire.unpack(got.rows[rows], None if scales is None else scales[rows])

    if by_expert(spec):
        room = len(got.rows) // len(got.counts)
        for slot, count in enumerate(got.counts):
            first = slot * room if got.offsets is None else int(got.offsets[slot])
            rows = np.arange(first, first + count)
            got.out[rows] = narrow(rows_at(rows) * factors[slot], out_dtype)
        return
    rows, choice = np.nonzero(got.ids >= 0)
    outputs = rows_at(rows) * factors[got.ids[rows, choice], None]
    if spec.reduce == abi.Reduce.PER_EXPERT:
        got.out[rows, choice] = narrow(outputs, out_dtype)
        return
    here = np.unique(rows)
    sums = np.zeros((len(here), hidden), np.float32)
    for k in range(got.ids.shape[1]):
        mine = choice == k
        at = np.searchsorted(here, rows[mine])
        sums[at] += got.weights[rows[mine], k, None] * outputs[mine]
    got.out[here] = narrow(sums, out_dtype)


def _travelled(outputs: Floats, spec: abi.ExchangeConfig) -> Floats:
    """Outputs [n, hidden] after combine's wire format."""
    if spec.combine_dtype != abi.Dtype.FP8:
        return widen(narrow(outputs, spec.combine_dtype), spec.combine_dtype)
    return reference.dequantise(abi.Dtype.FP8, *reference.quantise(abi.Dtype.FP8, outputs))


def expected(
    x: Floats,
    ids: npt.NDArray[np.int32],
    weights: Floats,
    ranks: npt.NDArray[np.int32],
    spec: abi.ExchangeConfig,
    wire: Wire,
    factors: Floats,
) -> Floats:
    """The result of one exchange for a rank's tokens, to the bit: float32 [tokens, hidden].

    `x` [tokens, hidden] is what the rank brings, `ranks` int32 [tokens, topk] comes from
    `reference.serve`, `factors` is float32 [experts].
    """
    rows = wire.unpack(*wire.pack(x)) if len(x) else x
    out_dtype = output_dtype(spec)
    topk = ids.shape[1]
    served = ranks >= 0
    factor = np.where(served, factors[np.where(served, ids, 0)], np.float32(0))
    total = np.zeros_like(x)
    if not len(x):
        return total

    def written(values: Floats) -> Floats:
        return widen(narrow(values, out_dtype), out_dtype)

    def weighted(k: int, mine: npt.NDArray[np.bool_], rounded: bool) -> Floats:
        outputs = rows[mine] * factor[mine, k, None]
        return weights[mine, k, None] * (written(outputs) if rounded else outputs)

    if spec.reduce == abi.Reduce.PER_EXPERT:
        for k in range(topk):
            mine = served[:, k]
            outputs = _travelled(written(rows[mine] * factor[mine, k, None]), spec)
            total[mine] += weights[mine, k, None] * outputs
        return total
    separate = spec.copies == abi.Copies.PER_EXPERT and not by_expert(spec)
    for rank in np.unique(ranks[served]):
        part = np.zeros_like(x)
        for k in range(topk):
            mine = ranks[:, k] == rank
            part[mine] += weighted(k, mine, by_expert(spec))
            if separate:  # a row of its own travels back for each expert
                total[mine] += _travelled(written(part[mine]), spec)
                part[mine] = 0
        if not separate:
            owing = (ranks == rank).any(axis=1)
            sums = part[owing] if by_expert(spec) else written(part[owing])
            total[owing] += _travelled(sums, spec)
    return total
