"""`elasticep policy`."""

import json
from typing import TYPE_CHECKING, Any

import click

from elasticep.cli.operator import ask, controller_options
from elasticep.errors import ConfigError

if TYPE_CHECKING:
    from elasticep.proto.controller_pb2 import GroupPolicies
    from elasticep.proto.controller_pb2_grpc import ControllerServiceAsyncStub


@controller_options
@click.command("policy")
@click.argument("group")
@click.option("--set", "changes", multiple=True, metavar="NAME=VALUE",
              help="Change a policy; may be given several times.")  # fmt: skip
@click.option("--output", default="text", type=click.Choice(["text", "json"]))
def command(group: str, changes: tuple[str, ...], output: str, **options: Any) -> None:
    """Show GROUP's policies, or change them while it runs.

    They hold until they are changed again, also under another controller.
    """
    from elasticep.policies import Policies, change_from_text
    from elasticep.proto import controller_pb2

    settings = dict(_pair(change) for change in changes)
    request = controller_pb2.SetPolicyRequest(group=group, policies=change_from_text(settings))

    async def call(stub: "ControllerServiceAsyncStub", timeout_s: float) -> "GroupPolicies":
        if settings:
            return (await stub.SetPolicy(request, timeout=timeout_s)).policies
        asked = controller_pb2.GetClusterRequest(group=group)
        return (await stub.GetCluster(asked, timeout=timeout_s)).groups[0].policies

    plain = Policies.from_proto(ask(options, call)).to_dict()
    if output == "json":
        click.echo(json.dumps(plain))
        return
    for name, value in plain.items():
        click.echo(f"{name:<18}  {str(value).lower() if isinstance(value, bool) else value}")


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text!r} has no '='; write --set name=value")
    return name, value
