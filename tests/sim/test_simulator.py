"""Random schedules of faults around the real control code, and bugs that must be found by them."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from itertools import islice

import pytest
from click.testing import CliRunner

from elasticep.cli import sim
from elasticep.cli.sim import command
from elasticep.errors import UsageError
from elasticep.sim import Plant, Result, Scenario, run
from elasticep.sim.faults import KINDS
from elasticep.sim.loop import Process, VirtualLoop
from elasticep.sim.run import short, shrink

SCHEDULES = int(os.environ.get("ELASTICEP_TEST_SCHEDULES", "2000"))
# Plant -> the invariant that it breaks, seeds within which it must, and faults that make it likely.
PLANTS: dict[Plant, tuple[str, int, tuple[str, ...]]] = {
    Plant.NO_DEAD_WORD: ("I2", 20, ()),
    Plant.NO_LEAVE_CELL: ("I3", 120, ("stop-rank", "freeze-node", "kill-daemon")),
    Plant.REUSED_INCARNATION: ("I3", 20, ()),
    Plant.EARLY_ADOPT: ("I4", 20, ()),
    Plant.STALE_WRITES: ("I4", 20, ()),
    Plant.FILL_IN_USE: ("I5", 60, ()),
    Plant.EARLY_ANSWER: ("I6", 120, ("drain", "undrain", "set-policies", "kill-controller")),
}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_invariants_hold_in_every_schedule() -> None:
    results = (run(short(seed)) for seed in range(SCHEDULES))
    found = [f"{r.scenario.command}: {r.violations[0]}" for r in results if r.violations]
    assert not found, "\n".join(found)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_found_by_the_invariant_that_it_breaks(plant: Plant) -> None:
    invariant, seeds, kinds = PLANTS[plant]
    results = (run(short(seed, plant, kinds)) for seed in range(seeds))
    assert any(r.violations and r.violations[0].invariant == invariant for r in results)


def test_every_plant_but_none_is_tested() -> None:
    assert set(PLANTS) == set(Plant) - {Plant.NONE}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_fault_alone_is_survived_and_told(kind: str) -> None:
    result = run(Scenario(seed=5, ranks=4, nodes=2, faults=3, kinds=(kind,)))
    assert not result.violations, "\n".join(map(str, result.violations))
    assert sum(f"fault: {kind} " in line for line in result.log) == 3


def test_a_group_created_anew_under_faults_has_nothing_of_the_old_one() -> None:
    """Its epochs and incarnations go on: the checker knows both groups as one, and its history."""
    kinds = ("recreate-group", "kill-daemon", "kill-controller", "cut-node")
    anew = 0
    for seed in range(15):
        result = run(short(seed, kinds=kinds))
        assert not result.violations, "\n".join(map(str, (result.scenario, *result.violations)))
        anew += sum("is created anew" in line for line in result.log)
    assert anew >= 8


@pytest.mark.parametrize("seed", [22, 56, 73])
def test_members_that_die_while_their_group_forms_anew_leave_nobody_waiting(seed: int) -> None:
    """Two views are open, both have somebody dead, and who is left has run neither."""
    kinds = ("bad-staging", "lose-node", "kill-rank")
    result = run(Scenario(seed=seed, faults=12, kinds=kinds))
    assert not result.violations, "\n".join(map(str, result.violations))


def test_a_rank_in_warmup_is_not_expelled_for_standing_still() -> None:
    for seed in range(10):
        result = run(Scenario(seed=seed, ranks=4, nodes=2, faults=4, kinds=("warm-rank",)))
        assert not result.violations
        assert not any("rank.fenced" in line for line in result.log)
        if result.simulated_s > 6.0:  # a rank stood still for longer than hang_timeout
            return
    raise AssertionError("no rank stood still")


def test_a_broken_link_costs_one_of_its_ends() -> None:
    results = [
        run(Scenario(seed=seed, ranks=4, nodes=2, faults=3, kinds=("break-link",)))
        for seed in range(40)
    ]
    assert not any(result.violations for result in results)
    fenced = [[line for line in r.log if "rank.fenced" in line] for r in results]
    assert any("a broken link" in line for lines in fenced for line in lines)
    for lines in fenced:
        times = [line.split(" s:")[0] for line in lines if "a broken link" in line]
        assert len(times) == len(set(times)), "never both ends"


def test_a_seed_gives_the_same_trace_every_time() -> None:
    seeds = range(12)
    digests = [run(short(seed)).digest for seed in seeds]
    assert [run(short(seed)).digest for seed in seeds] == digests
    assert len(set(digests)) == len(digests)


def test_a_failing_schedule_is_shrunk_and_replays() -> None:
    scenarios = (short(seed, Plant.NO_DEAD_WORD) for seed in range(20))
    first = next(s for s in scenarios if run(s).violations)
    small = shrink(first)
    assert small.violations
    assert small.scenario.only is not None
    assert len(small.scenario.only) <= 2
    assert run(small.scenario).digest == small.digest
    arguments = small.scenario.command.split()[2:]
    answer = CliRunner().invoke(command, [*arguments, "--output", "json"])
    assert answer.exit_code == 1, answer.output
    assert json.loads(answer.stdout)["digests"] == [small.digest]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_thousand_ranks() -> None:
    result = run(Scenario(seed=1, ranks=1_000, nodes=125, faults=4))
    assert not result.violations, "\n".join(map(str, result.violations))
    assert result.steps >= 2_000


def test_the_command_sums_up() -> None:
    answer = CliRunner().invoke(command, ["--schedules", "3"])
    assert answer.exit_code == 0, answer.output
    assert answer.output.startswith("3 schedules")
    answer = CliRunner().invoke(command, ["--ranks", "2", "--nodes", "3"])
    assert "use fewer nodes" in answer.output
    answer = CliRunner().invoke(command, ["--kinds", "earthquake"])
    assert "there is no fault 'earthquake'; known are kill-rank" in answer.output


def test_a_run_that_is_interrupted_sums_up_what_was_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(scenarios: Iterator[Scenario]) -> Iterator[Result]:
        yield from (run(scenario) for scenario in islice(scenarios, 2))
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # and back again
    monkeypatch.setattr(sim, "run_many", interrupted)
    answer = CliRunner().invoke(command, ["--schedules", "9"])
    assert answer.exit_code == 130, answer.output
    assert answer.stdout.startswith("2 schedules, ")
    assert answer.stdout.rstrip().endswith("0 broken")
    assert "interrupted" in answer.stderr


# ---- the loop


def test_time_jumps_and_a_stopped_process_gets_its_calls_later() -> None:
    loop = VirtualLoop()
    process = Process("p")
    seen: list[tuple[str, float]] = []

    async def works() -> None:
        for _ in range(3):
            await asyncio.sleep(1.0)
            seen.append(("turn", round(loop.time(), 3)))

    async def main() -> None:
        task = loop.create_task(works(), context=process.context)
        await asyncio.sleep(1.5)
        loop.stop_process(process)
        await asyncio.sleep(3_600.0)
        seen.append(("continue", round(loop.time(), 3)))
        loop.continue_process(process)
        await task

    loop.run_until_complete(main())
    assert seen == [
        ("turn", 1.0),
        ("continue", 3601.5),
        ("turn", 3601.5),
        ("turn", 3602.5),
    ]
    with pytest.raises(UsageError, match="nobody will do"):
        loop.run_until_complete(loop.create_future())
    loop.close()


def test_faults_are_drawn_from_the_seed_alone() -> None:
    assert short(7) == short(7)
    drawn = short(7).drawn()
    assert drawn == short(7).drawn()
    times = [fault.at_ms for faults in drawn for fault in faults]
    assert times == sorted(times)
    none = Scenario(seed=7, only=())
    assert list(islice((len(faults) for faults in none.drawn()), 1)) == [0]
