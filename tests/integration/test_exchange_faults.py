"""A rank dies, stops or goes on late at any point of an exchange, in every way to exchange."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import product
from typing import Any, Self

import numpy as np
import pytest

from elasticep.errors import DaemonUnavailable, Fenced, NativeError
from elasticep.native import abi
from elasticep.testing import small
from elasticep.testing.local_group import equal_weights, spread
from elasticep.testing.raw import RawSession, TornError
from elasticep.testing.scene import timeouts
from elasticep.testing.world import World, make_batch

RANKS, CAP, VICTIM = 3, 12, 2
SITES = [
    abi.FailSite.ROWS,
    abi.FailSite.BITMAP,
    abi.FailSite.FLAG,
    abi.FailSite.SENT,
    abi.FailSite.RECEIVED,
    abi.FailSite.READY,
    abi.FailSite.READY_SENT,
    abi.FailSite.PULL,
    abi.FailSite.PULLED,
]
FP8, BF16 = abi.Dtype.FP8, abi.Dtype.BF16
WAYS: dict[str, dict[str, Any]] = {
    "allgather": {"copies": abi.Copies.ALL, "layout": abi.RowLayout.ARRIVAL},
    "replicated": {"copies": abi.Copies.ALL, "layout": abi.RowLayout.ARRIVAL, "replicated": 1},
    "normal": {"layout": abi.RowLayout.ARRIVAL, "cpu_sync": 1, "combine_dtype": FP8},
    "low_latency": {
        "copies": abi.Copies.PER_EXPERT,
        "layout": abi.RowLayout.MASKED,
        "reduce": abi.Reduce.PER_EXPERT,
        "dispatch_dtype": FP8,
    },
    "expand": {"layout": abi.RowLayout.MASKED, "combine_dtype": FP8},
    "expand_sync": {"layout": abi.RowLayout.CONTIGUOUS, "cpu_sync": 1},
    "routed": {"layout": abi.RowLayout.ROUTED, "dispatch_dtype": abi.Dtype.NVFP4},
}


def every_way_and_site(sixth: int) -> pytest.MarkDecorator:
    """All ways and sites. A sixth of them, another one for each of the three tests, is not long."""
    found = []
    for (w, way), (s, site) in product(enumerate(WAYS), enumerate(SITES)):
        if way == "replicated" and site == abi.FailSite.ROWS:
            continue  # nothing is sent
        marks = () if (w + s) % 6 == sixth else (pytest.mark.long,)
        found.append(pytest.param(way, site, marks=marks, id=f"{way}-{site.name.lower()}"))
    return pytest.mark.parametrize(("way", "site"), found)


def geometry(way: dict[str, Any]) -> abi.Geometry:
    g = abi.Geometry(
        layers=2,
        experts=9,
        topk=3,
        hidden=128,
        slots=6,
        max_ranks=RANKS,
        exchanges=1,
        launch=abi.Launch.SERVICE,
    )
    plain = {"copies": abi.Copies.PER_RANK, "dispatch_dtype": BF16, "combine_dtype": BF16}
    g.exchange[0] = abi.ExchangeConfig(**{**plain, **way}, max_tokens=CAP, channels=1)
    return g


class Serving:
    """Ranks that exchange until they are past a fault; complete steps are checked to the bit."""

    def __init__(self, way: str, exchange_s: float = 30.0) -> None:
        self.way = way
        g = geometry(WAYS[way])
        self.survivors = [rank for rank in range(RANKS) if rank != VICTIM]
        table = spread(g, range(RANKS), copies=2)
        self.left = table.copy()
        self.left[:, VICTIM] = -1
        whole = table, equal_weights(table, range(RANKS))
        deadlines = timeouts(exchange_s, step_s=60.0)
        self.world = World(g, placement=whole, timeouts=deadlines)
        self.torn_at: dict[int, int] = {}
        self.complete = dict.fromkeys(range(RANKS), 0)  # last complete step
        self.last_step = 1 << 62
        self._aside = ThreadPoolExecutor(1)
        self._running: Future[dict[int, int]] | None = None

    def one(self, rank: int, session: RawSession) -> int:
        """One step of two layers: its epoch if it was complete, and then every bit is right."""
        world, g = self.world, self.world.geometry
        info = session.begin(CAP)
        step, epoch = info.step, info.epoch
        batch, results = make_batch(g, CAP, [step, 0 if self.way == "replicated" else rank]), []
        try:
            for layer in range(2):
                got = session.dispatch(0, layer, batch.x, batch.ids, batch.weights)
                world.compute(got, 0, rank, layer, epoch)
                results.append(session.combine(0, CAP))
        except TornError:
            self.torn_at[rank] = time.monotonic_ns()
            assert not session.end()
            return 0
        if not session.end():
            return 0
        for layer, out in enumerate(results):
            expected = world.expected(0, batch, rank, layer, step, epoch)
            np.testing.assert_array_equal(out, expected)
        self.complete[rank] = step
        return epoch

    def until(self, rank: int, session: RawSession, past: Callable[[int], bool]) -> int:
        """Steps until the epoch of a complete one is past the fault; how many were torn."""
        torn = 0
        while self.last_step and not past(epoch := self.one(rank, session)):
            torn += epoch == 0
        return torn

    def until_last(self, rank: int, session: RawSession) -> int:
        """Steps until the one that `finish` names."""
        while session.info.step < self.last_step:
            self.one(rank, session)
        return 0

    def start(self, run: Callable[[int, RawSession], int]) -> "Future[dict[int, int]]":
        """`run` on all ranks, aside."""
        self._running = self._aside.submit(self.world.each, run)
        return self._running

    def finish(self, ranks: Sequence[int]) -> None:
        """Wait until each of these ranks completes a new step; then all end with the same one."""
        group = self.world.group

        def latest() -> int:
            return max(group.status(rank).step for rank in self.survivors)

        now = latest()
        group.wait_for(lambda: all(self.complete[r] > now for r in ranks), "a complete step on all")
        self.last_step = latest() + 3

    def gone(self, rank: int, session: RawSession) -> int:
        """The victim's engine goes on until it notices that it is out."""
        with pytest.raises((DaemonUnavailable, Fenced, NativeError)):
            self.until(rank, session, lambda epoch: epoch > 1)
        return 0

    def leave_out(self) -> None:
        """The view without the victim."""
        self.world.restage((self.left, equal_weights(self.left, self.survivors)), self.survivors)

    def __enter__(self) -> Self:
        for _ in range(100):  # where an exchange has little time, a busy machine may tear some
            if set(self.world.each(self.one).values()) == {1}:
                self.torn_at.clear()
                return self
        raise AssertionError("no step is complete on all ranks")

    def __exit__(self, *_: object) -> None:
        self.last_step = 0  # whatever failed, nobody goes on
        if self._running is not None:
            wait([self._running], 60)
        self._aside.shutdown()
        self.world.close()


@every_way_and_site(0)
def test_a_death_leaves_no_wrong_row(way: str, site: abi.FailSite) -> None:
    with Serving(way) as serving:
        world = serving.world
        world.group.failpoint(VICTIM, site, abi.FailAction.KILL, after=4)

        def run(rank: int, session: RawSession) -> int:
            if rank == VICTIM:
                return serving.gone(rank, session)
            return serving.until(rank, session, lambda epoch: epoch > 1)

        torn = serving.start(run)
        world.group.wait_for(lambda: len(world.group.deaths) > 0, "the death")
        serving.leave_out()
        assert sum(torn.result().values()) <= len(serving.survivors)
        # By the dead word and leave cells: nobody waited for the exchange timeout of 30 s.
        died = world.group.deaths[0].at_ns
        assert all(at - died < 15_000_000_000 for at in serving.torn_at.values())


@every_way_and_site(1)
def test_a_rank_that_stops_and_goes_on_late_gives_and_takes_no_wrong_row(
    way: str, site: abi.FailSite
) -> None:
    """Stopped until the others gave the step up. Nobody is expelled: all go on together."""
    with Serving(way, exchange_s=0.4) as serving:
        world = serving.world
        world.group.failpoint(VICTIM, site, abi.FailAction.STOP, after=3)
        done = serving.start(serving.until_last)
        world.group.wait_for(
            lambda: world.group.failpoint_hits(VICTIM) == 1, f"the stop at {site.name}"
        )
        world.group.wait_for(
            lambda: set(serving.torn_at) >= set(serving.survivors), "the others to tear"
        )
        world.group.signal_worker(VICTIM, signal.SIGCONT)
        serving.finish(range(RANKS))
        done.result()


@every_way_and_site(2)
def test_a_rank_that_is_left_behind_and_goes_on_gives_and_takes_no_wrong_row(
    way: str, site: abi.FailSite
) -> None:
    """Expelled while it is stopped: its rows and flags of then meet exchanges of now."""
    with Serving(way) as serving:
        world, out = serving.world, threading.Event()
        # While it pulls in the last exchange of a step, only the check at the end can find out.
        after = CAP + 3 if site == abi.FailSite.PULL else 3
        world.group.failpoint(VICTIM, site, abi.FailAction.STOP, after=after)

        def run(rank: int, session: RawSession) -> int:
            if rank != VICTIM:
                return serving.until_last(rank, session)
            serving.gone(rank, session)
            out.set()
            return 0

        done = serving.start(run)
        world.group.wait_for(
            lambda: world.group.failpoint_hits(VICTIM) == 1, f"the stop at {site.name}"
        )
        world.group.mark_dead(VICTIM)
        stopped_in = world.group.status(VICTIM).step
        serving.leave_out()
        world.group.wait_for(
            lambda: all(serving.complete[rank] > stopped_in + 1 for rank in serving.survivors),
            "steps of the others without it",
        )
        world.group.signal_worker(VICTIM, signal.SIGCONT)
        world.group.wait_for(out.is_set, "the expelled rank to learn it")
        serving.finish(serving.survivors)
        done.result()


@pytest.mark.parametrize("launch", list(abi.Launch))
def test_a_rank_that_ends_a_step_early_is_not_waited_for(launch: int) -> None:
    """Its engine left an exchange out, as one does that takes an error in. The other one hears of
    it when it comes to the next barrier: each would wait for the other until one were expelled.
    """
    g = small.geometry(2, small.exchange(), launch=launch)
    with World(g, timeouts=timeouts(exchange_s=60.0)) as world:
        began = time.monotonic()

        def exchange(rank: int, session: RawSession, layer: int) -> None:
            batch = make_batch(g, 1, [rank])
            got = session.dispatch(0, layer, batch.x, batch.ids, batch.weights)
            world.compute(got, 0, rank, layer)
            session.combine(0, 1)

        def steps(rank: int, session: RawSession) -> list[bool]:
            complete = []
            for layers in (1 + rank, 2):
                session.begin()
                with contextlib.suppress(TornError):
                    for layer in range(layers):
                        exchange(rank, session, layer)
                complete.append(session.end())
            return complete

        assert world.each(steps) == {0: [True, True], 1: [False, True]}
        assert time.monotonic() - began < 30
