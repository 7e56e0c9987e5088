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
    "GroupGeometry": "elasticep.geometry",
    "GroupConfig": "elasticep.group",
    "Launch": "elasticep.group",
    "LostExperts": "elasticep.group",
    "Timeouts": "elasticep.group",
    "ALLGATHER": "elasticep.spec",
    "AUTO": "elasticep.spec",
    "EXPAND": "elasticep.spec",
    "EXPAND_SYNC": "elasticep.spec",
    "LOW_LATENCY": "elasticep.spec",
    "NORMAL": "elasticep.spec",
    "ROUTED": "elasticep.spec",
    "Copies": "elasticep.spec",
    "ExchangeSpec": "elasticep.spec",
    "Layout": "elasticep.spec",
    "Reduce": "elasticep.spec",
    "WireDtype": "elasticep.wire",
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
    from elasticep.geometry import (
        GroupGeometry,
    )
    from elasticep.group import (
        GroupConfig,
        Launch,
        LostExperts,
        Timeouts,
    )
    from elasticep.spec import (
        ALLGATHER,
        AUTO,
        EXPAND,
        EXPAND_SYNC,
        LOW_LATENCY,
        NORMAL,
        ROUTED,
        Copies,
        ExchangeSpec,
        Layout,
        Reduce,
    )
    from elasticep.wire import (
        WireDtype,
    )

__all__ = [
    "ALLGATHER",
    "AUTO",
    "EXPAND",
    "EXPAND_SYNC",
    "LOW_LATENCY",
    "NORMAL",
    "ROUTED",
    "AttachError",
    "CapExceeded",
    "ConfigError",
    "Copies",
    "DaemonUnavailable",
    "ElasticEPError",
    "ExchangeSpec",
    "ExpertsLost",
    "Fenced",
    "GeometryError",
    "GroupConfig",
    "GroupGeometry",
    "GroupMismatch",
    "Launch",
    "Layout",
    "LostExperts",
    "MemoryShort",
    "NativeError",
    "NotLeader",
    "PlacementError",
    "Reduce",
    "SeatTaken",
    "SpecError",
    "StepTimeout",
    "TensorError",
    "Timeouts",
    "Unavailable",
    "UnknownGroup",
    "UnknownRank",
    "UsageError",
    "WireDtype",
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
