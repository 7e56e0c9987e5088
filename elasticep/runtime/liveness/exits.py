"""A process's exit and the deaths of its locks come by two ways; pure.

The exit may be told of first when the machine is busy. It is then held back until the watcher has
seen every lock of that process: the seat must not be granted anew, and its locks be made free,
while the watcher still has to look at them. It would take the old death for one of the new
incarnation.
"""

from elasticep.native.structs import Holder
from elasticep.runtime import seats


class ExitGate:
    """Follows the locks of one seat's present incarnation."""

    def __init__(self) -> None:
        self._held: set[Holder] = set()
        self._waiting: list[tuple[frozenset[Holder], seats.Exited]] = []

    def follow(self, event: seats.Event) -> list[seats.Exited]:
        """Take an event of the present incarnation (or a grant); the exits that may pass now."""
        match event:
            case seats.Granted():
                self._held.clear()
                self._waiting.clear()
            case seats.Held(holder):
                self._held.add(holder)
            case seats.Died(holder) | seats.Released(holder):
                self._held.discard(holder)
        passing = [exited for locks, exited in self._waiting if not locks & self._held]
        self._waiting = [item for item in self._waiting if item[0] & self._held]
        return passing

    def hold_back(self, locks: frozenset[Holder], exited: seats.Exited) -> bool:
        """Whether this exit of the holder of these locks has to wait for `follow`."""
        if not locks & self._held:
            return False
        self._waiting.append((locks, exited))
        return True
