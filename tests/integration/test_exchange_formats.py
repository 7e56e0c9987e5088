"""What is not finite, and rows that are quantised already, in every format."""

from typing import Any

import numpy as np
import pytest

from elasticep.errors import ConfigError, TensorError
from elasticep.native import abi
from elasticep.testing import reference
from elasticep.testing.raw import RawSession
from elasticep.testing.small import CAP, LAYOUTS, all_layouts, exchange, geometry
from elasticep.testing.world import Batch, World, make_batch


@pytest.mark.parametrize("dtype", list(abi.Dtype))
def test_nan_stays_in_its_token(dtype: int) -> None:
    """In every format and layout, and a quantised row loses no more than the block."""
    ways = all_layouts(dispatch_dtype=dtype)
    ways += all_layouts(dispatch_dtype=dtype, combine_dtype=abi.Dtype.FP8)
    g = geometry(2, *ways)
    with World(g) as world:
        for number in range(len(ways)):
            brought = {r: make_batch(g, CAP, [number, r], none=0.0) for r in range(2)}
            brought[1].x[3, 7] = np.nan
            results, _ = world.round_trip(number, brought)
            assert np.isfinite(results[0]).all()
            rows = np.isnan(results[1]).any(axis=1)
            np.testing.assert_array_equal(rows, np.arange(CAP) == 3)
            assert np.isnan(results[1][3, 7])


@pytest.mark.parametrize("launch", list(abi.Launch))
@pytest.mark.parametrize("dtype", [abi.Dtype.FP8, abi.Dtype.MXFP8, abi.Dtype.NVFP4])
def test_rows_that_are_quantised_already_are_carried_as_they_are(dtype: int, launch: int) -> None:
    """Elements, scales and global scale arrive bit for bit, whatever they are."""
    g = geometry(2, *all_layouts(dispatch_dtype=dtype), launch=launch)
    factor = {0: 0.25, 1: 3.0}
    with World(g) as world:
        for number, layout in enumerate(LAYOUTS):
            brought = {r: make_batch(g, CAP, [number, r]) for r in range(2)}
            packed = {r: reference.quantise(dtype, b.x * 5) for r, b in brought.items()}

            def run(
                rank: int,
                session: RawSession,
                number: int = number,
                layout: int = layout,
                brought: dict[int, Batch] = brought,
                packed: Any = packed,
            ) -> None:
                b = brought[rank]
                elements, scales = (np.ascontiguousarray(part) for part in packed[rank])
                rows = abi.Rows(elements.ctypes.data, scales.ctypes.data, dtype, factor[rank])
                step = session.begin(CAP).step
                session.dispatch_send_rows(number, 0, rows, b.ids, b.weights)
                got = session.dispatch_recv(number)
                np.testing.assert_array_equal(got.global_scale, [0.25, 3.0])
                assert got.scales is not None
                for source in range(2):
                    ranks, _ = world.serve(brought[source], source, 0, step)
                    for token, choice in np.argwhere(ranks == rank):
                        row = sent = source * CAP + token
                        if got.places is not None:
                            row = got.places[sent, choice]
                        np.testing.assert_array_equal(got.rows[row], packed[source][0][token])
                        np.testing.assert_array_equal(got.scales[row], packed[source][1][token])
                world.compute(got, number, rank, 0)
                session.combine(number, CAP)
                assert session.end()

            world.each(run)


def test_quantised_rows_that_cannot_be_carried_are_refused() -> None:
    packed = exchange(
        layout=abi.RowLayout.MASKED,
        dispatch_dtype=abi.Dtype.FP8,
        scale_layout=abi.ScaleLayout.PACKED,
    )
    g = geometry(1, exchange(dispatch_dtype=abi.Dtype.FP8), packed)
    with World(g) as world:
        session, b = world.sessions[0], make_batch(g, 2, 1)
        elements, scales = reference.quantise(abi.Dtype.FP8, b.x)
        address = elements.ctypes.data
        session.begin(2)
        for number, rows, text in (
            (0, abi.Rows(address, None, abi.Dtype.FP8, 1.0), "without scales"),
            (0, abi.Rows(address, scales.ctypes.data, abi.Dtype.MXFP8, 1.0), "exchange's own"),
            (0, abi.Rows(address, scales.ctypes.data, abi.Dtype.FP8, -1.0), "global scale is -1"),
            (1, abi.Rows(address, scales.ctypes.data, abi.Dtype.FP8, 1.0), "not a power of two"),
        ):
            with pytest.raises((ConfigError, TensorError), match=text):
                session.dispatch_send_rows(number, 0, rows, b.ids, b.weights)
        assert session.end()
