"""`python -m elasticep.bench gpus`: all that a machine of several GPUs is asked, in one run.

Every way to exchange at several sizes with NCCL beside it, a rank per GPU, then ranks killed while
they decode. With more ranks than GPUs it is a rehearsal: ranks take turns on a GPU, and times say
nothing.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from elasticep.bench import exchange_cuda, recovery_cuda
from elasticep.bench.exchange_cuda_cases import MODELS, VARIANTS
from elasticep.native import cuda_library


def main(arguments: Sequence[str]) -> int:
    """Runs it and prints both tables."""
    parser = argparse.ArgumentParser(prog="bench gpus", description=__doc__)
    parser.add_argument("--ranks", type=int, default=0, help="default: as many as there are GPUs")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--tokens", nargs="*", type=int, default=[8, 64, 128, 512, 4096])
    names = [v.name for v in VARIANTS]
    parser.add_argument("--variants", nargs="*", default=names, choices=names)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--kill-rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder for gpus.json and gpus.png")
    given = parser.parse_args(list(arguments))
    gpus = cuda_library.device_count()
    if gpus < 1:
        click.echo("bench gpus needs a CUDA device", err=True)
        return 1
    ranks, began = given.ranks or gpus, time.monotonic()
    lines = exchange_cuda.measure(
        given.models, given.tokens, given.variants, ranks=ranks, runs=given.runs
    )
    click.echo(f"{ranks} ranks on {min(gpus, ranks)} GPUs, {time.monotonic() - began:.0f} s\n")
    click.echo(exchange_cuda.table(lines))
    kills = recovery_cuda.measure(ranks, given.kill_rounds) if given.kill_rounds else []
    click.echo("\n" + recovery_cuda.table(kills))
    click.echo(f"\n{time.monotonic() - began:.0f} s in all")
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        whole = {
            "ranks": ranks,
            "gpus": gpus,
            "exchange": lines,
            "kills": [asdict(k) for k in kills],
        }
        (given.out / "gpus.json").write_text(json.dumps(whole, indent=1))
        exchange_cuda.plot(lines, given.out / "gpus.png")
    return 0
