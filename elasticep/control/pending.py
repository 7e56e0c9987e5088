"""Views that were proposed and are not adopted, and the placement that is wanted next. Pure."""

from dataclasses import dataclass, field
from typing import Final

from elasticep.control.placement import Placement
from elasticep.control.views import View

MAX_UNADOPTED: Final = 2  # views of a group


@dataclass(slots=True)
class Loading:
    """Weights that a rank loads for a view; whoever makes headway is not late.

    Attributes:
        total_bytes: as reported first; headway beyond does not count.
        done_bytes: so far.
        moved_ms: when that grew last.
    """

    total_bytes: int
    done_bytes: int = 0
    moved_ms: int = 0

    def observe(self, done_bytes: int, now_ms: int) -> None:
        """Take a reading."""
        done_bytes = min(done_bytes, self.total_bytes)
        if done_bytes > self.done_bytes:
            self.done_bytes, self.moved_ms = done_bytes, now_ms


@dataclass(slots=True)
class Pending:
    """A proposed view that is not adopted.

    Attributes:
        view: the view.
        proposed_ms: when it was decided.
        joiners: ranks whose incarnation is new in it.
        filled: ranks that were members before and get new content in some slot.
        shown: members that are no joiners may stage it.
        seen: somebody other than its joiners may know it (after a change of the leader: maybe).
        asked: ranks that are to stage it; to tell their nodes may wait for the store.
        sent: rank -> when its node was told to.
        errors: rank -> why it cannot.
        answered: ranks that have staged it, or said why they cannot.
        loading: rank -> how far the weights are that it loads.
    """

    view: View
    proposed_ms: int
    joiners: frozenset[int] = frozenset()
    filled: frozenset[int] = frozenset()
    shown: bool = False
    seen: bool = False
    asked: set[int] = field(default_factory=set)
    sent: dict[int, int] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)
    loading: dict[int, Loading] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A placement that the background wants for the members that there are.

    Attributes:
        epoch: the view that it changes; in another one it means nothing.
        placement: fills only slots that are empty in that view.
        reason: for the view's reason.
    """

    epoch: int
    placement: Placement
    reason: str
