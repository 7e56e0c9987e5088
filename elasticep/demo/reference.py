"""What the answers must be: the same model in one process, its own MoE blocks, no exchange."""

from dataclasses import dataclass
from typing import Any

import torch

from elasticep.demo.batch import Batch
from elasticep.demo.journal import Assignment
from elasticep.demo.model import Decoder
from elasticep.demo.settings import ModelSizes


@dataclass(frozen=True, slots=True)
class Reference:
    """Attributes:
    tokens: of each request.
    min_margin: smallest distance between the best and the second-best logit of any token.
    """

    tokens: list[list[int]]
    min_margin: float


def run_reference(
    model: Any, sizes: ModelSizes, requests: list[Assignment], length: int
) -> Reference:
    """Decode all requests at once, one token per row and step as the engines do."""
    batch = Batch(len(requests))
    decoder = Decoder(model, sizes, len(requests), length)
    for request in requests:
        batch.add(request)
    tokens: list[list[int]] = [[] for _ in requests]
    margin = float("inf")
    while batch.requests:
        feed = batch.feed()
        logits = decoder.step(feed.tokens, feed.positions)
        top = torch.topk(logits, 2)
        margins = (top.values[:, 0] - top.values[:, 1]).tolist()
        for answer in batch.advance(top.indices[:, 0].tolist()):
            tokens[answer.request].append(answer.token)
            margin = min(margin, margins[answer.row])
    return Reference(tokens, margin)
