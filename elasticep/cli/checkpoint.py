"""`elasticep checkpoint`: what experts a checkpoint has, and whether they are whole.

Nothing but headers is read, unless `--verify` reads every expert.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

if TYPE_CHECKING:
    from elasticep.checkpoint import Checkpoint, Units
    from elasticep.weights import WeightSpec


@click.command("checkpoint")
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--split", is_flag=True, help="Gate and up projection as two tensors, w1 and w3, not as one."
)
@click.option("--verify", is_flag=True, help="Read every expert and sum it up.")
@click.option(
    "--output", type=click.Choice(["table", "toml", "json"]), default="table", show_default=True
)
def command(path: Path, split: bool, verify: bool, output: str) -> None:
    """Show the experts of a checkpoint: a Hugging Face folder, or a .safetensors file.

    `--output toml` prints the tables for a group's file.
    """
    from elasticep.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(path)
    spec = checkpoint.weight_spec(fused=not split)
    units = checkpoint.units(spec)
    verified = _verify(checkpoint, units, show=output == "table") if verify else None
    if output == "json":
        click.echo(json.dumps(_report(checkpoint, spec, verified), indent=2))
    elif output == "toml":
        click.echo(_toml(spec))
    else:
        _print_table(checkpoint, spec, verified)


@dataclass(frozen=True, slots=True)
class Verified:
    """What reading all experts gave.

    Attributes:
        units: how many.
        nbytes: how much.
        seconds: how long it took.
        checksum: one sum over all units' checksums, in order: equal where checkpoints are.
    """

    units: int
    nbytes: int
    seconds: float
    checksum: str


def _verify(checkpoint: "Checkpoint", units: "Units", *, show: bool) -> Verified:
    import xxhash

    from elasticep.weights import unit_checksum

    total = xxhash.xxh3_128()
    data = bytearray(units.unit_bytes)
    count = len(checkpoint.layers) * checkpoint.experts
    began = time.monotonic()
    columns = (
        TextColumn("layer {task.fields[layer]}"), BarColumn(), DownloadColumn(),
        TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), disable=not show) as progress:
        task = progress.add_task("", total=count * units.unit_bytes, layer="")
        for layer, number in enumerate(checkpoint.layers):
            progress.update(task, layer=number)
            for expert in range(checkpoint.experts):
                units.read_into(layer, expert, [memoryview(data)])
                total.update(unit_checksum(layer, expert, [data]))
                progress.advance(task, units.unit_bytes)
    seconds = time.monotonic() - began
    return Verified(count, count * units.unit_bytes, seconds, total.hexdigest())


def _report(
    checkpoint: "Checkpoint", spec: "WeightSpec", verified: Verified | None
) -> dict[str, Any]:
    count = len(checkpoint.layers) * checkpoint.experts
    report: dict[str, Any] = {
        "path": str(checkpoint.path),
        "layers": len(checkpoint.layers),
        "model_layers": list(checkpoint.layers),
        "experts": checkpoint.experts,
        "unit_bytes": spec.unit_bytes,
        "total_bytes": count * spec.unit_bytes,
        "weights": spec.to_dict(),
    }
    if verified is not None:
        report["verified"] = {
            "units": verified.units,
            "bytes": verified.nbytes,
            "seconds": round(verified.seconds, 3),
            "checksum": verified.checksum,
        }
    return report


def _toml(spec: "WeightSpec") -> str:
    tables = []
    for tensor in spec.tensors:
        key = f'"{tensor.name}"' if "." in tensor.name else tensor.name
        shape = list(tensor.shape)
        tables.append(f'[weights.{key}]\ndtype = "{tensor.dtype.value}"\nshape = {shape}')
    return "\n\n".join(tables)


def _print_table(checkpoint: "Checkpoint", spec: "WeightSpec", verified: Verified | None) -> None:
    count = len(checkpoint.layers) * checkpoint.experts
    first, last = checkpoint.layers[0], checkpoint.layers[-1]
    table = Table(
        title=str(checkpoint.path),
        caption=(
            f"{len(checkpoint.layers)} MoE layers (the model's {first} to {last}) x "
            f"{checkpoint.experts} experts of {spec.unit_bytes:,} bytes: "
            f"{decimal(count * spec.unit_bytes)}"
        ),
        caption_justify="left",
    )
    table.add_column("tensor of an expert")
    table.add_column("dtype")
    table.add_column("shape")
    table.add_column("bytes", justify="right")
    for tensor in spec.tensors:
        shape = " x ".join(map(str, tensor.shape)) or "1 number"
        table.add_row(tensor.name, tensor.dtype.value, shape, f"{tensor.nbytes:,}")
    console = Console(file=sys.stdout)
    console.print(table)
    if verified is not None:
        rate = decimal(round(verified.nbytes / max(verified.seconds, 1e-9)))
        console.print(
            f"{verified.units} experts are whole: {decimal(verified.nbytes)} read in "
            f"{verified.seconds:.2f} s ({rate}/s), checksum {verified.checksum}",
            soft_wrap=True,
        )
