"""Tensors over memory that somebody else owns. Daemons, workers and controllers never import this
module: it imports torch.
"""

import ctypes
import math

import torch


class _Bytes:
    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def over(
    address: int | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor over memory that somebody else owns, and must keep while the tensor is used.

    Args:
        address: on `device`; None or 0: there is no such memory, and the tensor has no elements.
        shape: of the tensor, which is contiguous.
        dtype: of the tensor.
        device: a GPU, or the CPU (whose memory an emulated GPU's is).
    """
    count = math.prod(shape) * dtype.itemsize
    if count == 0 or not address:
        return torch.empty(shape if count == 0 else (0,), dtype=dtype, device=device)
    if device.type == "cpu":
        memory = (ctypes.c_uint8 * count).from_address(address)
        flat = torch.frombuffer(memory, dtype=torch.uint8)
    else:
        flat = torch.as_tensor(_Bytes(address, count), device=device)
    return flat.view(dtype).view(shape)
