"""The loads that plans are made for: counters of all ranks, added up in windows that fade.

Each rank counts the tokens that its own routing sent to every (layer, expert), once, when a step
completes; padding rows are not routed and so not counted. The sum over ranks is then exactly
tokens x top-k per layer. Pure: windows end when the caller says so, not by a clock.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from elasticep.control.tables import Int64Array, Placement
from elasticep.errors import ConfigError, UsageError

_UNIT = 1 << 16  # the past is kept in units of 1/65536 tokens, so that small loads fade evenly
_MOST = 1 << 40  # tokens of a (layer, expert) in a window
_MOST_AT_ONCE = 1 << 32  # in one report
MAX_HALF_LIFE = 10_000
MAX_REPORT_BYTES = 1 << 20
HALF_LIFE = 4  # windows


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

    @property
    def quiet(self) -> bool:
        """Whether nothing was counted in the current window."""
        return not self._current.any()

    def restore(self, loads: Int64Array) -> None:
        """Take over what another window held."""
        self._past = np.minimum(loads, _MOST) * _UNIT

    def roll(self) -> Int64Array:
        """End the window. Returns its counts [layers, experts]; the past fades by one window."""
        ended = np.minimum(self._current, _MOST)  # whatever nodes say, sums stay within 64 bits
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


@dataclass(slots=True)
class _Counters:
    """What a rank's memory counted: `latest` as last reported, `base` what was before our time."""

    node: str
    memory: int
    incarnation: int
    base: Int64Array
    latest: Int64Array
    seen: NDArray[np.bool_] = field(repr=False)  # [layers]


class GroupLoads:
    """A group's load window, fed by the reports of its nodes. Pure: the time is an argument.

    Counters count since their memory was made, so what they hold when this leader hears of them
    first is past: it is not added to any window. A new incarnation on the same memory goes on
    where the last one stopped.

    A window without any count does not fade the past: that nobody asks anything says nothing about
    which experts will be asked for. When so few tokens come that they say little, the last loads
    that were known stay.

    Args:
        layers: layers counted.
        experts: logical experts per layer.
        window_ms: length of a window.
        now_ms: the time.
        saved: the loads that an earlier leader left, int64 [layers, experts]; None: none.
    """

    def __init__(
        self,
        layers: int,
        experts: int,
        window_ms: int,
        now_ms: int,
        saved: Int64Array | None = None,
    ) -> None:
        self.window = LoadWindow(layers, experts, HALF_LIFE)
        self.window_ms = window_ms
        self.counted = 0  # tokens x top-k over all layers since this leader leads
        self.rolls = 0
        self._shape = (layers, experts)
        self._began_ms = now_ms
        self._known: dict[int, _Counters] = {}
        self._last = saved
        if saved is not None:
            self.window.restore(saved)

    def report(
        self,
        node: str,
        rank: int,
        incarnation: int,
        memory: int,
        first_layer: int,
        counters: bytes,
    ) -> int:
        """Take some layers' counters of a rank.

        Args:
            node: who reports.
            rank: whose counters they are.
            incarnation: of that rank.
            memory: tells memories of a node apart.
            first_layer: of the rows that follow.
            counters: int64, little-endian, [some layers][experts].

        Returns:
            Tokens that are new, over all layers.

        Raises:
            UsageError: not whole rows, layers that there are not, counters that went back, or
                more at once than any rank can have counted.
        """
        layers, experts = self._shape
        rows, rest = divmod(len(counters), 8 * experts)
        if rest or not rows or first_layer + rows > layers:
            raise UsageError(
                f"rank {rank} reports {len(counters)} bytes from layer {first_layer} on; the "
                f"group has {layers} layers of {experts} experts, 8 bytes each"
            )
        known = self._counters(node, rank, incarnation, memory)
        now = np.frombuffer(counters, "<i8").reshape(rows, experts).astype(np.int64)
        part = slice(first_layer, first_layer + rows)
        new = ~known.seen[part]
        known.base[part][new] = now[new]
        known.latest[part][new] = now[new]
        known.seen[part] = True
        fresh = now - known.latest[part]
        if int(now.min()) < 0 or int(fresh.min()) < 0 or int(fresh.max()) > _MOST_AT_ONCE:
            del self._known[rank]  # the next report begins anew
            self.window.forget(rank)
            raise UsageError(
                f"rank {rank} on {node}: counters of layers {first_layer} to "
                f"{first_layer + rows - 1} went back, or grew by more than {_MOST_AT_ONCE}"
            )
        known.latest[part] = now
        added = self.window.observe(rank, incarnation, known.latest - known.base)
        self.counted += added
        return added

    def _counters(self, node: str, rank: int, incarnation: int, memory: int) -> _Counters:
        known = self._known.get(rank)
        if known is not None and (known.node, known.memory) == (node, memory):
            if incarnation != known.incarnation:
                known.incarnation = incarnation
                known.base = known.latest.copy()
            return known
        zeros = np.zeros(self._shape, np.int64)
        seen = np.zeros(self._shape[0], np.bool_)
        new = _Counters(node, memory, incarnation, zeros, zeros.copy(), seen)
        self._known[rank] = new
        self.window.forget(rank)
        return new

    def tick(self, now_ms: int) -> bool:
        """Time has passed; whether a window ended. `rolls` says whether there was news in it."""
        ended = (now_ms - self._began_ms) // self.window_ms
        if ended <= 0:
            return False
        self._began_ms += ended * self.window_ms
        if not self.window.quiet:
            self.window.roll()
            self.rolls += 1
        return True

    def tokens(self) -> Int64Array | None:
        """What to plan for, int64 [layers, experts]; None: never were more tokens than experts
        seen.
        """
        loads = self.window.loads()
        if int(loads.sum()) >= loads.size:
            self._last = loads
        return self._last
