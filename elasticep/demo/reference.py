"""What the answers must be: the same model in one process, no exchange.

Every product takes one row, as in the engines, and a token's experts are added in the order of its
choices. So no bit of a token hangs on the batch it came in or on the rank that had its experts, and
the engines' logits can be compared bit for bit. (Products of several rows add up in an order that
depends on how many there are. With the model's own MoE blocks one choice of 3,600 fell otherwise
for the batch's size alone.)
"""

import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from elasticep.demo.batch import Batch
from elasticep.demo.journal import Assignment
from elasticep.demo.model import Decoder, logit_sums
from elasticep.demo.settings import ModelSizes
from elasticep.engines.transformers import SUPPORTED_BLOCKS, rowwise_linear


@dataclass(frozen=True, slots=True)
class Reference:
    """Attributes:
    tokens: of each request.
    sums: of each token's logits.
    min_margin: smallest distance between the best and the second-best logit of any token.
    """

    tokens: list[list[int]]
    sums: list[list[int]]
    min_margin: float


class RowwiseMoE(nn.Module):
    """A MoE block of the model with its own weights, computed row by row.

    Args:
        block: the block it stands for.
    """

    gate: Any
    experts: Any

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.gate = block.gate
        self.experts = block.experts

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[..., H]` -> `[..., H]`."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        best = torch.softmax(rowwise_linear(x, self.gate.weight), dim=-1).topk(self.gate.top_k)
        weights = best.values / best.values.sum(dim=-1, keepdim=True)
        outputs = torch.zeros(*best.indices.shape, x.shape[-1])
        for expert in best.indices.unique().tolist():
            row, pick = (best.indices == expert).nonzero(as_tuple=True)
            both = rowwise_linear(x[row], self.experts.gate_up_proj[expert])
            gate, up = both.chunk(2, dim=-1)
            inner = self.experts.act_fn(gate) * up
            outputs[row, pick] = rowwise_linear(inner, self.experts.down_proj[expert])
        total = torch.zeros_like(x)
        for pick in range(self.gate.top_k):
            total = total + weights[:, pick, None] * outputs[:, pick]
        return total.view(hidden_states.shape)


def rowwise_model(model: Any) -> Any:
    """A copy of the model of `build_model` whose MoE blocks are computed row by row, too."""
    whole = copy.deepcopy(model)
    for layer in whole.model.layers:
        if type(layer.mlp).__name__ in SUPPORTED_BLOCKS:
            layer.mlp = RowwiseMoE(cast(nn.Module, layer.mlp))
    return whole


def run_reference(
    model: Any, sizes: ModelSizes, requests: list[Assignment], length: int
) -> Reference:
    """Decode all requests at once, one token per row and step as the engines do."""
    batch = Batch(len(requests))
    decoder = Decoder(rowwise_model(model), sizes, len(requests), length)
    for request in requests:
        batch.add(request)
    tokens: list[list[int]] = [[] for _ in requests]
    sums: list[list[int]] = [[] for _ in requests]
    margin = float("inf")
    while batch.requests:
        feed = batch.feed()
        logits = decoder.step(feed.tokens, feed.positions)
        of_row = logit_sums(logits)
        top = torch.topk(logits, 2)
        margins = (top.values[:, 0] - top.values[:, 1]).tolist()
        for answer in batch.advance(top.indices[:, 0].tolist()):
            tokens[answer.request].append(answer.token)
            sums[answer.request].append(of_row[answer.row])
            margin = min(margin, margins[answer.row])
    return Reference(tokens, sums, margin)
