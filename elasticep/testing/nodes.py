"""Node daemons without processes: they speak the Session stream with a controller under test.

    async with FakeNodes(["127.0.0.1:7400"], {"a": [0, 1], "b": [2, 3]}, group="g") as nodes:
        await nodes.until(lambda: nodes.epoch == 1)

Seats become ready and attached when they are granted, views are staged when they come, and
`meet` lets all ranks pass a step barrier. What a test takes over, it switches off first.
"""

import asyncio
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

import grpc
import grpc.aio

from elasticep.config import TlsConfig
from elasticep.errors import Unavailable
from elasticep.proto import controller_pb2, controller_pb2_grpc, types_pb2
from elasticep.proto.controller_pb2 import NodeMessage
from elasticep.rpc import open_channel

WAIT_S: Final = 60.0
_LOOK_S: Final = 0.1
_RETRY_S: Final = 0.05
EMPTY, READY = types_pb2.SEAT_STATE_EMPTY, types_pb2.SEAT_STATE_READY
ATTACHED, DEAD = types_pb2.SEAT_STATE_ATTACHED, types_pb2.SEAT_STATE_DEAD


@dataclass(slots=True)
class FakeSeat:
    """One seat of a fake node."""

    group: str
    rank: int
    incarnation: int = 0
    state: types_pb2.SeatState.ValueType = EMPTY
    epoch: int = 0
    cause: str = ""
    staged: set[int] = field(default_factory=set)

    def message(self) -> types_pb2.Seat:
        """What the node says of it."""
        return types_pb2.Seat(
            group=self.group,
            rank=self.rank,
            incarnation=self.incarnation,
            state=self.state,
            epoch=self.epoch,
            cause=self.cause,
        )


class FakeNode:
    """One node.

    Args:
        name: its name.
        seats: what it offers.
        addresses: of the controllers, tried in turn.
        tls: for addresses beyond this host.
    """

    def __init__(
        self,
        name: str,
        seats: Iterable[FakeSeat],
        addresses: Sequence[str],
        tls: TlsConfig | None = None,
    ) -> None:
        self.name = name
        self.seats = {seat.rank: seat for seat in seats}
        self.addresses = list(addresses)
        self.auto = True  # answers proposals and fences by itself
        self.attach = True  # starts workers and engines when seats are granted
        self.beats = True
        self.sessions = 0
        self.views: dict[int, types_pb2.View] = {}
        self.orders: list[controller_pb2.ControllerMessage] = []
        self.error = ""  # how the last session ended
        self.session_id = uuid.uuid4().hex  # of the process, as a daemon's: sessions share it
        self.changed = asyncio.Event()
        self._tls = tls or TlsConfig()
        self._outbox: asyncio.Queue[NodeMessage] | None = None
        self._answered = False
        self._task: asyncio.Task[None] | None = None

    # ---- the stream

    def start(self) -> None:
        """Connect, and connect again whenever the session ends."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Vanish without a word."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        self._outbox, self._answered = None, False

    @property
    def connected(self) -> bool:
        """Whether a controller answered the hello of the present session."""
        return self._answered

    async def _run(self) -> None:
        while True:
            for address in self.addresses:
                await self._one(address)
            await asyncio.sleep(_RETRY_S)

    async def _one(self, address: str) -> None:
        async with open_channel(address, self._tls) as channel:
            call = controller_pb2_grpc.ControllerServiceStub(channel).Session()
            writer: asyncio.Task[None] | None = None
            try:
                # What is said from here on is not in the hello, and follows it.
                hello, self._outbox = self.hello(), asyncio.Queue()
                await call.write(NodeMessage(hello=hello))
                async for order in call:
                    if writer is None:
                        self._answered, self.sessions = True, self.sessions + 1
                        writer = asyncio.create_task(self._write(call))
                    self._obey(order)
                    self._notify()
            except grpc.aio.AioRpcError as error:
                self.error = error.details() or error.code().name
            except asyncio.InvalidStateError as error:
                self.error = str(error)
            finally:
                self._outbox, self._answered = None, False
                if writer is not None:
                    writer.cancel()
                    await asyncio.gather(writer, return_exceptions=True)
                call.cancel()
                self._notify()

    async def _write(
        self,
        call: "grpc.aio.StreamStreamCall[NodeMessage, controller_pb2.ControllerMessage]",
    ) -> None:
        while (outbox := self._outbox) is not None:
            try:
                message = await asyncio.wait_for(outbox.get(), 0.1)
            except TimeoutError:
                if not self.beats:
                    continue
                message = NodeMessage(heartbeat=controller_pb2.NodeHeartbeat())
            await call.write(message)
            self._notify()  # time passes, too

    def hello(self) -> controller_pb2.NodeHello:
        """The first message of a session."""
        return controller_pb2.NodeHello(
            endpoint=types_pb2.NodeEndpoint(
                node=self.name,
                domain="test",
                grpc_address=f"unix:///tmp/{self.name}.sock",
                fd_socket=f"/tmp/{self.name}.fd",  # noqa: S108 - nothing is made there
            ),
            session_id=self.session_id,
            seats=[seat.message() for seat in self.seats.values()],
        )

    def send(self, message: NodeMessage) -> None:
        """Say something, if a session is open."""
        if self._outbox is not None:
            self._outbox.put_nowait(message)

    def tell(self, seat: FakeSeat) -> None:
        """Say how a seat is."""
        self.send(NodeMessage(seat=seat.message()))
        self._notify()

    def _notify(self) -> None:
        self.changed.set()

    # ---- what it does

    def _obey(self, order: controller_pb2.ControllerMessage) -> None:
        body = order.WhichOneof("body")
        if body == "heartbeat" or _group(order) not in {s.group for s in self.seats.values()}:
            return  # a store that tests share knows groups of theirs, with nodes of the same names
        self.orders.append(order)
        if body == "proposal":
            view = order.proposal.view
            self.views[view.epoch] = view
        if body == "grant":
            if self.auto and self.attach:
                self.grant(order.grant)
        elif not self.auto:
            return
        elif body == "fence":
            seat = self.seats.get(order.fence.rank)
            if seat is not None and seat.incarnation == order.fence.incarnation:
                self.kill(seat.rank, order.fence.reason)
        elif body == "proposal":
            for rank in order.proposal.stage_ranks:
                self.stage(rank, order.proposal.view.epoch)

    def grant(self, grant: controller_pb2.SeatGrant) -> None:
        """Worker and engine of a granted seat come up."""
        if grant.incarnation <= self.seats[grant.rank].incarnation:
            return
        seat = FakeSeat(grant.config.name, grant.rank, grant.incarnation, READY)
        self.seats[grant.rank] = seat
        self.tell(seat)
        seat.state = ATTACHED
        self.tell(seat)

    def stage(self, rank: int, epoch: int, error: str = "") -> None:
        """Say that a rank staged an epoch, or cannot."""
        seat = self.seats[rank]
        if not error:
            seat.staged.add(epoch)
        self.send(
            NodeMessage(
                staged=controller_pb2.Staged(
                    group=seat.group,
                    epoch=epoch,
                    rank=rank,
                    incarnation=seat.incarnation,
                    error=error,
                )
            )
        )
        self._notify()

    def adopt(self, rank: int, epoch: int) -> None:
        """Say that a rank runs in an epoch."""
        seat = self.seats[rank]
        seat.epoch = epoch
        self.send(
            NodeMessage(
                adopted=controller_pb2.Adopted(
                    group=seat.group, epoch=epoch, rank=rank, incarnation=seat.incarnation
                )
            )
        )
        self._notify()

    def kill(self, rank: int, cause: str = "worker died") -> None:
        """The rank's worker dies; the node cleans up."""
        seat = self.seats[rank]
        seat.cause, seat.epoch = cause, 0
        seat.staged.clear()
        for state in (DEAD, EMPTY):
            seat.state = state
            self.tell(seat)


class FakeNodes:
    """Several nodes of one group.

    Args:
        addresses: of the controllers.
        ranks: node -> ranks that it offers.
        group: the group's name.
        tls: for addresses beyond this host.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        ranks: Mapping[str, Iterable[int]],
        group: str,
        tls: TlsConfig | None = None,
    ) -> None:
        self.nodes = {
            name: FakeNode(name, (FakeSeat(group, r) for r in offered), addresses, tls)
            for name, offered in ranks.items()
        }

    async def __aenter__(self) -> Self:
        for node in self.nodes.values():
            node.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for node in self.nodes.values():
            await node.stop()

    def of(self, rank: int) -> FakeNode:
        """The node that offers a rank."""
        return next(node for node in self.nodes.values() if rank in node.seats)

    @property
    def latest(self) -> types_pb2.View | None:
        """The newest view that any node heard of."""
        views = [v for n in self.nodes.values() for v in n.views.values()]
        return max(views, key=lambda view: view.epoch, default=None)

    @property
    def epoch(self) -> int:
        """The newest view's epoch, 0 before the first."""
        return self.latest.epoch if self.latest else 0

    @property
    def members(self) -> list[int]:
        """The newest view's ranks."""
        return [member.rank for member in self.latest.members] if self.latest else []

    def staged_by_all(self) -> bool:
        """Whether every attached member of the newest view has staged it."""
        view = self.latest
        if view is None:
            return False
        seats = [self.of(m.rank).seats[m.rank] for m in view.members]
        mine = [s for s, m in zip(seats, view.members, strict=True) if _same(s, m)]
        return bool(mine) and all(view.epoch in s.staged or s.epoch >= view.epoch for s in mine)

    async def meet(self) -> int:
        """All ranks meet at a step barrier and adopt the newest view; returns its epoch."""
        await self.until(self.staged_by_all, "all members staged the view")
        view = self.latest
        assert view is not None
        for member in view.members:
            node = self.of(member.rank)
            if _same(node.seats[member.rank], member):
                node.adopt(member.rank, view.epoch)
        return int(view.epoch)

    async def until(
        self, condition: Callable[[], bool], what: str = "", wait_s: float = WAIT_S
    ) -> None:
        """Wait for a condition on these nodes, or on their controller, which wakes nobody here;
        `Unavailable` tells how the nodes are when it fails.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + wait_s
        while not condition():
            for node in self.nodes.values():
                node.changed.clear()
            waits = [asyncio.ensure_future(n.changed.wait()) for n in self.nodes.values()]
            try:
                left = max(0.0, end - loop.time())
                await asyncio.wait(
                    waits, timeout=min(_LOOK_S, left), return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                for wait in waits:
                    wait.cancel()
            if left <= 0:
                states = {n.name: (n.connected, n.error, n.seats) for n in self.nodes.values()}
                raise Unavailable(f"not within {wait_s} s: {what or condition}; {states}")


def _group(order: controller_pb2.ControllerMessage) -> str:
    match order.WhichOneof("body"):
        case "proposal":
            return order.proposal.view.group
        case "grant":
            return order.grant.config.name
        case "fence":
            return order.fence.group
        case "forgotten":
            return order.forgotten.group
        case _:
            return order.policies.group


def _same(seat: FakeSeat, member: types_pb2.Member) -> bool:
    return seat.incarnation == member.incarnation and seat.state == ATTACHED
