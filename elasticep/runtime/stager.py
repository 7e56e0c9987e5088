"""Carries proposed views to the runners of this node's seats, and their answers back.

A proposal's dead words are set before anything else, whatever comes of staging: a hung member is
not waited for. Every failure becomes the answer `Staged{error}`, so that the controller can
overtake the view with another one.
"""

import asyncio
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from elasticep.errors import ConfigError, ElasticEPError, Unavailable, UsageError
from elasticep.native.convert import ViewTables
from elasticep.native.region import HeaderStatus, write_bank
from elasticep.native.structs import MessageType
from elasticep.proto import controller_pb2, types_pb2
from elasticep.runtime import seats
from elasticep.runtime.limits import MAX_EPOCH_LAG, MAX_PROPOSALS
from elasticep.runtime.node import Node
from elasticep.runtime.regions.memory import SeatMemory
from elasticep.runtime.regions.peers import Endpoint
from elasticep.runtime.transport.messages import MAX_FDS, Message
from elasticep.runtime.weights.fill import Unrestorable
from elasticep.runtime.weights.ledger import Ref

if TYPE_CHECKING:
    from elasticep.runtime.group import Group
    from elasticep.runtime.keeper import SeatKeeper

_MOST_NAMED: Final = 65_536  # experts in an answer
_PEERS_PER_MESSAGE: Final = (MAX_FDS - 1) // 2  # two descriptors each, beside that of the tables


@dataclass(slots=True)
class _Proposal:
    """A view on its way to the runners.

    Attributes:
        epoch: its number.
        members: rank -> (incarnation, node).
        bank_fd: memfd with its tables.
        ranks: seats of this node that stage it.
        left_out: seats of this node, with incarnation, that the view leaves out alive.
        leaving: why, of those that an operator drained.
    """

    epoch: int
    members: dict[int, tuple[int, str]]
    bank_fd: int
    ranks: set[int] = field(default_factory=set)
    left_out: dict[int, int] = field(default_factory=dict)
    leaving: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Progress:
    """What one incarnation of a seat has staged and said.

    Attributes:
        incarnation: of the seat.
        link: the connection that `sent` is about.
        sent: rank -> identity of the peer memory that this connection has.
        asked: epochs whose STAGE is on its way or answered.
        staged: epochs that the runner has staged.
        told: epochs whose success was reported.
    """

    incarnation: int
    link: object = None
    sent: dict[int, tuple[int, int]] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    staged: set[int] = field(default_factory=set)
    told: set[int] = field(default_factory=set)


class Stager:
    """One group's proposals on this node."""

    def __init__(self, node: Node, group: "Group") -> None:
        self._node = node
        self._group = group
        self._proposals: dict[int, _Proposal] = {}
        self._progress: dict[int, _Progress] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._teller: asyncio.Task[None] | None = None
        self._log = node.log.bind(group=group.name)

    # ---- proposals

    def propose(self, message: controller_pb2.Proposal) -> None:
        """Take a proposal; the same one may come again, with more ranks that stage it."""
        view = message.view
        reason = f"expelled in epoch {view.epoch}: {view.reason}"
        for gone in view.expelled:
            self.expel(gone.rank, gone.incarnation, view.epoch, reason)
        members = {m.rank: (m.incarnation, m.node) for m in view.members}
        if not self._proposals or view.epoch >= max(self._proposals):
            self._group.members = members
            self._group.nodes.update({n.node: _endpoint(n) for n in message.nodes})
            used = {node for _, node in members.values()}
            self._group.nodes = {n: e for n, e in self._group.nodes.items() if n in used}
            self._node.save()
        ranks = [rank for rank in message.stage_ranks if rank in self._group.keepers]
        proposal = self._proposals.get(view.epoch)
        if proposal is None:
            try:
                if self._group.weights is not None:
                    self._group.weights.learn(view, {n.node: _endpoint(n) for n in message.nodes})
                proposal = _Proposal(view.epoch, members, self._write_bank(view, members))
            except (ElasticEPError, OSError) as error:
                for rank in ranks:
                    incarnation = members.get(rank, (0, ""))[0]
                    self._failed(rank, incarnation, view.epoch, error)
                return
            self._add(proposal)
        proposal.leaving |= {leaving.rank: leaving.reason for leaving in message.leaving}
        for rank in ranks:
            proposal.ranks.add(rank)
            self._stage_soon(proposal, self._group.keepers[rank])

    def expel(self, rank: int, incarnation: int, epoch: int, reason: str) -> None:
        """Set an incarnation's dead word everywhere; fence it if it is this node's."""
        self._group.mark_dead(rank, incarnation)
        keeper = self._group.keepers.get(rank)
        if keeper is not None and 1 <= keeper.seat.incarnation <= incarnation:
            keeper.apply(seats.Ended(keeper.seat.incarnation, reason, epoch))

    def _write_bank(self, view: types_pb2.View, members: dict[int, tuple[int, str]]) -> int:
        group = self._group
        tables = ViewTables(
            group.geometry,
            epoch=view.epoch,
            previous_epoch=view.previous_epoch,
            members={rank: incarnation for rank, (incarnation, _) in members.items()},
            slot_expert=view.placement.slot_expert,
            slot_weight=view.placement.slot_weight,
            digest=view.digest,
        )
        name = f"elasticep-{group.name}-view-{view.epoch}"
        return write_bank(name, group.layout.bank_bytes, group.geometry, tables.struct)

    def _add(self, proposal: _Proposal) -> None:
        earlier = {
            rank: incarnation
            for other in self._proposals.values()
            for rank, (incarnation, _) in other.members.items()
        }
        for rank, keeper in self._group.keepers.items():
            incarnation = keeper.seat.incarnation
            status = keeper.status()
            was_member = earlier.get(rank) == incarnation or (status is not None and status.epoch)
            if (
                keeper.seat.live
                and was_member
                and proposal.members.get(rank, (0,))[0] != incarnation
            ):
                proposal.left_out[rank] = incarnation
        self._proposals[proposal.epoch] = proposal
        while len(self._proposals) > MAX_PROPOSALS:
            self._drop(min(self._proposals))

    def _drop(self, epoch: int) -> None:
        os.close(self._proposals.pop(epoch).bank_fd)

    # ---- staging

    def runner_linked(self, keeper: "SeatKeeper") -> None:
        """A seat's runner has connected: it gets what was proposed meanwhile."""
        status = keeper.status()
        running = status.epoch if status is not None else 0
        for epoch in sorted(self._proposals):
            proposal = self._proposals[epoch]
            member = proposal.members.get(keeper.rank, (0, ""))[0] == keeper.seat.incarnation
            if keeper.rank in proposal.ranks and member and epoch > running:
                self._stage_soon(proposal, keeper)

    def _stage_soon(self, proposal: _Proposal, keeper: "SeatKeeper") -> None:
        task = asyncio.create_task(self._stage(proposal, keeper))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stage(self, proposal: _Proposal, keeper: "SeatKeeper") -> None:
        incarnation = proposal.members.get(keeper.rank, (0, ""))[0]
        try:
            self._check(proposal, keeper, incarnation)
            status = keeper.status()
            if status is not None and status.epoch > proposal.epoch:
                self._tell_adopted(keeper, status.epoch, status.step)
                return
            if keeper.runner_link is None:
                return  # `runner_linked` comes back to it
            progress = self._progress_of(keeper)
            if proposal.epoch in progress.staged:
                progress.told.discard(proposal.epoch)
                self._tell_staged()
                return
            if proposal.epoch in progress.asked:
                return
            progress.asked.add(proposal.epoch)
            try:
                await self._weights_ready(proposal, keeper, incarnation)
                await self._send_stage(proposal, keeper, progress)
            except BaseException:
                progress.asked.discard(proposal.epoch)
                raise
        except ElasticEPError as error:
            self._failed(keeper.rank, incarnation, proposal.epoch, error)
        except Exception as error:  # the controller must hear of it, whatever it is
            self._log.exception("view.staging_failed", rank=keeper.rank, epoch=proposal.epoch)
            self._failed(keeper.rank, incarnation, proposal.epoch, error)

    async def _weights_ready(
        self, proposal: _Proposal, keeper: "SeatKeeper", incarnation: int
    ) -> None:
        """Before the runner hears of a view: from then on the rank may switch to it at any time."""
        weights = self._group.weights
        if weights is None:
            return

        def wanted() -> bool:
            seat = keeper.seat
            return (
                self._proposals.get(proposal.epoch) is proposal
                and seat.incarnation == incarnation
                and seat.live
            )

        await weights.ready(keeper.rank, proposal.epoch, wanted)
        self._node.save()

    def _check(self, proposal: _Proposal, keeper: "SeatKeeper", incarnation: int) -> None:
        epoch, seat = proposal.epoch, keeper.seat
        if incarnation == 0:
            raise ConfigError(
                f"view {epoch} is to be staged by rank {keeper.rank}, no member of it"
            )
        if seat.incarnation != incarnation or not seat.live:
            raise UsageError(
                f"view {epoch} has incarnation {incarnation} of rank {keeper.rank}, whose seat is "
                f"{seat.state} with incarnation {seat.incarnation}"
            )
        status = keeper.status()
        if status is not None and status.epoch and epoch >= status.epoch + MAX_EPOCH_LAG:
            raise UsageError(
                f"view {epoch} cannot be staged while rank {keeper.rank} runs epoch "
                f"{status.epoch}: banks are for the next {MAX_EPOCH_LAG - 1} epochs"
            )

    async def _send_stage(
        self, proposal: _Proposal, keeper: "SeatKeeper", progress: _Progress
    ) -> None:
        link = keeper.runner_link
        fresh: list[tuple[int, SeatMemory]] = []
        for rank, (incarnation, node) in sorted(proposal.members.items()):
            if rank != keeper.rank:
                memory = await self._memory_of(rank, incarnation, node)
                if progress.sent.get(rank) != memory.identity:
                    fresh.append((rank, memory))
        overtaken = self._proposals.get(proposal.epoch) is not proposal
        if overtaken or link is None or link is not keeper.runner_link:
            progress.asked.discard(proposal.epoch)
            return  # or it has connected anew, and starts from the beginning
        for rank, memory in fresh:
            if memory.closed:
                raise Unavailable(f"the memory of rank {rank} was replaced while others were asked")
        rest = fresh
        while len(rest) > _PEERS_PER_MESSAGE:
            part, rest = rest[:_PEERS_PER_MESSAGE], rest[_PEERS_PER_MESSAGE:]
            link.send(*self._peers(MessageType.PEERS, proposal, keeper, part))
        link.send(*self._peers(MessageType.STAGE, proposal, keeper, rest))
        progress.sent.update({rank: memory.identity for rank, memory in fresh})

    def _peers(
        self,
        kind: MessageType,
        proposal: _Proposal,
        keeper: "SeatKeeper",
        peers: list[tuple[int, SeatMemory]],
    ) -> tuple[Message, list[int]]:
        """A message that carries the memory of these peers, and for STAGE the view's tables."""
        message = Message(
            kind=kind,
            rank=keeper.rank,
            a=proposal.epoch,
            b=len(peers),
            text=self._group.name,
            body=struct.pack(f"<{len(peers)}I", *(rank for rank, _ in peers)),
        )
        bank = [proposal.bank_fd] if kind is MessageType.STAGE else []
        return message, [*bank, *(fd for _, memory in peers for fd in memory.fds)]

    async def _memory_of(self, rank: int, incarnation: int, node: str) -> SeatMemory:
        own = self._group.keepers.get(rank)
        if own is not None:
            if own.memory is None:
                raise Unavailable(f"rank {rank} of this node has no memory yet")
            return own.memory
        endpoint = self._group.nodes.get(node)
        if endpoint is None:
            raise Unavailable(f"rank {rank} is on node {node!r}, which the proposal does not name")
        return await self._group.peers.get(rank, incarnation, endpoint)

    # ---- answers

    def staged(self, keeper: "SeatKeeper", message: Message) -> None:
        """A runner's STAGED."""
        progress = self._progress_of(keeper)
        if self._group.weights is not None:
            self._group.weights.seats[keeper.rank].answered(message.a)
        if message.status:
            progress.asked.discard(message.a)
            error = UsageError(message.text or f"status {message.status}")
            self._failed(keeper.rank, keeper.seat.incarnation, message.a, error)
            return
        progress.staged.add(message.a)
        self._tell_staged()

    def adopted(self, keeper: "SeatKeeper", epoch: int, step: int) -> None:
        """A runner's ADOPTED: those that the view left out have no place any more."""
        self._tell_staged()
        self._node.metrics.adopted.labels(self._group.name).inc()
        self._log.info("view.adopted", rank=keeper.rank, epoch=epoch, step=step)
        self._tell_adopted(keeper, epoch, step)
        if self._group.weights is not None:
            self._group.weights.adopted(epoch)
        for old in [e for e in self._proposals if e < epoch]:
            self._drop(old)
        proposal = self._proposals.get(epoch)
        if proposal is None:
            return
        for rank, incarnation in proposal.left_out.items():
            reason = proposal.leaving.get(rank) or f"left out of epoch {epoch}"
            self._group.keepers[rank].apply(seats.Ended(incarnation, reason, epoch))
        needed = {r for p in self._proposals.values() for r in p.members}
        self._group.peers.keep_only(needed)

    def resend(self) -> None:
        """The controller has just heard this node's hello: say again what every runner has."""
        for keeper in self._group.keepers.values():
            status = keeper.status()
            if not keeper.seat.live or status is None:
                continue
            progress = self._progress_of(keeper)
            progress.staged.update(e for e in status.staged if e and e >= status.epoch)
            progress.told.clear()
        self._tell_staged()
        for keeper in self._group.keepers.values():
            status = keeper.status()
            if keeper.seat.live and status is not None and status.epoch:
                self._tell_adopted(keeper, status.epoch, status.step)

    def _tell_adopted(self, keeper: "SeatKeeper", epoch: int, step: int) -> None:
        adopted = controller_pb2.Adopted(
            group=self._group.name,
            epoch=epoch,
            rank=keeper.rank,
            incarnation=keeper.seat.incarnation,
            step=step,
        )
        self._node.send(controller_pb2.NodeMessage(adopted=adopted))

    def _tell_staged(self) -> None:
        """Report what is staged. A joiner's word waits until its engine is in `step()`."""
        held_back = False
        for rank, progress in self._progress.items():
            keeper = self._group.keepers[rank]
            news = sorted(progress.staged - progress.told)
            if not news or progress.incarnation != keeper.seat.incarnation or not keeper.seat.live:
                continue
            status = keeper.status()
            if status is None or not _in_step(status, keeper.granted_ns):
                held_back = True
                continue
            for epoch in news:
                progress.told.add(epoch)
                self._answer(rank, progress.incarnation, epoch, "")
        if held_back and (self._teller is None or self._teller.done()):
            self._teller = asyncio.create_task(self._tell_later())

    async def _tell_later(self) -> None:
        await asyncio.sleep(self._node.limits.staged_poll_s)
        self._teller = None
        self._tell_staged()

    def _failed(self, rank: int, incarnation: int, epoch: int, error: Exception) -> None:
        self._log.warning("view.not_staged", rank=rank, epoch=epoch, error=str(error))
        lost = error.refs[:_MOST_NAMED] if isinstance(error, Unrestorable) else ()
        self._answer(rank, incarnation, epoch, str(error) or type(error).__name__, lost)

    def _answer(
        self, rank: int, incarnation: int, epoch: int, error: str, lost: Sequence[Ref] = ()
    ) -> None:
        result = "error" if error else "staged"
        self._node.metrics.staged.labels(self._group.name, result).inc()
        if not error:
            self._log.info("view.staged", rank=rank, epoch=epoch)
        staged = controller_pb2.Staged(
            group=self._group.name,
            epoch=epoch,
            rank=rank,
            incarnation=incarnation,
            error=error,
            unrestorable=[
                controller_pb2.ExpertRef(layer=layer, expert=expert) for layer, expert in lost
            ],
        )
        self._node.send(controller_pb2.NodeMessage(staged=staged))

    def _progress_of(self, keeper: "SeatKeeper") -> _Progress:
        """This incarnation's record; what was sent is known per connection only."""
        progress = self._progress.get(keeper.rank)
        if progress is None or progress.incarnation != keeper.seat.incarnation:
            progress = _Progress(keeper.seat.incarnation)
            self._progress[keeper.rank] = progress
        if progress.link is not keeper.runner_link:
            progress.link = keeper.runner_link
            progress.sent = {}
            progress.asked = set(progress.staged)
        return progress

    def close(self) -> None:
        """Stop what is under way."""
        for task in (*self._tasks, *((self._teller,) if self._teller else ())):
            task.cancel()
        for epoch in list(self._proposals):
            self._drop(epoch)


def _in_step(status: HeaderStatus, granted_ns: int) -> bool:
    """Whether the rank runs an epoch, or its engine has come to its first barrier."""
    return status.epoch > 0 or max(1, granted_ns) <= status.wait_since_ns <= time.monotonic_ns()


def _endpoint(node: types_pb2.NodeEndpoint) -> Endpoint:
    return Endpoint(node.node, node.domain, node.grpc_address, node.fd_socket)
