"""A group of simulated nodes around the real membership: for unit tests, without clock or sockets.

`World` plays the daemons and engines: it answers grants, stages views, passes step barriers, kills
and cuts off what it is told to. Every message waits in a queue until it is delivered, in an order
that the test may choose.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from elasticep.control import deletion, records
from elasticep.control import events as ev
from elasticep.control.events import Fence, Grant, Outcome, Propose, SeatReport, SeatState
from elasticep.control.membership import Membership, Saved
from elasticep.control.state import Past
from elasticep.control.store.base import check_operations
from elasticep.control.views import View
from elasticep.control.writes import OPERATIONS
from elasticep.geometry import GroupGeometry
from elasticep.group import GroupConfig
from elasticep.policies import Policies
from elasticep.spec import ExchangeSpec


def group_config(
    *, ranks: int = 4, max_ranks: int = 0, experts: int = 8, slots: int = 4, **changes: object
) -> GroupConfig:
    """A small group: 2 layers, one `ROUTED` exchange."""
    return GroupConfig(
        name="g",
        geometry=GroupGeometry(
            layers=2,
            experts=experts,
            topk=2,
            hidden=64,
            slots_per_rank=slots,
            max_ranks=max_ranks or ranks,
        ),
        exchanges=(("decode", ExchangeSpec.preset("ROUTED")),),
        initial_ranks=ranks,
        **changes,  # type: ignore[arg-type]
    )


@dataclass(slots=True)
class SimSeat:
    """One seat on a simulated node."""

    rank: int
    incarnation: int = 0
    state: SeatState = SeatState.EMPTY
    cause: str = ""
    epoch: int = 0
    views: dict[int, View] = field(default_factory=dict)  # staged, later than `epoch`
    hung: bool = False

    def report(self) -> SeatReport:
        """What the node says of it."""
        return SeatReport(self.rank, self.incarnation, self.state, self.epoch, self.cause)


@dataclass(slots=True)
class SimNode:
    """A node with its seats and the messages on the way to it."""

    name: str
    seats: dict[int, SimSeat]
    up: bool = True
    inbox: list[ev.Send] = field(default_factory=list)
    forgot: int = 0  # incarnations below were a deleted group's
    later: dict[int, Grant] = field(default_factory=dict)  # that wait for their end


class World:
    """Nodes, seats, time, and one membership.

    Args:
        config: the group's config.
        nodes: node -> ranks that it offers.
        attach: engines attach as soon as their worker is up.
    """

    def __init__(
        self, config: GroupConfig, nodes: dict[str, Iterable[int]], *, attach: bool = True
    ) -> None:
        self.config = config
        self.now_ms = 1_000
        self.attach = attach
        self.nodes = {n: SimNode(n, {r: SimSeat(r) for r in ranks}) for n, ranks in nodes.items()}
        self.membership: Membership
        self.past = Past()
        self._empty_store()
        self.lead(None)
        self.proposed: list[View] = []
        self.notices: list[ev.Notice] = []
        self.told: dict[str, Policies] = {}  # node -> what it heard last
        self.unsupplied: dict[str, set[tuple[int, int]]] = {}  # node -> experts it finds nowhere
        self.asked: list[tuple[int, tuple[int, int]]] = []  # (rank, expert) that it found nowhere
        self.dead: set[tuple[int, int]] = set()  # incarnations whose dead word is set somewhere
        for name in self.nodes:
            self.connect(name)

    # ---- the store and the network

    def _empty_store(self) -> None:
        self.saved_view: View | None = None
        self.saved_adopted = 0
        self.saved_seats: dict[int, ev.SaveSeat] = {}
        self.saved_policies: Policies | None = None
        self.saved_rebalance: ev.SaveRebalance | None = None
        self.saved_loads: ev.SaveLoads | None = None

    def delete_and_create(self) -> None:
        """The group is deleted, whatever runs, and created anew at once."""
        up = [node.name for node in self.nodes.values() if node.up]
        deleted = deletion.delete(self.membership, up, "it was deleted", force=True)
        self.past = deleted.past
        self._empty_store()
        self._send(deleted.after)
        self.lead(None)
        for name in up:
            self.feed(ev.NodeHello(name, self._reports(name)))

    def feed(self, event: ev.Event) -> Outcome:
        """Give the membership one event; write and send what it wants."""
        return self.take(self.decide(event))

    def take(self, out: Outcome) -> Outcome:
        """Write and send what an outcome wants; the store must be able to take it at once."""
        self._send(out.now)
        at = records.Moment(self.now_ms, self.now_ms)
        name = self.config.name
        written = [op for write in out.writes for op in records.operations(name, write, at)]
        for first in range(0, len(written), OPERATIONS):
            check_operations(written[first : first + OPERATIONS])
        for write in out.writes:
            if isinstance(write, ev.SaveView):
                self.saved_view = write.view
                self.proposed.append(write.view)
            elif isinstance(write, ev.SaveAdopted):
                self.saved_adopted = write.epoch
            elif isinstance(write, ev.SavePolicies):
                self.saved_policies = write.policies
            elif isinstance(write, ev.SaveRebalance):
                self.saved_rebalance = write
            elif isinstance(write, ev.SaveLoads):
                self.saved_loads = write
            elif isinstance(write, ev.SaveSeat):
                self.saved_seats[write.rank] = write
        self._send(out.after)
        for send in out.after:
            if isinstance(send, Propose):
                self.decide(ev.Told(send.view.epoch, send.ranks))
        self.notices += out.notices
        return out

    def _send(self, sends: Iterable[ev.Send]) -> None:
        for send in sends:
            if self.nodes[send.node].up:
                self.nodes[send.node].inbox.append(send)

    def advance(self, ms: int, *, step_ms: int = 100) -> None:
        """Let time pass, with ticks."""
        end = self.now_ms + ms
        while self.now_ms < end:
            self.now_ms = min(end, self.now_ms + step_ms)
            self.feed(ev.Tick())

    def lead(self, saved: Saved | None) -> None:
        """A controller begins to lead, with what the store holds."""
        self.membership = Membership(self.config, self.now_ms, saved, self.past)

    def decide(self, event: ev.Event) -> Outcome:
        """What the membership wants done after an event."""
        return self.membership.handle(event, self.now_ms)

    def restart_controller(self) -> None:
        """The next leader takes over from the store; nodes connect again."""
        seats = tuple(self.saved_seats[rank] for rank in sorted(self.saved_seats))
        history = self.membership.history
        saved = Saved(
            *(self.saved_view, self.saved_adopted, seats, history),
            policies=self.saved_policies,
            loads=self.saved_loads.tokens if self.saved_loads is not None else None,
        )
        self.lead(saved)
        for node in self.nodes.values():
            node.inbox.clear()
            if node.up:
                self.connect(node.name)

    def connect(self, name: str) -> None:
        """A node's session begins, or begins again: what was on its way is lost."""
        node = self.nodes[name]
        node.inbox.clear()
        node.later.clear()
        node.up = True
        reports = self._reports(name)
        said = {(self.config.name, report.rank): report for report in reports}
        for _, sends in deletion.leftovers(name, said, {self.config.name: self.past}):
            self._send(sends)
        self.feed(ev.NodeHello(name, reports))

    def _reports(self, name: str) -> tuple[SeatReport, ...]:
        return tuple(seat.report() for seat in self.nodes[name].seats.values())

    def cut(self, name: str, *, gone: bool = False) -> None:
        """A node's session ends; `gone`: for longer than the node timeout."""
        node = self.nodes[name]
        node.up = False
        node.inbox.clear()
        self.feed(ev.NodeDisconnected(name))
        if gone:
            self.feed(ev.NodeGone(name, f"node {name} was not heard of"))

    # ---- what nodes do

    def seat(self, rank: int, incarnation: int = 0) -> tuple[SimNode, SimSeat]:
        """Where a rank's highest (or given) incarnation is."""
        found = [(n, n.seats[rank]) for n in self.nodes.values() if rank in n.seats]
        if incarnation:
            return next((n, s) for n, s in found if s.incarnation == incarnation)
        return max(found, key=lambda pair: pair[1].incarnation)

    def deliver(self, name: str) -> bool:
        """One message to a node; False when there was none."""
        node = self.nodes[name]
        if not node.inbox or not node.up:
            return False
        message = node.inbox.pop(0)
        if isinstance(message, Grant):
            self._grant(node, message)
        elif isinstance(message, Fence):
            self._fence(node, message)
        elif isinstance(message, ev.Tell):
            self.told[name] = message.policies
        elif isinstance(message, ev.Forget):
            node.forgot = message.incarnation
        else:
            self._propose(node, message)
        return True

    def run(self, limit: int = 10_000) -> None:
        """Deliver until all is quiet."""
        for _ in range(limit):
            delivered = [self.deliver(name) for name in sorted(self.nodes)]
            if not any(delivered):
                return
        raise AssertionError("messages go round and round")

    def _grant(self, node: SimNode, grant: Grant) -> None:
        seat = node.seats[grant.rank]
        if grant.incarnation == seat.incarnation:
            self._tell(node, seat)  # heard twice: say again where it is
            return
        assert grant.incarnation > seat.incarnation, (grant, seat)
        if seat.incarnation < node.forgot and seat.state is not SeatState.EMPTY:
            node.later[grant.rank] = grant  # when nothing is left of the deleted group
            return
        assert seat.state is SeatState.EMPTY, (grant, seat)
        node.seats[grant.rank] = SimSeat(grant.rank, grant.incarnation, SeatState.READY)
        self._tell(node, node.seats[grant.rank])
        if self.attach:
            self.attach_engine(grant.rank)

    def attach_engine(self, rank: int) -> None:
        """An engine takes the seat."""
        node, seat = self.seat(rank)
        assert seat.state is SeatState.READY, seat
        seat.state = SeatState.ATTACHED
        self._tell(node, seat)

    def _fence(self, node: SimNode, fence: Fence) -> None:
        self.dead.add((fence.rank, fence.incarnation))
        seat = node.seats.get(fence.rank)
        if seat is not None and seat.incarnation == fence.incarnation:
            self._end(node, seat, fence.reason)

    def _propose(self, node: SimNode, proposal: Propose) -> None:
        view = proposal.view
        self.dead |= {(m.rank, m.incarnation) for m in view.expelled}
        for rank in proposal.ranks:
            seat = node.seats[rank]
            attached = view.holds(rank, seat.incarnation) and seat.state is SeatState.ATTACHED
            if attached and not seat.hung:
                self.stage(rank, view)

    def stage(self, rank: int, view: View) -> None:
        """A rank stages a view."""
        node, seat = self.seat(rank)
        assert view.epoch < seat.epoch + 4 or seat.epoch == 0, "a bank in use would be overwritten"
        nowhere = self._nowhere(node, seat, view)
        if nowhere:
            self.asked += [(rank, pair) for pair in nowhere]
            answer = ev.Staged(node.name, rank, seat.incarnation, view.epoch, "nowhere", nowhere)
            self.feed(answer)
            return
        seat.views[view.epoch] = view
        if node.up:
            self.feed(ev.Staged(node.name, rank, seat.incarnation, view.epoch))

    def wake(self, rank: int) -> None:
        """A rank that hung comes to its step, and stages what it was told to."""
        _, seat = self.seat(rank)
        seat.hung = False
        if self.view.holds(rank, seat.incarnation) and self.view.epoch > seat.epoch:
            self.stage(rank, self.view)

    def _nowhere(self, node: SimNode, seat: SimSeat, view: View) -> tuple[tuple[int, int], ...]:
        """Experts that a view newly gives to a rank and that its node finds nowhere."""
        table = view.placement.slot_expert[:, seat.rank].tolist()
        runs = next((v for v in self.proposed if v.epoch == seat.epoch), None)
        held = runs.placement.slot_expert[:, seat.rank].tolist() if runs else [[] for _ in table]
        return tuple(
            (layer, expert)
            for layer, expert in sorted(self.unsupplied.get(node.name, ()))
            if expert in table[layer] and expert not in held[layer]
        )

    def _tell(self, node: SimNode, seat: SimSeat) -> None:
        if node.up:
            self.feed(ev.SeatChanged(node.name, seat.report()))
        if seat.state is SeatState.EMPTY and seat.rank in node.later:
            self._grant(node, node.later.pop(seat.rank))

    def kill(self, rank: int, cause: str = "worker died") -> None:
        """SIGKILL of a rank's worker or engine; its node reports it and cleans up."""
        node, seat = self.seat(rank)
        self._end(node, seat, cause)

    def _end(self, node: SimNode, seat: SimSeat, cause: str) -> None:
        if seat.state in (SeatState.EMPTY, SeatState.DEAD):
            return
        self.dead.add((seat.rank, seat.incarnation))
        seat.state, seat.cause, seat.epoch = SeatState.DEAD, cause, 0
        seat.views.clear()
        self._tell(node, seat)
        seat.state = SeatState.EMPTY
        self._tell(node, seat)

    # ---- the step barrier, as protocol.md section 4 has it, in one go

    def barrier(self) -> int:
        """All live ranks meet: the highest view that all who are in both have staged is adopted.

        Returns the epoch that runs, 0 when nobody can meet.
        """
        ranks = [s for n in self.nodes.values() for s in n.seats.values()]
        alive = [
            s
            for s in ranks
            if s.state is SeatState.ATTACHED and (s.rank, s.incarnation) not in self.dead
        ]
        for s in alive:
            first = [e for e, view in s.views.items() if view.previous_epoch == 0]
            if not s.epoch and first and not s.hung:
                self._adopt(s, min(first))  # nobody runs an earlier view: it needs no others
        base = max((s.epoch for s in alive), default=0)
        if any(s.hung and s.epoch == base for s in alive):
            return base  # its cell is waited for, whether later views have it or not
        for s in alive:
            if base in s.views and not s.hung:
                self._adopt(s, base)  # it sees cells of a newer epoch that it has staged
        views = {view.epoch: view for view in self.proposed}
        candidates = sorted({e for s in alive for e in s.views if e > base}, reverse=True)
        for epoch in candidates if base else ():
            members = [s for s in alive if views[epoch].holds(s.rank, s.incarnation)]
            in_both = [s for s in members if s.epoch]
            if in_both and all(epoch in s.views and not s.hung for s in in_both):
                for s in members:
                    if epoch in s.views and not s.hung:
                        self._adopt(s, epoch)
                return epoch
        return base

    def _adopt(self, seat: SimSeat, epoch: int) -> None:
        seat.epoch = epoch
        seat.views = {e: v for e, v in seat.views.items() if e > epoch}
        node, _ = self.seat(seat.rank)
        if node.up:
            self.feed(ev.Adopted(node.name, seat.rank, seat.incarnation, epoch))

    def settle(self, rounds: int = 12) -> None:
        """Deliver, meet and wait until nothing changes any more."""
        for _ in range(rounds):
            self.run()
            self.barrier()
            self.run()
            self.advance(100)

    # ---- questions

    @property
    def view(self) -> View:
        """The view proposed last."""
        assert self.membership.view is not None
        return self.membership.view

    def wait(self, rank: int, target: int, waited_ms: int, progress: int = 100) -> None:
        """A rank's node reports that it waits (0: no longer)."""
        node, seat = self.seat(rank)
        self.feed(
            ev.Waits(node.name, rank, seat.incarnation, target, "dispatch", waited_ms, progress)
        )

    def progress(self, rank: int, progress: int, *, warmup: bool = False) -> None:
        """A heartbeat's reading of a rank."""
        node, seat = self.seat(rank)
        self.feed(ev.Progressed(node.name, rank, seat.incarnation, progress, warmup))


TWO_NODES: Final = {"a": (0, 1), "b": (2, 3)}


def formed(nodes: dict[str, tuple[int, ...]] | None = None, **config: object) -> World:
    """Four ranks on two nodes that run in epoch 1."""
    config.setdefault("flap_limit", 0)
    world = World(group_config(**config), nodes or TWO_NODES)  # type: ignore[arg-type]
    world.settle()
    assert world.membership.adopted_epoch == world.view.epoch == 1
    return world


def members(world: World) -> list[tuple[int, int]]:
    """(rank, incarnation) of the latest view."""
    return [(m.rank, m.incarnation) for m in world.view.members]


def phases(world: World) -> list[str]:
    """Of all seats, by rank."""
    return [str(seat.phase) for seat in world.membership.seats.values()]
