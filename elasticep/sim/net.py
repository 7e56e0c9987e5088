"""Who can talk to whom, and how long it takes. Links are streams: in order, never corrupted."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from elasticep.sim.loop import TICK_S, VirtualLoop

STORE: Final = "store"
_LATENCY_S: Final = (0.0002, 0.003)
_SLOW_S: Final = (0.02, 0.3)  # now and then a message takes this long, and others overtake it


class Net:
    """The network between nodes, controllers and the store.

    Args:
        loop: its time.
        rng: delays.

    Attributes:
        cut: pairs of endpoints between which nothing passes.
        slow_share: of messages that take long, so that others overtake them.
        lost_share: of messages that are lost, where no stream sends them again.
    """

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self._loop = loop
        self._rng = rng
        self.cut: set[frozenset[str]] = set()
        self.healed: list[Callable[[], None]] = []
        self.slow_share = 0.01
        self.lost_share = 0.0

    def connected(self, a: str, b: str) -> bool:
        """Whether messages pass."""
        return not self.cut or frozenset((a, b)) not in self.cut

    def arrives(self, a: str, b: str) -> bool:
        """Whether one message that no stream protects gets there."""
        if not self.connected(a, b):
            return False
        return not self.lost_share or self._rng.random() >= self.lost_share

    def delay_s(self) -> float:
        """Time of one message."""
        rng = self._rng
        if rng.random() < self.slow_share:
            return rng.uniform(*_SLOW_S)
        return rng.uniform(*_LATENCY_S)

    def separate(self, some: set[str], others: set[str]) -> set[frozenset[str]]:
        """Cut all links between two sets; returns those that were cut by this."""
        new = {frozenset((a, b)) for a in some for b in others if a != b} - self.cut
        self.cut |= new
        return new

    def heal(self, links: set[frozenset[str]]) -> None:
        """Mend links; what waits on streams goes on."""
        self.cut -= links
        waiting, self.healed = self.healed, []
        for resume in waiting:
            resume()


@dataclass(slots=True)
class Stream:
    """One direction of a connection: in order, and held back while the link is cut."""

    net: Net
    loop: VirtualLoop
    a: str
    b: str
    open: bool = True
    _last_s: float = 0.0
    _held: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)

    def send(self, deliver: Callable[..., None], *args: Any) -> None:
        """Deliver later, unless the stream is closed by then."""
        self._last_s = max(self._last_s + TICK_S, self.loop.now_s + self.net.delay_s())
        self.loop.call_at(self._last_s, self._arrive, deliver, args)

    def _arrive(self, deliver: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.open:
            return
        if self._held or not self.net.connected(self.a, self.b):
            if not self._held:
                self.net.healed.append(self._resume)
            self._held.append((deliver, args))
            return
        deliver(*args)

    def _resume(self) -> None:
        """The other side retransmits once the link is there again."""
        if not self.open:
            self._held.clear()
        elif not self.net.connected(self.a, self.b):
            self.net.healed.append(self._resume)
        else:
            held, self._held = self._held, []
            for deliver, args in held:
                if self.open:
                    deliver(*args)
