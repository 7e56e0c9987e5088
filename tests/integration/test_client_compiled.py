"""Dispatch and combine under torch.compile, on the CPU plane, with the native core."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from elasticep.errors import ExpertsLost, TensorError, UsageError
from elasticep.geometry import GroupGeometry
from elasticep.group import GroupConfig, Launch
from elasticep.native.convert import geometry_struct
from elasticep.spec import ExchangeSpec
from elasticep.testing.clients import attach_to, on_all
from elasticep.testing.local_group import LocalGroup, equal_weights, spread

torch = pytest.importorskip("torch")

LAYERS, EXPERTS, TOPK, HIDDEN, CAP = 2, 4, 2, 16, 6


def config(ranks: int = 1, **exchange: Any) -> GroupConfig:
    wire = {"dispatch_dtype": "fp32", "combine_dtype": "fp32", "max_tokens": CAP, **exchange}
    launch, hidden = wire.pop("launch", Launch.INLINE), wire.pop("hidden", HIDDEN)
    return GroupConfig(
        name="local",
        geometry=GroupGeometry(
            layers=LAYERS,
            experts=EXPERTS,
            topk=TOPK,
            hidden=hidden,
            slots_per_rank=EXPERTS,
            max_ranks=ranks,
        ),
        exchanges=(("decode", ExchangeSpec.preset(wire.pop("preset", "ROUTED"), **wire)),),
        initial_ranks=ranks,
        spare_copies=0,
        launch=launch,
    )


def inputs(seed: int, hidden: int = HIDDEN) -> tuple[Any, Any, Any]:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(CAP, hidden, generator=rng)
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


def test_an_exact_size_cannot_be_compiled() -> None:
    group_config = config(preset="NORMAL")
    with LocalGroup(geometry_struct(group_config)) as group:
        session = attach_to(group, group_config, 0)
        with pytest.raises(UsageError, match="cpu_sync"):
            session.exchange("decode")._fixed(0)
        session.detach()


def copied(exchange: Any, layers: int = LAYERS) -> Callable[..., Any]:
    """A model whose experts give their rows back, compiled."""

    def model(x: Any, ids: Any, weights: Any) -> Any:
        ok = None
        for layer in range(layers):
            recv = exchange.dispatch(layer, x, ids, weights)
            recv.out.copy_(recv.rows)
            x = exchange.combine(layer, recv)
            ok = recv.token_ok if ok is None else ok & recv.token_ok
        return x, ok

    return torch.compile(model, backend="aot_eager", fullgraph=True)


@contextmanager
def compiled_ranks(ranks: int = 1, **changes: Any) -> Iterator[tuple[Any, Any, list[Any]]]:
    """A group, its view's slots and its sessions, whose tensors are there."""
    group_config = config(ranks, **changes)
    geometry = geometry_struct(group_config)
    with LocalGroup(geometry) as group:
        sessions = [attach_to(group, group_config, rank) for rank in range(ranks)]
        table = spread(geometry, range(ranks))
        group.stage(1, 0, list(range(ranks)), table)

        def eager(session: Any) -> None:
            exchange = session.exchange("decode")
            with session.step():
                hidden = group_config.geometry.hidden
                exchange.combine(0, exchange.dispatch(0, *inputs(1, hidden)))

        on_all(sessions, eager)
        yield group, table, sessions
        for session in sessions:
            session.detach()


@pytest.mark.parametrize(
    "spec",
    [
        {"preset": "LOW_LATENCY", "dispatch_dtype": "fp8", "scale_layout": "columns"},
        {"preset": "EXPAND", "dispatch_dtype": "fp8", "scale_layout": "packed", "cpu_sync": False},
    ],
    ids=["masked", "contiguous"],
)
def test_all_that_a_dispatch_delivers_is_there_for_compiled_experts(spec: dict[str, Any]) -> None:
    hidden = 256
    more = {"hidden": hidden, "launch": Launch.SERVICE, "combine_dtype": "bf16"}
    with compiled_ranks(**spec, **more) as (_, _, (session,)):
        exchange = session.exchange("decode")

        def model(x: Any, ids: Any, weights: Any) -> Any:
            for layer in range(LAYERS):
                recv = exchange.dispatch(layer, x, ids, weights)
                y = recv.rows.float() + recv.scales.float().sum(-1, keepdim=True)
                y = y + recv.places.clamp(min=0).sum() + recv.counts.sum()
                if recv.row_slots is not None:
                    y = torch.where(recv.row_slots.unsqueeze(-1) >= 0, y + recv.offsets.sum(), 0)
                recv.out.copy_(y)
                x = exchange.combine(layer, recv, torch.empty(len(x), hidden)) * 0.01
            return x

        whole = torch.compile(model, backend="aot_eager", fullgraph=True)
        batches = [inputs(seed, hidden) for seed in (3, 3, 4)]
        results = []
        for run, batch in zip((model, whole, whole), batches, strict=True):
            with session.step(CAP) as step:
                results.append(run(*batch))
            assert step.complete
        assert torch.equal(results[0], results[1])
        assert not torch.equal(results[1], results[2])


def test_what_sources_say_is_there_for_compiled_experts_as_for_eager_ones() -> None:
    """Their tokens and global scales: a compiled dispatch quantises by the one that it is given."""
    hidden = 128
    more = {"hidden": hidden, "combine_dtype": "fp32", "dispatch_dtype": "nvfp4"}
    with compiled_ranks(**more) as (_, _, (session,)):
        exchange = session.exchange("decode")

        def model(x: Any, ids: Any, weights: Any) -> Any:
            recv = exchange.dispatch(0, x, ids, weights, global_scale=0.125)
            recv.out.zero_()
            told = recv.source_tokens.clone(), recv.source_scales.clone()
            rows, scales = recv.rows.clone(), recv.scales.clone()
            exchange.combine(0, recv)
            return (*told, rows, scales)

        whole = torch.compile(model, backend="aot_eager", fullgraph=True)
        x, ids, weights = inputs(3, hidden)
        for tokens in (CAP, CAP - 2):
            results = []
            for run in (model, whole):
                with session.step(tokens):
                    results.append(run(x[:tokens], ids[:tokens], weights[:tokens]))
            eager, compiled = results
            assert eager[0].tolist() == [tokens]
            assert eager[1].tolist() == [0.125]
            assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


def test_ranks_of_one_process_wait_for_each_other_in_operators() -> None:
    with compiled_ranks(2) as (_, _, sessions):
        models = {session.rank: copied(session.exchange("decode")) for session in sessions}
        for model in models.values():  # compiled one after the other, before their threads run
            with pytest.raises(RuntimeError, match="outside a step"):
                model(*inputs(1))

        def run(session: Any) -> Any:
            def eager(step: Any, batch: Any) -> Any:
                x, ids, weights = batch
                exchange = session.exchange("decode")
                for layer in range(LAYERS):
                    recv = exchange.dispatch(layer, x, ids, weights)
                    recv.out.copy_(recv.rows)
                    x = exchange.combine(layer, recv)
                return x

            want = session.run(eager, inputs(7))
            got = session.run(lambda step, batch: models[session.rank](*batch)[0], inputs(7))
            return torch.equal(got, want)

        assert on_all(sessions, run) == [True, True]


def test_a_torn_step_leaves_compiled_code_and_is_repeated() -> None:
    with compiled_ranks() as (_, _, (session,)):
        model = copied(session.exchange("decode"))
        reached, torn = [], []

        def forward(step: Any, batch: Any) -> Any:
            if not torn:
                session._handle.step_tear()  # as a peer's death would
            result = model(*batch)[0]
            reached.append(step.number)
            return result

        x, ids, weights = inputs(2)
        result = session.run(forward, (x, ids, weights), on_torn=lambda step: torn.append(step))
        assert torch.equal(result, x)
        assert (len(reached), len(torn)) == (1, 1)


def test_errors_of_operators_are_those_of_eager_calls() -> None:
    with compiled_ranks() as (_, _, (session,)):
        exchange = session.exchange("decode")
        model = copied(exchange)
        x, ids, weights = inputs(2)
        with (
            pytest.raises(TensorError, match="names expert 9"),
            session.step() as step,
        ):
            model(x, torch.full_like(ids, 9), weights)
        assert not step.complete
        with pytest.raises(TensorError, match="dtype Double"), session.step():
            model(x.double(), ids, weights)
        too_many = [torch.cat([part, part]) for part in (x, ids, weights)]
        with pytest.raises(torch._dynamo.exc.Unsupported, match=f"12 tokens .* cap is {CAP}"):
            model(*too_many)  # while it is traced

        @torch.compile(backend="aot_eager", fullgraph=True)
        def half(x: Any, ids: Any, weights: Any) -> Any:
            return exchange.dispatch(0, x, ids, weights).rows.sum()

        with pytest.raises(UsageError, match="no combine followed"), session.step():
            half(x, ids, weights)
        with session.step() as step:
            assert torch.equal(model(x, ids, weights)[0], x)
        assert step.complete


def test_tokens_that_need_a_lost_expert_are_told_from_the_others() -> None:
    with compiled_ranks() as (group, table, (session,)):
        lost = table.copy()
        lost[1][table[1] == 3] = -1  # in layer 1 alone
        group.stage(2, 1, [0], lost, equal_weights(lost, [0]))
        model = copied(session.exchange("decode"))
        x, ids, weights = inputs(2)
        needs = (ids == 3).any(1)
        assert 0 < int(needs.sum()) < CAP
        with pytest.raises(ExpertsLost, match="layer 1 expert 3"), session.step():
            model(x, ids, weights)
        group.policy(serve=True)
        with session.step() as step:
            _, ok = model(x, ids, weights)
        assert step.complete
        assert torch.equal(ok, ~needs)
        assert torch.equal(step.token_ok, ~needs)
