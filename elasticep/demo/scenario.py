"""What happens during a run, as scripts that are moved on at every turn of the parent's loop.

A script is a generator: it yields until what it waits for has come about, and returns when the
scenario is over.
"""

import enum
from collections.abc import Iterator, Sequence
from typing import Protocol

Script = Iterator[None]


class Scenario(enum.StrEnum):
    """What a run shows."""

    KILL = "kill"
    REJOIN = "rejoin"
    SCALE = "scale"
    DRAIN = "drain"
    LOST_EXPERT = "lost-expert"
    REBALANCE = "rebalance"

    @property
    def needs_death(self) -> bool:
        """Whether it is about a rank that dies."""
        return self in (Scenario.REJOIN, Scenario.LOST_EXPERT)

    @property
    def kills(self) -> bool:
        """Whether something is killed in it."""
        return self in (Scenario.KILL, Scenario.REJOIN, Scenario.LOST_EXPERT)


class Stage(Protocol):
    """What a script may see and do."""

    victim: int
    ranks: int

    def reached(self) -> bool:
        """Whether decoding is where the scenario begins."""

    def kill(self) -> None:
        """Kill what was asked for."""

    def backed_up(self) -> bool:
        """Whether experts can be restored from where they are to be."""

    def recovered(self) -> bool:
        """Whether every survivor completed a step after the kill, and what was killed is back."""

    def open(self, rank: int) -> None:
        """Start a new engine on a rank and give it requests of its own."""

    def serves(self, rank: int) -> bool:
        """Whether a rank has completed a step since it was opened."""

    def drain(self, ranks: Sequence[int]) -> None:
        """Ask the controller to take ranks out of service."""

    def gone(self, rank: int) -> bool:
        """Whether the rank's engine has left."""

    def rebalance(self) -> None:
        """Ask the controller to move experts by their load."""

    def moving(self) -> bool:
        """Whether experts move and something is to be killed in the middle of it."""

    def rebalanced(self) -> bool:
        """Whether that is done, and the load since was looked at."""


def script(scenario: Scenario, stage: Stage, *, kill: bool = True) -> Script:
    """The script of a scenario; in a rebalance something may be killed, or not."""
    match scenario:
        case Scenario.KILL:
            return _kill(stage)
        case Scenario.REJOIN:
            return _rejoin(stage)
        case Scenario.SCALE:
            return _scale(stage)
        case Scenario.DRAIN:
            return _drain(stage, [stage.victim])
        case Scenario.LOST_EXPERT:
            return _lost(stage)
        case Scenario.REBALANCE:
            return _rebalance(stage, kill=kill)


def _kill(stage: Stage) -> Script:
    while not stage.reached():
        yield
    stage.kill()
    while not stage.recovered():
        yield


def _lost(stage: Stage) -> Script:
    """Nobody else has the dead rank's experts: the survivors go on when they are restored."""
    while not (stage.reached() and stage.backed_up()):
        yield
    yield from _kill(stage)


def _rejoin(stage: Stage) -> Script:
    """The dead rank's seat is taken anew, under its next incarnation, while the others decode."""
    yield from _kill(stage)
    while not stage.gone(stage.victim):  # survivors may be heard of before its own end is
        yield
    yield from _open(stage, [stage.victim])


def _scale(stage: Stage) -> Script:
    """Two ranks more, then three fewer, of which one was there from the start."""
    while not stage.reached():
        yield
    joiners = [stage.ranks, stage.ranks + 1]
    yield from _open(stage, joiners)
    yield from _drain(stage, [stage.ranks - 1, *joiners])


def _open(stage: Stage, ranks: Sequence[int]) -> Script:
    for rank in ranks:
        stage.open(rank)
    while not all(stage.serves(rank) for rank in ranks):
        yield


def _rebalance(stage: Stage, *, kill: bool) -> Script:
    while not stage.reached():
        yield
    stage.rebalance()
    if kill:
        while not stage.moving():
            yield
        stage.kill()
        while not stage.recovered():
            yield
    while not stage.rebalanced():
        yield


def _drain(stage: Stage, ranks: Sequence[int]) -> Script:
    while not stage.reached():
        yield
    stage.drain(ranks)
    while not all(stage.gone(rank) for rank in ranks):
        yield
