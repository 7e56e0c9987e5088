"""The greedy expert load balancer that the field uses, written plainly from its description.

This is the yardstick of `python -m elasticep.bench placement`, not a part of the runtime. The
method, as the public EPLB library describes it: give the next replica to the expert whose replicas
carry most each, then sort the replicas by load and put each on the least loaded GPU that has room.
Replicas of an expert share its tokens evenly. Hierarchical: groups of experts go to nodes in the
same way first, and the two steps run inside each node; used when the nodes divide the groups.
"""

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]
Int64Array = NDArray[np.int64]


def greedy_rebalance(
    weight: Float64Array, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Int64Array, Int64Array]:
    """Place experts as the public greedy does.

    Args:
        weight: load per expert, [layers, experts].
        num_replicas: slots of all GPUs; a multiple of `num_gpus`.
        num_groups: expert groups.
        num_nodes: nodes; GPUs are numbered node by node.
        num_gpus: GPUs; a multiple of `num_nodes`.

    Returns:
        physical -> logical expert [layers, num_replicas], GPU by GPU, and the number of replicas
        of each expert [layers, experts].
    """
    if num_groups % num_nodes:
        num_groups, num_nodes = 1, 1  # the global policy
    layers, experts = weight.shape
    physical = np.zeros((layers, num_replicas), np.int64)
    count = np.zeros((layers, experts), np.int64)
    for layer in range(layers):
        physical[layer], count[layer] = _one_layer(
            weight[layer], num_replicas, num_groups, num_nodes, num_gpus
        )
    return physical, count


def _one_layer(
    weight: Float64Array, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Int64Array, Int64Array]:
    group_size = len(weight) // num_groups
    groups = weight.reshape(num_groups, group_size).sum(axis=1)
    count = np.zeros(len(weight), np.int64)
    physical: list[int] = []
    for node_groups in pack_evenly(groups, num_nodes):
        here = [group * group_size + i for group in node_groups for i in range(group_size)]
        replicas, copies = replicate(weight[here], num_replicas // num_nodes)
        for gpu in pack_evenly(weight[here][replicas] / copies[replicas], num_gpus // num_nodes):
            physical += [here[replicas[item]] for item in gpu]
        count[here] = copies
    return np.array(physical, np.int64), count


def replicate(weight: Float64Array, replicas: int) -> tuple[Int64Array, Int64Array]:
    """Expert of each replica [replicas] and copies of each expert [experts]."""
    copies = np.ones(len(weight), np.int64)
    extra = []
    for _ in range(replicas - len(weight)):
        heaviest = int(np.argmax(weight / copies))
        extra.append(heaviest)
        copies[heaviest] += 1
    return np.concatenate([np.arange(len(weight)), np.array(extra, np.int64)]), copies


def pack_evenly(weight: Float64Array, packs: int) -> list[list[int]]:
    """Items of each pack: heaviest first, into the lightest pack that has a place left."""
    places = len(weight) // packs
    items: list[list[int]] = [[] for _ in range(packs)]
    load = np.zeros(packs)
    full = np.zeros(packs)
    for item in np.argsort(-weight, kind="stable").tolist():
        pack = int(np.argmin(load + full))
        items[pack].append(item)
        load[pack] += weight[item]
        if len(items[pack]) == places:
            full[pack] = np.inf
    return items
