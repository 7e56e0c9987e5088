"""What a step barrier finds in regions that earlier incarnations and earlier calls left behind."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from elasticep.errors import DaemonUnavailable, Fenced, NativeError, StepTimeout
from elasticep.native import abi
from elasticep.native.region import loads_offset
from elasticep.testing.local_group import LocalGroup
from elasticep.testing.placements import spread
from elasticep.testing.processes import stop
from elasticep.testing.raw import RawSession
from elasticep.testing.scene import timeouts
from elasticep.testing.small import exchange, geometry
from elasticep.testing.world import World

_MARK_BYTES = 64
_MARKS_BYTES = 256  # of up to four ranks, just before the load counters
_EXPELLED = 2


@pytest.mark.parametrize("launch", list(abi.Launch))
def test_a_group_that_is_formed_anew_is_past_all_earlier_barriers(launch: int) -> None:
    """A survivor without a view to go on with leaves barriers behind, hundreds a second. When all
    engines come again, none of what it left tears their steps.
    """
    g = geometry(3, exchange(), launch=launch)
    table = spread(g, [0, 1, 2])
    with LocalGroup(g, timeouts=timeouts()) as group:
        old = [group.session(rank) for rank in range(3)]
        group.stage(1, 0, [0, 1, 2], table)
        group.mark_dead(1)
        group.mark_dead(2)
        with pytest.raises(StepTimeout, match="dead"):
            old[0].begin(0, timeout_ms=200)
        for session in old:
            session.close()
        for rank in (1, 2):  # without the rank that counted on
            if launch == abi.Launch.SERVICE:
                group.kill_worker(rank)
            group.open_seat(rank)
        sessions = [group.session(rank) for rank in (1, 2)]
        group.stage(2, 0, [1, 2], spread(g, [1, 2]))

        def complete(session: RawSession) -> bool:
            session.begin()
            return session.end()

        with ThreadPoolExecutor(2) as threads:
            first = list(threads.map(complete, sessions))
            assert first == [True, True]
        for session in sessions:
            session.close()


@pytest.mark.parametrize("launch", list(abi.Launch))
def test_a_joiner_whose_region_is_of_a_group_further_on_joins_a_younger_one(launch: int) -> None:
    """Cells and marks of barriers that the group has not come to yet, left by another rank of an
    earlier group, neither hide the present barrier nor tear step after step.
    """
    g = geometry(4, exchange(), launch=launch)
    with LocalGroup(g, timeouts=timeouts(), ranks=[2, 3]) as group:
        old = [group.session(rank) for rank in (2, 3)]
        group.stage(1, 0, [2, 3], spread(g, [2, 3]))
        group.mark_dead(2)
        with pytest.raises(StepTimeout, match="dead"):
            old[1].begin(0, timeout_ms=200)
        for session in old:
            session.close()
        for rank in (0, 1):
            group.open_seat(rank)
        sessions = {rank: group.session(rank) for rank in (0, 1)}
        group.stage(2, 0, [0, 1], spread(g, [0, 1]))
        if launch == abi.Launch.SERVICE:
            group.kill_worker(2)
        group.open_seat(2)
        sessions[2] = group.session(2)
        last = [1 << 62]

        def steps(rank: int) -> int:
            """Steps until all have seen three complete ones of the joiner; its torn ones."""
            step = torn = complete = 0
            while step < last[0]:
                info = sessions[rank].begin()
                step = info.step
                if sessions[rank].end():
                    complete += 1
                else:
                    torn += 1
                if rank == 2 and complete == 3:
                    last[0] = min(last[0], step + 1)  # nobody is past that one yet
            return torn

        with ThreadPoolExecutor(3) as threads:
            running = [threads.submit(steps, rank) for rank in sessions]
            group.stage(3, 2, [0, 1, 2], spread(g, [0, 1, 2]))
            torn = [rank.result() for rank in running]
        assert max(torn) <= 1
        for session in sessions.values():
            session.close()


@pytest.mark.parametrize("launch", list(abi.Launch))
def test_a_view_may_be_said_again_when_it_runs_but_not_another_one_under_its_number(
    launch: int,
) -> None:
    """A daemon that was restarted does not know yet that the rank has it: it is no error of the
    rank, for which others would be expelled.
    """
    g = geometry(2, exchange(), launch=launch)
    table = spread(g, [0, 1])
    with LocalGroup(g, timeouts=timeouts()) as group:
        session = group.session(0)
        group.stage(1, 0, [0], spread(g, [0]))
        session.begin()
        assert session.end()
        group.stage(1, 0, [0], spread(g, [0]))
        with pytest.raises(RuntimeError, match="epoch 1 is staged with digest"):
            group.stage(1, 0, [0, 1], table, only=[0])
        assert session.begin().epoch == 1
        assert session.end()
        session.close()


def test_a_barrier_that_is_tried_again_announces_what_its_cells_say() -> None:
    """All see the same tokens, by which they choose between decode and prefill."""
    with World(geometry(2, exchange()), timeouts=timeouts()) as world:
        with pytest.raises(StepTimeout):
            world.sessions[0].begin(5, timeout_ms=50)
        told = world.each(lambda rank, session: list(session.begin(7 + rank).tokens[:2]))
        assert told == {0: [5, 8], 1: [5, 8]}
        world.each(lambda _rank, session: session.end())
        told = world.each(lambda rank, session: list(session.begin(7 + rank).tokens[:2]))
        assert told == {0: [7, 8], 1: [7, 8]}
        world.each(lambda _rank, session: session.end())


@pytest.mark.parametrize("later", [40_000, 65_535])
def test_a_mark_for_an_earlier_incarnation_never_expels_a_later_one(later: int) -> None:
    """Marks name the low 16 bits of an epoch and stay: tens of thousands of views later they would
    look like those of a view to come.
    """
    g = geometry(2, exchange(), launch=abi.Launch.INLINE)
    with LocalGroup(g, timeouts=timeouts()) as group:
        at = loads_offset(g) - _MARKS_BYTES
        marks = group.data(0)[at : at + 2 * _MARK_BYTES].view(np.uint64).reshape(2, -1)
        assert not marks.any()
        marks[1, 0] = 1 << 24 | 5 << 8 | _EXPELLED  # rank 1 left this seat behind in epoch 5
        sessions = [group.session(rank) for rank in range(2)]
        group.stage(5 + later, 0, [0, 1], spread(g, [0, 1]))
        with ThreadPoolExecutor(2) as threads:
            epochs = threads.map(lambda session: session.begin().epoch, sessions)
            assert list(epochs) == [5 + later] * 2
            list(threads.map(RawSession.end, sessions))
        for session in sessions:
            session.close()


def test_a_late_mark_for_its_predecessor_does_not_expel_a_new_incarnation() -> None:
    """Of a view that the new one is in, and has staged; of any other the mark is for itself."""
    g = geometry(2, exchange(), launch=abi.Launch.INLINE)
    with LocalGroup(g, timeouts=timeouts()) as group:
        at = loads_offset(g) - _MARKS_BYTES
        marks = group.data(0)[at : at + 2 * _MARK_BYTES].view(np.uint64).reshape(2, -1)
        sessions = [group.session(rank) for rank in range(2)]
        with ThreadPoolExecutor(2) as threads:
            for epoch, step in ((5, 1), (6, 2)):
                group.stage(epoch, 5 if step > 1 else 0, [0, 1], spread(g, [0, 1]))
                if step > 1:
                    marks[1, 0] = 1 << 24 | 6 << 8 | _EXPELLED
                infos = threads.map(lambda session: session.begin(), sessions)
                assert [info.epoch for info in infos] == [epoch] * 2
                list(threads.map(RawSession.end, sessions))
            waiting = threads.submit(sessions[0].begin)
            marks[1, 0] = 3 << 24 | 7 << 8 | _EXPELLED
            with pytest.raises(Fenced, match="expelled"):
                waiting.result(60)
        for session in sessions:
            session.close()


def test_a_command_that_an_earlier_engine_gave_up_is_none_of_the_next_one() -> None:
    """Its worker died without an answer, so that the next command has the number again."""
    g = geometry(1, exchange(), launch=abi.Launch.SERVICE)
    with LocalGroup(g, timeouts=timeouts()) as group, ThreadPoolExecutor(1) as thread:
        old = group.session(0)
        stop(group.worker_pid(0))
        abi.check(abi.api().ep_session_interrupts(old._handle, 1), "")
        with pytest.raises(NativeError, match="interrupted by a signal"):
            old.begin()
        group.kill_worker(0)
        old.close()  # gives the barrier up
        group.open_seat(0)
        session = group.session(0)
        waiting = thread.submit(session.begin)
        waits = abi.WaitPhase.JOIN
        group.wait_for(lambda: waiting.done() or group.status(0).wait_phase == waits, "the wait")
        group.stage(1, 0, [0], spread(g, [0]))
        assert waiting.result(60).epoch == 1
        assert session.end()
        session.close()


def test_a_daemon_that_takes_no_connection_is_not_waited_for(tmp_path: Path) -> None:
    """One that is stopped has its backlog full before long."""
    path = str(tmp_path / "fd")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(0)
        held = []
        while True:
            caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            held.append(caller)
            try:
                caller.connect(path)
            except BlockingIOError:
                break
        began = time.monotonic()
        with ThreadPoolExecutor(1) as thread:
            opening = thread.submit(RawSession, path, "ticket", 100)
            try:
                with pytest.raises(DaemonUnavailable, match="no daemon answers"):
                    opening.result(20)
            finally:
                listener.close()  # whoever still waits goes on
        assert time.monotonic() - began < 20
        for caller in held:
            caller.close()


@pytest.mark.parametrize("launch", list(abi.Launch))
@pytest.mark.parametrize("told", [True, False])
def test_a_rank_that_was_left_behind_tells_why(launch: int, told: bool) -> None:
    """Its daemon hears of it after the others went on, or never."""
    g = geometry(3, exchange(), launch=launch)
    with LocalGroup(g, timeouts=timeouts()) as group, ThreadPoolExecutor(3) as threads:
        sessions = [group.session(rank) for rank in range(3)]
        group.stage(1, 0, [0, 1, 2], spread(g, [0, 1, 2]))

        def step(session: RawSession) -> int:
            epoch = int(session.begin().epoch)
            session.end()
            return epoch

        assert list(threads.map(step, sessions)) == [1, 1, 1]
        group.stage(2, 1, [0, 1], spread(g, [0, 1]))
        left = threads.submit(step, sessions[2])
        assert list(threads.map(step, sessions[:2])) == [2, 2]
        if told:
            group.fence(2, 2, "drained: a new card")
        why = "drained: a new card" if told else "went on without it in epoch 2"
        with pytest.raises(Fenced, match=why):
            left.result(60)
        with pytest.raises(Fenced, match=why):
            sessions[2].begin()
        for session in sessions:
            session.close()
