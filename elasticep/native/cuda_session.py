"""A seat on a GPU, held by an engine: `epc_session` of `csrc/cuda/elasticep_cuda.h`, for ctypes."""

import ctypes
import enum
import functools
from ctypes import POINTER, c_char_p, c_int, c_uint32, c_uint64, c_void_p
from typing import Any, Final

from elasticep import errors
from elasticep.native import abi
from elasticep.native.cuda import ContextConfig, CudaContext
from elasticep.native.cuda_library import api
from elasticep.native.cuda_library import check as check_context
from elasticep.native.cuda_structs import Copied, Weights
from elasticep.weights import ArenaLayout

_SESSION: Final = c_void_p
PROTOTYPES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "epc_session_open": (
        c_int,
        (c_char_p, c_char_p, c_uint32, c_uint32, POINTER(Weights), POINTER(c_void_p)),
    ),
    "epc_session_close": (None, (_SESSION,)),
    "epc_session_context": (c_void_p, (_SESSION,)),
    "epc_session_status": (c_int, (_SESSION, POINTER(abi.Status))),
    "epc_session_fenced": (c_int, (_SESSION, POINTER(c_uint64), c_void_p, c_uint64)),
    "epc_session_warmup": (c_int, (_SESSION, c_uint32)),
    "epc_session_policy": (c_int, (_SESSION, POINTER(c_uint32))),
    "epc_session_slots": (c_int, (_SESSION, c_uint64, c_void_p)),
    "epc_session_enter": (c_int, (_SESSION, c_uint64, c_uint32, c_uint32)),
    "epc_session_step_begin": (c_int, (_SESSION, c_uint32, c_uint32, c_void_p)),
    "epc_session_call_off": (c_int, (_SESSION,)),
    "epc_session_recount": (c_int, (_SESSION, c_void_p, POINTER(c_uint64))),
    "epc_session_await_counts": (c_int, (_SESSION, c_uint32, c_uint32)),
    "epc_session_wait": (c_int, (_SESSION, c_uint32, c_uint64, c_void_p)),
    "epc_session_slot_experts": (c_int, (_SESSION, POINTER(c_void_p))),
    "epc_session_weights": (c_int, (_SESSION, POINTER(c_void_p))),
    "epc_session_weights_held": (c_int, (_SESSION, c_uint32, c_void_p)),
    "epc_session_weights_copied": (c_int, (_SESSION, POINTER(Copied))),
    "epc_session_geometry": (c_int, (_SESSION, POINTER(abi.Geometry), POINTER(c_uint32))),
}


class Wait(enum.IntEnum):
    """`enum epc_wait`: which kernel of a step is waited for."""

    BEGUN = 0
    ENDED = 1


@functools.cache
def session_api() -> Any:
    """The CUDA library with the prototypes of sessions, too.

    Raises:
        errors.NativeError: it is missing, broken, or of another version than this package.
    """
    library = api()
    for name, (result, arguments) in PROTOTYPES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    for kind, structure in (("weights", Weights), ("copied", Copied)):
        if library.epc_struct_size(kind.encode()) != ctypes.sizeof(structure):
            raise errors.NativeError(
                f"struct epc_{kind} has another size in the CUDA library than in this package; "
                "build it again with `make build`"
            )
    return library


def weights_struct(arena_fd: int, layout: ArenaLayout) -> Weights:
    """What a session has to know of a rank's arena; the descriptor stays the caller's."""
    tensors = layout.spec.tensors
    weights = Weights(
        arena_fd=arena_fd,
        layers=layout.layers,
        slots=layout.slots,
        tensors=len(tensors),
        digest=layout.digest(),
        total_bytes=layout.total_bytes,
        labels_offset=layout.labels_offset,
        data_offset=layout.data_offset,
        layer_bytes=layout.layer_bytes,
    )
    for index, tensor in enumerate(tensors):
        weights.offset[index], weights.bytes[index] = layout.tensor_offsets[index], tensor.nbytes
    return weights


def open_session(
    fd_socket: str,
    ticket: str,
    timeout_ms: int,
    num_sms: int = 0,
    weights: Weights | None = None,
) -> int:
    """Take the seat that a ticket stands for; the address of an `epc_session`.

    Args:
        fd_socket: path of the daemon's SEQPACKET socket.
        ticket: what Attach answered.
        timeout_ms: how long to wait for the daemon's descriptors.
        num_sms: SMs that a kernel may take; 0 means the formula.
        weights: the rank's arena, whose experts shall lie on the GPU, too; see `weights_struct`.

    Raises:
        MemoryShort: the GPU has too little room for the weights; names both numbers.
        ElasticEPError: the daemon refused the ticket, or GPU, layout or memory do not fit.
    """
    out = c_void_p()
    code = session_api().epc_session_open(
        fd_socket.encode(), ticket.encode(), timeout_ms, num_sms, weights, ctypes.byref(out)
    )
    check_context(code, "attach")
    return out.value or 0


def context_of(session: int, rank: int, incarnation: int) -> CudaContext:
    """The context of a session, which the session closes."""
    geometry, device = abi.Geometry(), c_uint32(0)
    library = session_api()
    library.epc_session_geometry(session, ctypes.byref(geometry), ctypes.byref(device))
    config = ContextConfig(rank=rank, incarnation=incarnation, device=device.value)
    return CudaContext.borrowed(library.epc_session_context(session), geometry, config)
