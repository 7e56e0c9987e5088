"""Deleting a group: what keeps it, who is told, and what is over when it comes to its name. Pure.

A group that is created anew under the name has nothing of the old one, and no number of it: its
incarnations and epochs begin above all that were used (`state.Past`). So a node, a rank or a view
of the old group that turns up later is known for what it is, by the rules for what is over.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from elasticep.control import events as ev
from elasticep.control.events import SeatReport, SeatState
from elasticep.control.membership import Membership
from elasticep.control.seats import Phase, Seat
from elasticep.control.state import Past
from elasticep.control.views import describe_ranks
from elasticep.errors import UsageError

_RUNNING = (SeatState.READY, SeatState.ATTACHED)


@dataclass(frozen=True, slots=True)
class Deleted:
    """A group that is being deleted.

    Attributes:
        past: what its name has used up.
        fenced: ranks whose engines are ended with it.
        after: what nodes are told when it is written.
    """

    past: Past
    fenced: tuple[int, ...]
    after: tuple[ev.Send, ...]


def delete(membership: Membership, nodes: Iterable[str], why: str, *, force: bool) -> Deleted:
    """What a group's deletion leads to.

    Args:
        membership: the group.
        nodes: those that are connected; the others are told at their hello.
        why: for engines and logs.
        force: also if ranks are seated.

    Raises:
        UsageError: ranks are seated; names them and their nodes.
    """
    name = membership.config.name
    seated = [seat for seat in membership.seats.values() if _seated(seat)]
    if seated and not force:
        where = ", ".join(sorted({seat.node for seat in seated}))
        raise UsageError(
            f"{describe_ranks([seat.rank for seat in seated])} of group {name!r} "
            f"{'is' if len(seated) == 1 else 'are'} held by engines on {where}; end these engines "
            "(elasticep drain takes ranks out in order), or fence them: elasticep group delete "
            f"{name} --force"
        )
    past = membership.past
    connected = sorted(nodes)
    ends = [
        ev.Fence(seat.node, seat.rank, seat.incarnation, past.epoch, why)
        for seat in membership.seats.values()
        if seat.node in connected and seat.phase is not Phase.GONE
    ]
    forgets = [ev.Forget(node, past.incarnation, past.epoch, why) for node in connected]
    return Deleted(past, tuple(seat.rank for seat in seated), (*ends, *forgets))


def _seated(seat: Seat) -> bool:
    """Whether an engine holds the seat, or may: of a node that this leader has not heard it is not
    known what its workers that wait for an engine have got by now.
    """
    return seat.live and (seat.attached or seat.phase is not Phase.JOINING or not seat.heard)


def leftovers(
    node: str, seats: Mapping[tuple[str, int], SeatReport], past: Mapping[str, Past]
) -> Iterator[tuple[str, list[ev.Send]]]:
    """What a node is told that still has seats of deleted groups: (group, sends).

    Args:
        node: that said hello.
        seats: (group, rank) -> what it said.
        past: name -> what deleted groups of it have used up.
    """
    for group, used in sorted(past.items()):
        old = [
            report
            for (name, _), report in sorted(seats.items())
            if name == group and 0 < report.incarnation < used.incarnation
        ]
        if old:
            why = f"group {group!r} was deleted while its node was away"
            yield (
                group,
                [
                    *(
                        ev.Fence(node, report.rank, report.incarnation, used.epoch, why)
                        for report in old
                        if report.state in _RUNNING
                    ),
                    ev.Forget(node, used.incarnation, used.epoch, why),
                ],
            )
