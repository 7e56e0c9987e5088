"""`elasticep daemon`."""

import asyncio
import sys
from typing import Any

import click

from elasticep.cli.serving import with_flags, with_logs
from elasticep.config import DaemonConfig, load_config
from elasticep.errors import ElasticEPError

_DAEMON_FLAGS = (
    ("--node", "This node's name; default: the host's."),
    ("--domain", "Nodes of one domain map each other's memory; default: the host's boot id."),
    ("--socket-dir", "Where the daemon's sockets lie."),
    ("--listen", "host:port for other daemons; default: Unix socket only."),
    ("--controllers", "Addresses of all controllers, with commas."),
    ("--seats", 'Ranks offered: "group:0-3,6", several with ";".'),
    ("--devices", "CUDA devices of the seats, with commas; default: 0, 1, ..."),
    ("--load-interval-ms", "How often the load of experts is reported; 0: never."),
    ("--checkpoint", "Where expert weights are: a path, or group=path, several with commas."),
    ("--backup-bytes", "Host memory for experts of other nodes, per group; 0: none."),
    ("--weights-rate", "Bytes of weights moved per second at most in the background; 0: no limit."),
    ("--metrics-port", "Port of /metrics; 0: any free one, -1: none."),
    ("--metrics-host", "Interface of /metrics."),
    ("--tls-cert", "PEM certificate for mutual TLS."),
    ("--tls-key", "Its key."),
    ("--tls-ca", "PEM certificate of the authority that signs the others'."),
)


@with_flags(_DAEMON_FLAGS)
@click.command("daemon")
@click.option("--config", "file", type=click.Path(dir_okay=False), help="TOML file, [daemon].")
@click.option("--fault-injection/--no-fault-injection", default=None, help="Serve InjectFault.")
@click.option(
    "--orphan-after-s", type=float, help="A worker without daemon and engine leaves after this."
)
@click.option(
    "--engine-grace-s", type=float, help="A fenced engine that holds on this long is killed."
)
@with_logs
def command(
    file: str | None,
    orphan_after_s: float | None,
    engine_grace_s: float | None,
    log_format: str,
    log_level: str,
    **flags: Any,
) -> None:
    """Run the node daemon.

    SIGTERM, as SIGHUP, ends every seat and leaves nothing; SIGUSR1 leaves workers and engines
    running for the next daemon. A failed start is one line and exit status 2.
    """
    try:
        limits = {"orphan_after_s": orphan_after_s, "engine_grace_s": engine_grace_s}
        asyncio.run(_run(file, limits, log_format, log_level, flags))
    except ElasticEPError as error:
        click.echo(f"error: {error.reason}: {error}", err=True)
        sys.exit(2)


async def _run(
    file: str | None,
    limits: dict[str, float | None],
    log_format: str,
    log_level: str,
    flags: dict[str, Any],
) -> None:
    config = load_config(DaemonConfig, file=file, flags=flags)
    if config.tls.enabled:
        config.tls.read()  # what cannot be used is found now, not at the first dial
    from elasticep.runtime import descriptors
    from elasticep.runtime.daemon import Daemon
    from elasticep.runtime.limits import Limits
    from elasticep.runtime.logs import open_log

    descriptors.raise_limit()
    descriptors.check_offer(len(seats.ranks) for seats in config.seats)
    given = {name: value for name, value in limits.items() if value is not None}
    log = open_log(log_format, log_level, node=config.node)
    await Daemon(config, log, Limits(**given)).run()
