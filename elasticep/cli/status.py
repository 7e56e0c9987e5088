"""`elasticep status`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from elasticep.cli.node_status import show
from elasticep.cli.operator import ask, controller_options, print_parts
from elasticep.cli.rebalance import status_dict, status_line
from elasticep.config import default_socket_dir
from elasticep.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from elasticep.proto.controller_pb2 import GetClusterResponse, GroupStatus, NodeStatus
    from elasticep.proto.controller_pb2_grpc import ControllerServiceAsyncStub

_COLOURS = {
    "active": "green",
    "staged": "cyan",
    "joining": "cyan",
    "suspected": "yellow",
    "draining": "yellow",
    "fenced": "red",
    "gone": "red",
}
_NODE_COLOURS = {"connected": "green", "away": "yellow", "gone": "red"}
_HISTORY_SHOWN = 8


@controller_options
@click.command("status")
@click.argument("group", required=False)
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option(
    "--daemon",
    is_flag=False,
    flag_value="",
    metavar="[SOCKET]",
    help="Ask the daemon of this host instead: its seats, its memory for weights and what is being "
    "put there. A Unix socket; without one the default is asked.",
)
def command(group: str | None, output: str, daemon: str | None, **options: Any) -> None:
    """Show leader, nodes, members, views and what a group waits for."""
    if daemon is not None:
        if group is not None:
            raise ConfigError(f"a daemon tells all it has; leave the group {group!r} away")
        path = daemon or str(Path(default_socket_dir()) / "daemon.sock")
        show(path, output, options["timeout"])
        return
    from elasticep.proto import controller_pb2

    request = controller_pb2.GetClusterRequest(group=group or "")

    async def call(
        stub: "ControllerServiceAsyncStub", timeout_s: float
    ) -> controller_pb2.GetClusterResponse:
        return await stub.GetCluster(request, timeout=timeout_s)

    answer = ask(options, call)
    if output == "json":
        click.echo(json.dumps(as_dict(answer), indent=2))
    else:
        print_parts(_parts(answer))


def as_dict(answer: "GetClusterResponse") -> dict[str, Any]:
    """The answer as plain values; the form that `--output json` prints."""
    return {
        "leader": answer.leader,
        "nodes": [
            {
                "node": node.endpoint.node,
                "domain": node.endpoint.domain,
                "address": node.endpoint.grpc_address,
                "connected": node.connected,
                "state": node.state,
                "last_heard_ms_ago": node.last_heard_ms_ago,
                "unheard": node.unheard,
            }
            for node in answer.nodes
        ],
        "groups": [_group_dict(group) for group in answer.groups],
    }


def _group_dict(group: "GroupStatus") -> dict[str, Any]:
    return {
        "group": group.config.name,
        "epoch": group.view.epoch,
        "adopted_epoch": group.adopted_epoch,
        "members": [member.rank for member in group.view.members],
        "lost_experts": group.lost_experts,
        "waiting": group.waiting,
        "load": {
            "known": group.load.known,
            "imbalance": group.load.imbalance,
            "worst_imbalance": group.load.worst_imbalance,
            "tokens": group.load.tokens,
            "layers": list(group.load.layers),
        },
        "rebalance": status_dict(group.rebalance),
        "ranks": [
            {
                "rank": rank.rank,
                "incarnation": rank.incarnation,
                "node": rank.node,
                "state": rank.state,
                "epoch": rank.epoch,
                "reason": rank.reason,
            }
            for rank in group.ranks
        ],
        "history": list(group.history),
    }


def _parts(answer: "GetClusterResponse") -> "list[RenderableType]":
    from rich.markup import escape
    from rich.table import Table

    parts: list[RenderableType] = [f"leader: {escape(answer.leader)}"]
    nodes = Table("node", "domain", "daemon", "state", "heard", "", box=None, pad_edge=False)
    for node in answer.nodes:
        state = f"[{_NODE_COLOURS.get(node.state, 'white')}]{node.state}[/]"
        where = node.endpoint
        names = (where.node, where.domain[:12], where.grpc_address)
        kept = _kept(answer, where.node) if node.state == "gone" else ""
        nodes.add_row(*map(escape, names), state, _heard(node), escape(kept))
    if answer.nodes:
        parts.append(nodes)
    for group in answer.groups:
        parts += _group_parts(group)
    return parts


def _heard(node: "NodeStatus") -> str:
    seconds = node.last_heard_ms_ago / 1_000
    ago = f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    ago = ago if seconds < 7_200 else f"{seconds / 3_600:.1f} h"
    return f"not by this leader, for {ago}" if node.unheard else f"{ago} ago"


def _kept(answer: "GetClusterResponse", node: str) -> str:
    """What is kept for a node that is gone, and how to give it to others."""
    kept = [
        f"{group.config.name} {', '.join(map(str, ranks))}"
        for group in answer.groups
        if (ranks := [r.rank for r in group.ranks if r.node == node and r.state != "gone"])
    ]
    return f"keeps ranks of {'; '.join(kept)} (elasticep node off {node})" if kept else ""


def _group_parts(group: "GroupStatus") -> "list[RenderableType]":
    from rich.markup import escape
    from rich.table import Table

    epoch = f"epoch {group.view.epoch}" if group.view.epoch else "no view yet"
    adopted = f", adopted {group.adopted_epoch}" if group.view.epoch else ""
    parts: list[RenderableType] = [f"\ngroup [bold]{group.config.name}[/]: {epoch}{adopted}"]
    if group.lost_experts:
        parts.append(f"[red]{group.lost_experts} experts have no replica[/]")
    if group.waiting:
        parts.append(f"[yellow]{escape(group.waiting)}[/]")
    if group.view.epoch:
        load = group.load
        figures = f"{load.imbalance:.3f}, worst layer {load.worst_imbalance:.3f}"
        what = f"{load.tokens} tokens counted" if load.known else "with equal loads; none are known"
        parts.append(f"imbalance {figures} ({what})")
        parts.append(f"background: {escape(status_line(group.rebalance))}")
    ranks = Table("rank", "incarnation", "node", "state", "epoch", "", box=None, pad_edge=False)
    for rank in group.ranks:
        state = f"[{_COLOURS.get(rank.state, 'white')}]{rank.state}[/]"
        reason = escape(rank.reason)
        ranks.add_row(
            *(str(rank.rank), str(rank.incarnation), escape(rank.node)),
            *(state, str(rank.epoch), reason),
        )
    if group.ranks:
        parts.append(ranks)
    parts += [escape(line) for line in group.history[-_HISTORY_SHOWN:]]
    return parts
