"""Where a controller reads the time; a simulator brings its own."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

AWAY_MS: Final = 250  # between two looks at the clock, of which there are twenty a second at least


@dataclass(frozen=True, slots=True)
class Clocks:
    """Two clocks.

    Attributes:
        monotonic_s: seconds, for deadlines; of this process alone.
        unix_s: seconds since 1970, which other hosts read too; it may jump.
    """

    monotonic_s: Callable[[], float] = time.monotonic
    unix_s: Callable[[], float] = time.time


class AwakeClock:
    """Milliseconds in which this process could hear something.

    A process that is stopped, or starved, hears nobody; when it goes on, all that was sent to it
    still waits to be read. Silence of others in that time is no evidence, nor is lack of progress.
    So of a stretch without a look at the clock `AWAY_MS` count at most.

    Args:
        monotonic_s: seconds.
    """

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self._seen_ms = int(monotonic_s() * 1_000)
        self.away_ms = 0  # left out so far

    def look(self) -> int:
        """The time of an event; to be read at every one."""
        now_ms = int(self._monotonic_s() * 1_000)
        self.away_ms += max(0, now_ms - self._seen_ms - AWAY_MS)
        self._seen_ms = now_ms
        return now_ms - self.away_ms

    def peek(self) -> int:
        """The time for somebody else, such as another thread: it is no look of this process."""
        return int(self._monotonic_s() * 1_000) - self.away_ms
