"""Where a controller reads the time; a simulator brings its own."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clocks:
    """Two clocks.

    Attributes:
        monotonic_s: seconds, for deadlines; of this process alone.
        unix_s: seconds since 1970, which other hosts read too; it may jump.
    """

    monotonic_s: Callable[[], float] = time.monotonic
    unix_s: Callable[[], float] = time.time
