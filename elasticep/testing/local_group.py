"""A group without daemon and controller: the data plane of one host alone.

For tests and benchmarks. It plays the daemon's part: it owns the regions, answers on the SEQPACKET
socket, watches the robust futexes and stages views. Engines may be threads of the same process
(`session`), since the native calls release the interpreter lock, or processes that dial
`socket_path` with a `ticket`.
"""

import array
import contextlib
import ctypes
import mmap
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from elasticep.native import abi
from elasticep.testing.raw import RawSession

DEADLINE_S: Final = 20.0
_GROUP_KEY: Final = 1
_MAX_MESSAGE: Final = 64 * 1024


@dataclass(slots=True)
class _Seat:
    header_fd: int
    data_fd: int
    header: int
    incarnation: int = 0
    worker: subprocess.Popen[bytes] | None = None
    runner: socket.socket | None = None
    staged: dict[int, tuple[int, str]] = field(default_factory=dict)  # epoch -> status, text
    sent_peers: set[int] = field(default_factory=set)
    adopted: int = 0


class LocalGroup:
    """Regions, workers and views of one group.

    Args:
        geometry: sizes and exchanges; `geometry.launch` decides whether workers are started.
        timeouts: native deadlines; defaults are short enough for tests.
        ranks: seats to open at once; the others can be opened later with `open_seat`.
    """

    def __init__(
        self,
        geometry: abi.Geometry,
        *,
        ranks: Sequence[int] | None = None,
        timeouts: abi.Timeouts | None = None,
    ) -> None:
        self._api = abi.api()
        self.geometry = geometry
        self._timeouts = timeouts or abi.Timeouts(
            suspect_after_ns=100_000_000,
            hang_timeout_ns=1_000_000_000,
            exchange_timeout_ns=5_000_000_000,
            step_timeout_ns=10_000_000_000,
        )
        self.layout = abi.LayoutInfo()
        abi.check(self._api.ep_layout(ctypes.byref(geometry), ctypes.byref(self.layout)), "layout")
        self._dir = tempfile.mkdtemp(prefix="eep-")
        self.socket_path = os.path.join(self._dir, "fd")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.socket_path)
        self._listener.listen(64)
        self._changed = threading.Condition()
        self._seats: dict[int, _Seat] = {}
        self._tickets: dict[str, tuple[int, int]] = {}  # ticket -> rank, role
        self._events: list[abi.Event] = []
        self._connections: dict[int, tuple[socket.socket, int]] = {}
        self._watcher = self._api.ep_watcher_new()
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="local-group", daemon=True)
        self._thread.start()
        for rank in range(geometry.max_ranks) if ranks is None else ranks:
            self.open_seat(rank)

    # ---- seats

    def open_seat(self, rank: int) -> None:
        """Make the regions of a seat, or grant it anew, and start its worker (service launch)."""
        seat = self._seats.get(rank)
        if seat is None:
            header_fd = abi.check(
                self._api.ep_memory_create(b"eep-header", self.layout.header_bytes), "header"
            )
            data_fd = abi.check(
                self._api.ep_memory_create(b"eep-data", self.layout.data_bytes), "data"
            )
            abi.check(
                self._api.ep_header_format(
                    header_fd, ctypes.byref(self.geometry), rank, ctypes.byref(self._timeouts)
                ),
                "header",
            )
            header = self._api.ep_header_open(header_fd, self.layout.digest)
            if not header:
                raise abi.error_of(int(abi.Error.EMISMATCH), "opening a header")
            seat = _Seat(header_fd, data_fd, header)
            self._seats[rank] = seat
            self._api.ep_watcher_peer_add(self._watcher, _GROUP_KEY, header)
            self._api.ep_watcher_watch(self._watcher, rank, _GROUP_KEY, header)
        seat.incarnation += 1
        seat.staged.clear()
        seat.sent_peers.clear()
        abi.check(self._api.ep_header_grant(seat.header, seat.incarnation), f"rank {rank}")
        if self.geometry.launch == abi.Launch.SERVICE:
            ticket = self.ticket(rank, abi.Role.WORKER)
            code = (
                "import sys; from elasticep.native import abi; "
                "sys.exit(-abi.api().ep_worker_run(*(a.encode() for a in sys.argv[1:])) & 255)"
            )
            seat.worker = subprocess.Popen(
                [sys.executable, "-c", code, self.socket_path, ticket], stdin=subprocess.DEVNULL
            )
            self.wait_for(lambda: seat.runner is not None, f"the worker of rank {rank}")

    def ticket(self, rank: int, role: int = abi.Role.ENGINE) -> str:
        """A single-use ticket for the socket."""
        name = f"{rank}-{role}-{os.urandom(6).hex()}"
        self._tickets[name] = (rank, role)
        return name

    def session(self, rank: int) -> RawSession:
        """Attach to a rank from this process."""
        return RawSession(self.socket_path, self.ticket(rank))

    def status(self, rank: int) -> abi.Status:
        """A snapshot of a rank's header."""
        status = abi.Status()
        self._api.ep_header_status(self._seats[rank].header, ctypes.byref(status))
        return status

    def worker_pid(self, rank: int) -> int:
        """The process of a rank's worker."""
        worker = self._seats[rank].worker
        assert worker is not None
        return worker.pid

    def kill_worker(self, rank: int) -> int:
        """SIGKILL a worker and reap it; returns when it was killed, CLOCK_MONOTONIC ns."""
        worker = self._seats[rank].worker
        assert worker is not None
        at = time.monotonic_ns()
        worker.kill()
        worker.wait(DEADLINE_S)
        return at

    def signal_worker(self, rank: int, number: int) -> None:
        """Send a signal (SIGSTOP, SIGCONT) to a worker."""
        os.kill(self.worker_pid(rank), number)

    def mark_dead(self, rank: int, incarnation: int | None = None) -> None:
        """Set an incarnation's dead word in every header, as for an expulsion."""
        inc = self._seats[rank].incarnation if incarnation is None else incarnation
        for seat in self._seats.values():
            self._api.ep_header_mark_dead(seat.header, rank, inc)

    def fence(self, rank: int, epoch: int, why: str) -> None:
        """Fence the present incarnation of a rank."""
        seat = self._seats[rank]
        self._api.ep_header_fence(seat.header, seat.incarnation, epoch, why.encode())

    def failpoint(self, rank: int, site: int, action: int, after: int = 1) -> None:
        """Let a rank's runner stop or kill itself at the `after`-th pass of a site from now."""
        abi.check(
            self._api.ep_header_failpoint(self._seats[rank].header, site, action, after),
            f"failpoint of rank {rank}",
        )

    def failpoint_hits(self, rank: int) -> int:
        """How often the armed site fired."""
        return int(self._api.ep_header_failpoint_hits(self._seats[rank].header))

    def data(self, rank: int) -> npt.NDArray[np.uint8]:
        """The bytes of a rank's data region, mapped here (a copy of the mapping, not of bytes)."""
        seat = self._seats[rank]
        return np.frombuffer(mmap.mmap(seat.data_fd, self.layout.data_bytes), np.uint8)

    # ---- views

    def stage(
        self,
        epoch: int,
        previous: int,
        members: Mapping[int, int] | Sequence[int],
        slot_expert: npt.NDArray[np.int32],
        slot_weight: npt.NDArray[np.uint32] | None = None,
        *,
        only: Sequence[int] | None = None,
        wait: bool = True,
    ) -> None:
        """Stage a view on its members (or on some of them) and wait for their answers.

        Args:
            epoch: number of the view.
            previous: the epoch it follows, 0 for the first view.
            members: rank -> incarnation, or ranks with their present incarnations.
            slot_expert: int32 [layers, max_ranks, slots].
            slot_weight: uint32 of the same shape; by default every live copy gets an equal share.
            only: stage on these ranks alone.
            wait: wait for the answers.
        """
        incarnations = (
            dict(members)
            if isinstance(members, Mapping)
            else {r: self._seats[r].incarnation for r in members}
        )
        if slot_weight is None:
            slot_weight = equal_weights(slot_expert, list(incarnations))
        experts = np.ascontiguousarray(slot_expert, np.int32)
        weights = np.ascontiguousarray(slot_weight, np.uint32)
        view = abi.View(epoch=epoch, previous_epoch=previous)
        for rank, inc in incarnations.items():
            view.incarnation[rank] = inc
        view.slot_expert, view.slot_weight = experts.ctypes.data, weights.ctypes.data
        bank = abi.check(self._api.ep_memory_create(b"eep-bank", self.layout.bank_bytes), "bank")
        try:
            abi.check(
                self._api.ep_bank_write(bank, ctypes.byref(self.geometry), ctypes.byref(view)),
                f"view {epoch}",
            )
            targets = list(incarnations) if only is None else list(only)
            if self.geometry.launch == abi.Launch.INLINE:
                for rank in targets:
                    self.wait_for(
                        lambda r=rank: self._seats[r].runner is not None,
                        f"the engine of rank {rank}",
                    )
            for rank in targets:
                self._send_stage(rank, epoch, bank, [r for r in incarnations if r != rank])
        finally:
            os.close(bank)
        if wait:
            for rank in targets:
                self.wait_staged(rank, epoch)

    def wait_staged(self, rank: int, epoch: int) -> None:
        """Wait until a rank has staged an epoch; raises what it answered if it could not."""
        seat = self._seats[rank]
        self.wait_for(lambda: epoch in seat.staged, f"rank {rank} to stage epoch {epoch}")
        status, text = seat.staged[epoch]
        if status:
            raise RuntimeError(f"rank {rank} could not stage epoch {epoch}: {text}")

    def _send_stage(self, rank: int, epoch: int, bank: int, peers: list[int]) -> None:
        seat = self._seats[rank]
        assert seat.runner is not None
        new = [p for p in peers if p not in seat.sent_peers]
        seat.sent_peers.update(new)
        fds = [
            bank,
            *(fd for p in new for fd in (self._seats[p].header_fd, self._seats[p].data_fd)),
        ]
        message = _message(abi.MessageType.STAGE, rank=rank, a=epoch, b=len(new))
        body = np.array(new, np.uint32).tobytes()
        _send(seat.runner, bytes(message) + body, fds)

    # ---- the socket

    def wait_for(self, condition: Any, what: str, deadline_s: float = DEADLINE_S) -> None:
        """Wait until `condition()` holds, woken by every message and liveness event."""
        end = time.monotonic() + deadline_s
        with self._changed:
            while not condition():
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"{what}: not within {deadline_s} s")
                self._changed.wait(min(left, 0.05))

    @property
    def deaths(self) -> list[abi.Event]:
        """Liveness events of kind DIED so far."""
        with self._changed:
            return [e for e in self._events if e.kind == abi.EventKind.DIED]

    def _serve(self) -> None:
        poll = select.poll()
        event_fd = self._api.ep_watcher_fd(self._watcher)
        for fd in (self._listener.fileno(), event_fd, self._stop_read):
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._stop_read:
                    return
                if fd == self._listener.fileno():
                    connection, _peer = self._listener.accept()
                    self._connections[connection.fileno()] = (connection, -1)
                    poll.register(connection.fileno(), select.POLLIN)
                elif fd == event_fd:
                    self._take_events()
                else:
                    self._take_message(fd, poll)
            with self._changed:
                self._changed.notify_all()

    def _take_events(self) -> None:
        while True:
            event = abi.Event()
            if not self._api.ep_watcher_next(self._watcher, ctypes.byref(event)):
                return
            with self._changed:
                self._events.append(event)

    def _take_message(self, fd: int, poll: select.poll) -> None:
        connection, rank = self._connections[fd]
        try:
            data = connection.recv(_MAX_MESSAGE)
        except OSError:
            data = b""
        if len(data) < ctypes.sizeof(abi.Message):
            poll.unregister(fd)
            self._connections.pop(fd)
            with self._changed:
                seat = self._seats.get(rank)
                if seat is not None and seat.runner is connection:
                    seat.runner = None
            connection.close()
            return
        message = abi.Message.from_buffer_copy(data[: ctypes.sizeof(abi.Message)])
        if message.type == abi.MessageType.HELLO:
            self._welcome(connection, message)
        elif rank >= 0:
            seat = self._seats[rank]
            with self._changed:
                if message.type == abi.MessageType.STAGED:
                    seat.staged[message.a] = (message.status, message.text.decode())
                elif message.type == abi.MessageType.ADOPTED:
                    seat.adopted = message.a

    def _welcome(self, connection: socket.socket, hello: abi.Message) -> None:
        known = self._tickets.pop(hello.text.decode(), None)
        if known is None or known[1] != hello.a:
            _send(
                connection,
                bytes(_message(abi.MessageType.REFUSED, status=-1, text=b"unknown ticket")),
                [],
            )
            return
        rank, role = known
        seat = self._seats[rank]
        self._connections[connection.fileno()] = (connection, rank)
        answer = _message(
            abi.MessageType.WELCOME,
            rank=rank,
            a=seat.incarnation,
            b=self.geometry.launch,
            c=self.layout.digest,
            text=b"local",
        )
        _send(connection, bytes(answer) + bytes(self.geometry), [seat.header_fd, seat.data_fd])
        runs = role == abi.Role.WORKER or self.geometry.launch == abi.Launch.INLINE
        if runs:
            with self._changed:
                seat.runner = connection

    # ---- the end

    def close(self) -> None:
        """End workers, close every descriptor, remove the socket directory."""
        for rank, seat in self._seats.items():
            self._api.ep_header_fence(seat.header, seat.incarnation, 0, b"the group was closed")
            if seat.worker is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(seat.worker.pid, signal.SIGCONT)
                try:
                    seat.worker.wait(2)
                except subprocess.TimeoutExpired:
                    seat.worker.kill()
                    seat.worker.wait(DEADLINE_S)
            self._api.ep_watcher_unwatch(self._watcher, rank)
        os.write(self._stop_write, b"x")
        self._thread.join(DEADLINE_S)
        self._api.ep_watcher_free(self._watcher)
        for connection, _ in self._connections.values():
            connection.close()
        self._listener.close()
        os.close(self._stop_read)
        os.close(self._stop_write)
        for seat in self._seats.values():
            self._api.ep_header_close(seat.header)
            os.close(seat.header_fd)
            os.close(seat.data_fd)
        shutil.rmtree(self._dir, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _message(kind: int, **values: Any) -> abi.Message:
    return abi.Message(magic=abi.MESSAGE_MAGIC, type=kind, **values)


def _send(connection: socket.socket, data: bytes, fds: list[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendmsg([data], rights)


def equal_weights(
    slot_expert: npt.NDArray[np.int32], members: Sequence[int]
) -> npt.NDArray[np.uint32]:
    """Dispatch weights that split every expert equally over its copies on `members`.

    Args:
        slot_expert: int32 [layers, max_ranks, slots], -1 = empty.
        members: ranks that count.

    Returns:
        uint32 of the same shape; the weights of an expert's copies sum to 65536.
    """
    weights = np.zeros(slot_expert.shape, np.uint32)
    live = np.zeros(slot_expert.shape[1], bool)
    live[list(members)] = True
    for layer in range(slot_expert.shape[0]):
        copies: dict[int, list[tuple[int, int]]] = {}
        for rank, slot in np.argwhere(slot_expert[layer] >= 0):
            if live[rank]:
                copies.setdefault(int(slot_expert[layer, rank, slot]), []).append((rank, slot))
        for places in copies.values():
            share, rest = divmod(65536, len(places))
            for i, (rank, slot) in enumerate(places):
                weights[layer, rank, slot] = share + (rest if i == 0 else 0)
    return weights


def spread(
    geometry: abi.Geometry, members: Sequence[int], *, copies: int = 1
) -> npt.NDArray[np.int32]:
    """A plain placement: copy c of expert e on the (e + c)-th member, in the next free slot.

    Returns:
        int32 [layers, max_ranks, slots], -1 = empty.

    Raises:
        ValueError: the members have too few slots.
    """
    table = np.full((geometry.layers, geometry.max_ranks, geometry.slots), -1, np.int32)
    used = dict.fromkeys(members, 0)
    for copy in range(copies):
        for expert in range(geometry.experts):
            rank = members[(expert + copy) % len(members)]
            if used[rank] >= geometry.slots:
                raise ValueError(f"rank {rank} has {geometry.slots} slots, too few for this spread")
            table[:, rank, used[rank]] = expert
            used[rank] += 1
    return table
