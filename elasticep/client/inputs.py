"""What an exchange takes in: tensors, which are checked before a byte is written.

The checks run in every layer of every step, so what they compare with is worked out once.
"""

from numbers import Real
from typing import Final, NoReturn, TypeAlias

import torch

from elasticep.client.handle import DispatchInput
from elasticep.client.received import WIRE
from elasticep.errors import CapExceeded, TensorError
from elasticep.geometry import GroupGeometry
from elasticep.native import abi
from elasticep.spec import ExchangeSpec

Rows: TypeAlias = tuple[torch.Tensor, torch.Tensor | None, float]
"""x, its scales, the global scale."""

CODES: Final = {
    torch.float32: abi.Dtype.FP32.value,
    torch.float16: abi.Dtype.FP16.value,
    torch.bfloat16: abi.Dtype.BF16.value,
}
"""Full dtypes as the C ABI counts them."""

_ID_BYTES: Final = {torch.int64: 8, torch.int32: 4}


class Inputs:
    """The checks of one exchange.

    Args:
        name: of the exchange, for messages.
        spec: of the exchange.
        geometry: of the group.
        device: that holds the rank's memory.
        where: the same in words.
    """

    def __init__(
        self,
        name: str,
        spec: ExchangeSpec,
        geometry: GroupGeometry,
        device: torch.device,
        where: str,
    ) -> None:
        wire = spec.dispatch_dtype
        form = wire.row_format
        self._name, self._device, self._where = name, device, where
        self._wire, self._cap = wire, spec.max_tokens
        self._hidden, self._topk = geometry.hidden, geometry.topk
        own = WIRE[wire]
        self._full = CODES if wire.quantised else {own: CODES[own]}
        self._packed = {own: abi.Dtype[wire.name].value}
        self._packed_width = geometry.hidden * form.bits // 8
        self._scales = geometry.hidden // form.block if wire.quantised else 0
        self._scale_dtype = torch.float32 if form.scale_bytes == 4 else torch.uint8

    def check(self, rows: Rows, ids: torch.Tensor, weights: torch.Tensor) -> DispatchInput:
        """The addresses of a dispatch's tensors.

        Raises:
            TensorError: no tensor, or wrong dtype, shape, device or memory layout.
            CapExceeded: more tokens than the exchange's cap.
        """
        try:
            return self._checked(rows, ids, weights)
        except (AttributeError, TypeError, RuntimeError):
            x, scales, global_scale = rows
            given = {"x": x, "x_scales": scales, "topk_ids": ids, "topk_weights": weights}
            for name, tensor in given.items():
                if tensor is not None or name != "x_scales":
                    self._check_is_tensor(name, tensor)
            number: object = global_scale
            if not isinstance(number, Real):
                self._wrong("global_scale", f"value {global_scale!r}", "a number above 0")
            raise

    def _checked(self, rows: Rows, ids: torch.Tensor, weights: torch.Tensor) -> DispatchInput:
        x, scales, global_scale = rows
        codes, width = self._full, self._hidden
        if scales is not None:
            codes, width = self._packed, self._packed_width
        code = codes.get(x.dtype)
        if code is None:
            self._wrong_dtype("x", x, " or ".join(map(str, codes)))
        if scales is not None:
            self._check_scales(x.shape[:1], scales)
        id_bytes = _ID_BYTES.get(ids.dtype)
        if id_bytes is None:
            self._wrong_dtype("topk_ids", ids, "torch.int64 or torch.int32")
        if weights.dtype != torch.float32:
            self._wrong_dtype("topk_weights", weights, "torch.float32")
        shape = x.shape
        if len(shape) != 2 or shape[1] != width:
            self._wrong("x", f"shape {list(shape)}", f"[tokens, {width}]")
        tokens = shape[0]
        pairs = (tokens, self._topk)
        if ids.shape != pairs:
            self._wrong("topk_ids", f"shape {list(ids.shape)}", str(list(pairs)))
        if weights.shape != pairs:
            self._wrong("topk_weights", f"shape {list(weights.shape)}", str(list(pairs)))
        self._check_memory("x", x)
        self._check_memory("topk_ids", ids)
        self._check_memory("topk_weights", weights)
        if scales is not None:
            self._check_memory("x_scales", scales)
        if not global_scale > 0:
            self._wrong("global_scale", f"value {global_scale}", "one above 0")
        self.check_cap(tokens)
        return DispatchInput(
            x.data_ptr() or None,
            code,
            ids.data_ptr() or None,
            id_bytes,
            weights.data_ptr() or None,
            tokens,
            None if scales is None else scales.data_ptr() or None,
            global_scale,
        )

    def check_cap(self, tokens: int) -> None:
        """Raise `CapExceeded` where a rank brings more tokens than the exchange takes."""
        if not 0 <= tokens <= self._cap:
            raise CapExceeded(
                f"{tokens} tokens for exchange {self._name!r}, whose cap is {self._cap} per rank; "
                "split the batch, or create the group with a larger max_tokens"
            )

    def result(
        self,
        tokens: int,
        dtype: torch.dtype,
        out: torch.Tensor | None,
        shared: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """Where a combine writes to: `out`, or a new tensor of `dtype`.

        Args:
            tokens: how many rows it has.
            dtype: of a new tensor.
            out: what the engine passed.
            shared: memory that other ranks use at that time.

        Raises:
            TensorError: `out` does not fit, or lies in `shared`.
        """
        shape = (tokens, self._hidden)
        if out is None:
            return torch.empty(shape, dtype=dtype, device=self._device)
        if getattr(out, "dtype", None) not in CODES:
            self._wrong_dtype("out", out, " or ".join(map(str, CODES)))
        if out.shape != shape:
            self._wrong("out", f"shape {list(out.shape)}", str(list(shape)))
        self._check_memory("out", out)
        start, count = out.data_ptr(), out.nbytes
        for theirs in shared:
            if start < theirs.data_ptr() + theirs.nbytes and theirs.data_ptr() < start + count:
                self._wrong(
                    "out",
                    "memory of what dispatch returned",
                    "some that other ranks neither read nor write, such as exchange.output(tokens)",
                )
        return out

    def _check_scales(self, tokens: tuple[int, ...], scales: torch.Tensor) -> None:
        if not self._wire.quantised:
            self._wrong("x_scales", "scales", f"none: rows are {self._wire.value}")
        if scales.dtype != self._scale_dtype:
            self._wrong_dtype("x_scales", scales, str(self._scale_dtype))
        shape = [*tokens, self._scales]
        if list(scales.shape) != shape:
            self._wrong("x_scales", f"shape {list(scales.shape)}", str(shape))

    def _check_memory(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.device != self._device:
            self._wrong(
                name, f"device {tensor.device}", f"{self._where}, where this rank's memory is"
            )
        if not tensor.is_contiguous():
            self._wrong(name, "gaps in memory", "a contiguous tensor; call .contiguous()")

    def _check_is_tensor(self, name: str, tensor: object) -> None:
        if not isinstance(tensor, torch.Tensor):
            self._wrong(name, f"type {type(tensor).__name__}", "a torch.Tensor")

    def _wrong_dtype(self, name: str, tensor: torch.Tensor, needs: str) -> NoReturn:
        self._check_is_tensor(name, tensor)  # NumPy's arrays have dtypes, too
        self._wrong(name, f"dtype {tensor.dtype}", needs)

    def _wrong(self, name: str, has: str, needs: str) -> NoReturn:
        raise TensorError(f"{name} of exchange {self._name!r} has {has}; it needs {needs}")
