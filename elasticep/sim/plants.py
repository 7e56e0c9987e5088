"""Bugs that can be planted: each must be caught, or the invariant that it breaks is not tested."""

import enum
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from elasticep.control import proposals
from elasticep.control.repair import usable_slots
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
        FILL_IN_USE: a slot is filled although a view that ranks still run has something there.
        EARLY_ANSWER: operators get their answer before anything is written.
    """

    NONE = "none"
    NO_LEAVE_CELL = "no-leave-cell"
    EARLY_ADOPT = "early-adopt"
    STALE_WRITES = "stale-writes"
    REUSED_INCARNATION = "reused-incarnation"
    NO_DEAD_WORD = "no-dead-word"
    FILL_IN_USE = "fill-in-use"
    EARLY_ANSWER = "early-answer"


@contextmanager
def planted(plant: Plant) -> Iterator[None]:
    """Change what has to be changed in the real code while a schedule runs."""
    if plant is Plant.REUSED_INCARNATION:
        with _swapped(Seat, "grant", _grant_again):
            yield
    elif plant is Plant.FILL_IN_USE:
        with _swapped(proposals, "usable_slots", _usable_by_the_latest):
            yield
    else:
        yield


@contextmanager
def _swapped(owner: Any, name: str, other: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, other)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _grant_again(
    seat: Seat, node: str, now_ms: int, original: Callable[[Seat, str, int], None] = Seat.grant
) -> None:
    number = seat.incarnation
    original(seat, node, now_ms)
    seat.incarnation = max(1, number)


def _usable_by_the_latest(ranks: Collection[int], tables: Sequence[Any]) -> Any:
    return usable_slots(ranks, tables[:1])
