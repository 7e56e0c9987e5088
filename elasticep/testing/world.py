"""All ranks of a group in one test, an engine thread each, and what their exchanges must give."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from elasticep.native import abi
from elasticep.testing import experts, reference
from elasticep.testing.local_group import LocalGroup
from elasticep.testing.placements import equal_weights, spread
from elasticep.testing.raw import Delivered, RawSession
from elasticep.testing.reference import Floats

T = TypeVar("T")
Placement = tuple[npt.NDArray[np.int32], npt.NDArray[np.uint32]]
"""Slot tables [layers, max_ranks, slots]: experts, -1 = empty, and dispatch weights."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one rank brings to an exchange.

    Attributes:
        x: float32 [tokens, hidden]; values that the exchange's full formats hold exactly.
        ids: int32 [tokens, topk], distinct in a row; -1 = none.
        weights: float32 [tokens, topk].
    """

    x: Floats
    ids: npt.NDArray[np.int32]
    weights: Floats


def exchange_config(max_tokens: int, **changes: Any) -> abi.ExchangeConfig:
    """A routed exchange of fp32 rows that sends a copy per rank, with these fields changed."""
    plain = {
        "copies": abi.Copies.PER_RANK,
        "layout": abi.RowLayout.ROUTED,
        "dispatch_dtype": abi.Dtype.FP32,
        "combine_dtype": abi.Dtype.FP32,
        "channels": 1,
    }
    return abi.ExchangeConfig(**{**plain, **changes}, max_tokens=max_tokens)


def make_batch(
    geometry: abi.Geometry, tokens: int, seed: int | Sequence[int], none: float = 0.1
) -> Batch:
    """A reproducible batch; a share of `none` of the choices is -1."""
    rng = np.random.default_rng(seed)
    shape = (tokens, geometry.topk)
    values = rng.standard_normal((tokens, geometry.hidden))
    # Eight bits of mantissa: the same numbers in fp32, fp16 and bf16.
    x = (np.clip(np.round(values * 32), -255, 255) / 32).astype(np.float32)
    order = rng.random((tokens, geometry.experts)).argsort(axis=1)[:, : geometry.topk]
    ids = np.where(rng.random(shape) < none, -1, order).astype(np.int32)
    return Batch(x, ids, rng.random(shape).astype(np.float32))


def random_placement(geometry: abi.Geometry, members: Sequence[int], seed: int) -> Placement:
    """Every expert at least once, the other slots random or empty, and uneven weights of copies."""
    rng = np.random.default_rng(seed)
    table = np.full((geometry.layers, geometry.max_ranks, geometry.slots), -1, np.int32)
    weights = np.zeros(table.shape, np.uint32)
    for layer in range(geometry.layers):
        places = [(r, s) for r in members for s in range(geometry.slots)]
        rng.shuffle(places)
        for expert, (rank, slot) in enumerate(places[: geometry.experts]):
            table[layer, rank, slot] = expert
        for rank, slot in places[geometry.experts :]:
            absent = np.setdiff1d(np.arange(geometry.experts), table[layer, rank])
            if len(absent) and rng.random() < 0.8:
                table[layer, rank, slot] = rng.choice(absent)
        for expert in range(geometry.experts):
            copies = np.argwhere(table[layer] == expert)
            cuts = np.sort(rng.integers(0, 65537, len(copies) - 1))
            shares = np.diff(np.concatenate([[0], cuts, [65536]]))
            for (rank, slot), share in zip(copies, shares, strict=True):
                weights[layer, rank, slot] = share
    return table, weights


class World:
    """A `LocalGroup` whose engines are threads here.

    Args:
        geometry: sizes and exchanges.
        members: ranks of the first view; all by default.
        placement: int32 [layers, max_ranks, slots] and weights; `spread` by default.
        timeouts: native deadlines.
    """

    def __init__(
        self,
        geometry: abi.Geometry,
        *,
        members: Sequence[int] | None = None,
        placement: Placement | None = None,
        timeouts: abi.Timeouts | None = None,
    ) -> None:
        self.geometry = geometry
        self.members = list(range(geometry.max_ranks) if members is None else members)
        self.group = LocalGroup(geometry, ranks=self.members, timeouts=timeouts)
        self._threads = ThreadPoolExecutor(len(self.members))
        sessions = self._threads.map(self.group.session, self.members)
        self.sessions: dict[int, RawSession] = dict(zip(self.members, sessions, strict=True))
        if placement is None:
            table = spread(geometry, self.members)
            placement = table, equal_weights(table, self.members)
        self.epoch = 0
        self._placements: dict[int, Placement] = {}
        self.restage(placement)
        rng = np.random.default_rng(geometry.experts)
        # Powers of two and small sums of them, so that few results round alike by chance.
        self.factors = rng.integers(1, 256, (geometry.layers, geometry.experts)) / np.float32(64)
        self.factors = self.factors.astype(np.float32)

    def close(self) -> None:
        """Detach every session and end the group."""
        self.each(lambda _rank, session: session.close())
        self._threads.shutdown()
        self.group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            self.close()
            return
        # A failed test's report still shows arrays over the regions: these stay mapped.
        self._threads.shutdown()
        self.group.close()

    def each(self, call: Callable[[int, RawSession], T]) -> dict[int, T]:
        """`call(rank, session)` on every rank at once; raises the first error when all are done."""
        calls = {r: self._threads.submit(call, r, s) for r, s in self.sessions.items()}
        wait(calls.values())
        return {rank: future.result() for rank, future in calls.items()}

    def restage(self, placement: Placement, members: Sequence[int] | None = None) -> None:
        """Stage the next view with another placement, and other members if given."""
        self.members = self.members if members is None else list(members)
        self.epoch += 1
        self._placements[self.epoch] = placement
        self.group.stage(self.epoch, self.epoch - 1, self.members, *placement)

    def table(self, epoch: int = 0) -> npt.NDArray[np.int32]:
        """int32 [layers, max_ranks, slots] of a view; epoch 0 stands for the last one staged."""
        return self._placements[epoch or self.epoch][0]

    def slot_factors(self, rank: int, layer: int, epoch: int = 0) -> Floats:
        """float32 [slots]: factors of the experts that the rank holds."""
        experts_here = self.table(epoch)[layer, rank]
        return np.where(experts_here < 0, np.nan, self.factors[layer, experts_here]).astype(
            np.float32
        )

    def serve(
        self, batch: Batch, rank: int, layer: int, step: int, epoch: int = 0
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Ranks and slots that serve a rank's batch."""
        points = reference.split_points(len(batch.ids), rank, layer, step)
        table, weights = self._placements[epoch or self.epoch]
        return reference.serve(batch.ids, table[layer], weights[layer], points)

    def compute(self, got: Delivered, number: int, rank: int, layer: int, epoch: int = 0) -> None:
        """Be the expert kernels of a rank."""
        spec = self.geometry.exchange[number]
        factors = self.slot_factors(rank, layer, epoch)
        experts.compute(got, spec, experts.Wire.of(spec), factors, self.geometry.hidden)

    def expected(
        self, number: int, batch: Batch, rank: int, layer: int, step: int, epoch: int = 0
    ) -> Floats:
        """What combine must give a rank, to the bit."""
        spec = self.geometry.exchange[number]
        home = 0 if spec.replicated else rank
        ranks, _ = self.serve(batch, home, layer, step, epoch)
        kind = experts.Wire.of(spec)
        factors = self.factors[layer]
        return experts.expected(batch.x, batch.ids, batch.weights, ranks, spec, kind, factors)

    def round_trip(
        self, number: int, batches: dict[int, Batch], layer: int = 0, x_dtype: int = abi.Dtype.FP32
    ) -> tuple[dict[int, Floats], int]:
        """One step with one exchange on all ranks: results by rank, and the step's number."""

        def run(rank: int, session: RawSession) -> tuple[Floats, int]:
            batch = batches[rank]
            step = session.begin(len(batch.x)).step
            x = experts.narrow(batch.x, x_dtype)
            got = session.dispatch(number, layer, x, batch.ids, batch.weights, x_dtype=x_dtype)
            self.compute(got, number, rank, layer)
            out = session.combine(number, len(batch.x))
            if not session.end():
                raise AssertionError(f"rank {rank}: step {step} is not complete")
            return out, step

        results = self.each(run)
        return {rank: out for rank, (out, _) in results.items()}, next(iter(results.values()))[1]
