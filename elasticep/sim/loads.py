"""Load of simulated ranks: what a memory's counters hold follows from how many steps it completed.

A few experts are hot for a while, then others are, so that schedules contain rebalances.
"""

from typing import TYPE_CHECKING, Final

import numpy as np

from elasticep.balance import RebalancePolicy
from elasticep.control import events as ev
from elasticep.control.events import SeatState

if TYPE_CHECKING:
    from elasticep.sim.nodes import SimNode

POLICY: Final = RebalancePolicy(
    settle_ms=200, min_interval_ms=300, window_ms=250, stuck_ms=5_000, min_gain=0.02
)
_EVERY: Final = 2  # tokens of every expert in a step
_HOT: Final = 30  # more tokens of the hot one
_STEPS: Final = 40  # that an expert stays hot
_LARGE: Final = 16  # ranks; larger groups report no loads


def counters(steps: int, experts: int) -> bytes:
    """int64 [1, experts] after so many complete steps of a memory."""
    turns, rest = divmod(steps, _STEPS)
    counts = np.full(experts, _EVERY * steps, "<i8")
    whole, more = divmod(turns, experts)
    counts += whole * _STEPS * _HOT
    counts[:more] += _STEPS * _HOT
    counts[more % experts] += rest * _HOT
    return counts.tobytes()


def reports(node: "SimNode") -> tuple[tuple[str, ev.Event], ...]:
    """What a daemon says of its attached ranks' loads."""
    said: list[tuple[str, ev.Event]] = []
    for (group, rank), seat in node.seats.items():
        config, process = node.c.configs[group], seat.process
        if process is None or seat.state is not SeatState.ATTACHED:
            continue
        if config.geometry.max_ranks > _LARGE:
            continue
        content = counters(process.memory.complete, config.geometry.experts)
        identity = process.memory.identity
        said.append((group, ev.LoadReport(node.name, rank, seat.incarnation, identity, 0, content)))
    return tuple(said)
