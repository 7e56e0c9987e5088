"""Faults that users of other systems reported, on the exchange; numbers are those of the cases."""

import contextlib
import ctypes
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from elasticep.errors import CapExceeded, ConfigError, GeometryError, MemoryShort
from elasticep.geometry import GroupGeometry
from elasticep.native import abi
from elasticep.spec import ExchangeSpec
from elasticep.testing.local_group import LocalGroup
from elasticep.testing.raw import RawSession, TornError
from elasticep.testing.small import (
    CAP,
    EXPERTS,
    LAYERS,
    LAYOUTS,
    TOPK,
    agrees,
    all_layouts,
    exchange,
    geometry,
    until,
)
from elasticep.testing.world import Batch, World, make_batch, random_placement


def loads_of(world: World) -> npt.NDArray[np.uint64]:
    return np.sum(list(world.each(lambda _rank, s: s.loads()).values()), axis=0)


# ---- 01


def sources_area(session: RawSession, brought: Batch) -> npt.NDArray[np.uint8]:
    """Everything that sources write into a rank's channel: rows, tails, bitmaps and flags."""
    got = abi.Received()
    code = abi.api().ep_dispatch_recv(session._handle, 0, 0, ctypes.byref(got), None)
    abi.check(code, "dispatch")
    ids = ctypes.cast(got.ids, ctypes.c_void_p).value
    assert ids is not None
    memory = (ctypes.c_uint8 * (ids - got.rows)).from_address(got.rows)
    return np.frombuffer(memory, np.uint8)


@pytest.mark.parametrize("planted", ["dispatch", "combine"])
def test_case_01_stale_flags_and_rows_are_ignored(planted: str) -> None:
    """Flags, bitmaps and rows of an earlier step come back before a wait: nobody takes them."""
    g = geometry(2, exchange())
    with World(g) as world:
        area: dict[int, npt.NDArray[np.uint8]] = {}
        old = {rank: make_batch(g, CAP, [1, rank]) for rank in range(2)}

        def learn(rank: int, session: RawSession) -> npt.NDArray[np.uint8]:
            b = old[rank]
            session.begin(CAP)
            session.dispatch_send(0, 0, b.x, b.ids, b.weights)
            area[rank] = sources_area(session, b)
            session.combine(0, CAP)
            kept = area[rank].copy()  # with the ready flags of this step
            assert session.end()
            return kept

        stale = world.each(learn)[0]
        agrees(world, 0, {rank: make_batch(g, CAP, [2, rank]) for rank in range(2)})
        fresh = {rank: make_batch(g, CAP, [3, rank]) for rank in range(2)}

        def waits(phase: int) -> Callable[[], bool]:
            return lambda: world.sessions[0].status.wait_phase == phase

        def run(rank: int, session: RawSession) -> tuple[Any, int]:
            b = fresh[rank]
            step = session.begin(CAP).step
            if rank == 0 and planted == "dispatch":
                area[0][:] = stale
            if rank == 1 and planted == "dispatch":
                until(waits(abi.WaitPhase.DISPATCH), "rank 0 to wait for rows")
            got = session.dispatch(0, 0, b.x, b.ids, b.weights)
            world.compute(got, 0, rank, 0)
            if rank == 0 and planted == "combine":
                # All but the flags of this dispatch is used up by now.
                area[0][:] = stale
            if rank == 1 and planted == "combine":
                until(waits(abi.WaitPhase.COMBINE), "rank 0 to wait for outputs")
            out = session.combine(0, CAP)
            assert session.end()
            return out, step

        for rank, (out, step) in world.each(run).items():
            expected = world.expected(0, fresh[rank], rank, 0, step)
            np.testing.assert_array_equal(out, expected)


# ---- 05, 06, 08


@pytest.mark.parametrize("launch", list(abi.Launch))
def test_case_05_zero_tokens(launch: int) -> None:
    """On one, several or all ranks, in every layout."""
    g = geometry(3, *all_layouts(), *all_layouts(cpu_sync=1), launch=launch)
    with World(g) as world:
        for number in range(g.exchanges):
            for tokens in ((0, CAP, CAP), (0, CAP, 0), (0, 0, 0)):
                brought = {r: make_batch(g, n, [number, r, n]) for r, n in enumerate(tokens)}
                agrees(world, number, brought)


@pytest.mark.parametrize("launch", list(abi.Launch))
def test_case_06_more_tokens_than_the_cap(launch: int) -> None:
    """Raises before a byte is written anywhere; peers wait undisturbed and the step goes on."""
    g = geometry(2, exchange(), launch=launch)
    with World(g) as world:
        whole = world.group.data(1)

        def run(rank: int, session: RawSession) -> tuple[Any, int]:
            b = make_batch(g, CAP, [6, rank])
            step = session.begin(CAP).step
            if rank == 0:
                large = make_batch(g, CAP + 1, 6)
                until(
                    lambda: world.sessions[1].status.wait_phase == abi.WaitPhase.DISPATCH,
                    "rank 1 to wait",
                )
                before = whole.copy()
                with pytest.raises(CapExceeded, match=r"17 tokens .* cap of 16; raise max_tokens"):
                    session.dispatch(0, 0, large.x, large.ids, large.weights)
                np.testing.assert_array_equal(whole, before)
            got = session.dispatch(0, 0, b.x, b.ids, b.weights)
            world.compute(got, 0, rank, 0)
            out = session.combine(0, CAP)
            assert session.end()
            return out, step

        for rank, (out, step) in world.each(run).items():
            expected = world.expected(0, make_batch(g, CAP, [6, rank]), rank, 0, step)
            np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7])
def test_case_08_ranks_that_divide_nothing(ranks: int) -> None:
    """384 experts on any number of ranks, in slots that they do not fill evenly."""
    slots = -(-384 // ranks) + 1
    ways = [exchange(), exchange(layout=abi.RowLayout.MASKED, masked_room=ranks * CAP)]
    ways.append(exchange(layout=abi.RowLayout.CONTIGUOUS, cpu_sync=1, max_tokens=5))
    g = geometry(ranks, *ways, experts=384, topk=6, slots=slots, layers=1)
    with World(g, placement=random_placement(g, range(ranks), ranks)) as world:
        for number in range(3):
            brought = {r: make_batch(g, 5 - r % 3, [number, r]) for r in range(ranks)}
            agrees(world, number, brought)


# ---- 12, 13


def test_case_12_padding_is_not_load() -> None:
    """Choices of no expert, padded runs and rows of room count for nobody."""
    g = geometry(2, *all_layouts())
    brought = {r: make_batch(g, 7, [12, r], none=0.5) for r in range(2)}
    chosen = np.concatenate([b.ids[b.ids >= 0] for b in brought.values()])
    with World(g) as world:
        for number in range(len(LAYOUTS)):
            world.round_trip(number, brought, layer=1)
            expected = np.zeros((LAYERS, EXPERTS), np.uint64)
            expected[1] = np.bincount(chosen, minlength=EXPERTS) * (number + 1)
            np.testing.assert_array_equal(loads_of(world), expected)


def test_case_13_loads_of_all_ranks_are_exact() -> None:
    """Every rank counts its own routing once per complete step: in all, tokens times top-k."""
    g = geometry(3, *all_layouts())
    with World(g, placement=random_placement(g, range(3), 13)) as world:
        tokens = 0
        for number in range(len(LAYOUTS)):
            brought = {r: make_batch(g, CAP - r, [number, r], none=0.0) for r in range(3)}
            world.round_trip(number, brought)
            tokens += sum(len(b.x) for b in brought.values())

        def torn(rank: int, session: RawSession) -> int:
            b = make_batch(g, CAP, rank, none=0.0)
            session.begin(CAP)
            with contextlib.suppress(TornError):  # others may still be in combine when one tears
                got = session.dispatch(0, 0, b.x, b.ids, b.weights)
                world.compute(got, 0, rank, 0)
                session.combine(0, CAP)
            if rank == 1:
                session.tear()
            return CAP if session.end() else 0

        each = world.each(lambda _rank, s: int(s.loads().sum()))
        assert each == {r: len(LAYOUTS) * (CAP - r) * TOPK for r in range(3)}
        counted = world.each(torn)
        assert counted[1] == 0
        assert loads_of(world).sum() == (tokens + sum(counted.values())) * TOPK


# ---- 20, 22


def test_case_20_sizes_are_refused_before_anything_is_allocated() -> None:
    """Redundant experts push a buffer over the limit: the sentence has number and setting."""
    fds = len(os.listdir("/proc/self/fd"))
    big = {"layers": 1, "experts": 384, "topk": 8, "hidden": 7168}
    spec = ExchangeSpec.preset("EXPAND", max_tokens=40_000, dispatch_dtype="fp8")
    config = exchange(layout=abi.RowLayout.MASKED, dispatch_dtype=abi.Dtype.FP8, max_tokens=40_000)
    rows = r"22937\d{5} rows"  # 448 slots x 128 ranks x 40,000
    GroupGeometry(**big, max_ranks=128, slots_per_rank=384).check_exchange(spec)
    with pytest.raises(GeometryError, match=rf"max_tokens=40000 .* {rows}.*slots_per_rank"):
        GroupGeometry(**big, max_ranks=128, slots_per_rank=448).check_exchange(spec)
    # The native core refuses it by itself too.
    for slots in (384, 448):
        g = geometry(128, config, **big, slots=slots)
        code = abi.api().ep_layout(ctypes.byref(g), ctypes.byref(abi.LayoutInfo()))
        assert (code == 0) == (slots == 384)
    with pytest.raises(ConfigError, match=rf"{rows}.*slots_per_rank.*masked_room"):
        LocalGroup(g, ranks=[])
    config.dispatch_dtype = abi.Dtype.FP8
    g = geometry(2, config, hidden=192)
    with pytest.raises(ConfigError, match="blocks of 128, which do not divide hidden 192"):
        LocalGroup(g, ranks=[])
    assert len(os.listdir("/proc/self/fd")) == fds


def test_case_20_memory_that_is_not_there_is_named() -> None:
    config = exchange(layout=abi.RowLayout.MASKED, max_tokens=4096)
    g = geometry(64, config, experts=384, topk=8, hidden=7168, slots=48)
    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MemoryShort, match=r"\d{12,} bytes"):
        LocalGroup(g, ranks=[0])
    assert len(os.listdir("/proc/self/fd")) <= fds + 16


def worker_memory(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["VmData"].split()[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_22_everything_is_allocated_before_the_first_exchange(layout: int) -> None:
    """A batch at the cap, every format converted: a worker's memory does not grow by a page."""
    spec = exchange(
        layout=layout,
        dispatch_dtype=abi.Dtype.FP8,
        combine_dtype=abi.Dtype.FP8,
        max_tokens=512,
        cpu_sync=int(layout in (abi.RowLayout.ARRIVAL, abi.RowLayout.CONTIGUOUS)),
    )
    g = geometry(2, spec, hidden=1024, launch=abi.Launch.SERVICE)
    with World(g) as world:
        world.each(lambda _rank, s: (s.begin(), s.end()))
        pids = [s.status.runner_pid for s in world.sessions.values()]
        assert all(pids)
        before = [worker_memory(pid) for pid in pids]
        results, _ = world.round_trip(0, {r: make_batch(g, 512, r) for r in range(2)})
        assert all(np.isfinite(out).all() for out in results.values())
        assert [worker_memory(pid) for pid in pids] == before
