"""`elasticep group create FILE`, `elasticep group show [NAME]`, `elasticep group delete NAME`."""

import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from elasticep.cli.operator import ask, controller_options, output_option, say
from elasticep.errors import ConfigError

if TYPE_CHECKING:
    from elasticep.proto.controller_pb2_grpc import ControllerServiceAsyncStub


@click.group("group")
def command() -> None:
    """Create, inspect and delete groups."""


@controller_options
@output_option
@command.command("create")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def create(file: Path, output: str, **options: Any) -> None:
    """Create the group that FILE (TOML) describes, or confirm that it exists as described."""
    from elasticep.group import GroupConfig
    from elasticep.proto import controller_pb2

    try:
        with file.open("rb") as stream:
            config = GroupConfig.from_toml_dict(tomllib.load(stream))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}") from None
    request = controller_pb2.CreateGroupRequest(config=config.to_proto())

    async def call(stub: "ControllerServiceAsyncStub", timeout_s: float) -> bool:
        return (await stub.CreateGroup(request, timeout=timeout_s)).created

    created = ask(options, call)
    text = f"group {config.name} {'created' if created else 'exists with this config'}"
    say(output, {"group": config.name, "created": created}, text)


@controller_options
@command.command("show")
@click.argument("name", required=False)
@click.option("--output", type=click.Choice(["json"]), default="json", show_default=True)
def show(name: str | None, output: str, **options: Any) -> None:
    """Print the config of one group, or of all, as JSON."""
    from elasticep.group import GroupConfig
    from elasticep.proto import controller_pb2

    request = controller_pb2.GetClusterRequest(group=name or "")

    async def call(
        stub: "ControllerServiceAsyncStub", timeout_s: float
    ) -> controller_pb2.GetClusterResponse:
        return await stub.GetCluster(request, timeout=timeout_s)

    configs = [GroupConfig.from_proto(g.config).to_dict() for g in ask(options, call).groups]
    click.echo(json.dumps(configs[0] if name else configs, indent=2))


@controller_options
@output_option
@command.command("delete")
@click.argument("name")
@click.option("--force", is_flag=True, help="Also while engines hold ranks: they are fenced.")
@click.option("--reason", default="", help="Why; shown to engines and in logs.")
def delete(name: str, force: bool, reason: str, output: str, **options: Any) -> None:
    """Delete the group NAME, or confirm that it is deleted.

    Refused while engines hold ranks of it. Its config, views, policies and loads are gone for good,
    its nodes let go of its memory, and the name is free for a group of any geometry.
    """
    from elasticep.control.views import describe_ranks
    from elasticep.proto import controller_pb2

    request = controller_pb2.DeleteGroupRequest(group=name, force=force, reason=reason)

    async def call(
        stub: "ControllerServiceAsyncStub", timeout_s: float
    ) -> controller_pb2.DeleteGroupResponse:
        return await stub.DeleteGroup(request, timeout=timeout_s)

    answer = ask(options, call)
    fenced = list(answer.fenced)
    ranks = f"; {describe_ranks(fenced)} {'was' if len(fenced) == 1 else 'were'} fenced"
    already = "" if answer.deleted else " already"
    text = f"group {name} is deleted{already}{ranks if fenced else ''}"
    say(output, {"group": name, "deleted": answer.deleted, "fenced": fenced}, text)
