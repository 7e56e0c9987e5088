"""The Hugging Face adapter over real worker processes: what the model says does not change."""

import copy
import json
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from elasticep.arena import Arena
from elasticep.checkpoint import open_checkpoint
from elasticep.client.session import Session
from elasticep.demo.settings import ROWS, DemoSettings, ModelSizes
from elasticep.errors import CheckpointError, GroupMismatch, SpecError
from elasticep.group import GroupConfig
from elasticep.native.convert import geometry_struct
from elasticep.testing.clients import attach_to, on_all
from elasticep.testing.local_group import LocalGroup, spread
from elasticep.weights import WeightSpec

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from elasticep.demo.model import Decoder, build_model  # noqa: E402
from elasticep.engines.transformers import (  # noqa: E402
    ExchangeMoE,
    MoELayers,
    load_without_experts,
    replace_moe_blocks,
)

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

    def __init__(
        self, session: Session, model: Any, *, rowwise: bool, folder: Path | None = None
    ) -> None:
        self.session = session
        own = copy.deepcopy(model) if folder is None else load_without_experts(folder)
        self.model = own
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


def open_group(
    stack: ExitStack, arenas: "Arenas | None" = None
) -> tuple[LocalGroup, list[Session]]:
    config = group_config(None if arenas is None else arenas.units.spec)
    struct = geometry_struct(config)
    group = stack.enter_context(LocalGroup(struct))
    sessions = [
        stack.enter_context(attach_to(group, config, rank, arenas and arenas.opener(rank)))
        for rank in range(RANKS)
    ]
    group.stage(1, 0, range(RANKS), spread(struct, range(RANKS), copies=2))
    return group, sessions


def group_config(weights: WeightSpec | None) -> GroupConfig:
    config = DemoSettings(ranks=RANKS, nodes=1, sizes=SIZES).group_config()
    return replace(config, weights=weights)


class Arenas:
    """What daemons would hold: each rank's experts out of the model's checkpoint."""

    def __init__(self, folder: Path, model: Any) -> None:
        model.save_pretrained(folder)
        checkpoint = open_checkpoint(folder)
        self.units = checkpoint.units(checkpoint.weight_spec())
        config = group_config(self.units.spec)
        layout = config.arena_layout()
        assert layout is not None
        table = spread(geometry_struct(config), range(RANKS), copies=2)
        self._fds = []
        for rank in range(RANKS):
            fd = os.memfd_create(f"arena-{rank}")
            os.ftruncate(fd, layout.total_bytes)
            arena = Arena.format(mmap.mmap(fd, layout.total_bytes), layout, rank)
            for layer, slot in np.argwhere(table[:, rank] >= 0):
                expert = int(table[layer, rank, slot])
                fill = arena.fill(int(layer), int(slot), expert)
                self.units.read_into(int(layer), expert, fill.pieces())
                fill.finish()
            self._fds.append(fd)

    def opener(self, rank: int) -> Callable[[], int]:
        return lambda: os.open(f"/proc/self/fd/{self._fds[rank]}", os.O_RDONLY)

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


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


def test_experts_out_of_a_checkpoint_by_way_of_arenas_give_the_same_bits(
    stack: ExitStack, model: Any, tmp_path: Path
) -> None:
    arenas = Arenas(tmp_path, model)
    stack.callback(arenas.close)
    _, sessions = open_group(stack, arenas)
    folders = [tmp_path, None, tmp_path]
    engines = [
        Engine(session, model, rowwise=True, folder=folder)
        for session, folder in zip(sessions, folders, strict=True)
    ]
    for engine in engines:
        left = [name for name, _ in engine.model.named_parameters() if ".experts." in name]
        assert not left, "the model's own experts are let go of"
    results = together(engines, [0, 2, None])
    with ExitStack() as own:
        _, others = open_group(own)
        keepers = [Engine(session, model, rowwise=True) for session in others]
        wanted = together(keepers, [1, 0, None])
    for at in range(len(TEXT)):
        bits = [*(logits[at] for logits in (*results[:2], *wanted[:2]))]
        assert all(torch.equal(bits[0], other) for other in bits[1:])


def test_a_model_is_loaded_without_its_experts(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    got = load_without_experts(tmp_path)
    assert not got.training
    wanted = dict(model.named_parameters())
    for name, parameter in got.named_parameters():
        if ".experts." in name:
            assert parameter.is_meta
            assert parameter.shape == wanted[name].shape
        else:
            assert torch.equal(parameter, wanted[name])
    assert all(not buffer.is_meta for buffer in got.buffers())
    half = load_without_experts(tmp_path, torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 8}))
    with pytest.raises(CheckpointError, match=r"weight in .* has shape \[256, 32\], the model"):
        load_without_experts(tmp_path)


def test_tied_parameters_need_to_be_there_once_only(tmp_path: Path) -> None:
    tied = build_model(SIZES, seed=5).config
    tied.tie_word_embeddings = True
    torch.manual_seed(1)
    model = type(build_model(SIZES, seed=5))(tied)
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in open_checkpoint(tmp_path).names
    got: Any = load_without_experts(tmp_path)
    assert torch.equal(got.lm_head.weight, model.lm_head.weight)
    assert got.lm_head.weight.data_ptr() == got.model.embed_tokens.weight.data_ptr()


def test_weights_of_another_model_are_refused(stack: ExitStack, model: Any, tmp_path: Path) -> None:
    other = build_model(replace(SIZES, hidden=64), seed=5)
    arenas = Arenas(tmp_path, other)
    stack.callback(arenas.close)
    _, sessions = open_group(stack, arenas)
    with pytest.raises(GroupMismatch, match=r"weights of an expert: the model has .*'w13'"):
        replace_moe_blocks(copy.deepcopy(model), sessions[0])


def test_group_of_another_model_is_refused(stack: ExitStack, model: Any) -> None:
    _, sessions = open_group(stack)
    wider = build_model(ModelSizes(layers=2, hidden=32, experts=8, topk=2, heads=2, kv_heads=1), 0)
    with pytest.raises(GroupMismatch, match="experts: the model has 8, group 'demo' 6"):
        replace_moe_blocks(wider, sessions[0])
    with pytest.raises(SpecError, match="Linear has no MoE block that this adapter knows"):
        replace_moe_blocks(torch.nn.Linear(2, 2), sessions[0])


@pytest.mark.parametrize("per_rank", [True, False])
def test_tensors_are_made_where_the_rank_s_memory_is(per_rank: bool) -> None:
    """On the `meta` device here, which no tensor that is made without one is on."""
    meta = torch.device("meta")
    brought: list[Any] = []
    hidden, topk = SIZES.hidden, SIZES.topk

    class Exchange:
        def dispatch(self, layer: int, *tensors: Any) -> Any:
            brought.extend(tensors)
            out = (0, hidden) if per_rank else (0, topk, hidden)
            return SimpleNamespace(
                ids=torch.empty((0, topk), dtype=torch.int32),
                weights=torch.empty((0, topk)),
                rows=torch.empty((0, hidden)),
                out=torch.empty(out, device=meta),
            )

        def combine(self, layer: int, recv: Any) -> Any:
            return brought[0]

    geometry = SimpleNamespace(hidden=hidden, topk=topk)
    session: Any = SimpleNamespace(
        device=meta, config=SimpleNamespace(geometry=geometry, weights=None), slots=lambda layer: ()
    )
    exchange: Any = Exchange()
    layers = MoELayers(session, exchange, rowwise=False, dtype=torch.float32)
    block = torch.nn.Module()
    block.gate = block.experts = None
    layers.blocks = [ExchangeMoE(block, 0, layers)]
    layers.idle()
    assert [tensor.device for tensor in brought] == [meta] * 3
