"""Bugs that can be planted: each must be caught, or the invariant that it breaks is not tested."""

import enum
from collections.abc import Iterator
from contextlib import contextmanager

from elasticep.control.seats import Seat


class Plant(enum.StrEnum):
    """A mechanism that is taken out.

    Attributes:
        NONE: nothing is.
        NO_LEAVE_CELL: nobody tells those who are left behind.
        EARLY_ADOPT: a rank adopts what it has staged itself, whatever the others have.
        STALE_WRITES: the store takes writes without looking at who leads.
        REUSED_INCARNATION: a seat is given out again under the same incarnation.
        NO_DEAD_WORD: nobody hears of deaths but through views.
        EARLY_ANSWER: operators get their answer before anything is written.
    """

    NONE = "none"
    NO_LEAVE_CELL = "no-leave-cell"
    EARLY_ADOPT = "early-adopt"
    STALE_WRITES = "stale-writes"
    REUSED_INCARNATION = "reused-incarnation"
    NO_DEAD_WORD = "no-dead-word"
    EARLY_ANSWER = "early-answer"


@contextmanager
def planted(plant: Plant) -> Iterator[None]:
    """Change what has to be changed in the real code while a schedule runs."""
    if plant is not Plant.REUSED_INCARNATION:
        yield
        return
    original = Seat.grant

    def grant(seat: Seat, node: str, now_ms: int) -> None:
        number = seat.incarnation
        original(seat, node, now_ms)
        seat.incarnation = max(1, number)

    Seat.grant = grant  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Seat.grant = original  # type: ignore[method-assign]
