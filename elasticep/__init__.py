"""elasticep keeps an expert-parallel MoE instance serving while ranks die and return.

Importing this package is cheap: none of the names below imports torch, gRPC or the native library
before it is used. An engine needs little more than `attach`; see `elasticep.client.session`.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> module that defines it. Kept in step with the imports below, which only type
# checkers and editors read; a test compares the two.
_EXPORTS: dict[str, str] = {
    "AttachError": "elasticep.errors",
    "CapExceeded": "elasticep.errors",
    "ConfigError": "elasticep.errors",
    "DaemonUnavailable": "elasticep.errors",
    "ElasticEPError": "elasticep.errors",
    "ExpertsLost": "elasticep.errors",
    "Fenced": "elasticep.errors",
    "GeometryError": "elasticep.errors",
    "GroupMismatch": "elasticep.errors",
    "MemoryShort": "elasticep.errors",
    "NativeError": "elasticep.errors",
    "NotLeader": "elasticep.errors",
    "PlacementError": "elasticep.errors",
    "SeatTaken": "elasticep.errors",
    "SpecError": "elasticep.errors",
    "StepTimeout": "elasticep.errors",
    "TensorError": "elasticep.errors",
    "Unavailable": "elasticep.errors",
    "UnknownGroup": "elasticep.errors",
    "UnknownRank": "elasticep.errors",
    "UsageError": "elasticep.errors",
}

if TYPE_CHECKING:
    from elasticep.errors import (
        AttachError,
        CapExceeded,
        ConfigError,
        DaemonUnavailable,
        ElasticEPError,
        ExpertsLost,
        Fenced,
        GeometryError,
        GroupMismatch,
        MemoryShort,
        NativeError,
        NotLeader,
        PlacementError,
        SeatTaken,
        SpecError,
        StepTimeout,
        TensorError,
        Unavailable,
        UnknownGroup,
        UnknownRank,
        UsageError,
    )

__all__ = [
    "AttachError",
    "CapExceeded",
    "ConfigError",
    "DaemonUnavailable",
    "ElasticEPError",
    "ExpertsLost",
    "Fenced",
    "GeometryError",
    "GroupMismatch",
    "MemoryShort",
    "NativeError",
    "NotLeader",
    "PlacementError",
    "SeatTaken",
    "SpecError",
    "StepTimeout",
    "TensorError",
    "Unavailable",
    "UnknownGroup",
    "UnknownRank",
    "UsageError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'elasticep' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
