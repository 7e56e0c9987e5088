"""Formats of rows on the wire, and their bytes.

Quantised rows carry their scales behind the elements. This module imports neither torch nor grpc.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How the elements of a row are stored.

    Attributes:
        bits: bits per element.
        block: elements that share a scale; 0 when there are no scales.
        scale_bytes: bytes of one scale.
    """

    bits: int
    block: int = 0
    scale_bytes: int = 0

    def payload_bytes(self, elements: int) -> int:
        """Bytes of `elements` elements without their scales."""
        return -(-elements * self.bits // 8)

    def row_bytes(self, elements: int) -> int:
        """Bytes of `elements` elements with their scales; the last block may be short."""
        scales = -(-elements // self.block) if self.block else 0
        return self.payload_bytes(elements) + scales * self.scale_bytes


class WireDtype(StrEnum):
    """Format of a row on the wire."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    """e4m3 with one fp32 scale per 128 elements."""
    MXFP8 = "mxfp8"
    """e4m3 with one power-of-two scale (UE8M0, one byte) per 32 elements. Dispatch only."""
    NVFP4 = "nvfp4"
    """e2m1 with one e4m3 scale (one byte) per 16 elements. Dispatch only."""

    @property
    def row_format(self) -> RowFormat:
        """Bits and scales of this format."""
        return _FORMATS[self]

    @property
    def quantised(self) -> bool:
        """Whether rows carry scales."""
        return self.row_format.block > 0

    def row_bytes(self, hidden: int) -> int:
        """Bytes of one row of `hidden` elements, scales included."""
        return self.row_format.row_bytes(hidden)


_FORMATS: Final[Mapping[WireDtype, RowFormat]] = {
    WireDtype.FP32: RowFormat(32),
    WireDtype.FP16: RowFormat(16),
    WireDtype.BF16: RowFormat(16),
    WireDtype.FP8: RowFormat(8, block=128, scale_bytes=4),
    WireDtype.MXFP8: RowFormat(8, block=32, scale_bytes=1),
    WireDtype.NVFP4: RowFormat(4, block=16, scale_bytes=1),
}

COMBINE_DTYPES: Final = (WireDtype.FP32, WireDtype.FP16, WireDtype.BF16, WireDtype.FP8)
"""Formats in which outputs can travel back."""
