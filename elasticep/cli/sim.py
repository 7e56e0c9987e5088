"""`elasticep sim`: random faults on a simulated cluster, and a short story of what breaks."""

import itertools
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import click

from elasticep.sim import Plant, Result, Scenario, run_many
from elasticep.sim.faults import KINDS, ON_REQUEST
from elasticep.sim.run import short, shrink

_DAY_S: Final = 86_400.0
_PROGRESS_S: Final = 20.0  # between lines of progress that go to a file
_QUIET_S: Final = 86_400.0  # mean time between episodes of faults


def _story(result: Result) -> str:
    """What broke, after which faults, and how to see it again."""
    drawn = [fault for faults in result.scenario.drawn() for fault in faults]
    broken = result.violations[0].invariant
    head = f"seed {result.scenario.seed} breaks {broken}; {len(drawn)} faults suffice:"
    return "\n".join(
        [
            head,
            *(f"  {fault}" for fault in drawn),
            "what happened:",
            *(f"  {line}" for line in result.log[-60:]),
            f"replay: {result.scenario.command}",
        ]
    )


def _scenarios(first: Scenario, schedules: int, days: float, shapes: bool) -> Iterator[Scenario]:
    """Schedules with ascending seeds; with `days`, until so much simulated time has passed."""
    fields = {name: getattr(first, name) for name in first.__dataclass_fields__}
    if not days:
        for seed in range(first.seed, first.seed + schedules):
            yield (
                short(seed, first.plant, first.kinds)
                if shapes
                else Scenario(**{**fields, "seed": seed})
            )
        return
    rng = random.Random(f"days {first.seed}")
    episodes, left_s = 0, days * _DAY_S
    while left_s > 0:
        left_s -= rng.expovariate(1 / _QUIET_S)
        episodes += 1
    # A world grows old: it lives through sixteen episodes before the next one is made.
    for number in itertools.count():
        now = min(16, episodes - 16 * number)
        if now <= 0:
            return
        yield Scenario(**{**fields, "seed": first.seed + number, "episodes": now})


@click.command("sim")
@click.option("--seed", default=0, show_default=True, help="Of the first schedule.")
@click.option("--ranks", type=click.IntRange(1), help="In all, in groups of at most 128.")
@click.option("--nodes", type=click.IntRange(1), help="That share the ranks.")
@click.option("--controllers", default=2, show_default=True, type=click.IntRange(1, 9))
@click.option("--faults", default=5, show_default=True, type=click.IntRange(0, 1000),
              help="Per episode.")  # fmt: skip
@click.option("--episodes", default=1, show_default=True, type=click.IntRange(1, 100_000))
@click.option("--schedules", default=100, show_default=True, type=click.IntRange(1))
@click.option("--days", default=0.0, type=click.FloatRange(0, 36_500),
              help="Simulated days, quiet times jumped over, instead.")  # fmt: skip
@click.option("--years", default=0.0, type=click.FloatRange(0, 100),
              help="Simulated years, instead.")  # fmt: skip
@click.option("--kinds", default="", help="Kinds of faults that are drawn, with commas; all.")
@click.option("--only", default=None, help="Indices of the faults that happen ('-': none).")
@click.option("--plant", default=Plant.NONE.value, type=click.Choice([p.value for p in Plant]),
              help="A bug to plant.")  # fmt: skip
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(
    seed: int,
    ranks: int | None,
    nodes: int | None,
    controllers: int,
    faults: int,
    episodes: int,
    schedules: int,
    days: float,
    years: float,
    kinds: str,
    only: str | None,
    plant: str,
    output: str,
) -> None:
    """Run the real controllers and the real barrier in a simulated cluster under faults.

    Without --ranks every schedule draws its own small cluster. Exit status 1: an invariant broke;
    130: interrupted, after the sum of what was run.
    """
    chosen = None if only is None else _indices(only)
    first = Scenario(
        seed=seed,
        ranks=ranks or 4,
        nodes=nodes or min(2, ranks or 4),
        controllers=controllers,
        faults=faults,
        episodes=episodes,
        kinds=_kinds(kinds),
        only=chosen,
        plant=Plant(plant),
    )
    if first.nodes > first.ranks:
        raise click.UsageError(f"{first.nodes} nodes share {first.ranks} ranks; use fewer nodes")
    days += 365 * years
    shapes = ranks is None and nodes is None and only is None
    done: list[Result] = []
    text = output == "text"
    progress = _Progress() if text else None
    interrupted = False
    try:
        for result in run_many(_scenarios(first, schedules, days, shapes)):
            # Traces are kept of those that are looked at again; a year has many.
            done.append(result if result.violations else replace(result, log=()))
            if progress is not None:
                progress.show(done)
            if result.violations:
                break
    except KeyboardInterrupt:  # a year takes long: what was run until then still counts
        interrupted = True
        sys.unraisablehook = lambda _: None  # of the cluster that is abandoned in the middle
    if progress is not None:
        progress.end()
    broken = done[-1] if done and done[-1].violations else None
    smallest = shrink(broken.scenario) if broken is not None else None
    if not text:
        click.echo(json.dumps(_plain(done, smallest)))
    else:
        click.echo(_sum(done))
        if smallest is not None:
            click.echo(_story(smallest))
    if interrupted:
        click.echo("interrupted; the sum is of what was run to its end", err=True)
        sys.exit(130)
    sys.exit(1 if broken is not None else 0)


def _indices(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip() not in ("", "-")]
    for part in parts:
        if not part.isdecimal():
            raise click.UsageError(f"--only {part!r} is no index; use a form such as 0,3, or -")
    return tuple(int(part) for part in parts)


def _kinds(text: str) -> tuple[str, ...]:
    chosen = tuple(kind for kind in text.split(",") if kind)
    for kind in chosen:
        known = (*KINDS, *ON_REQUEST)
        if kind not in known:
            raise click.UsageError(f"there is no fault {kind!r}; known are {', '.join(known)}")
    return chosen


class _Progress:
    """How far a long run is, on stderr: a line that changes on a terminal, else now and then."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._next_s = time.monotonic() + (0.0 if self._terminal else _PROGRESS_S)

    def show(self, done: list[Result]) -> None:
        """Another schedule is done."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + (0.2 if self._terminal else _PROGRESS_S)
        line = f"\r{_sum(done)}" if self._terminal else _sum(done)
        click.echo(line, nl=not self._terminal, err=True)

    def end(self) -> None:
        """The sum follows."""
        if self._terminal:
            click.echo("", err=True)


def _sum(done: list[Result]) -> str:
    steps = sum(result.steps for result in done)
    return (
        f"{len(done)} schedules, {sum(r.simulated_s for r in done):.0f} s simulated in "
        f"{sum(r.wall_s for r in done):.1f} s, {steps} steps, "
        f"{sum(r.epochs for r in done)} views, "
        f"{sum(bool(r.violations) for r in done)} broken"
    )


def _plain(done: list[Result], smallest: Result | None) -> dict[str, object]:
    return {
        "schedules": len(done),
        "simulated_s": round(sum(r.simulated_s for r in done), 3),
        "wall_s": round(sum(r.wall_s for r in done), 3),
        "steps": sum(r.steps for r in done),
        "views": sum(r.epochs for r in done),
        "digests": [r.digest for r in done[-10:]],
        "broken": None
        if smallest is None
        else {
            "seed": smallest.scenario.seed,
            "violations": [str(v) for v in smallest.violations],
            "log": list(smallest.log),
            "replay": smallest.scenario.command,
        },
    }
