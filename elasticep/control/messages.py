"""From messages of nodes to events, and from effects to messages. Every field is checked here."""

from collections.abc import Mapping
from typing import Final

from elasticep.control import events as ev
from elasticep.control.cluster import MAX_SEATS
from elasticep.control.events import SeatReport, SeatState
from elasticep.control.loads import MAX_REPORT_BYTES
from elasticep.control.records import Endpoint
from elasticep.errors import ConfigError
from elasticep.group import GroupConfig
from elasticep.policies import Policies
from elasticep.proto import controller_pb2, types_pb2

MAX_EXPERTS: Final = 65_536  # named in one answer
_MAX_NAME: Final = 253
_MAX_ADDRESS: Final = 512
_MAX_TEXT: Final = 512  # sentences are cut, not refused
_MAX_GROUP: Final = 63


def _name(what: str, value: str, limit: int = _MAX_NAME) -> str:
    if not 1 <= len(value) <= limit or "/" in value or not value.isprintable():
        raise ConfigError(
            f"{what} is {value[:40]!r} with {len(value)} characters; it must be 1 to {limit} "
            "printable ones without '/'"
        )
    return value


def _text(value: str) -> str:
    cut = value[:_MAX_TEXT]
    return "".join(c if c.isprintable() else " " for c in cut)


def read_hello(
    hello: controller_pb2.NodeHello,
) -> tuple[Endpoint, str, list[tuple[str, SeatReport]]]:
    """Endpoint, session id and seats of a node; `ConfigError` names what is wrong."""
    given = hello.endpoint
    for what, value in (("grpc_address", given.grpc_address), ("fd_socket", given.fd_socket)):
        if len(value) > _MAX_ADDRESS:
            raise ConfigError(f"{what} has {len(value)} characters; at most {_MAX_ADDRESS}")
    endpoint = Endpoint(
        _name("the node's name", given.node),
        _name("the node's domain", given.domain),
        given.grpc_address,
        given.fd_socket,
    )
    if len(hello.seats) > MAX_SEATS:
        raise ConfigError(
            f"node {given.node} offers {len(hello.seats)} seats; at most {MAX_SEATS} are allowed"
        )
    session_id = _name("session_id", hello.session_id)
    return endpoint, session_id, [read_seat(seat) for seat in hello.seats]


def read_seat(seat: types_pb2.Seat) -> tuple[str, SeatReport]:
    """Group and report of one seat."""
    if int(seat.state) not in {int(state) for state in SeatState}:
        raise ConfigError(f"a seat of group {seat.group[:40]!r} has the state {seat.state}")
    report = SeatReport(
        seat.rank, seat.incarnation, SeatState(seat.state), seat.epoch, _text(seat.cause)
    )
    return _name("a group's name", seat.group, _MAX_GROUP), report


def read_events(node: str, message: controller_pb2.NodeMessage) -> list[tuple[str, ev.Event]]:
    """(group, event) pairs of a message after the hello; `ConfigError` when it is none of ours."""
    body = message.WhichOneof("body")
    if body == "seat":
        group, report = read_seat(message.seat)
        return [(group, ev.SeatChanged(node, report))]
    if body == "staged":
        return [(message.staged.group, _staged(node, message.staged))]
    if body == "adopted":
        return [(message.adopted.group, _adopted(node, message.adopted))]
    if body == "wait":
        return [(message.wait.group, _wait(node, message.wait))]
    if body == "heartbeat":
        if len(message.heartbeat.ranks) > MAX_SEATS:
            raise ConfigError(f"a heartbeat of node {node} has more than {MAX_SEATS} ranks")
        return [(rank.group, _progressed(node, rank)) for rank in message.heartbeat.ranks]
    if body == "load":
        return [(message.load.group, _load(node, message.load))]
    if body is None and message.ByteSize():
        return []  # of a later version: daemons may be upgraded before this controller is
    raise ConfigError(f"node {node} sent {body or 'an empty message'}, which has no place here")


def _staged(node: str, staged: controller_pb2.Staged) -> ev.Staged:
    if len(staged.unrestorable) > MAX_EXPERTS:
        raise ConfigError(
            f"node {node} names {len(staged.unrestorable)} experts; at most {MAX_EXPERTS} at a time"
        )
    return ev.Staged(
        node,
        staged.rank,
        staged.incarnation,
        staged.epoch,
        _text(staged.error),
        tuple((ref.layer, ref.expert) for ref in staged.unrestorable),
    )


def _adopted(node: str, adopted: controller_pb2.Adopted) -> ev.Adopted:
    return ev.Adopted(node, adopted.rank, adopted.incarnation, adopted.epoch, adopted.step)


def _progressed(node: str, rank: controller_pb2.RankProgress) -> ev.Progressed:
    return ev.Progressed(
        node,
        rank.rank,
        rank.incarnation,
        rank.progress,
        rank.warmup,
        rank.staging_epoch,
        rank.staging_done_bytes,
        rank.staging_total_bytes,
    )


def _load(node: str, load: controller_pb2.LoadReport) -> ev.LoadReport:
    if len(load.counters) > MAX_REPORT_BYTES:
        raise ConfigError(
            f"node {node} reports {len(load.counters)} bytes of load counters at once; at most "
            f"{MAX_REPORT_BYTES}"
        )
    return ev.LoadReport(
        node, load.rank, load.incarnation, load.memory, load.first_layer, load.counters
    )


def _wait(node: str, wait: controller_pb2.WaitReport) -> ev.Waits:
    return ev.Waits(
        node,
        wait.rank,
        wait.incarnation,
        wait.waits_for,
        _text(wait.phase),
        min(wait.waited_ms, 86_400_000),
        wait.progress,
    )


def grant_message(
    config: GroupConfig, grant: ev.Grant, policies: Policies
) -> controller_pb2.ControllerMessage:
    """The message of a grant."""
    return controller_pb2.ControllerMessage(
        grant=controller_pb2.SeatGrant(
            config=config.to_proto(),
            rank=grant.rank,
            incarnation=grant.incarnation,
            policies=policies.to_proto(),
        )
    )


def policies_message(group: str, tell: ev.Tell) -> controller_pb2.ControllerMessage:
    """The message that says which policies hold."""
    return controller_pb2.ControllerMessage(
        policies=controller_pb2.PoliciesChanged(group=group, policies=tell.policies.to_proto())
    )


def fence_message(group: str, fence: ev.Fence) -> controller_pb2.ControllerMessage:
    """The message of a fence."""
    return controller_pb2.ControllerMessage(
        fence=controller_pb2.Fence(
            group=group,
            rank=fence.rank,
            incarnation=fence.incarnation,
            epoch=fence.epoch,
            reason=fence.reason,
        )
    )


def forget_message(group: str, forget: ev.Forget) -> controller_pb2.ControllerMessage:
    """The message that says that a group was deleted."""
    return controller_pb2.ControllerMessage(
        forgotten=controller_pb2.GroupForgotten(
            group=group,
            incarnation=forget.incarnation,
            epoch=forget.epoch,
            reason=forget.reason,
        )
    )


def proposal_message(
    propose: ev.Propose, view: types_pb2.View, endpoints: Mapping[str, Endpoint]
) -> controller_pb2.ControllerMessage:
    """The message of a proposal, with the endpoints of all members' nodes.

    Args:
        propose: what a node is to be told.
        view: the message of its view, which all nodes share: the tables are large.
        endpoints: of all nodes.
    """
    names = sorted({member.node for member in propose.view.members})
    return controller_pb2.ControllerMessage(
        proposal=controller_pb2.Proposal(
            view=view,
            nodes=[endpoints[name].to_proto() for name in names if name in endpoints],
            stage_ranks=propose.ranks,
            leaving=[
                controller_pb2.Leaving(rank=rank, reason=why) for rank, why in propose.leaving
            ],
        )
    )
