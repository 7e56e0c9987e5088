"""Which node keeps the backup of which expert. Pure.

Every node has a score for every expert, a hash of its name and the expert, and the expert goes to
the node with the highest one (rendezvous hashing): a node that comes or goes changes hardly more
than what it takes or had. Two rules on top: a node on which alone the expert lives does not keep
its backup, and no node keeps more than an even share of a layer and an eighth, because memory is
laid out by layers. All nodes come to the same result without a word.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

EMPTY = -1
_SLACK: Final = 1.125  # times an even share


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
    layers, count = slot_expert.shape[0], len(nodes)
    lives = np.zeros((layers, experts, count), np.bool_)
    number = {node: index for index, node in enumerate(nodes)}
    for rank, node in node_of.items():
        if node in number:
            layer, slot = np.nonzero(slot_expert[:, rank] != EMPTY)
            lives[layer, slot_expert[layer, rank, slot], number[node]] = True
    scores = _scores(nodes, layers, experts)
    if count > 1:
        scores[lives & (lives.sum(axis=2) == 1)[:, :, None]] = 0.0
    free = scores.copy()  # 0 where the node must not or cannot take it
    room = np.full((layers, count), int(np.ceil(experts / count * _SLACK)))
    holder = np.full((layers, experts), -1, np.int64)
    for _ in range(count):
        choice, best = free.argmax(axis=2), free.max(axis=2)
        for index in range(count):
            asks = (holder < 0) & (choice == index) & (best > 0)
            # Of those that ask in a layer the ones with the highest scores are taken.
            place = np.where(asks, -best, 1.0).argsort(axis=1, kind="stable").argsort(axis=1)
            taken = asks & (place < room[:, index, None])
            holder[taken] = index
            room[:, index] -= taken.sum(axis=1)
        if (holder >= 0).all():
            return holder
        free *= (room > 0)[:, None, :]
    return np.where(holder < 0, scores.argmax(axis=2), holder)  # more than the nodes' shares


def _scores(nodes: Sequence[str], layers: int, experts: int) -> NDArray[np.float64]:
    """[layers, experts, nodes], above 0 and below 1; splitmix64 over name and expert."""
    seeds = np.array([xxhash.xxh3_64_intdigest(node.encode()) for node in nodes], np.uint64)
    x = np.arange(layers * experts, dtype=np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15)
    x = x + seeds[None, :]
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    score: NDArray[np.float64] = ((x >> np.uint64(12)).astype(np.float64) + 1.0) / 2.0**53
    return score.reshape(layers, experts, len(nodes))


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
