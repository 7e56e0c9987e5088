"""The exchange against predictions, bit for bit: what is delivered, and what comes back.

Engines are threads (inline launch) or threads in front of worker processes (service launch).
"""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

from elasticep.native import abi
from elasticep.testing import experts
from elasticep.testing.raw import Delivered, RawSession
from elasticep.testing.world import Batch, World, exchange_config, make_batch, random_placement

LAYERS, EXPERTS, TOPK, HIDDEN, CAP = 2, 12, 3, 128, 70
TOKENS = (0, 1, 63, 64, CAP)
COPIES, LAYOUTS, REDUCES = list(abi.Copies), list(abi.RowLayout), list(abi.Reduce)


def geometry(
    ranks: int,
    exchanges: Sequence[abi.ExchangeConfig],
    *,
    launch: int = abi.Launch.INLINE,
    hidden: int = HIDDEN,
    slots: int | None = None,
) -> abi.Geometry:
    g = abi.Geometry(
        layers=LAYERS,
        experts=EXPERTS,
        topk=TOPK,
        hidden=hidden,
        slots=slots or (EXPERTS if ranks < 3 else 8),
        max_ranks=ranks,
        exchanges=len(exchanges),
        launch=launch,
    )
    for number, exchange in enumerate(exchanges):
        g.exchange[number] = exchange
    return g


def exchange(**changes: Any) -> abi.ExchangeConfig:
    return exchange_config(**{"max_tokens": CAP, **changes})


def batches(g: abi.Geometry, shift: int, seed: int) -> dict[int, Batch]:
    """Another number of tokens on every rank."""
    return {
        rank: make_batch(g, TOKENS[(rank + shift) % len(TOKENS)], [seed, shift, rank])
        for rank in range(g.max_ranks)
    }


def agrees(world: World, number: int, brought: dict[int, Batch], layer: int = 0) -> None:
    results, step = world.round_trip(number, brought, layer)
    for rank, batch in brought.items():
        expected = world.expected(number, batch, rank, layer, step)
        np.testing.assert_array_equal(results[rank], expected, f"rank {rank}")


# ---- results


@pytest.mark.parametrize("combine", [abi.Dtype.FP32, abi.Dtype.BF16])
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("cpu_sync", [0, 1])
def test_every_copies_and_layout(reduce: int, cpu_sync: int, combine: int) -> None:
    ways = list(product(COPIES, LAYOUTS))
    for first in range(0, len(ways), abi.MAX_EXCHANGES):
        part = [
            exchange(
                copies=copies,
                layout=layout,
                reduce=reduce,
                cpu_sync=cpu_sync,
                combine_dtype=combine,
                dispatch_dtype=abi.Dtype.BF16,
            )
            for copies, layout in ways[first : first + abi.MAX_EXCHANGES]
        ]
        g = geometry(3, part)
        with World(g, placement=random_placement(g, range(3), first)) as world:
            for number, shift in product(range(len(part)), range(len(TOKENS))):
                agrees(world, number, batches(g, shift, number), layer=shift % LAYERS)


FACTORS: dict[str, Sequence[Any]] = {
    "copies": COPIES,
    "layout": LAYOUTS,
    "cpu_sync": (0, 1),
    "dispatch_dtype": list(abi.Dtype),
    "combine_dtype": list(abi.Dtype)[:4],
    "reduce": REDUCES,
    "launch": list(abi.Launch),
    "ranks": (1, 2, 3, 8),
}


def pairwise() -> list[dict[str, Any]]:
    """Few cases in which every two values of two factors meet: greedily, the same at every run."""
    rng = np.random.default_rng(0)
    names = list(FACTORS)
    missing = {
        ((a, x), (b, y))
        for a, b in combinations(names, 2)
        for x, y in product(FACTORS[a], FACTORS[b])
    }

    def meets(case: dict[str, Any]) -> set[Any]:
        return {pair for pair in missing if all(case[name] == value for name, value in pair)}

    cases = []
    while missing:
        tries = []
        seed_pair = min(missing, key=repr)
        for _ in range(60):
            case = {name: FACTORS[name][rng.integers(len(FACTORS[name]))] for name in names}
            case.update(dict(seed_pair))
            tries.append(case)
        best = max(tries, key=lambda case: len(meets(case)))
        missing -= meets(best)
        cases.append(best)
    return cases


def case_name(case: dict[str, Any]) -> str:
    return "-".join(getattr(value, "name", str(value)).lower() for value in case.values())


@pytest.mark.parametrize("case", pairwise(), ids=case_name)
def test_pairwise(case: dict[str, Any]) -> None:
    """Every token count on every rank, each pair of all other switches at least once."""
    given = dict(case)
    ranks, launch = given.pop("ranks"), given.pop("launch")
    g = geometry(ranks, [exchange(**given)], launch=launch)
    with World(g, placement=random_placement(g, range(ranks), ranks)) as world:
        for shift in range(len(TOKENS)):
            agrees(world, 0, batches(g, shift, 1), layer=shift % LAYERS)


@pytest.mark.parametrize("copies", COPIES)
def test_per_expert_gives_the_same_bits_for_any_placement(copies: int) -> None:
    """I8: a token does not change when a replica of its expert does, in any layout: six random
    placements with replicas and uneven weights."""
    ways = [
        exchange(copies=copies, layout=layout, reduce=abi.Reduce.PER_EXPERT, combine_dtype=combine)
        for layout, combine in product(LAYOUTS, (abi.Dtype.BF16, abi.Dtype.FP8))
    ]
    g = geometry(5, ways, slots=6)
    brought = batches(g, 1, 7)
    everyone = range(5)
    first: dict[int, dict[int, Any]] = {}
    with World(g, placement=random_placement(g, everyone, 100)) as world:
        for seed in range(6):
            if seed:
                world.restage(random_placement(g, everyone, 100 + seed))
            for number in range(len(ways)):
                results, _ = world.round_trip(number, brought)
                for rank, result in first.setdefault(number, results).items():
                    np.testing.assert_array_equal(results[rank], result)


# ---- what is delivered


def sent_to(
    world: World, number: int, brought: dict[int, Batch], rank: int, layer: int, step: int
) -> list[tuple[int, int, int, int]]:
    """All (source, token, choice, slot) that this rank serves, in the order of the exchange."""
    found = []
    for source, batch in brought.items():
        ranks, slots = world.serve(batch, source, layer, step)
        for token, choice in np.argwhere(ranks == rank):
            found.append((source, int(token), int(choice), int(slots[token, choice])))
    return found


def check_by_expert(
    world: World, number: int, brought: dict[int, Batch], rank: int, got: Delivered, step: int
) -> None:
    g, spec = world.geometry, world.geometry.exchange[number]
    pairs = sent_to(world, number, brought, rank, 0, step)
    pairs.sort(key=lambda pair: pair[3])  # stable: source, token and top-k stay in order
    counts = np.bincount([slot for *_, slot in pairs], minlength=g.slots)
    np.testing.assert_array_equal(got.counts, counts)
    contiguous = spec.layout == abi.RowLayout.CONTIGUOUS
    if contiguous:
        offsets = np.concatenate([[0], np.cumsum(-(-counts // 128) * 128)])
        np.testing.assert_array_equal(got.offsets, offsets)
    else:
        assert got.offsets is None
        offsets = np.arange(g.slots + 1) * (len(got.rows) // g.slots)
    wire = experts.Wire.of(spec)
    scales = experts.plain_scales(got, spec, g.hidden)
    used = np.zeros(len(got.rows), bool)
    next_row = offsets.copy()
    assert got.places is not None
    per_expert = spec.copies == abi.Copies.PER_EXPERT
    width = CAP * TOPK if per_expert else CAP
    places = np.full(got.ids.shape, -1)
    for source, token, choice, slot in pairs:
        row = next_row[slot]
        next_row[slot] += 1
        used[row] = True
        packed, packed_scales = wire.pack(brought[source].x[token : token + 1])
        np.testing.assert_array_equal(got.rows[row], packed[0])
        if packed_scales is not None and scales is not None:
            np.testing.assert_array_equal(scales[row], packed_scales[0])
        sent = source * width + (token * TOPK + choice if per_expert else token)
        places[sent, choice] = row
        assert got.ids[sent, choice] == slot
        assert got.weights[sent, choice] == brought[source].weights[token, choice]
    np.testing.assert_array_equal(got.places, places)
    np.testing.assert_array_equal(got.ids >= 0, places >= 0)
    if contiguous:
        assert got.row_slots is not None
        end = offsets[-1]
        of_row = np.repeat(np.arange(g.slots), np.diff(offsets))
        labels = np.where(used[:end], of_row, -1)
        np.testing.assert_array_equal(got.row_slots[:end], labels)
        assert (got.row_slots[end:] == -1).all()
        assert not got.rows[:end][~used[:end]].any()
        if scales is not None:
            assert not scales[:end][~used[:end]].any()
        if spec.cpu_sync:
            assert len(got.rows) == end


def check_as_sent(
    world: World, number: int, brought: dict[int, Batch], rank: int, got: Delivered, step: int
) -> None:
    g, spec = world.geometry, world.geometry.exchange[number]
    wire, per_expert = experts.Wire.of(spec), spec.copies == abi.Copies.PER_EXPERT
    width = CAP * TOPK if per_expert else CAP
    ids = np.full((g.max_ranks * width, TOPK), -1)
    weights = np.zeros(ids.shape, np.float32)
    came: list[tuple[int, int, int]] = []
    for source, token, choice, slot in sent_to(world, number, brought, rank, 0, step):
        row = source * width + (token * TOPK + choice if per_expert else token)
        ids[row, choice] = slot
        weights[row, choice] = brought[source].weights[token, choice]
        if not came or came[-1][0] != row:
            came.append((row, source, token))
    if spec.copies == abi.Copies.ALL:
        came = [(s * width + t, s, t) for s, batch in brought.items() for t in range(len(batch.x))]
    at = [row for row, *_ in came]
    assert got.arrived == len(came)
    if spec.cpu_sync:
        ids, weights = ids[at], weights[at]
        at = list(range(len(came)))
    np.testing.assert_array_equal(got.ids, ids)
    np.testing.assert_array_equal(got.weights, weights)
    for row, (_, source, token) in zip(at, came, strict=True):
        packed, packed_scales = wire.pack(brought[source].x[token : token + 1])
        np.testing.assert_array_equal(got.rows[row], packed[0])
        if packed_scales is not None and got.scales is not None:
            np.testing.assert_array_equal(got.scales[row], packed_scales[0])


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("cpu_sync", [0, 1])
@pytest.mark.parametrize("dtype", [abi.Dtype.BF16, abi.Dtype.FP8])
def test_delivered_rows(copies: int, cpu_sync: int, dtype: int) -> None:
    """Every row in its place, every place with its label, and zeros where a run is padded."""
    ways = [
        exchange(copies=copies, layout=layout, cpu_sync=cpu_sync, dispatch_dtype=dtype)
        for layout in LAYOUTS
    ]
    g = geometry(3, ways)
    with World(g, placement=random_placement(g, range(3), 5)) as world:
        for number, shift in product(range(len(ways)), range(3)):
            brought = batches(g, shift, number)
            check = check_by_expert if experts.by_expert(ways[number]) else check_as_sent

            def run(
                rank: int,
                session: RawSession,
                number: int = number,
                brought: dict[int, Batch] = brought,
                check: Any = check,
            ) -> None:
                batch = brought[rank]
                step = session.begin(len(batch.x)).step
                got = session.dispatch(number, 0, batch.x, batch.ids, batch.weights)
                check(world, number, brought, rank, got, step)
                world.compute(got, number, rank, 0)
                session.combine(number, len(batch.x))
                assert session.end()

            world.each(run)


@pytest.mark.parametrize("hidden", [384, 640])
@pytest.mark.parametrize("layout", [abi.RowLayout.CONTIGUOUS, abi.RowLayout.MASKED])
@pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        (abi.Dtype.FP8, abi.ScaleLayout.COLUMNS),
        (abi.Dtype.FP8, abi.ScaleLayout.PACKED),
        (abi.Dtype.MXFP8, abi.ScaleLayout.PACKED),
    ],
)
def test_scales_in_the_layout_of_the_kernels(
    dtype: int, scales: int, layout: int, hidden: int
) -> None:
    """Column-major with columns on 16 bytes; the same scales as in rows, and the same results."""
    spec = exchange(layout=layout, dispatch_dtype=dtype, scale_layout=scales, masked_room=0)
    if layout == abi.RowLayout.MASKED:
        spec.masked_room = 131  # not a multiple of the 4 that a column is padded to
    g = geometry(2, [spec], hidden=hidden)
    words = {
        (abi.Dtype.FP8, abi.ScaleLayout.COLUMNS): hidden // 128,
        (abi.Dtype.FP8, abi.ScaleLayout.PACKED): -(-hidden // 512),
        (abi.Dtype.MXFP8, abi.ScaleLayout.PACKED): hidden // 128,
    }[dtype, scales]  # type: ignore[index]
    with World(g) as world:
        for shift in range(3):
            brought = batches(g, shift, 3)

            def run(rank: int, session: RawSession, brought: dict[int, Batch] = brought) -> None:
                batch = brought[rank]
                step = session.begin(len(batch.x)).step
                got = session.dispatch(0, 0, batch.x, batch.ids, batch.weights)
                assert got.scales is not None
                runs = g.slots if layout == abi.RowLayout.MASKED else 1
                lead = -(-(len(got.rows) // runs) // 4) * 4
                assert got.scales.shape == (runs, words, lead)
                check_by_expert(world, 0, brought, rank, got, step)
                world.compute(got, 0, rank, 0)
                out = session.combine(0, len(batch.x))
                assert session.end()
                expected = world.expected(0, batch, rank, 0, step)
                np.testing.assert_array_equal(out, expected)

            world.each(run)


# ---- placement of the tokens before the exchange


@pytest.mark.parametrize("launch", list(abi.Launch))
@pytest.mark.parametrize("reduce", REDUCES)
def test_replicated_input_sends_nothing_and_sums_everywhere(reduce: int, launch: int) -> None:
    spec = exchange(
        copies=abi.Copies.ALL,
        layout=abi.RowLayout.ARRIVAL,
        replicated=1,
        reduce=reduce,
        dispatch_dtype=abi.Dtype.BF16,
    )
    g = geometry(3, [spec], launch=launch)
    with World(g, placement=random_placement(g, range(3), 9)) as world:
        for tokens in TOKENS:
            same = make_batch(g, tokens, tokens)
            results, step = world.round_trip(0, dict.fromkeys(range(3), same))
            expected = world.expected(0, same, 0, 0, step)
            for rank in range(3):
                np.testing.assert_array_equal(results[rank], expected)
        loads = sum(world.each(lambda _rank, session: session.loads()).values())
    chosen = [make_batch(g, tokens, tokens).ids for tokens in TOKENS]
    counted = np.bincount(np.concatenate(chosen)[np.concatenate(chosen) >= 0], minlength=EXPERTS)
    np.testing.assert_array_equal(loads, [counted, np.zeros(EXPERTS)])


def test_replicated_input_that_differs_tears_the_step() -> None:
    spec = exchange(copies=abi.Copies.ALL, layout=abi.RowLayout.ARRIVAL, replicated=1)
    g = geometry(2, [spec])
    with World(g) as world:

        def run(rank: int, session: RawSession) -> str:
            batch = make_batch(g, 3 + rank, 1)
            session.begin(len(batch.x))
            try:
                session.dispatch(0, 0, batch.x, batch.ids, batch.weights)
            except Exception as error:
                return f"{error} {session.end()}"
            return "delivered"

        for text in world.each(run).values():
            assert "torn" in text
            assert text.endswith("False")


def test_a_slice_of_the_batch_on_every_rank() -> None:
    """The batch is everywhere; each rank brings and keeps its part; nothing counts twice."""
    from elasticep.geometry import batch_slice

    g = geometry(3, [exchange(layout=abi.RowLayout.MASKED)])
    whole = make_batch(g, 64, 4)
    with World(g) as world:
        parts = {rank: batch_slice(64, rank, range(3)) for rank in range(3)}
        brought = {
            rank: Batch(whole.x[part], whole.ids[part], whole.weights[part])
            for rank, part in parts.items()
        }
        agrees(world, 0, brought)
        loads = sum(world.each(lambda _rank, session: session.loads()).values())
    assert [(p.start, p.stop) for p in parts.values()] == [(0, 21), (21, 42), (42, 64)]
    assert np.sum(loads) == (whole.ids >= 0).sum()
