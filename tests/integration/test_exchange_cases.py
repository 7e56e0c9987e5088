"""Faults that users of other systems reported, on the exchange; numbers are those of the cases."""

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from elasticep.errors import CapExceeded, ConfigError, GeometryError, MemoryShort, TensorError
from elasticep.geometry import GroupGeometry
from elasticep.native import abi
from elasticep.spec import ExchangeSpec
from elasticep.testing import reference
from elasticep.testing.local_group import LocalGroup
from elasticep.testing.raw import RawSession, TornError
from elasticep.testing.world import Batch, World, exchange_config, make_batch, random_placement

LAYERS, EXPERTS, TOPK, HIDDEN, CAP = 2, 12, 3, 128, 16
DEADLINE_S = 20.0
LAYOUTS = list(abi.RowLayout)


def exchange(**changes: Any) -> abi.ExchangeConfig:
    return exchange_config(**{"max_tokens": CAP, **changes})


def geometry(ranks: int, *exchanges: abi.ExchangeConfig, **changes: Any) -> abi.Geometry:
    sizes = {
        "layers": LAYERS,
        "experts": EXPERTS,
        "topk": TOPK,
        "hidden": HIDDEN,
        "slots": EXPERTS,
        "launch": abi.Launch.INLINE,
    }
    g = abi.Geometry(**{**sizes, **changes}, max_ranks=ranks, exchanges=len(exchanges))
    for number, spec in enumerate(exchanges):
        g.exchange[number] = spec
    return g


def until(condition: Callable[[], bool], what: str) -> None:
    tick, end = threading.Event(), time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {DEADLINE_S} s"
        tick.wait(0.0005)


def agrees(world: World, number: int, brought: dict[int, Batch], layer: int = 0) -> None:
    results, step = world.round_trip(number, brought, layer)
    for rank, batch in brought.items():
        expected = world.expected(number, batch, rank, layer, step)
        np.testing.assert_array_equal(results[rank], expected, f"rank {rank}")


def all_layouts(**changes: Any) -> list[abi.ExchangeConfig]:
    return [exchange(layout=layout, **changes) for layout in LAYOUTS]


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


# ---- what has no number


def test_an_expert_named_again_and_again_does_not_write_past_its_runs() -> None:
    """Runs have room for the distinct experts of a token; with fewer slots than top-k, repeats of
    one expert can need more. The step is torn, and the next one is right."""
    tokens = 200
    spec = exchange(layout=abi.RowLayout.CONTIGUOUS, max_tokens=tokens)
    with World(geometry(2, spec, experts=4, slots=2)) as world:
        x = np.ones((tokens, HIDDEN), np.float32)
        ids = np.zeros((tokens, TOPK), np.int32)

        def round_trip(session: RawSession) -> None:
            session.dispatch(0, 0, x, ids, np.ones(ids.shape, np.float32))
            session.combine(0, tokens)

        def crowd(_rank: int, session: RawSession) -> str:
            session.begin(tokens)
            with pytest.raises((CapExceeded, TornError)) as caught:
                round_trip(session)
            assert not session.end()
            return str(caught.value)

        said = world.each(crowd)
        assert any("gets 1200 rows, for which there is no room" in text for text in said.values())
        batches = {r: make_batch(world.geometry, 20, r) for r in range(2)}
        results, step = world.round_trip(0, batches)
        for rank, batch in batches.items():
            expected = world.expected(0, batch, rank, 0, step)
            np.testing.assert_array_equal(results[rank], expected)


@pytest.mark.parametrize("launch", list(abi.Launch))
def test_a_full_masked_block_tears_and_says_which(launch: int) -> None:
    """No row is dropped: the step is torn for all, and the error has expert, count and setting."""
    spec = exchange(layout=abi.RowLayout.MASKED, masked_room=4, reduce=abi.Reduce.PER_EXPERT)
    g = geometry(2, spec, launch=launch)
    with World(g) as world:
        owner = int(np.argwhere(world.table()[0] == 5)[0, 0])
        slot = int(np.argwhere(world.table()[0] == 5)[0, 1])

        def run(rank: int, session: RawSession) -> str:
            b = make_batch(g, 3, rank)
            b.ids[:] = [5, 6 + rank, 8 + rank]
            session.begin(3)
            text = ""
            try:
                got = session.dispatch(0, 0, b.x, b.ids, b.weights)
                world.compute(got, 0, rank, 0)
                session.combine(0, 3)
            except CapExceeded as error:
                text = str(error)
            except TornError:
                text = "torn"
            assert not session.end()
            return text

        said = world.each(run)
        assert said[1 - owner] == "torn"
        expected = (
            f"expert 5 (slot {slot} of rank {owner}, layer 0) gets 6 rows, but masked_room is 4"
        )
        assert expected in said[owner]
        two = {r: make_batch(g, 2, r) for r in range(2)}
        agrees(world, 0, two)


@pytest.mark.parametrize("dtype", list(abi.Dtype))
def test_nan_stays_in_its_token(dtype: int) -> None:
    """In every format and layout, and a quantised row loses no more than the block."""
    ways = all_layouts(dispatch_dtype=dtype)
    ways += all_layouts(dispatch_dtype=dtype, combine_dtype=abi.Dtype.FP8)
    g = geometry(2, *ways)
    with World(g) as world:
        for number in range(len(ways)):
            brought = {r: make_batch(g, CAP, [number, r], none=0.0) for r in range(2)}
            brought[1].x[3, 7] = np.nan
            results, _ = world.round_trip(number, brought)
            assert np.isfinite(results[0]).all()
            rows = np.isnan(results[1]).any(axis=1)
            np.testing.assert_array_equal(rows, np.arange(CAP) == 3)
            assert np.isnan(results[1][3, 7])


@pytest.mark.parametrize("launch", list(abi.Launch))
@pytest.mark.parametrize("dtype", [abi.Dtype.FP8, abi.Dtype.MXFP8, abi.Dtype.NVFP4])
def test_rows_that_are_quantised_already_are_carried_as_they_are(dtype: int, launch: int) -> None:
    """Elements, scales and global scale arrive bit for bit, whatever they are."""
    g = geometry(2, *all_layouts(dispatch_dtype=dtype), launch=launch)
    factor = {0: 0.25, 1: 3.0}
    with World(g) as world:
        for number, layout in enumerate(LAYOUTS):
            brought = {r: make_batch(g, CAP, [number, r]) for r in range(2)}
            packed = {r: reference.quantise(dtype, b.x * 5) for r, b in brought.items()}

            def run(
                rank: int,
                session: RawSession,
                number: int = number,
                layout: int = layout,
                brought: dict[int, Batch] = brought,
                packed: Any = packed,
            ) -> None:
                b = brought[rank]
                elements, scales = (np.ascontiguousarray(part) for part in packed[rank])
                rows = abi.Rows(elements.ctypes.data, scales.ctypes.data, dtype, factor[rank])
                step = session.begin(CAP).step
                session.dispatch_send_rows(number, 0, rows, b.ids, b.weights)
                got = session.dispatch_recv(number)
                np.testing.assert_array_equal(got.global_scale, [0.25, 3.0])
                assert got.scales is not None
                for source in range(2):
                    ranks, _ = world.serve(brought[source], source, 0, step)
                    for token, choice in np.argwhere(ranks == rank):
                        row = sent = source * CAP + token
                        if got.places is not None:
                            row = got.places[sent, choice]
                        np.testing.assert_array_equal(got.rows[row], packed[source][0][token])
                        np.testing.assert_array_equal(got.scales[row], packed[source][1][token])
                world.compute(got, number, rank, 0)
                session.combine(number, CAP)
                assert session.end()

            world.each(run)


def test_quantised_rows_that_cannot_be_carried_are_refused() -> None:
    packed = exchange(
        layout=abi.RowLayout.MASKED,
        dispatch_dtype=abi.Dtype.FP8,
        scale_layout=abi.ScaleLayout.PACKED,
    )
    g = geometry(1, exchange(dispatch_dtype=abi.Dtype.FP8), packed)
    with World(g) as world:
        session, b = world.sessions[0], make_batch(g, 2, 1)
        elements, scales = reference.quantise(abi.Dtype.FP8, b.x)
        address = elements.ctypes.data
        session.begin(2)
        for number, rows, text in (
            (0, abi.Rows(address, None, abi.Dtype.FP8, 1.0), "without scales"),
            (0, abi.Rows(address, scales.ctypes.data, abi.Dtype.MXFP8, 1.0), "exchange's own"),
            (0, abi.Rows(address, scales.ctypes.data, abi.Dtype.FP8, -1.0), "global scale is -1"),
            (1, abi.Rows(address, scales.ctypes.data, abi.Dtype.FP8, 1.0), "not a power of two"),
        ):
            with pytest.raises((ConfigError, TensorError), match=text):
                session.dispatch_send_rows(number, 0, rows, b.ids, b.weights)
        assert session.end()


@pytest.mark.parametrize("launch", list(abi.Launch))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_channels_overlap(layout: int, launch: int) -> None:
    """Rows of batch B come in while A is computed, before anyone asks for them; both are right."""
    g = geometry(2, exchange(layout=layout, channels=2), launch=launch)
    pairs = {r: (make_batch(g, CAP, [1, r]), make_batch(g, CAP, [2, r])) for r in range(2)}
    with World(g) as world:
        seen: dict[int, list[bool]] = {0: [], 1: []}
        flying: dict[int, npt.NDArray[np.uint8]] = {}

        def run(rank: int, session: RawSession) -> list[tuple[Any, int, int]]:
            done = []
            step = session.begin(CAP).step
            a, b = pairs[rank]
            session.dispatch_send(0, 0, a.x, a.ids, a.weights, channel=0)
            for layer in range(LAYERS):
                got_a = session.dispatch_recv(0, channel=0)
                session.dispatch_send(0, layer, b.x, b.ids, b.weights, channel=1)
                if rank in flying:  # the other rank's rows of B, while A is under way
                    until(lambda: bool(flying[rank].any()), "rows of the other channel")
                    seen[rank].append(True)
                world.compute(got_a, 0, rank, layer)
                session.combine_send(0, channel=0)
                done.append((session.combine_recv(0, CAP, channel=0), layer, 0))
                if layer + 1 < LAYERS:
                    session.dispatch_send(0, layer + 1, a.x, a.ids, a.weights, channel=0)
                got_b = session.dispatch_recv(0, channel=1)
                world.compute(got_b, 0, rank, layer)
                session.combine_send(0, channel=1)
                done.append((session.combine_recv(0, CAP, channel=1), layer, 1))
            assert session.end()
            if layout == abi.RowLayout.ROUTED:
                other = got_b.rows[(1 - rank) * CAP : (2 - rank) * CAP]
                flying[rank] = other.view(np.uint8)
            return [(out, layer, half, step) for out, layer, half in done]  # type: ignore[misc]

        for _ in range(2):
            for area in flying.values():
                area[:] = 0
            for rank, results in world.each(run).items():
                for out, layer, half, step in results:  # type: ignore[misc]
                    expected = world.expected(0, pairs[rank][half], rank, layer, step)
                    np.testing.assert_array_equal(out, expected)
        if layout == abi.RowLayout.ROUTED:
            assert [len(times) for times in seen.values()] == [LAYERS, LAYERS]
