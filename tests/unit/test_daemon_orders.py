"""What a node says to a controller that has just taken its hello."""

from types import SimpleNamespace
from typing import Any

from elasticep.config import DaemonConfig
from elasticep.proto import controller_pb2, types_pb2
from elasticep.runtime.node import Signal
from elasticep.runtime.orders import NodeOrders


class Keeper:
    """A seat that is in whatever state a test says."""

    def __init__(self, rank: int) -> None:
        self.seat = types_pb2.Seat(group="g", rank=rank, state=types_pb2.SEAT_STATE_READY)

    def message(self) -> types_pb2.Seat:
        return types_pb2.Seat.FromString(self.seat.SerializeToString())


def test_what_changes_while_the_hello_is_on_its_way_is_said_after_it() -> None:
    said: list[controller_pb2.NodeMessage] = []
    keepers = [Keeper(0), Keeper(1)]
    registry: Any = SimpleNamespace(keepers=lambda: keepers, offered={}, groups={})
    node: Any = SimpleNamespace(config=DaemonConfig(node="n", domain="d"), send=said.append)
    again: Any = SimpleNamespace(again=lambda: None)
    orders = NodeOrders(node, registry, again, Signal(), "session")
    hello = orders.hello()
    assert [seat.state for seat in hello.seats] == [types_pb2.SEAT_STATE_READY] * 2
    keepers[1].seat.state = types_pb2.SEAT_STATE_DEAD  # `send` drops it: nobody listens yet
    orders.connected()
    assert [(m.seat.rank, m.seat.state) for m in said] == [(1, types_pb2.SEAT_STATE_DEAD)]
    said.clear()
    orders.hello()
    orders.connected()
    assert said == []


def test_progress_is_told_every_second_however_long_a_node_may_be_silent() -> None:
    def orders(*timeouts_ms: int) -> NodeOrders:
        groups = {
            str(number): SimpleNamespace(
                config=SimpleNamespace(timeouts=SimpleNamespace(node_timeout_ms=ms))
            )
            for number, ms in enumerate(timeouts_ms)
        }
        registry: Any = SimpleNamespace(keepers=list, offered={}, groups=groups)
        node: Any = SimpleNamespace(config=DaemonConfig(node="n", domain="d"))
        unused: Any = None
        return NodeOrders(node, registry, unused, Signal(), "session")

    assert orders(60_000, 90_000).heartbeat_s() == 1.0
    assert orders(60_000, 1_500).heartbeat_s() == 0.5


def test_a_fence_of_a_group_without_a_seat_here_is_no_error() -> None:
    told: list[tuple[object, ...]] = []
    here = SimpleNamespace(stager=SimpleNamespace(expel=lambda *fence: told.append(fence)))
    registry: Any = SimpleNamespace(keepers=list, offered={"g": (0,)}, groups={"h": here})
    node: Any = SimpleNamespace(config=DaemonConfig(node="n", domain="d"))
    unused: Any = None
    orders = NodeOrders(node, registry, unused, Signal(), "session")
    for group in ("g", "h"):  # every node of a group is told, also before its first seat
        fence = controller_pb2.Fence(group=group, rank=1, incarnation=1, epoch=2, reason="it died")
        orders.order(controller_pb2.ControllerMessage(fence=fence))
    assert told == [(1, 1, 2, "it died")]
