"""`NodeService`: what engines, operators and other daemons ask of a daemon over gRPC."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import grpc

from elasticep.device import Device
from elasticep.errors import (
    AttachError,
    ConfigError,
    ElasticEPError,
    GroupMismatch,
    SeatTaken,
    Unavailable,
    UnknownGroup,
    UnknownRank,
    UsageError,
)
from elasticep.group import GroupConfig
from elasticep.native import abi
from elasticep.native.convert import geometry_struct
from elasticep.native.region import layout
from elasticep.native.structs import Holder
from elasticep.proto import node_pb2, node_pb2_grpc, types_pb2
from elasticep.rpc import abort
from elasticep.runtime import seats
from elasticep.runtime.capacity import require_capacity
from elasticep.runtime.group import Registry
from elasticep.runtime.keeper import SeatKeeper
from elasticep.runtime.limits import MAX_ATTACH_WAIT_MS
from elasticep.runtime.liveness.waits import describe
from elasticep.runtime.node import Node, Signal
from elasticep.runtime.session import Session
from elasticep.runtime.waiting import TELL_S, waits_for
from elasticep.runtime.weights.look import CheckpointWatch
from elasticep.runtime.weights.serve import CHUNK_READ_S, WeightsService

_LAUNCH: Final = {
    abi.Launch.SERVICE: types_pb2.LAUNCH_SERVICE,
    abi.Launch.INLINE: types_pb2.LAUNCH_INLINE,
}
_MAX_TEXT: Final = 255
_MAX_PID: Final = 1 << 22  # of Linux
Context = grpc.aio.ServicerContext[Any, Any]
Answer = TypeVar("Answer")


class NodeService(node_pb2_grpc.NodeServiceServicer):
    """One daemon's service.

    Args:
        node: the daemon's shared parts.
        registry: its groups.
        session: its stream to the controller.
        groups_changed: notified when a group has come.
        checkpoints: whether they can be read.
    """

    def __init__(
        self,
        node: Node,
        registry: Registry,
        session: Session,
        groups_changed: Signal,
        checkpoints: CheckpointWatch,
    ) -> None:
        self._node = node
        self._registry = registry
        self._session = session
        self._groups_changed = groups_changed
        self._checkpoints = checkpoints
        self._weights = WeightsService(node.config.node, registry)

    async def Attach(  # noqa: N802
        self, request: node_pb2.AttachRequest, context: Context
    ) -> node_pb2.AttachResponse:
        """Give a rank to the engine that asks, as soon as it is ready."""
        return await self._typed(context, self._local(context, self._attach), request)

    async def Detach(  # noqa: N802
        self, request: node_pb2.DetachRequest, context: Context
    ) -> node_pb2.DetachResponse:
        """End an incarnation without a fault."""
        return await self._typed(context, self._local(context, self._detach), request)

    async def GetStatus(  # noqa: N802
        self, request: node_pb2.GetStatusRequest, context: Context
    ) -> node_pb2.GetStatusResponse:
        """What this node's seats do."""
        return await self._typed(context, self._get_status, request)

    async def ReportDeath(  # noqa: N802
        self, request: node_pb2.ReportDeathRequest, context: Context
    ) -> node_pb2.ReportDeathResponse:
        """Set the dead word of a rank of another node."""
        return await self._typed(context, self._report_death, request)

    async def InjectFault(  # noqa: N802
        self, request: node_pb2.InjectFaultRequest, context: Context
    ) -> node_pb2.InjectFaultResponse:
        """Do harm to a process of this node, if the config allows it."""
        return await self._typed(context, self._inject_fault, request)

    async def FindExperts(  # noqa: N802
        self, request: node_pb2.FindExpertsRequest, context: Context
    ) -> node_pb2.FindExpertsResponse:
        """Which experts' weights lie on this node."""
        return await self._typed(context, self._weights.find, request)

    async def ReadExpert(  # type: ignore[override]  # noqa: N802
        self, request: node_pb2.ReadExpertRequest, context: Context
    ) -> None:
        """One expert's weights. A reader that stops reading is left, and others get its turn."""
        try:
            now = asyncio.get_running_loop().time
            end = now() + self._weights.read_s(request.group)
            async with (
                asyncio.timeout_at(end) as limit,
                contextlib.aclosing(self._weights.read(request)) as chunks,
            ):
                async for chunk in chunks:
                    limit.reschedule(min(end, now() + CHUNK_READ_S))
                    await context.write(chunk)
        except TimeoutError:
            await abort(context, Unavailable("the expert was read too slowly"))
        except ElasticEPError as error:
            await abort(context, error)

    # ---- around every call

    async def _typed(
        self, context: Context, call: Callable[[Any], Awaitable[Answer]], request: Any
    ) -> Answer:
        try:
            return await call(request)
        except ElasticEPError as error:
            await abort(context, error)

    @staticmethod
    def _local(
        context: Context, call: Callable[[Any], Awaitable[Answer]]
    ) -> Callable[[Any], Awaitable[Answer]]:
        """Seats are taken by processes of this host only."""
        if context.peer().startswith("unix:"):
            return call

        async def refuse(_: Any) -> Answer:
            raise UsageError("engines reach their daemon over its Unix socket, not over TCP")

        return refuse

    # ---- attach

    async def _attach(self, request: node_pb2.AttachRequest) -> node_pb2.AttachResponse:
        self._check_attach(request)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(request.wait_ms, MAX_ATTACH_WAIT_MS) / 1000
        await self._agree(request, deadline)
        tell = loop.call_later(TELL_S, self._tell_wait, request)
        try:
            keeper = await self._keeper(request, deadline)
            self._check_layout(request, keeper.group.layout.digest)
            await self._until_free(keeper, request.pid, deadline)
        finally:
            tell.cancel()
        ticket = keeper.reserve(request.pid)
        self._node.log.info(
            "attach.ticket",
            group=request.group,
            rank=request.rank,
            incarnation=keeper.seat.incarnation,
            pid=request.pid,
        )
        return node_pb2.AttachResponse(
            ticket=ticket,
            fd_socket=self._node.config.fd_socket,
            config=keeper.group.config.to_proto(),
            incarnation=keeper.seat.incarnation,
            launch=_LAUNCH[keeper.seat.launch],
        )

    def _waits_for(self, group: str, rank: int) -> str:
        return waits_for(self._registry, group, rank, connected=self._session.connected)

    def _tell_wait(self, request: node_pb2.AttachRequest) -> None:
        why = self._waits_for(request.group, request.rank)
        self._node.log.warning(
            "attach.waits", group=request.group, rank=request.rank, pid=request.pid, why=why
        )

    def _check_attach(self, request: node_pb2.AttachRequest) -> None:
        offered = self._registry.offered
        if request.group not in offered:
            known = ", ".join(sorted(offered)) or "none"
            raise UnknownGroup(
                f"node {self._node.config.node!r} offers no seats of group {request.group!r} "
                f"(it offers: {known}); add them to daemon.seats"
            )
        ranks = offered[request.group]
        if request.rank not in ranks:
            raise UnknownRank(
                f"rank {request.rank} of group {request.group!r} is no seat of node "
                f"{self._node.config.node!r}, which has {', '.join(map(str, ranks))}"
            )
        if request.abi_version not in (0, abi.ABI_VERSION):
            raise GroupMismatch(
                f"this engine speaks ABI {request.abi_version}, the daemon {abi.ABI_VERSION}; "
                "install one version of elasticep everywhere"
            )
        if request.pid > _MAX_PID:
            raise ConfigError(f"no process has the number {request.pid}; pid is the engine's own")

    async def _agree(self, request: node_pb2.AttachRequest, deadline: float) -> None:
        """An engine that brings the group's config creates the group or agrees with it."""
        if not request.HasField("config"):
            return
        config = GroupConfig.from_proto(request.config)
        if config.name != request.group:
            raise ConfigError(
                f"the config is that of group {config.name!r}, the rank one of {request.group!r}"
            )
        sizes = layout(geometry_struct(config))
        self._check_layout(request, sizes.digest)
        now = asyncio.get_running_loop().time
        known = self._registry.present(request.group)
        try:
            if known is not None:
                known.config.require_same(config)
                return
        except GroupMismatch:
            # It may have been deleted while this daemon was away: then the controller says so.
            soon_s = min(self._node.limits.unreachable_s, deadline - now())
            session = self._session
            if not await session.changed.until(lambda: session.connected, soon_s):
                raise
        ranks = self._registry.offered[config.name]
        seats_here = sum(rank < config.geometry.max_ranks for rank in ranks)
        data_bytes = 0 if config.device is Device.CUDA else sizes.data_bytes
        require_capacity(
            config, sizes.header_bytes + data_bytes, seats_here, self._node.config.node
        )
        await self._session.create_group(request.config, max(0.001, deadline - now()))
        await self._groups_changed.until(
            lambda: self._registry.present(request.group) is not known or known is None,
            deadline - now(),
        )

    @staticmethod
    def _check_layout(request: node_pb2.AttachRequest, digest: int) -> None:
        if request.layout_digest not in (0, digest):
            raise GroupMismatch(
                f"layout digest {request.layout_digest:#018x} of this engine differs from the "
                f"daemon's {digest:#018x} for group {request.group!r}; install one version of "
                "elasticep everywhere"
            )

    async def _keeper(self, request: node_pb2.AttachRequest, deadline: float) -> SeatKeeper:
        left_s = deadline - asyncio.get_running_loop().time()
        await self._groups_changed.until(
            lambda: self._registry.present(request.group) is not None, left_s
        )
        group = self._registry.present(request.group)
        if group is not None:
            if request.rank in group.keepers:
                return group.keepers[request.rank]
            raise UnknownRank(
                f"rank {request.rank} is beyond geometry.max_ranks of group {request.group!r}"
            )
        if not self._session.connected:
            raise Unavailable(
                f"group {request.group!r} is not known here yet and no controller answers at "
                f"{', '.join(self._node.config.controllers) or '(none set)'}"
            )
        raise UnknownGroup(
            f"no group {request.group!r} exists; create it with `elasticep group create`, or "
            "attach with its config"
        )

    async def _until_free(self, keeper: SeatKeeper, pid: int, deadline: float) -> None:
        left_s = deadline - asyncio.get_running_loop().time()
        if keeper.memory is None and keeper.engine is not None and keeper.engine.pid == pid:
            # This daemon started anew and nobody brought the memory back, so the lock cannot be
            # read. But who asks for the seat has let go of it; its process is not to be killed.
            keeper.apply(seats.Released(Holder.ENGINE, keeper.seat.incarnation))

        def failed() -> ElasticEPError | None:
            return keeper.failure.of(keeper.seat)

        def over() -> bool:
            return keeper.group.leaving

        await keeper.changed.until(
            lambda: bool(over() or keeper.free(pid) or keeper.taken(pid) or failed()), left_s
        )
        if over():
            raise UnknownGroup(
                f"group {keeper.group.name!r} was deleted while rank {keeper.rank} of it was "
                "waited for; attach with the config of the group that is to take its place"
            )
        if keeper.free(pid):
            return
        failure = failed()
        if failure is not None:  # the seat is started again in a while, whoever asks
            raise failure.with_traceback(None)
        what = f"rank {keeper.rank} of group {keeper.group.name!r}"
        if keeper.taken(pid):
            holder = keeper.engine.pid if keeper.engine is not None else keeper.reserved_pid
            own = "by a session of this very process; detach that one first"
            other = f"by process {holder}; attach to another rank, or end that process"
            raise SeatTaken(f"{what} is taken {own if holder == pid else other}")
        why = self._waits_for(keeper.group.name, keeper.rank)
        raise AttachError(f"{what} did not become ready in time: {why}; see `elasticep status`")

    # ---- the others

    def _seat(self, group: str, rank: int) -> SeatKeeper:
        keeper = self._registry.keeper(group, rank)
        if keeper is not None:
            return keeper
        where = f"node {self._node.config.node!r}"
        if group not in self._registry.groups:
            raise UnknownGroup(f"group {group!r} is not known on {where}")
        raise UnknownRank(f"rank {rank} of group {group!r} is no seat of {where}")

    async def _detach(self, request: node_pb2.DetachRequest) -> node_pb2.DetachResponse:
        keeper = self._seat(request.group, request.rank)
        keeper.apply(seats.Ended(request.incarnation, "detached"))
        return node_pb2.DetachResponse()

    async def _get_status(self, _: node_pb2.GetStatusRequest) -> node_pb2.GetStatusResponse:
        now_ns = time.monotonic_ns()
        answer = node_pb2.GetStatusResponse(
            node=self._node.config.node,
            domain=self._node.config.domain,
            controller_connected=self._session.connected,
        )
        for keeper in self._registry.keepers():
            seat = node_pb2.SeatStatus(seat=keeper.message())
            seat.worker_pid = _pid(keeper.worker)
            seat.engine_pid = _pid(keeper.engine)
            seat.attach_waits_for = self._waits_for(keeper.group.name, keeper.rank)
            status = keeper.status()
            if status is not None:
                seat.step, seat.progress = status.step, status.progress
                seat.torn_steps = status.torn_steps
                seat.staged_epochs.extend(sorted(e for e in status.staged if e))
                seat.wait = describe(status, now_ns)
            answer.seats.append(seat)
        for known_group in self._registry.groups.values():
            if known_group.weights is not None:
                answer.arenas.extend(known_group.weights.status())
        answer.mover_pid = self._node.mover.pid
        for name, path, problem in self._checkpoints.told():
            answer.checkpoints.add(group=name, path=path, problem=problem)
        known = self._registry.groups
        for group, ranks in self._registry.offered.items():
            for rank in ranks if group not in known else ():
                empty = types_pb2.Seat(group=group, rank=rank, state=types_pb2.SEAT_STATE_EMPTY)
                why = self._waits_for(group, rank)
                answer.seats.append(node_pb2.SeatStatus(seat=empty, attach_waits_for=why))
        return answer

    async def _report_death(
        self, request: node_pb2.ReportDeathRequest
    ) -> node_pb2.ReportDeathResponse:
        group = self._registry.groups.get(request.group)
        if group is None:
            raise UnknownGroup(
                f"group {request.group!r} is not known on node {self._node.config.node!r}"
            )
        if request.rank in group.keepers:
            raise UsageError(
                f"rank {request.rank} of group {request.group!r} is a seat of this node, which "
                "watches it itself"
            )
        if request.rank >= group.config.geometry.max_ranks or request.incarnation < 1:
            raise ConfigError(
                f"rank {request.rank} incarnation {request.incarnation} cannot be: ranks are 0 to "
                f"{group.config.geometry.max_ranks - 1}, incarnations start at 1"
            )
        group.mark_dead(request.rank, request.incarnation)
        self._node.log.warning(
            "peer.dead",
            group=request.group,
            rank=request.rank,
            incarnation=request.incarnation,
            cause=request.cause[:_MAX_TEXT],
        )
        return node_pb2.ReportDeathResponse()

    async def _inject_fault(
        self, request: node_pb2.InjectFaultRequest
    ) -> node_pb2.InjectFaultResponse:
        if not self._node.config.fault_injection:
            raise UsageError(
                "fault injection is off; set daemon.fault_injection = true where faults may be "
                "injected"
            )
        keeper = self._seat(request.group, request.rank)
        return node_pb2.InjectFaultResponse(pid=keeper.inject(request.fault))


def _pid(process: Any) -> int:
    return 0 if process is None or process.exited else int(process.pid)
