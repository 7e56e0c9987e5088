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
    "ALLGATHER": "elasticep.spec",
    "AUTO": "elasticep.spec",
    "AttachError": "elasticep.errors",
    "Busy": "elasticep.errors",
    "CapExceeded": "elasticep.errors",
    "CheckpointError": "elasticep.errors",
    "ChecksumMismatch": "elasticep.errors",
    "Completion": "elasticep.group",
    "ConfigError": "elasticep.errors",
    "Copies": "elasticep.spec",
    "DaemonUnavailable": "elasticep.errors",
    "DescriptorsShort": "elasticep.errors",
    "Device": "elasticep.device",
    "DeviceFailed": "elasticep.errors",
    "EXPAND": "elasticep.spec",
    "EXPAND_SYNC": "elasticep.spec",
    "ElasticEPError": "elasticep.errors",
    "Exchange": "elasticep.client.exchange",
    "ExchangeSpec": "elasticep.spec",
    "ExpertsLost": "elasticep.errors",
    "Fenced": "elasticep.errors",
    "GeometryError": "elasticep.errors",
    "GroupConfig": "elasticep.group",
    "GroupGeometry": "elasticep.geometry",
    "GroupMismatch": "elasticep.errors",
    "LOW_LATENCY": "elasticep.spec",
    "Launch": "elasticep.group",
    "Layout": "elasticep.spec",
    "LostExperts": "elasticep.group",
    "MemoryShort": "elasticep.errors",
    "NORMAL": "elasticep.spec",
    "NativeError": "elasticep.errors",
    "NotLeader": "elasticep.errors",
    "PlacementError": "elasticep.errors",
    "ROUTED": "elasticep.spec",
    "RebalancePolicy": "elasticep.balance",
    "Received": "elasticep.client.exchange",
    "Reduce": "elasticep.spec",
    "SeatTaken": "elasticep.errors",
    "Session": "elasticep.client.session",
    "SlotInvalid": "elasticep.errors",
    "SpecError": "elasticep.errors",
    "Step": "elasticep.client.step",
    "StepTimeout": "elasticep.errors",
    "StepTorn": "elasticep.errors",
    "TensorError": "elasticep.errors",
    "TensorSpec": "elasticep.weights",
    "Timeouts": "elasticep.group",
    "Unavailable": "elasticep.errors",
    "UnknownGroup": "elasticep.errors",
    "UnknownRank": "elasticep.errors",
    "UsageError": "elasticep.errors",
    "View": "elasticep.client.view",
    "WeightDtype": "elasticep.weights",
    "WeightSpec": "elasticep.weights",
    "WeightsError": "elasticep.errors",
    "WireDtype": "elasticep.wire",
    "attach": "elasticep.client.attach",
}

if TYPE_CHECKING:
    from elasticep.balance import RebalancePolicy
    from elasticep.client.attach import attach
    from elasticep.client.exchange import Exchange, Received
    from elasticep.client.session import Session
    from elasticep.client.step import Step
    from elasticep.client.view import View
    from elasticep.device import Device
    from elasticep.errors import (
        AttachError,
        Busy,
        CapExceeded,
        CheckpointError,
        ChecksumMismatch,
        ConfigError,
        DaemonUnavailable,
        DescriptorsShort,
        DeviceFailed,
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
        SlotInvalid,
        SpecError,
        StepTimeout,
        StepTorn,
        TensorError,
        Unavailable,
        UnknownGroup,
        UnknownRank,
        UsageError,
        WeightsError,
    )
    from elasticep.geometry import GroupGeometry
    from elasticep.group import Completion, GroupConfig, Launch, LostExperts, Timeouts
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
    from elasticep.weights import TensorSpec, WeightDtype, WeightSpec
    from elasticep.wire import WireDtype

__all__ = [
    "ALLGATHER",
    "AUTO",
    "EXPAND",
    "EXPAND_SYNC",
    "LOW_LATENCY",
    "NORMAL",
    "ROUTED",
    "AttachError",
    "Busy",
    "CapExceeded",
    "CheckpointError",
    "ChecksumMismatch",
    "Completion",
    "ConfigError",
    "Copies",
    "DaemonUnavailable",
    "DescriptorsShort",
    "Device",
    "DeviceFailed",
    "ElasticEPError",
    "Exchange",
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
    "RebalancePolicy",
    "Received",
    "Reduce",
    "SeatTaken",
    "Session",
    "SlotInvalid",
    "SpecError",
    "Step",
    "StepTimeout",
    "StepTorn",
    "TensorError",
    "TensorSpec",
    "Timeouts",
    "Unavailable",
    "UnknownGroup",
    "UnknownRank",
    "UsageError",
    "View",
    "WeightDtype",
    "WeightSpec",
    "WeightsError",
    "WireDtype",
    "__version__",
    "attach",
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
