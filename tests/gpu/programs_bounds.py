"""Largest relative error (Frobenius norm) of a whole exchange, by its dispatch format."""

from elasticep.native import abi

BOUNDS = {
    abi.Dtype.FP32: 2e-6,
    abi.Dtype.FP16: 1e-3,
    abi.Dtype.BF16: 8e-3,
    abi.Dtype.FP8: 4e-2,
    abi.Dtype.MXFP8: 4e-2,
    abi.Dtype.NVFP4: 2e-1,
}
FP8_OUTPUTS = 5e-2
"""The same where outputs come back in fp8."""
