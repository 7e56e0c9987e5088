"""Steps on emulated GPUs that do not count, and why, in words."""

from typing import Any

from elasticep.group import Completion
from elasticep.testing.local_group import spread
from tests.emulated.engines import LATE_MS, TOKENS, Rank, Scene, ended, whole


def _dead(completion: Completion) -> Any:
    """Rank 2 dies in a step; the others are told in it, at the next barrier of its view, and go on
    without it.
    """
    scene = Scene(completion=completion)
    scene.everybody(Rank.pair)

    def dies(own: Rank) -> None:
        with own.session.step() as step:
            assert step.number
            scene.group.mark_dead(2)

    def until_complete(own: Rank) -> Any:
        told = whole(own, Rank.pair)
        while not told["complete"]:
            told = whole(own, Rank.pair)
        return told

    steps = []
    scene.go(2, dies)
    for _ in range(2):
        scene.go(1, lambda own: whole(own, Rank.pair))
        mine = whole(scene.ranks[0].here(), Rank.pair)
        scene.join()
        steps.append([mine, scene.told[1]])
    alone = [0, 1]
    scene.group.stage(2, 1, alone, spread(scene.group.geometry, alone))
    scene.go(1, until_complete)
    after = until_complete(scene.ranks[0].here())
    scene.join()
    scene.close()
    return {"torn": steps[0], "doomed": steps[1], "after": after}


def _late() -> Any:
    """Rank 2 is late in an exchange."""
    scene = Scene(exchange_ms=LATE_MS)

    def last(own: Rank) -> Any:
        with own.session.step(TOKENS) as step:
            assert step.number
            assert scene.heard.wait(90)
        return ended(step)

    scene.go(2, last)
    scene.go(1, lambda own: whole(own, Rank.pair))
    told = [whole(scene.ranks[0].here(), Rank.pair)]
    scene.join()
    told.append(scene.told[1])
    scene.close()
    return told


def _late_at_the_barrier() -> Any:
    """Rank 2 is, and rank 0 tries again."""
    scene = Scene()
    scene.everybody(Rank.pair)
    scene.go(1, lambda own: whole(own, Rank.pair))
    own = scene.ranks[0].here()
    with own.session.step(TOKENS, timeout=0.5) as step:
        own.pair()
    told = [ended(step)]
    scene.go(2, lambda own: whole(own, Rank.pair))
    told.append(whole(own, Rank.pair))
    scene.join()
    scene.close()
    return told


def _fenced() -> Any:
    """Rank 0 is expelled in an exchange."""
    scene = Scene()
    scene.everybody(Rank.pair)

    def last(own: Rank) -> Any:
        with own.session.step(TOKENS) as step:
            assert step.number
            scene.group.fence(0, 5, "drained: new card")
            assert scene.heard.wait(90)
        return ended(step)

    scene.go(2, last)
    scene.go(1, lambda own: whole(own, Rank.pair))
    told = whole(scene.ranks[0].here(), Rank.pair)
    scene.join()
    scene.close()
    return told


def reasons() -> Any:
    """Why steps do not count, by what had happened."""
    return {
        "dead": _dead(Completion.LOCAL),
        "dead, agreed": _dead(Completion.AGREED),
        "late": _late(),
        "late at the barrier": _late_at_the_barrier(),
        "fenced": _fenced(),
    }
