"""`python -m elasticep.bench steady --against DIR`: two builds of the native core, pair by pair.

Meant for the cost of fault tolerance when nothing fails: this build against one without its checks
(dead, leave and fence words, wait records), `-DEP_FAULT_CHECKS=0`; and for proving that a change of
the core pays. Two groups with their engines stand side by side and run in turn: steps of one, the
same steps of the other, the order swapped from pair to pair. Where a group's memory happens to lie
makes it a few per cent faster or slower for as long as it lives, so both groups are made anew for
every set of pairs, the other one first each time, and the interval is over sets.
"""

import contextlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from elasticep.bench import ranks, report
from elasticep.bench.case import Case
from elasticep.bench.exchange import ENGINE, OurGroup
from elasticep.errors import ConfigError
from elasticep.native.library import CORE_NAME, LIBRARY_DIR

GOAL: Final = 1.02
_SAMPLE_S: Final = 0.1  # steps of one side of a pair


@dataclass(frozen=True, slots=True)
class Sample:
    """Steps of one side, in ns per step.

    Attributes:
        step_ns: on the clock: the median over steps, the maximum over ranks.
        cpu_ns: CPU time of all engines and workers together. With more ranks than cores this is
            what a step costs, and it does not depend on what else the machine does in between.
    """

    step_ns: float
    cpu_ns: float


class Side:
    """A group whose processes load their core from one folder."""

    def __init__(self, folder: Path, case: Case, preset: str, launch: str, exchanges: int) -> None:
        if not (folder / CORE_NAME).is_file():
            raise ConfigError(f"{folder} has no {CORE_NAME}; see docs/benchmarks.md for a build")
        env = {"ELASTICEP_LIBRARY_DIR": str(folder.resolve())}
        self._exchanges = exchanges
        with contextlib.ExitStack() as stack:
            self._engines = stack.enter_context(ranks.RankSet(ENGINE, case.ranks, env=env))
            group = OurGroup(self._engines, case, preset, launch, env)
            stack.callback(group.close)
            engines = [self._engines.pid(rank) for rank in range(case.ranks)]
            self._pids = {*engines, *group.runners}
            self._stack = stack.pop_all()

    def sample(self, steps: int) -> Sample:
        """Run some steps."""
        before = self._cpu_ns()
        answers = self._engines.call("run", runs=steps, repeat=self._exchanges)
        cpu_ns = self._cpu_ns() - before
        step_ns = max(float(statistics.median(answer["step_ns"])) for answer in answers)
        return Sample(step_ns, cpu_ns / steps)

    def _cpu_ns(self) -> int:
        # clock_getcpuclockid(3): the id of a process's CPU clock is made of its complement.
        return sum(time.clock_gettime_ns(~pid << 3 | 2) for pid in self._pids)

    def close(self) -> None:
        """End the group and its engines."""
        self._stack.close()


def compare(ours: Side, other: Side, pairs: int) -> tuple[list[Sample], list[Sample]]:
    """Samples of both sides, pair by pair."""
    once = max(ours.sample(3).step_ns, other.sample(3).step_ns) / 1e9
    steps = max(1, min(200, round(_SAMPLE_S / once)))
    found: tuple[list[Sample], list[Sample]] = ([], [])
    for pair in range(pairs):
        order = ((0, ours), (1, other))
        for i, side in order if pair % 2 else reversed(order):
            found[i].append(side.sample(steps))
    return found


def one_set(
    against: Path, rest: tuple[Case, str, str, int], pairs: int, *, ours_first: bool
) -> tuple[list[Sample], list[Sample]]:
    """Make both groups, compare them, and end them."""
    folders = (LIBRARY_DIR, against) if ours_first else (against, LIBRARY_DIR)
    with contextlib.ExitStack() as stack:
        sides = []
        for folder in folders:
            sides.append(Side(folder, *rest))
            stack.callback(sides[-1].close)
        ours, other = sides if ours_first else reversed(sides)
        return compare(ours, other, pairs)


@click.command(name="steady", help=__doc__)
@click.option("--against", type=click.Path(path_type=Path), required=True,
              help="Folder of the other libelasticep_core.so.")  # fmt: skip
@click.option("--preset", default="ROUTED", show_default=True)
@click.option("--ranks", "count", default=8, show_default=True)
@click.option("--tokens", default=64, show_default=True)
@click.option("--hidden", default=5120, show_default=True)
@click.option("--experts", default=384, show_default=True)
@click.option("--topk", default=6, show_default=True)
@click.option(
    "--exchanges", type=click.IntRange(min=1), default=8, show_default=True, help="Of a step."
)
@click.option("--launch", type=click.Choice(["service", "inline"]), default="service")
@click.option("--sets", type=click.IntRange(min=1), default=12, show_default=True)
@click.option(
    "--pairs", type=click.IntRange(min=1), default=12, show_default=True, help="Of each set."
)
@report.output_option
def _command(**options: Any) -> None:
    sizes = {name: options[name] for name in ("tokens", "hidden", "experts", "topk")}
    case = Case(ranks=options["count"], **sizes)
    rest = (case, options["preset"].upper(), options["launch"], options["exchanges"])
    result = report.Report("steady")
    sets = [
        one_set(options["against"], rest, options["pairs"], ours_first=number % 2 == 0)
        for number in range(options["sets"])
    ]
    table = report.Table(
        f"a step, this core / the other: {case.ranks} ranks, {case.tokens} tokens of "
        f"{case.hidden}, {rest[1]}, {rest[2]}, {rest[3]} exchanges",
        ["of", "sets x pairs", "median ratio [95% interval]", "goal"],
    )
    result.tables.append(table)
    result.figures["case"] = case.to_dict()
    for name, title in (("step_ns", "time on the clock"), ("cpu_ns", "CPU time, all processes")):
        medians = [
            statistics.median(
                getattr(a, name) / getattr(b, name) for a, b in zip(*one, strict=True)
            )
            for one in sets
        ]
        ratio = report.paired_ratio(medians, [1.0] * len(medians))
        goal = ratio.verdict(GOAL, at_least=False)
        table.add(title, f"{len(sets)} x {options['pairs']}", f"{ratio:.4f}", goal)
        result.figures[name] = {
            "ratio": [ratio.median, ratio.low, ratio.high],
            "sets": medians,
            "samples": [[[getattr(s, name) for s in side] for side in one] for one in sets],
        }
    result.finish(options["output"])


def main(arguments: Sequence[str]) -> int:
    """Run the bench; returns the exit status."""
    return report.run_command(_command, arguments)
