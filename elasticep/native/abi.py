"""The C ABI of the native core, mirrored for ctypes; see `csrc/elasticep.h`, which is the contract.

`api()` gives the core library with every prototype set and its version and struct sizes checked, so
a library of another version is an error at start and never a wrong byte later. Functions that can
fail return 0 or a negative number; `check()` turns that into the typed error with the library's own
sentence. Pointers to opaque objects (`ep_session*`, `ep_header_map*`, `ep_watcher*`) are plain
integers here. This module imports neither torch nor grpc: a worker loads it at every start.
"""

import ctypes
import errno
import functools
import os
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_uint32, c_uint64, c_void_p
from typing import Any, Final

from elasticep import errors
from elasticep.native.library import core
from elasticep.native.structs import (
    ABI_VERSION,
    BANKS,
    MAX_CHANNELS,
    MAX_EXCHANGES,
    MAX_RANKS,
    MAX_TOPK,
    MESSAGE_MAGIC,
    TEXT_BYTES,
    TOKENS_PROMPT,
    Copies,
    Dtype,
    Error,
    Event,
    EventKind,
    ExchangeConfig,
    FailAction,
    FailSite,
    Geometry,
    Holder,
    Launch,
    LayoutInfo,
    Message,
    MessageType,
    Received,
    Reduce,
    Role,
    RowLayout,
    Rows,
    ScaleLayout,
    Status,
    StepInfo,
    Takes,
    Timeouts,
    View,
    WaitPhase,
)

__all__ = [
    "ABI_VERSION",
    "BANKS",
    "MAX_CHANNELS",
    "MAX_EXCHANGES",
    "MAX_RANKS",
    "MAX_TOPK",
    "MESSAGE_MAGIC",
    "PROTOTYPES",
    "TEXT_BYTES",
    "TOKENS_PROMPT",
    "Copies",
    "Dtype",
    "Error",
    "Event",
    "EventKind",
    "ExchangeConfig",
    "FailAction",
    "FailSite",
    "Geometry",
    "Holder",
    "Launch",
    "LayoutInfo",
    "Message",
    "MessageType",
    "Received",
    "Reduce",
    "Role",
    "RowLayout",
    "Rows",
    "ScaleLayout",
    "Status",
    "StepInfo",
    "Takes",
    "Timeouts",
    "View",
    "WaitPhase",
    "api",
    "bind",
    "check",
    "code_text",
    "error_of",
    "error_text",
]

# Names that ep_struct_size() knows.
_SIZED: Final[dict[str, type[Structure]]] = {
    "geometry": Geometry,
    "view": View,
    "status": Status,
    "message": Message,
    "event": Event,
    "received": Received,
    "step_info": StepInfo,
    "timeouts": Timeouts,
    "rows": Rows,
}

_U64P: Final = POINTER(c_uint64)
_U32P: Final = POINTER(c_uint32)
_Prototype = tuple[Any, tuple[Any, ...]]
# session, exchange, channel, layer, x, x_dtype, ids, ids_bytes, weights, tokens
_DISPATCH: Final = (
    *(c_void_p, c_uint32, c_uint32, c_uint32),
    *(c_void_p, c_uint32, c_void_p, c_uint32, c_void_p, c_uint32),
)

# name -> (result, arguments), in the order of the header. c_void_p arguments take addresses.
PROTOTYPES: Final[dict[str, _Prototype]] = {
    "ep_abi_version": (c_uint32, ()),
    "ep_last_error": (c_char_p, ()),
    "ep_struct_size": (c_uint64, (c_char_p,)),
    "ep_layout": (c_int, (POINTER(Geometry), POINTER(LayoutInfo))),
    "ep_layout_loads": (c_int, (POINTER(Geometry), _U64P)),
    "ep_layout_header_loads": (c_int, (POINTER(Geometry), _U64P)),
    "ep_memory_create": (c_int, (c_char_p, c_uint64)),
    "ep_memory_fence": (None, ()),
    "ep_header_format": (c_int, (c_int, POINTER(Geometry), c_uint32, POINTER(Timeouts))),
    "ep_view_digest": (c_int, (POINTER(Geometry), POINTER(View), _U64P)),
    "ep_bank_write": (c_int, (c_int, POINTER(Geometry), POINTER(View))),
    "ep_header_open": (c_void_p, (c_int, c_uint64)),
    "ep_header_close": (None, (c_void_p,)),
    "ep_header_status": (c_int, (c_void_p, POINTER(Status))),
    "ep_header_grant": (c_int, (c_void_p, c_uint32)),
    "ep_header_mark_dead": (c_int, (c_void_p, c_uint32, c_uint32)),
    "ep_header_policy": (c_int, (c_void_p, c_uint32)),
    "ep_header_fence": (c_int, (c_void_p, c_uint32, c_uint64, c_char_p)),
    "ep_header_failpoint": (c_int, (c_void_p, c_uint32, c_uint32, c_uint32)),
    "ep_header_failpoint_hits": (c_uint32, (c_void_p,)),
    "ep_watcher_new": (c_void_p, ()),
    "ep_watcher_fd": (c_int, (c_void_p,)),
    "ep_watcher_next": (c_int, (c_void_p, POINTER(Event))),
    "ep_watcher_watch": (c_int, (c_void_p, c_uint64, c_uint64, c_void_p)),
    "ep_watcher_unwatch": (c_int, (c_void_p, c_uint64)),
    "ep_watcher_peer_add": (c_int, (c_void_p, c_uint64, c_void_p)),
    "ep_watcher_peer_remove": (c_int, (c_void_p, c_uint64, c_void_p)),
    "ep_watcher_look": (None, (c_void_p,)),
    "ep_watcher_free": (None, (c_void_p,)),
    "ep_worker_run": (c_int, (c_char_p, c_char_p)),
    "ep_session_open": (c_int, (c_char_p, c_char_p, c_uint32, POINTER(c_void_p))),
    "ep_session_close": (None, (c_void_p,)),
    "ep_session_geometry": (c_int, (c_void_p, POINTER(Geometry))),
    "ep_session_status": (c_int, (c_void_p, POINTER(Status))),
    "ep_session_fenced": (c_int, (c_void_p, _U64P, c_void_p, c_uint64)),
    "ep_session_warmup": (c_int, (c_void_p, c_uint32)),
    "ep_session_interrupts": (c_int, (c_void_p, c_uint32)),
    "ep_session_slots": (c_int, (c_void_p, c_uint64, c_void_p)),
    "ep_session_loads": (c_int, (c_void_p, c_void_p)),
    "ep_step_begin": (c_int, (c_void_p, c_uint32, c_uint32, POINTER(StepInfo))),
    "ep_step_end": (c_int, (c_void_p, _U32P)),
    "ep_step_tear": (c_int, (c_void_p,)),
    "ep_step_cancel": (c_int, (c_void_p,)),
    "ep_dispatch_send": (c_int, _DISPATCH),
    "ep_dispatch_send_rows": (
        c_int,
        (*(c_void_p, c_uint32, c_uint32, c_uint32, POINTER(Rows)), *_DISPATCH[6:]),
    ),
    "ep_dispatch_recv": (c_int, (c_void_p, c_uint32, c_uint32, POINTER(Received), c_void_p)),
    "ep_dispatch": (c_int, (*_DISPATCH, POINTER(Received), c_void_p)),
    "ep_combine_send": (c_int, (c_void_p, c_uint32, c_uint32)),
    "ep_exchange_buffers": (
        c_int,
        (c_void_p, c_uint32, c_uint32, c_uint32, POINTER(c_void_p), POINTER(c_void_p)),
    ),
    "ep_combine_recv": (c_int, (c_void_p, c_uint32, c_uint32, c_void_p, c_uint32)),
    "ep_combine": (c_int, (c_void_p, c_uint32, c_uint32, c_void_p, c_uint32)),
    "ep_barrier_decide": (
        c_int,
        (
            *(c_uint32, c_uint32, c_uint32, c_uint64),
            *(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
        ),
    ),
    "ep_vector_level": (c_uint32, ()),
    "ep_quantise": (
        c_int,
        (
            *(c_uint32, c_uint32, c_uint32, c_void_p, c_uint32),
            *(c_uint64, c_uint64, c_float, c_void_p, c_void_p),
        ),
    ),
    "ep_dequantise": (
        c_int,
        (*(c_uint32, c_uint32, c_void_p, c_void_p), *(c_uint64, c_uint64, c_float, c_void_p)),
    ),
}

_REBUILD: Final = "build it again with `make build`"


def bind(library: ctypes.CDLL) -> ctypes.CDLL:
    """Set every prototype of `library` and compare ABI version and struct sizes.

    Raises:
        errors.NativeError: a function is missing, or version or a size differs.
    """
    for name, (result, arguments) in PROTOTYPES.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise errors.NativeError(
                f"the native library has no function {name}; {_REBUILD}"
            ) from None
        function.restype = result
        function.argtypes = arguments
    version = library.ep_abi_version()
    if version != ABI_VERSION:
        raise errors.NativeError(
            f"the native library speaks ABI {version}, this package {ABI_VERSION}; {_REBUILD}"
        )
    for name, structure in _SIZED.items():
        size = library.ep_struct_size(name.encode())
        if size != ctypes.sizeof(structure):
            raise errors.NativeError(
                f"struct ep_{name} has {size} bytes in the native library and "
                f"{ctypes.sizeof(structure)} in this package; {_REBUILD}"
            )
    return library


@functools.cache
def api() -> ctypes.CDLL:
    """The core library with prototypes; loaded and checked once per process.

    Raises:
        errors.NativeError: it is missing, broken, or of another version than this package.
    """
    return bind(core())


_ERRORS: Final[dict[int, type[errors.ElasticEPError]]] = {
    Error.EINVAL: errors.ConfigError,
    Error.EMISMATCH: errors.GroupMismatch,
    Error.EUSAGE: errors.UsageError,
    Error.ETIMEOUT: errors.StepTimeout,
    Error.EGONE: errors.DaemonUnavailable,
    Error.ECAP: errors.CapExceeded,
    Error.ELOST: errors.PlacementError,
    Error.ESHORT: errors.MemoryShort,
    Error.EDEVICE: errors.DeviceFailed,
    -errno.EMFILE: errors.DescriptorsShort,
    -errno.EAGAIN: errors.AttachError,
}


def error_text(code: int) -> str:
    """The sentence that this thread's last failing native call left behind."""
    text = api().ep_last_error()
    if text:
        return str(text.decode("utf-8", "replace"))
    return code_text(code)


def code_text(code: int) -> str:
    """A native return code in words, without the library."""
    if code in set(Error):
        return Error(code).name
    return os.strerror(-code) if -code in errno.errorcode else f"error {code}"


def error_of(code: int, what: str, text: str | None = None) -> errors.ElasticEPError:
    """The typed error for a negative return code.

    Args:
        code: what the function returned.
        what: what was being done, for the message; "" when the sentence stands alone.
        text: its sentence; None: the one that this thread's last failing call left.
    """
    text = error_text(code) if text is None else text
    if code == Error.EFENCED:
        return errors.Fenced(0, text)
    kind = _ERRORS.get(code, errors.NativeError)
    return kind(f"{what}: {text}" if what else text)


def code_of(error: errors.ElasticEPError) -> int:
    """The code from which `error_of` makes an error of this kind, else of `NativeError`."""
    return next((code for code, kind in _ERRORS.items() if type(error) is kind), -errno.EIO)


def check(code: int, what: str) -> int:
    """Return `code` if it is not negative; raise the typed error otherwise."""
    if code < 0:
        raise error_of(code, what)
    return code
