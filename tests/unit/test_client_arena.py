"""Expert weights out of an arena in an engine's hands, against a memfd and a double of the core."""

import gc
import mmap
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elasticep.arena import Arena
from elasticep.client.session import Session
from elasticep.errors import SlotInvalid, Unavailable, UsageError, WeightsError
from elasticep.geometry import GroupGeometry
from elasticep.group import GroupConfig
from elasticep.native import abi
from elasticep.spec import ExchangeSpec
from elasticep.weights import ArenaLayout, TensorSpec, WeightDtype, WeightSpec

torch = pytest.importorskip("torch")

from elasticep.client.arena import TORCH, ArenaWeights  # noqa: E402

LAYERS, SLOTS, EXPERTS = 2, 3, 4
SPEC = WeightSpec(
    (
        TensorSpec("w13", WeightDtype.FP8_E4M3, (6, 4)),
        TensorSpec("w2", WeightDtype.BF16, (4, 3)),
        TensorSpec("w13_scale_inv", WeightDtype.FP32, (2, 1)),
        TensorSpec("w2_scale", WeightDtype.FP32, ()),
    )
)
LAYOUT = ArenaLayout(LAYERS, SLOTS, SPEC)
NAME = "arena-of-a-test"


def unit(expert: int) -> bytes:
    return random.Random(expert).randbytes(SPEC.unit_bytes)


class Memory:
    """A daemon's arena: written here, handed out for reading."""

    def __init__(self) -> None:
        self.fd = os.memfd_create(NAME)
        os.ftruncate(self.fd, LAYOUT.total_bytes)
        self.arena = Arena.format(mmap.mmap(self.fd, LAYOUT.total_bytes), LAYOUT, 0)
        self.handed_out = 0

    def open(self) -> int:
        self.handed_out += 1
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY)

    def mapped(self) -> int:
        """How often it is mapped for reading only."""
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sum(NAME in line and " r--s " in line for line in lines)


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory()
    yield made
    os.close(made.fd)


def bytes_of(tensors: Any, slot: int) -> bytes:
    parts = (tensors[t.name][slot].contiguous() for t in SPEC.tensors)
    return b"".join(part.reshape(-1).view(torch.uint8).numpy().tobytes() for part in parts)


def test_tensors_lie_over_the_memory_and_have_the_specs_shapes(memory: Memory) -> None:
    for slot, expert in enumerate((3, 1)):
        memory.arena.write(1, slot, expert, unit(expert))
    weights = ArenaWeights(LAYOUT, memory.open)
    tensors = weights.get(1, (3, 1, -1))
    assert {n: (tuple(t.shape), t.dtype) for n, t in tensors.items()} == {
        "w13": ((3, 6, 4), torch.float8_e4m3fn),
        "w2": ((3, 4, 3), torch.bfloat16),
        "w13_scale_inv": ((3, 2, 1), torch.float32),
        "w2_scale": ((3,), torch.float32),
    }
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    assert (bytes_of(tensors, 0), bytes_of(tensors, 1)) == (unit(3), unit(1))
    memory.arena.write(1, 2, 2, unit(2))
    assert bytes_of(tensors, 2) == unit(2), "the memory itself, not a copy"
    again = weights.get(1, (3, 1, 2))
    assert again["w2"].data_ptr() == tensors["w2"].data_ptr()
    with pytest.raises(TypeError):
        tensors["w2"] = tensors["w13"]  # type: ignore[index]


def test_every_dtype_of_weights_has_one_in_torch_of_its_size() -> None:
    assert {d: torch.empty(0, dtype=t).element_size() for d, t in TORCH.items()} == {
        dtype: dtype.item_bytes for dtype in WeightDtype
    }


def test_a_slot_that_holds_something_else_is_never_handed_out(memory: Memory) -> None:
    weights = ArenaWeights(LAYOUT, memory.open)
    with pytest.raises(SlotInvalid, match="layer 0 slot 0 of rank 0 is empty, not expert 3"):
        weights.get(0, (3, -1, -1))
    memory.arena.write(0, 0, 3, unit(3))
    assert weights.get(0, (3, -1, -1))
    with pytest.raises(SlotInvalid, match="holds expert 3, not expert 1"):
        weights.get(0, (1, -1, -1))
    # Found right once, for these very slots; then somebody fills one anew.
    fill = memory.arena.fill(0, 0, 2)
    with pytest.raises(SlotInvalid, match="is being filled with expert 2"):
        weights.get(0, (3, -1, -1))
    fill.write(0, unit(2))
    fill.finish()
    with pytest.raises(SlotInvalid, match="holds expert 2, not expert 3"):
        weights.get(0, (3, -1, -1))
    assert weights.get(0, (2, -1, -1))


def test_free_slots_are_filled_beside_those_in_use(memory: Memory) -> None:
    memory.arena.write(0, 0, 3, unit(3))
    weights = ArenaWeights(LAYOUT, memory.open)
    weights.get(0, (3, -1, -1))
    memory.arena.fill(0, 1, 2)
    assert bytes_of(weights.get(0, (3, -1, -1)), 0) == unit(3)


def test_the_arena_is_fetched_and_mapped_once_and_let_go(memory: Memory) -> None:
    memory.arena.write(0, 0, 3, unit(3))
    weights = ArenaWeights(LAYOUT, memory.open)
    tensors = [weights.get(0, (3, -1, -1)), weights.get(1, (-1, -1, -1))]
    assert (memory.handed_out, memory.mapped()) == (1, 1)
    weights.close()
    assert bytes_of(tensors[0], 0) == unit(3), "tensors keep their memory"
    tensors.clear()
    gc.collect()
    assert memory.mapped() == 0


def test_an_arena_of_another_size_or_layout_is_refused(memory: Memory) -> None:
    with pytest.raises(WeightsError, match="bytes, this group's config makes it"):
        ArenaWeights(ArenaLayout(LAYERS + 9, SLOTS, SPEC), memory.open).get(0, (-1,) * SLOTS)
    turned = ArenaLayout(LAYERS, SLOTS, WeightSpec(SPEC.tensors[::-1]))
    assert turned.total_bytes == LAYOUT.total_bytes
    with pytest.raises(WeightsError, match="laid out for"):
        ArenaWeights(turned, memory.open).get(0, (-1,) * SLOTS)


def test_writing_through_a_tensor_ends_the_process_and_changes_nothing(memory: Memory) -> None:
    memory.arena.write(0, 0, 3, unit(3))
    child = os.fork()
    if not child:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 2)
        ArenaWeights(LAYOUT, memory.open).get(0, (3, -1, -1))["w2"].fill_(0)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGSEGV
    assert memory.arena.verify(0, 0).holds(3)


# ---- through a session


class Handle:
    """Steps in whatever view the test says."""

    def __init__(self) -> None:
        self.epoch = 1
        self.placement = np.full((LAYERS, 2, SLOTS), -1, np.int32)

    def step_begin(self, tokens: int, timeout_ms: int) -> abi.StepInfo:
        info = abi.StepInfo(epoch=self.epoch, step=1, digest=7, members=2)
        info.incarnation[0] = info.incarnation[1] = 1
        return info

    def step_end(self) -> bool:
        return True

    def step_tear(self) -> None:
        return None

    def close(self) -> None:
        return None

    def slots(self, epoch: int, shape: tuple[int, int, int]) -> Any:
        return self.placement.copy()


def config(weights: WeightSpec | None = SPEC) -> GroupConfig:
    return GroupConfig(
        name="g",
        geometry=GroupGeometry(LAYERS, EXPERTS, 2, 8, SLOTS, 2),
        exchanges=(("decode", ExchangeSpec.preset("ROUTED")),),
        initial_ranks=2,
        weights=weights,
    )


def session_of(handle: Handle, memory: Memory, **changes: Any) -> Session:
    double: Any = handle
    return Session(double, config(**changes), rank=0, incarnation=1, open_arena=memory.open)


def test_map_and_weights_switch_with_the_view(memory: Memory) -> None:
    handle = Handle()
    handle.placement[:, 0, :2] = (0, 1)
    for layer in range(LAYERS):
        memory.arena.write(layer, 0, 0, unit(0))
        memory.arena.write(layer, 1, 1, unit(1))
    with session_of(handle, memory) as session:
        with pytest.raises(UsageError, match="no step has begun"):
            session.weights(0)
        with session.step():
            assert bytes_of(session.weights(0), 1) == unit(1)
            memory.arena.write(0, 2, 3, unit(3))  # for the next view, while this one runs
            assert session.slots(0) == (0, 1, -1)
        handle.epoch, handle.placement[0, 0] = 2, (0, -1, 3)
        with session.step():
            assert session.slots(0) == (0, -1, 3)
            assert bytes_of(session.weights(0), 2) == unit(3)
            assert bytes_of(session.weights(1), 1) == unit(1)
        memory.arena.write(0, 1, 2, unit(2))  # all left view 1
        handle.epoch, handle.placement[0, 0] = 3, (0, 1, 3)  # a view whose weights are not there
        with session.step(), pytest.raises(SlotInvalid, match="holds expert 2, not expert 1"):
            session.weights(0)
        with pytest.raises(UsageError, match="layer 2 is outside"):
            session.weights(2)
    assert memory.handed_out == 1
    with pytest.raises(UsageError, match="detached"):
        session.weights(1)


def test_a_group_has_its_weights_from_one_place(memory: Memory) -> None:
    handle = Handle()
    with session_of(handle, memory) as session, pytest.raises(UsageError, match="daemons of"):
        session.register_weights(lambda layer, slots: None)
    with session_of(handle, memory, weights=None) as session:
        session.register_weights(lambda layer, slots: (layer, slots))
        with session.step():
            assert session.weights(1) == (1, (-1, -1, -1))
    assert memory.handed_out == 0


def test_an_arena_that_cannot_be_had_is_said_and_asked_for_again(memory: Memory) -> None:
    handle = Handle()
    answers: list[Exception] = [Unavailable("the daemon is away")]

    def open_arena() -> int:
        if answers:
            raise answers.pop()
        return memory.open()

    double: Any = handle
    session = Session(double, config(), rank=0, incarnation=1, open_arena=open_arena)
    with session.step():
        with pytest.raises(Unavailable, match="away"):
            session.weights(0)
        assert set(session.weights(0)) == {tensor.name for tensor in SPEC.tensors}
    session.detach()
