"""What benches share: statistics, tables, the machine's description, JSON and figures.

Machines are shared and noisy: off the GPU a report quotes ratios between things that ran in turn in
one process tree. The raw times are in the JSON.
"""

import json
import os
import platform
import random
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import click

from elasticep import __version__
from elasticep.errors import ConfigError, ElasticEPError

_RESAMPLES: Final = 2000
_CONFIDENCE: Final = 0.95


@dataclass(slots=True)
class Table:
    """A title, columns, rows of text and remarks, printed as Markdown."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        """Append a row."""
        self.rows.append([str(cell) for cell in cells])

    def text(self) -> str:
        """Markdown with columns aligned for a terminal."""
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]

        def joined(cells: Sequence[str]) -> str:
            padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
            return "| " + " | ".join(padded) + " |"

        rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
        body = [joined(self.columns), rule, *(joined(row) for row in self.rows)]
        notes = ["", *(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n".join([f"### {self.title}", "", *body, *notes])


@dataclass(slots=True)
class Report:
    """Tables for people, figures for programs, and what they were measured on."""

    name: str
    tables: list[Table] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=lambda: describe_machine())

    def finish(self, output: str | None) -> None:
        """Print the tables, or JSON for `-`; write JSON to the file `output` if it is one.

        Raises:
            ConfigError: the file cannot be written.
        """
        self.machine["load_after"] = load()
        if output == "-":
            click.echo(self.json())
            return
        click.echo(f"{self.machine_line()}\n")
        for table in self.tables:
            click.echo(table.text() + "\n")
        if output:
            try:
                Path(output).write_text(self.json() + "\n")
            except OSError as error:
                raise ConfigError(
                    f"{output} cannot be written ({error.strerror}); the tables above are all "
                    "that is left of this run"
                ) from None
            click.echo(f"figures: {output}")

    def machine_line(self) -> str:
        """One line: when, where, on how busy a machine, with which command."""
        m = self.machine
        before, after = m["load_before"], m["load_after"]
        return (
            f"{m['date']}, {m['cores']}-core {m['architecture']}, elasticep {m['elasticep']}, load "
            f"{before} before and {after} after\n`{m['command']}`"
        )

    def json(self) -> str:
        """Everything, raw times included."""
        plain = {
            "bench": self.name,
            "machine": self.machine,
            "figures": self.figures,
            "tables": [asdict(table) for table in self.tables],
        }
        return json.dumps(plain, indent=1)


def load() -> float:
    """Mean number of runnable processes over the last minute."""
    return round(os.getloadavg()[0], 2)


def describe_machine() -> dict[str, Any]:
    """Cores, architecture, date, load and command line."""
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cores": len(os.sched_getaffinity(0)),
        "architecture": platform.machine().replace("_", "-"),
        "python": platform.python_version(),
        "elasticep": __version__,
        "load_before": load(),
        "command": command_line(),
    }


def command_line() -> str:
    """The command as one would type it."""
    words = sys.argv[1:]
    name = Path(sys.argv[0])
    if name.name == "__main__.py" and name.parent.parent.name == "elasticep":
        return shlex.join(["python", "-m", f"{name.parent.parent.name}.{name.parent.name}", *words])
    return shlex.join([name.name, *words])


# ---- statistics


@dataclass(frozen=True, slots=True)
class Ratio:
    """A median ratio with a 95% interval."""

    median: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        spec = spec or ".2f"
        low, high = format(self.low, spec), format(self.high, spec)
        return f"{format(self.median, spec)} [{low}, {high}]"

    def verdict(self, goal: float, *, at_least: bool) -> str:
        """`met` or `missed` if the whole interval says so, else `undecided`, with the goal."""
        good = [value >= goal if at_least else value <= goal for value in (self.low, self.high)]
        word = "met" if all(good) else "undecided" if any(good) else "missed"
        return f"{word} (goal {'>=' if at_least else '<='} {goal:g})"


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Median of above[i] / below[i] over pairs that ran in turn, with a bootstrap interval."""
    if not above or len(above) != len(below):
        raise ConfigError(f"{len(above)} and {len(below)} measurements make no pairs")
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return Ratio(statistics.median(ratios), *bootstrap(ratios, statistics.median))


def bootstrap(
    values: Sequence[float], statistic: Callable[[Sequence[float]], float]
) -> tuple[float, float]:
    """A 95% percentile interval of a statistic, from resamples with a fixed seed."""
    rng = random.Random(1)
    found = sorted(statistic(rng.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    tail = (1 - _CONFIDENCE) / 2
    return found[int(tail * _RESAMPLES)], found[int((1 - tail) * _RESAMPLES) - 1]


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` per cent of the values do not exceed."""
    if not values:
        raise ConfigError("a percentile of no values")
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100).__int__() - 1)]


def verdict(value: float, goal: float, *, at_least: bool) -> str:
    """`met` or `missed`, with the goal."""
    met = value >= goal if at_least else value <= goal
    return f"{'met' if met else 'missed'} (goal {'>=' if at_least else '<='} {goal:g})"


# ---- figures


def plot(path: str, title: str, unit: str, bars: Mapping[str, Mapping[str, float]]) -> None:
    """A PNG of grouped bars: `bars[group][series]`.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    pyplot = drawing()
    series = list(dict.fromkeys(name for group in bars.values() for name in group))
    figure, axes = pyplot.subplots(figsize=(1.5 + 1.4 * len(bars), 4), layout="constrained")
    width = 0.8 / max(1, len(series))
    for i, name in enumerate(series):
        at = [g + (i - (len(series) - 1) / 2) * width for g in range(len(bars))]
        axes.bar(at, [group.get(name, 0.0) for group in bars.values()], width, label=name)
    axes.set_xticks(range(len(bars)), list(bars))
    axes.set_ylabel(unit)
    axes.set_title(title)
    if series:
        axes.legend()
    save(figure, path)


def drawing() -> Any:
    """`matplotlib.pyplot` for files.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plot needs matplotlib; install elasticep[plot]") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: str) -> None:
    """Write a figure to a file, and forget it.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror})") from None
    finally:
        drawing().close(figure)


# ---- command line


def _writable(_context: click.Context, _option: click.Parameter, path: str | None) -> str | None:
    """Found out before anything is measured: whether a file can be written to `path`."""
    if path in (None, "-"):
        return path
    place = Path(path)
    if place.is_dir() or not os.access(place if place.exists() else place.parent, os.W_OK):
        raise click.BadParameter(f"{path} cannot be written to; name a file in a folder that is")
    return path


def _drawable(context: click.Context, option: click.Parameter, path: str | None) -> str | None:
    if path is not None:
        drawing()
    return _writable(context, option, path)


output_option = click.option(
    "--output",
    metavar="FILE",
    callback=_writable,
    help="Write JSON; - prints it instead of tables.",
)
plot_option = click.option(
    "--plot", "plot_path", metavar="PNG", callback=_drawable, help="Draw a figure."
)


def run_command(command: click.Command, words: Sequence[str]) -> int:
    """A click command with our errors as one line; returns the exit status."""
    try:
        command.main(
            list(words),
            prog_name=f"python -m elasticep.bench {command.name}",
            standalone_mode=False,
        )
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:  # Ctrl-C
        click.echo("stopped", err=True)
        return 128 + signal.SIGINT
    except ElasticEPError as error:
        click.echo(f"error: {error}", err=True)
        return 1
    return 0
