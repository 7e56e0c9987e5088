"""`elasticep undrain`."""

from typing import TYPE_CHECKING, Any

import click

from elasticep.cli.operator import ask, controller_options, output_option, parse_ranks, say

if TYPE_CHECKING:
    from elasticep.proto.controller_pb2_grpc import ControllerServiceAsyncStub


@controller_options
@output_option
@click.command("undrain")
@click.argument("group")
@click.argument("ranks")
def command(group: str, ranks: str, output: str, **options: Any) -> None:
    """Let RANKS ("3" or "0-2,5") of GROUP back in: drained, flapping or kept out ones."""
    from elasticep.control.views import describe_ranks
    from elasticep.proto import controller_pb2

    named = parse_ranks(ranks)
    request = controller_pb2.UndrainRequest(group=group, ranks=named)

    async def call(stub: "ControllerServiceAsyncStub", timeout_s: float) -> None:
        await stub.Undrain(request, timeout=timeout_s)

    ask(options, call)
    text = f"may join group {group} again: {describe_ranks(named)}"
    say(output, {"group": group, "ranks": named}, text)
