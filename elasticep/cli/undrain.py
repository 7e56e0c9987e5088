"""`elasticep undrain`."""

from typing import TYPE_CHECKING, Any

import click

from elasticep.cli.operator import ask, controller_options, parse_ranks

if TYPE_CHECKING:
    from elasticep.proto.controller_pb2_grpc import ControllerServiceAsyncStub


@controller_options
@click.command("undrain")
@click.argument("group")
@click.argument("ranks")
def command(group: str, ranks: str, **options: Any) -> None:
    """Let RANKS ("3" or "0-2,5") of GROUP back in: drained, flapping or kept out ones."""
    from elasticep.proto import controller_pb2

    request = controller_pb2.UndrainRequest(group=group, ranks=parse_ranks(ranks))

    async def call(stub: "ControllerServiceAsyncStub", timeout_s: float) -> None:
        await stub.Undrain(request, timeout=timeout_s)

    ask(options, call)
    click.echo(f"ranks {ranks} of group {group} may join again")
