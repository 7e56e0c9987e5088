"""The Hugging Face adapter over real worker processes: what the model says does not change."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from elasticep.client.session import Session
from elasticep.demo.settings import ROWS, DemoSettings, ModelSizes
from elasticep.errors import GroupMismatch, SpecError
from elasticep.native.convert import geometry_struct
from elasticep.testing.clients import attach_to, on_all
from elasticep.testing.local_group import LocalGroup, spread

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from elasticep.demo.model import Decoder, build_model  # noqa: E402
from elasticep.engines.transformers import MoELayers, replace_moe_blocks  # noqa: E402

SIZES = ModelSizes(layers=2, hidden=32, experts=6, topk=2, heads=2, kv_heads=1)
TEXT = b"The bridge will be closed."
RANKS = 3


@pytest.fixture(scope="module")
def model() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield build_model(SIZES, seed=5)
    torch.set_num_threads(threads)


class Engine:
    """A rank with its own copy of the model."""

    def __init__(self, session: Session, model: Any, *, rowwise: bool) -> None:
        self.session = session
        own = copy.deepcopy(model)
        self.layers: MoELayers = replace_moe_blocks(own, session, rowwise=rowwise)
        self.decoder = Decoder(own, SIZES, ROWS, len(TEXT))

    def decode(self, row: int | None) -> list[Any]:
        """Logits after each token of TEXT, fed in batch row `row`; None: take part without work."""
        return [
            self.session.run(lambda step, at=at: self._forward(row, at), at)  # type: ignore[misc]
            for at in range(len(TEXT))
        ]

    def _forward(self, row: int | None, at: int) -> Any:
        if row is None:
            self.layers.idle()
            return None
        tokens, positions = [0] * ROWS, [0] * ROWS
        tokens[row], positions[row] = TEXT[at], at
        self.layers.active = torch.arange(ROWS) == row
        return self.decoder.step(tokens, positions)[row]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def open_group(stack: ExitStack) -> tuple[LocalGroup, list[Session]]:
    config = DemoSettings(ranks=RANKS, nodes=1, sizes=SIZES).group_config()
    struct = geometry_struct(config)
    group = stack.enter_context(LocalGroup(struct))
    sessions = [stack.enter_context(attach_to(group, config, rank)) for rank in range(RANKS)]
    group.stage(1, 0, range(RANKS), spread(struct, range(RANKS), copies=2))
    return group, sessions


def together(engines: list[Engine], rows: list[int | None]) -> list[list[Any]]:
    return on_all(range(len(engines)), lambda number: engines[number].decode(rows[number]))


def alone(model: Any) -> list[Any]:
    decoder = Decoder(model, SIZES, 1, len(TEXT))
    return [decoder.step([token], [at])[0] for at, token in enumerate(TEXT)]


def test_bits_hang_on_neither_rank_nor_row_nor_view(stack: ExitStack, model: Any) -> None:
    group, sessions = open_group(stack)
    engines = [Engine(session, model, rowwise=True) for session in sessions]
    first = together(engines, [0, 3, None])
    assert first[2] == [None] * len(TEXT)
    group.kill_worker(2)
    table = spread(geometry_struct(sessions[0].config), range(RANKS), copies=2)
    table[:, 2] = -1
    group.stage(2, 1, [0, 1], table)
    second = together(engines[:2], [1, 2])
    assert sessions[0].view.epoch == 2
    for at, right in enumerate(alone(model)):
        bits = [logits[at] for logits in (*first[:2], *second)]
        assert all(torch.equal(bits[0], other) for other in bits[1:])
        torch.testing.assert_close(bits[0], right, rtol=1e-4, atol=1e-5)


def test_grouped_products_give_the_same_up_to_rounding(stack: ExitStack, model: Any) -> None:
    _, sessions = open_group(stack)
    engines = [Engine(session, model, rowwise=False) for session in sessions]
    results = together(engines, [0, 1, 2])
    for at, right in enumerate(alone(model)):
        for logits in results:
            torch.testing.assert_close(logits[at], right, rtol=1e-4, atol=1e-5)


def test_group_of_another_model_is_refused(stack: ExitStack, model: Any) -> None:
    _, sessions = open_group(stack)
    wider = build_model(ModelSizes(layers=2, hidden=32, experts=8, topk=2, heads=2, kv_heads=1), 0)
    with pytest.raises(GroupMismatch, match="experts: the model has 8, group 'demo' 6"):
        replace_moe_blocks(wider, sessions[0])
    with pytest.raises(SpecError, match="Linear has no MoE block that this adapter knows"):
        replace_moe_blocks(torch.nn.Linear(2, 2), sessions[0])
