"""The C ABI between Python and the torch operators (`csrc/torch/elasticep_ops.h`), for ctypes.

This module imports no torch: `elasticep.ops` loads the library.
"""

import ctypes
import functools
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, TypeVar

from elasticep.errors import NativeError

ABI_VERSION: Final = 2
_NAME_BYTES: Final = 64
_TEXT_BYTES: Final = 512
STREAM: Final = CFUNCTYPE(c_int32, c_int32, POINTER(c_void_p))
"""Of torch's `aoti_torch_get_current_cuda_stream`: device, where to put the stream."""


class Plane(IntEnum):
    """`enum ept_plane`."""

    CPU = 1
    CUDA = 2


class Python(Structure):
    """`ept_python`: functions of this interpreter, all of its stable ABI, with which an operator
    that waits runs handlers of signals."""

    _fields_ = (
        ("ensure", c_void_p),
        ("release", c_void_p),
        ("check_signals", c_void_p),
        ("fetch", c_void_p),
        ("restore", c_void_p),
        ("drop", c_void_p),
    )


class CpuCalls(Structure):
    """`ept_cpu_calls`: addresses of `ep_dispatch_send_rows`, `ep_dispatch_recv`, `ep_combine` and
    `ep_last_error`, and the interpreter's functions."""

    _fields_ = (
        ("send", c_void_p),
        ("receive", c_void_p),
        ("combine", c_void_p),
        ("last_error", c_void_p),
        ("python", POINTER(Python)),
    )


class CudaCalls(Structure):
    """`ept_cuda_calls`: addresses of `epc_dispatch`, `epc_combine`, `epc_tune`, `epc_received_of`,
    `epc_last_error` and of torch's question for the current stream."""

    _fields_ = (
        ("dispatch", c_void_p),
        ("combine", c_void_p),
        ("tune", c_void_p),
        ("received_of", c_void_p),
        ("last_error", c_void_p),
        ("stream", c_void_p),
    )


class ExchangeSpec(Structure):
    """`ept_exchange`: an exchange of one rank, as the operators know it."""

    _fields_ = (
        ("rank", c_void_p),
        ("calls", c_void_p),
        ("sms", POINTER(c_uint32)),
        ("plane", c_uint32),
        ("device", c_int32),
        *((name, c_uint32) for name in ("number", "channels", "layers", "ranks")),
        *((name, c_uint32) for name in ("max_tokens", "topk")),
        *((name, c_uint32) for name in ("hidden", "slots", "num_sms", "wire", "block")),
        *((name, c_uint32) for name in ("float_scale", "width", "by_column")),
        *((name, c_uint64) for name in ("row_bytes", "scale_bytes", "out_bytes")),
        ("name", c_char * _NAME_BYTES),
    )


class Taken(Structure):
    """`ept_taken`: what operators of an exchange did.

    Attributes:
        code: of the last call that failed, 0: none did.
        open: channels, as bits, whose last dispatch no combine followed.
        text: the sentence of `code`.
    """

    _fields_ = (("code", c_int32), ("open", c_uint32), ("text", c_char * _TEXT_BYTES))

    code: int
    open: int
    text: bytes


_Library = TypeVar("_Library", bound=ctypes.CDLL)

_SIZED: Final[dict[str, type[Structure]]] = {
    "exchange": ExchangeSpec,
    "taken": Taken,
    "cpu_calls": CpuCalls,
    "cuda_calls": CudaCalls,
    "python": Python,
}


PROTOTYPES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "ept_abi_version": (c_uint32, ()),
    "ept_struct_size": (c_uint64, (c_char_p,)),
    "ept_exchange_open": (c_int64, (POINTER(ExchangeSpec),)),
    "ept_exchange_close": (None, (c_int64,)),
    "ept_exchange_take": (c_int, (c_int64, POINTER(Taken), POINTER(c_int32))),
    "ept_exchange_raise": (c_int, (c_int64,)),
}


@dataclass(frozen=True, slots=True)
class Rank:
    """What the operators call for a rank.

    Attributes:
        plane: whose calls they are.
        address: of the `ep_session` or `epc_context`.
        calls: the functions.
        device: index of the GPU that holds the rank's memory, -1: it is on the CPU.
        sms: CUDA: how many SMs the context was told last.
    """

    plane: Plane
    address: int
    calls: CpuCalls | CudaCalls
    device: int = -1
    sms: c_uint32 | None = None


@functools.cache
def interpreter() -> Python:
    """This interpreter's functions."""
    names = (
        *("PyGILState_Ensure", "PyGILState_Release", "PyErr_CheckSignals"),
        *("PyErr_Fetch", "PyErr_Restore", "Py_DecRef"),
    )
    return Python(*(address_of(getattr(ctypes.pythonapi, name)) for name in names))


def address_of(function: Any) -> int:
    """Address of a C function of a loaded library."""
    return ctypes.cast(function, c_void_p).value or 0


def bind(library: _Library) -> _Library:
    """Set every prototype of the operators' library and compare version and struct sizes.

    Raises:
        NativeError: a function is missing, or version or a size differs.
    """
    for name, (result, arguments) in PROTOTYPES.items():
        function = getattr(library, name, None)
        if function is None:
            raise NativeError(
                f"the torch operators have no function {name}; build them again with `make build`"
            )
        function.restype, function.argtypes = result, arguments
    sizes = {name: ctypes.sizeof(kind) for name, kind in _SIZED.items()}
    theirs = {name: library.ept_struct_size(name.encode()) for name in sizes}
    if library.ept_abi_version() != ABI_VERSION or sizes != theirs:
        raise NativeError(
            f"the torch operators speak ABI {library.ept_abi_version()} with structs of {theirs} "
            f"bytes, this package {ABI_VERSION} with {sizes}; build again with `make build`"
        )
    return library
