"""Constants, enums and structures of `csrc/elasticep.h`, in its order, for ctypes.

Import them from `elasticep.native.abi`.
"""

import enum
from ctypes import (
    POINTER,
    Structure,
    c_char,
    c_float,
    c_int32,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Final

ABI_VERSION: Final = 1
MAX_RANKS: Final = 128
MAX_TOPK: Final = 32
MAX_EXCHANGES: Final = 8
MAX_CHANNELS: Final = 2
BANKS: Final = 4
TEXT_BYTES: Final = 256
MESSAGE_MAGIC: Final = 0x314D5045
TOKENS_PROMPT: Final = 1 << 30


class Error(enum.IntEnum):
    """`enum ep_error`: what native functions return when they refuse."""

    EINVAL = -10001
    EMISMATCH = -10002
    EUSAGE = -10003
    ETORN = -10004
    EFENCED = -10005
    ETIMEOUT = -10006
    EGONE = -10007
    ECAP = -10008
    ELOST = -10009
    ESHORT = -10010
    EINTR = -10011
    EDEVICE = -10012


class Copies(enum.IntEnum):
    """`enum ep_copies`."""

    ALL = 0
    PER_EXPERT = 1
    PER_RANK = 2


class RowLayout(enum.IntEnum):
    """`enum ep_row_layout`."""

    ARRIVAL = 0
    CONTIGUOUS = 1
    MASKED = 2
    ROUTED = 3


class Dtype(enum.IntEnum):
    """`enum ep_dtype`."""

    FP32 = 0
    FP16 = 1
    BF16 = 2
    FP8 = 3
    MXFP8 = 4
    NVFP4 = 5


class Reduce(enum.IntEnum):
    """`enum ep_reduce`."""

    PER_RANK = 0
    PER_EXPERT = 1


class ScaleLayout(enum.IntEnum):
    """`enum ep_scale_layout`."""

    ROWS = 0
    COLUMNS = 1
    PACKED = 2


class Launch(enum.IntEnum):
    """`enum ep_launch`; the numbers of the message `elasticep.v1.Launch`."""

    SERVICE = 1
    INLINE = 2


class EventKind(enum.IntEnum):
    """`enum ep_event_kind`: what happened to a lock."""

    HELD = 1
    DIED = 2
    RELEASED = 3


class Holder(enum.IntEnum):
    """`enum ep_holder`: which lock of a header."""

    RUNNER = 0
    ENGINE = 1


class FailSite(enum.IntEnum):
    """`enum ep_failpoint`: where a test may stop or kill a runner."""

    NONE = 0
    CELLS = 1
    CELLS_SENT = 2
    ROWS = 3
    BITMAP = 4
    FLAG = 5
    SENT = 6
    RECEIVED = 7
    READY = 8
    READY_SENT = 9
    PULL = 10
    PULLED = 11
    END = 12
    STAGE = 13


class FailAction(enum.IntEnum):
    """`enum ep_fail_action`."""

    KILL = 1
    STOP = 2


class MessageType(enum.IntEnum):
    """`enum ep_message_type`."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    STAGE = 4
    STAGED = 5
    ADOPTED = 6
    QUIT = 7
    FETCH = 8
    FETCHED = 9
    WEIGHTS = 10
    MEMORY = 11
    PEERS = 12
    HEADWAY = 13


class Takes(enum.IntFlag):
    """`enum ep_takes`: what a daemon takes besides the messages of its first version."""

    HEADWAY = 1


class Role(enum.IntEnum):
    """`enum ep_role`: who says hello."""

    WORKER = 1
    ENGINE = 2
    PEER = 3


class WaitPhase(enum.IntEnum):
    """Values of `Status.wait_phase`."""

    NONE = 0
    BARRIER = 1
    DISPATCH = 2
    COMBINE = 3
    JOIN = 4  # at the barrier, without a view


# The fields below carry the names and the order of the C structures; fixed-width types only.


class ExchangeConfig(Structure):
    """`ep_exchange_config`."""

    _fields_ = (
        ("copies", c_uint32),
        ("layout", c_uint32),
        ("dispatch_dtype", c_uint32),
        ("combine_dtype", c_uint32),
        ("reduce", c_uint32),
        ("cpu_sync", c_uint32),
        ("max_tokens", c_uint32),
        ("channels", c_uint32),
        ("masked_room", c_uint32),
        ("replicated", c_uint32),
        ("scale_layout", c_uint32),
        ("reserved", c_uint32 * 5),
    )


class Geometry(Structure):
    """`ep_geometry`."""

    _fields_ = (
        ("layers", c_uint32),
        ("experts", c_uint32),
        ("topk", c_uint32),
        ("hidden", c_uint32),
        ("slots", c_uint32),
        ("max_ranks", c_uint32),
        ("exchanges", c_uint32),
        ("launch", c_uint32),
        ("serve_lost", c_uint32),
        ("agreed", c_uint32),
        ("device", c_uint32),
        ("reserved", c_uint32 * 5),
        ("exchange", ExchangeConfig * MAX_EXCHANGES),
    )


class Timeouts(Structure):
    """`ep_timeouts`, nanoseconds."""

    _fields_ = (
        ("suspect_after_ns", c_uint64),
        ("hang_timeout_ns", c_uint64),
        ("exchange_timeout_ns", c_uint64),
        ("step_timeout_ns", c_uint64),
    )


class LayoutInfo(Structure):
    """`ep_layout_info`."""

    _fields_ = (
        ("digest", c_uint64),
        ("header_bytes", c_uint64),
        ("data_bytes", c_uint64),
        ("bank_bytes", c_uint64),
    )


class View(Structure):
    """`ep_view`; the two pointers are addresses of row-major [layers][max_ranks][slots] tables."""

    _fields_ = (
        ("epoch", c_uint64),
        ("previous_epoch", c_uint64),
        ("digest", c_uint64),
        ("incarnation", c_uint32 * MAX_RANKS),
        ("slot_expert", c_void_p),
        ("slot_weight", c_void_p),
    )


class Status(Structure):
    """`ep_status`: what a header says of its rank."""

    _fields_ = (
        ("rank", c_uint32),
        ("incarnation", c_uint32),
        ("runner_pid", c_uint32),
        ("engine_pid", c_uint32),
        ("fenced", c_uint32),
        ("wait_phase", c_uint32),
        ("wait_exchange", c_uint32),
        ("wait_rank", c_uint32),
        ("wait_since_ns", c_uint64),
        ("progress", c_uint64),
        ("epoch", c_uint64),
        ("step", c_uint64),
        ("torn_steps", c_uint64),
        ("complete_steps", c_uint64),
        ("warmup", c_uint32),
        ("pad", c_uint32),
        ("staged", c_uint64 * BANKS),
    )

    def __repr__(self) -> str:
        names = [name for name, *_ in self._fields_ if name not in ("pad", "staged")]
        return f"Status({', '.join(f'{name}={getattr(self, name)}' for name in names)})"


class Event(Structure):
    """`ep_event`."""

    _fields_ = (
        ("key", c_uint64),
        ("kind", c_uint32),
        ("holder", c_uint32),
        ("pid", c_uint32),
        ("inc", c_uint32),
        ("at_ns", c_uint64),
    )


class Message(Structure):
    """`ep_message`, the fixed part of every SEQPACKET message."""

    _fields_ = (
        ("magic", c_uint32),
        ("type", c_uint32),
        ("status", c_int32),
        ("rank", c_uint32),
        ("a", c_uint64),
        ("b", c_uint64),
        ("c", c_uint64),
        ("d", c_uint64),
        ("text", c_char * TEXT_BYTES),
    )


class StepInfo(Structure):
    """`ep_step_info`: the view that a step runs in."""

    _fields_ = (
        ("epoch", c_uint64),
        ("step", c_uint64),
        ("digest", c_uint64),
        ("members", c_uint32),
        ("pad", c_uint32),
        ("incarnation", c_uint32 * MAX_RANKS),
        ("tokens", c_uint32 * MAX_RANKS),
        ("work", c_uint64),
        ("settled", c_uint64),
    )


class Received(Structure):
    """`ep_received`: addresses in the region; see `client.received.Received` for how long."""

    _fields_ = (
        ("rows", c_void_p),
        ("scales", c_void_p),
        ("ids", POINTER(c_int32)),
        ("weights", POINTER(c_float)),
        ("slot_counts", POINTER(c_int32)),
        ("slot_offsets", POINTER(c_int32)),
        ("out", c_void_p),
        ("rows_count", c_uint64),
        ("arrived", c_uint64),
        ("out_dtype", c_uint32),
        ("row_dtype", c_uint32),
        ("tokens", c_uint32 * MAX_RANKS),
        ("id_rows", c_uint64),
        ("places", POINTER(c_int32)),
        ("row_slots", POINTER(c_int32)),
        ("scale_lead", c_uint64),
        ("scale_columns", c_uint32),
        ("pad", c_uint32),
        ("global_scale", c_float * MAX_RANKS),
    )


class Rows(Structure):
    """`ep_rows`: what an engine brings to a dispatch, full or quantised already."""

    _fields_ = (
        ("x", c_void_p),
        ("scales", c_void_p),
        ("x_dtype", c_uint32),
        ("global_scale", c_float),
    )
