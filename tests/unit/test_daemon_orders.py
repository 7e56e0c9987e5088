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
