"""Torch operators of elasticep: `torch.ops.elasticep.exchange_dispatch` and `.exchange_combine`.

They are native, on libtorch's stable ABI, and call the C ABI of the core or of the CUDA library.
Importing this module imports torch and registers them; only engine-side code does so. Daemons,
workers and controllers never need it.

An operator names its exchange by a number, which `open_exchange` gives. What is not theirs to know
stays in Python (`elasticep.client.compiled`): which step is open, the types of errors, and which
experts were lost. A session asks with `take` at the end of a step what its operators did.
"""

import ctypes
import functools

import torch

from elasticep.errors import NativeError
from elasticep.native.library import OPS_NAME, library_path
from elasticep.native.operators import ExchangeSpec, Taken, bind


@functools.cache
def _library() -> ctypes.CDLL:
    path = library_path(OPS_NAME)
    try:
        torch.ops.load_library(path)
        return bind(ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL))
    except OSError as error:
        raise NativeError(
            f"torch operators {path} cannot be loaded into torch {torch.__version__}: {error}; "
            "torch >= 2.11 is needed"
        ) from error


_library()


@functools.cache
def _raising() -> ctypes.PyDLL:
    """The same library for a function that raises: it is called with the interpreter's lock."""
    return bind(ctypes.PyDLL(str(library_path(OPS_NAME)), mode=ctypes.RTLD_LOCAL))


def _fake_dispatch(
    rows: torch.Tensor,
    scales: torch.Tensor | None,
    ids: torch.Tensor,
    weights: torch.Tensor,
    counts: torch.Tensor,
    offsets: torch.Tensor | None,
    places: torch.Tensor | None,
    row_slots: torch.Tensor | None,
    lost: torch.Tensor,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    x_scales: torch.Tensor | None,
    exchange: int,
    channel: int,
    layer: int,
    global_scale: float = 1.0,
    sources: torch.Tensor | None = None,
) -> None:
    torch._check(x.dim() == 2 and topk_ids.dim() == 2)
    torch._check(topk_ids.shape == topk_weights.shape and topk_ids.shape[0] == x.shape[0])


def _fake_combine(
    out: torch.Tensor, rows: torch.Tensor, y: torch.Tensor, exchange: int, channel: int, layer: int
) -> None:
    torch._check(out.dim() == 2)


torch.library.register_fake("elasticep::exchange_dispatch", _fake_dispatch)
torch.library.register_fake("elasticep::exchange_combine", _fake_combine)


def open_exchange(spec: ExchangeSpec) -> int:
    """The number by which operators know an exchange, above 0.

    Negative: the error code with which the CUDA library refused.
    """
    return int(_library().ept_exchange_open(ctypes.byref(spec)))


def close_exchange(key: int) -> None:
    """Forget an exchange: operators with its number raise from now on."""
    _library().ept_exchange_close(key)


def take(key: int, taken: Taken, tokens: "ctypes.Array[ctypes.c_int32]") -> bool:
    """What operators of an exchange did since this was asked last; False: nothing.

    Args:
        key: its number.
        taken: is filled.
        tokens: [channels * layers], filled with the tokens of the last dispatch of each, -1 = none.
    """
    return bool(_library().ept_exchange_take(key, ctypes.byref(taken), tokens))


def raised(key: int) -> BaseException | None:
    """What a handler of a signal raised while an operator of an exchange waited, once."""
    try:
        _raising().ept_exchange_raise(key)
    except BaseException as error:
        return error
    return None
