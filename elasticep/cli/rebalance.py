"""`elasticep rebalance`."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from elasticep.cli.operator import ask, controller_options, say
from elasticep.cli.policy import pairs, set_policies, show
from elasticep.errors import ConfigError

if TYPE_CHECKING:
    from elasticep.proto.controller_pb2 import (
        PlanSummary,
        RebalanceRequest,
        RebalanceResponse,
        RebalanceStatus,
    )
    from elasticep.proto.controller_pb2_grpc import ControllerServiceAsyncStub

_WATCH_S = 86_400.0
_ACTIONS = ("dry_run", "export", "force", "pause", "resume", "plan_file")
_FORMS = ("elasticep", "sglang", "vllm", "vllm-ascend")


@controller_options
@click.command("rebalance")
@click.argument("group")
@click.option("--dry-run", is_flag=True, help="Only show the plan.")
@click.option("--force", is_flag=True, help="Also when it is not worth it.")
@click.option("--pause", is_flag=True, help="Move nothing in the background until --resume.")
@click.option(
    "--resume", is_flag=True, help="Take a pause back; let experts of an imported plan move again."
)
@click.option("--reason", default="", help="Why it is paused; shown in status.")
@click.option("--set", "changes", multiple=True, metavar="NAME=VALUE",
              help="Change a setting of [rebalance] while the group runs, and print all of them; "
              "may be given several times.")  # fmt: skip
@click.option("--watch", is_flag=True, help="Follow it until nothing is under way.")
@click.option(
    "--export",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    help="Write the plan as JSON, and do nothing else.",
)
@click.option("--form", type=click.Choice(_FORMS), default="elasticep", show_default=True)
@click.option(
    "--import",
    "plan_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Go to the placement in a JSON file of any form, and keep it until --resume or --force.",
)
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(group: str, output: str, **options: Any) -> None:
    """Plan a rebalance of GROUP's experts by its load, and carry it out if it is worth it."""
    if options["changes"]:
        _set(group, output, options)
        return
    request = _request(group, options)

    async def call(stub: "ControllerServiceAsyncStub", timeout_s: float) -> "RebalanceResponse":
        return await stub.Rebalance(request, timeout=timeout_s)

    answer = ask(options, call)
    if options["export"] is not None:
        _export(answer, options["export"], options["form"], output)
    elif output == "json":
        click.echo(json.dumps(as_dict(answer), indent=None if options["watch"] else 2))
    else:
        _print(request, answer)
    if options["watch"]:
        _watch(group, output, options)


def _set(group: str, output: str, options: dict[str, Any]) -> None:
    others = [name for name in (*_ACTIONS, "watch") if options[name]]
    if others:
        raise ConfigError(f"--set and {_flags(others)} do not go together; choose one")
    settings = {f"rebalance.{name}": text for name, text in pairs(options["changes"]).items()}
    show(set_policies(group, settings, options), output, only="rebalance")


def _flags(names: Iterable[str]) -> str:
    """Options as they are typed."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names).replace("plan-file", "import")


def _request(group: str, options: dict[str, Any]) -> "RebalanceRequest":
    from elasticep.proto import controller_pb2 as pb
    from elasticep.rpc import MAX_PLAN_BYTES

    actions = {
        "dry_run": pb.REBALANCE_ACTION_DRY_RUN,
        "export": pb.REBALANCE_ACTION_DRY_RUN,
        "force": pb.REBALANCE_ACTION_FORCE,
        "pause": pb.REBALANCE_ACTION_PAUSE,
        "resume": pb.REBALANCE_ACTION_RESUME,
        "plan_file": pb.REBALANCE_ACTION_IMPORT,
    }
    chosen = {actions[name]: name for name in actions if options[name]}
    if len(chosen) > 1:
        raise ConfigError(f"{_flags(chosen.values())} do not go together; choose one")
    request = pb.RebalanceRequest(group=group, reason=options["reason"])
    if chosen:
        request.action = next(iter(chosen))
    request.for_engines = options["export"] is not None and options["form"] != "elasticep"
    if options["plan_file"] is not None:
        try:
            request.plan_json = options["plan_file"].read_text()
        except OSError as error:
            raise ConfigError(f"cannot read {options['plan_file']}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{options['plan_file']} is no text, so no JSON") from None
        if request.ByteSize() > MAX_PLAN_BYTES:
            raise ConfigError(
                f"{options['plan_file']} makes a request of {request.ByteSize()} bytes; a "
                f"controller takes {MAX_PLAN_BYTES}: write it without spaces and line breaks, "
                "or in a form without weights"
            )
        try:
            json.loads(request.plan_json)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{options['plan_file']} is no JSON: {error}") from None
    return request


def _export(answer: "RebalanceResponse", file: Path, form: str, output: str) -> None:
    from elasticep.placement import Placement, export_json

    if not answer.placement:
        raise ConfigError(f"there is no plan to write: {answer.reason}")
    text = export_json(Placement.from_bytes(answer.placement), list(answer.members), form)
    if str(file) == "-":
        click.echo(text)
        return
    try:
        file.write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from None
    reason = answer.plan.reason
    say(output, {"file": str(file), "reason": reason}, f"{file}: {reason}")


def as_dict(answer: "RebalanceResponse") -> dict[str, Any]:
    """The answer as plain values; the form that `--output json` prints."""
    plain: dict[str, Any] = {"accepted": answer.accepted, "reason": answer.reason}
    if answer.HasField("plan"):
        plan = answer.plan
        names = [field.name for field in plan.DESCRIPTOR.fields if field.name != "layers"]
        plain["plan"] = {name: getattr(plan, name) for name in names} | {
            "layers": [
                {field.name: getattr(layer, field.name) for field in layer.DESCRIPTOR.fields}
                for layer in plan.layers
            ]
        }
    return plain | {"status": status_dict(answer.status)}


def status_dict(status: "RebalanceStatus") -> dict[str, Any]:
    """How far the background is, as plain values."""
    plain = {
        field.name: getattr(status, field.name)
        for field in status.DESCRIPTOR.fields
        if field.name != "last"
    }
    if status.HasField("last"):
        last = status.last
        plain["last"] = {field.name: getattr(last, field.name) for field in last.DESCRIPTOR.fields}
    return plain


def _print(request: "RebalanceRequest", answer: "RebalanceResponse") -> None:
    from elasticep.proto import controller_pb2 as pb

    if request.action == pb.REBALANCE_ACTION_PAUSE:
        click.echo(f"paused: {answer.status.paused}")
        return
    if request.action == pb.REBALANCE_ACTION_RESUME:
        click.echo("resumed")
        return
    for line in plan_lines(answer.plan):
        click.echo(line)
    if request.action == pb.REBALANCE_ACTION_DRY_RUN:
        click.echo(f"nothing was done; {answer.reason}")
    elif answer.accepted:
        click.echo(f"it is carried out: {answer.reason}")
        if answer.status.held:
            click.echo(
                "it is kept: nothing moves by load any more, until elasticep rebalance "
                f"{request.group} --resume (or --force)"
            )
    else:
        click.echo(f"nothing is done: {answer.reason}")


def plan_lines(plan: "PlanSummary") -> list[str]:
    """A plan in a few lines."""
    size = f", {plan.move_bytes / 1e6:.1f} MB" if plan.move_bytes else ""
    change = f"{plan.imbalance_before:.3f} -> {plan.imbalance_after:.3f}"
    worst = f"worst layer {plan.worst_before:.3f} -> {plan.worst_after:.3f}"
    lines = [
        f"imbalance      {change} ({worst}, bound {plan.bound:.3f})",
        f"moves          {plan.moves} copies{size}, in {plan.stages} views",
        f"single copies  {plan.single_before} -> {plan.single_after}",
    ]
    if plan.lost_before or plan.lost_after:
        lines.append(f"lost experts   {plan.lost_before} -> {plan.lost_after}")
    return [*lines, f"plan           {plan.reason}"]


def _watch(group: str, output: str, options: dict[str, Any]) -> None:
    from elasticep.proto import controller_pb2 as pb

    request = pb.WatchRebalanceRequest(group=group)

    async def call(stub: "ControllerServiceAsyncStub", timeout_s: float) -> None:
        async for status in stub.WatchRebalance(request, timeout=timeout_s):
            if output == "json":
                click.echo(json.dumps(status_dict(status)))
            else:
                click.echo(status_line(status))
            if status.doing == "idle" and not status.asked:
                return

    ask(options | {"timeout": _WATCH_S}, call)


def status_line(status: "RebalanceStatus") -> str:
    """How far the background is, in a line."""
    parts = [status.doing]
    if status.stages:
        size = f", {status.bytes_done / 1e6:.1f} of {status.bytes / 1e6:.1f} MB"
        parts.append(
            f"stage {status.stage + 1} of {status.stages}, {status.moves_done} of {status.moves} "
            f"copies{size if status.bytes else ''}"
        )
    if status.paused:
        parts.append(f"paused ({status.paused})")
    if status.asked:
        parts.append(f"{status.asked} is asked for")
    if status.why and status.why != status.paused:
        parts.append(status.why)
    if status.doing == "idle" and status.HasField("last"):
        last = status.last
        ago = f"{last.ended_ms_ago / 1_000:.0f} s ago"
        parts.append(f"the last one was {'done' if last.done else 'abandoned'} {ago}: {last.why}")
    return "; ".join(parts)
