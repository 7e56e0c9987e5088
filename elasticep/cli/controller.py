"""`elasticep controller`."""

import asyncio
import sys
from typing import Any

import click

from elasticep.cli.serving import with_flags, with_logs
from elasticep.config import ControllerConfig, load_config
from elasticep.errors import ElasticEPError

_FLAGS = (
    ("--listen", "host:port (port 0: any free one) or unix:///path."),
    ("--advertise", "What nodes and standbys are told to dial; default: where it listens."),
    ("--store", '"etcd", or "memory": nothing survives this process.'),
    ("--etcd-endpoints", "host:port of the etcd members, with commas."),
    ("--etcd-cert", "PEM certificate for mutual TLS towards etcd."),
    ("--etcd-key", "Its key."),
    ("--etcd-ca", "PEM certificate of the authority that signs etcd's."),
    ("--lease-ttl-s", "How long a silent leader keeps the lead, seconds."),
    ("--name", "This controller in logs and status; default: host name and process id."),
    ("--metrics-port", "Port of /metrics; 0: any free one, -1: none."),
    ("--metrics-host", "Interface of /metrics."),
    ("--tls-cert", "PEM certificate for mutual TLS."),
    ("--tls-key", "Its key."),
    ("--tls-ca", "PEM certificate of the authority that signs the others'."),
)


@with_flags(_FLAGS)
@click.command("controller")
@click.option("--config", "file", type=click.Path(dir_okay=False), help="TOML file, [controller].")
@with_logs
def command(file: str | None, log_format: str, log_level: str, **flags: Any) -> None:
    """Run a controller replica: one of them leads, the others stand by.

    SIGTERM, as SIGHUP, gives the lead back at once. A failed start is one line and exit status 2.
    """
    try:
        config = load_config(ControllerConfig, file=file, flags=flags)
        if config.tls.enabled:
            config.tls.read()  # what cannot be used is found now, before anything is started
        asyncio.run(_run(config, log_format, log_level))
    except ElasticEPError as error:
        click.echo(f"error: {error.reason}: {error}", err=True)
        sys.exit(2)


async def _run(config: ControllerConfig, log_format: str, log_level: str) -> None:
    import os

    from elasticep.control.controller import Controller
    from elasticep.runtime.descriptors import raise_limit
    from elasticep.runtime.logs import open_log
    from elasticep.runtime.systemd import Notifier

    raise_limit()  # every node, engine and operator is a connection
    notifier = Notifier(os.environ)
    log = open_log(log_format, log_level)
    pings: list[asyncio.Task[None]] = []

    async def ping() -> None:
        while True:
            notifier.alive()
            await asyncio.sleep(notifier.watchdog_s / 2)

    def started(controller: Controller) -> None:
        notifier.ready(f"listens on {controller.address}")
        if notifier.watchdog_s:
            pings.append(asyncio.create_task(ping()))

    controller = Controller(config, log=log)
    try:
        await controller.run(started)
    finally:
        notifier.stopping()
        for task in pings:
            task.cancel()
