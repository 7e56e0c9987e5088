"""The daemon's stream to the controller: connects, says hello, reports, and obeys.

While no controller answers, everything on the node goes on. Reports made meanwhile are not kept:
the hello after the next connection tells every seat's present state, and what the runners have
staged and adopted is read from their headers again.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

import grpc

from elasticep.errors import ConfigError, ElasticEPError, Unavailable
from elasticep.proto import controller_pb2, controller_pb2_grpc, types_pb2
from elasticep.rpc import hung_up, open_channel, typed_error
from elasticep.runtime.limits import MAX_OUTBOX, Limits
from elasticep.runtime.node import Node, Signal

if TYPE_CHECKING:
    SessionCall = grpc.aio.StreamStreamCall[
        controller_pb2.NodeMessage, controller_pb2.ControllerMessage
    ]

_FIRST_BACKOFF_S: Final = 0.05
_MAX_BACKOFF_S: Final = 1.0
_TELL_AGAIN_S: Final = 60.0


class Orders(Protocol):
    """What the stream hands on; must not raise for a bad message, see `Session`."""

    def hello(self) -> controller_pb2.NodeHello:
        """This node and all its seats as they are now."""

    def heartbeat(self) -> controller_pb2.NodeHeartbeat:
        """Progress of every attached rank."""

    def heartbeat_s(self) -> float:
        """Interval of heartbeats."""

    def connected(self) -> None:
        """The controller took the hello."""

    def order(self, message: controller_pb2.ControllerMessage) -> None:
        """Do what the controller says."""


class Session:
    """Keeps one stream to whichever controller leads.

    Args:
        node: the daemon's shared parts.
        addresses: of all controllers; tried in turn.
        orders: gets what comes.
    """

    def __init__(self, node: Node, addresses: Sequence[str], orders: Orders) -> None:
        self._node = node
        self._limits: Limits = node.limits
        self._addresses = tuple(addresses)
        self._orders = orders
        self._outbox: asyncio.Queue[controller_pb2.NodeMessage] | None = None
        self._channel: grpc.aio.Channel | None = None
        self._task: asyncio.Task[None] | None = None
        self._unwritten = 0
        self._why: dict[str, str] = {}  # how the last try with each controller ended
        self._told: set[str] = set()  # controllers whose refusal was logged
        self.changed = Signal()
        self.connections = 0  # made so far; with each the controller knows the hello and no more

    @property
    def connected(self) -> bool:
        """Whether a controller has taken this node's hello."""
        return self._outbox is not None

    def start(self) -> None:
        """Begin to connect, for good."""
        if self._addresses:
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Leave the controller."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    def send(self, message: controller_pb2.NodeMessage) -> None:
        """Report something; dropped while nobody listens."""
        if self._outbox is None:
            return
        if self._outbox.qsize() >= MAX_OUTBOX:
            # It does not read. The stream starts anew, with a hello that says all that holds.
            self._outbox = None
            self._node.log.warning("controller.not_reading", waiting=MAX_OUTBOX)
            return
        self._unwritten += 1
        self._outbox.put_nowait(message)

    async def flush(self, timeout_s: float) -> None:
        """Wait until everything reported so far is written."""
        await self.changed.until(lambda: self._outbox is None or not self._unwritten, timeout_s)

    async def create_group(self, config: types_pb2.GroupConfig, timeout_s: float) -> None:
        """Let the controller create a group, or confirm it.

        Raises:
            Unavailable: no controller within the time.
            ElasticEPError: what the controller answered.
        """
        if not self._addresses:
            raise Unavailable("this daemon knows no controller; set daemon.controllers")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        if not await self.changed.until(lambda: self.connected, timeout_s):
            raise Unavailable(
                f"no controller answered within {timeout_s:g} s at {', '.join(self._addresses)}"
            )
        assert self._channel is not None
        stub = controller_pb2_grpc.ControllerServiceStub(self._channel)
        request = controller_pb2.CreateGroupRequest(config=config)
        try:
            await stub.CreateGroup(request, timeout=max(0.001, deadline - loop.time()))
        except grpc.aio.AioRpcError as error:
            raise typed_error(error, f"creating group {config.name!r}") from None

    # ---- the stream

    async def _run(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        loop = asyncio.get_running_loop()
        tell_s = loop.time() + self._limits.unreachable_s
        while True:
            for address in self._addresses:
                if await self._one(address):
                    backoff_s = _FIRST_BACKOFF_S
                    tell_s = loop.time() + self._limits.unreachable_s
            if loop.time() >= tell_s:
                self._node.log.warning("controller.unreachable", why=dict(self._why))
                tell_s = loop.time() + _TELL_AGAIN_S
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, _MAX_BACKOFF_S)

    async def _one(self, address: str) -> bool:
        """One connection to one controller, until it ends. True if it took the hello."""
        served = False
        refused = False
        why = ""
        try:
            channel = open_channel(address, self._node.config.tls)
        except ElasticEPError as error:
            self._node.log.error("controller.tls", address=address, error=str(error))
            return False
        try:
            stub = controller_pb2_grpc.ControllerServiceStub(channel)
            call = stub.Session()
            first = await self._hello(call)
            self._channel = channel
            self._outbox = asyncio.Queue()
            self._unwritten = 0
            served = True
            self.connections += 1
            self._told.clear()
            self._node.log.info("controller.connected", address=address)
            self._node.metrics.connected.set(1)
            self.changed.notify()
            self._orders.connected()
            why = await self._serve(call, first)
        except grpc.aio.AioRpcError as error:
            answer = typed_error(error, "the session")
            why, refused = str(answer), isinstance(answer, ConfigError)
            if hung_up(address, why):
                why += (
                    "; who listens there wants other certificates, or none: compare daemon.tls "
                    "with the controller's tls, and see when they run out"
                )
        except (TimeoutError, EOFError, asyncio.InvalidStateError) as error:
            why = str(error) or "no answer in time"
        except Exception as error:  # whatever it sent: the node goes on, with a new connection
            self._node.log.exception("controller.session_failed", address=address)
            why = repr(error)
        finally:
            self._outbox = self._channel = None
            self._node.metrics.connected.set(0)
            self.changed.notify()
            await channel.close()
        self._why[address] = why
        if refused:
            self._refused(address, why)
        else:
            level = self._node.log.warning if served else self._node.log.debug
            level("controller.lost", address=address, why=why)
        return served

    def _refused(self, address: str, why: str) -> None:
        """It is there, and will not have this node: somebody must do something."""
        level = self._node.log.debug if address in self._told else self._node.log.error
        self._told.add(address)
        level("controller.refused", address=address, why=why)

    async def _hello(self, call: "SessionCall") -> controller_pb2.ControllerMessage:
        async with asyncio.timeout(self._limits.connect_s):
            await call.write(controller_pb2.NodeMessage(hello=self._orders.hello()))
            return await self._read(call)

    @staticmethod
    async def _read(call: "SessionCall") -> controller_pb2.ControllerMessage:
        message = await call.read()
        if message is grpc.aio.EOF:
            raise EOFError("the controller ended the stream")
        assert isinstance(message, controller_pb2.ControllerMessage)
        return message

    async def _serve(self, call: "SessionCall", first: controller_pb2.ControllerMessage) -> str:
        self._obey(first)
        tasks = {
            asyncio.create_task(part)
            for part in (self._reader(call), self._writer(call), self._heartbeats())
        }
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            call.cancel()

    async def _reader(self, call: "SessionCall") -> str:
        while True:
            try:
                async with asyncio.timeout(self._limits.controller_silence_s):
                    message = await self._read(call)
            except TimeoutError:
                return f"silent for {self._limits.controller_silence_s:g} s"
            self._obey(message)

    def _obey(self, message: controller_pb2.ControllerMessage) -> None:
        try:
            self._orders.order(message)
        except ElasticEPError as error:
            self._node.log.error(
                "controller.order_refused", order=message.WhichOneof("body"), error=str(error)
            )

    async def _writer(self, call: "SessionCall") -> str:
        outbox = self._outbox
        while outbox is not None and outbox is self._outbox:
            message = await outbox.get()
            await call.write(message)
            self._unwritten -= 1
            if not self._unwritten:
                self.changed.notify()
        return "it does not read"

    async def _heartbeats(self) -> str:
        while self._outbox is not None:
            self.send(controller_pb2.NodeMessage(heartbeat=self._orders.heartbeat()))
            await asyncio.sleep(self._orders.heartbeat_s())
        return "it does not read"
