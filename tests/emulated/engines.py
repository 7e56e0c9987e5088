"""Engines of three ranks of one process on emulated GPUs: client sessions whose kernels run when
their streams come to them, and steps of all of them at once.
"""

import threading
from collections.abc import Callable
from typing import Any, Final

import torch

from elasticep.client.cuda_handle import CudaHandle
from elasticep.client.cuda_session import CudaSession
from elasticep.client.step import Step
from elasticep.device import Device
from elasticep.errors import ElasticEPError
from elasticep.geometry import GroupGeometry
from elasticep.group import Completion, GroupConfig, Launch
from elasticep.native import cuda_library
from elasticep.native.convert import geometry_struct, timeouts_struct
from elasticep.spec import ExchangeSpec
from elasticep.testing import emulated_cuda
from elasticep.testing.local_group import LocalGroup, spread
from elasticep.timeouts import Timeouts

RANKS, EXPERTS, TOPK, HIDDEN, CAP, TOKENS = 3, 6, 2, 128, 4, 3
AT_ONCE_S: Final = 20.0
"""Far more than it takes on a busy machine, and far less than `PATIENT_MS`."""
PATIENT_MS: Final = 60_000
LATE_MS: Final = 1_500
GPUS: Final = 2
"""Ranks take them in turn."""
FP32: Final[dict[str, Any]] = {
    "dispatch_dtype": "fp32", "combine_dtype": "fp32", "max_tokens": CAP,
}  # fmt: skip
EXCHANGES: Final = (
    ("first", ExchangeSpec.preset("ROUTED", **FP32)),
    ("exact", ExchangeSpec.preset("NORMAL", **FP32)),
)


class StreamHandle(CudaHandle):
    """What is put on its stream runs when the stream comes to it; its memory is the host's."""

    def __init__(self, group: LocalGroup, rank: int) -> None:
        emulated_cuda.set_device(rank % GPUS)
        super().__init__(group.socket_path, group.ticket(rank), PATIENT_MS, rank, 1)
        self.device = torch.device("cpu")
        self._own = emulated_cuda.Stream()

    @property
    def stream(self) -> int:
        return self._own.cuda_stream

    def drain(self) -> None:
        """Wait until all that was put there has run."""
        self._own.synchronize()


class Group(LocalGroup):
    """Sessions of all ranks, which stand in the first view."""

    def __init__(self, completion: Completion, exchange_ms: int) -> None:
        self._made = 0
        self.config = GroupConfig(
            name="ends",
            geometry=GroupGeometry(
                layers=1, experts=EXPERTS, topk=TOPK, hidden=HIDDEN,
                slots_per_rank=EXPERTS, max_ranks=RANKS,
            ),
            exchanges=EXCHANGES,
            initial_ranks=RANKS,
            device=Device.CUDA,
            launch=Launch.INLINE,
            completion=completion,
            timeouts=Timeouts(
                suspect_after_ms=100, hang_timeout_ms=600,
                exchange_timeout_ms=exchange_ms, step_timeout_ms=PATIENT_MS,
            ),
        )  # fmt: skip
        timeouts = timeouts_struct(self.config.timeouts)
        super().__init__(geometry_struct(self.config), timeouts=timeouts)
        torch.cuda.is_current_stream_capturing = lambda: False  # torch for CPUs does not know
        self.sessions: list[CudaSession] = []
        for rank in range(RANKS):
            handle = StreamHandle(self, rank)
            self.sessions.append(CudaSession(handle, self.config, rank=rank, incarnation=1))
        self.stage(1, 0, list(range(RANKS)), spread(self.geometry, range(RANKS)))

    def make_data(self) -> int:
        self._made += 1
        return cuda_library.create_region(self.geometry, (self._made - 1) % GPUS)


class Rank:
    """What one rank puts on its stream, and what must stay while it runs."""

    def __init__(self, session: CudaSession) -> None:
        self.session = session
        self._kept: list[Any] = []

    def here(self) -> "Rank":
        """This thread is its engine's."""
        emulated_cuda.set_device(self.session.rank % GPUS)
        return self

    def batch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ids = torch.arange(TOKENS * TOPK).remainder(EXPERTS).view(TOKENS, TOPK)
        made = torch.ones(TOKENS, HIDDEN), ids, torch.ones(TOKENS, TOPK)
        self._kept.append(made)
        return made

    def dispatch(self, name: str = "first") -> Any:
        return self.session.exchange(name).dispatch(0, *self.batch())

    def combine(self, recv: Any, name: str = "first") -> None:
        self._kept.append(self.session.exchange(name).combine(0, recv))

    def pair(self, name: str = "first") -> None:
        self.combine(self.dispatch(name), name)

    def two_pairs(self) -> None:
        self.pair()
        self.pair()

    def drain(self) -> None:
        handle: Any = self.session._handle
        handle.drain()


class Scene:
    """Three ranks; what ranks 1 and 2 do goes on in threads."""

    def __init__(
        self,
        *,
        completion: Completion = Completion.LOCAL,
        exchange_ms: int = PATIENT_MS,
    ) -> None:
        self.group = Group(completion, exchange_ms)
        self.ranks = [Rank(session) for session in self.group.sessions]
        self.told: dict[int, Any] = {}
        self.heard = threading.Event()  # rank 1 has said how its step ended, or AT_ONCE_S are over
        self._threads: list[threading.Thread] = []

    def go(self, rank: int, call: Callable[[Rank], Any]) -> None:
        """In a thread; what it returns is told of the rank."""

        def run() -> None:
            self.told[rank] = call(self.ranks[rank].here())
            if rank == 1:
                self.heard.set()

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def at_once(self) -> bool:
        """Whether rank 1 has heard while nothing else happened."""
        in_time = self.heard.wait(AT_ONCE_S)
        self.heard.set()
        return in_time

    def everybody(self, call: Callable[[Rank], Any]) -> None:
        """A step in which all do the same; it must be complete."""
        for rank in (1, 2):
            self.go(rank, lambda own: whole(own, call))
        told = [whole(self.ranks[0].here(), call)]
        self.join()
        told += self.told.values()
        assert all(one["complete"] for one in told), told
        self.told.clear()
        self.heard.clear()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a rank hangs"
        self._threads.clear()

    def close(self) -> None:
        for rank in self.ranks:
            rank.here().session.detach()
        self.group.close()


def ended(step: Step) -> dict[str, Any]:
    """How a step ended."""
    raised = ""
    try:
        complete = step.complete
    except ElasticEPError as error:
        complete, raised = False, f"{type(error).__name__}: {error}"
    return {"complete": complete, "why": step.why, "raised": raised, "number": step.number}


def whole(own: Rank, call: Callable[[Rank], Any]) -> dict[str, Any]:
    with own.session.step(TOKENS) as step:
        call(own)
    return ended(step)


def nothing(own: Rank) -> None:
    """A step without exchanges."""
