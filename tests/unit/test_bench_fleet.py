"""Children that serve one fleet after another, with ranks that are no more than mapped memory."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from elasticep.bench import fleet_cuda_pool
from elasticep.bench.fleet_cuda import Fleet, FleetSpec
from elasticep.bench.fleet_cuda_pool import FleetPool, left_over
from elasticep.bench.recovery_cuda import group
from elasticep.errors import NativeError

pytestmark = pytest.mark.timeout(180)  # processes are started
FAKES = "tests.unit.fleet_fakes"


def spec(*seats: tuple[int, ...], **options: Any) -> FleetSpec:
    """A process for each of `seats`, the first two on different devices."""
    return FleetSpec(
        geometry=group(sum(len(s) for s in seats)),
        devices=tuple(i % 2 for i in range(len(seats))),
        seats=seats,
        makes=f"{FAKES}:FakeSeats",
        **options,
    )


@pytest.fixture(scope="module")
def shared() -> Iterator[FleetPool]:
    with FleetPool() as pool:
        yield pool


def facts(pool: FleetPool | None, *seats: tuple[int, ...]) -> list[dict[str, Any]]:
    with Fleet(spec(*seats), pool) as fleet:
        return fleet.run(f"{FAKES}:facts")


def pids(pool: FleetPool | None, *seats: tuple[int, ...]) -> list[int]:
    return [one["pid"] for one in facts(pool, *seats)]


def test_a_pool_starts_a_process_once_and_fleets_are_new_each_time(shared: FleetPool) -> None:
    before = shared.started
    first = facts(shared, (0, 1), (2,))
    second = facts(shared, (0, 1), (2,))
    assert [one["pid"] for one in first] == [one["pid"] for one in second]
    assert shared.started == before + 2
    assert second[0]["closed"][-2:] == [0, 1]
    assert [one["notes"] for one in second] == [0, 0]
    # All ranks of a fleet see the same regions, and none of the fleet before.
    for ranks in (first, second):
        seen = [regions for one in ranks for regions in one["regions"].values()]
        assert seen == [seen[0]] * 3
    assert not set(first[0]["regions"][0].values()) & set(second[0]["regions"][0].values())


def test_fleets_of_other_shapes_share_the_processes(shared: FleetPool) -> None:
    several = pids(shared, (0,), (1,), (2,), (3,))
    started = shared.started
    for seats in (((0, 1, 2),), ((0,), (1, 2)), ((0,), (1,), (2,))):
        assert set(pids(shared, *seats)) <= set(several)
    assert shared.started == started


def test_processes_without_a_pool_end_with_their_fleet() -> None:
    with Fleet(spec((0,))) as fleet:
        (child,) = fleet.children
        fleet.run(f"{FAKES}:facts")
        assert child.process.poll() is None
    assert child.process.returncode == 0


@pytest.mark.parametrize(("program", "says"), [("end", "died"), ("fail", "it went wrong")])
def test_after_a_failure_none_of_the_processes_is_used_again(
    shared: FleetPool, program: str, says: str
) -> None:
    before = pids(shared, (0,), (1,))
    with Fleet(spec((0,), (1,)), shared) as fleet:
        with pytest.raises(NativeError, match=says):
            fleet.run(f"{FAKES}:{program}", ranks=[0])
        children = list(fleet.children)
        fleet.close()
    assert all(c.process.poll() is not None for c in children)
    after = pids(shared, (0,), (1,))
    assert not set(before) & set(after)


def test_a_process_that_may_die_does_so_alone(shared: FleetPool) -> None:
    before = pids(shared, (0,), (1,))
    with Fleet(spec((0,), (1,)), shared) as fleet:
        fleet.start(f"{FAKES}:end", ranks=[1])
        fleet.finish(may_die=True)
    after = pids(shared, (0,), (1,))
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_one_that_died_while_it_was_idle_is_replaced(shared: FleetPool) -> None:
    (before,) = pids(shared, (0,))
    os.kill(before, signal.SIGKILL)
    os.waitid(os.P_PID, before, os.WEXITED | os.WNOWAIT)
    (after,) = pids(shared, (0,))
    assert after != before


@pytest.mark.parametrize("what", ["descriptors", "headers", "device memory"])
def test_what_is_left_behind_is_told_and_ends_the_process(what: str) -> None:
    with FleetPool() as pool:
        (before,) = pids(pool, (0,))
        fleet = Fleet(spec((0,)), pool)
        fleet.run(f"{FAKES}:leave_behind", what=what)
        with pytest.raises(NativeError, match=rf"left \d+ {what.replace(' memory', '')}"):
            fleet.close()
        assert pids(pool, (0,)) != [before]


def test_memory_of_a_device_is_not_held_against_one_of_several_processes() -> None:
    with FleetPool() as pool:
        first, _, other = pids(pool, (0,), (1,), (2,))  # the first and the last on one device
        with Fleet(spec((0,)), pool) as fleet:
            fleet.run(f"{FAKES}:leave_behind", what="device memory")
        assert pool.idle(0) == 2
        assert pids(pool, (0,))[0] in (first, other)


def test_what_functions_noted_is_not_left_behind(shared: FleetPool) -> None:
    (before,) = pids(shared, (0,))
    for _ in range(2):
        with Fleet(spec((0,)), shared) as fleet:
            fleet.run(f"{FAKES}:leave_behind", what="nothing")
    assert pids(shared, (0,)) == [before]


def test_memory_of_a_shared_device_says_nothing_of_one_process() -> None:
    base = {"descriptors": 20, "headers": 0, "device_bytes": 0}
    more = base | {"device_bytes": 1 << 30, "descriptors": 28}
    assert left_over(base, more, alone=False) == []
    assert left_over(base, more, alone=True) == [f"{1 << 30} device_bytes"]
    assert left_over(base, base | {"descriptors": 29}, alone=False) == ["9 descriptors"]


def test_one_that_does_not_close_in_time_is_ended(
    shared: FleetPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_cuda_pool, "CLOSE_TIMEOUT_S", 0.2)
    fleet = Fleet(spec((0,)), shared)
    (child,) = fleet.children
    fleet.run(f"{FAKES}:get_stuck")
    with pytest.raises(NativeError, match=r"gave no 'closed' within 0\.2 s"):
        fleet.close()
    assert child.process.poll() is not None


def test_a_fleet_that_cannot_be_opened_says_why(shared: FleetPool) -> None:
    with pytest.raises(NativeError, match="a spec that cannot be opened"):
        Fleet(spec((0,), (1,), num_sms=99), shared)
    assert len(pids(shared, (0,), (1,))) == 2
