"""How a rank's arena is filled: two views at once, notes that lie, and what an answer means."""

import asyncio
import os
import random
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from elasticep.arena import SlotState
from elasticep.errors import Unavailable
from elasticep.runtime.weights import fill
from elasticep.runtime.weights.driver import CopyFailed
from elasticep.runtime.weights.fill import Unrestorable
from elasticep.runtime.weights.finder import Place, Replica
from elasticep.runtime.weights.memory import Target
from elasticep.runtime.weights.messages import Failure, Kind, Source
from elasticep.runtime.weights.supply import End, Wish
from elasticep.testing.mover import Node, arena_memory, checkpoint, mover_driver, until
from elasticep.testing.weights import wrong_labels

EMPTY = [[-1, -1, -1]] * 2


def test_slots_of_a_view_that_was_handed_out_are_not_written_again(tmp_path: Path) -> None:
    """Two views of a rank lack the same experts: a join, then a drain before it is adopted."""
    source = checkpoint(tmp_path)

    async def run() -> None:
        with arena_memory() as memory, mover_driver(tmp_path, rate=3_000_000) as mover:
            node = Node(mover, memory, [source])
            node.view(1, EMPTY, 0)
            slots = [[0, 1, -1], [0, 1, 2]]
            earlier, later = node.view(2, slots), node.view(3, slots, 2)
            first = node.ready(earlier)
            await until(lambda: memory.valid >= 1)
            second = node.ready(later)
            await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
            assert node.seat.pinned
            assert memory.held.tolist() == slots
            sequences = [label.sequence for *_, label in memory.arena.all_labels()]
            await asyncio.gather(first, second)
            assert [label.sequence for *_, label in memory.arena.all_labels()] == sequences
            assert max(sequences) == 2  # each was filled once

    asyncio.run(run())


def test_what_only_an_overtaken_view_wants_is_called_off(tmp_path: Path) -> None:
    """A paced move is under way, for minutes, when a member dies, and the next view needs
    other experts in its places at once.
    """
    source = checkpoint(tmp_path)

    async def run() -> None:
        with arena_memory() as memory, mover_driver(tmp_path, rate=2_000) as mover:
            node = Node(mover, memory, [source])
            replica = Replica("n1", 1, 1, 0)
            node.places = {(0, 0): Place([replica]), (0, 1): Place([replica])}
            node.view(1, EMPTY, 0)
            moves = node.view(2, [[0, 1, -1], [-1, -1, -1]])
            rescue = node.view(3, [[2, 0, -1], [-1, -1, -1]], 2)
            first = node.ready(moves, lambda: node.epoch != 3)
            await until(lambda: memory.arena.label(0, 0).state is SlotState.FILLING)
            node.places[0, 0] = Place()  # nobody has it any more
            await asyncio.wait_for(node.ready(rescue), 60)
            assert memory.held[0].tolist() == [2, 0, -1]
            assert node.seat.pinned == {3}
            node.epoch = 3
            with pytest.raises(Unavailable, match="not wanted"):
                await first
            assert memory.held[0].tolist() == [2, 0, -1]

    asyncio.run(run())


def test_who_asks_for_what_is_on_its_way_joins_in_and_hurries_it(tmp_path: Path) -> None:
    source = checkpoint(tmp_path)

    async def run() -> None:
        with arena_memory() as memory, mover_driver(tmp_path, rate=2_000) as mover:
            node = Node(mover, memory, [source])
            supply, target = node.filler.supply, Target(memory, 0, 0, 1)
            slow = asyncio.create_task(supply.put(target, Place(), Wish(urgent=False)))
            await until(lambda: memory.arena.label(0, 0).state is SlotState.FILLING)
            other = Target(memory, 0, 0, 2)
            refused = asyncio.create_task(
                supply.put(other, Place(), Wish(urgent=True, may=lambda: memory.held[0, 0] != 1))
            )
            quick = asyncio.create_task(supply.put(target, Place(), Wish(urgent=True)))
            slow.cancel()  # the other one waits for it still
            outcome = await asyncio.wait_for(quick, 60)
            assert (outcome.end, outcome.kind) == (End.PLACED, Kind.CHECKPOINT)
            assert memory.arena.label(0, 0).sequence == 2
            # Meanwhile the slot has come into use.
            assert (await refused).end is End.POSTPONED
            assert memory.held[0, 0] == 1
            again = await supply.put(target, Place(), Wish(urgent=True))
            assert (again.end, again.kind) == (End.PLACED, None)

    asyncio.run(run())


# ---- checksums


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (b"", {"n1": b"\x01" * 16}),
        (b"\x02" * 16, {f"n{n}": b"\x03" * 16 for n in range(1, 6)}),
        (b"\x02" * 16, {}),
        (b"", {"n1": b"\x01" * 16, "n2": b"\x02" * 16}),
    ],
)
def test_no_note_makes_an_expert_lost_that_the_checkpoint_has(
    tmp_path: Path, own: bytes, said: dict[str, bytes]
) -> None:
    source = checkpoint(tmp_path)

    async def run() -> None:
        with arena_memory() as memory, mover_driver(tmp_path) as mover:
            node = Node(mover, memory, [source], source.path)
            if own:
                node.ledger.note(0, 1, own)
            target = Target(memory, 0, 0, 1)
            outcome = await node.filler.supply.put(target, Place(said=said), Wish(urgent=True))
            assert (outcome.end, outcome.kind) == (End.PLACED, Kind.CHECKPOINT)
            assert node.ledger.get(0, 1) == memory.sums[0, 0]  # the truth, from now on

    asyncio.run(run())


def test_a_replica_that_does_not_fit_the_notes_gives_way_to_the_checkpoint(tmp_path: Path) -> None:
    source = checkpoint(tmp_path)

    async def run() -> None:
        with (
            arena_memory() as memory,
            arena_memory() as peer,
            mover_driver(tmp_path) as mover,
        ):
            node = Node(mover, memory, [], source.path)
            number = mover.lend(peer)
            true = await mover.copy(Target(peer, 0, 0, 1), b"", source, urgent=True)
            replica = Source(
                kind=Kind.REPLICA, arena=number, slot=0, node="n1", rank=1, incarnation=1
            )
            node.given = [replica, source]
            place = Place([Replica("n1", 1, 1, 0)], said={"n1": b"\x01" * 16, "n2": b"\x01" * 16})
            target = Target(memory, 0, 0, 1)
            outcome = await node.filler.supply.put(target, place, Wish(urgent=True))
            assert outcome.kind is Kind.CHECKPOINT
            assert node.ledger.get(0, 1) == true
            place = Place([Replica("n1", 1, 1, 0)], said={"n1": true})
            target = Target(memory, 0, 1, 1)
            outcome = await node.filler.supply.put(target, place, Wish(urgent=True))
            assert outcome.kind is Kind.CHECKPOINT  # who lied is asked last for a while

    asyncio.run(run())


class OneDead(Node):
    """Rank 1 has died since it was found."""

    def is_dead(self, rank: int, incarnation: int) -> bool:
        return rank == 1


def test_who_died_since_it_was_found_is_not_copied_from(tmp_path: Path) -> None:
    source = checkpoint(tmp_path)

    async def run() -> None:
        with (
            arena_memory() as memory,
            arena_memory() as peer,
            mover_driver(tmp_path) as mover,
        ):
            number = mover.lend(peer)
            await mover.copy(Target(peer, 0, 0, 1), b"", source, urgent=True)
            dead, live = (
                Source(kind=Kind.REPLICA, arena=number, slot=0, node="n1", rank=rank, incarnation=1)
                for rank in (1, 2)
            )
            place = Place([Replica("n1", 1, 1, 0), Replica("n1", 2, 1, 0)])
            node = OneDead(mover, memory, [dead])
            outcome = await node.filler.supply.put(
                Target(memory, 0, 0, 1), place, Wish(urgent=True)
            )
            assert outcome.end is End.NOWHERE
            assert "it is dead" in outcome.why
            node.given = [dead, live]
            outcome = await node.filler.supply.put(
                Target(memory, 0, 0, 1), place, Wish(urgent=True)
            )
            assert (outcome.end, outcome.kind) == (End.PLACED, Kind.REPLICA)

    asyncio.run(run())


# ---- what an answer means


def test_a_hundred_lost_experts_are_named_after_one_more_search(tmp_path: Path) -> None:
    async def run() -> None:
        with arena_memory() as memory, mover_driver(tmp_path) as mover:
            node = Node(mover, memory, [])
            node.view(1, EMPTY, 0)
            with pytest.raises(Unrestorable) as lost:
                await node.ready(node.view(2, [[0, 1, 2], [3, 4, -1]]))
            assert lost.value.refs == ((0, 0), (0, 1), (0, 2), (1, 3), (1, 4))
            assert len(node.finds) == 2
            assert sorted(node.finds[1]) == list(lost.value.refs)

    asyncio.run(run())


@pytest.mark.parametrize("failure", [Failure.BUSY, Failure.MOVER, Failure.AWAY, Failure.STALLED])
def test_what_could_not_be_had_now_is_tried_again_and_not_called_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Failure
) -> None:
    source = checkpoint(tmp_path)

    async def run() -> None:
        with arena_memory() as memory, mover_driver(tmp_path) as mover:
            node = Node(mover, memory, [source])
            node.view(1, EMPTY, 0)
            copy, calls = mover.copy, 0

            async def failing(*arguments: object, **more: object) -> bytes:
                nonlocal calls
                calls += 1
                if calls <= 4:
                    raise CopyFailed(failure, "not now")
                return await copy(*arguments, **more)  # type: ignore[arg-type]

            monkeypatch.setattr(mover, "copy", failing)
            monkeypatch.setattr(fill, "_PATIENCE_S", 60.0)  # four tries, also on a busy machine
            await node.ready(node.view(2, [[0, -1, -1], [-1, -1, -1]]))
            assert memory.held[0, 0] == 0
            monkeypatch.setattr(fill, "_PATIENCE_S", 0.3)
            calls = -1_000_000
            begin = time.monotonic()
            with pytest.raises(Unavailable, match=r"not now .layer 0 expert 1\)"):
                await node.ready(node.view(3, [[0, 1, -1], [-1, -1, -1]], 2))
            assert time.monotonic() - begin < 10

    asyncio.run(run())


def test_a_silent_node_may_have_what_nobody_else_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fill, "_PATIENCE_S", 0.3)

    async def run() -> None:
        with arena_memory() as memory, mover_driver(tmp_path) as mover:
            node = Node(mover, memory, [])
            node.view(1, EMPTY, 0)
            node.places = {(0, 0): Place(silent=("n1",))}
            with pytest.raises(Unavailable, match="no answer from n1"):
                await node.ready(node.view(2, [[0, -1, -1], [-1, -1, -1]]))

    asyncio.run(run())


def test_where_experts_are_is_not_believed_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long paced fill looks again for what is left."""
    monkeypatch.setattr(fill, "_FRESH_S", 0.0)
    monkeypatch.setattr(fill, "_BATCH", 1)
    source = checkpoint(tmp_path)

    async def run() -> None:
        with arena_memory() as memory, mover_driver(tmp_path) as mover:
            node = Node(mover, memory, [source])
            node.view(1, EMPTY, 0)
            monkeypatch.setattr(fill, "_FRESH_S", 0.05)
            task = node.ready(node.view(2, [[0, 1, 2], [0, 1, 2]]))
            await task
            assert memory.valid == 6
            assert node.finds[0] == [(layer, e) for layer in range(2) for e in range(3)]
            assert all(len(refs) <= fill._FIND for refs in node.finds)

    asyncio.run(run())


def test_whatever_happens_views_in_use_read_what_they_name(tmp_path: Path) -> None:
    """Views that overlap, are overtaken or adopted, while movers are killed: no slot of a view that
    runs, or was handed out and may still run, is ever anything but its expert, whole.
    """
    source = checkpoint(tmp_path)
    rng = random.Random(11)

    async def run() -> None:
        with arena_memory() as memory, mover_driver(tmp_path, rate=20_000_000) as mover:
            node = Node(mover, memory, [source], source.path)
            tables = {1: np.full((2, 3), -1, np.int32)}
            node.view(1, tables[1].tolist(), 0)
            looked = 0

            def look() -> None:
                nonlocal looked
                for epoch in {node.epoch, *node.seat.pinned}:
                    if epoch >= node.epoch:
                        for layer, slot in np.argwhere(tables[epoch] >= 0).tolist():
                            label = memory.arena.label(layer, slot)
                            assert label.holds(int(tables[epoch][layer, slot])), (epoch, label)
                            looked += 1

            tasks: dict[int, asyncio.Task[None]] = {}
            for epoch in range(2, 1_000):
                # How soon views are ready, and so how much there is to see, hangs on the machine.
                if epoch >= 40 and looked > 200:
                    break
                open_tables = [tables[e] for e in {node.epoch, *tasks}]
                free = np.all([table < 0 for table in open_tables], axis=0)
                table = np.where(free, rng.choice([-1, 0, 1, 2]), open_tables[0])
                table = np.where(np.array([[rng.random() < 0.3] * 3] * 2), -1, table)
                tables[epoch] = table.astype(np.int32)
                view = node.view(epoch, table.tolist(), node.epoch)
                tasks[epoch] = node.ready(view, lambda e=epoch: e >= node.epoch)  # type: ignore[misc]
                for _ in range(rng.randrange(12)):
                    await asyncio.wait({*tasks.values()}, timeout=0.004)
                    look()
                if rng.random() < 0.3 and mover.pid:
                    os.kill(mover.pid, signal.SIGKILL)
                ready = [e for e, task in tasks.items() if task.done() and not task.exception()]
                if len(tasks) >= 3:  # one has to be adopted before the next one is proposed
                    latest = tasks[max(tasks)]
                    while not latest.done():
                        await asyncio.wait({latest}, timeout=0.004)
                        look()
                    await latest
                    ready.append(max(tasks))
                if ready:
                    node.epoch = max(ready)
                    tasks = {e: task for e, task in tasks.items() if e > node.epoch}
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            look()
            assert looked > 200
            assert not wrong_labels(memory.arena)

    asyncio.run(run())


def test_what_keeps_experts_away_is_said_before_which_they_are() -> None:
    """An engine hears the beginning of it: a wrong path of a checkpoint has to be in that."""
    why = "checkpoint /wrong: there is no checkpoint '/wrong'; give a Hugging Face folder"
    view: Any = SimpleNamespace(epoch=1)
    attempt = fill._Attempt(view, lambda: True, troubled={(0, e): why for e in range(16)})
    with pytest.raises(Unavailable) as caught:
        attempt.check()
    assert f"rank 0 could not stage epoch 1: {caught.value}"[:255].count(why) == 1
    assert "layer 0 expert 7 and 8 more" in str(caught.value)
