"""The check of recorded histories: what it lets pass, and what it must not."""

import pytest

from elasticep.testing.history import Seen, violations


def seen(who: str, epoch: int, begun: int, at: int, **more: int) -> Seen:
    caused, fresh = bool(more.pop("caused", 0)), bool(more.pop("fresh", 1))
    return Seen(who=who, epoch=epoch, begun_ns=begun, at_ns=at, caused=caused, fresh=fresh, **more)


def test_overlapping_reads_may_see_either_and_late_news_are_no_fault() -> None:
    history = [
        seen("a", 1, 0, 10),
        seen("writer", 2, 12, 30, caused=1),
        seen("a", 2, 15, 20),
        seen("b", 1, 14, 40),  # began before anybody had seen 2
        seen("watcher", 1, 50, 50, fresh=0),
        seen("watcher", 2, 60, 60, fresh=0),
    ]
    assert violations(history) == []
    assert violations(reversed(history)) == []


@pytest.mark.parametrize(
    ("history", "words"),
    [
        ([seen("a", 2, 0, 10), seen("b", 1, 11, 12)], "came after"),
        ([seen("a", 2, 0, 10), seen("w", 2, 11, 12, caused=1)], "came before what wrote it"),
        ([seen("a", 2, 0, 10, fresh=0), seen("a", 1, 5, 12, fresh=0)], "a went back"),
        ([seen("a", 2, 0, 9, digest=7), seen("b", 2, 0, 9, digest=8)], "epoch 2 is two views"),
        # News count as having been seen, though they need not be the newest.
        ([seen("a", 3, 4, 4, fresh=0), seen("b", 2, 5, 6)], "came after"),
    ],
)
def test_what_no_single_register_could_have_answered_is_found(
    history: list[Seen], words: str
) -> None:
    (said,) = violations(history)
    assert words in said
