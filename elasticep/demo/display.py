"""How a run looks: a live table on a terminal, plain lines elsewhere. No threads: it is forked."""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import IO, Final, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from elasticep.demo.report import Report

_EVENTS_SHOWN: Final = 12
_REFRESH_S: Final = 0.1
_RATE_WINDOW_S: Final = 1.0
_COLOURS: Final = {"serving": "green", "starting": "yellow", "dead": "red", "left": "dim"}


@dataclass(slots=True)
class RankLine:
    """What is shown of a rank."""

    rank: int
    node: int
    state: str = "starting"
    epoch: int = 0
    step: int = 0
    requests: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Progress:
    """What is shown of a run, kept up to date by the parent."""

    ranks: list[RankLine]
    tokens_wanted: int
    tokens: int = 0
    _history: deque[tuple[float, int]] = field(default_factory=deque)

    def add_tokens(self, count: int) -> None:
        """Tokens came."""
        self.tokens += count
        now = time.monotonic()
        self._history.append((now, count))
        while self._history and now - self._history[0][0] > _RATE_WINDOW_S:
            self._history.popleft()

    @property
    def tokens_per_s(self) -> float:
        """Over the last second."""
        since = time.monotonic() - _RATE_WINDOW_S
        return sum(count for at, count in self._history if at > since) / _RATE_WINDOW_S

    @property
    def epoch(self) -> int:
        """The highest epoch that a rank runs or ran in."""
        return max((line.epoch for line in self.ranks), default=0)


class Display(Protocol):
    """Where a run shows itself."""

    def event(self, text: str) -> None:
        """Something happened."""

    def progress(self, progress: Progress) -> None:
        """The figures changed; may be called often."""

    def close(self) -> None:
        """Leave the terminal as it was."""

    def result(self, report: Report) -> None:
        """The end."""


class PlainDisplay:
    """One line per event.

    Args:
        stream: where to.
        table: whether the result is printed as a table, too.
    """

    def __init__(self, stream: IO[str], *, table: bool) -> None:
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._table = table
        self._begin = time.monotonic()

    def event(self, text: str) -> None:
        """Print it with the time since the start."""
        self._console.print(f"{time.monotonic() - self._begin:7.3f} s  {text}", markup=False)

    def progress(self, progress: Progress) -> None:
        """Nothing: events say enough."""

    def close(self) -> None:
        """Nothing to restore."""

    def result(self, report: Report) -> None:
        """Print the table, if wanted."""
        if self._table:
            self._console.print(result_table(report))


class LiveDisplay:
    """Ranks, epoch, tokens per second and a timeline, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begin = time.monotonic()
        self._events: list[str] = []
        self._progress: Progress | None = None
        self._drawn = 0.0
        # Refreshed by hand: a refreshing thread would not survive the parent's forks.
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()

    def event(self, text: str) -> None:
        """Add it to the timeline."""
        self._events.append(f"{time.monotonic() - self._begin:7.3f} s  {text}")
        self._draw()

    def progress(self, progress: Progress) -> None:
        """Redraw, at most every tenth of a second."""
        self._progress = progress
        if time.monotonic() - self._drawn >= _REFRESH_S:
            self._draw()

    def close(self) -> None:
        """Leave the last picture on the screen and the cursor visible."""
        self._live.stop()

    def result(self, report: Report) -> None:
        """Print the table below the last picture."""
        self.close()
        self._console.print(result_table(report))

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        parts: list[RenderableType] = []
        if self._progress is not None:
            parts.append(_ranks_table(self._progress))
        lines = "\n".join(self._events[-_EVENTS_SHOWN:])
        parts.append(Panel(Text(lines), title="timeline", title_align="left"))
        self._live.update(Group(*parts), refresh=True)


def _ranks_table(progress: Progress) -> Table:
    table = Table(
        title=f"epoch {progress.epoch}   {progress.tokens} of {progress.tokens_wanted} tokens   "
        f"{progress.tokens_per_s:.0f} tokens/s",
        title_justify="left",
    )
    for name in ("rank", "node", "state", "epoch", "step", "requests", "tokens"):
        table.add_column(name, justify="left" if name == "state" else "right")
    for line in progress.ranks:
        table.add_row(
            str(line.rank),
            str(line.node),
            Text(line.state, style=_COLOURS.get(line.state, "")),
            str(line.epoch),
            str(line.step),
            str(line.requests),
            str(line.tokens),
        )
    return table


def result_table(report: Report) -> Table:
    """The final table."""
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in report.rows():
        table.add_row(name, value)
    return table


def choose_display(stream: IO[str], *, table: bool) -> Display:
    """A live display where `stream` is a terminal that can move its cursor, else plain lines."""
    console = Console(file=stream)
    if table and console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console)
    return PlainDisplay(stream, table=table)
