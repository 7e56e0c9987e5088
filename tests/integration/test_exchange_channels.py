"""Two channels of one exchange, in flight at once."""

import contextlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from elasticep.native import abi
from elasticep.testing.raw import RawSession
from elasticep.testing.small import CAP, LAYERS, LAYOUTS, exchange, geometry, until
from elasticep.testing.world import World, make_batch


@pytest.mark.parametrize("launch", list(abi.Launch))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_channels_overlap(layout: int, launch: int) -> None:
    """Rows of batch B come in while A is computed, before anyone asks for them; both are right."""
    g = geometry(2, exchange(layout=layout, channels=2), launch=launch)
    pairs = {r: (make_batch(g, CAP, [1, r]), make_batch(g, CAP, [2, r])) for r in range(2)}
    with World(g) as world:
        seen: dict[int, list[bool]] = {0: [], 1: []}
        flying: dict[int, npt.NDArray[np.uint8]] = {}

        def run(rank: int, session: RawSession) -> list[tuple[Any, int, int]]:
            done = []
            step = session.begin(CAP).step
            a, b = pairs[rank]
            session.dispatch_send(0, 0, a.x, a.ids, a.weights, channel=0)
            for layer in range(LAYERS):
                got_a = session.dispatch_recv(0, channel=0)
                session.dispatch_send(0, layer, b.x, b.ids, b.weights, channel=1)
                if rank in flying:  # the other rank's rows of B, while A is under way
                    until(lambda: bool(flying[rank].any()), "rows of the other channel")
                    seen[rank].append(True)
                world.compute(got_a, 0, rank, layer)
                session.combine_send(0, channel=0)
                done.append((session.combine_recv(0, CAP, channel=0), layer, 0))
                if layer + 1 < LAYERS:
                    session.dispatch_send(0, layer + 1, a.x, a.ids, a.weights, channel=0)
                got_b = session.dispatch_recv(0, channel=1)
                world.compute(got_b, 0, rank, layer)
                session.combine_send(0, channel=1)
                done.append((session.combine_recv(0, CAP, channel=1), layer, 1))
            assert session.end()
            if layout == abi.RowLayout.ROUTED:
                other = got_b.rows[(1 - rank) * CAP : (2 - rank) * CAP]
                flying[rank] = other.view(np.uint8)
            return [(out, layer, half, step) for out, layer, half in done]  # type: ignore[misc]

        for _ in range(2):
            for area in flying.values():
                area[:] = 0
            for rank, results in world.each(run).items():
                for out, layer, half, step in results:  # type: ignore[misc]
                    expected = world.expected(0, pairs[rank][half], rank, layer, step)
                    np.testing.assert_array_equal(out, expected)
        if layout == abi.RowLayout.ROUTED:
            assert [len(times) for times in seen.values()] == [LAYERS, LAYERS]


@pytest.mark.parametrize("launch", list(abi.Launch))
def test_only_the_order_within_a_channel_must_agree(launch: int) -> None:
    """One rank begins with channel 0, the other with channel 1: the step is complete."""
    g = geometry(2, exchange(channels=2), launch=launch)
    batches = {r: [make_batch(g, CAP, [c, r]) for c in range(2)] for r in range(2)}
    with World(g) as world:

        def run(rank: int, session: RawSession) -> tuple[int, list[Any]]:
            step, results = session.begin(CAP).step, []
            for channel in (0, 1) if rank == 0 else (1, 0):
                b = batches[rank][channel]
                session.dispatch_send(0, 0, b.x, b.ids, b.weights, channel=channel)
            for channel in range(2):
                world.compute(session.dispatch_recv(0, channel=channel), 0, rank, 0)
                results.append(session.combine(0, CAP, channel=channel))
            assert session.end()
            return step, results

        for rank, (step, results) in world.each(run).items():
            for channel, out in enumerate(results):
                expected = world.expected(0, batches[rank][channel], rank, 0, step)
                np.testing.assert_array_equal(out, expected)


def test_a_wait_is_on_record_until_both_channels_are_served() -> None:
    """A rank that waits for another on one channel is no idle one when the other channel's wait
    ends: nobody must take it for the root of a hang.
    """
    g = geometry(2, exchange(channels=2), exchange(channels=2), launch=abi.Launch.SERVICE)
    batch = make_batch(g, CAP, 1)

    def wait_of(world: World) -> tuple[int, int, int]:
        status = world.group.status(0)
        return status.wait_phase, status.wait_exchange, status.wait_rank

    with World(g) as world:
        waiting, late = world.sessions[0], world.sessions[1]

        def send(session: RawSession, channel: int) -> None:  # exchange and channel are one
            session.dispatch_send(channel, 0, batch.x, batch.ids, batch.weights, channel=channel)

        world.each(lambda _rank, session: session.begin(CAP))
        send(waiting, 1)
        until(lambda: wait_of(world) == (abi.WaitPhase.DISPATCH, 1, 1), "the first wait")
        send(waiting, 0)
        with contextlib.suppress(TimeoutError):  # the second one may have to wait for its turn
            until(lambda: wait_of(world)[1] == 0, "the second wait", 0.2)
        send(late, 1)
        waiting.dispatch_recv(1, channel=1)
        until(lambda: wait_of(world) == (abi.WaitPhase.DISPATCH, 0, 1), "the wait that is left")
        send(late, 0)
        waiting.dispatch_recv(0, channel=0)
        until(lambda: wait_of(world)[0] == abi.WaitPhase.NONE, "the end of all waits")
        world.each(lambda _rank, session: session.end())
