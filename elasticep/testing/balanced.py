"""A group with its background, in simulated time: for unit tests of rebalancing."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from elasticep.balance import RebalancePolicy
from elasticep.control import events as ev
from elasticep.control.background import Ask, Background, Pause, Resume
from elasticep.control.placement import EMPTY, Placement
from elasticep.control.planning import Figures, Planned
from elasticep.group import GroupConfig
from elasticep.testing.membership import World, group_config

NODES = {"a": (0, 1), "b": (2, 3)}
POLICY = RebalancePolicy(settle_ms=500, min_interval_ms=2_000, window_ms=1_000, stuck_ms=10_000)


class Balanced:
    """A formed group with its background; time passes for both."""

    def __init__(self, config: GroupConfig | None = None, **changes: object) -> None:
        changes.setdefault("flap_limit", 0)
        changes.setdefault("rebalance", POLICY)
        self.world = World(config or group_config(**changes), NODES)  # type: ignore[arg-type]
        self.background = Background(self.world.membership, None, self.world.now_ms)
        self.counters = {
            rank: np.zeros((2, self.world.config.geometry.experts), np.int64) for rank in range(4)
        }
        self.meets = True
        self.world.settle()
        self.count(np.zeros_like(self.counters[0]))

    def count(self, tokens: NDArray[np.int64]) -> None:
        """Every rank counts tokens [layers, experts] and reports."""
        for rank, counters in self.counters.items():
            node, seat = self.world.seat(rank)
            counters += tokens
            report = ev.LoadReport(
                node.name, rank, seat.incarnation, 7, 0, counters.astype("<i8").tobytes()
            )
            self.world.take(self.background.load(report))

    def advance(self, ms: int, tokens: NDArray[np.int64] | None = None) -> None:
        """Time passes in ticks; ranks meet, count and report in each."""
        for _ in range(ms // 100):
            if tokens is not None:
                self.count(tokens)
            self.world.run()
            if self.meets:
                self.world.barrier()
            self.world.run()
            self.world.advance(100)
            outcomes, job = self.background.tick(self.world.now_ms)
            for out in outcomes:
                self.world.take(out)
            if job is not None:
                self.planned(job.run())

    def planned(self, planned: Planned) -> None:
        """A plan comes back."""
        self.world.take(self.background.planned(planned, self.world.now_ms))

    def operate(self, event: Ask | Pause | Resume) -> None:
        """An operator wants something."""
        for out in self.background.operate(event, self.world.now_ms):
            self.world.take(out)

    def until(self, condition: Callable[[], bool], tokens: NDArray[np.int64] | None = None) -> None:
        """Let time pass until something is so."""
        for _ in range(600):
            if condition():
                return
            self.advance(100, tokens)
        raise AssertionError(f"{condition}: {self.background.rebalancer}")

    def events(self, name: str) -> list[dict[str, object]]:
        """Fields of all notices of a name."""
        return [notice.fields for notice in self.world.notices if notice.event == name]

    @property
    def imbalance(self) -> float:
        """Of the view under the loads that are known."""
        view = self.world.view
        return Figures.of(view.placement, self.background.around, view.ranks).mean

    def next_leader(self) -> None:
        """Another controller takes over from the store."""
        saved = self.world.saved_rebalance
        self.world.restart_controller()
        self.background = Background(self.world.membership, saved, self.world.now_ms)


def skewed(experts: int = 8, hot: int = 0, weight: int = 20) -> NDArray[np.int64]:
    """Tokens [2, experts], most of them for one expert."""
    tokens = np.full((2, experts), 5, np.int64)
    tokens[:, hot] *= weight
    return tokens


def hot_rank(group: Balanced) -> NDArray[np.int64]:
    """Loads that fall on what lies on rank 0 alone, as it is now."""
    tokens = np.ones((2, group.world.config.geometry.experts), np.int64)
    for layer in range(2):
        held = group.world.view.placement.slot_expert[layer, 0]
        tokens[layer, held[held != EMPTY]] = 40
    return tokens


def swapped(now: Placement) -> Placement:
    """What two ranks hold in the first layer, exchanged."""
    table, weight = now.slot_expert.copy(), now.slot_weight.copy()
    table[0, [0, 2]], weight[0, [0, 2]] = table[0, [2, 0]], weight[0, [2, 0]]
    return Placement(experts=now.experts, slot_expert=table, slot_weight=weight)
