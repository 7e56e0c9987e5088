"""What children of a fleet run where there is no GPU: ranks that are a mapped header each."""

import mmap
import os
import signal
from collections.abc import Sequence
from typing import Any

from elasticep.bench.fleet_cuda import FleetSpec
from elasticep.bench.fleet_cuda_child import Member
from elasticep.native import region

KEPT: list[Any] = []  # what functions leave behind
CLOSED: list[int] = []  # ranks whose contexts were closed in this process
STUCK = False  # whether closing never ends


class FakeContext:
    """A rank: its header and the regions of all."""

    def __init__(self, rank: int, header: int, peers: dict[int, int]) -> None:
        self.rank = rank
        self.header = mmap.mmap(header, 4096)
        self.regions = {peer: os.fstat(fd).st_ino for peer, fd in peers.items()}

    def close(self) -> None:
        CLOSED.append(self.rank)
        self.header.close()


class FakeSeats:
    """`Seats` without a device."""

    def __init__(self, spec: FleetSpec, index: int) -> None:
        self._ranks = spec.seats[index]
        if spec.num_sms == 99:
            raise ValueError("a spec that cannot be opened")

    def regions(self) -> list[int]:
        return [region.create_memory(f"data-{rank}", 4096) for rank in self._ranks]

    def open(
        self, own: Sequence[int], headers: Sequence[int], peers: dict[int, int]
    ) -> dict[int, FakeContext]:
        del own
        both = zip(self._ranks, headers, strict=True)
        return {rank: FakeContext(rank, fd, peers) for rank, fd in both}

    def close(self, contexts: dict[int, FakeContext]) -> None:
        if STUCK:
            signal.pause()
        for context in contexts.values():
            context.close()

    def device_bytes(self) -> int:
        return sum(1 << 30 for kept in KEPT if kept == "device memory")


def facts(member: Member) -> dict[str, Any]:
    """Who this is and what it sees."""
    member.sync()
    seen = {rank: context.regions for rank, context in member.contexts.items()}
    notes = len(member.notes.setdefault("calls", []))
    member.notes["calls"].append(1)
    return {"pid": os.getpid(), "regions": seen, "closed": list(CLOSED), "notes": notes}


def end(member: Member, ranks: Sequence[int]) -> None:
    """The processes of `ranks` end in the middle of it."""
    if set(ranks) & set(member.contexts):
        os._exit(3)


def fail(member: Member, ranks: Sequence[int]) -> None:
    """The processes of `ranks` fail; others wait for them."""
    if set(ranks) & set(member.contexts):
        raise ValueError("it went wrong")
    member.sync()


def leave_behind(member: Member, what: str) -> None:
    """Something that outlives the contexts."""
    if what == "descriptors":
        KEPT.extend(os.open("/dev/null", os.O_RDONLY) for _ in range(20))
    elif what == "headers":
        fd = region.create_memory("header-0", 4096)
        KEPT.append(mmap.mmap(fd, 4096))
        os.close(fd)
    elif what == "device memory":
        KEPT.append(what)
    elif what == "nothing":  # a note that nobody else knows, as tensors over a region are
        fd = region.create_memory("header-0", 4096)
        member.notes["mapped"] = [mmap.mmap(fd, 4096)]
        member.notes["mapped"].append(member.notes["mapped"])  # only the collector ends it
        os.close(fd)


def get_stuck(member: Member) -> None:
    """Closing will take longer than anybody waits."""
    global STUCK
    del member
    STUCK = True
