"""Rebalances over gRPC: the real controller, fake nodes that report loads and meet at barriers."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from numpy.typing import NDArray

from elasticep.balance import RebalancePolicy
from elasticep.cli.main import cli
from elasticep.control import operating, records
from elasticep.control.controller import Controller
from elasticep.control.placement import EMPTY, Placement
from elasticep.control.planfile import export_json
from elasticep.control.planning import PlanJob, Planned
from elasticep.errors import ConfigError, PlacementError, UnknownGroup, UsageError
from elasticep.group import GroupConfig
from elasticep.proto import controller_pb2 as pb
from elasticep.testing.controllers import (
    CALL_S,
    Bench,
    Run,
    adopted,
    client,
    cluster,
    create,
    formed,
    group_config,
    refused,
    until,
)
from elasticep.testing.nodes import FakeNodes

POLICY = RebalancePolicy(settle_ms=100, min_interval_ms=200, window_ms=100)
HAND = RebalancePolicy(automatic=False, settle_ms=100, window_ms=100)
EXPERTS = 8


def config(policy: RebalancePolicy, **changes: object) -> GroupConfig:
    return group_config(flap_limit=0, experts=EXPERTS, rebalance=policy, **changes)  # type: ignore[arg-type]


class Engines:
    """All ranks count the same tokens, and meet whenever there is a new view."""

    def __init__(self, nodes: FakeNodes, controller: Controller) -> None:
        self.nodes = nodes
        self.controller = controller
        self.counters = np.zeros((2, EXPERTS), np.int64)

    def count(self, tokens: NDArray[np.int64]) -> None:
        self.counters += tokens
        for node in self.nodes.nodes.values():
            for rank, seat in node.seats.items():
                report = pb.LoadReport(
                    group="g",
                    rank=rank,
                    incarnation=seat.incarnation,
                    memory=9,
                    counters=self.counters.astype("<i8").tobytes(),
                )
                node.send(pb.NodeMessage(load=report))

    async def meet(self) -> None:
        epoch = 1
        while True:
            await self.nodes.until(lambda seen=epoch: self.nodes.epoch > seen, wait_s=150)  # type: ignore[misc]
            epoch = await self.nodes.meet()

    @property
    def placement(self) -> Placement:
        assert self.controller.term is not None
        view = self.controller.term.cluster.groups["g"].view
        assert view is not None
        return view.placement

    def hot(self) -> NDArray[np.int64]:
        """Loads of which the present placement puts most on rank 0."""
        tokens = np.full((2, EXPERTS), 100, np.int64)
        for layer in range(2):
            held = self.placement.slot_expert[layer, 0]
            tokens[layer, held[held != EMPTY]] = 5_000
        return tokens


@asynccontextmanager
async def serving(bench: Bench, group: GroupConfig) -> AsyncIterator[tuple[Controller, Engines]]:
    async with formed(bench, group) as (controller, nodes):
        engines = Engines(nodes, controller)
        meeting = asyncio.ensure_future(engines.meet())
        engines.count(np.zeros((2, EXPERTS), np.int64))
        try:
            yield controller, engines
        finally:
            meeting.cancel()
            with suppress(asyncio.CancelledError):
                await meeting


async def ask(controller: Controller, action: int = 0, **fields: object) -> pb.RebalanceResponse:
    async with client(controller.address) as stub:
        request = pb.RebalanceRequest(group="g", action=action, **fields)  # type: ignore[arg-type]
        return await stub.Rebalance(request, timeout=CALL_S)


async def refusal(controller: Controller, action: int, **fields: object) -> Exception:
    return await refused(ask(controller, action, **fields))


def command(controller: Controller, *arguments: str) -> Result:
    flags = ["--controllers", controller.address, "--timeout", "60"]
    return CliRunner().invoke(cli, ["rebalance", "g", *arguments, *flags])


def test_loads_of_nodes_are_seen_and_experts_moved_by_them(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        async with serving(bench, config(POLICY)) as (controller, engines):
            tokens = engines.hot()
            engines.count(tokens)
            await until(lambda: counted(controller) == 4 * int(tokens.sum()), "all are counted")
            await until(lambda: completed(controller) > 0, "a rebalance is done")
            (group,) = (await cluster(controller.address)).groups
            assert group.load.known
            assert group.load.tokens == 4 * int(tokens.sum())
            assert group.rebalance.last.done
            assert group.rebalance.last.imbalance_after < group.rebalance.last.imbalance_before
            assert group.load.imbalance < 1.1
            assert len(group.load.layers) == 2

    run(scenario)


def counted(controller: Controller) -> int:
    assert controller.term is not None
    return controller.term.cluster.background["g"].loads.counted


def completed(controller: Controller) -> int:
    term = controller.term
    return term.cluster.background["g"].rebalancer.completed if term is not None else 0


def test_a_dry_run_shows_the_plan_and_changes_nothing(run_memory: Run, tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        async with serving(bench, config(HAND)) as (controller, engines):
            engines.count(engines.hot())
            await until(lambda: counted(controller) > 0, "loads are known")
            answer = await ask(controller, pb.REBALANCE_ACTION_DRY_RUN)
            assert not answer.accepted
            plan = answer.plan
            assert plan.imbalance_after < plan.imbalance_before
            assert plan.stages >= 1
            assert len(plan.layers) == 2
            assert plan.reason
            file = tmp_path / "plan.json"
            for form in ("elasticep", "sglang"):
                told = await asyncio.to_thread(
                    command, controller, "--export", str(file), "--form", form
                )
                assert told.exit_code == 0, told.output
                assert json.loads(file.read_text())
            told = await asyncio.to_thread(command, controller, "--dry-run")
            assert "nothing was done" in told.output
            assert "imbalance" in told.output
            told = await asyncio.to_thread(command, controller, "--dry-run", "--output", "json")
            assert json.loads(told.stdout)["plan"]["stages"] == plan.stages
            assert engines.nodes.epoch == 1

    run_memory(scenario)


def test_force_is_carried_out_and_can_be_watched(run_memory: Run) -> None:
    async def scenario(bench: Bench) -> None:
        async with serving(bench, config(HAND)) as (controller, engines):
            engines.count(engines.hot())
            await until(lambda: counted(controller) > 0, "loads are known")
            told = await asyncio.to_thread(command, controller, "--force", "--watch")
            assert told.exit_code == 0, told.output
            assert "it is carried out" in told.output
            last = told.output.splitlines()[-1]
            assert last.startswith("idle; ")
            assert "the last one was done" in last
            assert "asked for by an operator" in last
            assert engines.nodes.epoch > 1
            answer = await ask(controller)
            assert not answer.accepted
            assert "balanced" in answer.reason or "nothing better" in answer.reason

    run_memory(scenario)


def test_a_pause_survives_the_leader(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        first = await bench.leader("c0")
        standby = await bench.controller("c1")
        async with formed(bench, config(POLICY), first, standby) as (_, nodes):
            told = await asyncio.to_thread(command, first, "--pause", "--reason", "an audit")
            assert told.output.endswith("paused: an audit\n")
            await bench.stop(first)
            await until(lambda: standby.term is not None, "the standby leads")
            (group,) = (await cluster(standby.address)).groups
            assert group.rebalance.paused == "an audit"
            error = await refusal(standby, pb.REBALANCE_ACTION_FORCE)
            assert isinstance(error, UsageError)
            assert "paused (an audit)" in str(error)
            told = await asyncio.to_thread(command, standby, "--resume")
            assert told.output.endswith("resumed\n")
            (group,) = (await cluster(standby.address)).groups
            assert group.rebalance.paused == ""
            assert nodes.epoch == 1

    run(scenario)


def test_settings_are_changed_while_the_group_runs_and_outlive_the_leader(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        first = await bench.leader("c0")
        standby = await bench.controller("c1")
        async with formed(bench, config(HAND), first, standby):
            change = ("--set", "automatic=true", "--set", "target=1.25")
            told = await asyncio.to_thread(command, first, *change)
            lines = dict(line.split() for line in told.output.splitlines())
            assert lines["rebalance.automatic"] == "true"
            assert lines["rebalance.target"] == "1.25"
            assert lines["rebalance.settle_ms"] == "100", "what is not named stays"
            await bench.stop(first)
            await until(lambda: standby.term is not None, "the standby leads")
            told = await asyncio.to_thread(
                command, standby, "--set", "max_moves=3", "--output", "json"
            )
            settings = RebalancePolicy.from_dict(json.loads(told.output))
            assert settings == replace(HAND, automatic=True, target=1.25, max_moves=3)
            (group,) = (await cluster(standby.address)).groups
            assert RebalancePolicy.from_proto(group.policies.rebalance) == settings
            assert RebalancePolicy.from_proto(group.config.rebalance) == HAND, "as it was created"
            for wrong, why in (
                (("--set", "target=0.5"), "rebalance.target is 0.5; it must be a number from 1.0"),
                (("--set", "goal=2"), "there is no policy 'rebalance.goal'; known are"),
                (("--set", "target"), "write --set name=value"),
                (("--set", "target=1.5", "--set", "target=2"), "target both '1.5' and '2'"),
                (("--set", "target=2", "--pause"), "--set and --pause do not go together"),
            ):
                told = await asyncio.to_thread(command, standby, *wrong)
                assert isinstance(told.exception, ConfigError)
                assert why in str(told.exception)
            (group,) = (await cluster(standby.address)).groups
            assert RebalancePolicy.from_proto(group.policies.rebalance) == settings

    run(scenario)


def swapped(placement: Placement) -> Placement:
    """What two ranks hold in the first layer, exchanged."""
    expert, weight = placement.slot_expert.copy(), placement.slot_weight.copy()
    expert[0, [0, 2]], weight[0, [0, 2]] = expert[0, [2, 0]], weight[0, [2, 0]]
    return Placement(experts=placement.experts, slot_expert=expert, slot_weight=weight)


def test_an_imported_plan_is_carried_out(run_memory: Run, tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        async with serving(bench, config(HAND, slots=5)) as (controller, engines):
            wanted = swapped(engines.placement)
            file = tmp_path / "plan.json"
            file.write_text(export_json(wanted, range(4)))
            told = await asyncio.to_thread(command, controller, "--import", str(file), "--watch")
            assert told.exit_code == 0, told.output
            assert engines.placement == wanted
            assert adopted(controller) == engines.nodes.epoch
            assert "it is kept" in told.output
            (group,) = (await cluster(controller.address)).groups
            assert group.rebalance.held
            await ask(controller, pb.REBALANCE_ACTION_RESUME)
            answer = await ask(controller, pb.REBALANCE_ACTION_DRY_RUN)
            assert not answer.status.held
            # That of the largest group takes up to 31 MB.
            padded = file.read_text() + " " * (31 << 20)
            again = await ask(controller, pb.REBALANCE_ACTION_IMPORT, plan_json=padded)
            assert answer.status.asked == ""
            assert again.accepted
            assert again.status.held, "what is in place already is kept, too"

    run_memory(scenario)


def test_others_are_answered_while_a_large_plan_is_read(
    run_memory: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, answered, read = threading.Event(), threading.Event(), operating.read_plan

    def slowly(*given: Any) -> Placement:
        begun.set()
        assert answered.wait(60), "nobody was answered meanwhile"
        return read(*given)

    monkeypatch.setattr(operating, "read_plan", slowly)

    async def scenario(bench: Bench) -> None:
        async with serving(bench, config(HAND)) as (controller, engines):
            text = export_json(engines.placement, range(4))
            asking = asyncio.ensure_future(
                ask(controller, pb.REBALANCE_ACTION_IMPORT, plan_json=text)
            )
            await until(begun.is_set, "it is read")
            await cluster(controller.address)
            answered.set()
            assert (await asking).accepted

    run_memory(scenario)


def test_a_map_of_another_engine_can_be_imported(run_memory: Run) -> None:
    async def scenario(bench: Bench) -> None:
        async with serving(bench, config(HAND, slots=4)) as (controller, engines):
            rows = [[(3 * slot + layer) % EXPERTS for slot in range(8)] for layer in range(2)]
            text = json.dumps({"physical_to_logical_map": rows})
            answer = await ask(controller, pb.REBALANCE_ACTION_IMPORT, plan_json=text)
            assert answer.accepted
            await until(lambda: completed(controller) == 1, "it is done")
            table = engines.placement.slot_expert
            assert table[:, :, :2].reshape(2, 8).tolist() == rows
            assert (table[:, :, 2:] == EMPTY).all()

    run_memory(scenario)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "not JSON"),
        ("[]", "not integers"),
        (json.dumps([[0, 1, 2, 3, 4, 5, 6, 9]] * 2), "names expert 9; the group has 0 to 7"),
        (json.dumps([[0, 1, 2, 3, 4, 5, 6, 6]] * 2), "two copies of an expert on one rank"),
        (json.dumps([[0, 1, 2, 3, 4, 5, 6, 0]] * 2), "7"),  # lost
        (json.dumps([list(range(8)) * 3] * 2), "6 slots on 4 ranks; the group has 4"),
        (json.dumps([list(range(8))] * 3), "3 layers, the group has 2"),
    ],
)
def test_case_18_an_import_is_checked_before_anything_is_written(
    run_memory: Run, text: str, what: str
) -> None:
    async def scenario(bench: Bench) -> None:
        async with serving(bench, config(HAND)) as (controller, engines):
            error = await refusal(controller, pb.REBALANCE_ACTION_IMPORT, plan_json=text)
            assert type(error) is PlacementError
            assert what in str(error)
            (group,) = (await cluster(controller.address)).groups
            assert group.rebalance.asked == ""
            stored = (await bench.store().list(records.PREFIX)).items
            assert not any(item.key.endswith("/rebalance") for item in stored)
            assert engines.nodes.epoch == 1

    run_memory(scenario)


def test_requests_that_make_no_sense_are_refused(run_memory: Run) -> None:
    async def scenario(bench: Bench) -> None:
        leader = await bench.leader()
        unknown = await refusal(leader, pb.REBALANCE_ACTION_FORCE)
        assert isinstance(unknown, UnknownGroup)
        await create(leader.address, config(HAND))
        assert isinstance(await refusal(leader, pb.REBALANCE_ACTION_FORCE), UsageError)
        for action, fields in (
            (77, {}),
            (pb.REBALANCE_ACTION_IMPORT, {}),
            (pb.REBALANCE_ACTION_FORCE, {"plan_json": "[]"}),
            (pb.REBALANCE_ACTION_FORCE, {"for_engines": True}),
        ):
            assert isinstance(await refusal(leader, action, **fields), ConfigError)
        told = await asyncio.to_thread(command, leader, "--force", "--pause")
        assert isinstance(told.exception, ConfigError)
        assert "--force, --pause do not go together" in str(told.exception)

    run_memory(scenario)


def test_metrics_tell_balance_and_the_age_of_the_background(run_memory: Run) -> None:
    async def scenario(bench: Bench) -> None:
        async with serving(bench, config(POLICY)) as (controller, engines):
            engines.count(engines.hot())
            await until(lambda: completed(controller) > 0, "a rebalance is done")
            registry = controller.metrics.registry

            def value(name: str, **labels: str) -> float:
                found = registry.get_sample_value(
                    f"elasticep_controller_{name}", {"group": "g"} | labels
                )
                return -1.0 if found is None else found

            assert value("load_tokens_total") == counted(controller)
            assert value("rebalances_total", result="done") >= 1
            assert value("rebalance_moves_total") >= 0
            assert 0 <= value("rebalance_age_seconds") < 60
            await until(lambda: 1.0 <= value("imbalance") < 1.1, "the gauge follows")

    run_memory(scenario)


def test_case_16_plans_that_hang_cost_one_thread_and_end_with_it(
    run_memory: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are given up and made anew; what is given up before it began is never made."""
    go_on = threading.Event()
    real, began = PlanJob.run, []

    def hangs(job: PlanJob) -> Planned:
        began.append(job)
        go_on.wait(60)
        return real(job)

    monkeypatch.setattr(PlanJob, "run", hangs)
    monkeypatch.setattr(PlanJob, "small", property(lambda _: False))
    policy = replace(POLICY, stuck_ms=1_000)

    async def scenario(bench: Bench) -> None:
        async with serving(bench, config(policy)) as (controller, engines):
            engines.count(engines.hot())
            assert controller.term is not None
            rebalancer = controller.term.cluster.background["g"].rebalancer
            try:
                await until(lambda: rebalancer.stuck == 2, "two plans were given up")
                assert len(began) == 1
                threads = [t for t in threading.enumerate() if t.name.startswith("plan")]
                assert len(threads) == 1
            finally:
                go_on.set()
            await until(lambda: completed(controller) > 0, "the next one is carried out")

    run_memory(scenario)
