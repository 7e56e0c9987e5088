"""What the client makes of every layout and format, and rows that are quantised already."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from elasticep.client.session import Session
from elasticep.errors import TensorError
from elasticep.geometry import GroupGeometry
from elasticep.group import GroupConfig, Launch
from elasticep.native import abi
from elasticep.native.convert import geometry_struct
from elasticep.spec import ExchangeSpec
from elasticep.testing import reference
from elasticep.testing.clients import attach_to, on_all
from elasticep.testing.local_group import LocalGroup, spread

torch = pytest.importorskip("torch")

EXPERTS, TOPK, HIDDEN, CAP, RANKS, SLOTS = 6, 2, 256, 9, 2, 3
EXCHANGES = {
    "masked": ExchangeSpec.preset(
        "EXPAND", max_tokens=CAP, dispatch_dtype="fp8", scale_layout="packed", masked_room=13
    ),
    "columns": ExchangeSpec.preset(
        "EXPAND_SYNC", max_tokens=CAP, dispatch_dtype="fp8", scale_layout="columns"
    ),
    "runs": ExchangeSpec.preset("EXPAND_SYNC", max_tokens=CAP, dispatch_dtype="nvfp4"),
    "exact": ExchangeSpec.preset("NORMAL", max_tokens=CAP, combine_dtype="fp8"),
    "replicated": ExchangeSpec.preset("ALLGATHER", max_tokens=CAP, replicated_input=True),
    "routed": ExchangeSpec.preset(
        "ROUTED", max_tokens=CAP, dispatch_dtype="mxfp8", reduce="per_expert"
    ),
}
CONFIG = GroupConfig(
    name="client",
    geometry=GroupGeometry(
        layers=1,
        experts=EXPERTS,
        topk=TOPK,
        hidden=HIDDEN,
        slots_per_rank=SLOTS,
        max_ranks=RANKS,
    ),
    exchanges=tuple(EXCHANGES.items()),
    initial_ranks=RANKS,
    launch=Launch.INLINE,
)


@pytest.fixture(scope="module")
def sessions() -> Iterator[list[Session]]:
    group = LocalGroup(geometry_struct(CONFIG))
    opened = [attach_to(group, CONFIG, rank) for rank in range(RANKS)]
    group.stage(1, 0, range(RANKS), spread(group.geometry, range(RANKS)))
    yield opened
    for session in opened:
        session.detach()
    group.close()


def batch(seed: int) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-8, 9, (CAP, HIDDEN), generator=generator).to(torch.bfloat16)
    x[:, ::16] = 12  # a maximum that every format scales to its own without rounding the rest much
    ids = torch.rand((CAP, EXPERTS), generator=generator).argsort(1)[:, :TOPK].contiguous()
    return x, ids, torch.full((CAP, TOPK), 0.5)


def wide(name: str, recv: Any) -> Any:
    """Rows of any format as fp32, by the reference."""
    wire = EXCHANGES[name].dispatch_dtype
    rows = recv.rows.reshape(-1, recv.rows.shape[-1])
    if not wire.quantised:
        return rows.float()
    scales = recv.scales
    if name == "masked":  # four exponents to a word, here two
        scales = scales.contiguous().view(torch.uint8).to(torch.int32) << 23
        scales = scales[..., :2].contiguous().view(torch.float32)
    flat = scales.contiguous().reshape(len(rows), -1).view(torch.uint8).numpy()
    packed = rows.view(torch.uint8).numpy()
    return torch.from_numpy(reference.dequantise(abi.Dtype[wire.name], packed, flat))


def experts(name: str, recv: Any) -> None:
    """Every expert passes its rows on; weights are ours where rows carry their routing."""
    spec, rows = EXCHANGES[name], wide(name, recv)
    if spec.by_expert:
        recv.out.view(-1, HIDDEN)[:] = rows.to(recv.out.dtype)
    elif spec.reduce == "per_expert":
        recv.out[:] = rows.to(recv.out.dtype)[:, None]
    else:
        recv.out[:] = (rows * recv.weights.sum(1, keepdim=True)).to(recv.out.dtype)


@pytest.mark.parametrize("name", EXCHANGES)
def test_received_tensors_and_result(sessions: list[Session], name: str) -> None:
    shapes = {
        "masked": ((SLOTS, 13, HIDDEN), (SLOTS, 13, 1)),
        "routed": ((RANKS * CAP, HIDDEN), (RANKS * CAP, HIDDEN // 32)),
        "replicated": ((CAP, HIDDEN), None),
    }

    def work(session: Session) -> Any:
        exchange = session.exchange(name)
        x, ids, weights = batch(0 if name == "replicated" else session.rank)
        with session.step(len(x)) as step:
            recv = exchange.dispatch(0, x, ids, weights)
            if name in shapes:
                rows, scales = shapes[name]
                assert tuple(recv.rows.shape) == rows
                assert (None if recv.scales is None else tuple(recv.scales.shape)) == scales
            if name == "exact":
                assert len(recv.rows) == len(recv.ids) == recv.arrived
                assert (recv.ids >= 0).any(1).all()
            if recv.places is not None:
                assert (recv.places >= 0).sum() == recv.counts.sum()
            if recv.offsets is not None:
                assert len(recv.rows) == recv.offsets[-1]
                assert ((recv.row_slots >= 0).sum() == recv.counts.sum()).item()
            if name == "columns":
                assert recv.scales.stride()[0] == 1
                assert recv.scales.stride()[1] % 4 == 0
            experts(name, recv)
            out = exchange.combine(0, recv)
        assert step.complete
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), x.float(), rtol=0.13, atol=1.0)
        return out

    on_all(sessions, work)


@pytest.mark.parametrize("name", ["columns", "runs", "routed"])
def test_rows_that_are_quantised_already(sessions: list[Session], name: str) -> None:
    """The same rows quantised by the engine give the same result to the bit."""
    spec = EXCHANGES[name]

    def work(session: Session) -> None:
        exchange = session.exchange(name)
        x, ids, weights = batch(session.rank)
        kind = abi.Dtype[spec.dispatch_dtype.name]
        elements, scales = map(torch.from_numpy, reference.quantise(kind, x.float().numpy()))
        if kind != abi.Dtype.NVFP4:
            elements = elements.view(torch.float8_e4m3fn)
        if kind == abi.Dtype.FP8:
            scales = scales.view(torch.float32)
        results = []
        for rows, given in ((x, None), (elements, scales)):
            with session.step(CAP) as step:
                recv = exchange.dispatch(0, rows, ids, weights, x_scales=given)
                experts(name, recv)
                results.append(exchange.combine(0, recv))
            assert step.complete
        assert results[1].dtype == torch.bfloat16
        np.testing.assert_array_equal(results[0].float().numpy(), results[1].float().numpy())

    on_all(sessions, work)


def test_wrong_scales_are_refused(sessions: list[Session]) -> None:
    def work(session: Session) -> None:
        x, ids, weights = batch(0)
        fp8 = x.to(torch.float8_e4m3fn)
        good = torch.ones((CAP, HIDDEN // 128))
        with session.step(CAP):
            for name, rows, scales, text in (
                ("columns", x, good, "x .*bfloat16; it needs torch.float8_e4m3fn"),
                ("columns", fp8, good[:, :1].contiguous(), r"x_scales .*\[9, 1\]; .*\[9, 2\]"),
                ("columns", fp8, good.double(), "x_scales .*float64; it needs torch.float32"),
                ("columns", fp8, good.t().contiguous().t(), "x_scales .*gaps in memory"),
                ("exact", x, good, "x_scales .*none: rows are bf16"),
                ("masked", fp8, good * 3, "not a power of two"),
            ):
                with pytest.raises(TensorError, match=text):
                    session.exchange(name).dispatch_send(0, rows, ids, weights, x_scales=scales)

    on_all(sessions, work)
