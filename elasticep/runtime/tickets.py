"""Tickets: one use, short-lived, unguessable; what makes a connection belong to a seat."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from elasticep.native.structs import Role

_BYTES = 24  # 192 random bits
Owner = TypeVar("Owner")


@dataclass(frozen=True, slots=True)
class Ticket(Generic[Owner]):
    """What a ticket stands for.

    Attributes:
        owner: the seat.
        role: who may show it.
        incarnation: of the seat when it was issued.
        pid: process that must show it, 0 = any of the right user.
        expires: on the office's clock.
    """

    owner: Owner
    role: Role
    incarnation: int
    pid: int
    expires: float


class TicketOffice(Generic[Owner]):
    """Issues tickets and takes each back once.

    Args:
        lifetime_s: how long one is good.
        clock: seconds, never going back.
    """

    def __init__(self, lifetime_s: float, clock: Callable[[], float]) -> None:
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._open: dict[str, Ticket[Any]] = {}

    def issue(self, owner: Owner, role: Role, incarnation: int, pid: int = 0) -> str:
        """A new ticket; an earlier one of this owner and role is void from now on."""
        now = self._clock()
        self._open = {
            text: ticket
            for text, ticket in self._open.items()
            if ticket.expires > now and not (ticket.owner is owner and ticket.role is role)
        }
        text = secrets.token_urlsafe(_BYTES)
        self._open[text] = Ticket(owner, role, incarnation, pid, now + self._lifetime_s)
        return text

    def take(self, text: str, role: Role, pid: int) -> Ticket[Owner] | None:
        """The ticket, void from now on, or None: unknown, used, too old, or not meant for this one.

        A ticket shown by the wrong process or in the wrong role is void as well.
        """
        ticket = self._open.pop(text, None)
        if ticket is None or ticket.expires <= self._clock():
            return None
        if ticket.role is not role or ticket.pid not in (0, pid):
            return None
        return ticket

    def outstanding(self, owner: Owner, role: Role, incarnation: int) -> bool:
        """Whether a ticket of this owner, role and incarnation may still be shown; one of an
        earlier incarnation opens nothing any more.
        """
        now = self._clock()
        return any(
            ticket.owner is owner
            and ticket.role is role
            and ticket.incarnation == incarnation
            and ticket.expires > now
            for ticket in self._open.values()
        )
