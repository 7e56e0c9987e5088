"""Engines that decode in lockstep over a `LocalGroup`, for tests that kill and stop them."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from elasticep import errors
from elasticep.native import abi
from elasticep.testing import experts
from elasticep.testing.local_group import LocalGroup
from elasticep.testing.placements import spread
from elasticep.testing.raw import RawSession, TornError
from elasticep.testing.world import Batch, make_batch

RANKS: Final = 4
TOPK: Final = 3
HIDDEN: Final = 32
_EXPERTS: Final = 12
_LAYERS: Final = 2
_CAP: Final = 16
_JOIN_S: Final = 60.0
_FACTORS: Final = np.random.default_rng(7).standard_normal((_LAYERS, _EXPERTS)).astype(np.float32)


def geometry(launch: int = abi.Launch.SERVICE) -> abi.Geometry:
    """Four ranks with room for every expert, one routed exchange with unweighted outputs."""
    g = abi.Geometry(
        layers=_LAYERS,
        experts=_EXPERTS,
        topk=TOPK,
        hidden=HIDDEN,
        slots=_EXPERTS,
        max_ranks=RANKS,
        exchanges=1,
        launch=launch,
    )
    g.exchange[0] = abi.ExchangeConfig(
        copies=abi.Copies.PER_RANK,
        layout=abi.RowLayout.ROUTED,
        reduce=abi.Reduce.PER_EXPERT,
        max_tokens=_CAP,
        channels=1,
    )
    return g


def timeouts(exchange_s: float = 30.0, step_s: float = 60.0) -> abi.Timeouts:
    """Deadlines of a test; a suspicion after 50 ms."""
    return abi.Timeouts(
        suspect_after_ns=50_000_000,
        hang_timeout_ns=1_000_000_000,
        exchange_timeout_ns=int(exchange_s * 1e9),
        step_timeout_ns=int(step_s * 1e9),
    )


@dataclass
class Engine:
    """Decodes made-up batches in a thread: one step after the other, each result checked.

    Attributes:
        complete: (step, epoch) of every complete step.
        torn: steps torn so far.
        wrong: complete steps with another result than expected, to the bit.
        error: what ended the thread before `stop`.
    """

    session: RawSession
    rank: int
    stop: threading.Event
    complete: list[tuple[int, int]] = field(default_factory=list)
    torn: int = 0
    wrong: int = 0
    error: BaseException | None = None
    torn_at_ns: int = 0
    last_complete_ns: int = 0
    thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to decode."""
        self.thread = threading.Thread(target=self._run, name=f"engine-{self.rank}")
        self.thread.start()

    def _run(self) -> None:
        try:
            while not self.stop.is_set():
                try:
                    info = self.session.begin(_CAP, timeout_ms=2_000)
                except errors.StepTimeout:
                    continue
                self._step(info.step, info.epoch)
        except errors.ElasticEPError as error:
            self.error = error

    def _step(self, step: int, epoch: int) -> None:
        g = self.session.geometry
        tables = self.session.slots(epoch)
        tokens = np.random.default_rng([self.rank, step]).integers(0, _CAP + 1, _LAYERS)
        good = True
        try:
            for layer, n in enumerate(tokens.tolist()):
                batch = make_batch(g, n, [self.rank, step, layer], none=0)
                good = self._exchange(layer, batch, tables[layer, self.rank]) and good
        except TornError:
            self.torn += 1
            self.torn_at_ns = time.monotonic_ns()
        if self.session.end():
            self.last_complete_ns = time.monotonic_ns()
            self.complete.append((step, epoch))
            self.wrong += not good

    def _exchange(self, layer: int, batch: Batch, slots: npt.NDArray[np.int32]) -> bool:
        spec = self.session.geometry.exchange[0]
        wire = experts.Wire.of(spec)
        got = self.session.dispatch(0, layer, batch.x, batch.ids, batch.weights)
        experts.compute(got, spec, wire, _FACTORS[layer, slots], HIDDEN)
        out = self.session.combine(0, len(batch.x))
        served = np.zeros_like(batch.ids)  # by anyone: outputs are summed in the order of choices
        want = experts.expected(
            batch.x, batch.ids, batch.weights, served, spec, wire, _FACTORS[layer]
        )
        return np.array_equal(out, want)


class Scene:
    """Four engines in lockstep over a LocalGroup."""

    def __init__(self, launch: int = abi.Launch.SERVICE, exchange_s: float = 30.0) -> None:
        self.group = LocalGroup(geometry(launch), timeouts=timeouts(exchange_s))
        self.slots = spread(self.group.geometry, range(RANKS), copies=2)
        self.stop = threading.Event()
        self.engines = [Engine(self.group.session(r), r, self.stop) for r in range(RANKS)]
        self.group.stage(1, 0, range(RANKS), self.slots)

    def start(self) -> None:
        """Let every engine decode."""
        for engine in self.engines:
            engine.start()

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """`LocalGroup.wait_for`."""
        self.group.wait_for(condition, what)

    def progress(self, ranks: list[int], steps: int = 5) -> None:
        """Wait until each of these ranks has completed `steps` more steps."""
        goal = {r: len(self.engines[r].complete) + steps for r in ranks}
        self.wait(
            lambda: all(len(self.engines[r].complete) >= goal[r] for r in ranks),
            f"{steps} more complete steps on ranks {ranks}",
        )

    def reaches(self, epoch: int, ranks: list[int]) -> None:
        """Wait until each of these ranks has completed a step in `epoch`."""

        def there() -> bool:
            done = [self.engines[r].complete for r in ranks]
            return all(c and c[-1][1] == epoch for c in done)

        self.wait(there, f"a complete step in epoch {epoch} on ranks {ranks}")

    def survivors(self, dead: int) -> list[int]:
        """All ranks but one."""
        return [r for r in range(RANKS) if r != dead]

    def finish(self) -> None:
        """Let every engine end its step and stop."""
        self.stop.set()
        for engine in self.engines:
            if engine.thread is not None:
                engine.thread.join(_JOIN_S)
                if engine.thread.is_alive():
                    raise AssertionError(f"rank {engine.rank} hangs")

    def close(self) -> None:
        """End the engines and the group, whatever state they are in."""
        self.stop.set()
        for engine in self.engines:
            if engine.thread is not None:
                engine.thread.join(_JOIN_S)
            engine.session.close()
        self.group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
