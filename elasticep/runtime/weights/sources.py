"""In the mover: how the bytes of one unit come out of a source and into a slot being filled.

Every function here fills `fill` from begin to end, calls `went(bytes)` after each chunk (which
keeps the pace, reports, and raises when the copy was called off), and returns what the source
promises the unit to sum up to, or None. Nothing is believed: the caller sums up what lies in the
slot afterwards.
"""

from collections.abc import Callable
from typing import Final

from elasticep.arena import Arena, Fill
from elasticep.errors import ElasticEPError, SlotInvalid
from elasticep.runtime.weights.messages import Failure

CHUNK_BYTES: Final = 128 * 1024
LEAST_BYTES_PER_S: Final = 1 << 20
"""What a daemon that sends a unit must come to; a slower one is left for another source."""

Went = Callable[[int], None]


class SourceFailed(ElasticEPError):
    """The source did not give the unit.

    Attributes:
        failure: in which way.
    """

    reason = "SOURCE_FAILED"

    def __init__(self, failure: Failure, text: str) -> None:
        super().__init__(text)
        self.failure = failure


def copy_arena(source: Arena, slot: int, fill: Fill, chunk: int, went: Went) -> bytes:
    """Out of another arena of this host; its label is looked at before and after.

    Raises:
        SourceFailed: the slot does not hold the expert, or was filled anew meanwhile.
    """
    try:
        label = source.require(fill.layer, slot, fill.expert)
    except SlotInvalid as error:
        raise SourceFailed(Failure.GONE, str(error)) from None
    total = fill.arena.layout.spec.unit_bytes
    for at in range(0, total, chunk):
        size = min(chunk, total - at)
        pairs = zip(source.pieces(fill.layer, slot, at, size), fill.pieces(at, size), strict=True)
        for old, new in pairs:
            new[:] = old
        went(size)
    if source.label(fill.layer, slot) != label:
        raise SourceFailed(
            Failure.GONE, f"slot {slot} was filled anew while expert {fill.expert} was copied"
        )
    return label.checksum
