"""Ranks that die, leave, tear, are fenced or late in the middle of the kernels of a step."""

import dataclasses
import functools
import os
from typing import Any

import pytest

from elasticep.bench.fleet_cuda import Fleet, FleetSpec
from elasticep.bench.fleet_cuda_pool import Child
from elasticep.native import cuda as native
from elasticep.native import cuda_library
from tests.emulated.fleets import PATIENCE, fleet, pool
from tests.gpu import test_faults as on_gpus
from tests.gpu.shapes import exchange, geometry
from tests.gpu.test_faults import (
    kill_one_after_another,
    test_an_expelled_rank_that_goes_on_completes_nothing,
)

__all__ = ["test_an_expelled_rank_that_goes_on_completes_nothing"]
PROGRAMS = "tests.emulated.programs_faults"
Why, Status = native.Why, native.StepStatus
LEFT = {Why.PEER_LEFT, Why.PASSED_BY}  # whichever of the two a wait sees first
SOAK_SEEDS = range(1, 1 + int(os.environ.get("ELASTICEP_EMULATED_SOAKS", "6")))


def small(ranks: int) -> bytes:
    return geometry(ranks, [exchange(32)], hidden=128, experts=6, topk=1, slots=6)


@pytest.fixture
def _as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of tests/gpu with children from here, and time for a slow machine."""
    monkeypatch.setattr(cuda_library, "device_count", lambda: 2)
    monkeypatch.setattr(on_gpus, "Fleet", functools.partial(Fleet, pool=pool()))

    def spec(*args: Any, **options: Any) -> FleetSpec:
        return dataclasses.replace(original(*args, **options), **PATIENCE)

    original = on_gpus.spec
    monkeypatch.setattr(on_gpus, "spec", spec)


pytestmark = pytest.mark.usefixtures("_as_on_gpus")


def test_case_04_survivor_lives_and_replays_the_same_graph() -> None:
    for line in kill_one_after_another(2, seed=1):
        assert line["why"] == Why.PEER_DEAD, line
        assert line["rank"] == line["victim"], line
        assert line["members"] == [0], line
        assert all(line[f"{sign}_ms"] > 0 for sign in ("futex", "socket", "exit")), line


def missing(what: str, **options: Any) -> dict[str, Any]:
    with fleet(small(3), 3, 1, **options) as f:

        def on_report(_: Child, told: str) -> None:
            if told == "dead":
                for header in f.headers.values():
                    header.mark_dead(2, 1)
            elif told == "fenced":
                f.headers[0].fence(1, 1, "the test has fenced it")

        f.start(f"{PROGRAMS}:one_is_missing", what=what)
        return dict(f.finish(120.0, on_report)[0])


def test_a_dead_word_tears_the_step_on_all_and_the_graph_goes_on_without_the_dead() -> None:
    found = missing("dead")
    assert not any(line["complete"] for line in found["torn"])
    whys = [line["why"] for line in found["torn"]]
    # The first to look at the word blames the dead; others may see that one's leave cell before.
    assert Why.PEER_DEAD in whys[:2], found
    assert set(whys) <= {Why.PEER_DEAD, *LEFT}, found
    assert all(line["rank"] == 2 for line in found["torn"] if line["why"] == Why.PEER_DEAD)
    for line in found["after"]:
        assert (line["complete"], line["epoch"], line["members"]) == (True, 2, [0, 1]), found
    assert found["left"][0]["status"] == Status.EXPELLED
    assert not found["left"][0]["complete"]


def test_a_fenced_rank_leaves_the_step_and_says_so() -> None:
    found = missing("fenced")
    assert not any(line["complete"] for line in found["torn"])
    assert found["torn"][0]["why"] == Why.FENCED, found
    assert all(line["why"] in LEFT for line in found["torn"][1:]), found
    assert found["after"][0]["status"] == Status.EXPELLED, found


def test_a_wait_that_lasts_too_long_tears_the_step_and_the_next_one_runs() -> None:
    found = missing("timeout", exchange_timeout_ms=400)
    assert not any(line["complete"] for line in found["torn"])
    whys = [line["why"] for line in found["torn"]]
    assert Why.TIMEOUT in whys[:2], found
    assert set(whys) <= {Why.TIMEOUT, *LEFT}, found
    assert all(line["complete"] for line in found["after"]), found


def test_a_barrier_with_a_dead_member_runs_nothing_until_the_next_view() -> None:
    with fleet(small(3), 3, 1) as f:

        def on_report(_: Child, rank: int) -> None:
            for header in f.headers.values():
                header.mark_dead(rank, 1)

        f.start(f"{PROGRAMS}:dead_before_the_barrier")
        (found,) = f.finish(120.0, on_report)
    for line in found["doomed"] + found["again"]:
        assert (line["status"], line["complete"]) == (Status.DOOMED, False), found
        assert (line["why"], line["rank"]) == (Why.PEER_DEAD, 2), found
    for line in found["after"]:
        assert (line["complete"], line["members"]) == (True, [0, 1]), found


@pytest.mark.parametrize("where", ["wait", "end"])
def test_kernels_that_outlive_their_process_do_not_hide_that_it_is_dead(where: str) -> None:
    with fleet(small(2), 2, 1) as f:

        def on_report(child: Child, rank: int) -> None:
            for header in f.headers.values():
                header.mark_dead(rank, 1)
            child.connection.send("go")

        f.start(f"{PROGRAMS}:kernels_outlive_their_process", where=where)
        (found,) = f.finish(120.0, on_report)
    assert not found["complete"]
    assert (found["why"], found["rank"]) == (Why.PEER_DEAD, 1), found


def test_a_rank_joins_and_ranks_leave_in_graphs_that_never_change() -> None:
    with fleet(small(3), 3, 1) as f:
        (found,) = f.run(f"{PROGRAMS}:joins", 120.0)
    shown = [[(x["complete"], x["epoch"], x["members"]) for x in lines] for lines in found]
    assert shown[0] == shown[1] == [(True, 1, [0, 1])] * 2
    assert shown[2] == shown[3] == [(True, 2, [0, 1, 2])] * 3
    assert shown[4][0] == (True, 3, [0]), found
    assert [x["status"] for x in found[4][1:]] == [Status.EXPELLED] * 2, found
    assert shown[5] == [(True, 3, [0])]


def judge_soak(results: list[list[dict[str, Any]]], steps: int) -> None:
    for found in (line for process in results for line in process):
        assert found["status"] == [Status.RUN], found
        assert found["steps"] == list(range(1, steps + 1)), found
        assert found["epoch"] == found["epochs"], found
        # Only what was torn is incomplete; it may be complete at whoever was done by then.
        assert set(range(steps)) - set(found["complete"]) <= set(found["tears"]), found


def test_random_faults_and_views_in_random_order() -> None:
    with fleet(small(3), 3, 1, seed=1) as f:
        judge_soak(f.run(f"{PROGRAMS}:soak", 120.0, steps=15, seed=1), 15)


@pytest.mark.long
@pytest.mark.parametrize("seed", SOAK_SEEDS)
def test_long_random_faults_and_views(seed: int) -> None:
    with fleet(small(3), 3, 3, seed=seed) as f:
        judge_soak(f.run(f"{PROGRAMS}:soak", 200.0, steps=60, seed=seed), 60)
