"""`elasticep status --daemon`: what one node's daemon holds, from itself."""

import json
from typing import TYPE_CHECKING, Any

import click

from elasticep.cli.operator import print_parts
from elasticep.errors import Unavailable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from elasticep.proto.node_pb2 import ArenaStatus, GetStatusResponse


def show(socket: str, output: str, timeout_s: float) -> None:
    """Ask the daemon behind a Unix socket and print what it says.

    Args:
        socket: path.
        output: "text" or "json".
        timeout_s: seconds to wait for the answer.

    Raises:
        Unavailable: no daemon answers there.
    """
    import grpc

    from elasticep.proto import node_pb2, node_pb2_grpc

    with grpc.insecure_channel(f"unix:{socket}") as channel:
        try:
            answer = node_pb2_grpc.NodeServiceStub(channel).GetStatus(
                node_pb2.GetStatusRequest(), timeout=timeout_s
            )
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise Unavailable(
                    f"the daemon at {socket} did not answer within {timeout_s:g} s: is its process "
                    "stopped, or short of processor time or file descriptors? See its log, or wait "
                    "longer with --timeout"
                ) from None
            raise Unavailable(
                f"no daemon answers at {socket}: {error.details()}; is `elasticep daemon` running "
                "on this host, with that socket_dir?"
            ) from None
    if output == "json":
        click.echo(json.dumps(as_dict(answer), indent=2))
    else:
        _print(answer)


def as_dict(answer: "GetStatusResponse") -> dict[str, Any]:
    """The answer as plain values; the form that `--output json` prints."""
    return {
        "node": answer.node,
        "domain": answer.domain,
        "controller_connected": answer.controller_connected,
        "mover_pid": answer.mover_pid,
        "seats": [
            {
                "group": seat.seat.group,
                "rank": seat.seat.rank,
                "incarnation": seat.seat.incarnation,
                "worker_pid": seat.worker_pid,
                "engine_pid": seat.engine_pid,
                "epoch": seat.seat.epoch,
                "step": seat.step,
                "torn_steps": seat.torn_steps,
                "staged_epochs": list(seat.staged_epochs),
                "wait": seat.wait,
                "attach_waits_for": seat.attach_waits_for,
            }
            for seat in answer.seats
        ],
        "arenas": [_arena_dict(arena) for arena in answer.arenas],
        "checkpoints": [
            {"group": found.group, "path": found.path, "problem": found.problem}
            for found in answer.checkpoints
        ],
    }


def _arena_dict(arena: "ArenaStatus") -> dict[str, Any]:
    return {
        "group": arena.group,
        "rank": None if arena.backup else arena.rank,
        "backup": arena.backup,
        "bytes": arena.bytes,
        "slots": arena.slots,
        "valid": arena.valid,
        "filling": arena.filling,
        "staging_epoch": arena.staging_epoch,
        "done_bytes": arena.done_bytes,
        "total_bytes": arena.total_bytes,
        "copying_epoch": arena.copying_epoch,
        "copied_bytes": arena.copied_bytes,
        "copying_bytes": arena.copying_bytes,
    }


def _print(answer: "GetStatusResponse") -> None:
    from rich.markup import escape
    from rich.table import Table

    link = "[green]connected[/]" if answer.controller_connected else "[red]not connected[/]"
    parts: list[RenderableType] = [
        f"node {escape(answer.node)}, domain {escape(answer.domain[:12])}; controller: {link}"
    ]
    seats = Table("rank", "incarnation", "worker", "engine", "epoch", "step", "torn", "waits for",
                  box=None, pad_edge=False)  # fmt: skip
    for seat in answer.seats:
        place = seat.seat
        seats.add_row(
            f"{place.group}/{place.rank}",
            str(place.incarnation),
            str(seat.worker_pid or "-"),
            str(seat.engine_pid or "-"),
            str(place.epoch),
            str(seat.step),
            str(seat.torn_steps),
            seat.wait,
        )
    if answer.seats:
        parts.append(seats)
    arenas = Table("weights", "MB", "slots", "valid", "filling", "", box=None, pad_edge=False)
    for arena in answer.arenas:
        name = f"{arena.group}/{'backup' if arena.backup else arena.rank}"
        size = f"{arena.bytes / 1e6:.1f}"
        arenas.add_row(
            name, size, str(arena.slots), str(arena.valid), str(arena.filling), _doing(arena)
        )
    if answer.arenas:
        parts += [
            arenas,
            f"mover: {f'process {answer.mover_pid}' if answer.mover_pid else 'none'}",
        ]
    parts += [
        f"[yellow]group {found.group} cannot be loaded from its checkpoint:[/] "
        f"{escape(found.problem)}"
        for found in answer.checkpoints
        if found.problem
    ]
    print_parts(parts)


def _doing(arena: "ArenaStatus") -> str:
    size = f"{arena.done_bytes / 1e6:.1f} of {arena.total_bytes / 1e6:.1f} MB"
    if arena.backup:
        return f"holds {size}"
    doing = [f"loads for epoch {arena.staging_epoch}: {size}"] if arena.staging_epoch else []
    if arena.copying_epoch:
        size = f"{arena.copied_bytes / 1e6:.1f} of {arena.copying_bytes / 1e6:.1f} MB"
        doing.append(f"to GPU for epoch {arena.copying_epoch}: {size}")
    return "; ".join(doing)
