"""The process that copies weights: `python -m elasticep.runtime.weights.mover FD RATE LABEL`.

It is the one writer of a node's arenas. It does what its daemon says over the SEQPACKET socket FD,
one unit after another (`Orders` says which first), and may be killed at any moment: what it was
filling is labelled so and never used, and its successor begins with emptying that. It ends with its
daemon.

Whoever writes into an arena holds a lock on it, which the kernel lets go when the process is gone:
a successor waits until the last byte of its predecessor is written.
"""

import array
import contextlib
import fcntl
import json
import mmap
import os
import signal
import socket
import sys
import threading
import time
from ctypes import CDLL
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from elasticep.arena import Arena, Fill
from elasticep.config import TlsConfig
from elasticep.errors import ChecksumMismatch, ElasticEPError
from elasticep.runtime.weights import messages
from elasticep.runtime.weights.checkpoints import Checkpoints
from elasticep.runtime.weights.messages import (
    MAX_TEXT,
    Beat,
    Copy,
    Drop,
    Ended,
    Failure,
    Kind,
    Moved,
    Started,
    Use,
    Used,
)
from elasticep.runtime.weights.orders import Orders
from elasticep.runtime.weights.pace import Pace
from elasticep.runtime.weights.sources import SourceFailed, copy_arena
from elasticep.weights import ArenaLayout, WeightSpec

if TYPE_CHECKING:
    from elasticep.runtime.weights.streams import Daemons

TLS_VARIABLE: Final = "ELASTICEP_MOVER_TLS"
BEAT_S: Final = 0.5
_LOCK_S: Final = 10.0
_REPORT_S: Final = 0.05
_PR_SET_PDEATHSIG: Final = 1
_USAGE: Final = "usage: mover FD BYTES_PER_S LABEL (started by the daemon)"


@dataclass(slots=True)
class _Mapped:
    """An arena that the daemon has handed over."""

    fd: int
    map: mmap.mmap
    arena: Arena

    def close(self) -> None:
        self.arena.release()
        self.map.close()
        os.close(self.fd)


@dataclass(slots=True)
class _Job:
    copy: Copy
    done: int = 0
    reported: float = field(default_factory=time.monotonic)


class Mover:
    """Works on what comes over a socket.

    Args:
        sock: the daemon's end is at the other side.
        rate: bytes per second for what is not urgent; 0: no limit.
        tls: for daemons beyond this host.
    """

    def __init__(self, sock: socket.socket, rate: int, tls: TlsConfig) -> None:
        self._sock = sock
        self._orders = Orders()
        self._pace = Pace(rate, wait=self._orders.pause)
        self._tls = tls
        self._daemons: Daemons | None = None
        self._checkpoints = Checkpoints()
        self._arenas: dict[int, _Mapped] = {}

    def run(self) -> None:
        """Serve until the daemon is gone."""
        self._say(Beat())
        threading.Thread(target=self._work, name="copy", daemon=True).start()
        while True:
            data, ancillary, _, _ = self._sock.recvmsg(
                messages.MAX_BYTES, socket.CMSG_SPACE(4 * 4), socket.MSG_CMSG_CLOEXEC
            )
            if not data:
                return
            fds = array.array("i")
            for level, kind, content in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds.frombytes(content[: len(content) // fds.itemsize * fds.itemsize])
            try:
                self._orders.put(messages.unpack(data), fds.tolist())
            except messages.BadMoverMessage as error:  # the rest goes on
                sys.stderr.write(f"mover: {error}\n")

    def _work(self) -> None:
        try:
            self._loop()
        except BrokenPipeError:
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)  # the daemon starts another one

    def _loop(self) -> None:
        while True:
            taken = self._orders.take(BEAT_S)
            if taken is None:
                self._say(Beat())
                continue
            order, fds = taken
            match order:
                case Use():
                    self._use(order, fds[0])
                case Drop():
                    mapped = self._arenas.pop(order.arena, None)
                    if mapped is not None:
                        mapped.close()
                case Copy():
                    self._say(self._copy(order))

    def _say(self, message: messages.Message) -> None:
        self._sock.sendall(messages.pack(message))

    # ---- arenas

    def _use(self, order: Use, fd: int) -> None:
        layout = ArenaLayout(order.layers, order.slots, WeightSpec.from_dict(order.spec))
        # A descriptor of our own: locks belong to the open file, and copies of one share it.
        flags = os.O_RDWR if order.write else os.O_RDONLY
        own = os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)
        os.close(fd)
        if order.write:
            self._lock(own)
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if order.write else 0)
        mapping = mmap.mmap(own, layout.total_bytes, prot=prot)
        try:
            arena = Arena(mapping, layout)
        except ElasticEPError as error:  # a peer's: what is copied from it fails
            mapping.close()
            os.close(own)
            sys.stderr.write(f"mover: arena {order.arena}: {error}\n")
            return
        if order.write:
            arena.recover()
        self._arenas[order.arena] = _Mapped(own, mapping, arena)
        self._say(Used(order.arena))

    def _lock(self, fd: int) -> None:
        end = time.monotonic() + _LOCK_S
        pause = threading.Event()
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            if time.monotonic() > end:
                raise TimeoutError(f"another process writes into this arena for {_LOCK_S:g} s")
            self._say(Beat())
            pause.wait(0.01)

    # ---- copies

    def _copy(self, order: Copy) -> Ended:
        self._say(Started(order.job))
        job = _Job(order)
        try:
            checksum = self._fill(job)
        except SourceFailed as error:
            return _failed(job, error.failure, error)
        except ChecksumMismatch as error:
            return _failed(job, Failure.LIED, error)
        except (ElasticEPError, OSError, ValueError) as error:
            return _failed(job, Failure.FAILED, error)
        return Ended(order.job, checksum.hex(), done=job.done)

    def _fill(self, job: _Job) -> bytes:
        order = job.copy
        self._check()
        if order.arena not in self._arenas:
            raise SourceFailed(Failure.CANCELLED, "its arena was taken back")
        arena = self._arenas[order.arena].arena
        if order.expert < 0:
            arena.empty(order.layer, order.slot)
            return b""
        fill = arena.fill(order.layer, order.slot, order.expert)
        try:
            promised = self._read(job, fill)
            expected = bytes.fromhex(order.checksum) or promised or None
            return fill.finish(expected)
        except BaseException:
            fill.abandon()
            raise

    def _read(self, job: _Job, fill: Fill) -> bytes | None:
        source = job.copy.source

        def went(size: int) -> None:
            self._went(job, size)

        if source.kind is Kind.CHECKPOINT:
            self._checkpoints.copy(source.path, fill, self._pace.chunk, went)
            return None
        if source.arena >= 0:
            mapped = self._arenas.get(source.arena)
            if mapped is None:
                raise SourceFailed(Failure.GONE, f"{source} is not mapped any more")
            return copy_arena(mapped.arena, source.slot, fill, self._pace.chunk, went)
        if self._daemons is None:
            from elasticep.runtime.weights.streams import Daemons

            self._daemons = Daemons(self._tls)
        return self._daemons.copy(source, fill, went)

    def _went(self, job: _Job, size: int) -> None:
        """A chunk has arrived."""
        self._check()
        job.done += size
        if not self._orders.hurried:
            self._pace.spend(size)
        now = time.monotonic()
        if now >= job.reported + _REPORT_S:
            job.reported = now
            self._say(Moved(job.copy.job, job.done))

    def _check(self) -> None:
        if self._orders.called_off:
            raise SourceFailed(Failure.CANCELLED, "called off")


def _failed(job: _Job, failure: Failure, error: Exception) -> Ended:
    text = (str(error) or repr(error))[:MAX_TEXT]
    return Ended(job.copy.job, "", failure, text, job.done)


def main(arguments: list[str]) -> int:
    """Run until the daemon is gone; the exit status."""
    if len(arguments) != 3 or not all(word.isdigit() for word in arguments[:2]):
        sys.stderr.write(f"{_USAGE}\n")
        return 2
    # The socket's end says it too, but only to the thread that reads it.
    CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a terminal's signals are for the daemon
    tls = TlsConfig(**json.loads(os.environ.pop(TLS_VARIABLE, "{}")))
    with socket.socket(fileno=int(arguments[0])) as sock:
        with contextlib.suppress(ConnectionResetError):
            Mover(sock, int(arguments[1]), tls).run()
        os._exit(0)  # without waiting for the copy under way


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
