"""Ranks of one process that step in threads of their own while views come and go at random."""

import random
import threading
import time
from collections import defaultdict
from typing import Any

import numpy as np

from elasticep.errors import ElasticEPError
from elasticep.native import abi
from elasticep.native import cuda as native
from elasticep.testing import emulated_cuda
from elasticep.testing.small import EXPERTS, LAYERS, exchange, geometry
from tests.emulated.stand import Seat, Stand, over

Status = native.StepStatus
TOKENS = 5
LEAST_VIEWS = 6
MOST_EXCHANGES = 3  # a step has its number modulo this many


class Member(threading.Thread):
    """One seat: steps until it is expelled, then comes again under the next incarnation."""

    def __init__(self, world: "World", rank: int) -> None:
        super().__init__(daemon=True)
        self.world, self.rank = world, rank
        self.seat: Seat = world.stand.seats[rank]
        self.dice = random.Random(world.chance * 100 + rank)
        self.incarnation = 0
        self.ready = threading.Event()  # this incarnation can be given views
        self.epoch = 0
        self.ran: set[int] = set()  # epochs of this incarnation
        self.wrong: str | None = None
        self.opening = threading.Lock()

    def run(self) -> None:
        try:
            while not self.world.over.is_set():
                self.live()
        except BaseException as error:
            self.wrong = f"rank {self.rank}: {error!r}"
            raise

    def pause(self, most_s: float) -> None:
        self.world.over.wait(self.dice.random() * most_s)

    def live(self) -> None:
        """One incarnation."""
        with self.opening:
            self.incarnation += 1
            self.epoch, self.ran = 0, set()
            seats = self.world.stand.seats
            self.seat.open(self.incarnation, seats, len(seats))
        self.ready.set()
        while not self.world.over.is_set():
            self.seat.begin(self.rank)
            result = self.seat.result()
            if result.status is Status.EXPELLED:
                break
            self.epoch = max(self.epoch, result.epoch)
            self.ran.add(result.epoch)
            if result.status is Status.RUN:
                self.step(result)
                continue
            self.world.note(result.status.name)
            self.seat.end()
            self.seat.result()
            self.pause(0.004)
        self.ready.clear()

    def exchange(self, step: int, layer: int) -> tuple[Any, ...]:
        """Identity experts and top-1 routing of weight one; all that kernels read and write."""
        seat, hidden, stream = self.seat, self.seat.geometry.hidden, self.seat.stream.cuda_stream
        tokens = self.dice.choice((0, 1, TOKENS))
        x = np.full((tokens, hidden), step * 100 + layer * 10 + self.rank, np.float32)
        x += np.arange(tokens, dtype=np.float32)[:, None] / 8
        ids = np.array([[self.dice.randrange(EXPERTS)] for _ in range(tokens)], np.int32)
        weights, out = np.ones((tokens, 1), np.float32), np.full_like(x, np.nan)
        args = native.DispatchArgs(
            layer=layer % LAYERS,
            tokens=tokens,
            x_dtype=int(abi.Dtype.FP32),
            ids_bytes=4,
            x=x.ctypes.data,
            ids=ids.ctypes.data,
            weights=weights.ctypes.data,
        )
        seat.here.dispatch(args, stream)
        received = seat.here.received(0)
        rows = over(received.rows, (received.rows_count, hidden), np.float32)
        emulated_cuda.api().epe_copy(received.out, received.rows, rows.nbytes, stream)
        seat.here.combine(0, 0, tokens, out.ctypes.data, abi.Dtype.FP32, stream)
        if self.dice.random() < 0.02:
            seat.here.tear(stream)
        if self.dice.random() < 0.5:
            seat.stream.synchronize()
        return x, out, ids, weights

    def step(self, info: native.StepResult) -> None:
        """The rest of a step whose barrier was passed; slow, or as if stopped, now and then."""
        done = []
        for layer in range(info.step % MOST_EXCHANGES):
            if self.dice.random() < 0.03:
                self.pause(0.4)
            done.append(self.exchange(info.step, layer))
        if self.dice.random() < 0.03:
            self.pause(0.4)
        left = self.world.left_in(self.rank, self.incarnation)
        self.seat.end()
        result = self.seat.result()
        if not result.complete:
            self.world.note(f"torn, {native.Why(result.fault.why).name}")
            return
        assert not left, f"step {info.step} is complete after it was left behind in {left}"
        for x, out, *_ in done:
            assert (x == out).all(), f"step {info.step} is complete with a wrong row"
        self.world.complete(self.rank, self.incarnation, info)


class World:
    """The seats, and what was proposed and came of it."""

    def __init__(self, ranks: int, chance: int) -> None:
        self.chance = chance
        self.dice = random.Random(chance)
        shape = geometry(ranks, exchange(), topk=1)
        self.stand = Stand(shape, suspect_ms=50, exchange_ms=20_000, step_ms=2000)
        self.over = threading.Event()
        self.mutex = threading.Lock()
        self.steps: dict[int, dict[int, int]] = defaultdict(dict)  # step -> rank -> epoch
        self.views: dict[int, dict[int, int]] = {}
        # Epoch in which a step was complete -> what those that completed one had run in till then.
        self.completed: dict[int, set[int]] = defaultdict(set)
        self.notes: dict[str, int] = defaultdict(int)
        self.members = [Member(self, rank) for rank in range(ranks)]

    def note(self, what: str) -> None:
        with self.mutex:
            self.notes[what] += 1

    def left_in(self, rank: int, incarnation: int) -> int:
        """A later view without this incarnation in which a step was completed by somebody who had
        run in a view with it, or 0. Who comes in later leaves nobody behind: it may pass a barrier
        before those have that do, and complete a step without exchanges in its view.
        """
        with self.mutex:
            for epoch, before in self.completed.items():
                without = self.views[epoch].get(rank) != incarnation
                if epoch <= self.members[rank].epoch or not without:
                    continue
                if any(self.views[e].get(rank) == incarnation for e in before):
                    return epoch
            return 0

    def complete(self, rank: int, incarnation: int, info: native.StepResult) -> None:
        with self.mutex:
            assert self.views[info.epoch].get(rank) == incarnation
            assert info.members == self.views[info.epoch]
            told = self.steps[info.step]
            told[rank] = info.epoch
            assert len(set(told.values())) == 1, f"step {info.step} is complete in {told}"
            self.completed[info.epoch] |= {e for e in self.members[rank].ran if e}
            self.notes["complete"] += 1

    def propose(self, epoch: int, view: dict[int, int]) -> None:
        """Gives the view to its members one after another, joiners first, with pauses."""
        with self.mutex:
            self.views[epoch] = dict(view)
        g = self.stand.geometry
        ranks = list(view)
        table = np.full((g.layers, g.max_ranks, g.slots), -1, np.int32)
        table[:, ranks] = np.arange(EXPERTS)
        self.dice.shuffle(ranks)
        for rank in sorted(ranks, key=lambda r: self.members[r].epoch != 0):
            member = self.members[rank]
            with member.opening:
                if member.incarnation != view[rank] or member.seat.context is None:
                    continue  # it was expelled meanwhile
                try:
                    self.stand.stage(epoch, epoch - 1, view, table, on=[rank])
                except ElasticEPError:
                    self.note("refused")
            if self.dice.random() < 0.5:
                self.over.wait(self.dice.random() * 0.1)

    def next_view(self, view: dict[int, int]) -> dict[int, int]:
        """Without one of the members, who is dead or drained; or with one more; or the same."""
        following, what = dict(view), self.dice.random()
        waiting = [
            m for m in self.members if m.rank not in view and m.ready.is_set() and not m.epoch
        ]
        if what < 0.45 and len(view) > 1:
            gone = self.dice.choice(list(view))
            del following[gone]
            if self.dice.random() < 0.5:
                for seat in self.stand.seats:
                    seat.header.mark_dead(gone, view[gone])
        elif what < 0.85 and waiting:
            joiner = self.dice.choice(waiting)
            following[joiner.rank] = joiner.incarnation
        return following

    def adopted(self, epoch: int, view: dict[int, int]) -> bool:
        """By all members; now and then it is enough that they run the one before."""
        at_least = epoch if self.dice.random() < 0.7 else epoch - 1
        members = [self.members[r] for r, inc in view.items()]
        return all(m.epoch >= at_least or m.incarnation != view[m.rank] for m in members) and all(
            m.epoch >= epoch - 1 or m.incarnation != view[m.rank] for m in members
        )


def soak(ranks: int, seconds: float, chance: int, complete: int) -> Any:
    """What happened how often, in so many seconds; on a slow machine in more, until there were
    enough complete steps and a few views. Raises at the first rule that is broken.
    """
    world = World(ranks, chance)
    for member in world.members:
        member.start()
    for member in world.members:
        assert member.ready.wait(60)
    epoch, view = 1, dict.fromkeys(range(ranks), 1)
    world.propose(epoch, view)
    end = time.monotonic() + seconds
    progress = time.monotonic()

    def enough() -> bool:
        return world.notes.get("complete", 0) >= complete and epoch >= LEAST_VIEWS

    while time.monotonic() < end or not enough():
        wrong = [m.wrong for m in world.members if m.wrong]
        assert not wrong, wrong
        if not world.adopted(epoch, view):
            world.over.wait(0.005)
            stuck = {m.rank: (m.incarnation, m.epoch) for m in world.members}
            assert time.monotonic() < progress + 60, f"view {epoch}, {view}: {stuck}"
            continue
        world.over.wait(world.dice.random() * 0.05)
        epoch, view = epoch + 1, world.next_view(view)
        world.propose(epoch, view)
        progress = time.monotonic()
    world.over.set()
    return {"views": epoch, **world.notes}
