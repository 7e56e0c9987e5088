"""`elasticep plan`: the ways of exchanging rows side by side, for a model and a group size.

Nothing is measured and no cluster is needed: every figure is a formula of `elasticep.geometry` or
`elasticep.traffic`, averaged over a uniform router.
"""

import json
import sys
from dataclasses import asdict, dataclass
from typing import IO, Any

import click
from rich.console import Console
from rich.table import Table

from elasticep.errors import ElasticEPError
from elasticep.geometry import (
    LINK_GB_S,
    MAX_RANKS,
    SM_STORE_GB_S,
    GroupGeometry,
    buffers,
    rows_of_room,
    sm_count,
)
from elasticep.models import KNOWN_MODELS, ModelShape, load_model
from elasticep.spec import (
    COMBINE_DTYPES,
    DEFAULT_DECODE_TOKENS,
    MAX_TOKENS,
    PRESET_NAMES,
    ExchangeSpec,
    WireDtype,
)
from elasticep.traffic import copies_per_token, kernel_rows, traffic

MIB = 2.0**20
GB = 1e9
TABLE_WIDTH = 160


@dataclass(frozen=True, slots=True)
class PresetPlan:
    """One preset's figures, per rank and exchange (one layer's dispatch and combine).

    Attributes:
        preset: name of the preset.
        copies: copies of a token, the one for its own rank included.
        out_bytes, out_remote_bytes: delivered by dispatch, and what of it crosses a link.
        back_bytes, back_remote_bytes: the same for combine.
        arriving_rows: rows that come on average.
        kernel_rows: rows that the expert kernel works through on average.
        rows_of_room: rows of the tensor that it is given.
        buffer_bytes: reserved on each rank.
        cpu_waits: whether dispatch waits on the host for a row count.
        layout: order in which the rows arrive.
        sms: SMs that fill the link.
    """

    preset: str
    copies: float
    out_bytes: float
    out_remote_bytes: float
    back_bytes: float
    back_remote_bytes: float
    arriving_rows: float
    kernel_rows: float
    rows_of_room: int
    buffer_bytes: int
    cpu_waits: bool
    layout: str
    sms: int


def plan_preset(
    preset: str, spec: ExchangeSpec, geometry: GroupGeometry, ranks: int, tokens: int, sms: int
) -> PresetPlan:
    """Figures of one exchange. Raises `GeometryError` or `CapExceeded` if it cannot be had."""
    geometry.check_exchange(spec)
    moved = traffic(spec, geometry, ranks, tokens)
    return PresetPlan(
        preset=preset,
        copies=copies_per_token(
            spec.copies, experts=geometry.experts, topk=geometry.topk, ranks=ranks
        ),
        out_bytes=moved.out_bytes,
        out_remote_bytes=moved.out_remote_bytes,
        back_bytes=moved.back_bytes,
        back_remote_bytes=moved.back_remote_bytes,
        arriving_rows=moved.out_rows,
        kernel_rows=kernel_rows(spec, geometry, ranks, tokens),
        rows_of_room=rows_of_room(spec, geometry, ranks),
        buffer_bytes=buffers(spec, geometry, ranks).total,
        cpu_waits=spec.cpu_sync,
        layout=spec.layout.value,
        sms=sms,
    )


class _Refusal(click.ClickException):
    exit_code = 2

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(" ".join(message.split()))
        self.reason = reason

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"error: {self.reason}: {self.format_message()}", file=file, err=file is None)


class _OneLineCommand(click.Command):
    """Says what is wrong with its arguments in one line, without the usage."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            message = f"{error.format_message()} See: elasticep plan --help"
            raise _Refusal("USAGE", message) from None


@click.command("plan", cls=_OneLineCommand)
@click.option(
    "--model",
    "model",
    required=True,
    help=f"{', '.join(KNOWN_MODELS)}, or the path of a Hugging Face config.json.",
)
@click.option(
    "--ranks",
    type=click.IntRange(1, MAX_RANKS),
    required=True,
    help="Ranks that share the experts.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1, MAX_TOKENS),
    required=True,
    help="Rows each rank brings to a step: requests x draft tokens, or the prompt chunk.",
)
@click.option(
    "--wire",
    type=click.Choice([dtype.value for dtype in WireDtype]),
    default=WireDtype.BF16.value,
    show_default=True,
    help="Format of rows on the way out.",
)
@click.option(
    "--combine-wire",
    type=click.Choice([dtype.value for dtype in COMBINE_DTYPES]),
    default=WireDtype.BF16.value,
    show_default=True,
    help="Format of rows on the way back.",
)
@click.option(
    "--cap",
    type=click.IntRange(1, MAX_TOKENS),
    help="Most rows a rank may bring. [default: tokens, at least 128]",
)
@click.option(
    "--slots",
    type=click.IntRange(min=1),
    help="Slots per rank. [default: just enough for all experts]",
)
@click.option(
    "--num-sms", type=click.IntRange(min=1), help="SMs to use. [default: what fills the link]"
)
@click.option(
    "--link-gbs", type=float, default=LINK_GB_S, show_default=True, help="GB/s of a link."
)
@click.option(
    "--sm-gbs", type=float, default=SM_STORE_GB_S, show_default=True, help="GB/s of one SM."
)
@click.option("--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def plan(
    model: str,
    ranks: int,
    tokens: int,
    wire: str,
    combine_wire: str,
    cap: int | None,
    slots: int | None,
    num_sms: int | None,
    link_gbs: float,
    sm_gbs: float,
    output: str,
) -> None:
    """Compare the ways of exchanging rows for a model on RANKS ranks.

    Bytes are delivered bytes per rank and layer; "remote" is what of them crosses a link.
    """
    try:
        shape = load_model(model)
        geometry = _geometry(shape, ranks, slots)
        settings = {
            "max_tokens": max(tokens, DEFAULT_DECODE_TOKENS) if cap is None else cap,
            "dispatch_dtype": wire,
            "combine_dtype": combine_wire,
            "num_sms": num_sms,
        }
        specs = {
            name: ExchangeSpec.preset(name, **settings) for name in PRESET_NAMES if name != "AUTO"
        }
        sms = sm_count(
            num_sms=num_sms,
            link_gb_s=link_gbs,
            sm_gb_s=sm_gbs,
            remote=(ranks - 1) / ranks if ranks > 1 else 1.0,
        )
        plans = [
            plan_preset(name, spec, geometry, ranks, tokens, sms) for name, spec in specs.items()
        ]
    except ElasticEPError as error:
        raise _Refusal(error.reason, str(error)) from None
    report = _report(shape, geometry, ranks, tokens, specs["ROUTED"], plans)
    if output == "json":
        click.echo(json.dumps(report, indent=2))
    else:
        _print_table(report, plans)


def _geometry(shape: ModelShape, ranks: int, slots: int | None) -> GroupGeometry:
    enough = -(-shape.experts // ranks)
    return GroupGeometry(
        layers=shape.moe_layers,
        experts=shape.experts,
        topk=shape.topk,
        hidden=shape.hidden,
        slots_per_rank=enough if slots is None else slots,
        max_ranks=ranks,
    )


def _report(
    shape: ModelShape,
    geometry: GroupGeometry,
    ranks: int,
    tokens: int,
    spec: ExchangeSpec,
    plans: list[PresetPlan],
) -> dict[str, Any]:
    by_name = {row.preset: row for row in plans}
    return {
        "model": asdict(shape),
        "ranks": ranks,
        "tokens": tokens,
        "cap": spec.max_tokens,
        "slots_per_rank": geometry.slots_per_rank,
        "wire": spec.dispatch_dtype.value,
        "combine_wire": spec.combine_dtype.value,
        "row_bytes": spec.dispatch_dtype.row_bytes(shape.hidden),
        "combine_row_bytes": spec.combine_dtype.row_bytes(shape.hidden),
        "expert_bytes": shape.expert_bytes,
        "arena_bytes": geometry.layers * geometry.slots_per_rank * shape.expert_bytes,
        "expert_weight_bytes_per_step": shape.weight_bytes_per_step(ranks, tokens),
        "presets": [asdict(row) for row in plans],
        "auto": {
            "prefill": "NORMAL",
            "decode": "LOW_LATENCY",
            "buffer_bytes": by_name["NORMAL"].buffer_bytes + by_name["LOW_LATENCY"].buffer_bytes,
        },
    }


def _print_table(report: dict[str, Any], plans: list[PresetPlan]) -> None:
    model = report["model"]
    table = Table(
        title=(
            f"{model['name']}: {report['ranks']} ranks, {report['tokens']} rows per rank, "
            f"cap {report['cap']}, {report['wire']} out, {report['combine_wire']} back"
        ),
        caption=(
            "Per rank and layer, averages over a uniform router. Delivered bytes count the copy "
            "for a token's own rank, remote bytes do not. AUTO is NORMAL for steps with prompt "
            f"tokens, else LOW_LATENCY ({report['auto']['buffer_bytes'] / GB:.3f} GB). "
            f"One expert: {report['expert_bytes'] / 1e6:.1f} MB ({model['weights']}); a rank reads "
            f"{report['expert_weight_bytes_per_step'] / GB:.1f} GB of them per step and holds "
            f"{report['arena_bytes'] / GB:.1f} GB in {report['slots_per_rank']} slots per layer. "
            "Where daemons keep them that is host memory, and in a group on GPUs as much of the "
            "rank's GPU besides."
        ),
        caption_justify="left",
    )
    table.add_column("preset", no_wrap=True)
    for heading in (
        "copies",
        "out MiB",
        "remote",
        "back MiB",
        "remote",
        "rows in",
        "to kernel",
        "room",
        "buffer GB",
        "SMs",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("CPU waits", no_wrap=True)
    table.add_column("layout", no_wrap=True)
    for row in plans:
        table.add_row(
            row.preset,
            f"{row.copies:.2f}",
            f"{row.out_bytes / MIB:.2f}",
            f"{row.out_remote_bytes / MIB:.2f}",
            f"{row.back_bytes / MIB:.2f}",
            f"{row.back_remote_bytes / MIB:.2f}",
            f"{row.arriving_rows:,.0f}",
            f"{row.kernel_rows:,.0f}",
            f"{row.rows_of_room:,}",
            f"{row.buffer_bytes / GB:.3f}",
            str(row.sms),
            "yes" if row.cpu_waits else "no",
            row.layout,
        )
    console = Console(file=sys.stdout)
    console.width = max(console.width, TABLE_WIDTH)  # a wrapped table cannot be read or grepped
    console.print(table)


command = plan
