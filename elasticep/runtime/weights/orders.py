"""In the mover: what the daemon has asked for, and in which order it is done.

Arenas come first, then copies that were called off (which costs nothing, and lets their slots be
filled anew), then urgent copies, then the others. While something urgent waits, or the copy under
way has become urgent, nothing is paced: what is in its way is soon out of it.
"""

import threading
from collections import deque

from elasticep.runtime.weights.messages import Cancel, Copy, Drop, Hurry, Message, Use

Order = Use | Drop | Copy
Taken = tuple[Order, list[int]]


class Orders:
    """Put in by the thread that reads the socket, taken out by the one that copies."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arenas: deque[Taken] = deque()
        self._called_off: deque[Copy] = deque()
        self._urgent: deque[Copy] = deque()
        self._paced: deque[Copy] = deque()
        self._now: Copy | None = None
        self._now_urgent = False
        self._now_called_off = False

    def put(self, message: Message, fds: list[int]) -> None:
        """Take in what the daemon said, with the descriptors that came along."""
        with self._changed:
            match message:
                case Use() | Drop():
                    self._arenas.append((message, fds))
                case Copy():
                    (self._urgent if message.urgent else self._paced).append(message)
                case Cancel():
                    self._cancel(message.job)
                case Hurry():
                    self._hurry(message.job)
            self._changed.notify_all()

    def _cancel(self, job: int) -> None:
        if self._now is not None and self._now.job == job:
            self._now_called_off = True
        for queue in (self._urgent, self._paced):
            for copy in [copy for copy in queue if copy.job == job]:
                queue.remove(copy)
                self._called_off.append(copy)

    def _hurry(self, job: int) -> None:
        if self._now is not None and self._now.job == job:
            self._now_urgent = True
        for copy in [copy for copy in self._paced if copy.job == job]:
            self._paced.remove(copy)
            self._urgent.append(copy)

    def take(self, timeout_s: float) -> Taken | None:
        """What is to be done next; None when nothing came within the time."""
        with self._changed:
            queues = (self._called_off, self._urgent, self._paced)
            if not self._changed.wait_for(lambda: self._arenas or any(queues), timeout_s):
                return None
            if self._arenas:
                return self._arenas.popleft()
            queue = next(queue for queue in queues if queue)
            self._now = queue.popleft()
            self._now_called_off = queue is self._called_off
            self._now_urgent = queue is self._urgent
            return self._now, []

    @property
    def called_off(self) -> bool:
        """Whether the copy under way is not wanted any more."""
        return self._now_called_off

    @property
    def hurried(self) -> bool:
        """Whether the copy under way is not to be held back."""
        return self._now_urgent or self._now_called_off or bool(self._urgent)

    def pause(self, seconds: float) -> None:
        """Wait, at most until there is a reason to hurry."""
        with self._changed:
            self._changed.wait_for(lambda: self.hurried, seconds)
