"""`python -m elasticep.bench acceptance --out DIR`: everything that the GPU data plane must show.

Tests, soak, sanitizers, kills and times go in batches that each fit into ten minutes. What is done
is kept in DIR/acceptance.json and is not run again, so a call that ran out of time is repeated
until it ends with 0 (all passed) or 1 (something failed). DIR/acceptance.md is the report.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click

from elasticep.bench.acceptance_report import report
from elasticep.errors import ElasticEPError

PARTS: Final = ("correct", "soak", "sanitizer", "faults", "speed")
TESTS: Final = "tests/gpu"
UNFINISHED: Final = 3
"""Exit status when the time was up before all was done."""
_GRACE_S: Final = 5.0
_ALL_SKIPPED: Final = 5  # pytest's status where a whole module skips itself
Detail = dict[str, Any]
Judge = Callable[[Path, Path], Detail]


class AcceptanceError(ElasticEPError):
    """It cannot begin here."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A few commands that belong together.

    Attributes:
        part: one of `PARTS`.
        name: unique.
        commands: argument lists; the first that fails ends the batch.
        judge: reads what they left behind, from the batch's log and the folder for results; raises
            `ValueError` if that is no success.
        expected_s: it is not begun when less time is left.
        environment: added to the process's.
        gpus: how many it needs.
        tools: programs that it needs.
    """

    part: str
    name: str
    commands: tuple[tuple[str, ...], ...]
    judge: Judge
    expected_s: float = 60.0
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 1
    tools: tuple[str, ...] = ()


# ---- judges


def junit(name: str) -> Judge:
    """Counts of the tests whose results are in NAME.xml; without any test it has failed."""

    def judge(_log: Path, out: Path) -> Detail:
        root = ET.parse(out / f"{name}.xml").getroot()  # noqa: S314 pytest wrote it
        cases = list(root.iter("testcase"))
        bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
        skipped = sum(c.find("skipped") is not None for c in cases)
        found = {"passed": len(cases) - len(bad) - skipped, "skipped": skipped, "failed": len(bad)}
        if bad or not cases:
            names = ", ".join(str(c.get("name")) for c in bad[:5]) or "there is no such test"
            raise ValueError(f"{found}: {names}")
        return found

    return judge


def sanitized(name: str) -> Judge:
    """`junit`, and the sanitizer's summaries of all processes, of which each must say 0."""

    def judge(log: Path, out: Path) -> Detail:
        found = junit(name)(log, out)
        summaries = [x for x in log.read_text(errors="replace").splitlines() if "SUMMARY:" in x]
        counts = [int(x.split("SUMMARY:")[1].split()[0]) for x in summaries]
        if not counts or any(counts):
            raise ValueError(f"{len(counts)} summaries: {'; '.join(summaries[:5])}")
        return found | {"summaries": len(counts)}

    return judge


def lines_of(*names: str) -> Judge:
    """What benches wrote: {name: lines}."""
    return lambda _log, out: {n: json.loads((out / f"{n}.json").read_text()) for n in names}


# ---- what there is to do


def _pytest(name: str, out: Path, *selection: str) -> tuple[str, ...]:
    quiet = ("-q", "-p", "no:cacheprovider", f"--junitxml={out / name}.xml")
    return (sys.executable, "-m", "pytest", *quiet, *selection)


def _correct(out: Path) -> list[Batch]:
    exchange = f"{TESTS}/test_exchange.py"
    chosen = {
        "product-128": (exchange, "-k", "test_every_preset_format_and_size and 128"),
        "product-4096": (exchange, "-k", "test_every_preset_format_and_size and 4096"),
        "exchange": (exchange, "-k", "not test_every_preset_format_and_size and not sanitizer"),
        "formats": (f"{TESTS}/test_formats.py",),
        "client": (f"{TESTS}/test_client.py", "-k", "not case_04"),
        "weights": (f"{TESTS}/test_weights.py",),
    }
    return [Batch("correct", n, (_pytest(n, out, *s),), junit(n)) for n, s in chosen.items()]


def _soak(out: Path) -> list[Batch]:
    command = _pytest("soak", out, f"{TESTS}/test_faults.py", "-k", "random_delays")
    two = {"ELASTICEP_GPU_EXCHANGES": "50000"}
    # Ranks in processes of their own have one GPU in turn: two milliseconds a wait.
    one = {"ELASTICEP_GPU_EXCHANGES": "5000", "ELASTICEP_GPUS": "1"}
    alone = _pytest("soak-one-gpu", out, f"{TESTS}/test_faults.py", "-k", "random_delays")
    return [
        Batch("soak", "soak", (command,), junit("soak"), 200.0, two, gpus=2),
        Batch("soak", "soak-one-gpu", (alone,), junit("soak-one-gpu"), 120.0, one),
    ]


def _sanitizer(out: Path) -> list[Batch]:
    batches = []
    for tool in ("memcheck", "racecheck"):
        # The process of pytest itself has no CUDA context.
        every = ("--target-processes", "all", "--require-cuda-init", "no")
        wrapped = ("compute-sanitizer", *every, "--tool", tool)
        command = (*wrapped, *_pytest(tool, out, f"{TESTS}/test_exchange.py", "-k", "sanitizer"))
        patience = {"ELASTICEP_GPU_PATIENCE": "20"}
        needs = ("compute-sanitizer",)
        judge = sanitized(tool)
        batches.append(Batch("sanitizer", tool, (command,), judge, 150.0, patience, tools=needs))
    return batches


def _faults(out: Path) -> list[Batch]:
    tests, batches = f"{TESTS}/test_faults.py", []
    for seed in range(1, 6):
        name = f"kills-{seed}"
        results = out / f"{name}.json"
        environment = {
            "ELASTICEP_GPU_KILLS": "10",
            "ELASTICEP_GPU_SEED": str(seed),
            "ELASTICEP_GPU_KILLS_JSON": str(results),
        }

        def judge(log: Path, out: Path, name: str = name) -> Detail:
            return junit(name)(log, out) | lines_of(name)(log, out)

        command = _pytest(name, out, tests, "-k", "case_04")
        batches.append(Batch("faults", name, (command,), judge, 45.0, environment))
    command = _pytest("stopped", out, tests, "-k", "expelled")
    batches.append(Batch("faults", "stopped", (command,), junit("stopped")))
    command = _pytest("client-kills", out, f"{TESTS}/test_client.py", "-k", "case_04")
    kills = {"ELASTICEP_GPU_CLIENT_KILLS": "8", "ELASTICEP_GPU_OUT": str(out)}
    judge_client = junit("client-kills")
    batches.append(Batch("faults", "client-kills", (command,), judge_client, 120.0, kills))
    return batches


def _bench(out: Path, name: str, *arguments: str) -> tuple[str, ...]:
    command = (sys.executable, "-m", "elasticep.bench", "exchange", "--device", "cuda")
    return (*command, "--json", f"{out / name}.json", *arguments)


def _speed(out: Path) -> list[Batch]:
    batches = []
    for model in ("deepseek-v4.1-flash", "deepseek-v3"):
        name = f"exchange-{model}"
        picture = ("--png", f"{out / name}.png")
        command = _bench(out, name, "--models", model, "--runs", "30", *picture)
        batches.append(Batch("speed", name, (command,), lines_of(name), 120.0, gpus=2))
    # The same library without a look at anything but the flag, beside the one that is used.
    bare = out / "without-checks"
    options = {
        "ELASTICEP_CUDA": "ON",
        "CMAKE_CUDA_FLAGS": "-DEPC_FAULT_CHECKS=0",
        "CMAKE_LIBRARY_OUTPUT_DIRECTORY": str(bare),
        "Python_EXECUTABLE": sys.executable,
    }
    build = (
        ("cmake", "-S", ".", "-B", f"{bare}/build", *(f"-D{k}={v}" for k, v in options.items())),
        ("cmake", "--build", f"{bare}/build", "--parallel", str(os.cpu_count() or 1)),
    )
    tools = ("cmake", "nvcc")
    batches.append(
        Batch("speed", "build-without-checks", build, lambda _l, _o: {}, 240.0, tools=tools)
    )
    some = ("--models", "deepseek-v4.1-flash", "--variants", "ROUTED", "--tokens", "64", "4096")
    names = [f"checks-{kind}-{i}" for i in (1, 2) for kind in ("off", "on")]
    commands = []
    for name in names:
        library = ("env", f"ELASTICEP_LIBRARY_DIR={bare}") if "off" in name else ()
        commands.append((*library, *_bench(out, name, *some, "--runs", "60")))
    batches.append(Batch("speed", "checks", tuple(commands), lines_of(*names), 120.0, gpus=2))
    return batches


def batches_of(out: Path, parts: Sequence[str] = PARTS) -> list[Batch]:
    """All batches of these parts, in order; `out` is where they write."""
    made = {
        "correct": _correct,
        "soak": _soak,
        "sanitizer": _sanitizer,
        "faults": _faults,
        "speed": _speed,
    }
    return [batch for part in PARTS if part in parts for batch in made[part](out)]


# ---- doing it


def _end(process: subprocess.Popen[bytes]) -> None:
    """The command and whatever it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def run_batch(batch: Batch, out: Path, limit_s: float, gpus: int) -> Detail:
    """Runs one batch; what came of it: state passed, failed, skipped or unfinished."""
    missing = [t for t in batch.tools if not shutil.which(t)]
    if gpus < batch.gpus or missing:
        why = f"no {missing[0]}" if missing else f"needs {batch.gpus} GPUs, there is {gpus}"
        return {"part": batch.part, "state": "skipped", "seconds": 0.0, "why": why}
    log, began = out / f"{batch.name}.log", time.monotonic()
    found: Detail = {"part": batch.part, "state": "passed"}
    environment = os.environ | {"ELASTICEP_REQUIRE_GPU": "1"} | dict(batch.environment)
    with log.open("wb") as text:
        for command in batch.commands:
            process = subprocess.Popen(
                command, stdout=text, stderr=text, env=environment, start_new_session=True
            )
            try:
                code = process.wait(max(0.0, limit_s - (time.monotonic() - began)))
            except subprocess.TimeoutExpired:
                _end(process)
                found |= {"state": "unfinished", "why": f"not done within {limit_s:.0f} s"}
                break
            except BaseException:
                _end(process)
                raise
            if code and not (code == _ALL_SKIPPED and "pytest" in command):
                found |= {"state": "failed", "why": f"{command[0]} ended with {code}"}
                break
    if found["state"] != "unfinished":
        try:
            found["found"] = batch.judge(log, out)
            if found["state"] == "passed" and found["found"].get("passed") == 0:
                found |= {"state": "skipped", "why": "its tests skip themselves here; see the log"}
        except (OSError, ValueError, ET.ParseError) as error:
            found |= {"state": "failed", "why": str(error)}
    found["seconds"] = round(time.monotonic() - began, 1)
    if found["state"] != "passed":
        found["tail"] = log.read_text(errors="replace")[-2000:]
    return found


def run(
    batches: Sequence[Batch], out: Path, limit_s: float, gpus: int, *, again: bool = False
) -> int:
    """Runs what is not done yet, and what has failed if `again`; exit status."""
    out.mkdir(parents=True, exist_ok=True)
    kept = out / "acceptance.json"
    done: dict[str, Detail] = json.loads(kept.read_text()) if kept.exists() else {}
    deadline = time.monotonic() + limit_s
    status = 0
    for number, batch in enumerate(batches, 1):
        left = deadline - time.monotonic()
        state = done.get(batch.name, {}).get("state")
        if state == "passed" or (state == "failed" and not again):
            continue
        # A batch that has the whole time to itself is begun whatever it expects.
        if left < min(batch.expected_s, limit_s - 1.0):
            status = UNFINISHED
            continue
        click.echo(f"[{number}/{len(batches)}] {batch.part} {batch.name} ...")
        done[batch.name] = result = run_batch(batch, out, left, gpus)
        click.echo(f"    {result['state']} in {result['seconds']} s {result.get('why', '')}")
        kept.write_text(json.dumps(done, indent=1))
        (out / "acceptance.md").write_text(report(done))
        if result["state"] == "unfinished":
            status = UNFINISHED
    states = [done[b.name]["state"] for b in batches if b.name in done]
    counts = {state: states.count(state) for state in dict.fromkeys(states)}
    click.echo(f"{len(batches)} batches: {counts}; the report is {out / 'acceptance.md'}")
    if status == UNFINISHED:
        click.echo("not all is done: run the same command again")
    return 1 if "failed" in states else status


def main(arguments: Sequence[str]) -> int:
    """`python -m elasticep.bench acceptance --out DIR ...`."""
    parser = argparse.ArgumentParser(prog="bench acceptance", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for results and report")
    parser.add_argument("--part", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--only", nargs="*", help="batches by name; see --list")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds for this call")
    parser.add_argument("--again", action="store_true", help="also what has failed before")
    parser.add_argument("--list", action="store_true", help="say what would be run")
    given = parser.parse_args(list(arguments))
    out = given.out.resolve()
    batches = batches_of(out, given.part)
    if given.only is not None:
        unknown = set(given.only) - {b.name for b in batches}
        if unknown:
            raise AcceptanceError(f"no batch {', '.join(sorted(unknown))}; --list names them all")
        # In the order that was asked for.
        batches = sorted(
            (b for b in batches if b.name in given.only), key=lambda b: given.only.index(b.name)
        )
    if given.list:
        for batch in batches:
            for command in batch.commands:
                click.echo(f"{batch.part} {batch.name}: {' '.join(command)}")
        return 0
    if not Path(TESTS).is_dir():
        raise AcceptanceError(f"there is no {TESTS} here; run it in a checkout's root")
    from elasticep.native import cuda_library

    gpus = cuda_library.device_count()
    if gpus < 1:
        click.echo("bench acceptance needs a CUDA device", err=True)
        return 1
    return run(batches, out, given.limit, gpus, again=given.again)
