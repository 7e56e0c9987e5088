"""What the GPU bench times, as far as it needs no GPU: groups, geometries, bytes, tables."""

import pytest
import torch

from elasticep.bench.exchange_cuda_cases import (
    MODELS,
    VARIANTS,
    Variant,
    groups,
    model_geometry,
    remote_bytes,
)
from elasticep.bench.recovery_cuda import Line, group, table
from elasticep.native import abi, region


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("model", MODELS)
def test_every_group_of_variants_is_one_that_can_be_made(model: str, ranks: int) -> None:
    together = groups([v.name for v in VARIANTS])
    assert [v for some in together for v in some] == list(VARIANTS)
    for some in together:
        raw = model_geometry(*MODELS[model], ranks=ranks, variants=some)
        geometry = abi.Geometry.from_buffer_copy(raw)
        assert geometry.exchanges == 2 * len(some)
        assert region.layout(geometry).data_bytes > 0


def test_remote_bytes_count_rows_out_and_back_of_the_first_rank() -> None:
    # Four experts on two ranks: tokens that stay, that leave once, and that leave for two experts.
    ids = torch.tensor([[0, 1], [0, 2], [2, 3]])
    hidden = 128
    row = hidden * 2

    def count(variant: Variant) -> int:
        return remote_bytes(variant, ids, experts=4, ranks=2, hidden=hidden)

    by_name = {v.name: v for v in VARIANTS}
    assert count(by_name["ROUTED"]) == 2 * row + 2 * row
    assert count(by_name["ROUTED fp8"]) == 2 * (hidden + 4) + 2 * row
    assert count(by_name["ALLGATHER"]) == 3 * row + 2 * row
    assert count(by_name["LOW_LATENCY"]) == 3 * row + 3 * row


def test_the_recovery_table_has_a_line_per_number_of_kills() -> None:
    region.layout(abi.Geometry.from_buffer_copy(group(8)))
    lines = [
        Line(8, k, back_ms=k + i, complete_ms=2.0 * k + i, tries=1)
        for k in (1, 2)
        for i in range(3)
    ]
    assert table(lines).splitlines()[2:] == [
        "| 8 | 1 | 3 | 2.00 | 3.00 |",
        "| 8 | 2 | 3 | 3.00 | 5.00 |",
    ]
