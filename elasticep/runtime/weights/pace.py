"""Keeps a copy below a rate, in steps so short that nobody takes it for stuck."""

import threading
import time
from collections.abc import Callable
from typing import Final

_CHUNK_BYTES: Final = 1 << 20
_LEAST_CHUNK_BYTES: Final = 4096
_STEPS_PER_S: Final = 20
_BURST_S: Final = 0.1


class Pace:
    """A token bucket that holds a tenth of a second's worth.

    Args:
        rate: bytes per second; 0: no limit.
        now: the clock, in seconds.
        wait: waits for so many seconds.
    """

    def __init__(
        self,
        rate: int,
        now: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        self._rate = rate
        self._now = now
        self._wait = wait if wait is not None else threading.Event().wait
        self._paid_until = now()

    @property
    def chunk(self) -> int:
        """Bytes to copy between two calls of `spend`."""
        if not self._rate:
            return _CHUNK_BYTES
        return max(_LEAST_CHUNK_BYTES, min(_CHUNK_BYTES, self._rate // _STEPS_PER_S))

    def spend(self, size: int) -> None:
        """So many bytes were copied: wait until they were due."""
        if not self._rate:
            return
        now = self._now()
        self._paid_until = max(self._paid_until, now - _BURST_S) + size / self._rate
        if self._paid_until > now:
            self._wait(self._paid_until - now)
