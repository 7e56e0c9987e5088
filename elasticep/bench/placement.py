"""The planner beside a plain greedy: `python -m elasticep.bench placement`.

Both run in turn in one process on the same loads. Imbalance is the highest rank load over the mean,
per layer. The greedy is our own plain re-implementation, written from the public library's
description: its imbalance and moves are that method's, its milliseconds are only this code's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from elasticep.bench.exchange import run_command
from elasticep.bench.placement_cases import (
    Case,
    Result,
    recorded,
    run_greedy,
    run_planner,
    synthetic,
)
from elasticep.bench.placement_plot import draw
from elasticep.bench.report import Report, Table, output_option, plot_option, verdict

PLANNERS: Final = {"elasticep": run_planner, "greedy": run_greedy}
GOAL_MS: Final = 10.0
GOAL_IMBALANCE: Final = 1.001
GOAL_MOVES: Final = 1.0  # per cent of the slots
GOAL_AFTER: Final = 1.03


@dataclass(frozen=True, slots=True)
class Summary:
    """A planner on a case: means over pairs and layers, the worst of them, and times."""

    now: float
    now_worst: float
    single: float  # experts with one copy, per layer
    stay: float
    split: float
    after: float
    after_worst: float
    moves_percent: float  # of all slots
    dead: float
    lost: float  # experts without a copy after one death, per layer
    plan_ms: float
    plan_cpu_ms: float
    again_ms: float


def summarise(case: Case, results: Sequence[Result]) -> Summary:
    """One row of the table from the results of all pairs."""
    layers = case.pairs[0][0].shape[0]

    def mean(name: str) -> float:
        return float(np.mean([np.mean(getattr(result, name)) for result in results]))

    def worst(name: str) -> float:
        return float(np.max([np.max(getattr(result, name)) for result in results]))

    return Summary(
        now=mean("now"),
        now_worst=worst("now"),
        single=mean("single") / layers,
        stay=mean("stay"),
        split=mean("split"),
        after=mean("after"),
        after_worst=worst("after"),
        moves_percent=100.0 * mean("moves") / case.places,
        dead=mean("dead"),
        lost=mean("lost") / layers,
        plan_ms=float(np.median([result.plan_ms for result in results])),
        plan_cpu_ms=float(np.median([result.plan_cpu_ms for result in results])),
        again_ms=float(np.median([result.again_ms for result in results])),
    )


def measure(case: Case, repeats: int) -> dict[str, Summary]:
    """Both planners on a case; the greedy is timed once per pair, being slow and steady."""
    results: dict[str, list[Result]] = {name: [] for name in PLANNERS}
    for now, following in case.pairs:
        for name, run in PLANNERS.items():
            results[name].append(run(case, now, following, repeats if name == "elasticep" else 1))
    return {name: summarise(case, found) for name, found in results.items()}


def balance_table(cases: Sequence[Case], found: dict[str, dict[str, Summary]]) -> Table:
    """Imbalance, coverage and time of a first plan, and what one death does to it."""
    table = Table(
        "First plan, and the death of one rank with nothing moved",
        [
            *("loads", "ranks x slots", "planner", "imbalance", "worst layer"),
            *("single copies/layer", "ms", "CPU ms", "after a death", "lost/layer"),
        ],
    )
    for case in cases:
        for name, summary in found[case.name].items():
            table.add(
                case.name,
                f"{case.ranks} x {case.slots}",
                name,
                f"{summary.now:.4f}",
                f"{summary.now_worst:.4f}",
                f"{summary.single:.1f}",
                f"{summary.plan_ms:.2f}",
                f"{summary.plan_cpu_ms:.2f}",
                f"{summary.dead:.4f}",
                f"{summary.lost:.2f}",
            )
    table.notes = [
        "imbalance: highest rank load / mean; average over layers (and pairs), and the worst layer",
        "after a death: rank 0 gone, tokens split anew (elasticep) or evenly (greedy), no moves",
        "lost: experts without a copy then; the imbalance is that of the rest",
        "CPU ms: of the processor alone; on the clock it is more where others use the machine",
        "ms of greedy: our plain Python, not the public library's",
    ]
    return table


def drift_table(cases: Sequence[Case], found: dict[str, dict[str, Summary]]) -> Table:
    """What the next loads do, before and after planning again, and what that moves."""
    table = Table(
        "Next loads",
        [
            *("loads", "planner", "as it was", "split anew, 0 moves", "planned again"),
            *("worst layer", "moves, % of slots", "ms"),
        ],
    )
    for case in cases:
        for name, summary in found[case.name].items():
            table.add(
                case.name,
                name,
                f"{summary.stay:.4f}",
                f"{summary.split:.4f}" if name == "elasticep" else "-",
                f"{summary.after:.4f}",
                f"{summary.after_worst:.4f}",
                f"{summary.moves_percent:.3f}",
                f"{summary.again_ms:.2f}",
            )
    table.notes = [
        "split anew: the copies stay, only weights change; the greedy knows no weights",
        "moves: copies of experts to ranks that did not hold them",
        *dict.fromkeys(f"{case.name.split(',')[0]}: {case.what}" for case in cases),
    ]
    return table


def goal_table(found: dict[str, dict[str, Summary]], names: Sequence[str]) -> Table:
    """The goals, at 40 layers x 384 experts, 832 slots, 64 ranks."""
    table = Table("Goals", ["loads", "what", "measured", "verdict"])
    for name in names:
        ours = found[name]["elasticep"]
        for what, value, goal in (
            ("ms", ours.plan_ms, GOAL_MS),
            ("worst layer's imbalance", ours.now_worst, GOAL_IMBALANCE),
            ("experts with one copy", ours.single, 0.0),
            ("drift: moves, % of slots", ours.moves_percent, GOAL_MOVES),
            ("drift: worst layer afterwards", ours.after_worst, GOAL_AFTER),
            ("one death: experts lost, nothing moved", ours.lost, 0.0),
        ):
            table.add(name, what, f"{value:.5g}", verdict(value, goal, at_least=False))
    return table


def as_plain(summary: Summary) -> dict[str, Any]:
    """Every figure of a row."""
    return {name: getattr(summary, name) for name in summary.__slots__}


@click.command("placement")
@click.option("--data", type=click.Path(exists=True, file_okay=False), help="Recorded loads.")
@click.option(
    "--pairs",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="Most pairs of recorded domains.",
)
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=15,
    show_default=True,
    help="Runs per time; the median counts.",
)
@plot_option
@output_option
def _command(
    data: str | None, pairs: int, repeats: int, plot_path: str | None, output: str | None
) -> None:
    """Plan with our planner and with a plain greedy, side by side."""
    sized = list(synthetic())
    cases = sized + (list(recorded(Path(data), pairs)) if data else [])
    report = Report("placement")
    found = {case.name: measure(case, repeats) for case in cases}
    report.tables = [
        balance_table(cases, found),
        drift_table(cases, found),
        goal_table(found, [case.name for case in sized]),
    ]
    report.figures = {
        case.name: {name: as_plain(summary) for name, summary in found[case.name].items()}
        for case in cases
    }
    report.finish(output)
    if plot_path:
        draw(plot_path, report.figures)


def main(arguments: Sequence[str]) -> int:
    """Run the bench; returns the exit status."""
    return run_command(_command, arguments)
