"""Placement of experts: the public names. Pure: no clock, no I/O, no threads.

`round_robin` starts a group, `plan` improves it when loads are known, `without` and `resplit` keep
it serving when ranks die. `docs/placement.md` says how the planner works.
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
