"""A handful of GPU ranks without a daemon: processes that share regions, for tests and benchmarks.

The parent makes the headers, keeps every descriptor, watches the robust locks with the native
watcher and so stands for the daemon; it never touches CUDA. Each child holds one or more ranks of
one GPU and runs the functions it is told to.
"""

import contextlib
import importlib
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Final, Self

from elasticep import errors
from elasticep.native import abi, region
from elasticep.native import cuda as native
from elasticep.native.watcher import Watcher

GROUP_KEY: Final = 1
START_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    """Who runs where.

    Attributes:
        geometry: of the group, as bytes of `abi.Geometry`.
        devices: devices[p] is the GPU of process p.
        seats: seats[p] are the ranks of process p.
        num_sms: SMs that a kernel may take; 0 means the formula.
        plan: how rows move.
        tuning: other ways of doing the same, in measurements.
        exchange_timeout_ms: a wait this long tears the step.
        step_timeout_ms: a barrier this long gives up.
        ranks_on_device: ranks that run on a GPU at the same time; 0 means all that are there.
    """

    geometry: bytes
    devices: tuple[int, ...]
    seats: tuple[tuple[int, ...], ...]
    num_sms: int = 0
    plan: native.Plan = native.Plan.AUTOMATIC
    tuning: native.Tuning = native.Tuning.NONE
    exchange_timeout_ms: int = 10_000
    step_timeout_ms: int = 30_000
    ranks_on_device: int = 0

    def shape(self) -> abi.Geometry:
        """The geometry as a structure."""
        return abi.Geometry.from_buffer_copy(self.geometry)

    def ranks(self) -> list[int]:
        """All seats that are taken."""
        return sorted(r for seats in self.seats for r in seats)

    def sharing(self, process: int) -> int:
        """Ranks whose kernels share the GPU of `process`."""
        if self.ranks_on_device:
            return self.ranks_on_device
        device = self.devices[process]
        return sum(len(s) for s, d in zip(self.seats, self.devices, strict=True) if d == device)


@dataclass(slots=True)
class Child:
    """A child process as the parent sees it."""

    process: subprocess.Popen[bytes]
    connection: Connection
    seats: tuple[int, ...]
    busy: bool = False


@dataclass(slots=True)
class Member:
    """What a child's functions get.

    Attributes:
        spec: the fleet.
        index: number of this process.
        device: its GPU.
        contexts: {rank: context} of the ranks held here.
    """

    spec: FleetSpec
    index: int
    device: int
    contexts: dict[int, native.CudaContext]
    connection: Connection
    notes: dict[str, Any] = field(default_factory=dict)

    def sync(self) -> None:
        """Wait until every living process of the fleet has come here."""
        self.connection.send(("sync", None))
        self.connection.recv()

    def report(self, value: object) -> None:
        """Send something to the parent's `on_report` while the function goes on."""
        self.connection.send(("report", value))


class Fleet:
    """Parent side. Use as a context manager.

    Raises:
        NativeError: a child failed to start; carries its traceback.
    """

    def __init__(self, spec: FleetSpec) -> None:
        self.spec = spec
        geometry = spec.shape()
        layout = region.layout(geometry)
        ms = 1_000_000
        timeouts = abi.Timeouts(
            suspect_after_ns=500 * ms,
            hang_timeout_ns=5_000 * ms,
            exchange_timeout_ns=spec.exchange_timeout_ms * ms,
            step_timeout_ns=spec.step_timeout_ms * ms,
        )
        self.headers: dict[int, region.Header] = {}
        header_fds: dict[int, int] = {}
        self.watcher = Watcher()
        for rank in spec.ranks():
            fd = region.create_memory(f"header-{rank}", layout.header_bytes)
            region.format_header(fd, geometry, rank, timeouts)
            header = region.Header(fd, layout.digest)
            header.grant(1)
            self.watcher.watch(rank, GROUP_KEY, header)
            self.watcher.peer_add(GROUP_KEY, header)
            self.headers[rank] = header
            header_fds[rank] = fd
        self.children: list[Child] = []
        sockets = [self._spawn(p) for p in range(len(spec.devices))]
        region_fds: dict[int, int] = {}
        try:
            for child, channel in zip(self.children, sockets, strict=True):
                socket.send_fds(channel, [b"h"], [header_fds[r] for r in child.seats])
            for child, channel in zip(self.children, sockets, strict=True):
                self._expect(child, "regions")
                _, fds, _, _ = socket.recv_fds(channel, 1, len(child.seats))
                region_fds.update(zip(child.seats, fds, strict=True))
            ordered = [region_fds[r] for r in sorted(region_fds)]
            for channel in sockets:
                for fd in ordered:
                    socket.send_fds(channel, [b"r"], [fd])
            for child in self.children:
                self._expect(child, "ready")
        except BaseException:
            self.close()
            raise
        finally:
            for fd in (*header_fds.values(), *region_fds.values()):
                os.close(fd)
            for channel in sockets:
                channel.close()

    def _spawn(self, index: int) -> socket.socket:
        mine, theirs = socket.socketpair()
        fds, their_fds = socket.socketpair()
        environment = dict(
            os.environ, CUDA_DEVICE_MAX_CONNECTIONS="32", CUDA_MODULE_LOADING="EAGER"
        )
        command = [sys.executable, "-m", "elasticep.bench.fleet_cuda"]
        command += [str(theirs.fileno()), str(their_fds.fileno())]
        passed = (theirs.fileno(), their_fds.fileno())
        process = subprocess.Popen(command, pass_fds=passed, env=environment)
        theirs.close()
        their_fds.close()
        connection = Connection(mine.detach())
        connection.send((self.spec, index))
        self.children.append(Child(process, connection, self.spec.seats[index]))
        return fds

    def _expect(self, child: Child, what: str) -> None:
        if not child.connection.poll(START_TIMEOUT_S):
            raise errors.NativeError(f"process of ranks {child.seats} gave no {what!r} in time")
        kind, value = child.connection.recv()
        if kind != what:
            raise errors.NativeError(f"process of ranks {child.seats}: {value}")

    def start(self, target: str, **arguments: object) -> None:
        """Let every living child run `target`, "module:function"."""
        for child in self.living():
            child.connection.send((target, arguments))
            child.busy = True

    def living(self) -> list[Child]:
        """Children that have not ended."""
        return [c for c in self.children if c.process.poll() is None]

    def finish(
        self,
        timeout_s: float = 60.0,
        on_report: Callable[[Child, Any], None] | None = None,
        *,
        may_die: bool = False,
    ) -> list[Any]:
        """Results of the running functions, by process; None for one that died.

        Raises:
            NativeError: a function failed (with its traceback), died or took too long.
        """
        results: list[Any] = [None] * len(self.children)
        at_sync: set[int] = set()
        deadline = time.monotonic() + timeout_s
        while any(c.busy for c in self.children):
            busy = {c.connection: i for i, c in enumerate(self.children) if c.busy}
            ready = wait(list(busy), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise errors.NativeError(f"{target_names(self.children)} not finished in time")
            for connection in ready:
                index = busy[connection]  # type: ignore[index]
                child = self.children[index]
                try:
                    kind, value = child.connection.recv()
                except (EOFError, ConnectionResetError):
                    child.busy = False
                    if not may_die:
                        raise errors.NativeError(f"process of ranks {child.seats} died") from None
                    continue
                if kind == "sync":
                    at_sync.add(index)
                elif kind == "report" and on_report is not None:
                    on_report(child, value)
                elif kind == "done":
                    results[index] = value
                    child.busy = False
                elif kind == "failed":
                    raise errors.NativeError(f"process of ranks {child.seats}:\n{value}")
            running = {i for i, c in enumerate(self.children) if c.busy}
            if at_sync and running <= at_sync:
                for i in at_sync & running:
                    self.children[i].connection.send(None)
                at_sync.clear()
        return results

    def run(self, target: str, timeout_s: float = 60.0, **arguments: object) -> list[Any]:
        """`start` and `finish`."""
        self.start(target, **arguments)
        return self.finish(timeout_s)

    def close(self) -> None:
        """End all children."""
        for child in self.living():
            with contextlib.suppress(OSError):
                child.connection.send(None)
        for child in self.children:
            try:
                child.process.wait(10)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            child.connection.close()
        self.watcher.close()
        for header in self.headers.values():
            header.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def target_names(children: Sequence[Child]) -> str:
    """Ranks that still run, for messages."""
    return "ranks " + ", ".join(str(c.seats) for c in children if c.busy)


def uniform_placement(geometry: abi.Geometry, ranks: Sequence[int]) -> tuple[list[int], list[int]]:
    """Every expert once, contiguous over `ranks`; slot tables of all layers.

    Returns:
        slot_expert and slot_weight, each [layers * max_ranks * slots].
    """
    per = -(-geometry.experts // len(ranks))
    experts = [-1] * (geometry.max_ranks * geometry.slots)
    weights = [0] * len(experts)
    for expert in range(geometry.experts):
        at = ranks[expert // per] * geometry.slots + expert % per
        experts[at], weights[at] = expert, 65536
    return experts * geometry.layers, weights * geometry.layers


def _serve(member: Member) -> None:
    while True:
        message = member.connection.recv()
        if message is None:
            return
        target, arguments = message
        try:
            module, _, name = target.partition(":")
            value = getattr(importlib.import_module(module), name)(member, **arguments)
        except BaseException:
            member.connection.send(("failed", traceback.format_exc()))
            raise
        member.connection.send(("done", value))


@contextlib.contextmanager
def _member(connection: Connection, channel: socket.socket) -> Iterator[Member]:
    spec, index = connection.recv()
    seats, device = spec.seats[index], spec.devices[index]
    geometry = spec.shape()
    _, header_fds, _, _ = socket.recv_fds(channel, 1, len(seats))
    own = [native.create_region(geometry, device) for _ in seats]
    connection.send(("regions", None))
    socket.send_fds(channel, [b"r"], own)
    fds = {r: socket.recv_fds(channel, 1, 1)[1][0] for r in spec.ranks()}
    contexts = {}
    for rank, data_fd, header_fd in zip(seats, own, header_fds, strict=True):
        config = native.ContextConfig(
            rank=rank,
            incarnation=1,
            device=device,
            ranks_on_device=spec.sharing(index),
            num_sms=spec.num_sms,
            plan=spec.plan,
        )
        contexts[rank] = native.CudaContext(geometry, config, data_fd, header_fd)
        contexts[rank].tune(spec.plan, spec.num_sms, spec.tuning)
        for peer, fd in fds.items():
            if peer != rank:
                contexts[rank].map_peer(peer, fd)
    for fd in (*header_fds, *own, *fds.values()):
        os.close(fd)
    connection.send(("ready", None))
    yield Member(spec, index, device, contexts, connection)
    for context in contexts.values():
        context.close()


def main() -> None:
    """Entry point of a child: descriptors of the message and the descriptor socket."""
    connection = Connection(int(sys.argv[1]))
    channel = socket.socket(fileno=int(sys.argv[2]))
    try:
        with _member(connection, channel) as member:
            _serve(member)
    except (EOFError, BrokenPipeError):
        return
    except BaseException:
        with contextlib.suppress(OSError):
            connection.send(("failed", traceback.format_exc()))
        raise


if __name__ == "__main__":
    main()
