"""Runs schedules: a scenario and its seed in, what broke and the trace's digest out."""

import gc
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from elasticep.sim.checks import Violation
from elasticep.sim.faults import Fault, Injector, draw
from elasticep.sim.loop import VirtualLoop
from elasticep.sim.plants import Plant, planted
from elasticep.sim.world import World

_START_S: Final = 30.0
_SERVE_S: Final = 60.0  # after all faults are over: everybody serves again
_MORE_STEPS: Final = 2
_EPISODE_S: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What decides a schedule, besides the code.

    Attributes:
        seed: of everything that is drawn.
        ranks: in all; groups have at most 128.
        nodes: that share them.
        controllers: replicas.
        faults: how many are drawn for an episode.
        episodes: times that faults come and are healed; the quiet time between is jumped over.
        kinds: of faults that are drawn; empty: all.
        only: indices of the drawn faults that happen; None: all.
        plant: a mechanism that is taken out.
    """

    seed: int
    ranks: int = 4
    nodes: int = 2
    controllers: int = 2
    faults: int = 5
    episodes: int = 1
    kinds: tuple[str, ...] = ()
    only: tuple[int, ...] | None = None
    plant: Plant = Plant.NONE

    def drawn(self) -> list[tuple[Fault, ...]]:
        """The faults of each episode."""
        rng = random.Random(f"faults {self.seed}")
        within_ms = int(_EPISODE_S * 1_000)
        all_of = [draw(rng, self.faults, within_ms, self.kinds) for _ in range(self.episodes)]
        if self.only is None:
            return all_of
        numbered = iter(range(self.faults * self.episodes))
        return [tuple(f for f in faults if next(numbered) in self.only) for faults in all_of]

    @property
    def command(self) -> str:
        """What replays it."""
        only = "" if self.only is None else f" --only {','.join(map(str, self.only)) or '-'}"
        kinds = f" --kinds {','.join(self.kinds)}" if self.kinds else ""
        plant = "" if self.plant is Plant.NONE else f" --plant {self.plant}"
        return (
            f"elasticep sim --seed {self.seed} --ranks {self.ranks} --nodes {self.nodes} "
            f"--controllers {self.controllers} --faults {self.faults} "
            f"--episodes {self.episodes}{kinds}{only}{plant} --schedules 1"
        )


@dataclass(frozen=True, slots=True)
class Result:
    """How a schedule ended.

    Attributes:
        scenario: what was run.
        violations: empty: all invariants held.
        digest: of the trace; the same for the same scenario.
        simulated_s: time in it.
        steps: completed by all ranks together.
        epochs: the highest.
        log: the last lines of the trace.
        wall_s: time that it took; no part of the digest.
    """

    scenario: Scenario
    violations: tuple[Violation, ...]
    digest: str
    simulated_s: float
    steps: int
    epochs: int
    log: tuple[str, ...] = field(repr=False)
    wall_s: float


def short(seed: int, plant: Plant = Plant.NONE, kinds: tuple[str, ...] = ()) -> Scenario:
    """A small schedule; the seed draws its sizes, too."""
    rng = random.Random(f"shape {seed}")
    return Scenario(
        seed=seed,
        ranks=rng.randint(3, 5),
        nodes=rng.randint(2, 3),
        controllers=rng.choice((1, 2, 2, 3)),
        faults=rng.randint(1, 6),
        kinds=kinds,
        plant=plant,
    )


def run(scenario: Scenario) -> Result:
    """Run one schedule."""
    began = time.perf_counter()
    loop = VirtualLoop()
    collecting = gc.isenabled()
    gc.disable()  # finalisers of abandoned coroutines would run at times that differ
    try:
        with planted(scenario.plant):
            world = loop.run_until_complete(_schedule(loop, scenario))
    finally:
        loop.close()
        if collecting:
            gc.enable()
    checker = world.checker
    return Result(
        scenario,
        tuple(checker.violations),
        checker.digest,
        loop.now_s,
        checker.total_steps,
        max((epoch for _, epoch in checker.views), default=0),
        tuple(checker.log),
        time.perf_counter() - began,
    )


async def _schedule(loop: VirtualLoop, scenario: Scenario) -> World:
    world = World(
        *(loop, scenario.seed, scenario.ranks, scenario.nodes),
        *(scenario.controllers, scenario.plant),
    )
    injector = Injector(world)
    for controller in world.controllers:
        controller.start()
    for node in world.nodes.values():
        node.boot()
    await world.create()
    await _serves(world, "at the start", _START_S)
    for faults in scenario.drawn():
        if world.checker.violations:
            break
        for fault in faults:
            loop.call_later(fault.at_ms / 1_000, injector.inject, fault)
        await world.until(lambda: False, max((f.at_ms for f in faults), default=0) / 1_000 + 0.3)
        if not world.checker.violations:
            world.checker.trace("all faults are over")
            injector.heal()
            await _serves(world, "after the faults", _SERVE_S)
    for lost in world.forgotten():
        world.checker.fail("I6", f"the acknowledged {lost} is forgotten")
    for error in loop.errors:
        world.checker.fail("I6", error)
    await world.close()
    return world


async def _serves(world: World, when: str, limit_s: float) -> None:
    """All ranks that may serve do, in one view, and complete steps."""
    seen: dict[tuple[str, int, int], int] = {}

    def serves() -> bool:
        if world.stuck():
            return False
        counts = world.counts()
        for seat, count in counts.items():
            seen.setdefault(seat, count)
        return all(count >= seen[seat] + _MORE_STEPS for seat, count in counts.items())

    if await world.until(serves, limit_s):
        return
    world.undrain_held()  # flapping ranks wait for a person, who comes now
    if not await world.until(serves, limit_s) and not world.checker.violations:
        what = world.stuck() or "no step is completed by all"
        world.checker.fail("I2", f"{when}, not within {2 * limit_s:g} s: {what}")


def run_many(scenarios: Iterator[Scenario]) -> Iterator[Result]:
    """Run one after the other; garbage is collected in between."""
    for count, scenario in enumerate(scenarios):
        yield run(scenario)
        if count % 20 == 19:
            gc.collect()


def shrink(scenario: Scenario, *, limit: int = 200) -> Result:
    """The fewest faults that still break something: delta debugging over the drawn ones."""
    kept = list(range(scenario.faults * scenario.episodes))
    if scenario.only is not None:
        kept = list(scenario.only)
    best = run(scenario)
    runs, parts = 0, 2
    while len(kept) >= 1 and runs < limit:
        size = max(1, len(kept) // parts)
        for start in range(0, len(kept), size):
            fewer = kept[:start] + kept[start + size :]
            runs += 1
            result = run(replace(scenario, only=tuple(fewer)))
            if result.violations:
                kept, best, parts = fewer, result, max(2, parts - 1)
                break
        else:
            if size == 1:
                break
            parts = min(len(kept), 2 * parts)
    return best
