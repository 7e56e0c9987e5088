"""`python -m elasticep.bench NAME ...` runs `main(arguments)` of `elasticep.bench.NAME`."""

import importlib
import signal
import sys
from collections.abc import Sequence
from typing import Final

import click

BENCHES: Final = {
    "acceptance": "all that the GPU data plane must show, in batches of ten minutes, with a report",
    "exchange": "dispatch + combine beside gloo, MPI and NCCL",
    "gpus": "all of it on a machine of several GPUs, in one run",
    "placement": "the planner beside public ones",
    "recovery": "from a kill to the first complete step, phase by phase",
    "steady": "what fault tolerance costs when nothing fails",
}


def main(arguments: Sequence[str]) -> int:
    """Run one bench; returns its exit status."""
    if not arguments or arguments[0] not in BENCHES:
        lines = [f"  {name:<11} {what}" for name, what in BENCHES.items()]
        click.echo("usage: python -m elasticep.bench NAME ...\n" + "\n".join(lines), err=True)
        return 0 if list(arguments) in (["-h"], ["--help"]) else 2
    try:
        module = importlib.import_module(f"elasticep.bench.{arguments[0]}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "elasticep":
            raise
        click.echo(f"bench {arguments[0]} needs the Python module {error.name}", err=True)
        return 1
    return int(module.main(list(arguments[1:])))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # cleans up, as Ctrl-C does
    sys.exit(main(sys.argv[1:]))
