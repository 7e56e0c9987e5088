"""Steps on emulated GPUs that end early: who hears of it, and when.

Rank 0 is the one it is about. Rank 1 does all that the step has; rank 2 comes to its barrier and
then does nothing until rank 1 has heard, so nobody learns anything by its coming.
"""

import contextlib
import signal
import threading
from collections.abc import Callable
from typing import Any, Final

from elasticep.client.step import Step
from elasticep.errors import ElasticEPError
from tests.emulated.engines import TOKENS, Rank, Scene, ended, whole


class OwnError(Exception):
    """An engine's."""


def _raises(own: Rank) -> None:
    raise OwnError("of rank 0")


def _raises_waiting(own: Rank) -> None:
    own.dispatch()  # its kernel waits for rank 2
    raise OwnError("of rank 0")


def _raises_waiting_for_all(own: Rank) -> None:
    own.pair()  # all of it waits on the stream
    raise OwnError("of rank 0")


def _raises_after_send(own: Rank) -> None:
    own.session.exchange("first").dispatch_send(0, *own.batch())
    raise OwnError("of rank 0")


def _raises_in_halves(own: Rank) -> None:
    exchange = own.session.exchange("first")
    exchange.dispatch_send(0, *own.batch())
    exchange.dispatch_recv()
    raise OwnError("of rank 0")


def _leaves_open(own: Rank) -> None:
    own.dispatch()


def _alarm() -> None:
    """A signal comes soon, whose handler raises."""

    def handle(*_: object) -> None:
        raise OwnError("of rank 0")

    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.3)


def _interrupted(own: Rank) -> None:
    """Ctrl-C while the host waits for a count."""
    _alarm()
    own.dispatch("exact")
    raise AssertionError("the wait ended by itself")


def _interrupted_combine(own: Rank) -> None:
    """What a handler raises when a combine has just been put on the stream."""
    handle: Any = own.session._handle
    combine = handle.combine

    def once(*arguments: Any) -> None:
        combine(*arguments)
        raise OwnError("of rank 0")

    handle.combine = once
    try:
        own.pair()
    finally:
        del handle.combine


def _swallowed(own: Rank) -> None:
    """The engine takes its error in inside the block, and does not go on."""
    with contextlib.suppress(OwnError):
        _interrupted(own)


def _swallowed_combine(own: Rank) -> None:
    with contextlib.suppress(OwnError):
        _interrupted_combine(own)


WAYS: Final[dict[str, tuple[Callable[[Rank], None], str]]] = {
    "before": (_raises, "first"),
    "waiting": (_raises_waiting, "first"),
    "all-waiting": (_raises_waiting_for_all, "first"),
    "sent": (_raises_after_send, "first"),
    "halves": (_raises_in_halves, "first"),
    "open": (_leaves_open, "first"),
    "signal": (_interrupted, "exact"),
    "signal-combine": (_interrupted_combine, "first"),
    "swallowed": (_swallowed, "exact"),
    "swallowed-combine": (_swallowed_combine, "first"),
}


def _told(scene: Scene, own: Step, in_time: bool, raised: str = "") -> dict[str, Any]:
    """Waits for the others; who said what. Then a step of all is complete."""
    scene.join()
    told = {"at_once": in_time, "raised": raised, "own": ended(own)}
    told |= {"peer": scene.told[1], "late": scene.told[2]}
    scene.everybody(Rank.pair)
    return told


def _early(scene: Scene, way: str) -> dict[str, Any]:
    """Rank 0 ends a step in one of the `WAYS` while rank 1 is in its exchange and rank 2 late."""
    act, name = WAYS[way]

    def late(own: Rank) -> Any:
        with own.session.step(TOKENS) as step:
            assert step.number
            passed.set()
            assert scene.heard.wait(90)
            own.pair(name)
        return ended(step)

    passed = threading.Event()
    scene.go(1, lambda own: whole(own, lambda rank: rank.pair(name)))
    scene.go(2, late)
    own = scene.ranks[0].here()
    step, raised = own.session.step(TOKENS), ""
    try:
        with step:
            assert step.number  # all are in it
            assert passed.wait(60)
            act(own)
    except (OwnError, ElasticEPError) as error:
        raised = type(error).__name__
    return _told(scene, step, scene.at_once(), raised)


def _between(scene: Scene) -> dict[str, Any]:
    """Rank 0 raises when its dispatch is done, and the others wait for its outputs."""
    for rank in (1, 2):
        scene.go(rank, lambda own: whole(own, Rank.pair))
    own = scene.ranks[0].here()
    step = own.session.step(TOKENS)
    with contextlib.suppress(OwnError), step:
        own.dispatch()
        own.drain()
        raise OwnError("of rank 0")
    return _told(scene, step, scene.at_once())


def _at_the_barrier(scene: Scene) -> dict[str, Any]:
    """A handler of a signal raises while rank 0 waits for what a barrier agreed on, to which rank 2
    comes afterwards.
    """

    def last(own: Rank) -> Any:
        assert come.wait(90)
        return whole(own, Rank.pair)

    come = threading.Event()
    scene.go(1, lambda own: whole(own, Rank.pair))
    scene.go(2, last)
    own = scene.ranks[0].here()
    step, raised = own.session.step(TOKENS), ""
    _alarm()
    try:
        with step:
            assert step.epoch < 0, "rank 2 has not come"
    except OwnError:
        raised = "OwnError"
    come.set()
    return _told(scene, step, scene.at_once(), raised)


def _told_and_again(scene: Scene) -> dict[str, Any]:
    """How the step ended for the others, who go on to the next one."""
    scene.join()
    told = {"peer": scene.told[1], "late": scene.told[2]}
    for rank in (1, 2):
        scene.go(rank, lambda own: whole(own, Rank.pair))
    return told


def _fewer(scene: Scene) -> dict[str, Any]:
    """Rank 0 ends a step with an exchange less than the others, and goes on to the next barrier."""
    for rank in (1, 2):
        scene.go(rank, lambda own: whole(own, Rank.two_pairs))
    own = scene.ranks[0].here()
    first = whole(own, Rank.pair)
    with own.session.step(TOKENS) as second:
        told = {"at_once": scene.at_once(), "own": first} | _told_and_again(scene)
        own.pair()
    told["next"] = ended(second)
    scene.join()
    return told


def _unnoted(scene: Scene) -> dict[str, Any]:
    """A handler of a signal raises when the barrier is on the stream and nobody has noted it."""
    for rank in (1, 2):
        scene.go(rank, lambda own: whole(own, Rank.pair))
    own = scene.ranks[0].here()
    handle: Any = own.session._handle
    begin = handle.begin

    def once(*arguments: Any) -> None:
        del handle.begin
        begin(*arguments)
        raise OwnError("of rank 0")

    handle.begin = once
    with contextlib.suppress(OwnError), own.session.step(TOKENS):
        raise AssertionError("it did not raise")
    with own.session.step(TOKENS) as step:  # ends that one
        told = _told_and_again(scene)
        own.pair()
    told["own"] = ended(step)
    scene.join()
    return told


def early() -> Any:
    """Rank 0 ends a step early, in every way; what each of the ranks is told, and whether rank 1 is
    at once.
    """
    scene = Scene()
    scene.everybody(Rank.pair)
    found = {way: _early(scene, way) for way in WAYS}
    found["between"] = _between(scene)
    found["at the barrier"] = _at_the_barrier(scene)
    found["fewer"] = _fewer(scene)
    found["unnoted"] = _unnoted(scene)
    scene.close()
    return found
