"""Placement of experts: the public names. Pure: no clock, no I/O, no threads.

`plan` starts a group and improves it, `resplit` keeps it serving when ranks die; `round_robin` and
`without` do without the native core. `docs/placement.md` says how the planner works.
"""

from elasticep.control.planner import plan, resplit
from elasticep.control.policy import PlanPolicy, RankInfo
from elasticep.control.report import LayerReport, Move, Plan, PlanReport
from elasticep.control.start import round_robin, without
from elasticep.control.tables import (
    EMPTY,
    ONE,
    GeometryLike,
    InvalidPlacement,
    Placement,
    SlotShortage,
)

__all__ = [
    "EMPTY",
    "ONE",
    "GeometryLike",
    "InvalidPlacement",
    "LayerReport",
    "Move",
    "Placement",
    "Plan",
    "PlanPolicy",
    "PlanReport",
    "RankInfo",
    "SlotShortage",
    "plan",
    "resplit",
    "round_robin",
    "without",
]
