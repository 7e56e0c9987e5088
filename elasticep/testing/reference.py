"""Plain references for the exchange: quantisers, routing of tokens to copies, a dense layer.

Written for clarity, in numpy, from the definitions and not from the native code; everything is
exact enough to be compared bit for bit.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from elasticep.native import abi

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

BLOCK: Final = {abi.Dtype.FP8: 128, abi.Dtype.MXFP8: 32, abi.Dtype.NVFP4: 16}
_E4M3_NAN: Final = 0x7F
_SMALLEST_SCALE: Final = np.float32(2.0**-126)


def _e4m3_table() -> npt.NDArray[np.float64]:
    """The finite values of e4m3 from 0 up, in the order of their codes 0 to 0x7e."""
    codes = np.arange(0x7F)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))


E4M3: Final = _e4m3_table()
E2M1: Final = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def encode(values: Floats, table: npt.NDArray[np.float64], sign_bit: int) -> Bytes:
    """Codes of the nearest entries of `table`; of two equally near the even code; NaN is code 0x7f.

    Args:
        values: any shape, float32.
        table: ascending values of the codes 0, 1, ...; what is beyond the last becomes the last.
        sign_bit: set in the code of values whose sign bit is set.
    """
    size = np.abs(values.astype(np.float64))
    nan = np.isnan(size)
    size = np.minimum(np.where(nan, 0.0, size), table[-1])
    above = np.clip(np.searchsorted(table, size), 1, len(table) - 1)
    low, high = table[above - 1], table[above]
    up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    code = np.where(nan, _E4M3_NAN, np.where(up, above, above - 1))
    return (code | np.where(np.signbit(values), sign_bit, 0)).astype(np.uint8)


def decode(codes: Bytes, table: npt.NDArray[np.float64], sign_bit: int) -> Floats:
    """Values of codes; a code without an entry in `table` is NaN."""
    index = codes & (sign_bit - 1)
    values = np.append(table, np.full(sign_bit - len(table), np.nan))[index]
    signed: Floats = np.where(codes & sign_bit, -values, values).astype(np.float32)
    return signed


def _power_above(scale: Floats) -> Floats:
    mantissa, exponent = np.frexp(scale)
    power = np.ldexp(np.float32(1.0), exponent - (mantissa == 0.5))
    finite: Floats = np.where(np.isinf(scale), scale, power).astype(np.float32)
    return finite


def quantise(
    dtype: int, x: Floats, *, powers: bool = False, global_scale: float = 1.0
) -> tuple[Bytes, Bytes]:
    """Rows in a quantised wire format, as dispatch makes them.

    Args:
        dtype: FP8, MXFP8 or NVFP4.
        x: float32 [rows, hidden].
        powers: scales of fp8 are powers of two.
        global_scale: of nvfp4.

    Returns:
        Elements uint8 [rows, hidden] (nvfp4: two per byte, the first in the low half) and scales
        uint8 [rows, scale bytes].
    """
    rows, hidden = x.shape
    block = BLOCK[abi.Dtype(dtype)]
    blocks = x.reshape(rows, hidden // block, block)
    size = np.abs(blocks)
    most = np.where(np.isnan(size), np.float32(0), size).max(axis=2)
    with np.errstate(all="ignore"):
        if dtype == abi.Dtype.NVFP4:
            finite: npt.NDArray[np.bool_] = np.asarray(np.isfinite(size).all(axis=2))
            scale = np.where(most > 0, most / np.float32(6) / np.float32(global_scale), 1)
            scales = np.where(finite, encode(scale.astype(np.float32), E4M3, 0x80), _E4M3_NAN)
            full = decode(scales.astype(np.uint8), E4M3, 0x80) * np.float32(global_scale)
            by = np.where(finite & (full > 0), np.float32(1) / full, np.float32(0))
            kept = np.where(finite[:, :, None], blocks, np.float32(0))
            codes = encode((kept * by[:, :, None]).astype(np.float32), E2M1, 8)
            pairs = codes.reshape(rows, hidden // 2, 2)
            packed: Bytes = (pairs[:, :, 0] | pairs[:, :, 1] << 4).astype(np.uint8)
            return packed, scales.astype(np.uint8)
        scale = most / np.float32(448)
        scale = np.where(scale >= _SMALLEST_SCALE, scale, np.float32(1)).astype(np.float32)
        if powers or dtype == abi.Dtype.MXFP8:
            scale = _power_above(scale)
        scaled = (blocks * (np.float32(1) / scale)[:, :, None]).astype(np.float32)
    codes = encode(scaled, E4M3, 0x80).reshape(rows, hidden)
    if dtype == abi.Dtype.MXFP8:
        return codes, (scale.view(np.uint32) >> 23).astype(np.uint8)
    return codes, scale.view(np.uint8).reshape(rows, hidden // block * 4)


def dequantise(dtype: int, elements: Bytes, scales: Bytes, *, global_scale: float = 1.0) -> Floats:
    """float32 [rows, hidden] of what `quantise` gave."""
    rows = len(elements)
    if dtype == abi.Dtype.NVFP4:
        both = np.stack([elements & 15, elements >> 4], axis=2)
        blocks = decode(both, E2M1, 8).reshape(rows, scales.shape[1], 16)
        scale = decode(scales, E4M3, 0x80) * np.float32(global_scale)
    else:
        block = BLOCK[abi.Dtype(dtype)]
        blocks = decode(elements, E4M3, 0x80).reshape(rows, elements.shape[1] // block, block)
        if dtype == abi.Dtype.FP8:
            scale = np.ascontiguousarray(scales).view(np.float32)
        else:
            exponent = scales.astype(np.int32)
            scale = np.ldexp(np.float32(1), np.minimum(exponent, 254) - 127)
            scale = np.where(exponent == 255, np.float32(np.nan), scale)
    with np.errstate(all="ignore"):  # NaN is meant, and what rounds beyond fp32
        product: Floats = (blocks * scale[:, :, None]).astype(np.float32)
    return product.reshape(rows, product.shape[1] * product.shape[2])


# ---- routing


def split_points(tokens: int, rank: int, layer: int, step: int) -> npt.NDArray[np.int64]:
    """Where each token of a rank falls among an expert's copies: int64 [tokens] in [0, 65536)."""
    mask = 2**64 - 1
    shift = (rank << 40) ^ (layer << 20) ^ step
    shift = (shift ^ shift >> 31) * 0x9E3779B97F4A7C15 & mask
    shift = (shift ^ shift >> 29) * 0xBF58476D1CE4E5B9 & mask
    golden = np.arange(tokens, dtype=np.uint64) * np.uint64(2654435769)
    point = (golden + np.uint64(shift >> 32) & np.uint64(0xFFFFFFFF)) >> np.uint64(16)
    return point.astype(np.int64)


def serve(
    ids: npt.NDArray[np.int32],
    slot_expert: npt.NDArray[np.int32],
    slot_weight: npt.NDArray[np.uint32],
    points: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Which rank and slot serve each of a rank's choices.

    Args:
        ids: int32 [tokens, topk], logical experts or -1.
        slot_expert: int32 [max_ranks, slots] of the layer; copies on ranks that are no members
            have weight 0.
        slot_weight: uint32 of the same shape, 65536 per expert in all.
        points: of `split_points`.

    Returns:
        int32 [tokens, topk] ranks and slots, -1 where nobody serves the choice.
    """
    ranks, slots = np.full(ids.shape, -1, np.int32), np.full(ids.shape, -1, np.int32)
    for expert in np.unique(ids[ids >= 0]):
        places = [(r, s) for r, s in np.argwhere(slot_expert == expert) if slot_weight[r, s]]
        if not places:
            continue
        ends = np.cumsum([int(slot_weight[r, s]) for r, s in places])
        tokens, choice = np.nonzero(ids == expert)
        copy = np.searchsorted(ends, points[tokens], side="right")
        ranks[tokens, choice] = np.array(places)[copy, 0]
        slots[tokens, choice] = np.array(places)[copy, 1]
    return ranks, slots


# ---- results


def dense(
    x: Floats,
    ids: npt.NDArray[np.int32],
    weights: Floats,
    expert: Callable[[int, npt.NDArray[np.float64]], npt.NDArray[np.float64]],
) -> npt.NDArray[np.float64]:
    """A MoE layer on one machine in float64: the weighted sum of each token's experts.

    Args:
        x: [tokens, hidden].
        ids: [tokens, topk], -1 = none.
        weights: [tokens, topk].
        expert: result of an expert for rows [n, hidden].
    """
    result = np.zeros(x.shape, np.float64)
    for number in np.unique(ids[ids >= 0]):
        tokens, choice = np.nonzero(ids == number)
        outputs = expert(int(number), x[tokens].astype(np.float64))
        np.add.at(result, tokens, weights[tokens, choice, None].astype(np.float64) * outputs)
    return result
