"""I1, I2, I3 and I7 on the data plane alone: real SIGKILL and SIGSTOP at every point of a step."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from elasticep import errors
from elasticep.native import abi
from elasticep.testing.clients import on_all
from elasticep.testing.local_group import LocalGroup
from elasticep.testing.placements import spread
from elasticep.testing.raw import RawSession, TornError
from elasticep.testing.scene import HIDDEN, RANKS, TOPK, Engine, Scene, geometry, timeouts

SITES = [s for s in abi.FailSite if s not in (abi.FailSite.NONE, abi.FailSite.STAGE)]


@pytest.fixture
def scene() -> Iterator[Scene]:
    with Scene() as s:
        yield s


@pytest.mark.parametrize("site", SITES, ids=lambda s: s.name.lower())
def test_i1_killed_at_every_point(scene: Scene, site: abi.FailSite) -> None:
    """Killed anywhere in an exchange: survivors tear, adopt, and no complete step is wrong."""
    dead = 2
    scene.start()
    scene.progress(list(range(RANKS)), 3)
    scene.group.failpoint(dead, site, abi.FailAction.KILL, after=5)
    scene.wait(lambda: len(scene.group.deaths) > 0, f"the death at {site.name}")
    alive = scene.survivors(dead)
    scene.group.stage(2, 1, alive, scene.slots)
    scene.reaches(2, alive)
    scene.progress(alive, 5)
    scene.finish()
    assert [scene.engines[r].wrong for r in range(RANKS)] == [0] * RANKS
    assert isinstance(scene.engines[dead].error, errors.Fenced)
    assert all(epoch == 1 for _, epoch in scene.engines[dead].complete)
    assert_one_view_per_step(scene)


def assert_one_view_per_step(scene: Scene) -> None:
    """I4: all ranks that complete a step ran it in the same view."""
    epochs: dict[int, int] = {}
    for engine in scene.engines:
        for step, epoch in engine.complete:
            assert epochs.setdefault(step, epoch) == epoch, f"step {step} completed in two views"


@pytest.mark.parametrize("launch", [abi.Launch.SERVICE, abi.Launch.INLINE])
def test_i2_a_stopped_rank_tears_after_the_exchange_timeout(launch: abi.Launch) -> None:
    """Nobody hangs on a stopped rank, nobody is expelled for it, and it goes on after SIGCONT."""
    if launch == abi.Launch.INLINE:
        check_i2_inline_silent_rank()
        return
    with Scene(exchange_s=0.3) as scene:
        scene.start()
        scene.progress(list(range(RANKS)), 3)
        scene.group.failpoint(1, abi.FailSite.SENT, abi.FailAction.STOP)
        others = scene.survivors(1)
        scene.wait(lambda: all(scene.engines[r].torn for r in others), "torn steps on the others")
        scene.group.signal_worker(1, signal.SIGCONT)
        scene.progress(list(range(RANKS)), 5)
        scene.finish()
        assert [e.wrong for e in scene.engines] == [0] * RANKS
        assert all(e.error is None for e in scene.engines)
        assert_one_view_per_step(scene)


def check_i2_inline_silent_rank() -> None:
    """Under `inline` a rank that does not come: the exchange and then the barrier end in time."""
    with LocalGroup(geometry(abi.Launch.INLINE), timeouts=timeouts(0.2)) as group:
        sessions = [group.session(r) for r in range(RANKS)]
        group.stage(1, 0, range(RANKS), spread(group.geometry, range(RANKS)))
        outcomes: list[str] = []

        def run(rank: int) -> None:
            s = sessions[rank]
            s.begin(0)
            try:
                empty_dispatch(s)
            except TornError:
                outcomes.append("torn")
            assert not s.end()
            try:
                s.begin(0, timeout_ms=200)
            except errors.StepTimeout:
                outcomes.append("timeout")

        threads = [threading.Thread(target=run, args=(r,)) for r in range(RANKS - 1)]
        for t in threads:
            t.start()
        sessions[-1].begin(0)  # passes the barrier, then says nothing more
        for t in threads:
            t.join(60)
            assert not t.is_alive()
        for s in sessions:
            s.close()
    assert sorted(outcomes) == ["timeout"] * 3 + ["torn"] * 3


@pytest.mark.parametrize(
    "site",
    [
        abi.FailSite.CELLS,
        abi.FailSite.ROWS,
        abi.FailSite.FLAG,
        abi.FailSite.RECEIVED,
        abi.FailSite.READY,
        abi.FailSite.PULL,
        abi.FailSite.END,
    ],
    ids=lambda s: s.name.lower(),
)
def test_i3_an_expelled_rank_that_wakes_completes_nothing(scene: Scene, site: abi.FailSite) -> None:
    """Stopped anywhere, expelled, continued: it finds the leave cell; its bytes reach nobody."""
    ghost = 3
    scene.start()
    scene.progress(list(range(RANKS)), 3)
    scene.group.failpoint(ghost, site, abi.FailAction.STOP, after=3)
    scene.wait(lambda: scene.group.failpoint_hits(ghost) == 1, f"the stop at {site.name}")
    alive = scene.survivors(ghost)
    scene.group.mark_dead(ghost)
    scene.group.stage(2, 1, alive, scene.slots)
    scene.reaches(2, alive)
    before = list(scene.engines[ghost].complete)
    scene.group.signal_worker(ghost, signal.SIGCONT)
    scene.wait(lambda: scene.engines[ghost].error is not None, "the expelled rank to learn it")
    scene.progress(alive, 5)
    scene.finish()
    assert isinstance(scene.engines[ghost].error, errors.Fenced)
    assert scene.engines[ghost].complete == before
    assert [e.wrong for e in scene.engines] == [0] * RANKS
    assert all(scene.engines[r].error is None for r in alive)


def empty_dispatch(s: RawSession) -> None:
    none = np.zeros((0, TOPK), np.int64)
    s.dispatch(0, 0, np.zeros((0, HIDDEN), np.float32), none, none)


def empty_exchange(s: RawSession) -> None:
    empty_dispatch(s)
    s.combine(0, 0)


def test_i3_left_behind_by_an_adoption() -> None:
    """Stopped just before its end check, everything received: the step still may not complete."""
    with LocalGroup(geometry(), timeouts=timeouts()) as group:
        slots = spread(group.geometry, range(RANKS), copies=2)
        sessions = [group.session(r) for r in range(RANKS)]
        group.stage(1, 0, range(RANKS), slots)
        on_all(sessions, lambda s: s.begin(0))
        on_all(sessions, empty_exchange)
        ghost, alive = sessions[-1], sessions[:-1]
        group.failpoint(RANKS - 1, abi.FailSite.END, abi.FailAction.STOP)
        with ThreadPoolExecutor(1) as pool:
            ending = pool.submit(ghost.end)
            group.wait_for(lambda: group.failpoint_hits(RANKS - 1) == 1, "the stop")
            group.stage(2, 1, range(RANKS - 1), slots)
            group.mark_dead(RANKS - 1)
            assert on_all(alive, lambda s: s.end()) == [True] * 3
            assert on_all(alive, lambda s: s.begin(0).epoch) == [2] * 3
            group.signal_worker(RANKS - 1, signal.SIGCONT)
            assert ending.result(60) is False
        for s in sessions:
            s.close()


def test_steps_without_exchanges_are_in_lockstep(scene: Scene) -> None:
    """Nothing holds ranks together between barriers; a slow one must not skip those of others."""
    steps = 1_000

    def run(s: RawSession) -> list[int]:
        seen = []
        for _ in range(steps):
            seen.append(s.begin(0).step)
            assert s.end()
        return seen

    assert on_all([e.session for e in scene.engines], run) == [list(range(1, steps + 1))] * RANKS


def test_an_epoch_that_is_staged_again_must_be_the_same_view(scene: Scene) -> None:
    """Its bank may be adopted at any moment: the same view changes nothing, another is refused."""
    group, sessions = scene.group, [e.session for e in scene.engines]
    on_all(sessions, lambda s: s.begin(0))  # epoch 1 runs, so epoch 2 waits in its bank
    group.stage(2, 1, range(RANKS), scene.slots)
    group.stage(2, 1, range(RANKS), scene.slots)
    other = scene.slots[:, ::-1].copy()
    with pytest.raises(
        RuntimeError, match=r"epoch 2 is staged with digest .* an epoch has one view"
    ):
        group.stage(2, 1, range(RANKS), other)
    assert on_all(sessions, lambda s: s.end()) == [True] * RANKS
    # Cells of the next barrier already carry epoch 2.
    assert on_all(sessions, lambda s: s.begin(0).epoch) == [2] * RANKS
    assert np.array_equal(sessions[0].slots(2), scene.slots)
    on_all(sessions, empty_exchange)
    assert on_all(sessions, lambda s: s.end()) == [True] * RANKS


def test_an_engine_that_raises_tears_the_step_for_all_at_once(scene: Scene) -> None:
    """By leave cells: nobody waits for the exchange timeout of 30 s."""
    sessions = [e.session for e in scene.engines]
    on_all(sessions, lambda s: s.begin(0))
    begin = time.monotonic()

    def run(s: RawSession) -> bool:
        if s is sessions[0]:
            s.tear()
        else:
            with pytest.raises(TornError, match=r"rank [0-3] left step"):
                empty_exchange(s)
        return s.end()

    assert on_all(sessions, run) == [False] * RANKS
    assert time.monotonic() - begin < 15
    on_all(sessions, lambda s: s.begin(0))
    on_all(sessions, empty_exchange)
    assert on_all(sessions, lambda s: s.end()) == [True] * RANKS


@pytest.mark.parametrize(
    "site", [abi.FailSite.FLAG, abi.FailSite.READY_SENT, abi.FailSite.PULLED, abi.FailSite.END]
)
def test_agreed_completion_releases_a_work_once_and_only_when_all_have_it(
    site: abi.FailSite,
) -> None:
    """Coupled ranks: one dies in the middle; all survivors release the same works in order, and
    a work counts only after every one of them completed it."""
    dead, works = 2, 12
    g = geometry()
    g.agreed = 1
    with LocalGroup(g, timeouts=timeouts()) as group:
        slots = spread(group.geometry, range(RANKS), copies=2)
        sessions = [group.session(r) for r in range(RANKS)]
        group.stage(1, 0, range(RANKS), slots)
        ran: list[list[tuple[int, int]]] = [[] for _ in sessions]  # (step, work) completed
        released: list[list[int]] = [[] for _ in sessions]

        def run(rank: int) -> None:
            s, have = sessions[rank], 0
            while True:
                try:
                    info = s.begin(0, timeout_ms=60_000)
                except errors.Fenced:
                    return
                if have and have <= info.settled:
                    released[rank].append(have)
                else:
                    assert have in (0, info.work)  # at most the last one is undone
                have = 0
                step, work = info.step, info.work
                try:
                    if work <= works:
                        empty_exchange(s)
                    if s.end() and work <= works:
                        have = work
                        ran[rank].append((step, work))
                except TornError:
                    s.end()
                except errors.Fenced:
                    return
                if work > works and not have and info.settled == works:
                    return

        threads = [threading.Thread(target=run, args=(r,)) for r in range(RANKS)]
        group.failpoint(dead, site, abi.FailAction.KILL, after=12)
        for t in threads:
            t.start()
        group.wait_for(lambda: len(group.deaths) > 0, "the death")
        alive = [r for r in range(RANKS) if r != dead]
        group.stage(2, 1, alive, slots)
        for t in threads:
            t.join(60)
            assert not t.is_alive()
        assert [released[r] for r in alive] == [list(range(1, works + 1))] * 3
        assert released[dead] == list(range(1, len(released[dead]) + 1))
        by_step: dict[int, int] = {}
        for rank in alive:  # a step is one work for all
            for step, work in ran[rank]:
                assert by_step.setdefault(step, work) == work
        for s in sessions:
            s.close()


def test_i3_planted_rows_and_flags_of_an_expelled_rank_are_ignored(scene: Scene) -> None:
    """Case 01 too: whatever an expelled rank goes on writing to its own places changes nothing."""
    ghost = 3
    scene.start()
    scene.progress(list(range(RANKS)), 3)
    scene.group.failpoint(ghost, abi.FailSite.SENT, abi.FailAction.STOP)
    scene.wait(lambda: scene.group.failpoint_hits(ghost) == 1, "the stop")
    scene.group.mark_dead(ghost)
    alive = scene.survivors(ghost)
    scene.group.stage(2, 1, alive, scene.slots)
    scene.progress(alive, 3)
    # The last rows and flags that the ghost wrote are still there; its region is poisoned too.
    data = scene.group.data(ghost)
    assert data.flags.writeable
    data[-4096:] = 0xFF
    scene.progress(alive, 5)
    scene.group.signal_worker(ghost, signal.SIGCONT)
    scene.wait(lambda: scene.engines[ghost].error is not None, "the expelled rank to learn it")
    scene.finish()
    assert [e.wrong for e in scene.engines] == [0] * RANKS


def test_i7_death_of_an_engine_process_leaves_everyone_else_alive() -> None:
    """SIGKILL of an engine: its peers tear at once, workers and the daemon's side live on."""
    with LocalGroup(geometry(), timeouts=timeouts()) as group:
        slots = spread(group.geometry, range(RANKS), copies=2)
        code = (
            "import sys, numpy as np\n"
            "from elasticep.testing.raw import RawSession\n"
            "s = RawSession(sys.argv[1], sys.argv[2])\n"
            "print('attached', flush=True)\n"
            "s.begin(0)\n"
            "print('in', flush=True)\n"
            "sys.stdin.read()\n"
        )
        victim = subprocess.Popen(
            [sys.executable, "-c", code, group.socket_path, group.ticket(0)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert victim.stdout is not None
        assert victim.stdin is not None
        try:
            assert victim.stdout.readline() == b"attached\n"
            sessions = {r: group.session(r) for r in range(1, RANKS)}
            group.stage(1, 0, range(RANKS), slots)
            results: dict[int, tuple[str, int]] = {}

            def run(rank: int) -> None:
                s = sessions[rank]
                s.begin(0)
                try:
                    empty_dispatch(s)
                except TornError as error:
                    results[rank] = (str(error), time.monotonic_ns())
                s.end()

            threads = [threading.Thread(target=run, args=(r,)) for r in sessions]
            for t in threads:
                t.start()
            assert victim.stdout.readline() == b"in\n"
            group.wait_for(
                lambda: all(group.status(r).wait_phase == abi.WaitPhase.DISPATCH for r in sessions),
                "the peers to wait for the engine",
            )
            killed_at = time.monotonic_ns()
            victim.kill()
            for t in threads:
                t.join(60)
                assert not t.is_alive()
            assert set(results) == set(sessions)
            # Whoever sees the dead word first names rank 0; the others may follow its leave cell.
            assert any("rank 0" in text for text, _ in results.values())
            # Two busy cores: the bound is generous, the mechanism (robust futex) is what is tested.
            # Without it they would tear when the exchange times out, after 30 s.
            assert max(at for _, at in results.values()) - killed_at < 10_000_000_000
            group.wait_for(lambda: len(group.deaths) == 1, "the liveness event")
            assert group.deaths[0].holder == abi.Holder.ENGINE
            for rank in sessions:
                assert group.status(rank).runner_pid == group.worker_pid(rank)
            group.stage(2, 1, list(sessions), slots)

            def again(s: RawSession) -> bool:
                assert s.begin(0).epoch == 2
                empty_exchange(s)
                return s.end()

            assert on_all(sessions.values(), again) == [True] * 3
            for s in sessions.values():
                s.close()
        finally:
            victim.kill()
            victim.wait(60)
            victim.stdin.close()
            victim.stdout.close()


def test_a_rejoining_rank_enters_under_a_new_incarnation(scene: Scene) -> None:
    """Same seat, incarnation + 1, under decoding load; nothing of the old incarnation is left."""
    dead = 1
    scene.start()
    scene.progress(list(range(RANKS)), 3)
    scene.group.kill_worker(dead)
    scene.wait(lambda: len(scene.group.deaths) > 0, "the death")
    alive = scene.survivors(dead)
    scene.group.stage(2, 1, alive, scene.slots)
    scene.progress(alive, 3)
    scene.wait(lambda: scene.engines[dead].error is not None, "the old engine to learn it")
    scene.engines[dead].session.close()
    scene.group.open_seat(dead)
    joiner = Engine(scene.group.session(dead), dead, scene.stop)
    scene.group.stage(3, 2, range(RANKS), scene.slots, only=[dead])
    joiner.start()
    scene.engines[dead] = joiner
    scene.group.stage(3, 2, range(RANKS), scene.slots, only=alive)
    scene.progress(list(range(RANKS)), 10)
    scene.finish()
    assert joiner.error is None
    assert joiner.complete[0][1] == 3
    assert [e.wrong for e in scene.engines] == [0] * RANKS
    assert_one_view_per_step(scene)
