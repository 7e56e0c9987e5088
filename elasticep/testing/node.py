"""Daemon and engine processes for tests of a node; see `elasticep.testing.fake_controller`.

`DaemonProcess` runs `elasticep daemon` as users do. `EngineProcess` holds a rank through the C ABI,
without torch.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar, cast

import grpc

from elasticep.group import GroupConfig
from elasticep.native import abi
from elasticep.proto import node_pb2, node_pb2_grpc, types_pb2

DEADLINE_S: Final = 60.0
Found = TypeVar("Found")


def wait_for(find: Callable[[], Found | None], what: str, deadline_s: float = DEADLINE_S) -> Found:
    """What `find` returns once it is true; `TimeoutError` when that takes too long."""
    end = time.monotonic() + deadline_s
    pause = threading.Event()
    while True:
        found = find()
        if found:
            return found
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {deadline_s:g} s")
        pause.wait(0.005)


def reason_of(error: grpc.RpcError) -> str:
    """The word in a failed call's ErrorInfo; `ValueError` when there is none of ours."""
    from google.rpc.error_details_pb2 import ErrorInfo
    from grpc_status import rpc_status

    status = rpc_status.from_call(cast(grpc.Call, error))
    info = ErrorInfo()
    for detail in status.details if status is not None else ():
        if detail.Unpack(info) and info.domain == "elasticep":
            return str(info.reason)
    raise ValueError(f"no ErrorInfo in {error}")


class DaemonProcess:
    """`elasticep daemon` in a folder of its own; the log is `daemon.log` there.

    Args:
        folder: short, since socket paths are; made if it does not exist.
        node: the node's name.
        controllers: addresses.
        seats: as `--seats`.
        flags: further flags.

    Attributes:
        environment: of the process.
        wrapper: the interpreter, or a command that becomes it.
        pass_fds: descriptors that the process inherits.
    """

    def __init__(
        self, folder: Path, node: str, controllers: list[str], seats: str, *flags: str
    ) -> None:
        self.folder = folder
        self.node = node
        self.log_path = folder.with_suffix(".log")
        self.environment = dict(os.environ)
        self.wrapper: tuple[str, ...] = (sys.executable,)
        self.pass_fds: tuple[int, ...] = ()
        self._arguments = [
            *("-m", "elasticep.cli.main", "daemon"),
            *("--node", node, "--socket-dir", str(folder), "--seats", seats),
            *("--controllers", ",".join(controllers), "--log-format", "json", *flags),
        ]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def grpc_socket(self) -> str:
        """Path of the gRPC socket."""
        return str(self.folder / "daemon.sock")

    @property
    def fd_socket(self) -> str:
        """Path of the SEQPACKET socket."""
        return str(self.folder / "daemon.fd")

    @property
    def pid(self) -> int:
        """Of the running daemon."""
        assert self.process is not None
        return self.process.pid

    def start(self, *, wait: bool = True) -> Self:
        """Start, or start again."""
        already = self.events("daemon.ready")
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.wrapper, *self._arguments],
                stdin=subprocess.DEVNULL,
                stderr=log,
                env=self.environment,
                pass_fds=self.pass_fds,
            )
        if wait:
            self.wait_ready(len(already))
        return self

    def wait_ready(self, already: int = 0) -> None:
        """Until it has been ready once more than so many times.

        Raises:
            RuntimeError: it has ended; carries its log.
            TimeoutError: it takes too long.
        """

        def ready() -> bool:
            assert self.process is not None
            if self.process.poll() is not None:
                raise RuntimeError(f"the daemon exited: {self.log_path.read_text()}")
            return len(self.events("daemon.ready")) > already

        wait_for(ready, f"daemon {self.node}")

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """Log events so far, of one name or all."""
        found = []
        if self.log_path.exists():
            for line in self.log_path.read_text().splitlines():
                if line.startswith("{"):
                    event = json.loads(line)
                    if name in ("", event["event"]):
                        found.append(event)
        return found

    def stub(self) -> "node_pb2_grpc.NodeServiceStub":
        """A stub; the channel is closed with the process's end."""
        return node_pb2_grpc.NodeServiceStub(grpc.insecure_channel(f"unix:{self.grpc_socket}"))

    def call(self, method: str, request: Any, timeout: float = DEADLINE_S) -> Any:
        """One call over a channel of its own."""
        with grpc.insecure_channel(f"unix:{self.grpc_socket}") as channel:
            stub = node_pb2_grpc.NodeServiceStub(channel)
            return getattr(stub, method)(request, timeout=timeout)

    def status(self) -> node_pb2.GetStatusResponse:
        """GetStatus."""
        answer: node_pb2.GetStatusResponse = self.call("GetStatus", node_pb2.GetStatusRequest())
        return answer

    def seat(self, group: str, rank: int) -> node_pb2.SeatStatus:
        """One seat of GetStatus."""
        for seat in self.status().seats:
            if (seat.seat.group, seat.seat.rank) == (group, rank):
                return seat
        raise KeyError((group, rank))

    def attach(
        self, group: str, rank: int, *, wait_ms: int = 10_000, pid: int = 0, **more: Any
    ) -> node_pb2.AttachResponse:
        """Attach; `grpc.RpcError` when it is refused."""
        request = node_pb2.AttachRequest(
            group=group,
            rank=rank,
            pid=pid or os.getpid(),
            abi_version=abi.ABI_VERSION,
            wait_ms=wait_ms,
            **more,
        )
        answer: node_pb2.AttachResponse = self.call("Attach", request, wait_ms / 1000 + DEADLINE_S)
        return answer

    def kill(self) -> None:
        """SIGKILL the daemon, and only it."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it; its exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)


# Through ctypes alone: an engine starts in a fraction of the time that numpy needs to import.
_ENGINE_CODE: Final = """
import ctypes, sys
from elasticep.native import abi
api, session, info = abi.api(), ctypes.c_void_p(), abi.StepInfo()
complete = ctypes.c_uint32()
abi.check(api.ep_session_open(sys.argv[1].encode(), sys.argv[2].encode(), 60000, session), "")
print("up", flush=True)
for line in sys.stdin:
    try:
        word, _, rest = line.strip().partition(" ")
        if word == "step":
            abi.check(api.ep_step_begin(session, 0, int(rest or 0), info), "")
            abi.check(api.ep_step_end(session, complete), "")
            print(f"stepped {info.epoch} {info.step} {complete.value}", flush=True)
        elif word == "close":
            if session:
                api.ep_session_close(session)
                session = ctypes.c_void_p()
            print("closed", flush=True)
    except Exception as error:
        print(f"error {type(error).__name__} {error}", flush=True)
"""


class EngineProcess:
    """A process that holds a rank and does what it is told: "step", "close"."""

    def __init__(self, fd_socket: str, ticket: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ENGINE_CODE, fd_socket, ticket],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.strip())
        self._lines.put("")

    @property
    def pid(self) -> int:
        """Of the engine."""
        return self._process.pid

    def say(self, line: str) -> None:
        """Tell it to do something; `hear` gets the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def hear(self, deadline_s: float = DEADLINE_S) -> str:
        """Its next line, "" when it is gone."""
        return self._lines.get(timeout=deadline_s)

    def up(self) -> Self:
        """Wait until it holds its rank."""
        line = self.hear()
        if line != "up":
            raise RuntimeError(f"the engine said {line!r}")
        return self

    def ask(self, line: str, deadline_s: float = DEADLINE_S) -> str:
        """`say`, then `hear`."""
        self.say(line)
        return self.hear(deadline_s)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Its exit status."""
        return self._process.wait(deadline_s)

    def close(self) -> None:
        """End and reap it."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def view_of(
    config: GroupConfig,
    epoch: int,
    previous: int,
    members: dict[int, tuple[int, str]],
    expelled: dict[int, int] | None = None,
) -> types_pb2.View:
    """A view with a plain placement: each expert on the (expert modulo members)-th member.

    Args:
        config: the group's config.
        epoch: number of the view.
        previous: the epoch that it follows, 0 = none.
        members: rank -> (incarnation, node).
        expelled: rank -> incarnation.
    """
    import numpy as np

    g = config.geometry
    ranks = sorted(members)
    expert = np.full((g.layers, g.max_ranks, g.slots_per_rank), -1, np.int32)
    weight = np.zeros(expert.shape, np.uint32)
    used = dict.fromkeys(ranks, 0)
    for number in range(g.experts):
        rank = ranks[number % len(ranks)]
        if used[rank] < g.slots_per_rank:
            expert[:, rank, used[rank]], weight[:, rank, used[rank]] = number, 65536
            used[rank] += 1
    return types_pb2.View(
        group=config.name,
        epoch=epoch,
        previous_epoch=previous,
        members=[types_pb2.Member(rank=r, incarnation=i, node=n) for r, (i, n) in members.items()],
        expelled=[types_pb2.Member(rank=r, incarnation=i) for r, i in (expelled or {}).items()],
        placement=types_pb2.Placement(slot_expert=expert.tobytes(), slot_weight=weight.tobytes()),
        digest=epoch * 1000 + len(ranks),
        reason="a test says so",
    )
