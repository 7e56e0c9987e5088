"""Dispatch and combine under torch.compile, on the CPU plane, and their operators under opcheck."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from elasticep.errors import UsageError
from elasticep.geometry import GroupGeometry
from elasticep.group import GroupConfig, Launch
from elasticep.native.convert import geometry_struct
from elasticep.spec import ExchangeSpec
from elasticep.testing.clients import attach_to
from elasticep.testing.local_group import LocalGroup, spread

torch = pytest.importorskip("torch")

LAYERS, EXPERTS, TOPK, HIDDEN, CAP = 2, 4, 2, 16, 6


def config(**exchange: Any) -> GroupConfig:
    wire = {"dispatch_dtype": "fp32", "combine_dtype": "fp32", "max_tokens": CAP, **exchange}
    return GroupConfig(
        name="local",
        geometry=GroupGeometry(
            layers=LAYERS,
            experts=EXPERTS,
            topk=TOPK,
            hidden=HIDDEN,
            slots_per_rank=EXPERTS,
            max_ranks=1,
        ),
        exchanges=(("decode", ExchangeSpec.preset(wire.pop("preset", "ROUTED"), **wire)),),
        initial_ranks=1,
        spare_copies=0,
        launch=Launch.INLINE,
    )


def inputs(seed: int) -> tuple[Any, Any, Any]:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(CAP, HIDDEN, generator=rng)
    ids = torch.rand(CAP, EXPERTS, generator=rng).topk(TOPK)[1]
    return x, ids, torch.rand(CAP, TOPK, generator=rng)


@pytest.mark.parametrize("preset", ["ROUTED", "LOW_LATENCY"])
def test_a_compiled_model_gives_what_an_eager_one_does(preset: str) -> None:
    group_config = config(preset=preset)
    geometry = geometry_struct(group_config)
    with LocalGroup(geometry) as group:
        session = attach_to(group, group_config, 0)
        table = spread(geometry, [0])
        group.stage(1, 0, [0], table)
        exchange = session.exchange("decode")
        slots = torch.from_numpy(np.ascontiguousarray(table[:, 0])).long()
        scale = torch.arange(1.0, EXPERTS + 1)

        def model(x: Any, ids: Any, weights: Any) -> Any:
            for layer in range(LAYERS):
                recv = exchange.dispatch(layer, x, ids, weights)
                if preset == "ROUTED":
                    of_choice = scale[slots[layer]][recv.ids.clamp(min=0).long()]
                    factor = (of_choice * recv.weights * (recv.ids >= 0)).sum(1, keepdim=True)
                    recv.out.copy_(recv.rows * factor)
                else:
                    recv.out.copy_(recv.rows * scale[slots[layer]].view(-1, 1, 1))
                x = exchange.combine(layer, recv) + 1
            return x

        whole = torch.compile(model, backend="aot_eager", fullgraph=True)
        with pytest.raises(UsageError, match="before compiling"):
            exchange._fixed(0)
        results = {}
        for name, run in (("eager", model), ("compiled", whole), ("again", whole)):
            with session.step(CAP) as step:
                results[name] = run(*inputs(3 if name != "again" else 4))
            assert step.complete
        assert torch.equal(results["eager"], results["compiled"])
        want, (x, ids, weights) = results["again"], inputs(4)
        for _ in range(LAYERS):
            x = x * (weights * (ids + 1)).sum(1, keepdim=True) + 1
        torch.testing.assert_close(want, x)
        session.detach()


class StandIn:
    """As much of an exchange as the operators touch: every row comes back as it was."""

    def __init__(self) -> None:
        self.rows, self.out = torch.zeros(CAP, HIDDEN), torch.zeros(CAP, HIDDEN)
        self.ids = torch.zeros(CAP, TOPK, dtype=torch.int32)
        self.weights, self.counts = torch.zeros(CAP, TOPK), torch.zeros(2, dtype=torch.int32)

    def _fixed(self, channel: int) -> Any:
        return SimpleNamespace(
            rows=self.rows,
            scales=None,
            ids=self.ids,
            weights=self.weights,
            counts=self.counts,
            offsets=None,
            out=self.out,
        )

    def _dispatch_compiled(self, layer: int, x: Any, ids: Any, weights: Any, *_: Any) -> Any:
        self.rows.copy_(x)
        self.ids.copy_(ids)
        self.weights.copy_(weights)
        return self._fixed(0)

    def _combine_compiled(self, layer: int, out: Any, channel: int) -> None:
        out.copy_(self.out)


def test_opcheck_of_both_operators() -> None:
    from elasticep.client import compiled

    exchange = StandIn()
    key = compiled.register(exchange)  # type: ignore[arg-type]
    x, ids, weights = inputs(1)
    fixed = exchange._fixed(0)
    torch.library.opcheck(
        torch.ops.elasticep.exchange_dispatch,
        (
            *(fixed.rows, None, fixed.ids, fixed.weights, fixed.counts, None),
            *(x, ids, weights, None, key, 0, 0),
        ),
    )
    assert torch.equal(exchange.rows, x)
    y, out = torch.randn(CAP, HIDDEN), torch.zeros(CAP, HIDDEN)
    torch.library.opcheck(torch.ops.elasticep.exchange_combine, (out, fixed.rows, y, key, 0, 0))
    torch.ops.elasticep.exchange_combine(out, fixed.rows, y, key, 0, 0)
    assert torch.equal(out, y)  # also when y is not the region's own


def test_an_exact_size_cannot_be_compiled() -> None:
    group_config = config(preset="NORMAL")
    with LocalGroup(geometry_struct(group_config)) as group:
        session = attach_to(group, group_config, 0)
        with pytest.raises(UsageError, match="cpu_sync"):
            session.exchange("decode")._fixed(0)
        session.detach()
