"""The report of `bench acceptance`, from what its batches found."""

import statistics
import subprocess
import time
from collections.abc import Mapping
from typing import Any, Final

GOALS: Final = (
    ("H 5120, E 384, K 6, 64 tokens", "deepseek-v4.1-flash", "ROUTED", 64, 20.0),
    ("same, 128", "deepseek-v4.1-flash", "ROUTED", 128, 24.0),
    ("same, 4096", "deepseek-v4.1-flash", "ROUTED", 4096, 250.0),
    ("H 7168, E 256, K 8, 64 tokens", "deepseek-v3", "ROUTED", 64, 21.0),
    ("same, 4096", "deepseek-v3", "ROUTED", 4096, 350.0),
    ("EXPAND masked, H 7168, 64 tokens", "deepseek-v3", "EXPAND masked", 64, 30.0),
    ("EXPAND contiguous, H 7168, 64 tokens", "deepseek-v3", "EXPAND contiguous", 64, 30.0),
    ("EXPAND contiguous, H 7168, 4096 tokens", "deepseek-v3", "EXPAND contiguous", 4096, 480.0),
)
"""What is asked, model, variant, tokens and the goal in microseconds."""

Done = Mapping[str, Mapping[str, Any]]


def machine() -> str:
    """The cards and the driver, as the driver's tool names them."""
    query = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "cards unknown: nvidia-smi does not answer"
    cards = text.splitlines()
    return f"{len(cards)} x {cards[0]}" if cards else "no cards"


def _lines(done: Done, prefix: str) -> dict[str, list[dict[str, Any]]]:
    """{name: lines} of all results whose names begin with `prefix`."""
    return {
        name: lines
        for batch in done.values()
        for name, lines in (batch.get("found") or {}).items()
        if name.startswith(prefix) and isinstance(lines, list)
    }


def goals(done: Done) -> list[str]:
    """The exchange's times against what is asked."""
    timed = {
        (x["model"], x["variant"], x["tokens"]): x["total_us"]
        for lines in _lines(done, "exchange-").values()
        for x in lines
    }
    if not timed:
        return []
    rows = ["| line | measured us | goal | met |", "|---|---|---|---|"]
    for text, model, variant, tokens, goal in GOALS:
        us = timed.get((model, variant, tokens))
        met = "not measured" if us is None else "yes" if us <= goal else "no"
        rows.append(f"| {text} | {'' if us is None else f'{us:.1f}'} | {goal:g} | {met} |")
    return rows


def kills(done: Done) -> list[str]:
    """Milliseconds after each kill: least, median, most; and by what a death shows when."""
    runs = _lines(done, "kills-")
    if not runs:
        return []
    columns = {
        "back_ms": "survivor's call returned",
        "complete_ms": "first complete step without it",
        "futex_ms": "robust futex",
        "socket_ms": "socket closed",
        "exit_ms": "process ended",
    }
    rows = [
        f"| run | kills | {' | '.join(columns.values())} |",
        "|---|---|" + "---|" * len(columns),
    ]

    def spread(lines: list[dict[str, Any]], key: str) -> str:
        values = [x[key] for x in lines if key in x]
        if not values:
            return ""
        return f"{min(values):.2f}, {statistics.median(values):.2f}, {max(values):.2f}"

    whole = {"all": [x for lines in runs.values() for x in lines]}
    for name, lines in (runs | whole).items():
        times = " | ".join(spread(lines, key) for key in columns)
        rows.append(f"| {name} | {len(lines)} | {times} |")
    return rows


def checks(done: Done) -> list[str]:
    """Means of the library with and without its looks at who is dead or has left."""
    runs = _lines(done, "checks-")
    if not runs:
        return []
    rows = ["| tokens | off us | on us | on over off |", "|---|---|---|---|"]

    def times(kind: str, tokens: int) -> list[float]:
        mine = [x for name, some in runs.items() if f"-{kind}-" in name for x in some]
        return [x["total_us"] for x in mine if x["tokens"] == tokens]

    for tokens in sorted({x["tokens"] for lines in runs.values() for x in lines}):
        off, on = times("off", tokens), times("on", tokens)
        both = [" ".join(f"{us:.1f}" for us in some) for some in (off, on)]
        more = f"{statistics.mean(on) / statistics.mean(off) - 1:+.1%}" if off and on else ""
        rows.append(f"| {tokens} | {both[0]} | {both[1]} | {more} |")
    return rows


def report(done: Done) -> str:
    """The whole report in Markdown."""
    lines = ["# Acceptance of the GPU data plane", "", f"{time.strftime('%Y-%m-%d')}; {machine()}."]
    lines += ["", "| part | batch | state | seconds | |", "|---|---|---|---|---|"]
    for name, batch in done.items():
        found = batch.get("found") or {}
        counts = ", ".join(f"{n} {k}" for k, n in found.items() if isinstance(n, int) and n)
        note = (batch.get("why") or counts).replace("|", "/").replace("\n", " ")
        row = (batch["part"], name, batch["state"], f"{batch['seconds']:.0f}", note)
        lines.append(f"| {' | '.join(row)} |")
    for title, table in (
        ("Times against the goals", goals(done)),
        ("Kills", kills(done)),
        ("Cost of the fault checks", checks(done)),
    ):
        if table:
            lines += ["", f"## {title}", "", *table]
    for name, batch in done.items():
        if batch.get("tail"):
            lines += ["", f"## {name}: {batch['state']}", "", "```", batch["tail"].rstrip(), "```"]
    return "\n".join(lines) + "\n"
