"""What decides how expert weights move: backups, checksums, pace, slots in use, crashes."""

import asyncio
import contextlib
import json
import mmap
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from elasticep.arena import Arena
from elasticep.config import DaemonConfig
from elasticep.errors import ConfigError
from elasticep.proto import types_pb2
from elasticep.runtime.limits import Limits
from elasticep.runtime.weights import messages
from elasticep.runtime.weights.backups import holders, live_nodes, share
from elasticep.runtime.weights.driver import CopyFailed, MoverDriver
from elasticep.runtime.weights.fill import Unrestorable
from elasticep.runtime.weights.ledger import Ledger
from elasticep.runtime.weights.memory import ArenaMemory, Target
from elasticep.runtime.weights.messages import Failure, Kind, Source
from elasticep.runtime.weights.metrics import WeightsMetrics
from elasticep.runtime.weights.pace import Pace
from elasticep.runtime.weights.seat import SeatWeights
from elasticep.runtime.weights.views import ViewBook, ViewTable
from elasticep.testing.checkpoints import write_checkpoint
from elasticep.testing.weights import one_tensor, wrong_labels
from elasticep.weights import ArenaLayout, TensorSpec, WeightSpec

# ---- backups


@given(
    nodes=st.integers(1, 9),
    experts=st.integers(1, 40),
    layers=st.integers(1, 4),
    copies=st.integers(1, 3),
    seed=st.integers(0, 1 << 16),
)
def test_case_17_every_expert_has_a_holder_other_than_its_only_home(
    nodes: int, experts: int, layers: int, copies: int, seed: int
) -> None:
    rng = random.Random(seed)
    names = sorted(f"n{n}" for n in range(nodes))
    slots = -(-experts * copies // nodes) + 1
    table = np.full((layers, nodes, slots), -1, np.int32)
    for layer in range(layers):
        places = [(rank, slot) for rank in range(nodes) for slot in range(slots)]
        rng.shuffle(places)
        for index, (rank, slot) in enumerate(places[: experts * copies]):
            table[layer, rank, slot] = index % experts
    node_of = dict(enumerate(names))
    holder = holders(names, table, node_of, experts)
    assert holder.shape == (layers, experts)
    assert holder.min() >= 0
    assert holder.max() < nodes
    for layer in range(layers):
        for expert in range(experts):
            homes = {rank for rank in range(nodes) if expert in table[layer, rank]}
            if nodes > 1:
                assert homes != {int(holder[layer, expert])}
    again = holders(names, table.copy(), dict(reversed(node_of.items())), experts)
    assert np.array_equal(holder, again)
    alone = live_nodes(table, node_of, experts) == 1
    for node in range(nodes):
        mine = holder == node
        assert share(mine, alone, experts) == [
            (layer, expert)
            for layer in range(layers)
            for expert in sorted(
                np.flatnonzero(mine[layer]).tolist(), key=lambda e: (not alone[layer, e], e)
            )
        ]


def test_no_node_holds_much_more_than_its_share_of_a_backup() -> None:
    names = [f"n{n}" for n in range(3)]
    table = np.arange(16, dtype=np.int32).reshape(1, 4, 4).repeat(4, axis=0)
    spread = holders(names, table, {0: "n0", 1: "n1", 2: "n2", 3: "n2"}, 16)
    counts = np.bincount(spread.ravel(), minlength=3)
    assert counts.sum() == 64
    assert counts.max() <= 2 * 64 / 3


def test_a_node_that_comes_or_goes_changes_hardly_more_than_its_own_share() -> None:
    names = [f"n{n}" for n in range(8)]
    node_of = {rank: f"n{rank // 2}" for rank in range(16)}
    table = np.random.default_rng(1).integers(0, 96, (12, 16, 24)).astype(np.int32)
    before = np.array(names)[holders(names, table, node_of, 96)]
    for gone in ("n0", "n3", "n7"):
        left = [name for name in names if name != gone]
        there = {rank: node for rank, node in node_of.items() if node != gone}
        after = np.array(left)[holders(left, table, there, 96)]
        moved = before != after
        assert moved[before == gone].all()
        assert moved[before != gone].mean() < 0.1
    even = 96 / 8
    for layer in before:
        assert max(np.unique(layer, return_counts=True)[1]) <= np.ceil(even * 1.125)


def test_with_little_room_what_lives_on_one_node_comes_first() -> None:
    mine = np.array([[True, True, True, False]])
    assert share(mine, np.array([[False, False, True, True]]), 2) == [(0, 2), (0, 0)]


# ---- checksums


def test_a_nodes_own_note_is_one_voice_and_decides_a_draw() -> None:
    ledger = Ledger()
    assert ledger.note(0, 1, b"a")
    assert ledger.note(0, 1, b"a")
    assert not ledger.note(0, 1, b"b")
    for said, expected in (
        ({}, (b"a", False, ())),
        ({"n1": b"b", "n2": b"a"}, (b"a", False, ("n1",))),
        ({"n1": b"b"}, (b"a", True, ("n1",))),
        ({"n1": b"b", "n2": b"b", "n3": b"a"}, (b"a", True, ("n1", "n2"))),
        ({"n1": b"b", "n2": b"b"}, (b"b", True, ())),  # the majority is against it
        ({"n1": b"b", "n2": b"c"}, (b"a", True, ("n1", "n2"))),
    ):
        verdict = ledger.judge(0, 1, said)
        assert (verdict.checksum, verdict.disputed, verdict.outvoted) == expected, said
    ledger.replace(0, 1, b"b")
    assert ledger.get(0, 1) == b"b"


def test_a_single_liar_is_outvoted_and_a_draw_convinces_nobody() -> None:
    ledger = Ledger()
    assert ledger.judge(0, 1, {}).checksum == b""
    assert ledger.judge(0, 1, {"n1": b"x"}).checksum == b"x"
    verdict = ledger.judge(0, 1, {"n1": b"x", "n2": b"a", "n3": b"a", "n4": b""})
    assert (verdict.checksum, verdict.outvoted) == (b"a", ("n1",))
    assert ledger.judge(0, 1, {"n1": b"x", "n2": b"a"}).disputed


def test_an_error_names_layers_and_experts_and_the_remedy() -> None:
    error = Unrestorable([(3, 1), (0, 7), (0, 7)], "nobody has it")
    assert error.refs == ((0, 7), (3, 1))
    assert "layer 0 expert 7, layer 3 expert 1" in str(error)
    assert "daemon.checkpoint" in str(error)


# ---- pace


def test_the_pace_is_kept_in_short_steps() -> None:
    clock = SimpleNamespace(now=100.0, longest=0.0)

    def wait(seconds: float) -> None:
        clock.now += seconds
        clock.longest = max(clock.longest, seconds)

    pace = Pace(1_000_000, lambda: clock.now, wait)
    for _ in range(200):
        pace.spend(pace.chunk)
    moved = 200 * pace.chunk
    assert moved / 1e6 - 0.2 <= clock.now - 100.0 <= moved / 1e6 + 0.2
    assert clock.longest < 0.2
    clock.now += 1000
    pace.spend(pace.chunk)  # a long pause is no credit for a burst
    before = clock.now
    for _ in range(20):
        pace.spend(pace.chunk)
    assert clock.now - before > 0.8


def test_without_a_rate_nothing_waits() -> None:
    pace = Pace(0, lambda: 0.0, lambda _: pytest.fail("waited"))
    pace.spend(1 << 40)


# ---- messages


def test_messages_to_the_mover_survive_the_wire() -> None:
    source = Source(kind=Kind.BACKUP, address="unix:///x", group="g", node="n1")
    spec = {"w2": {"dtype": "int8", "shape": [8]}}
    for message in (
        messages.Use(3, 2, 4, spec, True),
        messages.Drop(3),
        messages.Copy(9, 3, 0, 1, 5, "00ff", source, False),
        messages.Cancel(9),
        messages.Beat(),
        messages.Started(9),
        messages.Moved(9, 100),
        messages.Ended(9, "00ff", done=200),
    ):
        assert messages.unpack(messages.pack(message)) == message


@pytest.mark.parametrize("data", [b"", b"x", b"[]", b"{}", b'{"is":"Use"}', b'{"is":"Nope"}'])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(messages.BadMoverMessage):
        messages.unpack(data)


# ---- views and slots in use


def view(epoch: int, slots: list[list[int]], previous: int = 0) -> ViewTable:
    """One layer, one rank per row."""
    table = np.array([slots], np.int32)
    members = {rank: (1, f"n{rank}") for rank in range(len(slots))}
    return ViewTable(epoch, previous, members, table)


def test_a_view_survives_the_state_file() -> None:
    first = view(7, [[0, 1], [2, -1]], previous=6)
    kept = json.loads(json.dumps(first.kept))
    again = ViewTable.from_kept(kept, (1, 2, 2))
    assert (again.epoch, again.previous_epoch, again.members) == (7, 6, first.members)
    assert np.array_equal(again.slots, first.slots)
    for broken in ({}, {**kept, "slots": "?"}, {**kept, "slots": "AAAA"}):
        with pytest.raises(ValueError, match=r"cannot|base64|reshape|padding"):
            ViewTable.from_kept(broken, (1, 2, 2))


def test_a_table_that_is_not_the_groups_is_refused() -> None:
    for slots in (b"", np.array([0, 9], "<i4").tobytes(), np.array([0, -2], "<i4").tobytes()):
        message = types_pb2.View(epoch=1, placement=types_pb2.Placement(slot_expert=slots))
        with pytest.raises(ConfigError):
            ViewTable.read(message, (1, 1, 2), 4)


def seat_of(running: int, views: ViewBook, held: list[int]) -> SeatWeights:
    """A seat of rank 0 that runs an epoch and whose arena holds these experts."""
    keeper = SimpleNamespace(rank=0, status=lambda: SimpleNamespace(epoch=running))
    seat = SeatWeights(cast(Any, keeper), views)
    seat.memory = cast(Any, SimpleNamespace(held=np.array([held], np.int32)))
    return seat


def test_slots_of_the_running_view_and_of_those_handed_out_are_not_overwritten() -> None:
    views = ViewBook()
    for number, slots in ((4, [0, 1, -1]), (5, [0, -1, 2]), (6, [3, -1, -1])):
        views.add(view(number, [slots]), 0)
    seat = seat_of(4, views, [0, 1, -1])
    assert seat.missing(views.all()[1].of(0)) == [(0, 2, 2)]
    assert [seat.blocked(0, slot, 9) for slot in range(3)] == [True, True, False]
    assert not seat.blocked(0, 0, 0)  # the same expert may be there
    seat.pinned.add(5)
    assert [seat.blocked(0, slot, 9) for slot in range(3)] == [True, True, True]
    running_5 = seat_of(5, views, [0, 1, 2])
    running_5.pinned = {4, 5}
    assert [running_5.blocked(0, slot, 9) for slot in range(3)] == [True, False, True]
    assert running_5.pinned == {5}
    # A view that no runner heard of cannot be adopted: it protects nothing.
    assert not seat_of(0, views, [0, 1, -1]).blocked(0, 0, 9)


def test_when_the_running_view_was_forgotten_nothing_that_is_there_is_overwritten() -> None:
    seat = seat_of(9, ViewBook(), [0, 1, -1])
    assert [seat.blocked(0, slot, 7) for slot in range(3)] == [True, True, False]
    assert not seat.same_as_running(np.array([[0]], np.int32))


def test_old_views_are_forgotten_when_nobody_runs_them() -> None:
    views = ViewBook()
    for number in range(1, 30):
        views.add(view(number, [[0]]), max(0, number - 3))
        assert len(views.all()) <= 4
    assert [table.epoch for table in views.all()] == [26, 27, 28, 29]


# ---- the mover

LAYOUT = ArenaLayout(2, 3, WeightSpec((TensorSpec.of("w2", "int8", (4096, 64)),)))


@contextlib.contextmanager
def driver(folder: Path, rate: int = 0) -> Iterator[MoverDriver]:
    config = DaemonConfig(node="n0", socket_dir=str(folder), weights_rate=rate)
    made = MoverDriver(config, Limits(mover_stall_s=20.0), structlog.get_logger(), WeightsMetrics())
    try:
        yield made
    finally:
        made.close()


async def until(condition: Callable[[], object]) -> None:
    """Wait until it holds, with a deadline."""
    loop = asyncio.get_running_loop()
    end = loop.time() + 60
    while not condition():
        assert loop.time() < end
        await asyncio.wait({loop.create_future()}, timeout=0.01)


def test_a_mover_killed_at_any_moment_leaves_no_wrong_label(tmp_path: Path) -> None:
    written = write_checkpoint(
        tmp_path / "ck", one_tensor(4096 * 64), layers=2, experts=3, shards=1
    )
    source = Source(kind=Kind.CHECKPOINT, path=str(written.path))
    rng = random.Random(5)
    kills = 8

    async def run() -> None:
        memory = ArenaMemory.create(LAYOUT, 0, "rank 0")
        with driver(tmp_path, rate=8_000_000) as mover:
            mover.lend(memory)
            for number in range(kills):
                slots = [(layer, slot) for layer in range(2) for slot in range(3)]
                copies = [
                    asyncio.create_task(
                        mover.copy(
                            Target(memory, layer, slot, (slot + number) % 3),
                            b"",
                            source,
                            urgent=False,
                        )
                    )
                    for layer, slot in slots
                ]
                await asyncio.wait(copies, timeout=rng.random() * 0.15)
                await until(lambda: mover.pid)
                os.kill(mover.pid, signal.SIGKILL)
                results = await asyncio.gather(*copies, return_exceptions=True)
                failed = [r for r in results if isinstance(r, BaseException)]
                assert len(failed) <= 1
                assert all(isinstance(f, CopyFailed) and f.failure is Failure.MOVER for f in failed)
                assert not wrong_labels(memory.arena)
                for (layer, slot), result in zip(slots, results, strict=True):
                    label = memory.arena.label(layer, slot)
                    if isinstance(result, bytes):
                        assert label.holds((slot + number) % 3)
                        assert memory.held[layer, slot] == label.expert
                    else:
                        assert memory.held[layer, slot] == -1
        memory.close()

    asyncio.run(run())


def test_a_copy_that_is_called_off_leaves_its_slot_empty(tmp_path: Path) -> None:
    written = write_checkpoint(
        tmp_path / "ck", one_tensor(4096 * 64), layers=2, experts=3, shards=1
    )
    source = Source(kind=Kind.CHECKPOINT, path=str(written.path))

    async def run() -> None:
        memory = ArenaMemory.create(LAYOUT, 0, "rank 0")
        with driver(tmp_path, rate=500_000) as mover:
            mover.lend(memory)
            slow = asyncio.create_task(
                mover.copy(Target(memory, 0, 0, 1), b"", source, urgent=False)
            )
            await until(lambda: mover.filling(memory) and memory.arena.label(0, 0).expert == 1)
            slow.cancel()
            # The next one into the same slot waits for it, and is not mixed with it.
            checksum = await mover.copy(Target(memory, 0, 0, 2), b"", source, urgent=True)
            assert memory.arena.label(0, 0).holds(2)
            assert memory.sums[0, 0] == checksum
            with pytest.raises(CopyFailed) as lied:
                await mover.copy(Target(memory, 0, 1, 0), b"\x01" * 16, source, urgent=True)
            assert lied.value.failure is Failure.LIED
            missing = Source(kind=Kind.CHECKPOINT, path="/nowhere")
            with pytest.raises(CopyFailed) as gone:
                await mover.copy(Target(memory, 0, 1, 0), b"", missing, urgent=True)
            assert gone.value.failure is Failure.AWAY
            assert memory.valid == 1
        memory.close()

    asyncio.run(run())


def test_two_movers_never_write_into_one_arena(tmp_path: Path) -> None:
    written = write_checkpoint(
        tmp_path / "ck", one_tensor(4096 * 64), layers=2, experts=3, shards=1
    )
    source = Source(kind=Kind.CHECKPOINT, path=str(written.path))

    async def run() -> None:
        memory = ArenaMemory.create(LAYOUT, 0, "rank 0")
        with driver(tmp_path) as second:
            with driver(tmp_path) as first:
                first.lend(memory)
                await first.copy(Target(memory, 0, 0, 1), b"", source, urgent=True)
                second.lend(memory)
                copy = asyncio.create_task(
                    second.copy(Target(memory, 0, 1, 2), b"", source, urgent=True)
                )
                done, _ = await asyncio.wait({copy}, timeout=0.5)
                assert not done
                first.give_up(memory)
            await asyncio.wait_for(copy, 60)
            assert memory.arena.label(0, 1).holds(2)
        memory.close()

    asyncio.run(run())


def test_an_arena_is_for_reading_only_beyond_the_mover() -> None:
    memory = ArenaMemory.create(LAYOUT, 0, "rank 0")
    fd = memory.reader_fd()
    with pytest.raises(PermissionError):
        mmap.mmap(fd, LAYOUT.total_bytes, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with contextlib.closing(mmap.mmap(fd, LAYOUT.total_bytes, prot=mmap.PROT_READ)) as mapping:
        arena = Arena(mapping, LAYOUT)
        assert arena.rank == 0
        arena.release()
    os.close(fd)
    memory.close()
