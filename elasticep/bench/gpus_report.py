"""The report of `bench gpus`: what it has found so far, with what peers publish beside it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from elasticep.bench import exchange_cuda_report, recovery_cuda


@dataclass(frozen=True, slots=True)
class Published:
    """What a peer publishes of eight GPUs of one host, and which of our exchanges is beside it.

    Attributes:
        peer: who.
        model: of `MODELS`.
        tokens: per rank.
        dispatch_us, combine_us: with fp8 rows out and bf16 rows back.
        goal: how much faster we are to be.
        variants: that do what it does; the first hands rows over in the same layout.
    """

    peer: str
    model: str
    tokens: int
    dispatch_us: float
    combine_us: float
    goal: float
    variants: tuple[str, ...]


PUBLISHED: Final = (
    Published(
        *("DeepEP low latency", "deepseek-v3", 128, 36.9, 67.0, 1.3),
        variants=("LOW_LATENCY fp8", "EXPAND masked fp8", "ROUTED fp8"),
    ),
    Published(
        *("DeepEP normal", "deepseek-v3", 4096, 500.0, 973.0, 1.2),
        variants=("NORMAL fp8", "EXPAND contiguous fp8", "ROUTED fp8"),
    ),
)


def beside_peers(lines: Sequence[Mapping[str, Any]], ranks: int) -> list[str]:
    """A row for each of our times that has a published one beside it; none: nothing."""
    timed = {(x["model"], x["variant"], x["tokens"]): x for x in lines}
    rows = []
    for p in PUBLISHED:
        for variant in p.variants:
            x = timed.get((p.model, variant, p.tokens))
            if x is None:
                continue
            both = (p.dispatch_us + p.combine_us) / x["total_us"]
            met = "yes" if both >= p.goal else "no"
            rows.append(
                f"| {p.peer} | {p.tokens} | {variant} | {p.dispatch_us:g} + {p.combine_us:g} | "
                f"{x['dispatch_us']:.1f} + {x['combine_us']:.1f} | {x['total_us']:.1f} | "
                f"{p.dispatch_us / x['dispatch_us']:.2f} | {p.combine_us / x['combine_us']:.2f} | "
                f"{both:.2f} | {p.goal:g} | {met if ranks == 8 else f'{ranks} ranks'} |"
            )
    if not rows:
        return []
    return [
        "| published, 8 GPUs | tokens | ours | theirs | us | total | x | x | both x | goal | met |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *rows,
    ]


def recovery(kills: Sequence[recovery_cuda.Line]) -> list[str]:
    """The recovery's table; without kills: nothing."""
    return recovery_cuda.table(list(kills)).splitlines() if kills else []


def report(found: Mapping[str, Any]) -> str:
    """Everything in Markdown, from what is in gpus.json."""
    kills = [recovery_cuda.Line(**k) for k in found["kills"]]
    timed = sorted(found["exchange"], key=lambda x: (x["model"], x["tokens"]))
    lines = [
        f"# {found['ranks']} ranks on {min(found['gpus'], found['ranks'])} GPUs",
        "",
        f"{time.strftime('%Y-%m-%d')}; {found['machine']}.",
    ]
    for title, table in (
        ("Exchange", exchange_cuda_report.table(timed).splitlines()),
        ("Beside what peers publish", beside_peers(timed, found["ranks"])),
        ("Ranks killed", recovery(kills)),
    ):
        if table:
            lines += ["", f"## {title}", "", *table]
    lines += ["", "## Tasks", "", "| task | state | seconds | |", "|---|---|---|---|"]
    for task in found["tasks"]:
        why = task["why"].strip().splitlines()
        note = why[-1].replace("|", "/") if why else ""
        lines.append(f"| {task['name']} | {task['state']} | {task['seconds']:.0f} | {note} |")
    return "\n".join(lines) + "\n"
