"""A handful of GPU ranks without a daemon: processes that share regions, for tests and benchmarks.

The parent makes the headers, keeps every descriptor, watches the robust locks with the native
watcher and so stands for the daemon; it never touches CUDA. Each child (`fleet_cuda_child`) holds
one or more ranks of one GPU and runs the functions it is told to. A `FleetPool` (`fleet_cuda_pool`)
keeps children for the next fleet.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, Final, Self

from elasticep import errors
from elasticep.bench import fleet_cuda_pool
from elasticep.bench.fleet_cuda_pool import Child, FleetPool, left_over
from elasticep.config import MAX_SEATS
from elasticep.native import abi, region
from elasticep.native import cuda as native
from elasticep.native.watcher import Watcher

GROUP_KEY: Final = 1
CUDA_SEATS: Final = "elasticep.bench.fleet_cuda_child:CudaSeats"


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
        makes: "module:class" of what makes regions and contexts in the children.
        finish_s: functions that run longer have failed, where `finish` is not told otherwise.
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
    makes: str = CUDA_SEATS
    finish_s: float = 60.0

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


class Fleet:
    """Parent side. Use as a context manager.

    Args:
        spec: who runs where.
        pool: gives the children and takes them back; None: new ones, which end with the fleet.

    Attributes:
        watcher: of the ranks, or the first 63 of them.

    Raises:
        NativeError: a child failed to start; carries its traceback.
    """

    def __init__(self, spec: FleetSpec, pool: FleetPool | None = None) -> None:
        self.spec = spec
        self._keep = pool is not None
        self._pool = pool or FleetPool()
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
        ranks = spec.ranks()
        self._watchers = [Watcher() for _ in range(0, len(ranks), MAX_SEATS)]
        self.watcher = self._watchers[0]
        for place, rank in enumerate(ranks):
            fd = region.create_memory(f"header-{rank}", layout.header_bytes)
            region.format_header(fd, geometry, rank, timeouts)
            header = region.Header(fd, layout.digest)
            header.grant(1)
            self._watchers[place // MAX_SEATS].watch(rank, GROUP_KEY, header)
            for watcher in self._watchers:
                watcher.peer_add(GROUP_KEY, header)
            self.headers[rank] = header
            header_fds[rank] = fd
        self.children: list[Child] = []
        self._failed = False
        try:
            self._open(header_fds)
        except BaseException:
            self._failed = True
            self.close()
            raise
        finally:
            for fd in header_fds.values():
                os.close(fd)

    def _open(self, header_fds: dict[int, int]) -> None:
        """Has every child make its regions and map those of the others."""
        for index, device in enumerate(self.spec.devices):
            child = self._pool.take(device)
            self.children.append(child)
            child.seats = self.spec.seats[index]
            with contextlib.suppress(OSError):  # a dead one is found out below
                child.connection.send((self.spec, index))
                socket.send_fds(child.channel, [b"h"], [header_fds[r] for r in child.seats])
        region_fds: dict[int, int] = {}
        try:
            for child in self.children:
                child.expect("regions")
                _, fds, _, _ = socket.recv_fds(child.channel, 1, len(child.seats))
                region_fds.update(zip(child.seats, fds, strict=True))
            ordered = [region_fds[r] for r in sorted(region_fds)]
            for child in self.children:
                for fd in ordered:
                    socket.send_fds(child.channel, [b"r"], [fd])
            for child in self.children:
                child.expect("ready")
        finally:
            for fd in region_fds.values():
                os.close(fd)

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
        timeout_s: float | None = None,
        on_report: Callable[[Child, Any], None] | None = None,
        *,
        may_die: bool = False,
    ) -> list[Any]:
        """Results of the running functions, by process; None for one that died.

        Raises:
            NativeError: a function failed (with its traceback), died or took too long.
        """
        try:
            return self._finish(timeout_s or self.spec.finish_s, on_report, may_die)
        except BaseException:
            self._failed = True
            raise

    def _finish(
        self, timeout_s: float, on_report: Callable[[Child, Any], None] | None, may_die: bool
    ) -> list[Any]:
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
                    child.busy, child.gone = False, True
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

    def run(self, target: str, timeout_s: float | None = None, **arguments: object) -> list[Any]:
        """`start` and `finish`."""
        self.start(target, **arguments)
        return self.finish(timeout_s)

    def close(self) -> None:
        """Close all contexts. Children go back to the pool, or end.

        Raises:
            NativeError: a child of a pool did not close in time or left something behind; it is
                ended. Not after another failure, in which all children are.
        """
        complaints = self._leave()
        if not self._keep:
            self._pool.close()
        for watcher in self._watchers:
            watcher.close()
        for header in self.headers.values():
            header.close()
        if complaints and self._keep and not self._failed:
            raise errors.NativeError("; ".join(complaints))

    def _leave(self) -> list[str]:
        """Parts from all children; what was wrong with them, in words."""
        children, self.children = self.children, []
        closing, complaints = [], []
        for child in children:
            if child.busy or child.gone or self._failed or child.process.poll() is not None:
                child.end(kill=True)
                continue
            with contextlib.suppress(OSError):
                child.connection.send(None)
            closing.append(child)
        closed = []
        for child in closing:  # all of them, before anybody's memory is looked at
            try:
                child.expect("closed", fleet_cuda_pool.CLOSE_TIMEOUT_S)
                closed.append(child)
            except errors.NativeError as error:
                complaints.append(str(error))
                child.end(kill=True)
        for child in closed:
            found = self._left_over(child) if self._keep else []
            complaints += [f"{child} left {what} behind" for what in found]
            if found:
                child.end(kill=True)
            else:
                self._pool.give(child)
        return complaints

    def _left_over(self, child: Child) -> list[str]:
        child.connection.send("usage")
        used = child.expect("usage", fleet_cuda_pool.CLOSE_TIMEOUT_S)
        if child.baseline is None:
            child.baseline = used | {"headers": 0}
        alone = self.spec.devices.count(child.device) == 1 and not self._pool.idle(child.device)
        return left_over(child.baseline, used, alone=alone)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._failed = self._failed or kind is not None
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
