"""Detection and recovery times out of what the engines report. Pure; times in nanoseconds of
CLOCK_MONOTONIC, which all processes of a host share."""

from collections.abc import Collection
from dataclasses import dataclass, field

_NS_PER_MS = 1e6


@dataclass(slots=True)
class KillWatch:
    """Follows the survivors from a kill to their first complete step.

    Attributes:
        at_ns: when the signal was sent.
        survivors: ranks that must recover.
        after_epoch: the epoch that ran at the kill, when the kill costs the group a member; None
            when it must not (daemon, controller).
    """

    at_ns: int
    survivors: frozenset[int]
    after_epoch: int | None
    _noticed: dict[int, int] = field(default_factory=dict)
    _recovered: dict[int, int] = field(default_factory=dict)

    def torn(self, rank: int, at_ns: int) -> None:
        """A step tore on `rank`: its wait for the dead rank ended."""
        if rank in self.survivors and at_ns >= self.at_ns and self.after_epoch is not None:
            self._noticed.setdefault(rank, at_ns)

    def entered(self, rank: int, epoch: int, at_ns: int) -> None:
        """`rank` passed a barrier into another view: a wait there ended, too."""
        if self.after_epoch is not None and epoch > self.after_epoch:
            self.torn(rank, at_ns)

    def complete(self, rank: int, epoch: int, begun_ns: int, at_ns: int) -> None:
        """A step was complete on `rank`."""
        if rank not in self.survivors or begun_ns < self.at_ns:
            return
        if self.after_epoch is None or epoch > self.after_epoch:
            self._recovered.setdefault(rank, at_ns)

    @property
    def recovered(self) -> bool:
        """Whether every survivor had a complete step."""
        return self._recovered.keys() >= self.survivors

    @property
    def detect_ms(self) -> float | None:
        """Kill to the end of the last survivor's wait; None if nothing was to be noticed."""
        return self._last_ms(self._noticed)

    @property
    def recover_ms(self) -> float | None:
        """Kill to the first complete step on all survivors; None if it did not come."""
        return self._last_ms(self._recovered)

    def _last_ms(self, times: dict[int, int]) -> float | None:
        if not times or not times.keys() >= self.survivors:
            return None
        return round((max(times.values()) - self.at_ns) / _NS_PER_MS, 3)


def steps_repeated(torn: Collection[tuple[int, int]], survivors: Collection[int]) -> int:
    """Steps that at least one survivor had to repeat.

    Args:
        torn: (rank, step number) of each torn step.
        survivors: the ranks that count.
    """
    return len({step for rank, step in torn if rank in survivors})
