"""Child processes that serve one fleet of GPU ranks after another (`fleet_cuda`).

A new process with torch and a CUDA context takes many seconds; new contexts of ours in one that is
there take a fraction of one.
"""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final, Self

from elasticep import errors

START_TIMEOUT_S: Final = 120.0
CLOSE_TIMEOUT_S = 60.0
# What a process may keep of the fleets it has served, over what the first one left: descriptors,
# headers that are still mapped, bytes of the device (of a process that had it to itself).
SPARE: Final = {"descriptors": 8, "headers": 0, "device_bytes": 128 << 20}


@dataclass(slots=True)
class Child:
    """A child process as the parent sees it.

    Attributes:
        process, connection: what it is and how to talk to it.
        channel: for descriptors.
        device: its GPU, for as long as it lives.
        seats: the ranks that it holds now.
        busy: a function runs.
        gone: it has been seen to be dead.
        baseline: what it used when its first fleet was closed.
    """

    process: subprocess.Popen[bytes]
    connection: Connection
    channel: socket.socket
    device: int
    seats: tuple[int, ...] = ()
    busy: bool = False
    gone: bool = False
    baseline: dict[str, int] | None = None

    @classmethod
    def spawn(cls, device: int, variables: Mapping[str, str]) -> Self:
        """A new process that waits for its first fleet, with these environment variables, too."""
        mine, theirs = socket.socketpair()
        fds, their_fds = socket.socketpair()
        environment = dict(
            os.environ, CUDA_DEVICE_MAX_CONNECTIONS="32", CUDA_MODULE_LOADING="EAGER", **variables
        )
        command = [sys.executable, "-m", "elasticep.bench.fleet_cuda_child"]
        command += [str(theirs.fileno()), str(their_fds.fileno())]
        passed = (theirs.fileno(), their_fds.fileno())
        process = subprocess.Popen(command, pass_fds=passed, env=environment)
        theirs.close()
        their_fds.close()
        return cls(process, Connection(mine.detach()), fds, device)

    def expect(self, what: str, timeout_s: float = START_TIMEOUT_S) -> Any:
        """The value of its next message, which must be `what`.

        Raises:
            NativeError: it says something else, nothing in time, or is dead.
        """
        try:
            if not self.connection.poll(timeout_s):
                raise errors.NativeError(f"{self} gave no {what!r} within {timeout_s:g} s")
            kind, value = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise errors.NativeError(f"{self} died before it said {what!r}") from None
        if kind != what:
            raise errors.NativeError(f"{self}: {value}")
        return value

    def end(self, *, kill: bool = False) -> None:
        """Let it end, or end it."""
        if kill:
            self.process.kill()
        else:
            with contextlib.suppress(OSError):
                self.connection.send(None)
        try:
            self.process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.connection.close()
        self.channel.close()

    def __str__(self) -> str:
        return f"process of ranks {self.seats}"


class FleetPool:
    """Children that have served a fleet and wait for the next. Use as a context manager.

    A child stays on one GPU. One that died, failed or left something behind is not used again.

    Args:
        variables: of the children's environment, besides this process's.

    Attributes:
        started: processes started so far.
    """

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self._variables = dict(variables or {})
        self._idle: dict[int, list[Child]] = {}
        self.started = 0

    def take(self, device: int) -> Child:
        """A child on `device`: an idle one that lives, else a new one."""
        idle = self._idle.get(device, [])
        while idle:
            child = idle.pop()
            if child.process.poll() is None:
                return child
            child.end()
        self.started += 1
        return Child.spawn(device, self._variables)

    def give(self, child: Child) -> None:
        """Take back a child whose contexts are closed."""
        child.seats, child.busy = (), False
        self._idle.setdefault(child.device, []).append(child)

    def idle(self, device: int) -> int:
        """Children that wait on `device`."""
        return len(self._idle.get(device, []))

    def close(self) -> None:
        """End the idle children."""
        for idle in self._idle.values():
            while idle:
                idle.pop().end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def left_over(baseline: dict[str, int], used: dict[str, int], *, alone: bool) -> list[str]:
    """What a child has more than after its first fleet, in words.

    Args:
        baseline: what it used then.
        used: what it uses now.
        alone: no other child has its GPU, so the device's memory tells of it.
    """
    return [
        f"{used[name] - baseline[name]} {name}"
        for name, spare in SPARE.items()
        if used[name] - baseline[name] > spare and (alone or name != "device_bytes")
    ]
