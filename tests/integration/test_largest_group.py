"""The largest group that there may be: its plans and its status go through every call."""

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from elasticep.balance import RebalancePolicy
from elasticep.cli.main import cli
from elasticep.control.planfile import export_json
from elasticep.control.records import MAX_SLOTS
from elasticep.geometry import GroupGeometry
from elasticep.group import GroupConfig, Timeouts
from elasticep.placement import Placement, round_robin
from elasticep.proto import controller_pb2 as pb
from elasticep.rpc import MAX_PLAN_BYTES, MAX_REQUEST_BYTES
from elasticep.spec import ExchangeSpec
from elasticep.testing.controllers import Bench, Run, adopted, client, create, until
from elasticep.testing.nodes import FakeNodes

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
RANKS, CALL_S = 128, 120
GEOMETRY = GroupGeometry(
    layers=61, experts=384, topk=8, hidden=7168, slots_per_rank=67, max_ranks=RANKS
)
CONFIG = GroupConfig(
    name="g",
    geometry=GEOMETRY,
    exchanges=(("decode", ExchangeSpec.preset("ROUTED")),),
    initial_ranks=RANKS,
    spare_copies=2,
    timeouts=Timeouts(node_timeout_ms=60_000),
    rebalance=RebalancePolicy(automatic=False, settle_ms=100),
)
NODES = {f"node-{n:02}": range(16 * n, 16 * n + 16) for n in range(RANKS // 16)}


def full() -> Placement:
    """Every slot is filled, as many copies as there is room for."""
    names = {rank: name for name, ranks in NODES.items() for rank in ranks}
    return round_robin(GEOMETRY, range(RANKS), spare=RANKS, nodes=names)


def command(address: str, *arguments: str) -> str:
    flags = ["--controllers", address, "--timeout", str(CALL_S)]
    told = CliRunner().invoke(cli, [*arguments, *flags])
    assert told.exit_code == 0, (told.output, told.exception)
    return told.stdout


def test_its_plans_are_imported_and_exported_and_its_status_is_told(
    run_memory: Run, tmp_path: Path
) -> None:
    wanted = full()
    assert wanted.slot_expert.size > MAX_SLOTS * 0.99
    text = export_json(wanted, range(RANKS))
    assert len(text) > MAX_REQUEST_BYTES, "more than any other call carries"
    assert len(json.dumps(json.loads(text), indent=2)) < MAX_PLAN_BYTES

    async def scenario(bench: Bench) -> None:
        leader = await bench.leader()
        address = leader.address
        await create(address, CONFIG)
        async with FakeNodes([address], NODES, "g") as nodes:
            await nodes.until(lambda: nodes.epoch == 1, "the first view", wait_s=CALL_S)
            await nodes.meet()
            await until(lambda: adopted(leader) == 1, "epoch 1 is adopted")
            file, exported = tmp_path / "plan.json", tmp_path / "exported.json"
            file.write_text(text)
            await asyncio.to_thread(command, address, "rebalance", "g", "--import", str(file))
            await nodes.until(lambda: nodes.epoch > 1, "a view by the plan", wait_s=CALL_S)
            told = await asyncio.to_thread(command, address, "status", "g", "--output", "json")
            (group,) = json.loads(told)["groups"]
            assert len(group["ranks"]) == RANKS
            await asyncio.to_thread(command, address, "rebalance", "g", "--export", str(exported))
            assert exported.stat().st_size > MAX_REQUEST_BYTES // 2
            async with client(address) as stub:
                watched = stub.WatchView(pb.WatchViewRequest(group="g"), timeout=CALL_S)
                view = await anext(aiter(watched))
                assert view.ByteSize() > 4 * 2 * GEOMETRY.layers * RANKS * 67
                watched.cancel()

    run_memory(scenario)
