"""How a group keeps its experts balanced: what may move, how often, and for how much."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from elasticep.config import refuse_unknown
from elasticep.errors import ConfigError
from elasticep.proto import types_pb2

_DAY_MS = 86_400_000
# field -> least and most
_RANGES: dict[str, tuple[float, float]] = {
    "target": (1.0, 1_000.0),
    "min_gain": (0.0, 1_000.0),
    "min_interval_ms": (0, _DAY_MS),
    "settle_ms": (0, _DAY_MS),
    "stuck_ms": (1_000, _DAY_MS),
    "window_ms": (100, _DAY_MS),
    "max_moves": (0, 2**31 - 1),
    "max_bytes": (0, 2**63 - 1),
    "groups": (1, 65_535),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalancePolicy:
    """When and how far experts are moved in the background. Imbalance is the busiest rank's load
    over the mean of all ranks; figures are averages over the layers.

    Attributes:
        automatic: rebalance and repair redundancy without being asked.
        target: an imbalance at or below this is not moved for.
        min_gain: a rebalance has to lower the busiest ranks' load by this fraction at least.
        min_interval_ms: time between the ends and starts of automatic rebalances.
        settle_ms: how long a view is in force before anything is moved in the background.
        stuck_ms: a rebalance without progress for this long is abandoned and begun anew.
        window_ms: length of a load window; four windows later a load weighs half.
        max_moves: copies of experts in one rebalance at most; 0: no limit. Lost experts and
            missing second copies come first.
        max_bytes: bytes of weights in one rebalance at most; 0: no limit.
        groups: expert groups of group-limited routing, each kept inside one node; 1: none.
    """

    automatic: bool = True
    target: float = 1.03
    min_gain: float = 0.05
    min_interval_ms: int = 60_000
    settle_ms: int = 5_000
    stuck_ms: int = 60_000
    window_ms: int = 10_000
    max_moves: int = 0
    max_bytes: int = 0
    groups: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.automatic, bool):
            raise ConfigError("rebalance.automatic must be true or false")
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            whole = isinstance(low, int)
            kinds = (int,) if whole else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
                kind = "a whole number from" if whole else "a number from"
                raise ConfigError(
                    f"rebalance.{name} is {value!r}; it must be {kind} {low} to {high}"
                )

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; what is missing has its default, unknown keys are refused."""
        refuse_unknown("[rebalance]", plain, [f.name for f in fields(cls)])
        return cls(**plain)

    def to_proto(self) -> types_pb2.RebalancePolicy:
        """The message."""
        return types_pb2.RebalancePolicy(**self.to_dict())

    @classmethod
    def from_proto(cls, message: types_pb2.RebalancePolicy) -> Self:
        """Inverse of `to_proto`."""
        return cls(**{f.name: getattr(message, f.name) for f in fields(cls)})
