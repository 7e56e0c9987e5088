"""A seat's memory on a GPU, made by a process that lives just for that.

    start ──▶ the allocator says hello ──▶ welcome (sizes, device) ──▶ its descriptor comes ──▶ over

Whatever goes wrong ends the incarnation for which it was started, with the reason.
"""

from typing import TYPE_CHECKING

from elasticep.errors import AttachError, ElasticEPError
from elasticep.native import abi
from elasticep.native.structs import MessageType, Role
from elasticep.runtime import seats
from elasticep.runtime.liveness.process import Process
from elasticep.runtime.liveness.spawn import ALLOCATOR, spawn_worker
from elasticep.runtime.seats import SeatState
from elasticep.runtime.transport.connection import Connection
from elasticep.runtime.transport.messages import Message

if TYPE_CHECKING:
    from elasticep.runtime.keeper import SeatKeeper


class Allocation:
    """The allocator of one seat, while there is one.

    Args:
        keeper: of the seat.
    """

    def __init__(self, keeper: "SeatKeeper") -> None:
        self._keeper = keeper
        self._process: Process | None = None
        self._incarnation = 0

    def start(self, incarnation: int) -> None:
        """Start the process. Raises `OSError`."""
        keeper = self._keeper
        node = keeper.node
        self.stop()
        ticket = node.tickets.issue(keeper, Role.WORKER, incarnation)
        process = spawn_worker(
            node.config.fd_socket,
            ticket,
            f"{keeper.group.name}/{keeper.rank}",
            node.limits.orphan_after_s,
            ALLOCATOR,
        )
        self._process, self._incarnation = process, incarnation
        process.watch(lambda gone: self._over(incarnation, f"the allocator ended: {gone.how}"))
        limit = node.limits.allocate_s
        keeper.later(
            limit,
            lambda late: self._over(late, f"its GPU memory was not there within {limit:g} s"),
            incarnation,
        )

    def expects(self, pid: int) -> bool:
        """Whether this process is the allocator that is waited for."""
        return self._process is not None and self._process.pid == pid and self._waiting()

    def welcome(self, connection: Connection) -> None:
        """Tell the allocator what to make, and where."""
        keeper = self._keeper
        connection.send(
            Message(
                kind=MessageType.WELCOME,
                rank=keeper.rank,
                a=keeper.seat.incarnation,
                b=keeper.seat.launch,
                c=keeper.group.layout.digest,
                d=keeper.group.device_of(keeper.rank),
                text=keeper.group.name,
                body=bytes(keeper.group.geometry),
            ),
            (),
        )

    def take(self, message: Message, fds: list[int]) -> None:
        """The allocator's answer; a descriptor that is used is taken out of `fds`."""
        keeper = self._keeper
        if not self._waiting():
            return
        incarnation = self._incarnation
        try:
            if message.status < 0:
                text = message.body.decode("utf-8", "replace") or message.text
                raise abi.error_of(message.status, "", text)
            if len(fds) != 1:
                raise AttachError("the allocator sent no memory")
            keeper.take_memory(keeper.group.memory_on_device(keeper.rank, fds.pop()))
            assert keeper.memory is not None
            keeper.memory.header.grant(incarnation)
        except ElasticEPError as error:
            keeper.apply(keeper.start_failed(error))
            self.stop()
            return
        keeper.apply(seats.Allocated(incarnation))

    def stop(self) -> None:
        """Whoever allocates now is not waited for any more."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()  # it is watched on, so that it is reaped

    def _waiting(self) -> bool:
        seat = self._keeper.seat
        return (seat.incarnation, seat.state) == (self._incarnation, SeatState.STARTING)

    def _over(self, incarnation: int, why: str) -> None:
        if incarnation == self._incarnation and self._waiting():
            self._keeper.apply(seats.Ended(incarnation, why))
            self.stop()
