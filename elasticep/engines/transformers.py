"""Expert parallelism for a Hugging Face MoE decoder: its blocks' experts move to the group's ranks.

    model = load_without_experts("/models/Qwen3-30B-A3B")    # or any way of loading it whole
    layers = replace_moe_blocks(model, session, "decode")
    with session.step() as step:
        logits = model(...).logits      # or layers.idle() on a rank without work

Routers, attention and everything else stay where they are. Written for blocks that keep all expert
weights in `experts.gate_up_proj` and `experts.down_proj` (Qwen3-MoE in transformers 5). In a group
with `weights` experts are computed from the daemon's memory, and the model's own are let go of; it
need not have loaded them.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from elasticep.checkpoint import open_checkpoint
from elasticep.client.arena import TORCH
from elasticep.client.auto import AnyExchange
from elasticep.client.received import Received
from elasticep.client.session import Session
from elasticep.errors import CheckpointError, GroupMismatch, SpecError

SUPPORTED_BLOCKS: Final = ("Qwen3MoeSparseMoeBlock",)


class ExchangeMoE(nn.Module):
    """A MoE block whose experts are computed wherever the group's view has them.

    Args:
        block: the block it replaces; its router and its weights are used as they are.
        layer: number of this MoE layer in the group.
        layers: what the blocks of one model share.
    """

    gate: Any
    experts: Any

    def __init__(self, block: nn.Module, layer: int, layers: "MoELayers") -> None:
        super().__init__()
        self.gate = block.gate
        self.experts = block.experts
        self.layer = layer
        self._layers = layers

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[..., H]` -> `[..., H]`. Tokens that are not `active` contribute nothing and get 0."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, ids = self._route(x)
        active = self._layers.active
        if active is not None:
            ids = ids.masked_fill(~active[:, None], -1)
        return self.exchange(x, ids, weights).view(hidden_states.shape)

    def exchange(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Dispatch, compute what came, combine: `[tokens, H]`."""
        exchange = self._layers.exchange
        recv = exchange.dispatch(self.layer, x.contiguous(), ids, weights.float().contiguous())
        self._compute(recv)
        return exchange.combine(self.layer, recv)

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Top-k weights and expert ids, `[tokens, K]` each."""
        if not self._layers.rowwise:
            _, weights, ids = self.gate(x)
            return weights, ids
        # What the router does, with its one product computed row by row.
        logits = rowwise_linear(x, self.gate.weight)
        best = torch.softmax(logits.float(), dim=-1).topk(self.gate.top_k, dim=-1)
        weights = best.values
        if self.gate.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, best.indices

    def _compute(self, recv: Received) -> None:
        session = self._layers.session
        slots = session.slots(self.layer)
        held = session.weights(self.layer) if self._layers.from_arena else None
        rows, picks = (recv.ids >= 0).nonzero(as_tuple=True)
        local = recv.ids[rows, picks]
        per_rank = recv.out.dim() == 2  # else an output for each choice
        total = torch.zeros(recv.out.shape if per_rank else (0,), device=recv.out.device)
        for slot in local.unique().tolist():
            mine = local == slot
            row, pick = rows[mine], picks[mine]
            if held is None:
                expert = slots[slot]
                weights = self.experts.gate_up_proj[expert], self.experts.down_proj[expert]
            else:
                weights = held["w13"][slot], held["w2"][slot]
            y = self._expert(recv.rows[row], *weights)
            if per_rank:
                total.index_add_(0, row, y.float() * recv.weights[row, pick, None])
            else:
                recv.out[row, pick] = y.to(recv.out.dtype)
        if per_rank:
            recv.out[rows] = total[rows].to(recv.out.dtype)

    def _expert(self, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        linear = rowwise_linear if self._layers.rowwise else functional.linear
        gate, up = linear(x.to(gate_up.dtype), gate_up).chunk(2, dim=-1)
        return linear(self.experts.act_fn(gate) * up, down)


class MoELayers:
    """What the replaced blocks of one model share.

    Attributes:
        session: the rank.
        exchange: the exchange of all layers.
        rowwise: whether every product takes one row, so that a token's bits do not depend on the
            batch it came in (products of several rows differ in the last bits on a CPU).
        active: bool `[tokens]` of the running forward pass: which tokens are real; None: all.
        blocks: the replaced blocks, by MoE layer.
        from_arena: whether the experts' weights are the daemon's.
        dtype: of the experts' weights.
    """

    def __init__(
        self, session: Session, exchange: AnyExchange, *, rowwise: bool, dtype: torch.dtype
    ) -> None:
        self.session = session
        self.from_arena = session.config.weights is not None
        self.dtype = dtype
        self.exchange = exchange
        self.rowwise = rowwise
        self.active: torch.Tensor | None = None
        self.blocks: list[ExchangeMoE] = []

    def idle(self) -> None:
        """Take part in one forward pass without tokens: serve the experts that lie here."""
        geometry, device = self.session.config.geometry, self.session.device
        x = torch.empty((0, geometry.hidden), dtype=self.dtype, device=device)
        ids = torch.empty((0, geometry.topk), dtype=torch.int64, device=device)
        weights = torch.empty((0, geometry.topk), device=device)
        for block in self.blocks:
            block.exchange(x, ids, weights)


def rowwise_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`[rows, in]` -> `[rows, out]` with one product per row: the same bits in every batch.

    Args:
        x: `[rows, in]`.
        weight: `[out, in]`, not copied.
        bias: `[out]`.
    """
    out = torch.bmm(x[:, None], weight.t().expand(len(x), -1, -1))[:, 0]
    return out if bias is None else out + bias


class RowwiseLinear(nn.Module):
    """`nn.Linear` over `rowwise_linear`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in]` -> `[..., out]`."""
        out = rowwise_linear(x.reshape(-1, x.shape[-1]), self.weight, self.bias)
        return out.view(*x.shape[:-1], -1)


def load_without_experts(folder: str | Path, dtype: torch.dtype | None = None) -> nn.Module:
    """A model out of a Hugging Face folder, in evaluation mode, all but its routed experts.

    Their parameters have shapes but no memory (the `meta` device): for `replace_moe_blocks` in a
    group with `weights`. Nothing of them is read.

    Args:
        folder: with config.json and safetensors files.
        dtype: of the parameters; None: that of config.json.

    Raises:
        CheckpointError: there is no such checkpoint, or it lacks a parameter or has another shape.
        SpecError: the model has no block that this adapter knows.
    """
    checkpoint = open_checkpoint(folder)
    config = AutoConfig.from_pretrained(folder)
    chosen = dtype or config.dtype or torch.float32
    with torch.device("meta"):
        probe = AutoModelForCausalLM.from_config(config, dtype=chosen)
    with ExitStack() as stack:
        for kind in {type(cast(Any, block).experts) for block in _known_blocks(probe)}:
            stack.enter_context(_made_on_meta(kind))
        model = AutoModelForCausalLM.from_config(config, dtype=chosen)
    read: set[int] = set()
    state = {name: to for name, to in model.state_dict().items() if not to.is_meta}
    for name in sorted(state, key=lambda name: name not in checkpoint.names):
        to = state[name]
        if name not in checkpoint.names and to.data_ptr() in read:
            continue  # tied to another parameter, which is there
        stored, data = checkpoint.read(name)
        if stored.shape != tuple(to.shape):
            raise CheckpointError(
                f"{name} in {folder} has shape {list(stored.shape)}, the model that config.json "
                f"describes {list(to.shape)}; fetch the checkpoint again"
            )
        to.copy_(torch.frombuffer(data, dtype=TORCH[stored.dtype]).view(to.shape))
        read.add(to.data_ptr())
    return cast(nn.Module, model.eval())


@contextmanager
def _made_on_meta(kind: type[nn.Module]) -> Iterator[None]:
    """While open, instances of a class get parameters without memory."""
    init = kind.__init__

    def without_memory(self: nn.Module, *arguments: Any, **named: Any) -> None:
        with torch.device("meta"):
            init(self, *arguments, **named)

    kind.__init__ = without_memory  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.__init__ = init  # type: ignore[method-assign]


def replace_moe_blocks(
    model: nn.Module, session: Session, exchange: str = "decode", *, rowwise: bool = False
) -> MoELayers:
    """Replace every MoE block of `model`, in place, by one that exchanges rows.

    Args:
        model: a Hugging Face decoder, in evaluation mode.
        session: the rank that this process holds.
        exchange: name of the group's exchange.
        rowwise: make results independent of the batch, for the blocks and for every `nn.Linear` of
            the model.

    Raises:
        SpecError: the model has no block that is known here, or the exchange's layout is not one
            this adapter computes.
        GroupMismatch: the group was created for another model, or its `weights` are not those of
            this model's experts: `w13` and `w2` as `elasticep checkpoint` prints them.
    """
    chosen = session.exchange(exchange)
    for part in chosen.spec.parts():
        if part.by_expert or part.dispatch_dtype.quantised:
            raise SpecError(
                f"exchange {exchange!r} has layout {part.layout.value!r} and "
                f"{part.dispatch_dtype.value} rows; this adapter computes routed and arrival "
                "layouts with fp32, fp16 or bf16 rows"
            )
    found = _known_blocks(model)
    _require_same_sizes(found, session)
    dtype = cast(Any, found[0].experts).down_proj.dtype
    layers = MoELayers(session, chosen, rowwise=rowwise, dtype=dtype)
    if layers.from_arena:
        _require_same_weights(found[0], session)
        for block in found:
            del cast(Any, block.experts).gate_up_proj, cast(Any, block.experts).down_proj
    layers.blocks = [ExchangeMoE(block, layer, layers) for layer, block in enumerate(found)]
    _replace_children(model, dict(zip(map(id, found), layers.blocks, strict=True)))
    if rowwise:
        make_rowwise(model)
    return layers


def _known_blocks(model: nn.Module) -> list[nn.Module]:
    found = [m for m in model.modules() if type(m).__name__ in SUPPORTED_BLOCKS]
    if not found:
        raise SpecError(
            f"{type(model).__name__} has no MoE block that this adapter knows "
            f"({', '.join(SUPPORTED_BLOCKS)}); write its exchange as docs/client.md shows"
        )
    return found


def make_rowwise(model: nn.Module) -> None:
    """Replace every `nn.Linear` of `model`, in place, by a `RowwiseLinear`."""
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    _replace_children(model, {id(linear): RowwiseLinear(linear) for linear in linears})


def _replace_children(model: nn.Module, replacements: dict[int, Any]) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in replacements:
                setattr(parent, name, replacements[id(child)])


def _require_same_sizes(blocks: list[nn.Module], session: Session) -> None:
    geometry = session.config.geometry
    experts, _, hidden = cast(Any, blocks[0].experts).gate_up_proj.shape
    for name, model_has, group_has in (
        ("MoE layers", len(blocks), geometry.layers),
        ("experts", experts, geometry.experts),
        ("hidden size", hidden, geometry.hidden),
        ("top-k", cast(Any, blocks[0].gate).top_k, geometry.topk),
    ):
        if model_has != group_has:
            raise GroupMismatch(
                f"{name}: the model has {model_has}, group {session.config.name!r} {group_has}; "
                "create a group with the model's sizes"
            )


def _require_same_weights(block: nn.Module, session: Session) -> None:
    experts = cast(Any, block.experts)
    wanted = {
        name: (str(tensor.dtype), list(tensor.shape[1:]))
        for name, tensor in (("w13", experts.gate_up_proj), ("w2", experts.down_proj))
    }
    spec = session.config.weights
    assert spec is not None
    have = {t.name: (str(TORCH[t.dtype]), list(t.shape)) for t in spec.tensors}
    if have != wanted:
        raise GroupMismatch(
            f"weights of an expert: the model has {wanted}, group {session.config.name!r} {have}; "
            "create the group with what `elasticep checkpoint` prints for the model"
        )
