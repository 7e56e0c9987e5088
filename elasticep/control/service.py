"""`ControllerService`: what nodes and operators call. No input of theirs ends the process."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import grpc.aio
from google.protobuf.message import DecodeError, Message
from structlog.typing import FilteringBoundLogger

from elasticep.control import events as ev
from elasticep.control import messages, operating
from elasticep.control.metrics import ControllerMetrics
from elasticep.control.session import NodeSession
from elasticep.control.status import cluster_status
from elasticep.control.term import Term
from elasticep.control.views import View
from elasticep.errors import ConfigError, ElasticEPError, NotLeader, Unavailable
from elasticep.group import GroupConfig
from elasticep.proto import controller_pb2, controller_pb2_grpc, types_pb2
from elasticep.rpc import abort

HELLO_TIMEOUT_S: Final = 5.0
DRAIN_TIMEOUT_S: Final = 10.0
_MAX_RANKS: Final = 4_096  # of one drain
_R = TypeVar("_R", bound=Message)
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Leads(Protocol):
    """What the service needs of the controller."""

    metrics: ControllerMetrics
    log: FilteringBoundLogger

    def leading(self) -> Term:
        """The term of office, or `NotLeader`."""

    @property
    def leader_address(self) -> str:
        """Where the leader is to be reached."""

    @property
    def name(self) -> str:
        """This controller."""


class ControllerService(controller_pb2_grpc.ControllerServiceServicer):
    """The gRPC face of a controller.

    Args:
        controller: who leads.
        check_names: a node's certificate must bear its name (mutual TLS).
    """

    def __init__(self, controller: Leads, *, check_names: bool) -> None:
        self._controller = controller
        self._check_names = check_names

    async def _typed(self, context: Context, work: Callable[[], Awaitable[_R]]) -> _R:
        try:
            return await work()
        except NotLeader as error:
            await abort(context, error, {"leader": self._controller.leader_address})
        except ElasticEPError as error:
            await abort(context, error)

    # ---- operators and engines

    async def CreateGroup(  # noqa: N802
        self, request: controller_pb2.CreateGroupRequest, context: Context
    ) -> controller_pb2.CreateGroupResponse:
        """Create a group, or confirm that it exists with the same config."""

        async def work() -> controller_pb2.CreateGroupResponse:
            term = self._controller.leading()
            created = await term.create_group(GroupConfig.from_proto(request.config))
            return controller_pb2.CreateGroupResponse(created=created)

        return await self._typed(context, work)

    async def GetCluster(  # noqa: N802
        self, request: controller_pb2.GetClusterRequest, context: Context
    ) -> controller_pb2.GetClusterResponse:
        """All groups, or one, with their members, views and nodes."""

        async def work() -> controller_pb2.GetClusterResponse:
            term = self._controller.leading()
            name, now_ms = self._controller.name, term.now_ms()
            return cluster_status(term.cluster, term.published, name, request.group, now_ms)

        return await self._typed(context, work)

    async def Drain(  # noqa: N802
        self, request: controller_pb2.DrainRequest, context: Context
    ) -> controller_pb2.DrainResponse:
        """Take ranks out of the view; answers when a view without them is proposed."""

        async def work() -> controller_pb2.DrainResponse:
            term = self._controller.leading()
            ranks = _ranks(request.ranks)
            reason = request.reason[: operating.MAX_REASON]
            await term.operate(request.group, ev.Drain(ranks, reason))
            membership = term.cluster.membership(request.group)
            if membership.view is None:
                return controller_pb2.DrainResponse(epoch=0)
            try:
                async with asyncio.timeout(DRAIN_TIMEOUT_S):
                    view = await term.wait_view(
                        request.group, lambda view: not set(view.ranks) & set(ranks)
                    )
            except TimeoutError:
                raise Unavailable(
                    f"the drain is noted, but no view without the ranks was proposed within "
                    f"{DRAIN_TIMEOUT_S:g} s: {membership.waiting or 'see elasticep status'}"
                ) from None
            return controller_pb2.DrainResponse(epoch=view.epoch)

        return await self._typed(context, work)

    async def Undrain(  # noqa: N802
        self, request: controller_pb2.UndrainRequest, context: Context
    ) -> controller_pb2.UndrainResponse:
        """Let ranks back in."""

        async def work() -> controller_pb2.UndrainResponse:
            term = self._controller.leading()
            await term.operate(request.group, ev.Undrain(_ranks(request.ranks)))
            return controller_pb2.UndrainResponse()

        return await self._typed(context, work)

    async def Rebalance(  # noqa: N802
        self, request: controller_pb2.RebalanceRequest, context: Context
    ) -> controller_pb2.RebalanceResponse:
        """Plan a rebalance, and carry it out in the background."""

        async def work() -> controller_pb2.RebalanceResponse:
            return await operating.rebalance(self._controller.leading(), request)

        return await self._typed(context, work)

    async def WatchRebalance(  # noqa: N802
        self, request: controller_pb2.WatchRebalanceRequest, context: Context
    ) -> AsyncIterator[controller_pb2.RebalanceStatus]:
        """How far the background is, after every change."""
        try:
            changes = operating.watch(self._controller.leading(), request.group)
            async with aclosing(changes):
                async for status in changes:
                    yield status
        except NotLeader as error:
            await abort(context, error, {"leader": self._controller.leader_address})
        except ElasticEPError as error:
            await abort(context, error)

    async def SetPolicy(  # noqa: N802
        self, request: controller_pb2.SetPolicyRequest, context: Context
    ) -> controller_pb2.SetPolicyResponse:
        """Change policies of a running group."""

        async def work() -> controller_pb2.SetPolicyResponse:
            term = self._controller.leading()
            membership = term.cluster.membership(request.group)
            policies = membership.policies.changed(request.policies)
            policies.apply(membership.config)  # refused before anything of it happens
            # Also when they hold already: the write of whoever asked before may be on its way.
            await term.operate(request.group, ev.SetPolicies(policies))
            return controller_pb2.SetPolicyResponse(policies=policies.to_proto())

        return await self._typed(context, work)

    async def NodeOff(  # noqa: N802
        self, request: controller_pb2.NodeOffRequest, context: Context
    ) -> controller_pb2.NodeOffResponse:
        """Take an operator's word that nothing runs on a node any more."""

        async def work() -> controller_pb2.NodeOffResponse:
            term = self._controller.leading()
            said = request.reason[: operating.MAX_REASON]
            why = f"an operator said that node {request.node} is off{said and f': {said}'}"
            freed = await term.node_off(request.node, why)
            return controller_pb2.NodeOffResponse(
                freed=[
                    controller_pb2.FreedSeats(group=group, ranks=ranks)
                    for group, ranks in freed.items()
                ]
            )

        return await self._typed(context, work)

    async def DeleteGroup(  # noqa: N802
        self, request: controller_pb2.DeleteGroupRequest, context: Context
    ) -> controller_pb2.DeleteGroupResponse:
        """Delete a group, or confirm that it is deleted."""

        async def work() -> controller_pb2.DeleteGroupResponse:
            deleted, fenced = await self._controller.leading().delete_group(
                request.group, request.reason[: operating.MAX_REASON], force=request.force
            )
            return controller_pb2.DeleteGroupResponse(deleted=deleted, fenced=fenced)

        return await self._typed(context, work)

    async def WatchView(  # noqa: N802
        self, request: controller_pb2.WatchViewRequest, context: Context
    ) -> AsyncIterator[types_pb2.View]:
        """The group's view, then every later one."""
        try:
            term = self._controller.leading()
            term.cluster.membership(request.group)
            views: AsyncGenerator[View, None] = term.views(request.group)
            async with aclosing(views):
                async for view in views:
                    yield view.to_proto()
        except NotLeader as error:
            await abort(context, error, {"leader": self._controller.leader_address})
        except ElasticEPError as error:
            await abort(context, error)

    # ---- nodes

    async def Session(  # noqa: N802
        self, request_iterator: AsyncIterator[controller_pb2.NodeMessage], context: Context
    ) -> AsyncIterator[controller_pb2.ControllerMessage]:
        """A node's stream; it always ends with an error that says why."""
        try:
            term = self._controller.leading()
            session, seats = await self._hello(request_iterator, context)
            term.open(session, seats)
            reading = asyncio.ensure_future(self._read(term, session, request_iterator))
            try:
                async with aclosing(session.outgoing()) as outgoing:
                    async for message in outgoing:
                        yield message
                raise session.why
            finally:
                reading.cancel()
                term.closed(session, str(session.why))
                await asyncio.gather(reading, return_exceptions=True)
        except NotLeader as error:
            await abort(context, error, {"leader": self._controller.leader_address})
        except ElasticEPError as error:
            if isinstance(error, ConfigError):
                self._controller.metrics.refused.inc()
                peer = context.peer()
                self._controller.log.warning("session.refused", peer=peer, reason=str(error))
            await abort(context, error)

    async def _hello(
        self, incoming: AsyncIterator[controller_pb2.NodeMessage], context: Context
    ) -> tuple[NodeSession, list[tuple[str, ev.SeatReport]]]:
        """Read and check the first message."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await anext(incoming)
        except (TimeoutError, StopAsyncIteration):
            raise ConfigError(f"no hello came within {HELLO_TIMEOUT_S:g} s") from None
        except DecodeError:
            raise ConfigError("the first message cannot be parsed") from None
        if first.WhichOneof("body") != "hello":
            raise ConfigError("the first message of a session must be NodeHello")
        endpoint, session_id, seats = messages.read_hello(first.hello)
        if self._check_names and endpoint.node not in _certificate_names(context):
            raise ConfigError(
                f"node {endpoint.node!r} is not named in the certificate that it showed; issue one "
                "that bears the name, or set daemon.node"
            )
        return NodeSession(endpoint, session_id), seats

    async def _read(
        self, term: Term, session: NodeSession, incoming: AsyncIterator[controller_pb2.NodeMessage]
    ) -> None:
        """Take what the node says until it stops; closes the session."""
        try:
            async for message in incoming:
                term.heard(session, messages.read_events(session.node, message))
            session.close(Unavailable("the node ended its session"))
        except ConfigError as error:
            session.close(error)
        except DecodeError:
            session.close(ConfigError(f"a message of node {session.node} cannot be parsed"))
        except Exception as error:
            session.close(Unavailable(f"the stream of node {session.node} broke: {error}"))


def _ranks(ranks: Any) -> tuple[int, ...]:
    if not 1 <= len(ranks) <= _MAX_RANKS:
        raise ConfigError(f"{len(ranks)} ranks are named; name 1 to {_MAX_RANKS}")
    return tuple(sorted(set(ranks)))


def _certificate_names(context: Context) -> set[str]:
    found = context.auth_context()
    values = [*found.get("x509_common_name", ()), *found.get("x509_subject_alternative_name", ())]
    return {value.decode(errors="replace") for value in values}
