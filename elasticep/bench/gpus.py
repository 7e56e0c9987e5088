"""`python -m elasticep.bench gpus`: all that a machine of several GPUs is asked, in one run.

Every way to exchange at several sizes with NCCL beside it, a rank per GPU, then ranks killed while
they decode. What is worth most comes first. Each line is printed and written as it comes, so that
a run that is cut off has told what it had; what fails is noted and the rest goes on. With more
ranks than GPUs, or emulated ones, it is a rehearsal: times say nothing.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click

from elasticep.bench import exchange_cuda, exchange_cuda_report, gpus_report, recovery_cuda
from elasticep.bench.acceptance_report import machine
from elasticep.bench.exchange_cuda_cases import MODELS, SHAPES, VARIANTS, Variant, groups
from elasticep.bench.fleet_cuda_pool import FleetPool
from elasticep.errors import ElasticEPError
from elasticep.native import cuda_library

UNFINISHED: Final = 3
"""Exit status when the time was up before all was begun."""
LEAST_S: Final = 20.0
"""Nothing is begun with less time left."""
MOST_S: Final = 150.0
"""A task that takes longer hangs."""


class Run:
    """What a run has found so far, on disk and on the terminal.

    Args:
        ranks, gpus: of the run.
        limit_s: seconds from now on.
        out: folder for gpus.json, gpus.md and gpus.png; None: only the terminal.

    Attributes:
        lines: of exchanges.
        kills: rounds of the recovery.
        tasks: what was done, and what became of it.
    """

    def __init__(self, ranks: int, gpus: int, limit_s: float, out: Path | None) -> None:
        self.lines: list[dict[str, Any]] = []
        self.kills: list[recovery_cuda.Line] = []
        self.tasks: list[dict[str, Any]] = []
        self._facts = {"ranks": ranks, "gpus": gpus, "machine": machine()}
        self._deadline = time.monotonic() + limit_s
        self._out = out
        self._longest: dict[str, float] = {}  # seconds that a task of a kind has taken

    def left_s(self) -> float:
        """Seconds that are left."""
        return self._deadline - time.monotonic()

    def do(self, kind: str, name: str, work: Callable[[float], None], keep_s: float = 0.0) -> bool:
        """Run a task, unless less time is left than others of its kind took, with `keep_s` for what
        comes after; `work` gets the seconds that it may take. False: it failed. Ctrl-C goes on up.
        """
        left, begun = self.left_s() - keep_s, time.monotonic()
        task = self._note(name, "running")
        if left < max(LEAST_S, self._longest.get(kind, 0.0)):
            task |= {"state": "not begun", "why": f"{max(0.0, left):.0f} s were left for it"}
            self.save()
            return True
        self.save()
        try:
            work(min(left, MOST_S))
            task["state"] = "done"
        except (ElasticEPError, OSError) as error:
            task |= {"state": "failed", "why": str(error)}
            click.echo(f"{name} failed: {last_line(str(error))}", err=True)
        except BaseException as error:
            task |= {"state": "cut off", "why": type(error).__name__}
            raise
        finally:
            task["seconds"] = round(time.monotonic() - begun, 1)
            self._longest[kind] = max(self._longest.get(kind, 0.0), task["seconds"])
            self.save()
        return bool(task["state"] == "done")

    def _note(self, name: str, state: str) -> dict[str, Any]:
        task: dict[str, Any] = {"name": name, "state": state, "seconds": 0.0, "why": ""}
        self.tasks.append(task)
        return task

    def take(self, line: dict[str, Any]) -> None:
        """A line of an exchange, or why there is none."""
        if "failed" in line:
            self.tasks.append(
                {"state": "failed", "seconds": 0.0, "why": "", "name": line["failed"]}
            )
            click.echo(line["failed"], err=True)
        else:
            self.lines.append(line)
            click.echo(exchange_cuda_report.row(line))
        self.save()

    def save(self) -> None:
        """All of it into the folder, so that what is there is whole at any moment."""
        if self._out is None:
            return
        kills = [asdict(k) for k in self.kills]
        whole = {**self._facts, "exchange": self.lines, "kills": kills, "tasks": self.tasks}
        _write(self._out / "gpus.json", json.dumps(whole, indent=1))
        _write(self._out / "gpus.md", gpus_report.report(whole))

    def draw(self) -> None:
        """The picture, where it can be drawn."""
        if self._out is None or not self.lines:
            return
        try:
            exchange_cuda_report.plot(self.lines, self._out / "gpus.png")
        except ImportError as error:
            click.echo(f"no picture: {error}", err=True)

    def status(self) -> int:
        """Exit status: 0, 1 where something failed, 3 where something was not begun."""
        states = {task["state"] for task in self.tasks}
        return 1 if "failed" in states else UNFINISHED if "not begun" in states else 0


def last_line(text: str) -> str:
    """Of a traceback what it says."""
    return text.strip().splitlines()[-1] if text.strip() else ""


def _write(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}")
    beside.write_text(text)
    os.replace(beside, path)


class Exchanges:
    """The exchange's tasks; processes are kept from one to the next until something fails."""

    def __init__(self, run: Run, ranks: int, tokens: list[int], runs: int) -> None:
        self._run, self._ranks, self._tokens, self._runs = run, ranks, tokens, runs
        self._pool, self._port = FleetPool(), exchange_cuda.free_port()
        self._nccl = True

    def time(self, model: str, together: list[Variant], keep_s: float) -> None:
        """One task; where NCCL does not work here, once more without it."""

        def work(limit_s: float) -> None:
            try:
                exchange_cuda.measure_group(
                    *(model, together, self._tokens, self._ranks),
                    port=self._port,
                    # Of a GPU with several ranks it cannot be said which process gets which.
                    pool=self._pool if self._ranks <= cuda_library.device_count() else None,
                    limit_s=limit_s,
                    on_line=self._run.take,
                    runs=self._runs,
                    nccl=self._nccl,
                    go_on=True,
                )
            except BaseException:
                self.close()
                self._pool, self._port = FleetPool(), exchange_cuda.free_port()
                raise

        names = f"{model}: {', '.join(v.name for v in together)}"
        before = len(self._run.lines)
        if not self._run.do("exchange", names, work, keep_s) and self._nccl:
            said = self._run.tasks[-1]["why"]
            if len(self._run.lines) == before and ("NCCL" in said or "nccl" in said):
                self._nccl = False
                self._run.do("exchange", f"{names}, without NCCL", work, keep_s)

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(prog="bench gpus", description=__doc__)
    parser.add_argument("--ranks", type=int, default=0, help="default: as many as there are GPUs")
    models = ["deepseek-v3", *(m for m in MODELS if m != "deepseek-v3")]  # peers are known of it
    parser.add_argument("--models", nargs="*", default=models, choices=list(SHAPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=[8, 64, 128, 512, 4096])
    names = [v.name for v in VARIANTS]
    parser.add_argument("--variants", nargs="*", default=names, choices=names)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--kill-rounds", type=int, default=5, help="of one rank, and of two")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds that all may take")
    parser.add_argument("--out", type=Path, help="folder for gpus.json, gpus.md and gpus.png")
    return parser.parse_args(list(arguments))


def main(arguments: Sequence[str]) -> int:
    """Runs it; exit status, see `Run.status`."""
    given = parse(arguments)
    try:
        gpus, why = cuda_library.device_count(), ""
    except ElasticEPError as error:
        gpus, why = 0, f": {error}"
    if gpus < 1:
        click.echo(f"bench gpus needs a CUDA device{why}", err=True)
        return 1
    ranks = given.ranks or gpus
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
    run = Run(ranks, gpus, given.limit, given.out)
    click.echo(f"{ranks} ranks on {min(gpus, ranks)} GPUs\n\n{exchange_cuda_report.HEAD}")
    exchanges = Exchanges(run, ranks, given.tokens, given.runs)
    # Half a minute for each of the first kills.
    keep_s = min(60.0, 0.2 * given.limit) if given.kill_rounds else 0.0
    together = groups(given.variants)
    try:
        for some in together:
            for model in given.models:
                exchanges.time(model, some, keep_s)
            run.draw()
    finally:
        exchanges.close()
    devices = exchange_cuda.places(ranks)["devices"]
    for turn in range(given.kill_rounds):
        for killed in (k for k in (1, 2) if k < ranks):

            def work(limit_s: float, killed: int = killed) -> None:
                run.kills.append(recovery_cuda.once(ranks, killed, devices, limit_s))

            run.do("kill", f"kill {killed} of {ranks}, round {turn + 1}", work)
    for text in (gpus_report.beside_peers(run.lines, ranks), gpus_report.recovery(run.kills)):
        if text:
            click.echo("\n" + "\n".join(text))
    click.echo(f"\n{given.limit - run.left_s():.0f} s in all")
    return run.status()
