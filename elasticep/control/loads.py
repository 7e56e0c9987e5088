"""The loads that plans are made for: counters of all ranks, added up in windows that fade.

Each rank counts the tokens that its own routing sent to every (layer, expert), once, when a step
completes; padding rows are not routed and so not counted. The sum over ranks is then exactly
tokens x top-k per layer. Pure: windows end when the caller says so, not by a clock.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from elasticep.control.tables import Placement
from elasticep.errors import ConfigError, UsageError

_UNIT = 1 << 16  # the past is kept in units of 1/65536 tokens, so that small loads fade evenly
MAX_HALF_LIFE = 10_000

Int64Array = NDArray[np.int64]


class LoadWindow:
    """Token counts per (layer, expert), recent ones weighing most.

    Args:
        layers: layers counted.
        experts: logical experts per layer.
        half_life: windows after which a count weighs half; 0 keeps only the current window.
    """

    def __init__(self, layers: int, experts: int, half_life: int = 4) -> None:
        if layers < 1 or experts < 1 or not 0 <= half_life <= MAX_HALF_LIFE:
            raise ConfigError(
                f"a load window of {layers} layers, {experts} experts and half-life {half_life}: "
                f"sizes must be above 0, the half-life 0 to {MAX_HALF_LIFE}"
            )
        self._shape = (layers, experts)
        self._keep = round(0.5 ** (1.0 / half_life) * _UNIT) if half_life else 0
        self._past = np.zeros(self._shape, np.int64)
        self._current = np.zeros(self._shape, np.int64)
        self._seen: dict[int, tuple[int, Int64Array]] = {}

    def observe(self, rank: int, incarnation: int, counters: ArrayLike) -> int:
        """Take in a rank's counters: 64-bit, ever growing within an incarnation.

        Args:
            rank: whose counters they are.
            incarnation: of that rank; a new one starts to count from zero.
            counters: integers [layers, experts].

        Returns:
            Tokens that are new since this rank's last counters.

        Raises:
            UsageError: an older incarnation, a counter that went back, or another shape.
        """
        now = np.asarray(counters)
        if now.shape != self._shape or now.dtype.kind not in "iu":
            raise UsageError(
                f"rank {rank} counts {now.dtype} {now.shape}; the group has {self._shape} integers"
            )
        now = now.astype(np.int64)
        known, before = self._seen.get(rank, (0, np.zeros(self._shape, np.int64)))
        if incarnation < known:
            raise UsageError(
                f"rank {rank} incarnation {incarnation} is over, incarnation {known} counts now"
            )
        fresh = now - before if incarnation == known else now
        if int(fresh.min()) < 0:
            layer, expert = (int(i) for i in np.argwhere(fresh < 0)[0])
            raise UsageError(
                f"rank {rank}: the counter of layer {layer} expert {expert} went back by "
                f"{-int(fresh[layer, expert])}; counters only grow within an incarnation"
            )
        self._current += fresh
        self._seen[rank] = (incarnation, now.copy())
        return int(fresh.sum())

    def forget(self, rank: int) -> None:
        """Drop a rank's last counters once its seat is empty; what it counted stays."""
        self._seen.pop(rank, None)

    def roll(self) -> Int64Array:
        """End the window. Returns its counts [layers, experts]; the past fades by one window."""
        ended = self._current
        whole, part = np.divmod(self._past + ended * _UNIT, _UNIT)
        self._past = whole * self._keep + part * self._keep // _UNIT
        self._current = np.zeros(self._shape, np.int64)
        return ended

    def loads(self) -> Int64Array:
        """Faded past plus current window, int64 [layers, experts]: what to plan for."""
        return self._past // _UNIT + self._current

    def imbalance(self, placement: Placement) -> NDArray[np.float64]:
        """Highest rank load over the mean of the ranks that hold anything, float64 [layers];
        1.0 for layers without load.
        """
        of_rank = placement.rank_loads(self.loads())
        holding = (placement.slot_expert >= 0).any(axis=(0, 2))
        total = of_rank.sum(axis=1)
        peak = of_rank.max(axis=1) * max(int(holding.sum()), 1)
        ratio: NDArray[np.float64] = np.divide(
            peak, total, out=np.ones_like(total), where=total > 0
        )
        return ratio
