"""What a daemon says of a view whose weights go through the arena on to a GPU, and when it is
late.
"""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from elasticep.control import events as ev
from elasticep.control.decisions import STAGE_TIMEOUT_MS
from elasticep.native.structs import MessageType
from elasticep.runtime.transport.messages import Message, unpack
from elasticep.runtime.weights.seat import Copying, SeatWeights
from elasticep.runtime.weights.views import ViewBook, ViewTable
from elasticep.testing.membership import World, formed
from elasticep.testing.mover import UNIT_BYTES, Node, arena_memory, checkpoint, mover_driver

UNIT = 100


class Stand:
    """One seat of rank 0, which runs view 1: experts 0 and 1 of three slots in a layer."""

    def __init__(self, *, on_gpu: bool = True) -> None:
        self.epoch = 1
        self.views = ViewBook()
        keeper = SimpleNamespace(rank=0, status=lambda: SimpleNamespace(epoch=self.epoch))
        self.seat = SeatWeights(cast(Any, keeper), self.views, on_gpu=on_gpu)
        self.view(1, [0, 1, -1])

    def view(self, epoch: int, slots: list[int]) -> ViewTable:
        """A view that gives the rank these experts."""
        table = np.array(slots, np.int32).reshape(1, 1, 3)
        made = ViewTable(epoch, epoch - 1, {0: (1, "n0")}, table)
        self.views.add(made, 1)
        return made

    def measure(self, epoch: int, slots: list[int], lacks: int) -> None:
        """A view of which the arena lacks so many experts is to be staged."""
        self.seat.measure(self.view(epoch, slots), lacks * UNIT, UNIT)

    def fill(self, epoch: int, done: int, total: int) -> None:
        """As `Filler` does."""
        self.seat.epoch, self.seat.done, self.seat.total = epoch, done, total


def test_bytes_grow_from_the_arena_on_to_the_gpu_towards_what_was_said_at_first() -> None:
    stand = Stand()
    seat = stand.seat
    assert seat.staging() == (0, 0, 0)
    stand.measure(2, [0, 1, 2], 1)
    stand.fill(2, 30, UNIT)
    assert seat.staging() == (2, 30, 2 * UNIT)
    seat.beats = 500  # no headway beyond what there is
    assert seat.staging() == (2, UNIT, 2 * UNIT)
    stand.fill(0, 0, 0)
    seat.beats = 0
    assert seat.staging() == (0, 0, 0)  # nothing is said of it: it may need no copies
    seat.heard(Copying(2, 40, UNIT))
    assert seat.staging() == (2, UNIT + 40, 2 * UNIT)
    seat.heard(Copying(2, 7 * UNIT, 7 * UNIT))
    assert seat.staging() == (2, 2 * UNIT, 2 * UNIT)
    seat.answered(2)
    assert seat.staging() == (0, 0, 0)


def test_a_rank_that_comes_in_copies_all_that_its_view_names() -> None:
    stand = Stand()
    stand.epoch = 0
    stand.measure(2, [0, 1, 2], 0)
    stand.seat.heard(Copying(2, 10, 3 * UNIT))
    assert stand.seat.staging() == (2, 10, 3 * UNIT)


def test_a_word_that_comes_after_the_answer_means_nothing() -> None:
    stand = Stand()
    stand.measure(2, [0, 1, 2], 0)
    stand.seat.answered(2)
    stand.seat.heard(Copying(2, 40, UNIT))
    assert stand.seat.copying == Copying()
    stand.seat.heard(Copying(9, 40, UNIT))
    assert stand.seat.staging() == (0, 0, 0)


def test_of_two_views_the_later_one_is_told() -> None:
    stand = Stand()
    seat = stand.seat
    stand.measure(2, [0, 1, 2], 0)
    seat.heard(Copying(2, 40, UNIT))
    stand.measure(3, [0, 1, 3], 1)
    stand.fill(3, 20, UNIT)
    assert seat.staging() == (3, 20, 2 * UNIT)
    stand.fill(0, 0, 0)
    seat.heard(Copying(3, 5, UNIT))
    assert seat.staging() == (3, UNIT + 5, 2 * UNIT)


def test_a_new_incarnation_begins_with_nothing() -> None:
    stand = Stand()
    stand.measure(2, [0, 1, 2], 0)
    stand.seat.heard(Copying(2, 40, UNIT))
    stand.seat.granted()
    assert stand.seat.staging() == (0, 0, 0)
    stand.seat.heard(Copying(2, 40, UNIT))
    assert stand.seat.staging() == (0, 0, 0)


def test_a_fill_that_is_tried_again_keeps_to_what_it_said() -> None:
    stand = Stand()
    stand.measure(2, [0, 1, 2], 1)
    stand.measure(2, [0, 1, 2], 0)  # the runner has connected anew
    stand.seat.heard(Copying(2, 40, UNIT))
    assert stand.seat.staging() == (2, UNIT + 40, 2 * UNIT)


def test_a_group_without_gpus_says_what_it_said_before() -> None:
    stand = Stand(on_gpu=False)
    stand.measure(2, [0, 1, 2], 1)
    stand.fill(2, 30, UNIT)
    assert stand.seat.staging() == (2, 30, UNIT)


def test_every_view_that_is_to_be_staged_is_measured(tmp_path: Path) -> None:
    source = checkpoint(tmp_path)

    async def run() -> None:
        with arena_memory() as memory, mover_driver(tmp_path) as mover:
            node = Node(mover, memory, [source])
            node.seat.on_gpu = True
            node.view(1, [[-1, -1, -1]] * 2, 0)
            await node.ready(node.view(2, [[0, 1, -1], [-1, -1, -1]]))
            node.seat.heard(Copying(2, 1, 2 * UNIT_BYTES))
            assert node.seat.staging() == (2, 2 * UNIT_BYTES + 1, 4 * UNIT_BYTES)

    asyncio.run(run())


def test_the_message_is_the_one_that_sessions_send() -> None:
    message = Message(kind=MessageType.HEADWAY, rank=3, a=5, b=2**40, c=2**41)
    assert unpack(message.pack()) == message


# ---- the controller's rule


def copies(world: World, epoch: int, done: int, total: int) -> None:
    """The daemon of rank 1 says how far a view is."""
    node, seat = world.seat(1)
    event = ev.Progressed(node.name, 1, seat.incarnation, 5, False, epoch, done, total)
    world.feed(event)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_member_is_not_late_while_its_bytes_grow_nor_when_its_daemon_counts_anew(
    restarted: bool,
) -> None:
    world = formed()
    node, seat = world.seat(1)
    seat.hung = True
    world.kill(3)
    world.run()
    epoch = world.view.epoch
    copies(world, epoch, 900, 1_000)
    if restarted:
        world.connect(node.name)
        world.run()
    for second in range(12):
        copies(world, epoch, (0 if restarted else 900) + 5 * (second + 1), 1_000)
        world.advance(1_000)
    assert world.view.epoch == epoch
    world.advance(STAGE_TIMEOUT_MS)
    assert world.view.epoch > epoch
    assert f"did not stage epoch {epoch} within {STAGE_TIMEOUT_MS} ms" in world.view.reason
