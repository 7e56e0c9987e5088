"""How checkpoints name the tensors of their experts, and how they are named here.

Families differ in a few words only, so names are read by their form and not by a table of models:

    ...layers.3.block_sparse_moe.experts.5.w1.weight                   Mixtral
    ...layers.3.mlp.experts.5.gate_proj.weight                         Qwen-MoE, DeepSeek and kin
    ...layers.3.mlp.experts.5.gate_proj.weight_scale_inv               fp8 block scales of DeepSeek
    ...layers.3.mlp.experts.gate_up_proj_blocks                        GPT-OSS: all experts in one

Here `w1` is the gate, `w3` the up and `w2` the down projection, with `_<suffix>` for what goes with
it (`w1_scale_inv`, `w2_bias`). Digits side by side stand for projections one above the other: `w13`
is gate over up, `w13_scale_inv` their scales. Tensors that hold all experts keep their own names.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

_EXPERT: Final = re.compile(
    r"(?:.*\.)?layers\.(?P<layer>\d{1,5})\.(?:mlp|block_sparse_moe|feed_forward)\.experts\."
    r"(?P<expert>\d{1,5})\.(?P<projection>w[123]|gate_proj|up_proj|down_proj)\."
    r"(?P<suffix>[A-Za-z0-9_]+)"
)
_STACKED: Final = re.compile(
    r"(?:.*\.)?layers\.(?P<layer>\d{1,5})\.(?:mlp|block_sparse_moe|feed_forward)\.experts\."
    r"(?P<kind>(?:gate_up_proj|gate_proj|up_proj|down_proj)(?:_[A-Za-z0-9_]+)?)"
)
_PROJECTIONS: Final = {
    "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2",
    "w1": "w1", "w2": "w2", "w3": "w3",
}  # fmt: skip
_FUSED: Final = re.compile(r"w(?P<numbers>[123]{2,3})(?P<rest>(?:_[A-Za-z0-9_]+)?)")
_ORDER: Final = {"w1": 0, "w13": 0, "w31": 0, "gate_up_proj": 0, "w3": 1, "w2": 2, "down_proj": 2}


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """A tensor of a checkpoint that belongs to routed experts.

    Attributes:
        name: in the checkpoint.
        layer: the model's layer, counted with its dense ones.
        expert: whose it is; None: it holds all experts of the layer, along its first dimension.
        kind: our name.
    """

    name: str
    layer: int
    expert: int | None
    kind: str


def expert_tensors(names: Iterable[str]) -> list[ExpertTensor]:
    """Those of `names` that are tensors of routed experts (not shared ones, not routers)."""
    found = []
    for name in names:
        match = _EXPERT.fullmatch(name)
        if match:
            kind = _PROJECTIONS[match["projection"]] + _rest(match["suffix"])
            found.append(ExpertTensor(name, int(match["layer"]), int(match["expert"]), kind))
            continue
        match = _STACKED.fullmatch(name)
        if match:
            found.append(ExpertTensor(name, int(match["layer"]), None, match["kind"]))
    return found


def parts_of(kind: str) -> tuple[str, ...]:
    """The tensors of which `kind` is made, one above the other: `w13_bias` -> w1_bias, w3_bias."""
    match = _FUSED.fullmatch(kind)
    if not match or len(set(match["numbers"])) != len(match["numbers"]):
        return (kind,)
    return tuple(f"w{number}{match['rest']}" for number in match["numbers"])


def fuse(kinds: Iterable[str]) -> list[str]:
    """Gate and up as one, wherever both are there: {w1, w3, w2} -> [w13, w2]."""
    left = set(kinds)
    fused = []
    for kind in sorted(left):
        if kind.startswith("w1") and "w3" + kind[2:] in left:
            left -= {kind, "w3" + kind[2:]}
            fused.append("w13" + kind[2:])
    return in_order([*left, *fused])


def in_order(kinds: Iterable[str]) -> list[str]:
    """Weights first, then what goes with them; gate, up, down in each."""

    def key(kind: str) -> tuple[str, int, str]:
        base, rest = _split(kind)
        return rest, _ORDER.get(base, len(_ORDER)), kind

    return sorted(kinds, key=key)


def _split(kind: str) -> tuple[str, str]:
    for base in sorted(_ORDER, key=len, reverse=True):
        if kind == base or kind.startswith(base + "_"):
            return base, kind[len(base) :]
    return kind, ""


def _rest(suffix: str) -> str:
    return "" if suffix == "weight" else "_" + suffix.removeprefix("weight_")
