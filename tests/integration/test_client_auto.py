"""The preset AUTO: one rank with prompt tokens makes it a prefill step for all, and only then."""

import pytest

from elasticep.client.auto import AutoExchange
from elasticep.client.session import Session
from elasticep.errors import CapExceeded, UsageError
from elasticep.geometry import GroupGeometry
from elasticep.group import GroupConfig
from elasticep.native.convert import geometry_struct
from elasticep.spec import ExchangeSpec, Layout
from elasticep.testing.clients import attach_to, on_all
from elasticep.testing.local_group import LocalGroup, spread

torch = pytest.importorskip("torch")

RANKS, EXPERTS, TOPK, HIDDEN = 2, 4, 2, 16
CONFIG = GroupConfig(
    name="auto",
    geometry=GroupGeometry(
        layers=1, experts=EXPERTS, topk=TOPK, hidden=HIDDEN, slots_per_rank=EXPERTS, max_ranks=RANKS
    ),
    exchanges=(
        (
            "moe",
            ExchangeSpec.preset(
                "AUTO",
                max_tokens=4,
                prefill_tokens=32,
                dispatch_dtype="fp32",
                combine_dtype="fp32",
                reduce="per_expert",
            ),
        ),
    ),
    initial_ranks=RANKS,
)


def test_auto_prefills_when_any_rank_has_prompt_tokens() -> None:
    struct = geometry_struct(CONFIG)
    with LocalGroup(struct) as group:
        sessions = [attach_to(group, CONFIG, rank) for rank in range(RANKS)]
        group.stage(1, 0, range(RANKS), spread(struct, range(RANKS)))
        layouts: dict[bool, set[Layout]] = {False: set(), True: set()}

        def step_of(session: Session, tokens: int, prompt: bool) -> bool:
            exchange = session.exchange("moe")
            assert isinstance(exchange, AutoExchange)
            with pytest.raises(UsageError, match="outside a step"):
                exchange.current  # noqa: B018
            draw = torch.Generator().manual_seed(10 * tokens + session.rank)
            x = torch.randn(tokens, HIDDEN, generator=draw)
            # Each expert once in a token: the masked room of decoding is made for that.
            ids = torch.rand(tokens, EXPERTS, generator=draw).argsort(1)[:, :TOPK].contiguous()
            weights = torch.rand(tokens, TOPK, generator=draw)
            with session.step(tokens, prompt=prompt) as step:
                got = exchange.dispatch(0, x, ids, weights)
                layouts[step.prompt].add(exchange.current.spec.layout)
                got.out.fill_(1.0)  # every expert answers 1
                out = exchange.combine(0, got)
            assert step.complete
            torch.testing.assert_close(out, weights.sum(1, keepdim=True).expand(-1, HIDDEN))
            return step.prompt

        def both(session: Session) -> None:
            # Only rank 0 has a prompt in the second step; rank 1 follows.
            mine = session.rank == 0
            assert step_of(session, 3, False) is False
            assert step_of(session, 20 if mine else 1, mine) is True
            assert step_of(session, 4, False) is False

        on_all(sessions, both)
        assert layouts == {False: {Layout.MASKED}, True: {Layout.ARRIVAL}}

        def too_many(session: Session) -> None:
            exchange = session.exchange("moe")
            x = torch.zeros(5, HIDDEN)
            with session.step(4):
                with pytest.raises(CapExceeded, match="5 tokens for exchange 'moe'"):
                    exchange.dispatch(0, x, torch.zeros(5, TOPK).long(), torch.zeros(5, TOPK))
                got = exchange.dispatch(0, x[:0], torch.zeros(0, TOPK).long(), torch.zeros(0, TOPK))
                exchange.combine(0, got)

        on_all(sessions, too_many)
        for session in sessions:
            session.detach()
