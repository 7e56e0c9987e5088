"""Which node keeps the backup of which expert. Pure.

Expert e of layer l goes to node (l * experts + e) modulo nodes, in the order of their names; if
that is the only node on which the expert lives, to the next one. So every expert has a holder,
however experts and nodes divide, no node has more than its share (and what it takes over from its
neighbour), and a node that comes or goes changes the same thing everywhere without a word.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

EMPTY = -1


def holders(
    nodes: Sequence[str],
    slot_expert: NDArray[np.int32],
    node_of: Mapping[int, str],
    experts: int,
) -> NDArray[np.int64]:
    """The node that holds the backup of each expert.

    With one node it holds them all: that outlives a GPU, though not the node.

    Args:
        nodes: names, ascending; at least one.
        slot_expert: int32 [layers, max_ranks, slots], -1 = empty.
        node_of: rank -> node, for the members.
        experts: per layer.

    Returns:
        int64 [layers, experts], index into `nodes`.
    """
    layers = slot_expert.shape[0]
    count = len(nodes)
    first = np.arange(layers * experts).reshape(layers, experts) % count
    lives = np.zeros((layers, experts, count), np.bool_)
    number = {node: index for index, node in enumerate(nodes)}
    for rank, node in node_of.items():
        if node in number:
            layer, slot = np.nonzero(slot_expert[:, rank] != EMPTY)
            lives[layer, slot_expert[layer, rank, slot], number[node]] = True
    alone = lives.sum(axis=2) == 1
    here = np.take_along_axis(lives, first[:, :, None], axis=2)[:, :, 0]
    return np.where(alone & here, (first + 1) % count, first)


def share(mine: NDArray[np.bool_], single: NDArray[np.bool_], slots: int) -> list[tuple[int, int]]:
    """The (layer, expert) pairs to hold when there is room for `slots` of each layer.

    Args:
        mine: bool [layers, experts], what this node is to hold.
        single: bool of the same shape, experts that live on one node only: they go first.
        slots: per layer.
    """
    chosen: list[tuple[int, int]] = []
    for layer in range(mine.shape[0]):
        experts = np.flatnonzero(mine[layer]).tolist()
        experts.sort(key=lambda expert: (not single[layer, expert], expert))
        chosen += [(layer, expert) for expert in experts[:slots]]
    return chosen


def live_nodes(
    slot_expert: NDArray[np.int32], node_of: Mapping[int, str], experts: int
) -> NDArray[np.int64]:
    """On how many nodes each expert lives: int64 [layers, experts]."""
    layers = slot_expert.shape[0]
    found = np.zeros((layers, experts), np.int64)
    for node in set(node_of.values()):
        lives = np.zeros((layers, experts), np.bool_)
        for rank in (rank for rank, where in node_of.items() if where == node):
            layer, slot = np.nonzero(slot_expert[:, rank] != EMPTY)
            lives[layer, slot_expert[layer, rank, slot]] = True
        found += lives
    return found
