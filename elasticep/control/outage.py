"""Something that does not work for a while: said when it begins, every minute, and when it ends."""

from collections.abc import Callable
from typing import Final

from structlog.typing import FilteringBoundLogger

_AGAIN_S: Final = 60.0


class Outage:
    """What is tried again many times a second fills no log.

    Args:
        log: where events go.
        event: said while it lasts, with the error and for how long it has.
        ended: said when it is over; empty: that it is needs no saying.
        clock: seconds, monotonic.
    """

    def __init__(
        self, log: FilteringBoundLogger, event: str, ended: str, clock: Callable[[], float]
    ) -> None:
        self._log = log
        self._event, self._ended = event, ended
        self._clock = clock
        self._since_s: float | None = None
        self._said_s = 0.0

    @property
    def lasts(self) -> bool:
        """Whether it went wrong when it was tried last."""
        return self._since_s is not None

    def failed(self, error: Exception) -> None:
        """It was tried once more, in vain."""
        now_s = self._clock()
        if self._since_s is None:
            self._since_s = now_s
        elif now_s - self._said_s < _AGAIN_S:
            return
        self._said_s = now_s
        away_ms = round((now_s - self._since_s) * 1_000)
        self._log.warning(self._event, error=str(error), away_ms=away_ms)

    def over(self) -> None:
        """It works."""
        if self._since_s is not None and self._ended:
            self._log.info(self._ended, away_ms=round((self._clock() - self._since_s) * 1_000))
        self._since_s = None
