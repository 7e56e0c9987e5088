"""Enums and structures of `csrc/cuda/elasticep_cuda.h`, in its order, for ctypes."""

import enum
from ctypes import Structure, c_float, c_int32, c_uint32, c_uint64, c_void_p

from elasticep.native import abi

MAX_TENSORS = 64
"""`EPC_MAX_TENSORS`: of an expert."""


class Why(enum.IntEnum):
    """`enum epc_why`: why a step was torn on this rank."""

    NONE = 0
    TORN_HERE = 1
    PASSED_BY = 2
    PEER_LEFT = 3
    PEER_DEAD = 4
    FENCED = 5
    TIMEOUT = 6
    ENGINE = 7
    ROOM = 8
    LOST = 9
    IDS = 10
    DISAGREE = 11
    SEQUENCE = 12
    SCALES = 13
    ENDED = 14


class StepStatus(enum.IntEnum):
    """`enum epc_step_status`: what the step barrier decided."""

    RUN = 0
    DOOMED = 1
    TIMEOUT = 2
    EXPELLED = 3
    NO_VIEW = 4


class Plan(enum.IntEnum):
    """How rows move; `AUTOMATIC` chooses by size, the others are for measurements."""

    AUTOMATIC = 0
    VECTOR = 1
    BULK = 2


class Tuning(enum.IntFlag):
    """`enum epc_tuning`: other ways of doing the same, added to a `Plan` in measurements."""

    NONE = 0
    UNFUSED = 1 << 8
    VIA_REGION = 1 << 9
    WIDE = 1 << 10
    WIDE_SUMS = 1 << 11


class Fault(Structure):
    """`epc_fault`."""

    _fields_ = (
        ("step", c_uint64),
        ("epoch", c_uint64),
        ("why", c_uint32),
        ("phase", c_uint32),
        ("exchange", c_uint32),
        ("rank", c_uint32),
        ("layer", c_uint32),
        ("expert", c_uint32),
        ("slot", c_uint32),
        ("rows", c_uint32),
        ("room", c_uint32),
        ("pad", c_uint32),
    )


class StepInfo(Structure):
    """`epc_step_info`."""

    _fields_ = (
        ("epoch", c_uint64),
        ("step", c_uint64),
        ("digest", c_uint64),
        ("barrier_ns", c_uint64),
        ("status", c_uint32),
        ("members", c_uint32),
        ("complete", c_uint32),
        ("ended", c_uint32),
        ("incarnation", c_uint32 * abi.MAX_RANKS),
        ("tokens", c_uint32 * abi.MAX_RANKS),
        ("work", c_uint64),
        ("settled", c_uint64),
    )


class Config(Structure):
    """`epc_config`."""

    _fields_ = (
        ("geometry", abi.Geometry),
        ("rank", c_uint32),
        ("incarnation", c_uint32),
        ("device", c_uint32),
        ("ranks_on_device", c_uint32),
        ("num_sms", c_uint32),
        ("count_loads", c_uint32),
        ("pinned_plan", c_uint32),
        ("reserved", c_uint32 * 9),
    )


class Received(Structure):
    """`epc_received`: device addresses, the same for the life of the context."""

    _fields_ = (
        ("rows", c_void_p),
        ("scales", c_void_p),
        ("ids", c_void_p),
        ("weights", c_void_p),
        ("slot_counts", c_void_p),
        ("slot_offsets", c_void_p),
        ("out", c_void_p),
        ("rows_count", c_uint64),
        ("source_rows", c_uint64),
        ("row_bytes", c_uint64),
        ("scale_bytes", c_uint64),
        ("out_rows", c_uint64),
        ("out_row_bytes", c_uint64),
        ("places", c_void_p),
        ("row_slots", c_void_p),
        ("arrivals", c_void_p),
        ("id_rows", c_uint64),
        ("scale_lead", c_uint64),
        ("scale_columns", c_uint32),
        ("out_dtype", c_uint32),
    )


class Counts(Structure):
    """`epc_counts`: what a dispatch with `cpu_sync` delivered."""

    _fields_ = (
        ("rows", c_uint64),
        ("arrived", c_uint64),
        ("torn", c_uint32),
        ("pad", c_uint32),
    )


class DispatchArgs(Structure):
    """`epc_dispatch_args`."""

    _fields_ = (
        ("exchange", c_uint32),
        ("channel", c_uint32),
        ("layer", c_uint32),
        ("tokens", c_uint32),
        ("x_dtype", c_uint32),
        ("ids_bytes", c_uint32),
        ("x", c_void_p),
        ("x_scales", c_void_p),
        ("ids", c_void_p),
        ("weights", c_void_p),
        ("lost", c_void_p),
        ("global_scale", c_float),
        ("pad", c_uint32),
    )


class Weights(Structure):
    """`epc_weights`: the rank's arena of expert weights in host memory."""

    _fields_ = (
        ("arena_fd", c_int32),
        ("layers", c_uint32),
        ("slots", c_uint32),
        ("tensors", c_uint32),
        ("digest", c_uint64),
        ("total_bytes", c_uint64),
        ("labels_offset", c_uint64),
        ("data_offset", c_uint64),
        ("layer_bytes", c_uint64),
        ("offset", c_uint64 * MAX_TENSORS),
        ("bytes", c_uint64 * MAX_TENSORS),
    )


class Copied(Structure):
    """`epc_copied`: what was copied from the arena to the GPU, and how long that took."""

    _fields_ = (("slots", c_uint64), ("bytes", c_uint64), ("ns", c_uint64))
