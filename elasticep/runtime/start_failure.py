"""Why a seat's last start came to nothing, for the engine that waits for the seat."""

import errno
from typing import Final

from elasticep.errors import AttachError, ElasticEPError
from elasticep.runtime import descriptors
from elasticep.runtime.seats import Ended, Seat

_TRIES: Final = 3  # starts of a process that fail before an engine hears of it


class StartFailure:
    """What is known of the last start of one seat."""

    def __init__(self) -> None:
        self._incarnation = 0
        self._error: ElasticEPError | None = None

    def note(self, seat: Seat, error: ElasticEPError | OSError) -> Ended:
        """The present incarnation cannot come up; the event that ends it."""
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            error = descriptors.used_up("its process")
        elif not isinstance(error, ElasticEPError):
            error = AttachError(f"its process could not be started: {error}")
        self._incarnation, self._error = seat.incarnation, error
        return Ended(seat.incarnation, str(error), failed=True)

    def of(self, seat: Seat) -> ElasticEPError | None:
        """The error for who asks for the seat now; None while it is up or being started.

        A process that ended has no error that names what to do, and the next one may come up: that
        counts when it has happened a few times in a row.
        """
        if seat.live:
            return None
        if self._error is not None and self._incarnation == seat.incarnation:
            return self._error
        if seat.failed_starts < _TRIES:
            return None
        return AttachError(
            f"{seat.cause}, {seat.failed_starts} times in a row; see the daemon's log"
        )
