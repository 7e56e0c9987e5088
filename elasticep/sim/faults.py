"""Faults: what may happen, drawn from the seed, and how it is done to the world."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from elasticep.control import events as ev
from elasticep.control.background import Ask, Pause, Resume
from elasticep.group import LostExperts
from elasticep.policies import Policies
from elasticep.sim.net import STORE

if TYPE_CHECKING:
    from elasticep.sim.world import World

# kind -> how often it is drawn
KINDS: Final[dict[str, int]] = {
    "kill-rank": 8,
    "stop-rank": 6,
    "slow-rank": 2,
    "kill-daemon": 4,
    "stop-daemon": 2,
    "lose-node": 3,
    "freeze-node": 4,
    "kill-controller": 4,
    "stop-controller": 4,
    "jump-clock": 2,
    "store-outage": 3,
    "slow-store": 3,
    "full-store": 2,
    "compact-store": 1,
    "cut-node": 3,
    "cut-controller": 3,
    "cut-store": 3,
    "slow-network": 2,
    "slow-staging": 2,
    "bad-staging": 2,
    "drain": 4,
    "undrain": 3,
    "rebalance": 3,
    "set-policies": 2,
    "bad-attach": 2,
    "warm-rank": 2,
    "break-link": 3,
    "lossy-network": 2,
}
# Drawn when they are asked for by name.
ON_REQUEST: Final[dict[str, int]] = {"recreate-group": 3}


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong, or that an operator asks for.

    Attributes:
        at_ms: after the group serves.
        kind: a key of `KINDS` or `ON_REQUEST`.
        target: whom, as a number that the world maps to what there is.
        lasts_ms: until it is over, for those that end.
    """

    at_ms: int
    kind: str
    target: int
    lasts_ms: int

    def __str__(self) -> str:
        return f"{self.kind} {self.target} at {self.at_ms} ms for {self.lasts_ms} ms"


def draw(
    rng: random.Random, count: int, within_ms: int, only: tuple[str, ...] = ()
) -> tuple[Fault, ...]:
    """Faults in the order of their times; half of them close together. `only`: of these kinds."""
    kinds = list(only or KINDS)
    weights = [(KINDS | ON_REQUEST)[kind] for kind in kinds]
    faults = []
    center = rng.randrange(within_ms)
    for kind in rng.choices(kinds, weights, k=count):
        near = rng.random() < 0.5
        at_ms = max(0, center + rng.randrange(-300, 300)) if near else rng.randrange(within_ms)
        lasts_ms = rng.choice((rng.randrange(1, 50), rng.randrange(50, 800), rng.randrange(2_500)))
        faults.append(Fault(at_ms, kind, rng.randrange(1 << 16), lasts_ms))
    return tuple(sorted(faults, key=lambda f: (f.at_ms, f.kind, f.target)))


class Injector:
    """Does faults to a world and takes them back."""

    def __init__(self, world: "World") -> None:
        self._w = world

    def inject(self, fault: Fault) -> None:
        """Do one fault; its end comes by itself."""
        self._w.checker.trace(f"fault: {fault}")
        getattr(self, "_" + fault.kind.replace("-", "_"))(fault)

    def _later(self, fault: Fault, undo: Callable[[], object]) -> None:
        self._w.loop.call_later(fault.lasts_ms / 1_000, undo)

    # ---- ranks

    def _kill_rank(self, fault: Fault) -> None:
        node, seat = self._w.pick_seat(fault.target)
        if node.powered:
            node.kill(seat, "worker died")

    def _stop_rank(self, fault: Fault) -> None:
        _, seat = self._w.pick_seat(fault.target)
        process = seat.process
        if process is not None and process.alive and not process.stopped:
            process.stopped = True
            self._later(fault, process.cont)

    def _slow_rank(self, fault: Fault) -> None:
        _, seat = self._w.pick_seat(fault.target)
        process = seat.process
        if process is not None:
            process.slow = 5.0
            self._later(fault, lambda: setattr(process, "slow", 1.0))

    def _warm_rank(self, fault: Fault) -> None:
        """Its engine compiles, within `warmup()`, for longer than a rank may hang."""
        _, seat = self._w.pick_seat(fault.target)
        process = seat.process
        if process is not None:
            process.compiles = True
            self._later(fault, lambda: setattr(process, "compiles", False))

    def _break_link(self, fault: Fault) -> None:
        """Cells and flags between two ranks are held back until it is mended."""
        _, seat = self._w.pick_seat(fault.target)
        _, other = self._w.pick_seat(fault.target // 7 + 1)
        shared = self._w.groups[seat.group]
        if seat.group != other.group or seat.rank == other.rank or shared.large:
            return
        shared.broken.add(frozenset((seat.rank, other.rank)))
        self._later(fault, shared.mend)

    # ---- nodes

    def _kill_daemon(self, fault: Fault) -> None:
        node = self._w.pick_node(fault.target)
        if node.up:
            node.stop()
            self._later(fault, node.start)

    def _stop_daemon(self, fault: Fault) -> None:
        node = self._w.pick_node(fault.target)
        if node.up and not node.frozen:
            node.frozen = True
            self._later(fault, node.cont)

    def _lose_node(self, fault: Fault) -> None:
        node = self._w.pick_node(fault.target)
        if node.powered:
            node.lose()
            self._later(fault, lambda: node.boot() if not node.powered else None)

    def _freeze_node(self, fault: Fault) -> None:
        """The whole machine stops, as a virtual one that is moved, and goes on."""
        node = self._w.pick_node(fault.target)
        processes = [s.process for s in node.seats.values() if s.process and s.process.alive]
        if not node.up or node.frozen:
            return
        node.frozen = True
        for process in processes:
            process.stopped = True

        def go_on() -> None:
            for process in processes:
                if process.stopped:
                    process.cont()
            self._later(Fault(0, fault.kind, 0, fault.target % 50), node.cont)

        self._later(fault, go_on)

    def _slow_staging(self, fault: Fault) -> None:
        node = self._w.pick_node(fault.target)
        node.slow_staging = True
        self._later(fault, lambda: setattr(node, "slow_staging", False))

    def _bad_staging(self, fault: Fault) -> None:
        node = self._w.pick_node(fault.target)
        node.bad_staging = 1 + fault.target % 2
        experts = {c.geometry.experts for c in self._w.configs.values()}
        named = range(min(experts)) if fault.target % 3 == 0 else ()
        node.unrestorable = tuple((0, expert) for expert in named)

    def _bad_attach(self, fault: Fault) -> None:
        self._w.pick_node(fault.target).bad_attach = 1 + fault.target % 3

    # ---- controllers and the store

    def _kill_controller(self, fault: Fault) -> None:
        controller = self._w.pick_controller(fault.target)
        if controller.controller is not None:
            controller.kill()
            self._later(
                fault, lambda: controller.start() if controller.controller is None else None
            )

    def _stop_controller(self, fault: Fault) -> None:
        controller = self._w.pick_controller(fault.target)
        controller.pause()
        process = controller.process
        self._later(fault, lambda: self._w.loop.continue_process(process))

    def _jump_clock(self, fault: Fault) -> None:
        """A clock that counts time in suspend, after one."""
        self._w.pick_controller(fault.target).process.ahead_s += fault.lasts_ms / 1_000

    def _store_outage(self, fault: Fault) -> None:
        backend = self._w.server.backend
        backend.set_available(False)
        self._later(fault, lambda: backend.set_available(True))

    def _slow_store(self, fault: Fault) -> None:
        self._w.server.slow_s = (fault.target % 600) / 1_000
        self._later(fault, lambda: setattr(self._w.server, "slow_s", 0.0))

    def _full_store(self, fault: Fault) -> None:
        self._w.server.full = True
        self._later(fault, lambda: setattr(self._w.server, "full", False))

    def _compact_store(self, fault: Fault) -> None:
        self._w.server.backend.compact()

    # ---- the network

    def _cut(self, fault: Fault, some: set[str], others: set[str]) -> None:
        links = self._w.net.separate(some, others)
        self._later(fault, lambda: self._w.net.heal(links))

    def _cut_node(self, fault: Fault) -> None:
        name = self._w.pick_node(fault.target).name
        self._cut(fault, {name}, self._w.endpoints - {name})

    def _cut_controller(self, fault: Fault) -> None:
        name = self._w.pick_controller(fault.target).name
        self._cut(fault, {name}, set(self._w.nodes) | ({STORE} if fault.target & 1 else set()))

    def _cut_store(self, fault: Fault) -> None:
        self._cut(fault, {self._w.pick_controller(fault.target).name}, {STORE})

    def _slow_network(self, fault: Fault) -> None:
        self._w.net.slow_share = 0.3
        self._later(fault, lambda: setattr(self._w.net, "slow_share", 0.01))

    def _lossy_network(self, fault: Fault) -> None:
        self._w.net.lost_share = 0.2
        self._later(fault, lambda: setattr(self._w.net, "lost_share", 0.0))

    # ---- operators

    def _drain(self, fault: Fault) -> None:
        _, seat = self._w.pick_seat(fault.target)
        if not self._w.forming(seat.group):  # its first view would wait until the drain is over
            self._w.operate(seat.group, ev.Drain((seat.rank,), "maintenance"))

    def _undrain(self, fault: Fault) -> None:
        drained = sorted(key for key, held in self._w.checker.acknowledged.items() if held)
        if drained:
            group, rank = drained[fault.target % len(drained)]
            self._w.operate(group, ev.Undrain((rank,)))

    def _rebalance(self, fault: Fault) -> None:
        """One is asked for, or all are paused for a while."""
        _, seat = self._w.pick_seat(fault.target)
        if fault.target % 3:
            self._w.background(seat.group, Ask("force"))
            return
        self._w.background(seat.group, Pause("maintenance"))
        self._later(fault, lambda: self._w.background(seat.group, Resume()))

    def _set_policies(self, fault: Fault) -> None:
        _, seat = self._w.pick_seat(fault.target)
        config = self._w.configs[seat.group]
        draw = random.Random(fault.target)
        policies = replace(
            Policies.of(config),
            min_ranks=draw.randint(1, max(1, config.initial_ranks // 2)),
            lost_experts=draw.choice(list(LostExperts)),
            renormalise=draw.random() < 0.5,
            manual_readmission=draw.random() < 0.2,
            flap_limit=draw.choice((0, 2, 5)),
            rebalance=replace(
                config.rebalance,
                automatic=draw.random() < 0.8,
                target=draw.choice((1.0, 1.03, 1.3)),
                window_ms=draw.choice((100, 250, 1_000)),
                max_moves=draw.choice((0, 0, 2)),
            ),
        )
        self._w.set_policies(seat.group, policies)

    def _recreate_group(self, fault: Fault) -> None:
        """A group is deleted, whoever serves in it, and created anew under its name."""
        _, seat = self._w.pick_seat(fault.target)
        self._w.recreate(seat.group)

    # ---- the end of all faults

    def heal(self) -> None:
        """Everything that was broken works again."""
        w = self._w
        w.net.slow_share, w.net.lost_share = 0.01, 0.0
        for shared in w.groups.values():
            shared.mend()
        w.server.slow_s, w.server.full = 0.0, False
        w.server.backend.set_available(True)
        w.net.heal(set(w.net.cut))
        for controller in w.controllers:
            controller.cont()
            if controller.controller is None:
                controller.start()
        for node in w.nodes.values():
            node.slow_staging, node.bad_staging, node.bad_attach = False, 0, 0
            if not node.powered:
                node.boot()
            node.start()
            node.cont()
            for seat in node.seats.values():
                if seat.process is not None:
                    seat.process.slow, seat.process.compiles = 1.0, False
                    if seat.process.stopped:
                        seat.process.cont()
