"""The daemon's side of the mover: which copy goes first, what a slot holds, one that is stuck."""

import asyncio
import contextlib
import dataclasses
import mmap
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import structlog
from structlog.testing import capture_logs

from elasticep.arena import Arena, SlotState
from elasticep.runtime.limits import Limits
from elasticep.runtime.liveness.process import Process
from elasticep.runtime.weights import backup as backup_module
from elasticep.runtime.weights.backup import Backup
from elasticep.runtime.weights.driver import CopyFailed
from elasticep.runtime.weights.group import GroupWeights
from elasticep.runtime.weights.ledger import Ledger
from elasticep.runtime.weights.memory import NOTHING, ArenaMemory, Target
from elasticep.runtime.weights.messages import Cancel, Copy, Drop, Failure, Hurry, Kind, Source
from elasticep.runtime.weights.orders import Orders
from elasticep.testing.mover import (
    LAYOUT,
    Node,
    arena_memory,
    checkpoint,
    mover_driver,
    until,
)
from elasticep.testing.processes import stop
from elasticep.weights import ArenaLayout, TensorSpec, WeightSpec


def test_a_slot_holds_nothing_until_the_last_copy_into_it_has_ended(tmp_path: Path) -> None:
    source = checkpoint(tmp_path)

    async def run() -> None:
        with arena_memory() as memory, mover_driver(tmp_path, rate=2_000_000) as mover:
            mover.lend(memory)
            first, second = (
                asyncio.create_task(mover.copy(Target(memory, 0, 0, 1), b"", source, urgent=False))
                for _ in range(2)
            )
            await first
            assert memory.held[0, 0] == NOTHING  # it is about to be written again
            await second
            assert memory.held[0, 0] == 1
            assert memory.arena.label(0, 0).holds(1)

    asyncio.run(run())


def test_a_copy_called_off_before_it_began_leaves_what_was_there(tmp_path: Path) -> None:
    source = checkpoint(tmp_path)

    async def run() -> None:
        with arena_memory() as memory, mover_driver(tmp_path, rate=300_000) as mover:
            mover.lend(memory)
            first = asyncio.create_task(
                mover.copy(Target(memory, 0, 0, 1), b"", source, urgent=False)
            )
            second = asyncio.create_task(
                mover.copy(Target(memory, 0, 0, 2), b"", source, urgent=False)
            )
            await until(lambda: memory.arena.label(0, 0).state is not SlotState.EMPTY)
            second.cancel()
            await first
            assert memory.held[0, 0] == 1
            third = asyncio.create_task(
                mover.copy(Target(memory, 0, 0, 2), b"", source, urgent=False)
            )
            other = asyncio.create_task(
                mover.copy(Target(memory, 0, 0, 0), b"", source, urgent=False)
            )
            await until(lambda: mover.filling(memory))
            assert memory.held[0, 0] == NOTHING
            other.cancel()
            await third
            assert memory.held[0, 0] == 2

    asyncio.run(run())


def test_an_urgent_copy_does_not_wait_for_paced_ones(tmp_path: Path) -> None:
    """Eleven units of thirteen seconds each are under way when somebody waits for one to serve."""
    source = checkpoint(tmp_path)

    async def run() -> None:
        with (
            arena_memory() as memory,
            arena_memory() as other,
            mover_driver(tmp_path, rate=20_000) as mover,
        ):
            mover.lend(memory)
            mover.lend(other)
            places = [(layer, slot) for layer in range(2) for slot in range(3)]
            targets = [Target(memory, layer, slot, slot) for layer, slot in places]
            last = targets.pop()
            targets = [Target(other, layer, slot, slot) for layer, slot in places] + targets
            paced = [
                asyncio.create_task(mover.copy(target, b"", source, urgent=False))
                for target in targets
            ]
            await until(lambda: other.arena.label(0, 0).state is not SlotState.EMPTY)
            await asyncio.wait_for(mover.copy(last, b"", source, urgent=True), 60)
            assert sum(task.done() for task in paced) <= 1  # the one that was in its way
            # One that others wait for now is not held back any more, nor does it wait its turn.
            mover.hurry(targets[-1])
            await asyncio.wait_for(paced[-1], 60)
            assert sum(task.done() for task in paced[:-1]) <= 2
            for task in paced:
                task.cancel()
            await asyncio.gather(*paced, return_exceptions=True)

    asyncio.run(run())


def test_arenas_take_turns(tmp_path: Path) -> None:
    source = checkpoint(tmp_path)

    async def run() -> None:
        with (
            arena_memory() as one,
            arena_memory() as other,
            mover_driver(tmp_path, rate=4_000_000) as mover,
        ):
            mover.lend(one)
            mover.lend(other)
            ended: list[str] = []

            async def copy(name: str, memory: ArenaMemory, layer: int, slot: int) -> None:
                await mover.copy(Target(memory, layer, slot, slot), b"", source, urgent=False)
                ended.append(name)

            places = [(layer, slot) for layer in range(2) for slot in range(3)]
            await asyncio.gather(
                *(copy("one", one, *place) for place in places),
                *(copy("other", other, *place) for place in places),
            )
            assert "other" in ended[:6], ended

    asyncio.run(run())


def test_a_message_that_is_too_long_fails_alone(tmp_path: Path) -> None:
    source = checkpoint(tmp_path)

    async def run() -> None:
        with arena_memory() as memory, mover_driver(tmp_path) as mover:
            mover.lend(memory)
            bad = asyncio.create_task(
                mover.copy(Target(memory, 0, 1, 1), b"x" * 40_000, source, urgent=True)
            )
            good = asyncio.create_task(
                mover.copy(Target(memory, 0, 2, 2), b"", source, urgent=True)
            )
            with pytest.raises(CopyFailed, match="at most 65536"):
                await bad
            await good
            # What comes cut off or is nonsense does not end the mover either.
            pid = mover.pid
            assert mover._process._sock is not None
            mover._process._sock.send(b'{"is":"Copy"')
            await mover.copy(Target(memory, 0, 0, 0), b"", source, urgent=True)
            assert mover.pid == pid
            long = Source(kind=Kind.CHECKPOINT, path="/" + "n" * 5_000)
            with pytest.raises(CopyFailed) as failed:
                await mover.copy(Target(memory, 1, 0, 0), b"", long, urgent=True)
            assert len(str(failed.value)) <= 512

    asyncio.run(run())


@pytest.mark.long
def test_whoever_waits_hears_of_a_mover_that_cannot_be_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that the kernel holds until a file server answers."""
    source = checkpoint(tmp_path)

    async def run() -> None:
        with arena_memory() as memory:
            limits = Limits(mover_stall_s=1.5)
            with mover_driver(tmp_path, 200_000, limits) as mover:
                mover.lend(memory)
                copies = [
                    asyncio.create_task(
                        mover.copy(Target(memory, 0, slot, slot), b"", source, urgent=False)
                    )
                    for slot in range(3)
                ]
                await until(lambda: memory.arena.label(0, 0).state is not SlotState.EMPTY)
                with monkeypatch.context() as patch:
                    patch.setattr(Process, "kill", lambda _: None)
                    stop(mover.pid)
                    results = await asyncio.wait_for(
                        asyncio.gather(*copies, return_exceptions=True), 60
                    )
                failures = [r.failure for r in results if isinstance(r, CopyFailed)]
                assert failures == [Failure.MOVER] * 3
                os.kill(mover.pid, signal.SIGKILL)
                # When it is gone at last, another one takes over.
                await mover.copy(Target(memory, 0, 0, 1), b"", source, urgent=True)
                assert memory.arena.label(0, 0).holds(1)

    asyncio.run(run())


def test_labels_count_when_the_mover_of_an_earlier_daemon_is_gone(tmp_path: Path) -> None:
    """It lives some milliseconds longer than its daemon, and fills a slot meanwhile."""

    async def run() -> None:
        with arena_memory() as memory, mover_driver(tmp_path) as mover:
            path = f"/proc/self/fd/{memory.fd}"
            with (
                open(path, "r+b", buffering=0) as file,
                contextlib.closing(mmap.mmap(file.fileno(), LAYOUT.total_bytes)) as whole,
            ):
                arena = Arena(whole, LAYOUT)
                unit = bytes(LAYOUT.spec.unit_bytes)
                arena.write(0, 0, 1, unit)
                arena.write(0, 1, 1, unit)
                weights = cast(
                    Any,
                    SimpleNamespace(
                        _node=SimpleNamespace(mover=mover), _tasks=set(), ledger=Ledger(), seats={}
                    ),
                )
                weights._learn_sums = lambda m: GroupWeights._learn_sums(weights, m)
                weights._settle = lambda m: GroupWeights._settle(weights, m)
                weights._later = lambda work: GroupWeights._later(weights, work)
                weights._used = lambda m: GroupWeights._used(weights, m)
                GroupWeights.read_labels(weights, memory)
                assert memory.slot_of(0, 1) in (0, 1)
                assert not memory.settled
                arena.write(0, 0, 2, unit)  # the last words of the earlier mover
                arena.fill(0, 1, 2)
                arena.release()
            GroupWeights.lend(weights, memory)
            await until(lambda: memory.settled)
            assert memory.held.tolist() == [[2, NOTHING, NOTHING], [NOTHING] * 3]
            assert memory.arena.label(0, 1).state is SlotState.EMPTY

    asyncio.run(run())


def test_the_mirror_finds_experts_as_a_search_would() -> None:
    with arena_memory() as memory:
        rng = np.random.default_rng(3)
        layers, experts = (grid.ravel() for grid in np.mgrid[0:2, 0:200])
        for _ in range(400):
            layer, slot = int(rng.integers(2)), int(rng.integers(3))
            if rng.random() < 0.3:
                memory.forget(layer, slot)
            else:
                memory.note(layer, slot, int(rng.choice([0, 1, 63, 64, 150])), b"x")
            found = memory.slots_of(layers, experts)
            for where, expert, at in zip(
                layers.tolist(), experts.tolist(), found.tolist(), strict=True
            ):
                assert at == memory.slot_of(where, expert)
                assert (at == NOTHING) == (expert not in memory.held[where])
                assert at == NOTHING or memory.held[where, at] == expert
            assert memory.valid == (memory.held != NOTHING).sum()


def copy_of(job: int, *, urgent: bool = False) -> Copy:
    return Copy(job, 1, 0, 0, 1, "", Source(kind=Kind.CHECKPOINT), urgent)


def test_orders_are_done_arenas_first_then_what_is_called_off_then_urgent_ones() -> None:
    orders = Orders()
    for job in (1, 2, 3, 4):
        orders.put(copy_of(job), [])
    orders.put(copy_of(5, urgent=True), [])
    orders.put(Hurry(3), [])
    orders.put(Cancel(2), [])
    orders.put(Cancel(99), [])
    orders.put(Drop(7), [])
    seen = []
    while (taken := orders.take(0)) is not None:
        order = taken[0]
        seen.append(order.job if isinstance(order, Copy) else 0)
        if isinstance(order, Copy):
            assert orders.called_off == (order.job == 2)
    assert seen == [0, 2, 5, 3, 1, 4]
    assert not orders.hurried
    begin = time.monotonic()
    orders.put(Cancel(4), [])
    orders.pause(30)  # there is no point in holding it back
    assert orders.called_off
    assert time.monotonic() - begin < 10


# ---- reported faults


def test_case_11_weights_never_move_without_their_scales(tmp_path: Path) -> None:
    """Two tensors, one unit: if the scales of a source are not those of its weights, nothing of it
    is taken.
    """
    spec = WeightSpec((TensorSpec.of("w2", "int8", (64, 64)), TensorSpec.of("w2_s", "fp32", (64,))))
    layout = ArenaLayout(1, 2, spec)
    units = [bytes([n]) * spec.unit_bytes for n in (1, 2)]

    async def run() -> None:
        peers = [ArenaMemory.create(layout, rank, f"rank {rank}") for rank in (1, 2)]
        memory = ArenaMemory.create(layout, 0, "rank 0")
        for peer in peers:
            with (
                open(f"/proc/self/fd/{peer.fd}", "r+b", buffering=0) as file,
                contextlib.closing(mmap.mmap(file.fileno(), layout.total_bytes)) as whole,
            ):
                arena = Arena(whole, layout)
                arena.write(0, 0, 7, units[0])
                if peer is peers[0]:
                    weights, scales = arena.pieces(0, 0)
                    assert (len(weights), len(scales)) == (64 * 64, 64 * 4)
                    scales[:] = units[1][: len(scales)]  # an old scale beside the new weights
                    del weights
                    scales.release()
                arena.release()
        with mover_driver(tmp_path) as mover:
            mover.lend(memory)
            sources = [
                Source(kind=Kind.REPLICA, arena=mover.lend(peer), slot=0, node="n1", rank=rank)
                for rank, peer in enumerate(peers, 1)
            ]
            with pytest.raises(CopyFailed) as lied:
                await mover.copy(Target(memory, 0, 1, 7), b"", sources[0], urgent=True)
            assert lied.value.failure is Failure.LIED
            assert memory.arena.label(0, 1).state is SlotState.EMPTY
            await mover.copy(Target(memory, 0, 1, 7), b"", sources[1], urgent=True)
            assert memory.arena.read(0, 1, 7)[0] == units[0]
        for used in (*peers, memory):
            used.close()

    asyncio.run(run())


def test_case_16_a_mover_that_hangs_is_reported_and_replaced(tmp_path: Path) -> None:
    source = checkpoint(tmp_path)

    async def run() -> None:
        limits = Limits(mover_stall_s=2.0)
        with arena_memory() as memory, mover_driver(tmp_path, 300_000, limits) as mover:
            mover.lend(memory)
            copies = [
                asyncio.create_task(
                    mover.copy(Target(memory, 0, slot, slot), b"", source, urgent=False)
                )
                for slot in range(3)
            ]
            await until(lambda: memory.arena.label(0, 0).state is not SlotState.EMPTY)
            pid = mover.pid
            with capture_logs() as events:
                os.kill(pid, signal.SIGSTOP)
                results = await asyncio.gather(*copies, return_exceptions=True)
            assert sum(isinstance(result, CopyFailed) for result in results) <= 1
            assert mover.pid not in (0, pid)
            said = [event["event"] for event in events]
            assert "weights.mover_stuck" in said
            assert said.index("weights.mover_stuck") < said.index("weights.mover_ended")
            ends = {
                sample.labels["why"]: sample.value
                for metric in mover.metrics.mover_restarts.collect()
                for sample in metric.samples
                if sample.name.endswith("_total")
            }
            assert ends == {"stuck": 1.0, "ended": 1.0}

    asyncio.run(run())


def test_case_16_a_backup_that_fails_says_so_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint(tmp_path)
    monkeypatch.setattr(backup_module, "_RETRY_S", 0.05)
    share, calls = Backup._share, 0

    def failing(backup: Backup, view: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("of its own")
        return share(backup, view)

    monkeypatch.setattr(Backup, "_share", failing)

    async def run() -> None:
        with arena_memory() as memory, mover_driver(tmp_path) as mover:
            node = Node(mover, memory, [source], source.path)
            weights = cast(Any, node)
            weights.layout, weights.experts = LAYOUT, 3
            weights.config = dataclasses.replace(node.config, backup_bytes=10 << 20)
            weights.fd_store = SimpleNamespace(put_one=lambda *_: None, remove_one=lambda *_: None)
            weights.lend = mover.lend

            async def reserve(layout: ArenaLayout, rank: int, name: str) -> ArenaMemory:
                return ArenaMemory.create(layout, rank, name)

            weights.reserve = reserve
            backup = Backup(weights, weights)
            with capture_logs() as events:
                node.log = structlog.get_logger()
                backup._log = structlog.get_logger()
                backup.update(node.view(1, [[0, 1, 2]] * 2, 0))
                await until(lambda: any(e["event"] == "backup.complete" for e in events))
            assert [e["event"] for e in events if e["event"].startswith("backup.")] == [
                "backup.failed",
                "backup.complete",
            ]
            assert backup.held == len(backup.wanted) == 6
            backup.drop()

    asyncio.run(run())
