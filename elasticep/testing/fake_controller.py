"""A controller that does what a test says, for tests of daemons alone.

It serves `ControllerService` in this process, records what nodes say, grants seats that are empty
(unless told not to), and sends whatever orders a test gives it.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any, Final

import grpc

from elasticep.errors import GroupMismatch
from elasticep.group import GroupConfig
from elasticep.proto import controller_pb2, controller_pb2_grpc, types_pb2
from elasticep.rpc import DETAILS_KEY, status_of

DEADLINE_S: Final = 60.0
_HEARTBEAT_S: Final = 0.2


class FakeController(controller_pb2_grpc.ControllerServiceServicer):
    """Serves on a Unix socket in `folder`.

    Attributes:
        auto_grant: whether empty seats of known groups are granted at once.
        groups: configs of `create_group`, by name.
        messages: what nodes said, as (node, message), oldest first.
    """

    def __init__(self, folder: Path, name: str = "controller") -> None:
        self.address = f"unix://{folder}/{name}.sock"
        self.auto_grant = True
        self.groups: dict[str, types_pb2.GroupConfig] = {}
        self.messages: list[tuple[str, controller_pb2.NodeMessage]] = []
        self.endpoints: dict[str, types_pb2.NodeEndpoint] = {}
        self.seats: dict[tuple[str, int], types_pb2.Seat] = {}
        self._lock = threading.Condition()
        self._orders: dict[str, queue.Queue[controller_pb2.ControllerMessage | None]] = {}
        self._server = grpc.server(futures.ThreadPoolExecutor(16))
        controller_pb2_grpc.add_ControllerServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        self._server.start()

    def close(self) -> None:
        """Drop every node."""
        with self._lock:
            for orders in self._orders.values():
                orders.put(None)
        self._server.stop(0).wait()

    # ---- the service

    def CreateGroup(  # noqa: N802
        self, request: controller_pb2.CreateGroupRequest, context: Any
    ) -> controller_pb2.CreateGroupResponse:
        """Accept any group, once, as it is."""
        known = self.groups.get(request.config.name)
        try:
            if known is not None:
                GroupConfig.from_proto(known).require_same(GroupConfig.from_proto(request.config))
        except GroupMismatch as error:
            code, content = status_of(error)
            context.set_trailing_metadata(((DETAILS_KEY, content),))
            context.abort(code, str(error))
        if known is None:
            self.create_group(request.config)
        return controller_pb2.CreateGroupResponse(created=known is None)

    def WatchView(  # noqa: N802
        self, request: controller_pb2.WatchViewRequest, context: Any
    ) -> Iterator[types_pb2.View]:
        """No views: daemons do not ask."""
        return iter(())

    def GetCluster(  # noqa: N802
        self, request: controller_pb2.GetClusterRequest, context: Any
    ) -> controller_pb2.GetClusterResponse:
        """Nothing: daemons do not ask."""
        return controller_pb2.GetClusterResponse()

    def Drain(  # noqa: N802
        self, request: controller_pb2.DrainRequest, context: Any
    ) -> controller_pb2.DrainResponse:
        """No effect: tests propose views themselves."""
        return controller_pb2.DrainResponse()

    def Undrain(  # noqa: N802
        self, request: controller_pb2.UndrainRequest, context: Any
    ) -> controller_pb2.UndrainResponse:
        """No effect: tests propose views themselves."""
        return controller_pb2.UndrainResponse()

    def SetPolicy(  # noqa: N802
        self, request: controller_pb2.SetPolicyRequest, context: Any
    ) -> controller_pb2.SetPolicyResponse:
        """No effect: `order` tells nodes of policies."""
        return controller_pb2.SetPolicyResponse(policies=request.policies)

    def NodeOff(  # noqa: N802
        self, request: controller_pb2.NodeOffRequest, context: Any
    ) -> controller_pb2.NodeOffResponse:
        """No effect: no seat is kept."""
        return controller_pb2.NodeOffResponse()

    def DeleteGroup(  # noqa: N802
        self, request: controller_pb2.DeleteGroupRequest, context: Any
    ) -> controller_pb2.DeleteGroupResponse:
        """No effect: tests order nodes to forget groups themselves."""
        return controller_pb2.DeleteGroupResponse()

    def Rebalance(  # noqa: N802
        self, request: controller_pb2.RebalanceRequest, context: Any
    ) -> controller_pb2.RebalanceResponse:
        """No effect: tests propose views themselves."""
        return controller_pb2.RebalanceResponse()

    def WatchRebalance(  # noqa: N802
        self, request: controller_pb2.WatchRebalanceRequest, context: Any
    ) -> Iterator[controller_pb2.RebalanceStatus]:
        """Nothing goes on."""
        return iter(())

    def Session(  # noqa: N802
        self, request_iterator: Iterator[controller_pb2.NodeMessage], context: Any
    ) -> Iterator[controller_pb2.ControllerMessage]:
        """One node's stream."""
        hello = next(request_iterator)
        node = hello.hello.endpoint.node
        orders: queue.Queue[controller_pb2.ControllerMessage | None] = queue.Queue()
        with self._lock:
            self._orders[node] = orders
            self.endpoints[node] = hello.hello.endpoint
            self._heard(node, hello)
        reader = threading.Thread(
            target=self._read, args=(node, request_iterator, orders), daemon=True
        )
        reader.start()
        yield controller_pb2.ControllerMessage(heartbeat=controller_pb2.ControllerHeartbeat())
        while True:
            try:
                order = orders.get(timeout=_HEARTBEAT_S)
            except queue.Empty:
                order = controller_pb2.ControllerMessage(
                    heartbeat=controller_pb2.ControllerHeartbeat()
                )
            if order is None:
                return
            yield order

    def _read(self, node: str, requests: Iterator[Any], orders: "queue.Queue[Any]") -> None:
        try:
            for message in requests:
                with self._lock:
                    self._heard(node, message)
        except grpc.RpcError:
            pass
        finally:
            orders.put(None)

    def _heard(self, node: str, message: controller_pb2.NodeMessage) -> None:
        self.messages.append((node, message))
        kind = message.WhichOneof("body")
        if kind == "hello":
            for seat in message.hello.seats:
                self._seat(node, seat)
        elif kind == "seat":
            self._seat(node, message.seat)
        self._lock.notify_all()

    def _seat(self, node: str, seat: types_pb2.Seat) -> None:
        self.seats[seat.group, seat.rank] = seat
        empty = seat.state == types_pb2.SEAT_STATE_EMPTY
        if empty and self.auto_grant and seat.group in self.groups:
            self._order(node, self._grant_of(seat.group, seat.rank, seat.incarnation + 1))

    def _grant_of(
        self, group: str, rank: int, incarnation: int
    ) -> controller_pb2.ControllerMessage:
        grant = controller_pb2.SeatGrant(
            config=self.groups[group], rank=rank, incarnation=incarnation
        )
        return controller_pb2.ControllerMessage(grant=grant)

    def _order(self, node: str, order: controller_pb2.ControllerMessage) -> None:
        self._orders[node].put(order)

    # ---- what a test does

    def create_group(self, config: types_pb2.GroupConfig) -> None:
        """Know a group and grant its empty seats."""
        with self._lock:
            self.groups[config.name] = config
            for (group, rank), seat in list(self.seats.items()):
                if group == config.name and seat.state == types_pb2.SEAT_STATE_EMPTY:
                    node = self.node_of(group, rank)
                    self._order(node, self._grant_of(group, rank, seat.incarnation + 1))

    def node_of(self, group: str, rank: int) -> str:
        """The node that last spoke of a seat."""
        for node, message in reversed(self.messages):
            kind = message.WhichOneof("body")
            found = message.hello.seats if kind == "hello" else [message.seat]
            if kind in ("hello", "seat") and any((s.group, s.rank) == (group, rank) for s in found):
                return node
        raise KeyError((group, rank))

    def grant(self, node: str, group: str, rank: int, incarnation: int) -> None:
        """Grant one seat."""
        self._order(node, self._grant_of(group, rank, incarnation))

    def propose(self, view: types_pb2.View, stage_ranks: dict[str, list[int]]) -> None:
        """Propose a view to every node; `stage_ranks` says who stages it where."""
        for node in list(self._orders):
            proposal = controller_pb2.Proposal(
                view=view,
                nodes=list(self.endpoints.values()),
                stage_ranks=stage_ranks.get(node, []),
            )
            self._order(node, controller_pb2.ControllerMessage(proposal=proposal))

    def fence(self, node: str, fence: controller_pb2.Fence) -> None:
        """Send a fence."""
        self._order(node, controller_pb2.ControllerMessage(fence=fence))

    def order(self, node: str, order: controller_pb2.ControllerMessage) -> None:
        """Send anything."""
        self._order(node, order)

    def wait(
        self,
        matches: Callable[[str, controller_pb2.NodeMessage], Any],
        what: str,
        deadline_s: float = DEADLINE_S,
    ) -> controller_pb2.NodeMessage:
        """The first message, old or new, that matches."""
        end = time.monotonic() + deadline_s
        with self._lock:
            seen = 0
            while True:
                for node, message in self.messages[seen:]:
                    seen += 1
                    if matches(node, message):
                        return message
                left = end - time.monotonic()
                if left <= 0:
                    said = [m.WhichOneof("body") for _, m in self.messages[-20:]]
                    raise TimeoutError(f"{what}: not within {deadline_s:g} s; last heard {said}")
                self._lock.wait(left)

    def wait_seat(
        self, group: str, rank: int, state: int, incarnation: int, deadline_s: float = DEADLINE_S
    ) -> types_pb2.Seat:
        """Wait until a seat was reported in a state, by hello or by itself."""

        def of(message: controller_pb2.NodeMessage) -> list[types_pb2.Seat]:
            kind = message.WhichOneof("body")
            if kind == "hello":
                return list(message.hello.seats)
            return [message.seat] if kind == "seat" else []

        def found(message: controller_pb2.NodeMessage) -> types_pb2.Seat | None:
            for seat in of(message):
                if (seat.group, seat.rank, seat.state, seat.incarnation) == (
                    group,
                    rank,
                    state,
                    incarnation,
                ):
                    return seat
            return None

        name = types_pb2.SeatState.Name(state)  # type: ignore[arg-type]
        what = f"rank {rank} incarnation {incarnation} of {group} in {name}"
        seat = found(self.wait(lambda _, m: found(m) is not None, what, deadline_s))
        assert seat is not None
        return seat

    def forget(self) -> None:
        """Forget what was said so far."""
        with self._lock:
            self.messages.clear()
