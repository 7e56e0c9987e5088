"""Who is a member of a group, and what follows from what is heard: a pure state machine.

Events and the time go in; an `Outcome` comes out. There is no clock, no I/O and no thread, and the
same events give the same outcomes, so a simulator runs this very code.

Invariants, and the order of operations that keeps them:

1. Epochs only grow and none is used twice. A view is written before anybody hears of it; its number
   is taken when it is decided, also if the write fails.
2. At most two epochs are unadopted (reported by every live member, they or later ones), so a bank
   is never reused under a rank that reads it.
3. An incarnation ends once. It is granted after its number was written, and the next one only
   after the node confirmed that its processes are gone.
4. Evidence has classes. A confirmed end (a death, a node that is gone, a failed staging) acts at
   once. Wait reports act after `hang_timeout`, on the root of a wait only, never during warmup.
5. A joiner stages first: nobody else hears of its view before, so a join that fails costs nothing.
"""

from collections.abc import Callable
from typing import Any, Final

from elasticep.control import events as ev
from elasticep.control import heard, wanted
from elasticep.control.decisions import settle
from elasticep.control.events import Outcome
from elasticep.control.pending import Pending
from elasticep.control.proposals import joinable
from elasticep.control.seats import Phase, Seat
from elasticep.control.state import GroupState, Past, Saved
from elasticep.control.tables import BoolArray, Int64Array
from elasticep.control.views import View
from elasticep.group import GroupConfig
from elasticep.policies import Policies

__all__ = ["Membership", "Saved"]


class Membership:
    """One group's members and views.

    Args:
        config: the group's config.
        now_ms: the time.
        saved: what the store holds, when an earlier leader left something.
        past: what deleted groups of its name have used up.
    """

    def __init__(
        self,
        config: GroupConfig,
        now_ms: int,
        saved: Saved | None = None,
        past: Past | None = None,
    ) -> None:
        self._s = GroupState.new(config, now_ms, saved, past or Past())

    # ---- what others see

    @property
    def config(self) -> GroupConfig:
        """The group's config as it was created."""
        return self._s.created

    @property
    def in_force(self) -> GroupConfig:
        """The group's config with the policies that hold now."""
        return self._s.config

    @property
    def policies(self) -> Policies:
        """What operators may change about it, as it is now."""
        return self._s.policies

    @property
    def seats(self) -> dict[int, Seat]:
        """Rank -> seat; not to be changed by others."""
        return self._s.seats

    @property
    def history(self) -> tuple[str, ...]:
        """One sentence per epoch, the newest last; the last 64."""
        return tuple(self._s.history)

    @property
    def view(self) -> View | None:
        """The view proposed last."""
        return self._s.view

    @property
    def adopted_epoch(self) -> int:
        """The highest epoch that every live member reported, it or a later one."""
        return self._s.adopted

    @property
    def past(self) -> Past:
        """What it has used up, and groups of its name before it: where another one would begin."""
        highest = max(seat.incarnation for seat in self._s.seats.values())
        return Past(highest + 1, self._s.next_epoch)

    @property
    def waiting(self) -> str:
        """Why no further view is proposed; empty when none is wanted."""
        return self._s.waiting

    @property
    def pending(self) -> Pending | None:
        """The view proposed last, while it is not adopted."""
        return self._s.latest_pending()

    @property
    def domains(self) -> dict[str, str]:
        """Node -> domain; not to be changed by others."""
        return self._s.domains

    @property
    def loads(self) -> Int64Array | None:
        """The tokens to plan for, int64 [layers, experts]; None: not known."""
        return self._s.loads

    @property
    def refused(self) -> BoolArray | None:
        """[layers, experts] that some node found nobody to supply; None: nothing."""
        return self._s.refusals.by_any()

    @property
    def cannot_load(self) -> frozenset[int]:
        """Members that get no new content, because they failed to load some."""
        view = self._s.view
        held = self._s.cannot_load
        return frozenset(
            m.rank for m in (view.members if view else ()) if (m.rank, m.incarnation) in held
        )

    def quiet_ms(self, now_ms: int) -> int:
        """How long the view is in force with nothing else under way; -1: something is."""
        state = self._s
        if state.view is None or state.unadopted or state.empty_since_ms or not state.in_use:
            return -1
        seats = state.seats.values()
        coming = any(joinable(seat, state.connected) for seat in seats)
        going = any(seat.phase is Phase.DRAINING for seat in seats)
        if coming or going or len(state.live_members()) < len(state.view.members):
            return -1
        return now_ms - state.adopted_ms

    def handle(self, event: ev.Event, now_ms: int) -> Outcome:
        """Take one event; returns what is to be done.

        Raises:
            UnknownRank, UsageError, SlotShortage: a drain or undrain that cannot be; nothing of
                it happened.
        """
        out = Outcome()
        _HANDLERS[type(event)](self._s, event, now_ms, out)
        if isinstance(event, (ev.Progressed, ev.Loads, ev.Told)):
            return out  # there are many of them; the next tick judges by what they say
        if not isinstance(event, (ev.Waits, ev.Tick)):
            self._s.dirty = True
        settle(self._s, now_ms, out)
        self._s.validate()
        return out


def _tick(state: GroupState, event: ev.Tick, now_ms: int, out: Outcome) -> None:
    """Time alone: `settle` looks at deadlines after every event."""
    if state.forgive(now_ms):
        state.dirty = True


_HANDLERS: Final[dict[type, Callable[[GroupState, Any, int, Outcome], None]]] = {
    ev.NodeHello: heard.node_hello,
    ev.NodeDisconnected: heard.node_disconnected,
    ev.NodeGone: heard.node_gone,
    ev.SeatChanged: heard.seat_changed,
    ev.Staged: heard.staged,
    ev.Told: heard.told,
    ev.Adopted: heard.adopted,
    ev.Waits: heard.waits,
    ev.Progressed: heard.progressed,
    ev.Loads: wanted.loads,
    ev.Rearrange: wanted.rearrange,
    ev.Retry: wanted.retry,
    ev.Drain: wanted.drain,
    ev.Undrain: wanted.undrain,
    ev.SetPolicies: wanted.set_policies,
    ev.NodeOff: wanted.node_off,
    ev.Tick: _tick,
}
