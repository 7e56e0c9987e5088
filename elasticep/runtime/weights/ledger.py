"""What each expert must sum up to, as this node knows it. Pure.

The truth is the checkpoint: whoever loads an expert from there notes its checksum here, in its own
memory, apart from the arena and its labels. Whoever copies an expert learns the checksum from the
ledgers of the other nodes, not from the one that it copies from alone: bytes and a label that
agree with each other but not with what others noted are found out. Where ledgers contradict each
other and neither side is the majority, the checkpoint decides; without one this node's own note
does, and if it has none, nobody is believed. A note of its own that the majority contradicts is not
believed either.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Ref = tuple[int, int]
"""(layer, expert)."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be expected of an expert.

    Attributes:
        checksum: what it must sum up to; b"": nobody knows.
        disputed: the ledgers have no majority, or this node's is not of it: the checkpoint is to be
            asked first, and alone if there is no checksum.
        outvoted: other nodes that said otherwise.
    """

    checksum: bytes = b""
    disputed: bool = False
    outvoted: tuple[str, ...] = ()


class Ledger:
    """One group's checksums on one node."""

    def __init__(self) -> None:
        self._sums: dict[Ref, bytes] = {}

    def note(self, layer: int, expert: int, checksum: bytes) -> bool:
        """An expert was loaded or copied, and verified; False when it was known with another sum
        (which then stays).
        """
        return self._sums.setdefault((layer, expert), checksum) == checksum

    def replace(self, layer: int, expert: int, checksum: bytes) -> None:
        """The checkpoint says otherwise than what was believed."""
        self._sums[layer, expert] = checksum

    def get(self, layer: int, expert: int) -> bytes:
        """The checksum, b"" when it is not known."""
        return self._sums.get((layer, expert), b"")

    def judge(self, layer: int, expert: int, said: Mapping[str, bytes]) -> Verdict:
        """What to expect, given what other nodes said; this node has one voice among them."""
        own = self.get(layer, expert)
        votes = Counter(checksum for checksum in (own, *said.values()) if checksum)
        if not votes:
            return Verdict()
        most = max(votes.values())
        best = [checksum for checksum, count in votes.items() if count == most]
        if len(best) == 1:
            checksum = best[0]
            return Verdict(checksum, own not in (b"", checksum), _others(said.items(), checksum))
        checksum = own if own in best else b""
        return Verdict(checksum, disputed=True, outvoted=_others(said.items(), checksum))


def _others(said: Iterable[tuple[str, bytes]], checksum: bytes) -> tuple[str, ...]:
    return tuple(sorted(node for node, other in said if other and other != checksum))
