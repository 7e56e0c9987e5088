"""What `bench exchange --device cuda` times: models, ways to exchange, inputs and bytes."""

from dataclasses import dataclass
from typing import Final, Self

import torch

from elasticep.bench.device_streams import EMULATED
from elasticep.native import abi
from elasticep.wire import WireDtype

DECODE_CAP: Final = 128
PREFILL_CAP: Final = 4096
MODELS: Final[dict[str, tuple[int, int, int]]] = {
    "deepseek-v4.1-flash": (5120, 384, 6),
    "deepseek-v3": (7168, 256, 8),
}
"""Hidden, experts, top-k."""
REHEARSAL: Final = "rehearsal"
SHAPES: Final = {**MODELS, REHEARSAL: (256, 16, 4)}
"""The models, and one for a machine whose times say nothing."""
_GROUP: Final = 4  # variants of a group, each with a decode and a prefill exchange


@dataclass(frozen=True, slots=True)
class Variant:
    """An exchange as it is timed.

    Attributes:
        name: as printed.
        layout: in what order rows are handed to the expert kernel.
        dispatch: wire format out.
        copies: how often a row is sent.
        reduce: where outputs are summed.
        cpu_sync: whether the count is written for the host.
    """

    name: str
    layout: abi.RowLayout
    dispatch: abi.Dtype = abi.Dtype.BF16
    copies: abi.Copies = abi.Copies.PER_RANK
    reduce: abi.Reduce = abi.Reduce.PER_RANK
    cpu_sync: bool = False

    @property
    def caps(self) -> tuple[int, int]:
        """Caps of the decode and the prefill exchange. A masked block per expert grows with slots
        x ranks x cap, so its prefill is a small one."""
        if self.copies == abi.Copies.PER_EXPERT:
            return DECODE_CAP, DECODE_CAP
        return DECODE_CAP, 512 if self.layout == abi.RowLayout.MASKED else PREFILL_CAP


_L, _C = abi.RowLayout, abi.Copies
VARIANTS: Final = (
    Variant("ROUTED", _L.ROUTED),
    Variant("ROUTED fp8", _L.ROUTED, abi.Dtype.FP8),
    Variant("EXPAND masked", _L.MASKED),
    Variant("EXPAND contiguous", _L.CONTIGUOUS),
    Variant("EXPAND masked fp8", _L.MASKED, abi.Dtype.FP8),
    Variant("EXPAND contiguous fp8", _L.CONTIGUOUS, abi.Dtype.FP8),
    Variant("LOW_LATENCY", _L.MASKED, copies=_C.PER_EXPERT, reduce=abi.Reduce.PER_EXPERT),
    Variant("NORMAL", _L.ARRIVAL, cpu_sync=True),
    Variant("ALLGATHER", _L.ARRIVAL, copies=_C.ALL),
    Variant("NORMAL fp8", _L.ARRIVAL, abi.Dtype.FP8, cpu_sync=True),
    Variant(
        *("LOW_LATENCY fp8", _L.MASKED, abi.Dtype.FP8),
        copies=_C.PER_EXPERT,
        reduce=abi.Reduce.PER_EXPERT,
    ),
)


def groups(names: list[str]) -> list[list[Variant]]:
    """The variants of these names, as many together as a group has exchanges for."""
    chosen = [v for v in VARIANTS if v.name in names]
    return [chosen[i : i + _GROUP] for i in range(0, len(chosen), _GROUP)]


def model_geometry(
    hidden: int, experts: int, topk: int, ranks: int, variants: list[Variant] | None = None
) -> bytes:
    """A group with every variant (the first four unless named) as a decode and a prefill exchange;
    exchange 2 i + j is variant i with cap j."""
    variants = list(VARIANTS[:_GROUP]) if variants is None else variants
    g = abi.Geometry(
        layers=1,
        experts=experts,
        topk=topk,
        hidden=hidden,
        slots=-(-experts // ranks),
        max_ranks=ranks,
        exchanges=2 * len(variants),
        launch=int(abi.Launch.INLINE),
    )
    for i, v in enumerate(variants):
        for j, cap in enumerate(v.caps):
            g.exchange[2 * i + j] = abi.ExchangeConfig(
                copies=int(v.copies),
                layout=int(v.layout),
                dispatch_dtype=int(v.dispatch),
                combine_dtype=int(abi.Dtype.BF16),
                reduce=int(v.reduce),
                cpu_sync=int(v.cpu_sync),
                max_tokens=cap,
                channels=1,
            )
    return bytes(g)


def remote_bytes(v: Variant, ids: torch.Tensor, experts: int, ranks: int, hidden: int) -> int:
    """Bytes that cross the link for rank-major `ids` [tokens, topk] of the first rank, out and
    back; expert e is on rank e // ceil(experts / ranks)."""
    owner = ids // -(-experts // ranks)
    hit = torch.zeros(ids.shape[0], ranks, dtype=torch.bool, device=ids.device)
    hit.scatter_(1, owner.long(), True)
    per_rank = int(hit[:, 1:].sum())
    pairs = int((owner > 0).sum())
    out = {
        abi.Copies.ALL: ids.shape[0] * (ranks - 1),
        abi.Copies.PER_EXPERT: pairs,
        abi.Copies.PER_RANK: per_rank,
    }[v.copies]
    back = pairs if v.reduce == abi.Reduce.PER_EXPERT else per_rank
    there = WireDtype(v.dispatch.name.lower()).row_bytes(hidden)
    return out * there + back * hidden * 2


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's rows, routing and result."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    out: torch.Tensor

    @classmethod
    def random(cls, tokens: int, hidden: int, experts: int, topk: int, seed: int) -> Self:
        """Normal rows and uniform routing."""
        device = "cpu" if EMULATED else "cuda"
        generator = torch.Generator(device).manual_seed(seed)
        x = torch.randn(tokens, hidden, device=device, generator=generator).bfloat16()
        scores = torch.randn(tokens, experts, device=device, generator=generator)
        ids = scores.topk(topk, -1)[1].int()
        weights = torch.rand(tokens, topk, device=device, generator=generator)
        return cls(x, ids, weights, torch.empty_like(x))
