"""Placement of experts: what the controller uses of it. Pure: no clock, no I/O, no threads.

`plan` starts a group and improves it, `resplit` keeps it serving when ranks die. How the planner
works is in `docs/placement.md`; the public names are those of `elasticep.placement`.
"""

from elasticep.control.planner import plan, resplit
from elasticep.control.policy import PlanPolicy, RankInfo
from elasticep.control.report import LayerReport, Move, Plan, PlanReport
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
]
