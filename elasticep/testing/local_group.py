"""A group without daemon and controller: the data plane of one host alone.

For tests and benchmarks. It plays the daemon's part: it owns the regions, answers on the SEQPACKET
socket, watches the robust futexes and stages views. Engines may be threads of the same process
(`session`), since the native calls release the interpreter lock, or processes that dial
`socket_path` with a `ticket`.
"""

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from elasticep.native import abi
from elasticep.testing.fd_socket import FdSocket, Handlers, Welcome, message_of, send
from elasticep.testing.folders import make_folder, remove_folder
from elasticep.testing.placements import equal_weights, spread
from elasticep.testing.raw import RawSession

__all__ = ["LocalGroup", "equal_weights", "spread"]

DEADLINE_S: Final = 60.0
_GROUP_KEY: Final = 1


@dataclass(slots=True)
class _Seat:
    header_fd: int
    data_fd: int
    header: int
    incarnation: int = 0
    worker: subprocess.Popen[bytes] | None = None
    runner: socket.socket | None = None
    staged: dict[int, tuple[int, str]] = field(default_factory=dict)  # epoch -> status, text
    headway: list[tuple[int, int, int]] = field(default_factory=list)
    sent_peers: set[int] = field(default_factory=set)


class LocalGroup:
    """Regions, workers and views of one group.

    Args:
        geometry: sizes and exchanges; `geometry.launch` decides whether workers are started.
        timeouts: native deadlines; by default nothing on a busy machine takes as long.
        ranks: seats to open at once; the others can be opened later with `open_seat`.

    Attributes:
        takes: what it says that it takes (`abi.Takes`); an earlier daemon takes nothing.
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
        self.takes = abi.Takes.HEADWAY
        self._timeouts = timeouts or abi.Timeouts(
            suspect_after_ns=100_000_000,
            hang_timeout_ns=1_000_000_000,
            exchange_timeout_ns=30_000_000_000,
            step_timeout_ns=60_000_000_000,
        )
        self.layout = abi.LayoutInfo()
        abi.check(self._api.ep_layout(ctypes.byref(geometry), ctypes.byref(self.layout)), "layout")
        self._dir = make_folder("eep-")
        self.socket_path = os.path.join(self._dir, "fd")
        self._changed = threading.Condition()
        self._seats: dict[int, _Seat] = {}
        self._tickets: dict[str, tuple[int, int]] = {}  # ticket -> rank, role
        self._events: list[abi.Event] = []
        self._watcher = self._api.ep_watcher_new()
        handlers = Handlers(
            self._welcome, self._arrived, self._heard, self._gone, self._take_events, self._notify
        )
        event_fd = self._api.ep_watcher_fd(self._watcher)
        self._socket = FdSocket(self.socket_path, event_fd, handlers)
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
            data_fd = self.make_data()
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
            with self._changed:
                seat.runner = None  # that one was killed, which may not have been heard yet
            ticket = self.ticket(rank, abi.Role.WORKER)
            code = (
                "import sys; from elasticep.native import abi; "
                "sys.exit(-abi.api().ep_worker_run(*(a.encode() for a in sys.argv[1:])) & 255)"
            )
            seat.worker = subprocess.Popen(
                [sys.executable, "-c", code, self.socket_path, ticket], stdin=subprocess.DEVNULL
            )
            self.wait_for(lambda: seat.runner is not None, f"the worker of rank {rank}")

    def make_data(self) -> int:
        """Memory for the data region of a seat; a subclass may take a GPU's."""
        made = self._api.ep_memory_create(b"eep-data", self.layout.data_bytes)
        return abi.check(made, "data")

    def headway(self, rank: int) -> list[tuple[int, int, int]]:
        """What a rank said of its copies to a GPU: epoch, bytes done, bytes in all."""
        with self._changed:
            return list(self._seats[rank].headway)

    def header_fd(self, rank: int) -> int:
        """The memfd of a rank's header; it stays the group's."""
        return self._seats[rank].header_fd

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

    def policy(self, *, serve: bool, renormalise: bool = False) -> None:
        """What all runners do about lost experts from now on."""
        flags = 1 * serve + 2 * renormalise
        for seat in self._seats.values():
            abi.check(self._api.ep_header_policy(seat.header, flags), "")

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
        seat.staged.pop(epoch, None)  # when it is said again, the new answer counts
        new = [p for p in peers if p not in seat.sent_peers]
        seat.sent_peers.update(new)
        fds = [
            bank,
            *(fd for p in new for fd in (self._seats[p].header_fd, self._seats[p].data_fd)),
        ]
        message = message_of(abi.MessageType.STAGE, rank=rank, a=epoch, b=len(new))
        body = np.array(new, np.uint32).tobytes()
        send(seat.runner, bytes(message) + body, fds)

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

    def _take_events(self) -> None:
        while True:
            event = abi.Event()
            if not self._api.ep_watcher_next(self._watcher, ctypes.byref(event)):
                return
            with self._changed:
                self._events.append(event)

    def _welcome(self, ticket: str, role: int) -> Welcome | None:
        known = self._tickets.pop(ticket, None)
        if known is None or known[1] != role:
            return None
        rank = known[0]
        seat = self._seats[rank]
        message = message_of(
            abi.MessageType.WELCOME,
            rank=rank,
            a=seat.incarnation,
            b=self.geometry.launch,
            c=self.layout.digest,
            d=self.takes << 32,
            text=b"local",
        )
        body = bytes(message) + bytes(self.geometry)
        return Welcome(rank, body, (seat.header_fd, seat.data_fd))

    def _arrived(self, rank: int, role: int, connection: socket.socket) -> None:
        if role == abi.Role.WORKER or self.geometry.launch == abi.Launch.INLINE:
            with self._changed:
                self._seats[rank].runner = connection

    def _heard(self, rank: int, message: abi.Message) -> None:
        seat = self._seats[rank]
        with self._changed:
            if message.type == abi.MessageType.STAGED:
                seat.staged[message.a] = (message.status, message.text.decode())
            elif message.type == abi.MessageType.HEADWAY:
                seat.headway.append((message.a, message.b, message.c))

    def _gone(self, rank: int, connection: socket.socket) -> None:
        seat = self._seats[rank]
        with self._changed:
            if seat.runner is connection:
                seat.runner = None

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

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
        self._socket.close()
        self._api.ep_watcher_free(self._watcher)
        for seat in self._seats.values():
            self._api.ep_header_close(seat.header)
            os.close(seat.header_fd)
            os.close(seat.data_fd)
        remove_folder(self._dir)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
