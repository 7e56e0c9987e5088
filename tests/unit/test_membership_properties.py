"""The membership under random faults and orders: what must always hold, and that it heals."""

import itertools
import re
from contextlib import suppress
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from elasticep.control import events as ev
from elasticep.control.events import Outcome, SeatState
from elasticep.control.membership import Membership, Saved
from elasticep.control.placement import SlotShortage
from elasticep.control.seats import Phase
from elasticep.control.views import View
from elasticep.errors import UsageError
from elasticep.group import LostExperts
from elasticep.testing.membership import SimSeat, World, group_config

RANKS = 6
NODES = {"a": (0, 1), "b": (2, 3), "c": (4, 5)}
ranks = st.integers(0, RANKS - 1)
nodes = st.sampled_from(sorted(NODES))


def plain(out: Outcome) -> list[object]:
    """An outcome as values that compare."""
    return [
        (type(each).__name__, each.view.digest, each.view.describe())
        if isinstance(each, (ev.Propose, ev.SaveView))
        else repr(each)
        for each in (*out.now, *out.writes, *out.after, *out.notices)
    ]


class Twins(World):
    """Two memberships hear the same (I8); what the first one wants is done."""

    def lead(self, saved: Saved | None) -> None:
        super().lead(saved)
        self.twin = Membership(self.config, self.now_ms, saved, self.past)

    def decide(self, event: ev.Event) -> Outcome:
        try:
            out = super().decide(event)
        except (UsageError, SlotShortage) as refused:
            with pytest.raises(type(refused), match=re.escape(str(refused))):
                self.twin.handle(event, self.now_ms)
            raise
        other = self.twin.handle(event, self.now_ms)
        assert plain(out) == plain(other), "the same events lead to other decisions"
        return out


class GroupUnderFaults(RuleBasedStateMachine):
    """Rules are what may happen; invariants are checked after each."""

    @initialize(
        min_ranks=st.integers(1, 3),
        spare=st.integers(0, 2),
        policy=st.sampled_from(list(LostExperts)),
        experts=st.sampled_from([6, 8, 12]),
    )
    def form(self, min_ranks: int, spare: int, policy: LostExperts, experts: int) -> None:
        config = group_config(
            ranks=4,
            max_ranks=RANKS,
            experts=experts,
            slots=4,
            min_ranks=min_ranks,
            spare_copies=spare,
            lost_experts=policy,
            flap_limit=0,
        )
        self.world = Twins(config, NODES)
        self.renormalise = self.world.membership.policies.renormalise
        self.ended: set[tuple[int, int]] = set()  # incarnations that some view expelled
        self.checked = 0

    # ---- what happens

    @rule(name=nodes)
    def deliver(self, name: str) -> None:
        self.world.deliver(name)

    @rule()
    def deliver_all(self) -> None:
        self.world.run()

    @rule()
    def meet(self) -> None:
        self.world.barrier()

    @rule(ms=st.sampled_from([10, 500, 2_000, 6_000, 31_000]))
    def wait(self, ms: int) -> None:
        self.world.advance(ms, step_ms=500)

    @rule(rank=ranks)
    def kill(self, rank: int) -> None:
        self.world.kill(rank)

    @rule(rank=ranks, cleaned=st.booleans())
    def die_slowly(self, rank: int, cleaned: bool) -> None:
        """The death is reported; that the processes are gone comes later, or not."""
        node, seat = self.world.seat(rank)
        if seat.state in (SeatState.READY, SeatState.ATTACHED):
            self.world.dead.add((rank, seat.incarnation))
            seat.state, seat.cause, seat.epoch = SeatState.DEAD, "died", 0
            seat.views.clear()
            self.world._tell(node, seat)
        elif seat.state is SeatState.DEAD and cleaned:
            seat.state = SeatState.EMPTY
            self.world._tell(node, seat)

    @rule(name=nodes, gone=st.booleans())
    def cut(self, name: str, gone: bool) -> None:
        self.world.cut(name, gone=gone)

    @rule(name=nodes, true=st.booleans())
    def say_it_is_off(self, name: str, true: bool) -> None:
        """An operator's word about a node that is missed; it may be wrong."""
        node = self.world.nodes[name]
        if node.up:
            return
        self.world.feed(ev.NodeGone(name, f"node {name} was not heard of"))
        for rank, seat in node.seats.items() if true else ():
            self.world.dead.add((rank, seat.incarnation))
            node.seats[rank] = SimSeat(rank)
        self.world.feed(ev.NodeOff(name, "an operator said so"))
        assert not [s for s in self.world.membership.seats.values() if s.node == name and s.live]

    @rule(name=nodes)
    def connect(self, name: str) -> None:
        self.world.connect(name)

    @rule(rank=ranks, hung=st.booleans())
    def hang(self, rank: int, hung: bool) -> None:
        self.world.seat(rank)[1].hung = hung

    @rule(rank=ranks, other=ranks, waited_ms=st.sampled_from([0, 600, 6_000]))
    def report_wait(self, rank: int, other: int, waited_ms: int) -> None:
        if self.world.seat(rank)[0].up:
            self.world.wait(rank, other, waited_ms)

    @rule(rank=ranks, progress=st.integers(0, 50), warmup=st.booleans())
    def beat(self, rank: int, progress: int, warmup: bool) -> None:
        if self.world.seat(rank)[0].up:
            self.world.progress(rank, progress, warmup=warmup)

    @rule(rank=ranks)
    def fail_to_stage(self, rank: int) -> None:
        node, seat = self.world.seat(rank)
        view = self.world.membership.view
        if view is not None and node.up and view.epoch > seat.epoch:
            error = ev.Staged(node.name, rank, seat.incarnation, view.epoch, "no memory")
            self.world.feed(error)

    @rule(chosen=st.sets(ranks, min_size=1, max_size=3))
    def drain(self, chosen: set[int]) -> None:
        with suppress(UsageError, SlotShortage):
            self.world.feed(ev.Drain(tuple(sorted(chosen)), "test"))

    @rule(rank=ranks)
    def undrain(self, rank: int) -> None:
        self.world.feed(ev.Undrain((rank,)))

    @rule(renormalise=st.booleans())
    def set_policies(self, renormalise: bool) -> None:
        policies = replace(self.world.membership.policies, renormalise=renormalise)
        self.world.feed(ev.SetPolicies(policies))
        self.renormalise = renormalise

    @precondition(lambda self: self.world.saved_seats)
    @rule()
    def next_leader(self) -> None:
        self.world.restart_controller()

    @rule()
    def delete_and_create(self) -> None:
        """No number of the old group's may come again: the invariants look at all views."""
        self.world.delete_and_create()
        self.renormalise = self.world.membership.policies.renormalise

    # ---- what must hold

    @invariant()
    def views_are_in_order(self) -> None:
        if not hasattr(self, "world"):
            return
        proposed = self.world.proposed
        for view in proposed[self.checked :]:
            self.check(view, proposed)
            self.ended |= {(m.rank, m.incarnation) for m in view.expelled}
            self.checked += 1

    def check(self, view: View, proposed: list[View]) -> None:
        config = self.world.config
        earlier = proposed[: proposed.index(view)]
        assert all(before.epoch < view.epoch for before in earlier), "epochs only grow"
        assert len(view.members) >= config.min_ranks
        for member in view.members:
            assert (member.rank, member.incarnation) not in self.ended, "it had been expelled"
        for before, member in itertools.product(earlier, view.members):
            old = before.member(member.rank)
            assert old is None or old.incarnation <= member.incarnation
        view.placement.validate(config.geometry, view.ranks, allow_lost=True)
        self.check_slots(view, earlier)

    def check_slots(self, view: View, earlier: list[View]) -> None:
        """No slot gets another expert while somebody may run in a view that reads it."""
        if view.previous_epoch == 0:
            return
        adopted = self.world.membership.adopted_epoch
        last = max((v.epoch for v in earlier if v.epoch <= adopted), default=0)
        for before in (v for v in earlier if v.epoch >= last):
            for member in view.members:
                if before.holds(member.rank, member.incarnation):
                    old = before.placement.slot_expert[:, member.rank]
                    new = view.placement.slot_expert[:, member.rank]
                    assert ((old == new) | (old == -1) | (new == -1)).all(), view.describe()

    @invariant()
    def at_most_two_views_are_unadopted(self) -> None:
        if not hasattr(self, "world") or self.world.membership.view is None:
            return
        view, seats = self.world.view, self.world.membership.seats
        live = [
            seat
            for m in view.members
            if (seat := seats[m.rank]).live and seat.incarnation == m.incarnation
        ]
        if not live:
            return
        ran = min(seat.epoch or seat.since - 1 for seat in live)
        ran = max(ran, self.world.saved_adopted)
        unadopted = [v for v in self.world.proposed if ran < v.epoch <= view.epoch]
        assert len(unadopted) <= 2, [v.describe() for v in unadopted]

    @invariant()
    def what_is_saved_is_what_is_so(self) -> None:
        if not hasattr(self, "world"):
            return
        membership = self.world.membership
        assert membership.policies.renormalise is self.renormalise, "acknowledged, and forgotten"
        assert self.world.saved_view is membership.view
        assert self.world.saved_adopted == membership.adopted_epoch
        for rank, seat in membership.seats.items():
            if seat.node:
                saved = self.world.saved_seats[rank]
                assert saved.incarnation == seat.incarnation, "a number could be given out twice"
                assert (saved.phase in (Phase.FENCED, Phase.GONE)) == (not seat.live)
                assert (saved.held, saved.since) == (seat.held, seat.since)

    # ---- and in the end

    def teardown(self) -> None:
        """When the faults stop, all ranks come together in one adopted view that lacks nothing."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for name, node in world.nodes.items():
            for seat in node.seats.values():
                seat.hung = False
            world.connect(name)
        for rank in range(RANKS):
            _, seat = world.seat(rank)
            if seat.state is SeatState.DEAD:
                self.die_slowly(rank, cleaned=True)
            world.wait(rank, 0, 0)
        world.feed(ev.Undrain(tuple(range(RANKS))))
        for _ in range(40):
            world.settle(rounds=2)
            world.advance(2_000, step_ms=500)
        assert world.view.ranks == tuple(range(RANKS)), world.membership.waiting
        assert world.membership.adopted_epoch == world.view.epoch
        assert not world.view.lost, world.view.describe()
        assert world.membership.waiting == ""
        self.views_are_in_order()


TestGroupUnderFaults = GroupUnderFaults.TestCase
TestGroupUnderFaults.settings = settings(max_examples=100, stateful_step_count=40)
