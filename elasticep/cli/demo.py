"""`elasticep demo`: a small model on a real cluster, with a kill in the middle of decoding."""

import json
import sys

import click

from elasticep.demo.display import choose_display
from elasticep.demo.scenario import Scenario
from elasticep.demo.settings import DemoSettings, Kill, Restore, Side
from elasticep.signals import interrupt_on_stop


@click.command()
@click.option("--ranks", default=4, show_default=True, help="Engines, one rank each.")
@click.option("--nodes", type=int, help="Node daemons; default: 2, or 1 for a single rank.")
@click.option(
    "--scenario",
    type=click.Choice([scenario.value for scenario in Scenario]),
    default=Scenario.KILL.value,
    show_default=True,
    help="kill; rejoin: the killed rank comes back; scale: two ranks more, then three fewer; "
    "drain: a rank is taken out of service; lost-expert: nobody else has what the killed rank had; "
    "rebalance: experts move by their load; with --kill something dies in the middle of that.",
)
@click.option(
    "--kill",
    type=click.Choice([kill.value for kill in Kill]),
    help="What is killed with SIGKILL.  [default: worker; none in scale, drain and rebalance]",
)
@click.option(
    "--victim",
    type=click.Choice([side.value for side in Side]),
    help="In rebalance with --kill: the end of a copy under way that is killed.  [default: source]",
)
@click.option(
    "--restore",
    type=click.Choice([restore.value for restore in Restore]),
    help="Where lost experts come from.  [default: a run with each]",
)
@click.option("--at", type=int, help="Step at which it happens; default: amid the answers.")
@click.option(
    "--tokens",
    type=int,
    help="Tokens to answer to each request.  [default: 40; in rebalance 100, and requests follow "
    "until experts have moved]",
)
@click.option("--seed", default=13, show_default=True, help="Of the model's weights.")
@click.option("--timeout", default=120.0, show_default=True, help="Seconds until it gives up.")
@click.option("--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def command(
    ranks: int,
    nodes: int | None,
    scenario: str,
    kill: str | None,
    victim: str | None,
    restore: str | None,
    at: int | None,
    tokens: int | None,
    seed: int,
    timeout: float,
    output: str,
) -> None:
    """Serve a small Qwen3-MoE on this machine and kill a part of it in the middle of decoding.

    Starts etcd, a controller, node daemons with their workers, and one engine per rank; takes a
    dead rank's requests over; compares every token with a single-process run of the same model.
    The exit status is 0 if no request was lost and every token is identical.
    """
    wanted: list[Restore | None] = [None if restore is None else Restore(restore)]
    if restore is None and Scenario(scenario) is Scenario.LOST_EXPERT:
        wanted = list(Restore)
    chosen = Kill(kill or (Kill.WORKER if Scenario(scenario).kills else Kill.NONE))
    moving = Scenario(scenario) is Scenario.REBALANCE
    if victim is None and moving and chosen is not Kill.NONE:
        victim = Side.SOURCE
    runs = [
        DemoSettings(
            ranks=ranks,
            nodes=min(2, ranks) if nodes is None else nodes,
            scenario=Scenario(scenario),
            kill=chosen,
            restore=one,
            side=None if victim is None else Side(victim),
            at=at,
            tokens=tokens or (100 if moving else 40),
            seed=seed,
            timeout_s=timeout,
        )
        for one in wanted
    ]
    interrupt_on_stop()
    good = [_run(settings, table=output == "table") for settings in runs]
    sys.exit(0 if all(good) else 1)


def _run(settings: DemoSettings, *, table: bool) -> bool:
    """One run; whether nothing was lost and nothing was wrong."""
    display = choose_display(sys.stdout if table else sys.stderr, table=table)
    from elasticep.demo.parent import Demo

    try:
        report = Demo(settings, display).run()
    finally:
        display.close()
    display.result(report)
    if not table:
        click.echo(json.dumps(report.to_dict()))
    return report.good
