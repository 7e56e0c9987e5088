"""An engine that gets signals, and its peer."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from elasticep.client.session import Session
from elasticep.geometry import GroupGeometry
from elasticep.group import GroupConfig, Launch
from elasticep.native import abi
from elasticep.native.convert import geometry_struct
from elasticep.spec import ExchangeSpec
from elasticep.testing.clients import attach_to, on_all
from elasticep.testing.local_group import LocalGroup, spread
from elasticep.testing.small import until

HIDDEN, TOPK, EXPERTS, TOKENS = 16, 2, 4, 3
SOON_S: Final = 20.0
"""Far below every deadline of the group, and far above what a busy machine takes."""
AT_BARRIER, IN_DISPATCH, IN_COMBINE = (
    int(phase) for phase in (abi.WaitPhase.BARRIER, abi.WaitPhase.DISPATCH, abi.WaitPhase.COMBINE)
)


def config(launch: Launch) -> GroupConfig:
    """A group of two ranks with one exchange, "decode"."""
    spec = ExchangeSpec.preset(
        "ROUTED", dispatch_dtype="fp32", combine_dtype="fp32", max_tokens=TOKENS
    )
    sizes = GroupGeometry(
        layers=1, experts=EXPERTS, topk=TOPK, hidden=HIDDEN, slots_per_rank=EXPERTS, max_ranks=2
    )
    return GroupConfig(
        name="signals",
        geometry=sizes,
        exchanges=(("decode", spec),),
        initial_ranks=2,
        launch=launch,
    )


class Pair:
    """Rank 0, which gets the signals, and its peer in a thread."""

    def __init__(self, launch: Launch) -> None:
        self.config = config(launch)
        self.group = LocalGroup(geometry_struct(self.config))
        self.mine, self.peer = (attach_to(self.group, self.config, rank) for rank in range(2))
        self.group.stage(1, 0, range(2), spread(self.group.geometry, range(2)))

    def close(self) -> None:
        """End both sessions and the group."""
        on_all([self.mine, self.peer], Session.detach)
        self.group.close()

    def step(self, session: Session, before: Callable[[str], None] = lambda half: None) -> bool:
        """A step whose experts pass their rows on; True if it is complete, and right."""
        exchange = session.exchange("decode")
        x = torch.full((TOKENS, HIDDEN), float(session.rank + 1))
        ids = torch.tensor([[0, 3]] * TOKENS)
        with session.step(TOKENS) as step:
            before("dispatch")
            recv = exchange.dispatch(0, x, ids, torch.full((TOKENS, TOPK), 0.5))
            recv.out[:] = recv.rows * recv.weights.sum(1, keepdim=True)
            before("combine")
            out = exchange.combine(0, recv)
        return bool(step.complete) and bool((out == x).all())

    def both_step(self) -> None:
        """A step on both ranks, which is complete and right."""
        assert on_all([self.mine, self.peer], self.step) == [True, True]


class Stop(Exception):
    """What a handler raises."""


@contextmanager
def handled(handler: Callable[[], None]) -> Iterator[None]:
    """`handler` runs at each SIGUSR2."""
    before = signal.signal(signal.SIGUSR2, lambda number, frame: handler())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR2, before)


def stop() -> None:
    """A handler that raises."""
    raise Stop


@contextmanager
def meanwhile(work: Callable[[], Any]) -> Iterator[None]:
    """`work` in a thread; what it raises is raised after the block."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(60.0)
    assert not thread.is_alive()
    if failed:
        raise failed[0]


def interrupt_at(pair: Pair, phase: int) -> None:
    """Send rank 0's process a signal while rank 0 waits for its peer."""
    until(lambda: pair.group.status(0).wait_phase == phase, "rank 0 waits")
    os.kill(os.getpid(), signal.SIGUSR2)


def ran(seen: list[int], count: int) -> None:
    """Wait until a handler has noted `count` signals."""
    until(lambda: len(seen) >= count, "the handler ran")
