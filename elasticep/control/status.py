"""What `GetCluster` answers: the cluster's state in words. Pure."""

from collections.abc import Mapping

from elasticep.control.background import Background
from elasticep.control.cluster import TAKEOVER_GRACE_MS, Cluster
from elasticep.control.membership import Membership
from elasticep.control.planning import imbalances
from elasticep.control.rebalance import Rebalancer
from elasticep.control.seats import Phase, Seat
from elasticep.control.views import View
from elasticep.proto import controller_pb2


def cluster_status(
    cluster: Cluster, published: Mapping[str, View], leader: str, group: str, now_ms: int
) -> controller_pb2.GetClusterResponse:
    """Groups (all, or the one named) and nodes.

    `published` are the views that are in the store: of one that is not, the next leader may know
    nothing, and give its number to another.

    Raises:
        UnknownGroup: there is no group of that name.
    """
    if group:
        memberships = [cluster.membership(group)]
    else:
        memberships = [cluster.groups[name] for name in sorted(cluster.groups)]
    return controller_pb2.GetClusterResponse(
        leader=leader,
        groups=[
            group_status(m, published.get(m.config.name), cluster.background[m.config.name], now_ms)
            for m in memberships
        ],
        nodes=[_node_status(cluster, name, now_ms) for name in sorted(cluster.nodes)],
    )


def _node_status(cluster: Cluster, name: str, now_ms: int) -> controller_pb2.NodeStatus:
    node = cluster.nodes[name]
    unheard = not node.session_id
    since_ms = node.heard_ms - (TAKEOVER_GRACE_MS if unheard else 0)
    return controller_pb2.NodeStatus(
        endpoint=node.endpoint.to_proto(),
        connected=node.connected,
        last_heard_ms_ago=max(0, now_ms - since_ms),
        state=cluster.state_of(name, now_ms),
        unheard=unheard,
    )


def group_status(
    membership: Membership, view: View | None, background: Background, now_ms: int
) -> controller_pb2.GroupStatus:
    """One group, with the view that is in the store, and every seat that was ever given out or is
    held back.
    """
    return controller_pb2.GroupStatus(
        config=membership.config.to_proto(),
        view=view.to_proto(with_placement=False) if view else None,
        adopted_epoch=min(membership.adopted_epoch, view.epoch if view else 0),
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
            if seat.node or seat.held
        ],
        history=membership.history,
        waiting=membership.waiting,
        lost_experts=len(view.lost) if view else 0,
        load=_load_status(background, view) if view else None,
        rebalance=rebalance_status(background.rebalancer, now_ms),
        policies=membership.policies.to_proto(),
    )


def _load_status(background: Background, view: View) -> controller_pb2.LoadStatus:
    each = imbalances(view.placement, background.around, view.ranks)
    return controller_pb2.LoadStatus(
        known=background.around.loads is not None,
        imbalance=float(each.mean()),
        worst_imbalance=float(each.max()),
        tokens=background.loads.counted,
        layers=each.tolist(),
    )


def rebalance_status(rebalancer: Rebalancer, now_ms: int) -> controller_pb2.RebalanceStatus:
    """What the background does and did."""
    run, last = rebalancer.run, rebalancer.last
    status = controller_pb2.RebalanceStatus(
        doing=rebalancer.doing,
        why=rebalancer.why,
        paused=rebalancer.paused,
        asked=rebalancer.asked,
        progress_ms_ago=max(0, now_ms - rebalancer.progress_ms),
        looked_ms_ago=max(0, now_ms - rebalancer.alive_ms),
        completed=rebalancer.completed,
        stuck=rebalancer.stuck,
        held=rebalancer.held,
    )
    if run is not None:
        status.stage, status.stages = run.stage, len(run.planned.path)
        status.moves_done, status.moves = run.moves_done, sum(run.moves)
        size = run.planned.job.policy.bytes_of(0)
        status.bytes = sum(run.moves) * size
        # What is copied on to GPUs is headway, too, and no bytes of a move.
        here = min(rebalancer.loaded_bytes, sum(run.moves[run.stage : run.stage + 1]) * size)
        status.bytes_done = run.bytes_done + here
    if last is not None:
        status.last.CopyFrom(
            controller_pb2.RebalanceResult(
                done=last.done,
                why=last.why,
                imbalance_before=last.before,
                imbalance_after=last.after,
                moves=last.moves,
                move_bytes=last.move_bytes,
                took_ms=last.took_ms,
                ended_ms_ago=max(0, now_ms - last.at_ms),
            )
        )
    return status


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
