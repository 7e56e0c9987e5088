"""Arenas: labels that readers see whole, bytes that are always their label's."""

import mmap
import multiprocessing
import os
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticep.arena import Arena, Label, SlotState, newest_label
from elasticep.errors import ChecksumMismatch, SlotInvalid, WeightsError
from elasticep.weights import (
    LABEL_BYTES,
    ArenaLayout,
    TensorSpec,
    WeightDtype,
    WeightSpec,
    unit_checksum,
)

SPEC = WeightSpec(
    (
        TensorSpec("w13", WeightDtype.FP8_E4M3, (6, 5)),
        TensorSpec("w2", WeightDtype.BF16, (5, 3)),
        TensorSpec("w13_scale_inv", WeightDtype.FP32, (3,)),
    )
)
LAYOUT = ArenaLayout(3, 4, SPEC)


def fresh(layout: ArenaLayout = LAYOUT, rank: int = 2) -> tuple[Arena, bytearray]:
    memory = bytearray(layout.total_bytes)
    return Arena.format(memory, layout, rank), memory


def unit(seed: int) -> bytes:
    return random.Random(seed).randbytes(SPEC.unit_bytes)


def test_a_fresh_arena_is_empty() -> None:
    arena, memory = fresh()
    assert arena.count(SlotState.EMPTY) == 12
    assert arena.label(2, 3) == Label()
    assert Arena(memoryview(memory).toreadonly(), LAYOUT).rank == 2


def test_memory_of_another_layout_is_no_arena() -> None:
    arena, memory = fresh()
    other = ArenaLayout(3, 4, WeightSpec(SPEC.tensors[::-1]))
    with pytest.raises(WeightsError, match="changed"):
        Arena(memory, other)
    with pytest.raises(WeightsError, match="changed"):
        Arena(memory[:-1], LAYOUT)
    with pytest.raises(WeightsError, match="no arena"):
        Arena(bytearray(LAYOUT.total_bytes), LAYOUT)
    with pytest.raises(WeightsError, match="no arena"):
        Arena(bytearray(5), LAYOUT)
    with pytest.raises(WeightsError, match="bytes of memory for an arena of"):
        Arena.format(bytearray(LAYOUT.total_bytes - 1), LAYOUT, 0)
    assert arena.rank == 2


def test_a_unit_comes_back_and_lies_where_kernels_look_for_it() -> None:
    arena, _ = fresh()
    checksum = arena.write(1, 2, 7, unit(1))
    assert arena.label(1, 2) == Label(SlotState.VALID, 7, checksum, sequence=2)
    assert arena.read(1, 2, 7) == (unit(1), checksum)
    tensors = arena.tensors(1)
    assert {name: array.shape for name, array in tensors.items()} == {
        "w13": (4, 6, 5), "w2": (4, 5, 3), "w13_scale_inv": (4, 3),
    }  # fmt: skip
    assert all(array.flags.c_contiguous for array in tensors.values())
    assert b"".join(tensors[t.name][2].tobytes() for t in SPEC.tensors) == unit(1)
    assert not any(tensors[t.name][1].any() or tensors[t.name][3].any() for t in SPEC.tensors)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 9)), max_size=30))
def test_label_and_checksum_of_a_slot_always_agree(writes: list[tuple[int, int, int]]) -> None:
    arena, _ = fresh()
    held: dict[tuple[int, int], int] = {}
    for layer, slot, expert in writes:
        arena.write(layer, slot, expert, unit(expert))
        held[layer, slot] = expert
    for layer, slot, label in arena.all_labels():
        expert = held.get((layer, slot), -1)
        assert label.expert == expert
        if expert >= 0:
            assert label.checksum == unit_checksum(layer, expert, arena.pieces(layer, slot))
            assert arena.read(layer, slot, expert)[0] == unit(expert)


def test_what_is_no_unit_changes_nothing() -> None:
    arena, _ = fresh()
    arena.write(0, 1, 3, unit(3))
    for data in (b"", unit(4)[:-1], unit(4) + b"x"):
        with pytest.raises(WeightsError, match="no unit, which has 72"):
            arena.write(0, 1, 4, data)
    with pytest.raises(WeightsError, match="experts begin at 0"):
        arena.write(0, 1, -1, unit(4))
    assert arena.read(0, 1, 3)[0] == unit(3)


def test_pieces_of_a_range_are_those_bytes() -> None:
    arena, _ = fresh()
    arena.write(0, 1, 3, unit(3))
    for offset in (0, 1, 29, 30, 31, 59, 60, 70):
        for length in (0, 1, 2, 33, SPEC.unit_bytes - offset):
            if offset + length <= SPEC.unit_bytes:
                found = b"".join(arena.pieces(0, 1, offset, length))
                assert found == unit(3)[offset : offset + length]
    with pytest.raises(WeightsError, match=f"of a unit that has {SPEC.unit_bytes}"):
        arena.pieces(0, 1, 60, 40)


def test_a_slot_is_not_valid_before_all_its_bytes_are_there() -> None:
    arena, _ = fresh()
    arena.write(0, 0, 5, unit(5))
    fill = arena.fill(0, 0, 6)
    for offset in range(0, SPEC.unit_bytes, 10):
        with pytest.raises(SlotInvalid, match="is being filled with expert 6, not expert 5"):
            arena.require(0, 0, 5)
        with pytest.raises(SlotInvalid, match="is being filled"):
            arena.require(0, 0, 6)
        fill.write(offset, unit(6)[offset : offset + 10])
    fill.finish(unit_checksum(0, 6, [unit(6)]))
    assert arena.read(0, 0, 6)[0] == unit(6)
    with pytest.raises(SlotInvalid, match="holds expert 6, not expert 5"):
        arena.read(0, 0, 5)


def test_bytes_that_are_not_what_the_source_promised_never_become_valid() -> None:
    arena, _ = fresh()
    promised = unit_checksum(0, 5, [unit(5)])
    with pytest.raises(ChecksumMismatch, match="expert 5 in layer 0 slot 1 of rank 2"):
        arena.write(0, 1, 5, unit(6), promised)
    assert arena.label(0, 1).state is SlotState.EMPTY
    # Whole and right, but another expert's, or another layer's.
    with pytest.raises(ChecksumMismatch):
        arena.write(0, 1, 6, unit(5), promised)
    with pytest.raises(ChecksumMismatch):
        arena.write(1, 1, 5, unit(5), promised)
    with pytest.raises(SlotInvalid, match="is empty"):
        arena.read(0, 1, 5)


@pytest.mark.parametrize("index", range(3))
def test_scales_that_stayed_behind_are_noticed(index: int) -> None:
    arena, memory = fresh()
    arena.write(0, 0, 5, unit(5))
    arena.write(0, 1, 6, unit(6))
    tensors = SPEC.tensors[index]
    (start, size) = LAYOUT.unit_pieces(0, 1)[index]
    there = LAYOUT.unit_pieces(0, 0)[index][0]
    memory[there : there + size] = memory[start : start + size]
    with pytest.raises(ChecksumMismatch):
        arena.read(0, 0, 5)
    with pytest.raises(ChecksumMismatch):
        arena.verify(0, 0)
    assert arena.verify(0, 1).expert == 6, tensors.name
    assert arena.recover() == []
    assert arena.recover(verify=True) == [(0, 0)]


def test_a_label_moved_to_other_bytes_does_not_fit_them() -> None:
    arena, memory = fresh()
    arena.write(0, 0, 5, unit(5))
    arena.write(0, 1, 6, unit(6))
    here, there = LAYOUT.label_offset(0, 0), LAYOUT.label_offset(0, 1)
    memory[here : here + LABEL_BYTES] = memory[there : there + LABEL_BYTES]
    assert arena.label(0, 0).holds(6)
    with pytest.raises(ChecksumMismatch):
        arena.read(0, 0, 6)


def test_what_a_dead_writer_left_half_done_is_emptied() -> None:
    arena, memory = fresh()
    arena.write(0, 0, 5, unit(5))
    arena.write(0, 1, 5, unit(5))
    arena.fill(0, 1, 6).write(0, unit(6)[:20])
    again = Arena(memory, LAYOUT)
    assert again.recover() == [(0, 1)]
    assert again.label(0, 1).state is SlotState.EMPTY
    assert again.label(0, 0).holds(5)


@given(st.integers(0, LABEL_BYTES), st.integers(0, 5))
def test_a_writer_that_dies_within_a_label_leaves_the_one_of_before(
    torn_at: int, changes: int
) -> None:
    arena, _ = fresh()
    for expert in range(changes):
        arena.fill(0, 0, expert)
    old = arena.raw_labels(0)[:LABEL_BYTES]
    arena.fill(0, 0, 9)
    new = arena.raw_labels(0)[:LABEL_BYTES]
    torn = newest_label(new[:torn_at] + old[torn_at:])
    assert torn in (newest_label(old), newest_label(new))


def test_a_label_of_which_nothing_is_whole_is_an_error_and_not_a_guess() -> None:
    arena, memory = fresh()
    start = LAYOUT.label_offset(1, 1)
    memory[start : start + LABEL_BYTES] = b"\xa5" * LABEL_BYTES
    with pytest.raises(WeightsError, match="label of layer 1 slot 1 of rank 2 is broken"):
        arena.label(1, 1)
    assert arena.recover() == [(1, 1)]
    assert arena.label(1, 1).state is SlotState.EMPTY


# ---- a reader in another process, while the writer writes


def _write_for_ever(path: str, stop: Any, ready: Any) -> None:
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        arena = Arena(memory, LAYOUT)
        number = 0
        while not stop.is_set():
            expert = number % 7
            arena.write(0, 0, expert, struct.pack("<Q", number) * 9, None)
            number += 1
            ready.set()
        arena.release()


@pytest.mark.timeout(400)
def test_label_and_bytes_are_written_and_read_in_an_order_that_fences_keep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On this machine memory needs no fences; what lies between them is looked at instead."""
    arena, _ = fresh()
    arena.write(0, 1, 4, unit(1))
    seen: list[tuple[SlotState, int, int]] = []

    def look() -> None:
        start = LAYOUT.label_offset(0, 1)
        label = newest_label(bytes(arena._bytes[start : start + LABEL_BYTES]))
        data = b"".join(arena.pieces(0, 1))
        assert label is not None
        seen.append((label.state, label.expert, (unit(1), unit(2)).index(data)))

    monkeypatch.setattr("elasticep.arena.memory_fence", look)
    filling = arena.fill(0, 1, 5)
    filling.write(0, unit(2))
    filling.finish()
    assert [state for state, _, _ in seen].count(SlotState.FILLING) == 2
    first, *_ = [n for n, (state, _, _) in enumerate(seen) if state is SlotState.FILLING]
    assert seen[first] == (SlotState.FILLING, 5, 0), "a fence behind the label, before the bytes"
    assert seen[first + 1] == (SlotState.FILLING, 5, 1), "and one behind them"
    assert seen[-1] == (SlotState.VALID, 5, 1)

    turns = []

    def change() -> None:
        turns.append(len(turns))
        if len(turns) == 3:  # behind the bytes, before the second look
            monkeypatch.setattr("elasticep.arena.memory_fence", lambda: None)
            arena.write(0, 1, 5, unit(1))
            monkeypatch.setattr("elasticep.arena.memory_fence", change)

    monkeypatch.setattr("elasticep.arena.memory_fence", change)
    with pytest.raises(SlotInvalid, match="filled anew while expert 5 was copied"):
        arena.read(0, 1, 5)
    assert len(turns) == 4, "before and behind each look"


def test_a_concurrent_reader_sees_whole_labels_and_their_bytes(tmp_path: Path) -> None:
    assert SPEC.unit_bytes == 72
    path = tmp_path / "arena"
    memory = bytearray(LAYOUT.total_bytes)
    Arena.format(memory, LAYOUT, 0)
    path.write_bytes(memory)
    context = multiprocessing.get_context("fork")
    stop, ready = context.Event(), context.Event()
    writer = context.Process(target=_write_for_ever, args=(str(path), stop, ready))
    writer.start()
    read = last = 0
    try:
        assert ready.wait(120)
        with path.open("rb") as file:
            shared = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        arena = Arena(shared, LAYOUT)
        tries = 0
        while read < 300 and tries < 2_000_000:
            tries += 1
            label = arena.label(0, 0)
            assert label.sequence >= last
            last = label.sequence
            if label.state is not SlotState.VALID:
                continue
            try:
                data, checksum = arena.read(0, 0, label.expert)
            except (SlotInvalid, ChecksumMismatch):
                continue  # it was filled anew meanwhile
            (number,) = struct.unpack_from("<Q", data)
            assert data == struct.pack("<Q", number) * 9, "a mixture of two units"
            assert number % 7 == label.expert
            assert checksum == unit_checksum(0, label.expert, [data])
            read += 1
    finally:
        stop.set()
        writer.join(120)
    assert writer.exitcode == 0
    assert read == 300


def test_an_arena_over_a_memfd_is_seen_by_whoever_maps_it() -> None:
    fd = os.memfd_create("arena")
    try:
        os.ftruncate(fd, LAYOUT.total_bytes)
        writable = mmap.mmap(fd, LAYOUT.total_bytes)
        arena = Arena.format(writable, LAYOUT, 1)
        shared = mmap.mmap(fd, LAYOUT.total_bytes, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)
    reader = Arena(shared, LAYOUT)
    arena.write(2, 0, 1, unit(4))
    assert reader.read(2, 0, 1)[0] == unit(4)
    assert reader.tensors(2)["w2"].flags.writeable is False
    with pytest.raises(TypeError):
        reader.empty(2, 0)
    assert np.array_equal(reader.tensors(2)["w2"], arena.tensors(2)["w2"])
