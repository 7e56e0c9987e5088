"""The CUDA library for ctypes, with typed errors, and those of its calls that need no context.

Its C ABI is `csrc/cuda/elasticep_cuda.h`. A rank's context is in `elasticep.native.cuda`, a seat of
an engine in `elasticep.native.cuda_session`.
"""

import ctypes
import functools
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_int,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any, Final

from elasticep import errors
from elasticep.native import abi
from elasticep.native.cuda_structs import (
    Config,
    Counts,
    DispatchArgs,
    Fault,
    Received,
    StepInfo,
)
from elasticep.native.library import cuda as load_cuda

ABI_VERSION: Final = 4
_SIZED: Final[dict[str, type[Structure]]] = {
    "config": Config,
    "step_info": StepInfo,
    "received": Received,
    "dispatch_args": DispatchArgs,
    "fault": Fault,
    "counts": Counts,
}

_CONTEXT: Final = c_void_p
_STREAM: Final = c_void_p
_DISPATCH: Final = (_CONTEXT, POINTER(DispatchArgs), _STREAM)
_COMBINE: Final = (_CONTEXT, c_uint32, c_uint32, c_uint32, c_void_p, c_uint32, _STREAM)
PROTOTYPES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "epc_last_error": (c_char_p, ()),
    "epc_abi_version": (c_uint32, ()),
    "epc_struct_size": (c_uint64, (c_char_p,)),
    "epc_device_count": (c_int, (POINTER(c_uint32),)),
    "epc_region_bytes": (c_int, (POINTER(abi.Geometry), POINTER(c_uint64))),
    "epc_region_create": (c_int, (POINTER(abi.Geometry), c_uint32)),
    "epc_context_create": (c_int, (POINTER(Config), c_int, c_int, c_uint32, POINTER(c_void_p))),
    "epc_context_destroy": (None, (_CONTEXT,)),
    "epc_peer_map": (c_int, (_CONTEXT, c_uint32, c_int)),
    "epc_peer_drop": (c_int, (_CONTEXT, c_uint32)),
    "epc_stage": (c_int, (_CONTEXT, POINTER(abi.View))),
    "epc_stage_bank": (c_int, (_CONTEXT, c_void_p, c_uint64)),
    "epc_step_begin": (c_int, (_CONTEXT, c_uint32, _STREAM)),
    "epc_step_end": (c_int, (_CONTEXT, _STREAM)),
    "epc_dispatch": (c_int, _DISPATCH),
    "epc_dispatch_send": (c_int, _DISPATCH),
    "epc_dispatch_recv": (c_int, _DISPATCH),
    "epc_combine": (c_int, _COMBINE),
    "epc_combine_send": (c_int, (_CONTEXT, c_uint32, c_uint32, _STREAM)),
    "epc_combine_recv": (c_int, _COMBINE),
    "epc_received_of": (c_int, (_CONTEXT, c_uint32, c_uint32, POINTER(Received))),
    "epc_count_slots": (c_int, (_CONTEXT, c_uint32, c_uint32, c_void_p, _STREAM)),
    "epc_wait_counts": (c_int, (_CONTEXT, c_uint32, c_uint32, POINTER(Counts))),
    "epc_tune": (c_int, (_CONTEXT, c_uint32, c_uint32)),
    "epc_tear": (c_int, (_CONTEXT, _STREAM)),
    "epc_step_result": (c_int, (_CONTEXT, POINTER(StepInfo), POINTER(Fault))),
    "epc_complete_flag": (c_int, (_CONTEXT, POINTER(c_void_p))),
    "epc_loads": (c_int, (_CONTEXT, c_void_p)),
}

_KINDS: Final[dict[int, type[errors.ElasticEPError]]] = {
    abi.Error.EINVAL: errors.ConfigError,
    abi.Error.EMISMATCH: errors.GroupMismatch,
    abi.Error.EUSAGE: errors.UsageError,
    abi.Error.ECAP: errors.CapExceeded,
    abi.Error.ESHORT: errors.MemoryShort,
    abi.Error.EGONE: errors.DaemonUnavailable,
    abi.Error.ETIMEOUT: errors.StepTimeout,
    abi.Error.EDEVICE: errors.DeviceFailed,
}


@functools.cache
def api() -> ctypes.CDLL:
    """The CUDA library with prototypes; loaded and checked once per process.

    Raises:
        errors.NativeError: it is missing, broken, or of another version than this package.
    """
    library = load_cuda()
    for name, (result, arguments) in PROTOTYPES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    if library.epc_abi_version() != ABI_VERSION:
        raise errors.NativeError(
            f"the CUDA library speaks ABI {library.epc_abi_version()}, this package {ABI_VERSION}; "
            "build it again with `make build`"
        )
    for name, structure in _SIZED.items():
        size = library.epc_struct_size(name.encode())
        if size != ctypes.sizeof(structure):
            raise errors.NativeError(
                f"struct epc_{name} has {size} bytes in the CUDA library and "
                f"{ctypes.sizeof(structure)} in this package; build it again with `make build`"
            )
    return library


def check(code: int, what: str) -> int:
    """Return `code` if it is not negative; raise the typed error with the library's sentence."""
    if code >= 0:
        return code
    text = api().epc_last_error().decode("utf-8", "replace") or abi.code_text(code)
    raise error_of(code, what, text)


def error_of(code: int, what: str, text: str) -> errors.ElasticEPError:
    """The typed error for a negative return code and its sentence; `what` may be ""."""
    if code == abi.Error.EFENCED:
        return errors.Fenced(0, text)
    return _KINDS.get(code, errors.NativeError)(f"{what}: {text}" if what else text)


def device_count() -> int:
    """CUDA devices of this host; 0 without a driver."""
    count = c_uint32(0)
    api().epc_device_count(count)
    return count.value


def region_bytes(geometry: abi.Geometry) -> int:
    """Bytes of a rank's data region in device memory."""
    size = c_uint64(0)
    check(api().epc_region_bytes(geometry, size), "region size")
    return size.value


def create_region(geometry: abi.Geometry, device: int) -> int:
    """A zeroed data region on `device` as a POSIX fd, which alone keeps it alive.

    Raises:
        MemoryShort: the device has too little free memory; names both numbers.
        DeviceFailed: the device is broken.
        UsageError: it is not there, or its driver or host refuses; names the setting.
    """
    return check(api().epc_region_create(geometry, device), f"region on device {device}")
