"""Torch operators of elasticep, registered under `torch.ops.elasticep`.

Importing this module imports torch and registers the operators; only engine-side code does so.
Daemons, workers and controllers never need it.
"""

import torch

from elasticep.errors import NativeError
from elasticep.native.library import OPS_NAME, library_path


def _register() -> None:
    path = library_path(OPS_NAME)
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise NativeError(
            f"torch operators {path} cannot be loaded into torch {torch.__version__}: {error}; "
            "torch >= 2.11 is needed"
        ) from error


_register()


def _shape_of_counts(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    return ids.new_empty((num_experts,), dtype=torch.int64)


torch.library.register_fake("elasticep::expert_counts", _shape_of_counts)


def expert_counts(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Count how many entries of `ids` name each expert.

    Args:
        ids: logical expert ids, int32 or int64, any shape, contiguous, on the CPU; -1 marks an
            unused choice and is not counted.
        num_experts: E, at least 1.

    Returns:
        int64 `[num_experts]`.

    Raises:
        RuntimeError: an id is outside -1..E-1, or dtype, device or layout is another.
    """
    counts: torch.Tensor = torch.ops.elasticep.expert_counts(ids, num_experts)
    return counts
