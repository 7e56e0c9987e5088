"""The vector code of every instruction set against the plain quantisers, bit for bit."""

import ctypes

import numpy as np
import numpy.typing as npt
import pytest

from elasticep.errors import ConfigError
from elasticep.native import abi
from elasticep.testing import reference
from elasticep.testing.raw import bf16, from_bf16, scale_bytes

HIDDEN = 512
FORMATS = (abi.Dtype.FP8, abi.Dtype.MXFP8, abi.Dtype.NVFP4)
LEVELS = range(abi.api().ep_vector_level() + 1)


def payload_bytes(dtype: int) -> int:
    return HIDDEN // 2 if dtype == abi.Dtype.NVFP4 else HIDDEN


def quantise(
    level: int,
    dtype: int,
    x: npt.NDArray[np.generic],
    *,
    x_dtype: int = abi.Dtype.FP32,
    powers: bool = False,
    global_scale: float = 1.0,
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    x = np.ascontiguousarray(x)
    out = np.zeros((len(x), payload_bytes(dtype)), np.uint8)
    scales = np.zeros((len(x), scale_bytes(dtype, HIDDEN)), np.uint8)
    code = abi.api().ep_quantise(
        level, dtype, powers, x.ctypes.data, x_dtype, len(x), HIDDEN, global_scale,
        out.ctypes.data, scales.ctypes.data,
    )  # fmt: skip
    abi.check(code, "quantise")
    return out, scales


def dequantise(
    level: int,
    dtype: int,
    elements: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.uint8],
    by: float,
) -> npt.NDArray[np.float32]:
    out = np.zeros((len(elements), HIDDEN), np.float32)
    code = abi.api().ep_dequantise(
        level, dtype, elements.ctypes.data, scales.ctypes.data, len(elements), HIDDEN, by,
        out.ctypes.data,
    )  # fmt: skip
    abi.check(code, "dequantise")
    return out


def hard_rows() -> npt.NDArray[np.float32]:
    """Ordinary values, all magnitudes, ties, tiny and huge blocks, NaN and infinity."""
    rng = np.random.default_rng(1)
    rows = [
        rng.standard_normal((20, HIDDEN)),
        rng.standard_normal((20, HIDDEN)) * 10.0 ** rng.integers(-38, 38, (20, 1)),
        rng.standard_normal((10, HIDDEN)) * 10.0 ** rng.integers(-12, 12, (10, HIDDEN)),
        rng.integers(-64, 65, (10, HIDDEN)) / 16.0,
        np.zeros((1, HIDDEN)),
        np.full((1, HIDDEN), -0.0),
        np.full((1, HIDDEN), 1e-40),
        rng.integers(0, 4, (2, HIDDEN)) * 1e-45,
        np.full((1, HIDDEN), 3.4e38),
        np.where(rng.random((4, HIDDEN)) < 0.01, np.nan, rng.standard_normal((4, HIDDEN))),
        np.where(rng.random((4, HIDDEN)) < 0.01, -np.inf, rng.standard_normal((4, HIDDEN))),
    ]
    # Every tie of e4m3 and of e2m1, as they are after division by the scale.
    ties = (reference.E4M3[:-1] + reference.E4M3[1:]) / 2
    tied = np.zeros((4, 4, 128))
    tied[..., :126] = ties
    tied[..., 127] = 448
    coarse = np.tile(np.r_[(reference.E2M1[:-1] + reference.E2M1[1:]) / 2, 6.0], HIDDEN // 8)
    rows += [tied.reshape(4, HIDDEN), -tied.reshape(4, HIDDEN), coarse[None], -coarse[None]]
    return np.concatenate(rows).astype(np.float32)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize("global_scale", [1.0, 0.003])
def test_vector_code_gives_the_bits_of_the_reference(
    dtype: abi.Dtype, level: int, powers: bool, global_scale: float
) -> None:
    x = hard_rows()
    ours = quantise(level, dtype, x, powers=powers, global_scale=global_scale)
    plain = reference.quantise(dtype, x, powers=powers, global_scale=global_scale)
    np.testing.assert_array_equal(ours[1], plain[1])
    np.testing.assert_array_equal(ours[0], plain[0])
    back = dequantise(level, dtype, *ours, by=global_scale)
    expected = reference.dequantise(dtype, *plain, global_scale=global_scale)
    np.testing.assert_array_equal(back, expected)


@pytest.mark.parametrize("level", LEVELS)
def test_every_code_is_read_as_the_reference_reads_it(level: int) -> None:
    codes = np.resize(np.arange(256, dtype=np.uint8), (1, HIDDEN))
    for dtype in FORMATS:
        elements = codes[:, : payload_bytes(dtype)]
        scales = np.resize(np.arange(256, dtype=np.uint8), (1, scale_bytes(dtype, HIDDEN)))
        ours = dequantise(level, dtype, np.ascontiguousarray(elements), scales, 1.0)
        np.testing.assert_array_equal(ours, reference.dequantise(dtype, elements, scales))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("level", LEVELS)
def test_half_rows_are_quantised_like_their_fp32_values(dtype: abi.Dtype, level: int) -> None:
    x = np.random.default_rng(2).standard_normal((4, HIDDEN)).astype(np.float32)
    for x_dtype, narrow, wide in (
        (abi.Dtype.FP16, x.astype(np.float16), x.astype(np.float16).astype(np.float32)),
        (abi.Dtype.BF16, bf16(x), from_bf16(bf16(x))),
    ):
        ours = quantise(level, dtype, narrow, x_dtype=x_dtype)
        for have, want in zip(ours, reference.quantise(dtype, wide), strict=True):
            np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize(
    ("dtype", "bound"),
    # half a step of the mantissa, and for UE8M0 and e4m3 scales what these round
    [(abi.Dtype.FP8, 2.0**-4), (abi.Dtype.MXFP8, 2.0**-4), (abi.Dtype.NVFP4, 0.2)],
)
def test_error_is_within_the_format(dtype: abi.Dtype, bound: float) -> None:
    x = np.random.default_rng(3).standard_normal((64, HIDDEN)).astype(np.float32)
    back = dequantise(LEVELS[-1], dtype, *quantise(LEVELS[-1], dtype, x), by=1.0)
    block = reference.BLOCK[dtype]
    most = np.abs(x).reshape(64, -1, block).max(axis=2).repeat(block, axis=1)
    assert (np.abs(back - x) <= bound * np.maximum(np.abs(x), most / 4)).all()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_block(dtype: abi.Dtype, bad: float) -> None:
    x = np.random.default_rng(4).standard_normal((3, HIDDEN)).astype(np.float32)
    clean = dequantise(LEVELS[-1], dtype, *quantise(LEVELS[-1], dtype, x), by=1.0)
    x[1, 200] = bad
    spoilt = dequantise(LEVELS[-1], dtype, *quantise(LEVELS[-1], dtype, x), by=1.0)
    assert np.isnan(spoilt[1, 200])
    block = reference.BLOCK[dtype]
    first = 200 // block * block
    same = np.ones(x.shape, bool)
    same[1, first : first + block] = False
    np.testing.assert_array_equal(spoilt[same], clean[same])


def test_wrong_arguments_are_named() -> None:
    x = np.zeros((1, HIDDEN), np.float32)
    with pytest.raises(ConfigError, match="has no scales"):
        quantise(0, abi.Dtype.BF16, x)
    with pytest.raises(ConfigError, match="vector level 9"):
        quantise(9, abi.Dtype.FP8, x)
    with pytest.raises(ConfigError, match="above 0 and finite"):
        quantise(0, abi.Dtype.NVFP4, x, global_scale=0.0)
    out = (ctypes.c_uint8 * 64)()
    code = abi.api().ep_quantise(0, abi.Dtype.FP8, 0, x.ctypes.data, 0, 1, 60, 1.0, out, out)
    with pytest.raises(ConfigError, match="hidden is 60"):
        abi.check(code, "quantise")
