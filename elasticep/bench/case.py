"""What one measurement moves, the same for every system that is measured: rows, ids, bytes.

Inputs are whole numbers, so that sums are exact in every format and a run can check its result to
the bit. This module imports neither torch nor mpi4py.
"""

from dataclasses import asdict, dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from elasticep.errors import ConfigError
from elasticep.geometry import MAX_RANKS
from elasticep.testing.raw import bf16

DTYPES: Final = {"bf16": 2, "fp32": 4}
TAIL_BYTES: Final = 8  # slot (or id) and weight of one of a row's experts
WEIGHT: Final = 0.5  # of every (token, expert) pair: exact in bf16


@dataclass(frozen=True, slots=True)
class Case:
    """One size.

    Attributes:
        ranks: number of processes.
        tokens: rows that each rank brings.
        hidden: elements of a row.
        experts, topk: of the router, uniform.
        dtype: `bf16` or `fp32`, on the wire and in the engine.
        seed: of ids and rows.
    """

    ranks: int
    tokens: int
    hidden: int
    experts: int
    topk: int
    dtype: str = "bf16"
    seed: int = 1

    def __post_init__(self) -> None:
        """Raise `ConfigError` for sizes that nobody could exchange."""
        for name in ("ranks", "tokens", "hidden", "experts", "topk"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.ranks > MAX_RANKS:
            raise ConfigError(f"ranks is {self.ranks}; a group has at most {MAX_RANKS}")
        if self.topk > self.experts:
            raise ConfigError(f"topk is {self.topk} of {self.experts} experts; lower it")

    @property
    def row_bytes(self) -> int:
        """Bytes of a row without its tail."""
        return self.hidden * DTYPES[self.dtype]

    @property
    def tail_bytes(self) -> int:
        """Bytes that say which experts a row goes to, with which weights."""
        return self.topk * TAIL_BYTES

    def ids(self, rank: int) -> npt.NDArray[np.int32]:
        """int32 [tokens, topk]: distinct experts, uniform."""
        rng = np.random.default_rng([self.seed, rank])
        keys = rng.random((self.tokens, self.experts), np.float32)
        return np.argpartition(keys, self.topk - 1, axis=1)[:, : self.topk].astype(np.int32)

    def rows(self, rank: int) -> npt.NDArray[Any]:
        """[tokens, hidden]: whole numbers -8..8, as bf16 bits (uint16) or float32."""
        rng = np.random.default_rng([self.seed, rank, 1])
        values = rng.integers(-8, 9, (self.tokens, self.hidden), np.int8).astype(np.float32)
        return bf16(values) if self.dtype == "bf16" else values

    def weights(self) -> npt.NDArray[np.float32]:
        """float32 [tokens, topk], all `WEIGHT`."""
        return np.full((self.tokens, self.topk), WEIGHT, np.float32)

    def needs(self, rank: int) -> npt.NDArray[np.bool_]:
        """Which ranks hold an expert of a token, bool [tokens, ranks]; expert e is on e % ranks."""
        mask = np.zeros((self.tokens, self.ranks), bool)
        mask[np.arange(self.tokens)[:, None], self.ids(rank) % self.ranks] = True
        return mask

    def remote_rows(self, rank: int, copies: str, back_per_expert: bool) -> tuple[int, int]:
        """Rows out of and back to a rank that cross a link.

        `copies` is `all`, `per_rank` or `per_expert`; with `back_per_expert` a row comes back per
        expert instead of per rank that held one.
        """
        needed = self.needs(rank)
        needed[:, rank] = False
        pairs = int((self.ids(rank) % self.ranks != rank).sum())
        per_rank = int(needed.sum())
        everyone = self.tokens * (self.ranks - 1)
        out = {"all": everyone, "per_rank": per_rank, "per_expert": pairs}[copies]
        return out, pairs if back_per_expert else per_rank

    def to_dict(self) -> dict[str, Any]:
        """Every field as a plain value."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Self:
        """Read what `to_dict` wrote."""
        return cls(**plain)
