"""Loads and clusters that the placement bench runs on, and the two planners behind one face."""

import csv
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from elasticep.bench.greedy_eplb import greedy_rebalance
from elasticep.control.placement import Plan, PlanPolicy, RankInfo, plan, resplit
from elasticep.errors import ConfigError

Int64Array = NDArray[np.int64]
Float64Array = NDArray[np.float64]

TOKENS = 4_000_000  # routed per layer in the synthetic loads
DRIFT = 0.3
SEED = 1


@dataclass(frozen=True, slots=True)
class Case:
    """Loads now and next on a cluster.

    Attributes:
        name: for the table.
        pairs: (now, next) loads, int64 [layers, experts] each; every pair is planned by itself.
        ranks, nodes, slots: the cluster; slots per rank.
        what: where the loads come from and how next differs from now.
    """

    name: str
    pairs: tuple[tuple[Int64Array, Int64Array], ...]
    ranks: int
    nodes: int
    slots: int
    what: str

    def rank_infos(self) -> list[RankInfo]:
        """Ranks numbered node by node; every node is a domain."""
        per_node = self.ranks // self.nodes
        return [
            RankInfo(rank, f"node {rank // per_node}", f"node {rank // per_node}", self.slots)
            for rank in range(self.ranks)
        ]

    @property
    def places(self) -> int:
        """Slots of all layers and ranks."""
        return len(self.pairs[0][0]) * self.ranks * self.slots


@dataclass(frozen=True, slots=True)
class Result:
    """One planner on one pair. Imbalances are [layers]; moves are copies over all layers.

    Attributes:
        now: imbalance of the plan for `now`.
        single: experts with one copy.
        stay: imbalance under `next` with nothing changed.
        split: the same with tokens split anew over the same copies (greedy: as `stay`).
        after, moves: imbalance under `next`, and what that takes, after planning again.
        dead: imbalance under `now` when the first rank is gone and nothing has moved.
        lost: experts that this death leaves without a copy.
        plan_ms, again_ms: time of the two plans.
        plan_cpu_ms: processor time of the first one, which others on the machine hardly lengthen.
    """

    now: Float64Array
    single: int
    stay: Float64Array
    split: Float64Array
    after: Float64Array
    moves: int
    dead: Float64Array
    lost: int
    plan_ms: float
    plan_cpu_ms: float
    again_ms: float


def timed(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median milliseconds of a call: on the clock, and of the processor."""
    taken, worked = [], []
    for _ in range(repeats):
        start, before = time.perf_counter(), time.process_time()
        call()
        worked.append(1e3 * (time.process_time() - before))
        taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(taken), statistics.median(worked)


def imbalance(of_rank: Float64Array, ranks: int) -> Float64Array:
    """Highest rank load over the mean of `ranks` ranks, [layers]."""
    mean = np.maximum(of_rank.sum(axis=1) / ranks, 1e-12)
    ratio: Float64Array = of_rank.max(axis=1) / mean
    return ratio


# ---- the two planners


def run_planner(case: Case, now: Int64Array, following: Int64Array, repeats: int) -> Result:
    """Our planner on one pair of loads."""
    infos = case.rank_infos()
    policy = PlanPolicy()

    def first() -> Plan:
        return plan(now, infos, policy=policy)

    placed = first()

    def again() -> Plan:
        return plan(following, infos, placed.placement, policy)

    replanned, only_split = again(), resplit(following, infos, placed.placement, policy)
    left = resplit(now, infos[1:], placed.placement, policy)
    plan_ms, plan_cpu_ms = timed(first, repeats)
    return Result(
        now=_layers(placed),
        single=int((placed.placement.copies() == 1).sum()),
        stay=imbalance(placed.placement.rank_loads(following), case.ranks),
        split=_layers(only_split),
        after=_layers(replanned),
        moves=replanned.report.moves,
        dead=imbalance(left.placement.rank_loads(now), case.ranks - 1),
        lost=len(left.report.lost),
        plan_ms=plan_ms,
        plan_cpu_ms=plan_cpu_ms,
        again_ms=timed(again, repeats)[0],
    )


def _layers(result: Plan) -> Float64Array:
    return np.array([layer.imbalance_after for layer in result.report.layers])


def run_greedy(case: Case, now: Int64Array, following: Int64Array, repeats: int) -> Result:
    """The plain greedy on the same pair; its global policy, as for every decode instance."""
    slots = case.ranks * case.slots

    def place(loads: Int64Array) -> tuple[Int64Array, Int64Array]:
        return greedy_rebalance(loads.astype(np.float64), slots, 1, 1, case.ranks)

    physical, count = place(now)
    again, again_count = place(following)
    # One rank dies: the others share evenly what it shared; its single copies are lost.
    held = physical[:, case.slots :]
    rows = np.arange(len(now))[:, None]
    left = np.zeros_like(count)
    np.add.at(left, (np.broadcast_to(rows, held.shape), held), 1)
    share = now[rows, held] / left[rows, held]
    plan_ms, plan_cpu_ms = timed(lambda: place(now), repeats)
    return Result(
        now=imbalance(_even(physical, count, now, case.ranks), case.ranks),
        single=int((count == 1).sum()),
        stay=imbalance(_even(physical, count, following, case.ranks), case.ranks),
        split=imbalance(_even(physical, count, following, case.ranks), case.ranks),
        after=imbalance(_even(again, again_count, following, case.ranks), case.ranks),
        moves=_moves(physical, again, case.ranks),
        dead=imbalance(
            share.reshape(len(now), case.ranks - 1, case.slots).sum(axis=2), case.ranks - 1
        ),
        lost=int((left == 0).sum()),
        plan_ms=plan_ms,
        plan_cpu_ms=plan_cpu_ms,
        again_ms=timed(lambda: place(following), repeats)[0],
    )


def _even(physical: Int64Array, count: Int64Array, loads: Int64Array, ranks: int) -> Float64Array:
    """Load per rank [layers, ranks] when an expert's replicas share evenly."""
    rows = np.arange(len(loads))[:, None]
    share = loads[rows, physical] / count[rows, physical]
    of_rank: Float64Array = share.reshape(len(loads), ranks, -1).sum(axis=2)
    return of_rank


def _moves(before: Int64Array, after: Int64Array, ranks: int) -> int:
    """Experts that a rank holds after and did not hold before, over all layers and ranks."""
    shape = (len(before), ranks, -1)
    old, new = before.reshape(shape), after.reshape(shape)
    here = (new[:, :, :, None] == old[:, :, None, :]).any(axis=3)
    # A second copy on the same rank takes a slot, but no bytes from elsewhere.
    ordered = np.sort(np.where(here, -1, new), axis=2)
    repeats = (ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] >= 0)
    return int((~here).sum() - repeats.sum())


# ---- loads


def synthetic() -> Iterator[Case]:
    """The size of the goals, 40 layers x 384 experts on 64 ranks with 13 slots."""
    layers, experts = 40, 384
    rng = np.random.default_rng(SEED)
    zipf = 1.0 / np.arange(1, experts + 1)
    shapes = {
        "Zipf 1.0": np.stack([rng.permutation(zipf) for _ in range(layers)]),
        "lognormal 1.0": rng.lognormal(0.0, 1.0, (layers, experts)),
    }
    for name, shape in shapes.items():
        now = (shape / shape.sum(axis=1, keepdims=True) * TOKENS).astype(np.int64)
        following = (now * (1 + rng.uniform(-DRIFT, DRIFT, now.shape))).astype(np.int64)
        what = f"{layers} layers x {experts} experts; next: every load +-{DRIFT:.0%}, uniform"
        yield Case(name, ((now, following),), 64, 8, 13, what)


def recorded(folder: Path, most_pairs: int) -> Iterator[Case]:
    """The recorded loads in `folder`: every .npz with `freq` [rows, layers, experts] and every
    .csv with a row of counts per layer.
    """
    files = sorted(folder.glob("*.npz")) + sorted(folder.glob("*.csv"))
    if not files:
        raise ConfigError(f"{folder} holds no .npz and no .csv file with recorded loads")
    for file in files:
        yield from _domains(file, most_pairs) if file.suffix == ".npz" else _counts(file)


def _domains(file: Path, most_pairs: int) -> Iterator[Case]:
    with np.load(file) as arrays:
        freq = np.asarray(arrays["freq"], np.float64)
    loads = np.rint(freq * 1e6).astype(np.int64)
    step = max(1, (len(loads) - 1) // most_pairs)
    pairs = tuple((loads[i], loads[i + 1]) for i in range(0, len(loads) - 1, step))[:most_pairs]
    layers, experts = loads.shape[1:]
    what = (
        f"{file.name}: {layers} layers x {experts} experts; now and next: consecutive domains, "
        f"{len(pairs)} pairs"
    )
    for slots in (6, 8):  # two copies of all do not fit; they do
        yield Case(f"GPT-OSS 20B, {slots} slots", pairs, 8, 2, slots, what)


def _counts(file: Path) -> Iterator[Case]:
    with file.open(newline="") as lines:
        rows = list(csv.reader(lines))
    now = np.array([[int(value) for value in row[1:]] for row in rows[1:]], np.int64)
    rng = np.random.default_rng(SEED)
    following = (now * (1 + rng.uniform(-DRIFT, DRIFT, now.shape))).astype(np.int64)
    what = (
        f"{file.name}: {now.shape[0]} layers x {now.shape[1]} experts, late layers on 8 experts "
        f"only; next: every load +-{DRIFT:.0%}, uniform"
    )
    for slots in (9, 17):
        yield Case(f"DeepSeek-V3, {slots} slots", ((now, following),), 32, 4, slots, what)
