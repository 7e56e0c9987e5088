"""What `GetCluster` answers: the cluster's state in words. Pure."""

from elasticep.control.cluster import Cluster
from elasticep.control.membership import Membership
from elasticep.control.seats import Phase, Seat
from elasticep.proto import controller_pb2


def cluster_status(
    cluster: Cluster, leader: str, group: str, now_ms: int
) -> controller_pb2.GetClusterResponse:
    """Groups (all, or the one named) and nodes.

    Raises:
        UnknownGroup: there is no group of that name.
    """
    if group:
        memberships = [cluster.membership(group)]
    else:
        memberships = [cluster.groups[name] for name in sorted(cluster.groups)]
    return controller_pb2.GetClusterResponse(
        leader=leader,
        groups=[group_status(membership) for membership in memberships],
        nodes=[
            controller_pb2.NodeStatus(
                endpoint=node.endpoint.to_proto(),
                connected=node.connected,
                last_heard_ms_ago=max(0, now_ms - node.heard_ms),
            )
            for _, node in sorted(cluster.nodes.items())
        ],
    )


def group_status(membership: Membership) -> controller_pb2.GroupStatus:
    """One group: every seat that was ever given out or is held back."""
    view = membership.view
    return controller_pb2.GroupStatus(
        config=membership.config.to_proto(),
        view=view.to_proto(with_placement=False) if view else None,
        adopted_epoch=membership.adopted_epoch,
        ranks=[
            controller_pb2.RankStatus(
                rank=seat.rank,
                incarnation=seat.incarnation,
                node=seat.node,
                state=str(seat.phase),
                epoch=seat.epoch,
                reason=_reason(seat),
            )
            for _, seat in sorted(membership.seats.items())
            if seat.incarnation or seat.held
        ],
        history=membership.history,
        waiting=membership.waiting,
        lost_experts=len(view.lost) if view else 0,
    )


def _reason(seat: Seat) -> str:
    if seat.held:
        return seat.held
    if seat.phase in (Phase.FENCED, Phase.GONE):
        return seat.why
    if seat.phase is Phase.JOINING:
        return "attached" if seat.attached else "no engine is attached"
    if seat.phase is Phase.SUSPECTED:
        return "others wait for it"
    return ""
