"""Who may have which memory: the answers on the SEQPACKET socket.

A worker or an engine shows its ticket once. After a restart of the daemon it says hello with its
descriptors instead, and gets its seat back if they are that seat's memory under the incarnation
that still lives. A peer daemon fetches descriptors by group and rank.
"""

import contextlib
import dataclasses
import errno
import os
from dataclasses import dataclass

from elasticep.errors import ElasticEPError
from elasticep.native.structs import Error, Holder, Launch, MessageType, Role, Takes
from elasticep.runtime import seats
from elasticep.runtime.group import Registry
from elasticep.runtime.keeper import SeatKeeper
from elasticep.runtime.liveness.process import Process
from elasticep.runtime.node import Node
from elasticep.runtime.regions.memory import SeatMemory, identity_of
from elasticep.runtime.restore import reconcile_soon
from elasticep.runtime.transport.connection import Connection, close_all, pidfd_of
from elasticep.runtime.transport.messages import Message
from elasticep.runtime.transport.server import refuse
from elasticep.runtime.weights.seat import Copying


class Refused(ElasticEPError):
    """A hello that is turned away; `status` is the native error that the other side sees."""

    reason = "REFUSED"

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class _Owner:
    """Whom a connection belongs to."""

    keeper: SeatKeeper | None
    role: Role


class Reception:
    """The handler of `FdServer`.

    Args:
        node: the daemon's shared parts.
        registry: its groups.
    """

    def __init__(self, node: Node, registry: Registry) -> None:
        self._node = node
        self._registry = registry

    def opened(self, connection: Connection) -> None:
        """Nothing is promised before the hello."""

    def closed(self, connection: Connection, why: str) -> None:
        """Tell the seat that one of its connections is over."""
        owner = connection.owner
        if isinstance(owner, _Owner) and owner.keeper is not None:
            owner.keeper.unlink(connection)
        elif why != "closed by the peer":
            self._node.metrics.refused.inc()
            self._node.log.warning(
                "connection.refused", pid=connection.peer.pid, uid=connection.peer.uid, why=why
            )

    def message(self, connection: Connection, message: Message, fds: list[int]) -> None:
        """Answer one message; whatever is wrong with it costs its sender the connection."""
        try:
            self._answer(connection, message, fds)
        except Refused as error:
            refuse(connection, error.status, str(error))
        except ElasticEPError as error:
            refuse(connection, Error.EMISMATCH, str(error))
        except Exception:  # whoever sent it: the others go on
            self._node.log.exception("connection.failed", message=message.kind.name)
            connection.close("an error of the daemon, see its log")
        finally:
            close_all(fds)

    def _answer(self, connection: Connection, message: Message, fds: list[int]) -> None:
        owner = connection.owner
        match message.kind:
            case MessageType.HELLO if owner is None:
                if message.c:
                    self._again(connection, message, fds)
                else:
                    self._hello(connection, message)
            case MessageType.FETCH if owner is None or owner.role is Role.PEER:
                connection.owner = _Owner(None, Role.PEER)
                self._fetch(connection, message)
            case MessageType.MEMORY if _allocates(owner, connection):
                owner.keeper.allocation.take(message, fds)
                connection.close("its memory was taken")
            case MessageType.WEIGHTS if owner is None or owner.role is Role.PEER:
                connection.owner = _Owner(None, Role.PEER)
                self._weights(connection, message)
            case MessageType.STAGED if _runs(owner, connection):
                owner.keeper.group.stager.staged(owner.keeper, message)
            case MessageType.ADOPTED if _runs(owner, connection):
                owner.keeper.group.stager.adopted(owner.keeper, message.a, message.b)
            case MessageType.HEADWAY if _runs(owner, connection):
                weights = owner.keeper.group.weights
                if weights is not None:
                    copying = Copying(message.a, min(message.b, message.c), message.c)
                    weights.seats[owner.keeper.rank].heard(copying)
            case _:
                raise Refused(Error.EUSAGE, f"{message.kind.name} is not expected here")

    # ---- hello with a ticket

    def _hello(self, connection: Connection, message: Message) -> None:
        role = _role(message)
        ticket = self._node.tickets.take(message.text, role, connection.peer.pid)
        if ticket is None:
            raise Refused(
                -errno.EAGAIN,
                "this ticket is unknown, used or too old; attach again to get a new one",
            )
        keeper = ticket.owner
        seat = keeper.seat
        if role is Role.WORKER and keeper.allocation.expects(connection.peer.pid):
            connection.owner = _Owner(keeper, role)
            keeper.allocation.welcome(connection)
            return
        if seat.incarnation != ticket.incarnation or not seat.live or keeper.memory is None:
            raise Refused(
                Error.EFENCED,
                f"rank {keeper.rank} incarnation {ticket.incarnation} is over "
                f"({seat.cause or seat.state}); attach again",
            )
        if role is Role.WORKER:
            self._same_process(connection, keeper, role, f"rank {keeper.rank}")
        self._bind(connection, keeper, role)
        if role is Role.ENGINE:
            keeper.apply(seats.Connected(seat.incarnation))
        self._welcome(connection, keeper)
        keeper.link(connection, role)

    def _bind(self, connection: Connection, keeper: SeatKeeper, role: Role) -> None:
        """The connection, and the process behind it, belong to the seat from now on."""
        if role is Role.ENGINE or keeper.worker is None:
            try:
                process = Process(connection.peer.pid, pidfd_of(connection.sock))
            except OSError:
                raise Refused(Error.EGONE, "the process behind this connection is gone") from None
            keeper.set_process(Holder.ENGINE if role is Role.ENGINE else Holder.RUNNER, process)
        connection.owner = _Owner(keeper, role)

    def _welcome(self, connection: Connection, keeper: SeatKeeper) -> None:
        assert keeper.memory is not None
        connection.send(
            Message(
                kind=MessageType.WELCOME,
                rank=keeper.rank,
                a=keeper.seat.incarnation,
                b=keeper.seat.launch,
                c=keeper.group.layout.digest,
                d=keeper.group.ranks_on_device(keeper.rank) | Takes.HEADWAY << 32,
                text=keeper.group.name,
                body=bytes(keeper.group.geometry),
            ),
            keeper.memory.fds,
        )

    # ---- hello again, with descriptors

    def _again(self, connection: Connection, message: Message, fds: list[int]) -> None:
        role = _role(message)
        where = f"rank {message.rank} of group {message.text!r}"
        keeper = self._registry.keeper(message.text, message.rank)
        if keeper is None:
            raise Refused(Error.EINVAL, f"{where} is no seat of this daemon")
        if role is Role.WORKER and keeper.seat.launch is Launch.INLINE:
            raise Refused(Error.EUSAGE, f"{where} has inline launch and no worker")
        if keeper.seat.incarnation != message.c or not keeper.seat.live:
            raise Refused(
                Error.EFENCED,
                f"{where}: incarnation {message.c} is over, the seat is {keeper.seat.state} with "
                f"incarnation {keeper.seat.incarnation}",
            )
        if len(fds) != 2:
            raise Refused(Error.EINVAL, f"{where}: {len(fds)} descriptors came instead of two")
        self._same_process(connection, keeper, role, where)
        if keeper.memory is None:
            self._adopt(keeper, fds)
        elif identity_of(fds[0]) != keeper.memory.identity:
            raise Refused(Error.EFENCED, f"{where}: this is not the seat's memory any more")
        self._bind_again(connection, keeper, role)
        self._welcome(connection, keeper)
        keeper.link(connection, role)
        self._node.log.info(
            "seat.reattached", group=message.text, rank=message.rank, role=role.name.lower()
        )
        reconcile_soon(keeper)

    @staticmethod
    def _same_process(connection: Connection, keeper: SeatKeeper, role: Role, where: str) -> None:
        known = keeper.engine if role is Role.ENGINE else keeper.worker
        if known is not None and known.pid != connection.peer.pid:
            raise Refused(
                Error.EUSAGE,
                f"{where} is held by process {known.pid}, not by {connection.peer.pid}",
            )

    def _bind_again(self, connection: Connection, keeper: SeatKeeper, role: Role) -> None:
        known = keeper.engine if role is Role.ENGINE else keeper.worker
        if known is None:
            self._bind(connection, keeper, role)
        else:
            connection.owner = _Owner(keeper, role)

    @staticmethod
    def _adopt(keeper: SeatKeeper, fds: list[int]) -> None:
        header_fd, data_fd = fds
        fds.clear()  # they are the memory's now, also when it refuses them
        memory = SeatMemory.adopt(header_fd, data_fd, keeper.rank, keeper.group.layout)
        found = memory.header.status().incarnation
        if found != keeper.seat.incarnation:
            memory.close()
            raise Refused(
                Error.EFENCED,
                f"the memory offered for rank {keeper.rank} is at incarnation {found}, the seat "
                f"at {keeper.seat.incarnation}",
            )
        keeper.take_memory(memory)

    # ---- peer daemons

    def _fetch(self, connection: Connection, message: Message) -> None:
        keeper = self._registry.keeper(message.text, message.rank)
        if keeper is None or keeper.memory is None:
            text = (
                f"node {self._node.config.node!r} has no memory of rank {message.rank} of group "
                f"{message.text!r}"
            )
            connection.send(
                Message(kind=MessageType.FETCHED, rank=message.rank, status=Error.EINVAL, text=text)
            )
            return
        connection.send(
            Message(
                kind=MessageType.FETCHED,
                rank=message.rank,
                a=keeper.group.layout.digest,
                b=keeper.seat.incarnation,
                text=message.text,
            ),
            keeper.memory.fds,
        )

    def _weights(self, connection: Connection, message: Message) -> None:
        """The arena of a rank of this node, or a piece of its backup, for reading."""
        group = self._registry.groups.get(message.text)
        weights = None if group is None else group.weights
        memory, incarnation = None, 0
        if weights is not None and message.b:
            pieces = weights.backup.segments
            memory = pieces[message.rank] if message.rank < len(pieces) else None
        elif group is not None and weights is not None:
            memory = weights.memory_of(message.rank)
            incarnation = group.keepers[message.rank].seat.incarnation if memory else 0
        answer = Message(kind=MessageType.WEIGHTS, rank=message.rank)
        if memory is None:
            what = "piece of backup" if message.b else "arena of rank"
            text = (
                f"node {self._node.config.node!r} has no {what} {message.rank} of group "
                f"{message.text!r}"
            )
            connection.send(dataclasses.replace(answer, status=Error.EINVAL, text=text))
            return
        answer = dataclasses.replace(
            answer, a=memory.layout.digest(), b=incarnation, text=message.text
        )
        fd = memory.reader_fd()
        try:
            connection.send(answer, [fd])
        finally:
            os.close(fd)


def _role(message: Message) -> Role:
    with contextlib.suppress(ValueError):
        role = Role(message.a)
        if role is not Role.PEER:
            return role
    raise Refused(Error.EINVAL, f"a hello in role {message.a}; workers say 1, engines 2")


def _allocates(owner: object, connection: Connection) -> bool:
    """Whether this connection is that of a seat's allocator."""
    return (
        isinstance(owner, _Owner)
        and owner.keeper is not None
        and owner.role is Role.WORKER
        and owner.keeper.allocation.expects(connection.peer.pid)
    )


def _runs(owner: object, connection: Connection) -> bool:
    """Whether this connection is the one that runs its seat's kernels."""
    return (
        isinstance(owner, _Owner)
        and owner.keeper is not None
        and owner.keeper.runner_link is connection
    )
