"""`python -m elasticep.bench exchange`: one MoE layer's round trip, beside what others offer.

On the CPU: our engines on a `LocalGroup` beside gloo and MPI with the same rows, and plain memcpy
of the remote bytes as the limit. All systems' ranks live in one process tree and run in turn; a
round is one turn of each, and only ratios within a round are quoted. The whole operation is timed:
layout, counts, waiting and sums; but not the expert kernel. Median over runs, maximum over ranks.
"""

import contextlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import click

from elasticep.bench import peers, ranks, report
from elasticep.bench.case import Case
from elasticep.bench.report import run_command as run_command
from elasticep.errors import ConfigError, ElasticEPError
from elasticep.geometry import GroupGeometry
from elasticep.group import GroupConfig, Launch
from elasticep.native import abi
from elasticep.native.convert import geometry_struct
from elasticep.spec import PRESET_NAMES, Copies, ExchangeSpec, Layout, Reduce
from elasticep.testing.local_group import LocalGroup, spread

ENGINE: Final = "elasticep.bench.engine:EngineRank"
IN_PLACE: Final = "elasticep, in place"
PEERS: Final = ("gloo", "mpi", "mpi bare", "mpi by expert", "memcpy")
GOAL_GLOO: Final = 6.0
GOAL_MPI: Final = 1.3
GOAL_MEMCPY: Final = 0.6
SMALL_TOKENS: Final = 64
LARGE_TOKENS: Final = 4096
_MAX_REPEAT: Final = 16
_MAX_RUNS: Final = 200
TIMEOUTS: Final = abi.Timeouts(  # gigabytes are touched for the first time in the first exchange
    suspect_after_ns=1_000_000_000,
    hang_timeout_ns=30_000_000_000,
    exchange_timeout_ns=30_000_000_000,
    step_timeout_ns=60_000_000_000,
)
_REPEAT_S: Final = 0.02  # exchanges of a run: as many as fit into this


@dataclass(slots=True)
class Series:
    """One system's rounds: ns per exchange, max over ranks of the median over the round's runs."""

    name: str
    run: Callable[[int, int], list[dict[str, Any]]]
    rounds: list[float] = field(default_factory=list)
    barrier_ns: list[float] = field(default_factory=list)
    repeat: int = 1
    runs: int = 1
    why_not: str | None = None

    def calibrate(self, round_s: float) -> None:
        """Warm up, and choose how many runs fill a round."""
        self._try(1, 1)
        answers = self._try(1, 1)
        if answers is None:
            return
        once = max(1e-9, max(a["ns"][0] for a in answers) / 1e9)
        self.repeat = max(1, min(_MAX_REPEAT, round(_REPEAT_S / once)))
        self.runs = max(1, min(_MAX_RUNS, round(round_s / (once * self.repeat))))

    def turn(self) -> None:
        """One round."""
        answers = self._try(self.runs, self.repeat)
        if answers is None:
            return
        self.rounds.append(max(statistics.median(a["ns"]) for a in answers))
        if "barrier_ns" in answers[0]:
            self.barrier_ns.append(max(statistics.median(a["barrier_ns"]) for a in answers))

    def _try(self, runs: int, repeat: int) -> list[dict[str, Any]] | None:
        if self.why_not is not None:
            return None
        try:
            return self.run(runs, repeat)
        except ElasticEPError as error:
            self.why_not = str(error)
            return None


def interleave(series: Sequence[Series], rounds: int, round_s: float) -> None:
    """Calibrate, then let all take turns; the order is turned by one every round."""
    for one in series:
        one.calibrate(round_s)
    for turn in range(rounds):
        for i in range(len(series)):
            series[(i + turn) % len(series)].turn()


def spec_of(preset: str, case: Case) -> ExchangeSpec:
    """A preset for a case: its cap is the case's tokens, formats are the case's."""
    spec = ExchangeSpec.preset(
        preset,
        max_tokens=case.tokens,
        dispatch_dtype=case.dtype,
        combine_dtype=case.dtype,
    )
    if spec.layout is Layout.MASKED:
        # The worst case is room for all rows in each block. Eight standard deviations above the
        # mean are ample for a uniform router.
        mean = case.ranks * case.tokens * case.topk / case.experts
        room = min(case.ranks * case.tokens, int(mean + 8 * math.sqrt(mean)) + 32)
        spec = replace(spec, masked_room=room)
    return spec


def group_config(preset: str, case: Case, launch: str) -> GroupConfig:
    """A group with this one exchange."""
    geometry = GroupGeometry(
        layers=1,
        experts=case.experts,
        topk=case.topk,
        hidden=case.hidden,
        slots_per_rank=-(-case.experts // case.ranks),
        max_ranks=case.ranks,
    )
    return GroupConfig(
        name="bench",
        geometry=geometry,
        exchanges=(("bench", spec_of(preset, case)),),
        initial_ranks=case.ranks,
        launch=Launch(launch),
    )


class OurGroup:
    """A local group and its engines, ready to run one preset's exchange."""

    def __init__(
        self,
        engines: ranks.RankSet,
        case: Case,
        preset: str,
        launch: str,
        env: Mapping[str, str] | None = None,
    ) -> None:
        spec = spec_of(preset, case)
        copies = {Copies.ALL: "all", Copies.PER_RANK: "per_rank", Copies.PER_EXPERT: "per_expert"}
        back_per_expert = spec.reduce is Reduce.PER_EXPERT
        self.remote_bytes = [
            sum(case.remote_rows(rank, copies[spec.copies], back_per_expert)) * case.row_bytes
            for rank in range(case.ranks)
        ]
        self._engines = engines
        struct = geometry_struct(group_config(preset, case, launch))
        with ranks.environment(env or {}):  # workers inherit it
            self._group = LocalGroup(struct, timeouts=TIMEOUTS)
        try:
            each = {
                rank: {
                    "ticket": self._group.ticket(rank),
                    "memcpy_bytes": max(self.remote_bytes),
                }
                for rank in range(case.ranks)
            }
            engines.send("prepare", each, case=case.to_dict(), socket=self._group.socket_path)
            engines.answers()
            members = range(case.ranks)
            self._group.stage(1, 0, members, spread(struct, members))
            self.runners = [int(answer["runner"]) for answer in engines.call("verify")]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the seats back and end the workers."""
        with contextlib.suppress(ElasticEPError):
            self._engines.call("leave")
        self._group.close()


@dataclass(slots=True)
class Systems:
    """Rank processes of all systems for one number of ranks."""

    engines: ranks.RankSet
    others: dict[str, ranks.RankSet]
    why_not: dict[str, str]
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def start(cls, count: int, names: Sequence[str]) -> "Systems":
        """Start ours, and of the others those that can be started here."""
        others: dict[str, ranks.RankSet] = {}
        why_not: dict[str, str] = {}
        with contextlib.ExitStack() as started:
            for name in names:
                try:
                    others[name] = started.enter_context(peers.start(name, count))
                except ElasticEPError as error:
                    why_not[name] = str(error)
            systems = cls(ranks.RankSet(ENGINE, count), others, why_not)
            started.pop_all()  # theirs to end now
        return systems

    def close(self) -> None:
        """End all of them."""
        for one in (self.engines, *self.others.values()):
            one.close()

    def peer_series(self, case: Case, spec: ExchangeSpec) -> list[Series]:
        """Series of the peers, with their buffers made."""
        found = []
        for name, system in self.others.items():
            self.versions[name] = system.call("prepare", case=case.to_dict())[0]["version"]
            found.append(Series(name, _runner(system, "run")))
            if name == "mpi":
                found.append(Series("mpi bare", _runner(system, "bare")))
                if spec.by_expert:
                    found.append(Series("mpi by expert", _runner(system, "by_expert")))
        return found


def _runner(
    system: ranks.RankSet, op: str, **same: Any
) -> Callable[[int, int], list[dict[str, Any]]]:
    return lambda runs, repeat: system.call(op, runs=runs, repeat=repeat, **same)


def measure(
    systems: Systems, case: Case, preset: str, launch: str, rounds: int, round_s: float
) -> list[Series]:
    """One preset at one size beside the peers. A preset that cannot be done has `why_not`."""
    ours = Series("elasticep", _runner(systems.engines, "run"))
    try:
        group = OurGroup(systems.engines, case, preset, launch)
    except (ElasticEPError, RuntimeError, TimeoutError) as error:
        ours.why_not = str(error)
        return [ours]
    try:
        series = [ours, Series("memcpy", _runner(systems.engines, "memcpy"))]
        if launch == Launch.SERVICE:
            series.append(Series(IN_PLACE, _runner(systems.engines, "run", place=True)))
        series += systems.peer_series(case, spec_of(preset, case))
        interleave(series, rounds, round_s)
    finally:
        group.close()
        for system in systems.others.values():
            with contextlib.suppress(ElasticEPError):
                system.call("leave")
    return series


def _against(ours: Series, other: Series | None) -> report.Ratio | None:
    if other is None or not other.rounds or len(other.rounds) != len(ours.rounds):
        return None
    return report.paired_ratio(other.rounds, ours.rounds)


def add_row(
    table: report.Table,
    case: Case,
    preset: str,
    launch: str,
    series: Sequence[Series],
    who: str = "elasticep",
) -> dict[str, Any]:
    """One line of the table, and the same as figures. `who`: which of our series it is about."""
    by_name = {one.name: one for one in series}
    ours = by_name[who]
    launch += who.removeprefix("elasticep")
    figures: dict[str, Any] = {
        "case": case.to_dict(),
        "preset": preset,
        "launch": launch,
        "why_not": ours.why_not,
        "rounds_ns": {one.name: one.rounds for one in series},
        "barrier_ns": ours.barrier_ns,
        "runs": {one.name: [one.runs, one.repeat] for one in series},
    }
    start = [case.tokens, preset, launch]
    if ours.why_not is not None:
        table.add(*start, f"not measured: {ours.why_not}", *[""] * (len(table.columns) - 4))
        return figures
    cells = []
    goals = {"gloo": (GOAL_GLOO, SMALL_TOKENS), "mpi": (GOAL_MPI, SMALL_TOKENS)}
    goals["memcpy"] = (GOAL_MEMCPY, LARGE_TOKENS)
    for name in PEERS:
        other = by_name.get(name)
        ratio = _against(ours, other)
        if ratio is None:
            cells.append(f"- ({other.why_not})" if other and other.why_not else "-")
            continue
        figures[f"{name} / elasticep"] = [ratio.median, ratio.low, ratio.high]
        goal, at_tokens = goals.get(name, (0.0, 0))
        mark = f" {ratio.verdict(goal, at_least=True)}" if at_tokens == case.tokens else ""
        cells.append(f"{ratio}{mark}")
    table.add(*start, *cells)
    return figures


def run(
    cases: Sequence[Case],
    presets: Sequence[str],
    launches: Sequence[str],
    peer_names: Sequence[str],
    rounds: int,
    round_s: float,
) -> report.Report:
    """Measure everything on the CPU; all cases have the same number of ranks."""
    first = cases[0]
    result = report.Report("exchange")
    table = report.Table(
        f"CPU exchange, {first.ranks} ranks, hidden {first.hidden}, {first.experts} experts, "
        f"top {first.topk}, {first.dtype}: their time / ours",
        ["tokens", "preset", "launch", *PEERS],
    )
    result.tables.append(table)
    measured = result.figures["measured"] = []
    systems = Systems.start(first.ranks, peer_names)
    try:
        for case in cases:
            for preset in presets:
                for launch in launches:
                    series = measure(systems, case, preset, launch, rounds, round_s)
                    measured.append(add_row(table, case, preset, launch, series))
                    if IN_PLACE in {one.name for one in series}:
                        measured.append(add_row(table, case, preset, launch, series, IN_PLACE))
    finally:
        systems.close()
    result.machine["versions"] = systems.versions
    table.notes = [
        "above 1: we are faster; median over rounds that ran in turn [95% interval]",
        "memcpy: all ranks copy their remote bytes, there and back, at once; 0.6 is 60% of it",
        "mpi: pack, counts and two all-to-all-v, without the sum; mpi bare: the all-to-all-v alone",
        "gloo: all-gather of all rows and reduce-scatter",
        "LOW_LATENCY, EXPAND and EXPAND_SYNC also group rows by expert, which gloo and mpi do not",
        "mpi by expert: mpi, and every row copied for each of its experts there, grouped",
        "in place: rows are written and results read where the exchange has them",
        *(f"{name}: {version}" for name, version in systems.versions.items()),
        *(f"{name}: not measured, {why}" for name, why in systems.why_not.items()),
    ]
    return result


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{text!r} is not a list of numbers, such as 64,4096") from None
    if min(numbers) < 1:
        raise ConfigError(f"{text!r} has a number below 1")
    return numbers


@click.command(name="exchange", help=__doc__)
@click.option("--preset", default="routed", show_default=True, help="Names with commas, or all.")
@click.option("--ranks", "count", default=4, show_default=True)
@click.option("--tokens", default="64,4096", show_default=True, help="Rows that each rank brings.")
@click.option("--hidden", default=5120, show_default=True)
@click.option("--experts", default=384, show_default=True)
@click.option("--topk", default=6, show_default=True)
@click.option("--dtype", type=click.Choice(["bf16", "fp32"]), default="bf16", show_default=True)
@click.option("--launch", type=click.Choice(["service", "inline", "both"]), default="service",
              show_default=True)  # fmt: skip
@click.option("--peers", "peer_names", default="gloo,mpi", show_default=True, help="'' for none.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--round-seconds", type=click.FloatRange(min=0.001, max=3600), default=0.2,
              show_default=True, help="Of each system.")  # fmt: skip
@report.output_option
@report.plot_option
def _command(**options: Any) -> None:
    known = [name for name in PRESET_NAMES if name != "AUTO"]
    asked = options["preset"].upper()
    presets = known if asked == "ALL" else asked.split(",")
    unknown = [name for name in presets if name not in known]
    if unknown:
        raise ConfigError(f"no preset {unknown[0]!r} here; use {', '.join(known)} or all")
    launch = options["launch"]
    launches = ["service", "inline"] if launch == "both" else [str(Launch(launch))]
    sizes = ("hidden", "experts", "topk", "dtype")
    cases = [
        Case(ranks=options["count"], tokens=tokens, **{name: options[name] for name in sizes})
        for tokens in _numbers(options["tokens"])
    ]
    names = [name for name in options["peer_names"].split(",") if name]
    strange = [name for name in names if name not in peers.NAMES]
    if strange:
        raise ConfigError(f"no peer {strange[0]!r} here; use {', '.join(peers.NAMES)}")
    result = run(cases, presets, launches, names, options["rounds"], options["round_seconds"])
    result.finish(options["output"])
    if options["plot_path"]:
        _plot(options["plot_path"], result)


def _plot(path: str, result: report.Report) -> None:
    bars = {}
    for one in result.figures["measured"]:
        ratios = {key: value[0] for key, value in one.items() if key.endswith("/ elasticep")}
        if ratios:
            bars[f"{one['preset']}\n{one['launch']}, {one['case']['tokens']}"] = ratios
    report.plot(path, "CPU exchange: their time / ours", "ratio", bars)


def main(arguments: Sequence[str]) -> int:
    """Run the bench on the CPU, or hand over to the CUDA one; returns the exit status."""
    words = list(arguments)
    device = "cpu"
    for i, word in enumerate(words):
        if word == "--device" and i + 1 < len(words):
            device, words = words[i + 1], words[:i] + words[i + 2 :]
            break
        if word.startswith("--device="):
            device, words = word.partition("=")[2], words[:i] + words[i + 1 :]
            break
    if device == "cuda":
        import importlib

        return int(importlib.import_module("elasticep.bench.exchange_cuda").main(words))
    if device != "cpu":
        click.echo(f"--device is {device!r}; use cpu or cuda", err=True)
        return 2
    return run_command(_command, words)
