"""Lines of an exchange on GPUs: what is told of each, as a table and as a picture."""

import itertools
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from elasticep.bench.exchange_cuda_cases import VARIANTS

LINK_GB_S: Final = 358.0
"""Store rate of NVLink between two H200 measured with all SMs, one direction."""
FLAG_US: Final = 1.31
"""One flag across the link, measured."""


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the result. Times in microseconds; `remote` counts bytes that cross the link."""

    model: str
    variant: str
    tokens: int
    total_us: float
    dispatch_us: float
    combine_us: float
    graph_us: float
    limit_us: float
    remote_mib: float
    nccl_us: float


def line_of(
    variant: str, times: list[float], graph_us: float, moved: int, fixed: dict[str, Any]
) -> dict[str, Any]:
    """A line; `times` are dispatch, combine and both, `moved` the bytes that cross the link."""
    line = Line(
        variant=variant,
        total_us=times[2],
        dispatch_us=times[0],
        combine_us=times[1],
        graph_us=graph_us,
        limit_us=moved / LINK_GB_S / 1e3 + 2 * FLAG_US,
        remote_mib=moved / 2**20,
        **fixed,
    )
    return asdict(line)


HEAD: Final = (
    "| model | variant | tokens | total us | dispatch | combine | in a graph | limit | NCCL |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def row(x: dict[str, Any]) -> str:
    """A line as a row of the Markdown table."""
    return (
        f"| {x['model']} | {x['variant']} | {x['tokens']} | {x['total_us']:.1f} | "
        f"{x['dispatch_us']:.1f} | {x['combine_us']:.1f} | {x['graph_us']:.1f} | "
        f"{x['limit_us']:.1f} | {x['nccl_us'] or float('nan'):.1f} |"
    )


def table(lines: list[dict[str, Any]]) -> str:
    """The lines as a Markdown table."""
    return "\n".join([HEAD, *(row(x) for x in lines)])


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    """Draws total time over tokens, a panel per model, NCCL and the link's limit beside it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = sorted({x["model"] for x in lines})
    size = (5 * len(models) + 2.5, 4.5)
    figure, panels = pyplot.subplots(
        1, len(models), figsize=size, squeeze=False, sharey=True, layout="constrained"
    )
    for axes, model in zip(panels[0], models, strict=True):
        mine = [x for x in lines if x["model"] == model]
        # Lines that lie on each other are told apart by their markers.
        for marker, name in zip(
            itertools.cycle("os^vDP*Xd"), dict.fromkeys(x["variant"] for x in mine), strict=False
        ):
            own = [x for x in mine if x["variant"] == name]
            times = [x["total_us"] for x in own]
            axes.plot([x["tokens"] for x in own], times, f"{marker}-", label=name, fillstyle="none")
        routed = [x for x in mine if x["variant"] == VARIANTS[0].name]
        tokens = [x["tokens"] for x in routed]
        axes.plot(tokens, [x["nccl_us"] for x in routed], "k--", label="NCCL, all rows to all")
        axes.plot(tokens, [x["limit_us"] for x in routed], "k:", label="limit of the link")
        axes.set(title=model, xlabel="tokens per rank", xscale="log", yscale="log")
        axes.set_xticks(tokens, [str(n) for n in tokens], minor=False)
        axes.minorticks_off()
        ticks = [2**i * 10 for i in range(10) if 2**i * 10 < 2 * max(x["total_us"] for x in lines)]
        axes.set_yticks(ticks, [str(n) for n in ticks])
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("dispatch + combine, us")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(path, dpi=120)
