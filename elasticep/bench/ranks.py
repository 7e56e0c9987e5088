"""The process tree of a bench: sets of rank processes that wait without using a core.

Every system that is measured (ours, gloo, MPI) runs as one set of processes below the bench's own.
All obey the same messages over a SEQPACKET socket, so their runs can be interleaved:
`prepare`, `run`, `end` and whatever else the system's class has as a method named `on_...`.
"""

import array
import contextlib
import importlib
import json
import os
import select
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

from elasticep import errors
from elasticep.testing.folders import make_folder, remove_folder

DEADLINE_S: Final = 120.0
MAX_BYTES: Final = 192 * 1024
_HELLO_BYTES: Final = 64
_STOP_S: Final = 5.0


class BenchError(errors.ElasticEPError):
    """A system could not be measured; the message says why."""

    reason = "BENCH"


def encode(message: Mapping[str, Any]) -> bytes:
    """A message as bytes."""
    return json.dumps(message).encode()


def decode(data: bytes) -> dict[str, Any]:
    """What `encode` made."""
    message: dict[str, Any] = json.loads(data)
    return message


class RankSet:
    """One system's rank processes, as its parent sees them.

    Args:
        system: `module:Class` that the processes run, see `serve`.
        ranks: how many.
        launch: makes the processes, given the command line of one rank; by default each command
            is started `ranks` times. MPI and fork servers start all ranks from one command.
        env: environment beyond the parent's own.
    """

    def __init__(
        self,
        system: str,
        ranks: int,
        *,
        launch: Callable[[list[str]], list[list[str]]] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.system = system
        self.ranks = ranks
        self._folder = make_folder("eep-bench-")
        path = os.path.join(self._folder, "s")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(ranks)
        command = [sys.executable, "-m", "elasticep.bench.ranks", system, path]
        self._commands = launch(command) if launch else [[*command, str(r)] for r in range(ranks)]
        self._env = {**os.environ, **(env or {})}
        self._log_path = os.path.join(self._folder, "log")
        self.connections: dict[int, socket.socket] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self._processes += [self._spawn(words) for words in self._commands]
            self._accept()
        except BaseException:
            self.close()
            raise

    def _spawn(self, words: list[str]) -> subprocess.Popen[bytes]:
        with open(self._log_path, "ab") as log:
            return subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._env
            )

    def pid(self, rank: int) -> int:
        """Process of a rank, where each has a command of its own."""
        return self._processes[rank].pid

    def respawn(self, rank: int) -> None:
        """Reap a rank's process, which was killed, and start another in its place."""
        self._processes[rank].wait(DEADLINE_S)
        if rank in self.connections:
            self.connections.pop(rank).close()
        self._processes[rank] = self._spawn(self._commands[rank])
        self._accept()

    def _accept(self) -> None:
        end = time.monotonic() + DEADLINE_S
        while len(self.connections) < self.ranks:
            if any(p.poll() is not None for p in self._processes):
                raise BenchError(f"{self.system} did not start: {self._log_tail()}")
            if time.monotonic() > end:
                raise BenchError(f"{self.system} did not start within {DEADLINE_S:g} s")
            if select.select([self._listener], [], [], 0.2)[0]:
                connection, _ = self._listener.accept()
                rank = decode(connection.recv(_HELLO_BYTES))["rank"]
                self.connections[int(rank)] = connection

    def _log_tail(self) -> str:
        with contextlib.suppress(FileNotFoundError), open(self._log_path, errors="replace") as log:
            lines = [line.strip() for line in log if line.strip()]
            return lines[-1] if lines else "no output"
        return "no output"

    def send(
        self, op: str, each: Mapping[int, Mapping[str, Any]] | None = None, **same: Any
    ) -> None:
        """Send an order to all ranks: `same` to everyone, `each[rank]` added for one."""
        for rank, connection in self.connections.items():
            order = {"op": op, **same, **(each or {}).get(rank, {})}
            try:
                connection.send(encode(order))
            except OSError as error:
                raise BenchError(f"{self.system} rank {rank} is gone: {error}") from error

    def send_to(self, rank: int, op: str, **values: Any) -> None:
        """Send an order to one rank."""
        self.connections[rank].send(encode({"op": op, **values}))

    def answers(self, deadline_s: float = DEADLINE_S) -> list[dict[str, Any]]:
        """The answers of all ranks to the last order, by rank.

        Raises:
            BenchError: a rank answered with an error, ended, or was too slow.
        """
        end = time.monotonic() + deadline_s
        got: dict[int, dict[str, Any]] = {}
        for rank, connection in self.connections.items():
            left = max(0.0, end - time.monotonic())
            if not select.select([connection], [], [], left)[0]:
                raise BenchError(f"{self.system} rank {rank}: no answer within {deadline_s:g} s")
            data = connection.recv(MAX_BYTES)
            if not data:
                raise BenchError(f"{self.system} rank {rank} ended: {self._log_tail()}")
            got[rank] = decode(data)
        failed = {rank: answer["error"] for rank, answer in got.items() if "error" in answer}
        if failed:
            rank = min(failed)
            raise BenchError(f"{self.system} rank {rank}: {failed[rank]}")
        return [got[rank] for rank in sorted(got)]

    def call(self, op: str, deadline_s: float = DEADLINE_S, **same: Any) -> list[dict[str, Any]]:
        """`send` and `answers`."""
        self.send(op, **same)
        return self.answers(deadline_s)

    def close(self, *, kill: bool = False) -> None:
        """End the processes and remove the socket. May be called twice.

        `kill`: without asking, for ranks that wait for one another.
        """
        for connection in self.connections.values():
            connection.close()  # end of file is the order to end
        self.connections.clear()
        self._listener.close()  # the same for those that were still to be heard
        for process in self._processes:
            if kill:
                process.kill()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        remove_folder(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@contextlib.contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Variables that processes started inside inherit."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def connect(path: str, rank: int) -> socket.socket:
    """A rank's own end of the socket."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_BYTES)
    connection.connect(path)
    connection.send(encode({"rank": rank}))
    return connection


def serve(system: Any, connection: socket.socket) -> None:
    """Obey orders until end of file. An exception becomes the answer, and the rank goes on."""
    while data := connection.recv(MAX_BYTES):
        order = decode(data)
        try:
            answer = getattr(system, f"on_{order.pop('op')}")(**order) or {}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
        connection.send(encode(answer))


def times(values: Sequence[int]) -> list[int]:
    """Nanoseconds as a list that fits into one answer."""
    return array.array("q", values[:4096]).tolist()


def main(arguments: Sequence[str]) -> int:
    """`python -m elasticep.bench.ranks module:Class SOCKET [RANK]`."""
    name, path, *rest = arguments
    module, _, kind = name.partition(":")
    system = getattr(importlib.import_module(module), kind)
    # Systems that start all their ranks from one command find their own rank.
    system.start(path, int(rest[0]) if rest else -1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
