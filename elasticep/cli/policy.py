"""`elasticep policy`."""

import json
from collections.abc import Iterable
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
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(group: str, changes: tuple[str, ...], output: str, **options: Any) -> None:
    """Show GROUP's policies, or change them while it runs.

    They hold until they are changed again, also under another controller.
    """
    settings = pairs(changes)
    show(set_policies(group, settings, options) if settings else _present(group, options), output)


def pairs(changes: Iterable[str]) -> dict[str, str]:
    """Name -> value of `--set` options.

    Raises:
        ConfigError: one is no name=value, or a name is given two values.
    """
    settings: dict[str, str] = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise ConfigError(f"--set {change!r} has no '='; write --set name=value")
        if settings.setdefault(name, value) != value:
            raise ConfigError(f"--set gives {name} both {settings[name]!r} and {value!r}")
    return settings


def set_policies(group: str, settings: dict[str, str], options: dict[str, Any]) -> "GroupPolicies":
    """Change them; returns those that hold now."""
    from elasticep.policies import change_from_text
    from elasticep.proto import controller_pb2

    request = controller_pb2.SetPolicyRequest(group=group, policies=change_from_text(settings))

    async def call(stub: "ControllerServiceAsyncStub", timeout_s: float) -> "GroupPolicies":
        return (await stub.SetPolicy(request, timeout=timeout_s)).policies

    return ask(options, call)


def _present(group: str, options: dict[str, Any]) -> "GroupPolicies":
    from elasticep.proto import controller_pb2

    async def call(stub: "ControllerServiceAsyncStub", timeout_s: float) -> "GroupPolicies":
        asked = controller_pb2.GetClusterRequest(group=group)
        return (await stub.GetCluster(asked, timeout=timeout_s)).groups[0].policies

    return ask(options, call)


def show(policies: "GroupPolicies", output: str, *, only: str = "") -> None:
    """Print them, or those under one name: as lines, or as JSON."""
    from elasticep.policies import Policies, flat

    plain = Policies.from_proto(policies).to_dict()
    if output == "json":
        click.echo(json.dumps(plain[only] if only else plain))
        return
    for name, value in flat(plain).items():
        if name.startswith(only):
            text = str(value).lower() if isinstance(value, bool) else value
            click.echo(f"{name:<26}  {text}")
