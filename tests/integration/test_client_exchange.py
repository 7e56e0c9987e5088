"""Sessions over the real data plane: worker processes, shared memory, real kills; no daemon."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from elasticep.client.session import Session, Step
from elasticep.errors import Fenced, StepTimeout, TensorError
from elasticep.geometry import GroupGeometry
from elasticep.group import GroupConfig
from elasticep.native.convert import geometry_struct
from elasticep.spec import ExchangeSpec
from elasticep.testing.clients import attach_to, on_all
from elasticep.testing.local_group import LocalGroup, spread

torch = pytest.importorskip("torch")

LAYERS, EXPERTS, TOPK, HIDDEN, CAP = 2, 6, 3, 16, 5
JOIN_S = 120.0


def config(ranks: int, **exchange: Any) -> GroupConfig:
    wire = {"dispatch_dtype": "fp32", "combine_dtype": "fp32", "reduce": "per_expert", **exchange}
    preset = wire.pop("preset", "ROUTED")
    return GroupConfig(
        name="local",
        geometry=GroupGeometry(
            layers=LAYERS,
            experts=EXPERTS,
            topk=TOPK,
            hidden=HIDDEN,
            slots_per_rank=EXPERTS,
            max_ranks=ranks,
        ),
        exchanges=(("decode", ExchangeSpec.preset(preset, max_tokens=CAP, **wire)),),
        initial_ranks=ranks,
        spare_copies=min(1, ranks - 1),
    )


class Ranks:
    """A group with a session for each rank."""

    def __init__(self, group_config: GroupConfig) -> None:
        self.config = group_config
        self.geometry = geometry_struct(group_config)
        self.group = LocalGroup(self.geometry)
        self.sessions: dict[int, Session] = {}
        for rank in range(group_config.initial_ranks):
            self.sessions[rank] = attach_to(self.group, group_config, rank)
        self.stage(1, 0, list(self.sessions))

    def stage(self, epoch: int, previous: int, members: list[int]) -> None:
        everyone = list(range(self.config.initial_ranks))
        table = spread(self.geometry, everyone, copies=min(2, len(everyone)))
        for rank in set(everyone) - set(members):
            table[:, rank] = -1
        self.group.stage(epoch, previous, members, table)

    def together(self, work: Callable[[Session], Any], only: list[int] | None = None) -> list[Any]:
        """Run `work` for several ranks at once; results in rank order, errors as results."""
        ranks = sorted(self.sessions) if only is None else only

        def one(rank: int) -> Any:
            try:
                return work(self.sessions[rank])
            except Exception as error:
                return error

        return on_all(ranks, one)

    def close(self) -> None:
        for session in self.sessions.values():
            session.detach()
        self.group.close()


@pytest.fixture
def open_ranks() -> Iterator[Callable[..., Ranks]]:
    with ExitStack() as stack:

        def start(ranks: int, **exchange: Any) -> Ranks:
            opened = Ranks(config(ranks, **exchange))
            stack.callback(opened.close)
            return opened

        yield start


def tokens_of(rank: int, count: int, dtype: Any = torch.float32) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn((count, HIDDEN), generator=generator).to(dtype)
    ids = torch.rand((count, EXPERTS), generator=generator).argsort(1)[:, :TOPK].contiguous()
    if count:
        ids[0, 0] = -1
    return x, ids, torch.rand((count, TOPK), generator=generator)


def expert(number: int, x: Any) -> Any:
    return x * (number + 1) + number


def fill(session: Session, recv: Any, reduce: str) -> None:
    """The engine's expert kernel: every expert scales and shifts."""
    slots = session.slots(recv.layer)
    for row, pick in (recv.ids >= 0).nonzero().tolist():
        y = expert(slots[recv.ids[row, pick]], recv.rows[row].float())
        if reduce == "per_expert":
            recv.out[row, pick] = y.to(recv.out.dtype)
    if reduce == "per_rank":
        for row in (recv.ids >= 0).any(1).nonzero().flatten().tolist():
            total = torch.zeros(HIDDEN)
            for pick in (recv.ids[row] >= 0).nonzero().flatten().tolist():
                number = slots[recv.ids[row, pick]]
                total += recv.weights[row, pick] * expert(number, recv.rows[row].float())
            recv.out[row] = total.to(recv.out.dtype)


def dense(x: Any, ids: Any, weights: Any) -> Any:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, pick in (ids >= 0).nonzero().tolist():
        y = expert(int(ids[token, pick]), x[token].double())
        out[token] += weights[token, pick].double() * y
    return out


def forward(
    session: Session, counts: dict[int, int], reduce: str, dtype: Any = torch.float32
) -> Any:
    exchange = session.exchange("decode")
    x, ids, weights = tokens_of(session.rank, counts[session.rank], dtype)
    outputs = []

    def layers(step: Step, _: None) -> list[Any]:
        outputs.clear()
        for layer in range(LAYERS):
            recv = exchange.dispatch(layer, x, ids, weights)
            fill(session, recv, reduce)
            outputs.append(exchange.combine(layer, recv))
        return outputs

    return session.run(layers, None, tokens=len(x))


@pytest.mark.parametrize("preset", ["ROUTED", "ALLGATHER"])
@pytest.mark.parametrize("reduce", ["per_expert", "per_rank"])
@pytest.mark.parametrize(("dtype", "wire"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16")])
def test_result_is_the_dense_one(
    open_ranks: Callable[..., Ranks], preset: str, reduce: str, dtype: Any, wire: str
) -> None:
    ranks = open_ranks(3, preset=preset, reduce=reduce, dispatch_dtype=wire, combine_dtype=wire)
    counts = {0: CAP, 1: 0, 2: 1}
    results = ranks.together(lambda session: forward(session, counts, reduce, dtype))
    for rank, outputs in enumerate(results):
        x, ids, weights = tokens_of(rank, counts[rank], dtype)
        for out in outputs:
            assert out.dtype == dtype
            tolerance = 1e-5 if dtype == torch.float32 else 4e-2
            torch.testing.assert_close(
                out.double(), dense(x, ids, weights), rtol=tolerance, atol=tolerance
            )


def test_view_and_load_are_those_of_the_group(open_ranks: Callable[..., Ranks]) -> None:
    ranks = open_ranks(2)
    counts = {0: 4, 1: 2}
    ranks.together(lambda session: forward(session, counts, "per_expert"))
    for rank, session in ranks.sessions.items():
        assert dict(session.view.members) == {0: 1, 1: 1}
        assert session.view.epoch == 1
        _, ids, _ = tokens_of(rank, counts[rank])
        sent = np.bincount(ids[ids >= 0].numpy(), minlength=EXPERTS)
        assert session.load().tolist() == [sent.tolist()] * LAYERS
        assert session.slots(0) == tuple(session.view.placement[0, rank].tolist())


def test_death_repeats_the_step_in_the_next_view_with_the_same_bits(
    open_ranks: Callable[..., Ranks],
) -> None:
    ranks = open_ranks(3)
    counts = {0: 3, 1: 2, 2: 4}
    before = ranks.together(lambda session: forward(session, counts, "per_expert"))
    inside = threading.Barrier(3)
    torn: list[int] = []

    def step(session: Session) -> Any:
        exchange = session.exchange("decode")
        x, ids, weights = tokens_of(session.rank, counts[session.rank])
        first = [True]

        def layers(step: Step, _: None) -> Any:
            for layer in range(LAYERS):
                recv = exchange.dispatch(layer, x, ids, weights)
                if first[0]:
                    first[0] = False
                    inside.wait(JOIN_S)  # all three are in the middle of layer 0
                    if session.rank == 2:
                        ranks.group.kill_worker(2)
                        ranks.stage(2, 1, [0, 1])
                fill(session, recv, "per_expert")
                out = exchange.combine(layer, recv)
            return step.epoch, out

        return session.run(layers, None, on_torn=lambda s: torn.append(s.number))

    survivors = ranks.together(step)
    assert isinstance(survivors[2], Fenced)
    assert torn
    for rank in (0, 1):
        epoch, out = survivors[rank]
        assert epoch == 2
        assert torch.equal(out, before[rank][-1])
        assert dict(ranks.sessions[rank].view.members) == {0: 1, 1: 1}


def test_engine_error_tears_the_step_of_the_others_and_they_go_on(
    open_ranks: Callable[..., Ranks],
) -> None:
    ranks = open_ranks(2)
    counts = {0: 2, 1: 2}
    torn: list[tuple[int, str]] = []

    def work(session: Session) -> Any:
        exchange = session.exchange("decode")
        x, ids, weights = tokens_of(session.rank, 2)
        if session.rank == 1:
            bad = ids.clone()
            bad[1, 2] = EXPERTS
            with pytest.raises(TensorError, match=f"token 1 names expert {EXPERTS}"):
                session.run(lambda step, _: exchange.dispatch(0, x, bad, weights), None)

        def layers(step: Step, _: None) -> Any:
            for layer in range(LAYERS):
                recv = exchange.dispatch(layer, x, ids, weights)
                fill(session, recv, "per_expert")
                out = exchange.combine(layer, recv)
            return out

        return session.run(layers, None, on_torn=lambda step: torn.append((session.rank, step.why)))

    results = ranks.together(work)
    [(rank, why)] = torn
    assert rank == 0
    assert "rank 1 left step" in why
    for rank, out in enumerate(results):
        x, ids, weights = tokens_of(rank, counts[rank])
        torch.testing.assert_close(out.double(), dense(x, ids, weights), rtol=1e-5, atol=1e-5)


def test_barrier_times_out_and_goes_on_at_the_same_barrier(
    open_ranks: Callable[..., Ranks],
) -> None:
    ranks = open_ranks(2)

    def early() -> None:
        with ranks.sessions[0].step(timeout=0.05):
            pass

    with pytest.raises(StepTimeout, match="rank 1 did not reach barrier"):
        early()
    # It waits on, for as long as it has: hangs are found also where engines wait with short limits.
    since = ranks.sessions[0].status().wait_since_ns
    with pytest.raises(StepTimeout):
        early()
    assert ranks.sessions[0].status().wait_since_ns == since > 0

    def step(session: Session) -> int:
        with session.step() as step:
            pass
        assert step.complete
        return step.number

    assert ranks.together(step) == [1, 1]


def test_fenced_rank_is_told_why(open_ranks: Callable[..., Ranks]) -> None:
    ranks = open_ranks(2)
    ranks.group.fence(1, 7, "an operator said so")
    with pytest.raises(Fenced, match="an operator said so") as caught, ranks.sessions[1].step():
        pass
    assert caught.value.epoch == 7
