"""What the controller hears of this node, and what it may order."""

from typing import Final

from elasticep.errors import ConfigError, ElasticEPError, UnknownRank
from elasticep.group import GroupConfig
from elasticep.proto import controller_pb2, types_pb2
from elasticep.runtime import seats
from elasticep.runtime.group import Group, Registry
from elasticep.runtime.liveness.poller import Poller
from elasticep.runtime.node import Node, Signal
from elasticep.runtime.seats import SeatState

_DEFAULT_HEARTBEAT_S: Final = 0.5
_LEAST_HEARTBEAT_S: Final = 0.02
_MOST_HEARTBEAT_S: Final = 1.0  # heartbeats carry the progress by which hangs are judged
_HEARTBEATS_PER_TIMEOUT: Final = 3


class NodeOrders:
    """The daemon's side of the controller's stream; see `session.Orders`.

    Args:
        node: the daemon's shared parts.
        registry: its groups.
        poller: reports waits again after a hello.
        groups_changed: notified when a group has come.
        session_id: new for every daemon process.
        grpc_address: where other daemons reach this one; set when it listens.
    """

    def __init__(
        self,
        node: Node,
        registry: Registry,
        poller: Poller,
        groups_changed: Signal,
        session_id: str,
    ) -> None:
        self._node = node
        self._registry = registry
        self._poller = poller
        self._groups_changed = groups_changed
        self._session_id = session_id
        self._hello_seats: dict[tuple[str, int], types_pb2.Seat] = {}
        self.grpc_address = f"unix://{node.config.grpc_socket}"

    # ---- said

    def hello(self) -> controller_pb2.NodeHello:
        """This node and all its seats as they are now."""
        config = self._node.config
        for group in self._registry.groups.values():
            group.grants.clear()  # what holds is granted again
        seats_now = [keeper.message() for keeper in self._registry.keepers()]
        self._hello_seats = {(seat.group, seat.rank): seat for seat in seats_now}
        for name in self._registry.offered:
            if name not in self._registry.groups:
                seats_now += self._offers(name)
        return controller_pb2.NodeHello(
            endpoint=types_pb2.NodeEndpoint(
                node=config.node,
                domain=config.domain,
                grpc_address=self.grpc_address,
                fd_socket=config.fd_socket,
            ),
            session_id=self._session_id,
            seats=seats_now,
        )

    def _offers(self, group: str) -> list[types_pb2.Seat]:
        """The seats of a group that is not known here."""
        return [
            types_pb2.Seat(group=group, rank=rank, state=types_pb2.SEAT_STATE_EMPTY)
            for rank in self._registry.offered.get(group, ())
        ]

    def connected(self) -> None:
        """The hello was taken: say again what no hello carries, and what changed since it left."""
        for keeper in self._registry.keepers():
            seat = keeper.message()
            if self._hello_seats.get((seat.group, seat.rank)) != seat:
                self._node.send(controller_pb2.NodeMessage(seat=seat))
        for group in self._registry.groups.values():
            group.stager.resend()
        self._poller.again()

    def heartbeat(self) -> controller_pb2.NodeHeartbeat:
        """Progress of every attached rank."""
        beat = controller_pb2.NodeHeartbeat()
        for keeper in self._registry.keepers():
            status = keeper.status()
            weights = keeper.group.weights
            epoch, done, total = (0, 0, 0) if weights is None else weights.progress(keeper.rank)
            attached = keeper.seat.state is SeatState.ATTACHED
            if status is not None and (attached or epoch):
                beat.ranks.add(
                    group=keeper.group.name,
                    rank=keeper.rank,
                    incarnation=keeper.seat.incarnation,
                    progress=status.progress,
                    warmup=status.warmup,
                    staging_epoch=epoch,
                    staging_done_bytes=done,
                    staging_total_bytes=total,
                )
        return beat

    def heartbeat_s(self) -> float:
        """A third of the shortest node timeout of the groups here, at most 1 s."""
        timeouts = [
            group.config.timeouts.node_timeout_ms for group in self._registry.groups.values()
        ]
        if not timeouts:
            return _DEFAULT_HEARTBEAT_S
        third = min(timeouts) / 1000 / _HEARTBEATS_PER_TIMEOUT
        return min(_MOST_HEARTBEAT_S, max(_LEAST_HEARTBEAT_S, third))

    # ---- heard

    def order(self, message: controller_pb2.ControllerMessage) -> None:
        """Do what the controller says. Raises `ElasticEPError` when it cannot be done."""
        match message.WhichOneof("body"):
            case "grant":
                self._grant(message.grant)
            case "proposal":
                view = message.proposal.view
                group = self._group(view.group)
                for rank in message.proposal.stage_ranks:
                    if rank not in group.keepers:
                        self._node.log.error(
                            "proposal.foreign_rank", group=view.group, epoch=view.epoch, rank=rank
                        )
                group.stager.propose(message.proposal)
            case "fence":
                fence = message.fence
                known = self._registry.groups.get(fence.group)
                if known is not None:  # else no seat was granted here that could hear of it
                    known.stager.expel(fence.rank, fence.incarnation, fence.epoch, fence.reason)
            case "policies":
                known = self._registry.groups.get(message.policies.group)
                if known is not None:  # else it comes with the first grant
                    known.set_policies(message.policies.policies)
            case "forgotten":
                self._forget(message.forgotten)
            case _:
                return  # a heartbeat, or an order of a later version

    def _grant(self, grant: controller_pb2.SeatGrant) -> None:
        if self._node.stopping:
            return
        config = GroupConfig.from_proto(grant.config)
        if grant.rank not in self._registry.offered.get(config.name, ()):
            raise UnknownRank(
                f"rank {grant.rank} of group {config.name!r} was granted to node "
                f"{self._node.config.node!r}, which does not offer it"
            )
        known = self._registry.groups.get(config.name)
        if known is not None and known.leaving:
            known.grants[grant.rank] = grant  # nobody else has the seat before that is over
            return
        group = self._registry.ensure(config)
        if grant.HasField("policies"):
            group.set_policies(grant.policies)
        self._groups_changed.notify()
        keeper = group.keepers.get(grant.rank)
        if keeper is None:
            raise UnknownRank(
                f"rank {grant.rank} is beyond geometry.max_ranks "
                f"({config.geometry.max_ranks}) of group {config.name!r}"
            )
        allocate = group.on_gpu and keeper.memory is None
        keeper.apply(seats.Granted(grant.incarnation, allocate))

    def _forget(self, gone: controller_pb2.GroupForgotten) -> None:
        group = self._registry.groups.get(gone.group)
        if group is None:
            return
        self._node.log.info("group.deleted", group=gone.group, why=gone.reason)
        group.leave(gone.incarnation, gone.epoch, gone.reason, self._forgotten)
        self._groups_changed.notify()

    def _forgotten(self, group: Group) -> None:
        """Nothing runs of a group that was deleted: its name is free."""
        if self._registry.groups.get(group.name) is not group:
            return
        self._registry.remove(group.name)
        self._node.log.info("group.forgotten", group=group.name)
        self._node.save()
        for grant in group.grants.values():
            try:
                self._grant(grant)
            except ElasticEPError as error:
                self._node.log.error("controller.order_refused", order="grant", error=str(error))
        for seat in self._offers(group.name):
            if seat.rank not in group.grants:
                self._node.send(controller_pb2.NodeMessage(seat=seat))
        self._groups_changed.notify()

    def _group(self, name: str) -> Group:
        group = self._registry.groups.get(name)
        if group is None:
            raise ConfigError(f"an order about group {name!r}, of which no seat was granted here")
        return group
