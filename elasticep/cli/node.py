"""`elasticep node off NODE`."""

from typing import TYPE_CHECKING, Any

import click

from elasticep.cli.operator import ask, controller_options

if TYPE_CHECKING:
    from elasticep.proto.controller_pb2 import NodeOffResponse
    from elasticep.proto.controller_pb2_grpc import ControllerServiceAsyncStub


@click.group("node")
def command() -> None:
    """Tell the controller what became of a node."""


@controller_options
@command.command("off")
@click.argument("node")
@click.option("--reason", default="", help="Why; shown in status and logs.")
def off(node: str, reason: str, **options: Any) -> None:
    """Say that NODE is off for good: nothing that ran there lives.

    The seats that were kept for it are given to other nodes that offer them. Refused while it is
    heard of.
    """
    from elasticep.proto import controller_pb2

    request = controller_pb2.NodeOffRequest(node=node, reason=reason)

    async def call(stub: "ControllerServiceAsyncStub", timeout_s: float) -> "NodeOffResponse":
        return await stub.NodeOff(request, timeout=timeout_s)

    for freed in ask(options, call).freed:
        ranks = ", ".join(str(rank) for rank in freed.ranks)
        click.echo(f"group {freed.group}: ranks {ranks} may be given to other nodes")
    click.echo(f"node {node} is forgotten")
