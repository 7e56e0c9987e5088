"""Placement of experts, usable alone: `plan`, and a drop-in for the public EPLB's function.

    from elasticep.placement import rebalance_experts     # instead of `from eplb import ...`

`rebalance_experts` takes and returns torch tensors; nothing else here needs torch.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from elasticep.control.placement import (
    EMPTY,
    ONE,
    InvalidPlacement,
    LayerReport,
    Move,
    Placement,
    Plan,
    PlanPolicy,
    PlanReport,
    RankInfo,
    SlotShortage,
    plan,
    resplit,
)
from elasticep.control.planfile import export_json, import_json
from elasticep.control.stages import StagingImpossible, stages
from elasticep.errors import ConfigError
from elasticep.plain_placement import round_robin, without

if TYPE_CHECKING:
    import torch

__all__ = [
    "EMPTY",
    "ONE",
    "InvalidPlacement",
    "LayerReport",
    "Move",
    "Placement",
    "Plan",
    "PlanPolicy",
    "PlanReport",
    "RankInfo",
    "SlotShortage",
    "StagingImpossible",
    "export_json",
    "import_json",
    "plan",
    "rebalance_experts",
    "resplit",
    "round_robin",
    "stages",
    "without",
]

_FINE = 1 << 40  # float loads are rounded to this fraction of the heaviest layer's total


def rebalance_experts(
    weight: "torch.Tensor", num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]:
    """Place experts whose replicas share tokens evenly; signature and results of the public EPLB.

    As there, groups of experts are kept inside nodes when `num_nodes` divides `num_groups`, and
    ignored otherwise. Unlike there, no GPU gets two copies of an expert, experts without load do
    not drain the spare slots, and among placements within a hundredth of the best balance the one
    with fewest single copies is taken. With weighted replicas `plan` does better.

    Args:
        weight: load per expert [layers, experts], any real dtype, any device.
        num_replicas: slots of all GPUs, a multiple of `num_gpus`.
        num_groups: expert groups; divides the number of experts.
        num_nodes: nodes; divides `num_gpus`. GPUs are numbered node by node.
        num_gpus: GPUs.

    Returns:
        physical_to_logical_map: int64 [layers, num_replicas], GPU by GPU.
        logical_to_physical_map: int64 [layers, experts, X], X = most replicas of an expert,
            unused entries -1.
        expert_count: int64 [layers, experts], replicas of each expert.

    Raises:
        ConfigError: sizes that do not divide, or weights that are no tensor, negative or not
            finite.
        SlotShortage: fewer replicas than experts.
    """
    import torch

    if not isinstance(weight, torch.Tensor):
        raise ConfigError(
            f"weight is a {type(weight).__name__}; it must be a tensor [layers, experts], such as "
            "torch.as_tensor(weight), or call `plan`, which takes arrays"
        )
    on_cpu = weight.detach().cpu()
    loads = _integer_loads((on_cpu.double() if on_cpu.is_floating_point() else on_cpu).numpy())
    physical = physical_map(loads, num_replicas, num_groups, num_nodes, num_gpus)
    logical, count = _inverse(physical, loads.shape[1])
    return torch.from_numpy(physical), torch.from_numpy(logical), torch.from_numpy(count)


def physical_map(
    loads: NDArray[np.int64], num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> NDArray[np.int64]:
    """`physical_to_logical_map` of `rebalance_experts` from integer loads, without torch."""
    experts = loads.shape[1]
    for what, number, divisor, of in (
        ("num_replicas", num_replicas, num_gpus, "num_gpus"),
        ("num_gpus", num_gpus, num_nodes, "num_nodes"),
        ("the number of experts", experts, num_groups, "num_groups"),
    ):
        if divisor < 1 or number % divisor:
            raise ConfigError(f"{what} ({number}) must be a multiple of {of} ({divisor})")
    slots, gpus_per_node = num_replicas // num_gpus, num_gpus // num_nodes
    groups = num_groups if num_groups % num_nodes == 0 else 1
    here = experts // num_nodes if groups > 1 else experts
    if slots > here:
        raise ConfigError(
            f"{slots} slots per GPU for {here} experts: a GPU would hold an expert twice; "
            f"num_replicas can be {here * num_gpus} at most"
        )
    ranks = [
        RankInfo(gpu, f"node {gpu // gpus_per_node}", f"node {gpu // gpus_per_node}", slots)
        for gpu in range(num_gpus)
    ]
    policy = PlanPolicy(weighted=False, fill=True, groups=groups)
    placed = plan(loads, ranks, policy=policy).placement
    return placed.slot_expert.reshape(len(loads), num_replicas).astype(np.int64)


def _integer_loads(weight: NDArray[np.generic]) -> NDArray[np.int64]:
    if weight.ndim != 2 or 0 in weight.shape:
        raise ConfigError(f"weight is {weight.shape}; it must be [layers, experts]")
    if weight.dtype.kind in "iu":
        return weight.astype(np.int64)
    real = weight.astype(np.float64)
    if not np.isfinite(real).all() or real.min() < 0:
        raise ConfigError("weight holds a negative or non-finite load")
    total = float(real.sum(axis=1).max())
    return np.rint(real / total * _FINE).astype(np.int64) if total else real.astype(np.int64)


def _inverse(
    physical: NDArray[np.int64], experts: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Logical -> physical [layers, experts, X] and counts [layers, experts]."""
    layers, replicas = physical.shape
    key = (np.arange(layers)[:, None] * experts + physical).ravel()
    count = np.bincount(key, minlength=layers * experts)
    order = np.argsort(key, kind="stable")
    first = np.cumsum(count) - count
    turn = np.arange(len(key)) - first[key[order]]
    logical = np.full((layers * experts, int(count.max())), -1, np.int64)
    logical[key[order], turn] = order % replicas
    return logical.reshape(layers, experts, -1), count.reshape(layers, experts).astype(np.int64)
