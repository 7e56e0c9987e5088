"""One simulated cluster: store, controllers, nodes, ranks, and an operator."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from elasticep.control import events as ev
from elasticep.control.background import Ask, Pause, Resume
from elasticep.control.events import SeatState
from elasticep.control.metrics import ControllerMetrics
from elasticep.errors import ElasticEPError
from elasticep.geometry import MAX_RANKS, GroupGeometry
from elasticep.group import Completion, GroupConfig, LostExperts, Timeouts
from elasticep.policies import Policies
from elasticep.sim.barrier import Decider
from elasticep.sim.checks import Checker
from elasticep.sim.cluster import Cluster, SimSeat
from elasticep.sim.controllers import SimController
from elasticep.sim.loads import POLICY
from elasticep.sim.loop import VirtualLoop
from elasticep.sim.memory import LARGE, Shared
from elasticep.sim.net import STORE, Net
from elasticep.sim.nodes import SimNode
from elasticep.sim.plants import Plant
from elasticep.sim.store import StoreServer
from elasticep.spec import ExchangeSpec

if TYPE_CHECKING:
    from elasticep.control.term import Term

TIMEOUTS: Final = Timeouts(
    suspect_after_ms=150,
    hang_timeout_ms=1_000,
    exchange_timeout_ms=2_000,
    step_timeout_ms=3_000,
    node_timeout_ms=900,
)
_LOOK_S: Final = 0.1
_METRICS: Final[list[ControllerMetrics]] = []


def group_config(name: str, ranks: int, rng: random.Random) -> GroupConfig:
    """A group of the simulation: one layer, and slots from just enough to three of each expert."""
    large = ranks > LARGE
    return GroupConfig(
        name=name,
        geometry=GroupGeometry(
            layers=1,
            experts=ranks if large else 2 * ranks,
            topk=2,
            hidden=64,
            slots_per_rank=6 if large else rng.choice((3, 4, 6)),
            max_ranks=ranks,
        ),
        exchanges=(("decode", ExchangeSpec.preset("ROUTED")),),
        initial_ranks=ranks,
        timeouts=TIMEOUTS,
        lost_experts=rng.choice(list(LostExperts)),
        completion=rng.choice(list(Completion)),
        flap_limit=0 if large else 5,
        rebalance=POLICY,
    )


class World:
    """Everything that one seed makes.

    Args:
        loop: time.
        seed: of all delays.
        ranks: in all; groups of at most 128.
        nodes: that share them.
        controllers: replicas.
        plant: a mechanism that is taken out.
    """

    def __init__(
        self, loop: VirtualLoop, seed: int, ranks: int, nodes: int, controllers: int, plant: Plant
    ) -> None:
        self.loop = loop
        self.rng = random.Random(f"world {seed}")
        self.checker = Checker(loop.time)
        self.net = Net(loop, random.Random(f"net {seed}"))
        self.server = StoreServer(loop, self.net, self.checker)
        self.server.trusting = plant is Plant.STALE_WRITES
        self.plant = plant
        if not _METRICS:
            _METRICS.append(ControllerMetrics())
        self.controllers = [
            SimController(f"c{i}", loop, self.server, self.net, self.checker, _METRICS[0])
            for i in range(controllers)
        ]
        count = -(-ranks // MAX_RANKS)
        sizes = [ranks // count + (i < ranks % count) for i in range(count)]
        self.configs = {
            f"g{i}": group_config(f"g{i}", size, self.rng) for i, size in enumerate(sizes)
        }
        pace_s = (0.03, 0.12) if ranks <= LARGE else (0.8, 0.9)
        self.groups = {
            name: Shared(
                loop=loop,
                rng=random.Random(f"ranks {seed} {name}"),
                checker=self.checker,
                plant=plant,
                group=name,
                max_ranks=config.geometry.max_ranks,
                exchange_s=TIMEOUTS.exchange_timeout_ms / 1_000,
                step_s=TIMEOUTS.step_timeout_ms / 1_000,
                pace_s=pace_s,
                decider=Decider(config.geometry.max_ranks),
                agreed=config.completion is Completion.AGREED,
            )
            for name, config in self.configs.items()
        }
        cluster = Cluster(
            *(loop, self.rng, self.net, self.checker, plant),
            *(self.controllers, self.groups, self.configs),
        )
        places = [(name, r) for name, c in self.configs.items() for r in range(c.initial_ranks)]
        share = -(-ranks // nodes)
        for i in range(nodes):
            name = f"n{i}"
            mine = places[i * share : (i + 1) * share]
            cluster.nodes[name] = SimNode(cluster, name, mine)
        self.nodes = cluster.nodes
        self.endpoints = {STORE, *self.nodes, *(c.name for c in self.controllers)}
        self._operations: set[asyncio.Task[None]] = set()
        self._asked: dict[tuple[str, int], int] = {}
        self._policies_asked: dict[str, int] = {}
        self.policies: dict[str, Policies] = {}  # acknowledged
        self._operators = loop.create_future()
        self._rebalances: dict[str, int] = {}
        self.recreating: set[str] = set()
        self._paused: dict[str, bool] = {}  # group -> whether the last pause is acknowledged

    # ---- parts

    def seats(self) -> list[tuple[SimNode, SimSeat]]:
        """Every seat with its node."""
        return [(n, s) for n in self.nodes.values() for s in n.seats.values()]

    def pick_seat(self, number: int) -> tuple[SimNode, SimSeat]:
        """A seat for a number."""
        seats = self.seats()
        return seats[number % len(seats)]

    def pick_node(self, number: int) -> SimNode:
        """A node for a number."""
        return self.nodes[f"n{number % len(self.nodes)}"]

    def pick_controller(self, number: int) -> SimController:
        """A controller for a number: more often than not the one that leads."""
        leading = [c for c in self.controllers if c.term is not None]
        if leading and number % 3:
            return leading[number % len(leading)]
        return self.controllers[number % len(self.controllers)]

    # ---- operators

    def set_policies(self, group: str, policies: Policies) -> None:
        """An operator changes a group's policies."""
        self._policies_asked[group] = self._policies_asked.get(group, 0) + 1
        self.policies.pop(group, None)
        number = self._policies_asked[group]

        def acknowledged() -> None:
            if self._policies_asked[group] == number:
                self.policies[group] = policies

        self._ask(group, ev.SetPolicies(policies), acknowledged)

    def operate(self, group: str, event: ev.Drain | ev.Undrain) -> None:
        """An operator asks the leader, once."""
        drains = isinstance(event, ev.Drain)
        for rank in event.ranks:
            self._asked[group, rank] = self._asked.get((group, rank), 0) + 1
            self.checker.acknowledged.pop((group, rank), None)
        asked = {rank: self._asked[group, rank] for rank in event.ranks}

        def acknowledged() -> None:
            for rank, number in asked.items():
                if self._asked[group, rank] == number:
                    self.checker.acknowledged[group, rank] = drains

        self._ask(group, event, acknowledged)

    def _ask(
        self,
        group: str,
        event: ev.Drain | ev.Undrain | ev.SetPolicies,
        acknowledged: Callable[[], None],
    ) -> None:
        leader = next((c for c in self.controllers if c.term and not c.process.stopped), None)
        if leader is None or leader.term is None:
            return
        term = leader.term

        async def ask() -> None:
            try:
                if self.plant is Plant.EARLY_ANSWER:
                    self.server.loop.create_task(_quietly(term.operate(group, event)))
                else:
                    await term.operate(group, event)
            except ElasticEPError as error:
                self.checker.trace(f"operator: {event} is refused: {error}")
                return
            self.checker.trace(f"operator: {event} is acknowledged")
            acknowledged()

        task = self.loop.create_task(ask(), context=leader.process.context.copy())
        self._operations.add(task)
        task.add_done_callback(self._operations.discard)

    def background(self, group: str, event: Ask | Pause | Resume) -> None:
        """An operator asks the leader for a rebalance, or to leave experts where they are."""
        leader = next((c for c in self.controllers if c.term and not c.process.stopped), None)
        if leader is None or leader.term is None or group not in leader.term.cluster.groups:
            return
        term, pauses = leader.term, isinstance(event, Pause)
        self._rebalances[group] = number = self._rebalances.get(group, 0) + 1
        if not isinstance(event, Ask):
            self._paused.pop(group, None)

        async def ask() -> None:
            try:
                await term.rebalance(group, event)
            except ElasticEPError as error:
                self.checker.trace(f"operator: {type(event).__name__} is refused: {error}")
                return
            self.checker.trace(f"operator: {type(event).__name__} of {group} is acknowledged")
            if not isinstance(event, Ask) and self._rebalances[group] == number:
                self._paused[group] = pauses

        task = self.loop.create_task(ask(), context=leader.process.context.copy())
        self._operations.add(task)
        task.add_done_callback(self._operations.discard)

    def recreate(self, group: str) -> None:
        """An operator deletes a group and creates it anew, and asks again until both are
        acknowledged.
        """
        if group in self.recreating:
            return
        self.recreating.add(group)
        task = self.loop.create_task(self._recreate(group))
        self._operations.add(task)
        task.add_done_callback(self._operations.discard)

    def forming(self, group: str) -> bool:
        """Whether a group has no view yet that any leader knows of."""
        terms = [c.term for c in self.controllers if c.term is not None]
        known = [term.cluster.groups.get(group) for term in terms]
        return bool(known) and any(m is None or m.view is None for m in known)

    async def _recreate(self, group: str) -> None:
        await self._insist(lambda term: term.delete_group(group, "", force=True))
        # What was acknowledged went with the group; an answer that is on its way is none of it.
        for key in [key for key in self._asked if key[0] == group]:
            self._asked[key] += 1
            self.checker.acknowledged.pop(key, None)
        for numbers, known in ((self._policies_asked, self.policies), (self._rebalances, None)):
            numbers[group] = numbers.get(group, 0) + 1
            (self._paused if known is None else known).pop(group, None)
        self.checker.trace(f"operator: {group} is deleted")
        await self._insist(lambda term: term.create_group(self.configs[group]))
        self.checker.trace(f"operator: {group} is created anew")
        self.recreating.discard(group)

    async def _insist(self, ask: "Callable[[Term], Awaitable[object]]") -> None:
        """Ask whoever leads, again and again, until it is acknowledged."""
        while True:
            term = next((c.term for c in self.controllers if c.term is not None), None)
            with contextlib.suppress(ElasticEPError, TimeoutError):
                if term is not None:
                    async with asyncio.timeout(2.0):
                        await ask(term)
                    return
            await asyncio.sleep(0.05)

    async def create(self) -> None:
        """An operator creates the groups, and asks again until each is acknowledged."""
        todo = dict(self.configs)
        while todo:
            term = next((c.term for c in self.controllers if c.term is not None), None)
            try:
                for name in list(todo) if term is not None else ():
                    assert term is not None
                    async with asyncio.timeout(2.0):
                        await term.create_group(todo[name])
                    del todo[name]
            except (ElasticEPError, TimeoutError):
                continue
            finally:
                await asyncio.sleep(0.05)

    async def until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Wait for something; False when it does not come in time."""
        end_s = self.loop.now_s + limit_s
        while not condition():
            if self.loop.now_s >= end_s or self.checker.violations:
                return False
            await asyncio.sleep(_LOOK_S)
        return True

    def undrain_held(self) -> None:
        """Let in whoever is held for flapping or by a policy; drained ranks stay out."""
        for controller in self.controllers:
            term = controller.term
            for name, membership in term.cluster.groups.items() if term else ():
                held = [
                    s.rank
                    for s in membership.seats.values()
                    if s.held and not s.held.startswith("drained")
                ]
                if held:
                    self.operate(name, ev.Undrain(tuple(held)))

    # ---- what should be in the end

    def stuck(self) -> str:
        """Which rank does not serve in one view with all others, or why the view is not right."""
        term = next((c.term for c in self.controllers if c.term and not c.term.over), None)
        if term is None:
            return "nobody leads"
        if self.recreating:
            return f"group {min(self.recreating)} is being deleted and created anew"
        for name in self.configs:
            membership = term.cluster.groups.get(name)
            if membership is None or membership.view is None:
                return f"group {name} has no view"
            epoch = membership.view.epoch
            for node, seat in self.seats():
                if seat.group != name or membership.seats[seat.rank].held:
                    continue
                process = seat.process
                if process is None or seat.state is not SeatState.ATTACHED:
                    return f"rank {seat.rank} of {name} on {node.name} is {seat.state.name}"
                if process.epoch != epoch or membership.adopted_epoch != epoch:
                    waits = membership.waiting or "staging"
                    return f"rank {seat.rank} of {name} runs {process.epoch} of {epoch}: {waits}"
        return ""

    def counts(self) -> dict[tuple[str, int, int], int]:
        """Steps complete, of every rank that serves."""
        return {
            p.seat: self.checker.completed.get(p.seat, (0, 0))[0]
            for _, s in self.seats()
            if (p := s.process) is not None and s.state is SeatState.ATTACHED and p.epoch
        }

    def forgotten(self) -> list[str]:
        """Acknowledged drains and undrains that the leader does not know."""
        term = next((c.term for c in self.controllers if c.term is not None), None)
        if term is None:
            return []
        groups = term.cluster.groups
        pauses = [
            f"{'pause' if paused else 'resume'} of {group}"
            for group, paused in sorted(self._paused.items())
            if bool(term.cluster.background[group].rebalancer.paused) is not paused
        ]
        found = pauses + [
            f"{'drain' if drained else 'undrain'} of rank {rank} of {group}"
            for (group, rank), drained in sorted(self.checker.acknowledged.items())
            if groups[group].seats[rank].held.startswith("drained") is not drained
        ]
        return found + [
            f"change of the policies of {group}"
            for group, policies in sorted(self.policies.items())
            if groups[group].policies != policies
        ]

    async def close(self) -> None:
        """End all processes."""
        for node in self.nodes.values():
            node.stop()
        for controller in self.controllers:
            await controller.ended()
        for task in list(self._operations):
            task.cancel()
        await asyncio.gather(*self._operations, return_exceptions=True)


async def _quietly(work: object) -> None:
    assert asyncio.iscoroutine(work)
    try:
        await work
    except ElasticEPError:
        return
