"""`elasticep node off NODE`."""

from typing import TYPE_CHECKING, Any

import click

from elasticep.cli.operator import ask, controller_options, output_option, say

if TYPE_CHECKING:
    from elasticep.proto.controller_pb2 import NodeOffResponse
    from elasticep.proto.controller_pb2_grpc import ControllerServiceAsyncStub


@click.group("node")
def command() -> None:
    """Tell the controller what became of a node."""


@controller_options
@output_option
@command.command("off")
@click.argument("node")
@click.option("--reason", default="", help="Why; shown in status and logs.")
def off(node: str, reason: str, output: str, **options: Any) -> None:
    """Say that NODE is off for good: nothing that ran there lives.

    The seats that were kept for it are given to other nodes that offer them. Refused while it is
    heard of.
    """
    from elasticep.control.views import describe_ranks
    from elasticep.proto import controller_pb2

    request = controller_pb2.NodeOffRequest(node=node, reason=reason)

    async def call(stub: "ControllerServiceAsyncStub", timeout_s: float) -> "NodeOffResponse":
        return await stub.NodeOff(request, timeout=timeout_s)

    freed = {each.group: list(each.ranks) for each in ask(options, call).freed}
    lines = [
        f"group {group}: {describe_ranks(ranks)} may be given to other nodes"
        for group, ranks in freed.items()
    ]
    text = "\n".join([*lines, f"node {node} is forgotten"])
    say(output, {"node": node, "freed": freed}, text)
