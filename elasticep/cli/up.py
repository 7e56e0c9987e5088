"""`elasticep up`: a whole cluster on this machine, until it is stopped."""

import json
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import click

from elasticep.cli.operator import ask
from elasticep.config import parse_seats
from elasticep.errors import ConfigError
from elasticep.signals import interrupt_on_stop
from elasticep.testing.cluster import Cluster
from elasticep.testing.supervisor import ranks_of

if TYPE_CHECKING:
    from elasticep.proto.controller_pb2 import GetClusterResponse
    from elasticep.proto.controller_pb2_grpc import ControllerServiceAsyncStub

# A signal that comes just before a wait begins does not end it: Python acts on it afterwards.
_WAIT_S: Final = 0.5
_LEAD_S: Final = 60.0


@click.command()
@click.argument("group", default="local")
@click.option("--ranks", type=click.IntRange(1), default=4, show_default=True, help="Seats.")
@click.option(
    "--nodes",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Daemons, which share the seats.",
)
@click.option(
    "--controllers", type=click.IntRange(1, 9), default=1, show_default=True, help="One leads."
)
@click.option(
    "--etcd-members",
    type=click.Choice(["1", "3", "5"]),
    default="1",
    show_default=True,
    help="Of the etcd that is started.",
)
@click.option(
    "--etcd-endpoints",
    default="",
    help="host:port of an etcd that runs already, instead; several with commas.",
)
@click.option("--checkpoint", help="Where the daemons read expert weights from.")
@click.option("--fault-injection", is_flag=True, help="Daemons inject faults when asked to.")
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(
    group: str,
    ranks: int,
    nodes: int,
    controllers: int,
    etcd_members: str,
    etcd_endpoints: str,
    checkpoint: str | None,
    fault_injection: bool,
    output: str,
) -> None:
    """Run etcd, controllers and node daemons for the seats of GROUP, until Ctrl-C.

    For development and tests: nothing outlives it, and the etcd that it starts keeps nothing. What
    ends is started again. Prints where engines and operators' commands find everything.
    """
    try:
        parse_seats(f"{group}:0-{ranks - 1}")
    except ValueError as error:
        raise ConfigError(f"group {group} with {ranks} ranks: {error}") from None
    endpoints = [part.strip() for part in etcd_endpoints.split(",") if part.strip()]
    cluster = Cluster(
        group=group,
        ranks=ranks,
        nodes=nodes,
        controllers=controllers,
        etcd_members=int(etcd_members),
        etcd=endpoints,
        checkpoint=checkpoint,
        fault_injection=fault_injection,
    )
    interrupt_on_stop()
    tell = _tell_json if output == "json" else _tell_text
    try:
        with cluster:
            _wait_for_leader(cluster)
            tell(_places(cluster))
            _follow(cluster, tell)
    except KeyboardInterrupt:
        tell({"event": "stopped"})


def _wait_for_leader(cluster: Cluster) -> None:
    """A controller serves before it leads; without etcd it never will, which `ask` says."""
    from elasticep.proto import controller_pb2

    async def call(stub: "ControllerServiceAsyncStub", timeout_s: float) -> "GetClusterResponse":
        return await stub.GetCluster(controller_pb2.GetClusterRequest(), timeout=timeout_s)

    controllers = ",".join(cluster.controller_addresses())
    tls = {"tls_cert": "", "tls_key": "", "tls_ca": ""}
    ask({"controllers": controllers, "timeout": _LEAD_S, **tls}, call)


def _places(cluster: Cluster) -> dict[str, Any]:
    """Where everything is, for those who attach and ask."""
    nodes = []
    for node in range(cluster.nodes):
        ranks = list(ranks_of(node, cluster.nodes, cluster.ranks))
        nodes.append(
            {"node": f"node-{node}", "ranks": ranks, "socket": cluster.socket_of(ranks[0])}
        )
    return {
        "event": "up",
        "group": cluster.group,
        "controllers": list(cluster.controller_addresses()),
        "etcd": list(cluster.etcd_endpoints),
        "nodes": nodes,
        "pids": cluster.pids,
        "logs": str(cluster.folder),
    }


def _follow(cluster: Cluster, tell: Callable[[dict[str, Any]], None]) -> None:
    """Tell what ends and comes back, for good."""
    while True:
        for event in cluster.events(_WAIT_S):
            if event["event"] in ("exited", "ready"):
                tell(
                    {
                        name: event[name]
                        for name in ("event", "name", "status", "pid")
                        if name in event
                    }
                )


def _tell_json(event: dict[str, Any]) -> None:
    click.echo(json.dumps(event))


def _tell_text(event: dict[str, Any]) -> None:
    match event["event"]:
        case "up":
            click.echo(f"group {event['group']}: an engine on a rank attaches with")
            for node in event["nodes"]:
                for rank in node["ranks"]:
                    click.echo(f"  ELASTICEP_RANK={rank} ELASTICEP_SOCKET={node['socket']}")
            click.echo("operators' commands find the controllers with")
            click.echo(f"  export ELASTICEP_CONTROLLERS={','.join(event['controllers'])}")
            click.echo(f"etcd: {', '.join(event['etcd'])}")
            click.echo(f"logs, until this ends: {event['logs']}/*.log")
            click.echo("Ctrl-C ends everything")
        case "exited":
            click.echo(f"{event['name']} ended ({_ended(event['status'])}) and is started again")
        case "ready":
            click.echo(f"{event['name']} serves, process {event['pid']}")
        case _:
            click.echo("everything is stopped")


def _ended(status: int) -> str:
    return f"exit status {status}" if status >= 0 else signal.strsignal(-status) or f"{-status}"
