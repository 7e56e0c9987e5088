"""What simulated nodes share, and their seats."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elasticep.control.events import SeatReport, SeatState
from elasticep.group import GroupConfig
from elasticep.sim.checks import Checker
from elasticep.sim.loop import VirtualLoop
from elasticep.sim.memory import Shared
from elasticep.sim.net import Net
from elasticep.sim.plants import Plant
from elasticep.sim.ranks import SimRank

if TYPE_CHECKING:
    from elasticep.sim.controllers import SimController
    from elasticep.sim.nodes import SimNode


@dataclass(slots=True)
class SimSeat:
    """A seat of a node."""

    group: str
    rank: int
    incarnation: int = 0
    state: SeatState = SeatState.EMPTY
    cause: str = ""
    process: SimRank | None = None
    told: set[int] = field(default_factory=set)  # staged epochs that were reported
    waits: int | None = None  # whom a wait report that stands is about

    def report(self) -> SeatReport:
        """What the daemon says of it."""
        live = self.state in (SeatState.READY, SeatState.ATTACHED)
        epoch = self.process.epoch if self.process is not None and live else 0
        return SeatReport(self.rank, self.incarnation, self.state, epoch, self.cause)


@dataclass(slots=True)
class Cluster:
    """What all nodes share."""

    loop: VirtualLoop
    rng: random.Random
    net: Net
    checker: Checker
    plant: Plant
    controllers: "Sequence[SimController]"
    groups: dict[str, Shared]
    configs: dict[str, GroupConfig]
    nodes: "dict[str, SimNode]" = field(default_factory=dict)
