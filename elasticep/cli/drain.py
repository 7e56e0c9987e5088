"""`elasticep drain`."""

from typing import TYPE_CHECKING, Any

import click

from elasticep.cli.operator import ask, controller_options, output_option, parse_ranks, say

if TYPE_CHECKING:
    from elasticep.proto.controller_pb2_grpc import ControllerServiceAsyncStub


@controller_options
@output_option
@click.command("drain")
@click.argument("group")
@click.argument("ranks")
@click.option("--reason", default="", help="Why; shown in status and history.")
def command(group: str, ranks: str, reason: str, output: str, **options: Any) -> None:
    """Take RANKS ("3" or "0-2,5") of GROUP out of service until `elasticep undrain`.

    They serve until all others run in a view without them.
    """
    from elasticep.control.views import describe_ranks
    from elasticep.proto import controller_pb2

    named = parse_ranks(ranks)
    request = controller_pb2.DrainRequest(group=group, ranks=named, reason=reason)

    async def call(stub: "ControllerServiceAsyncStub", timeout_s: float) -> int:
        return (await stub.Drain(request, timeout=timeout_s)).epoch

    epoch = ask(options, call)
    view = f"epoch {epoch} is the first without" if epoch else "the group has no view yet"
    text = f"drained in group {group}: {describe_ranks(named)}; {view}"
    say(output, {"group": group, "ranks": named, "epoch": epoch}, text)
