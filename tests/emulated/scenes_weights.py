"""Expert weights on an emulated GPU, with stand-ins for the daemon and its arena."""

import ctypes
import fcntl
import mmap
import os
import random
import struct
import termios
import time
from ctypes import c_void_p
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from elasticep.arena import Arena
from elasticep.errors import MemoryShort
from elasticep.native import abi, cuda_session
from elasticep.native.cuda_structs import Copied
from elasticep.testing import emulated_cuda
from elasticep.testing.fd_socket import message_of, send
from elasticep.testing.small import EXPERTS, LAYERS, exchange, geometry
from elasticep.weights import ArenaLayout, TensorSpec, WeightDtype, WeightSpec
from tests.emulated.scenes_session import EmulatedGroup
from tests.emulated.stand import until

SLOTS: Final = 16
# More tensors than a thread has buffers, and one that does not end where another may begin.
SPEC: Final = WeightSpec(
    (
        TensorSpec("w13", WeightDtype.FP8_E4M3, (24, 40)),
        TensorSpec("w2", WeightDtype.BF16, (5, 9)),
        TensorSpec("w13_scale", WeightDtype.FP32, (3,)),
        TensorSpec("w2_scale", WeightDtype.FP32, ()),
    )
)
PLAIN: Final = WeightSpec((TensorSpec("w2", WeightDtype.BF16, (5, 9)),))
Table = npt.NDArray[np.int32]


def unit(layer: int, expert: int, version: int = 0, spec: WeightSpec = SPEC) -> bytes:
    """An expert's bytes."""
    seed = (version * LAYERS + layer) * EXPERTS + expert
    return random.Random(seed).randbytes(spec.unit_bytes)


class Stage(EmulatedGroup):
    """One rank with an arena, in whose slots 0, 1, ... its first view has experts 0, 1, ..."""

    def __init__(self, spec: WeightSpec = SPEC, takes: int = abi.Takes.HEADWAY) -> None:
        super().__init__(geometry(1, exchange(), slots=SLOTS))
        self.takes = abi.Takes(takes)
        self.weights = ArenaLayout(LAYERS, SLOTS, spec)
        self.fd = os.memfd_create("arena-of-a-test")
        os.ftruncate(self.fd, self.weights.total_bytes)
        self.arena = Arena.format(mmap.mmap(self.fd, self.weights.total_bytes), self.weights, 0)
        self.table = np.full((LAYERS, 1, SLOTS), -1, np.int32)
        self.table[:, 0, :EXPERTS] = np.arange(EXPERTS)
        self.put(self.table)
        self.stream = emulated_cuda.Stream()
        self.native: Any = cuda_session.session_api()
        self.session = 0

    def put(self, table: Table) -> None:
        """Fill the arena as a view wants it, where it holds something else."""
        for layer, slot in np.argwhere(table[:, 0] >= 0).tolist():
            expert = int(table[layer, 0, slot])
            if not self.arena.label(layer, slot).holds(expert):
                self.arena.write(layer, slot, expert, unit(layer, expert, 0, self.weights.spec))

    def open(self) -> Self:
        """Attach; the mirror exists from then on."""
        weights = cuda_session.weights_struct(self.fd, self.weights)
        ticket = self.ticket(0)
        self.session = cuda_session.open_session(self.socket_path, ticket, 60_000, 0, weights)
        return self

    def end(self) -> None:
        """Detach."""
        self.native.epc_session_close(self.session)

    @property
    def address(self) -> int:
        """Of the tensors on the GPU."""
        out = c_void_p()
        assert self.native.epc_session_weights(self.session, ctypes.byref(out)) == 0
        return out.value or 0

    @property
    def copied(self) -> tuple[int, int]:
        """Slots and bytes that came to the GPU."""
        out = Copied()
        self.native.epc_session_weights_copied(self.session, ctypes.byref(out))
        return out.slots, out.bytes

    def held(self, layer: int) -> list[int]:
        """Which expert lies in each slot on the GPU."""
        experts = (ctypes.c_int32 * SLOTS)()
        self.native.epc_session_weights_held(self.session, layer, ctypes.addressof(experts))
        return list(experts)

    def on_gpu(self, layer: int, slot: int) -> bytes:
        """What lies in a slot there, wherever its tensors are."""
        begin = self.address - self.weights.data_offset
        pieces = self.weights.unit_pieces(layer, slot)
        return b"".join(ctypes.string_at(begin + at, size) for at, size in pieces)

    def check(self, table: Table) -> None:
        """Every slot that a view names holds its expert, all bytes of it."""
        for layer in range(LAYERS):
            held = self.held(layer)
            for slot, expert in enumerate(table[layer, 0].tolist()):
                if expert >= 0:
                    assert held[slot] == expert, (layer, slot, held)
                    wanted = unit(layer, expert, 0, self.weights.spec)
                    assert self.on_gpu(layer, slot) == wanted, (layer, slot)

    def heard(self) -> None:
        """Return when the session's thread has taken in all that was sent to it.

        It has read the last message, which says nothing, so it is done with those before.
        """
        runner = self._seats[0].runner
        assert runner is not None
        send(runner, bytes(message_of(abi.MessageType.WELCOME)), [])

        def unread() -> int:
            answer = fcntl.ioctl(runner, termios.TIOCOUTQ, struct.pack("i", 0))
            return int(struct.unpack("i", answer)[0])

        until(lambda: unread() == 0, "the session to read what it was sent")

    def answered(self, epoch: int) -> bool:
        """Whether the rank said that it has staged a view, or that it cannot."""
        return epoch in self._seats[0].staged

    def refusal(self, epoch: int) -> str:
        """Why a view could not be staged."""
        try:
            self.wait_staged(0, epoch)
        except RuntimeError as error:
            return str(error)
        return ""

    def step(self, epoch: int) -> None:
        """A step without exchanges, which runs in this view."""
        context = cuda_session.context_of(self.session, 0, 1)
        code = self.native.epc_session_step_begin(self.session, 0, 0, self.stream.cuda_stream)
        assert code == 0
        context.step_end(self.stream.cuda_stream)
        self.stream.synchronize()
        result = context.result()
        assert (result.complete, result.epoch) == (True, epoch), result


def moved(table: Table, changes: dict[int, int]) -> Table:
    """A view's table with other experts (-1: none) in these slots of every layer."""
    other = table.copy()
    for slot, expert in changes.items():
        other[:, 0, slot] = expert
    return other


def views() -> Any:
    """What is copied, and where to, while views come; a graph is captured meanwhile."""
    with Stage() as group:
        group.open()
        address, seen = group.address, []
        assert group.held(0) == [-1] * SLOTS
        emulated_cuda.hold_copies(True)
        group.stage(1, 0, [0], group.table, wait=False)
        until(lambda: emulated_cuda.held_copies() >= 2, "both buffers to be on their way")
        emulated_cuda.hold_copies(False)
        group.wait_staged(0, 1)
        group.check(group.table)
        seen.append(group.copied)
        group.step(1)
        second = moved(group.table, {12: 3, 13: 7})  # second copies, in free slots
        group.put(second)
        graph = emulated_cuda.Graph()
        with graph.capture(group.stream):
            emulated_cuda.hold_copies(True)
            group.stage(2, 1, [0], second, wait=False)
            until(lambda: emulated_cuda.held_copies() >= 3, "two threads to copy")
            emulated_cuda.hold_copies(False)
            group.wait_staged(0, 2)
        group.check(second)
        seen.append(group.copied)
        group.step(2)
        # Other shares, and a copy less: nothing has to lie anywhere else.
        shares = np.zeros(second.shape, np.uint32)
        shares[:, 0, :EXPERTS] = 65536
        shares[:, 0, [3, 12]] = 60000, 5536
        third = moved(second, {13: -1})
        group.stage(3, 2, [0], third, shares)
        seen.append(group.copied)
        group.step(3)
        fourth = moved(third, {13: 5})  # what no view names any more is overwritten
        group.put(fourth)
        group.stage(4, 3, [0], fourth)
        group.check(fourth)
        seen.append(group.copied)
        group.step(4)
        # The same expert with other bytes, put there while no view named it.
        group.stage(5, 4, [0], third)
        group.step(5)
        for layer in range(LAYERS):
            group.arena.write(layer, 13, 5, unit(layer, 5, 1))
        group.stage(6, 5, [0], fourth)
        assert [group.on_gpu(n, 13) for n in range(LAYERS)] == [
            unit(n, 5, 1) for n in range(LAYERS)
        ]
        seen.append(group.copied)
        group.step(6)
        assert group.address == address
        group.end()
        return [[slots, size // SPEC.unit_bytes] for slots, size in seen]


def changing_labels() -> Any:
    """A slot is filled anew while it is copied: with the same expert, then with another."""
    with Stage() as group:
        group.open()
        emulated_cuda.hold_copies(True)
        group.stage(1, 0, [0], group.table, wait=False)
        until(lambda: emulated_cuda.held_copies() > 0, "the first slot to be on its way")
        group.arena.write(0, 0, 0, unit(0, 0, 1))
        emulated_cuda.hold_copies(False)
        group.wait_staged(0, 1)
        assert group.held(0)[0] == 0
        assert group.on_gpu(0, 0) == unit(0, 0, 1)
        group.step(1)
        second = moved(group.table, {12: 3})
        group.put(second)
        emulated_cuda.hold_copies(True)
        group.stage(2, 1, [0], second, wait=False)
        until(lambda: emulated_cuda.held_copies() > 0, "the new copy to be on its way")
        group.arena.write(0, 12, 9, unit(0, 9))
        emulated_cuda.hold_copies(False)
        said = group.refusal(2)
        assert group.held(0)[12] == -1
        group.step(1)
        group.end()
        return said


def on_their_way() -> Any:
    """Copies that have been put on a stream and have not run."""
    with Stage(PLAIN) as group:
        group.open()
        group.stage(1, 0, [0], group.table)
        group.step(1)
        second = moved(group.table, {12: 3})
        group.put(second)
        emulated_cuda.hold_copies(True)
        group.stage(2, 1, [0], second, wait=False)
        until(lambda: emulated_cuda.held_copies() > 0, "the new copies to be on their way")
        for _ in range(50):
            group.heard()
            assert group.held(0)[12] == -1
            assert not group.answered(2)
        emulated_cuda.hold_copies(False)
        group.wait_staged(0, 2)
        group.check(second)
        group.step(2)
        group.end()


def overtaken() -> Any:
    """A view comes while the experts of another one are being copied, and needs none of them."""
    with Stage() as group:
        group.open()
        first = moved(group.table, {12: 9})
        group.put(first)
        group.stage(1, 0, [0], first)
        group.step(1)
        group.stage(2, 1, [0], group.table)
        group.step(2)
        before, _ = group.copied
        third = moved(group.table, {12: 3, 13: 7, 14: 8, 15: 9})
        group.put(third)
        emulated_cuda.hold_copies(True)
        group.stage(3, 2, [0], third, wait=False)
        until(lambda: emulated_cuda.held_copies() > 0, "the first slot to be on its way")
        group.stage(4, 2, [0], group.table, wait=False)
        group.heard()
        emulated_cuda.hold_copies(False)
        group.wait_staged(0, 4)
        said = group.refusal(3)
        after, _ = group.copied
        group.step(4)
        group.check(group.table)
        # What lay in a slot whose copy was called off is not there any more.
        group.put(first)
        group.stage(5, 4, [0], first)
        group.check(first)
        group.step(5)
        group.end()
        return [said, after - before]


def in_use() -> Any:
    """The arena changes against its rules under a view that runs."""
    with Stage() as group:
        group.open()
        group.stage(1, 0, [0], group.table)
        group.step(1)
        for layer in range(LAYERS):
            group.arena.write(layer, 5, 6, unit(layer, 6))
        second = moved(group.table, {5: 6, 12: 5})
        group.put(second)
        group.stage(2, 1, [0], second, wait=False)
        said = group.refusal(2)
        group.check(group.table)
        group.end()
        return said


def said_again() -> Any:
    """A view comes again when it runs, as from a daemon that was restarted; then another one under
    its number.
    """
    with Stage() as group:
        group.open()
        group.stage(1, 0, [0], group.table)
        group.step(1)
        group.stage(1, 0, [0], group.table)
        other = moved(group.table, {0: 6})
        group.put(other)
        group.stage(1, 0, [0], other, wait=False)
        said = group.refusal(1)
        copied, _ = group.copied
        group.step(1)
        group.check(group.table)
        group.end()
        return [copied, said]


def missing() -> Any:
    """A view comes before what it names is in the arena."""
    with Stage() as group:
        group.open()
        group.stage(1, 0, [0], moved(group.table, {12: 3}), wait=False)
        said = group.refusal(1)
        group.arena.fill(0, 12, 3)
        group.stage(1, 0, [0], moved(group.table, {12: 3}), wait=False)
        filling = group.refusal(1)
        group.end()
        return [said, filling]


def headway() -> Any:
    """What is said of copies that are let one after another, and of a view that has none."""
    with Stage() as group:
        group.open()
        emulated_cuda.hold_copies(True)
        began = time.monotonic()
        group.stage(1, 0, [0], group.table, wait=False)
        until(lambda: bool(group.headway(0)), "word of copies that wait")
        for _ in range(4):
            before = group.headway(0)[-1]
            emulated_cuda.let_copies(12)
            until(lambda before=before: group.headway(0)[-1] > before, "word of those that ran")
        assert not group.answered(1)
        emulated_cuda.hold_copies(False)
        group.wait_staged(0, 1)
        took = time.monotonic() - began
        group.step(1)
        group.stage(2, 1, [0], group.table)
        # Until that one is adopted the session looks for it every millisecond.
        third = moved(group.table, {12: 3, 13: 7, 14: 8, 15: 9})
        group.put(third)
        before = group.headway(0)[-1]
        emulated_cuda.hold_copies(True)
        began = time.monotonic()
        group.stage(3, 2, [0], third, wait=False)
        for _ in range(3):
            until(lambda before=before: group.headway(0)[-1] > before, "word of the third view")
            before = group.headway(0)[-1]
            emulated_cuda.let_copies(12)
        took_third = time.monotonic() - began
        emulated_cuda.hold_copies(False)
        group.wait_staged(0, 3)
        group.step(3)
        group.end()
        return [group.headway(0), took, took_third, SPEC.unit_bytes]


def no_headway() -> Any:
    """The same at a daemon of before, which takes no such word; how long it had no reason to."""
    with Stage(takes=0) as group:
        group.open()
        emulated_cuda.hold_copies(True)
        began = time.monotonic()
        group.stage(1, 0, [0], group.table, wait=False)
        until(lambda: emulated_cuda.held_copies() >= 2, "copies to be on their way")
        emulated_cuda.let_copies(12)
        until(lambda: time.monotonic() > began + 2.0, "two seconds")
        emulated_cuda.hold_copies(False)
        group.wait_staged(0, 1)
        group.end()
        return group.headway(0)


def too_little_memory() -> Any:
    """The GPU has not enough left; then it has."""
    with Stage() as group:
        bytes_wanted = LAYERS * group.weights.layer_bytes
        emulated_cuda.set_free_bytes(bytes_wanted - 1)
        try:
            group.open()
        except MemoryShort as error:
            said = str(error)
        engine = group.status(0).engine_pid
        emulated_cuda.set_free_bytes(8 << 30)
        group.open()
        group.stage(1, 0, [0], group.table)
        group.check(group.table)
        group.end()
        return [said, engine, bytes_wanted]
