"""The child process of a fleet: makes contexts, runs functions of the tests and benchmarks.

`python -m elasticep.bench.fleet_cuda_child SOCKET DESCRIPTOR_SOCKET`, started by `fleet_cuda`. It
serves one fleet after another until it is told to end, and ends by itself when anything fails.
"""

import contextlib
import gc
import importlib
import os
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from elasticep.bench.fleet_cuda import FleetSpec
from elasticep.native import cuda as native
from elasticep.native import cuda_library
from elasticep.testing import emulated_cuda


class Context(Protocol):
    """What a rank's context must offer here."""

    def close(self) -> None:
        """Give everything back."""


class Seats(Protocol):
    """Makes and closes what the ranks of one process need."""

    def __init__(self, spec: FleetSpec, index: int) -> None:
        """`index`: number of this process in the fleet."""

    def regions(self) -> list[int]:
        """A descriptor of a data region for each rank here."""

    def open(
        self, own: Sequence[int], headers: Sequence[int], peers: dict[int, int]
    ) -> dict[int, Any]:
        """A `Context` for each rank here, from descriptors that stay the caller's.

        Args:
            own: data regions of the ranks here.
            headers: their headers.
            peers: data regions of all ranks.
        """

    def close(self, contexts: dict[int, Any]) -> None:
        """Close them, and give back what else they took."""

    def device_bytes(self) -> int:
        """Bytes of the device that are in use."""


class CudaSeats:
    """`Seats` on a GPU."""

    def __init__(self, spec: FleetSpec, index: int) -> None:
        self._spec, self._index = spec, index
        self._device = spec.devices[index]
        self._geometry = spec.shape()

    def regions(self) -> list[int]:
        """`Seats.regions`."""
        count = len(self._spec.seats[self._index])
        return [cuda_library.create_region(self._geometry, self._device) for _ in range(count)]

    def open(
        self, own: Sequence[int], headers: Sequence[int], peers: dict[int, int]
    ) -> dict[int, native.CudaContext]:
        """`Seats.open`."""
        spec, contexts = self._spec, {}
        for rank, data_fd, header_fd in zip(spec.seats[self._index], own, headers, strict=True):
            config = native.ContextConfig(
                rank=rank,
                incarnation=1,
                device=self._device,
                ranks_on_device=spec.sharing(self._index),
                num_sms=spec.num_sms,
                plan=spec.plan,
            )
            context = native.CudaContext(self._geometry, config, data_fd, header_fd)
            context.tune(spec.plan, spec.num_sms, spec.tuning)
            for peer, fd in peers.items():
                if peer != rank:
                    context.map_peer(peer, fd)
            contexts[rank] = context
        return contexts

    def close(self, contexts: dict[int, native.CudaContext]) -> None:
        """`Seats.close`; the tensors of functions are gone by now."""
        for context in contexts.values():
            context.close()
        if "torch" in sys.modules and not emulated_cuda.active():
            import torch

            torch.cuda.empty_cache()

    def device_bytes(self) -> int:
        """`Seats.device_bytes`; unknown of an emulated GPU."""
        if emulated_cuda.active():
            return 0
        import torch

        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)


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


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


@contextlib.contextmanager
def _member(connection: Connection, channel: socket.socket, order: Any) -> Iterator[Member]:
    """Contexts for one fleet. After a failure nothing is closed: the process ends."""
    spec, index = order
    seats: Seats = _load(spec.makes)(spec, index)
    mine = spec.seats[index]
    _, headers, _, _ = socket.recv_fds(channel, 1, len(mine))
    own = seats.regions()
    connection.send(("regions", None))
    socket.send_fds(channel, [b"r"], own)
    peers = {r: socket.recv_fds(channel, 1, 1)[1][0] for r in spec.ranks()}
    contexts = seats.open(own, headers, peers)
    for fd in (*headers, *own, *peers.values()):
        os.close(fd)
    connection.send(("ready", None))
    member = Member(spec, index, spec.devices[index], contexts, connection)
    member.notes["seats made by"] = seats
    yield member
    member.notes.clear()
    gc.collect()  # tensors over regions, graphs
    seats.close(contexts)


def usage(device_bytes: int) -> dict[str, int]:
    """What this process holds: descriptors, mapped headers, bytes of the device."""
    maps = Path("/proc/self/maps").read_text()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "headers": maps.count("memfd:header-"),
        "device_bytes": device_bytes,
    }


def main() -> None:
    """Entry point: descriptors of the message and the descriptor socket."""
    connection = Connection(int(sys.argv[1]))
    channel = socket.socket(fileno=int(sys.argv[2]))
    seats: Seats | None = None
    try:
        while (order := connection.recv()) is not None:
            if order == "usage":
                used = usage(seats.device_bytes() if seats else 0)
                connection.send(("usage", used))
                continue
            with _member(connection, channel, order) as member:
                seats = member.notes["seats made by"]
                _serve(member)
            connection.send(("closed", None))
    except (EOFError, BrokenPipeError):
        return
    except BaseException:
        with contextlib.suppress(OSError):
            connection.send(("failed", traceback.format_exc()))
        raise


if __name__ == "__main__":
    main()
