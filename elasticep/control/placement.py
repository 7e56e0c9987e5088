"""Placement of experts: the public names. Pure: no clock, no I/O, no threads."""

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
    "Placement",
    "SlotShortage",
    "round_robin",
    "without",
]
