"""`SetPolicy` and `elasticep policy`: over gRPC, on the memory store and on a real etcd."""

import asyncio
import json
import os
import sys

from elasticep.errors import ConfigError, NotLeader, UnknownGroup
from elasticep.group import LostExperts
from elasticep.policies import Policies, change_from_text
from elasticep.proto import controller_pb2
from elasticep.testing.controllers import (
    CALL_S,
    Bench,
    Run,
    client,
    formed,
    group_config,
    refused,
    until,
)


def request(group: str = "g", **settings: str) -> controller_pb2.SetPolicyRequest:
    return controller_pb2.SetPolicyRequest(group=group, policies=change_from_text(settings))


def test_an_acknowledged_change_survives_the_leader_and_reaches_every_node(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        first = await bench.leader("c0")
        second = await bench.controller("c1")
        async with formed(bench, group_config(flap_limit=0), first, second) as (_, nodes):
            async with client(first.address) as stub:
                change = request(lost_experts="serve", renormalise="true", min_ranks="2")
                answer = await stub.SetPolicy(change, timeout=CALL_S)
            policies = Policies.from_proto(answer.policies)
            assert policies.lost_experts is LostExperts.SERVE
            assert policies.min_ranks == 2

            def told(node: str) -> Policies | None:
                heard = [
                    order.policies
                    for order in nodes.nodes[node].orders
                    if order.WhichOneof("body") == "policies"
                ]
                return Policies.from_proto(heard[-1].policies) if heard else None

            for node in "ab":
                await until(lambda n=node: told(n) == policies, f"node {node} hears of it")
            await bench.stop(first)  # without a word to anybody
            await until(lambda: second.term is not None, "the standby leads")
            async with client(second.address) as stub:
                asked = controller_pb2.GetClusterRequest(group="g")
                (group,) = (await stub.GetCluster(asked, timeout=CALL_S)).groups
            assert Policies.from_proto(group.policies) == policies
            assert Policies.of(group_config(flap_limit=0)) != policies
            # Engines that bring the config of the first day still agree with the group.
            async with client(second.address) as stub:
                config = group_config(flap_limit=0).to_proto()
                again = controller_pb2.CreateGroupRequest(config=config)
                assert not (await stub.CreateGroup(again, timeout=CALL_S)).created

    run(scenario)


def test_who_asks_for_the_same_again_waits_for_the_store_too(run_memory: Run) -> None:
    """The first call may have been given up while its write was on its way."""

    async def scenario(bench: Bench) -> None:
        leader = await bench.leader("c0")
        async with formed(bench, group_config(), leader), client(leader.address) as stub:
            assert leader.term is not None
            membership = leader.term.cluster.groups["g"]
            bench.memory.set_available(False)
            calls = [stub.SetPolicy(request(flap_limit="9"), timeout=CALL_S)]
            await until(lambda: membership.policies.flap_limit == 9, "it is decided")
            calls.append(stub.SetPolicy(request(flap_limit="9"), timeout=CALL_S))
            answers = [asyncio.ensure_future(call) for call in calls]
            await stub.GetCluster(controller_pb2.GetClusterRequest(), timeout=CALL_S)
            assert not any(answer.done() for answer in answers), "acknowledged before it is stored"
            bench.memory.set_available(True)
            for answer in await asyncio.gather(*answers):
                assert answer.policies.flap_limit == 9

    run_memory(scenario)


def test_what_cannot_be_is_refused_and_changes_nothing(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        leader = await bench.leader("c0")
        standby = await bench.controller("c1")
        async with formed(bench, group_config(), leader):
            async with client(leader.address) as stub:
                for change, error in (
                    (request(min_ranks="9"), ConfigError),
                    (request("h", min_ranks="1"), UnknownGroup),
                ):
                    assert isinstance(await refused(stub.SetPolicy(change, timeout=CALL_S)), error)
                number = controller_pb2.SetPolicyRequest(group="g")
                number.policies.lost_experts = 9  # type: ignore[assignment]
                assert isinstance(
                    await refused(stub.SetPolicy(number, timeout=CALL_S)), ConfigError
                )
            assert leader.term is not None
            held = leader.term.cluster.groups["g"].policies
            assert held == Policies.of(group_config())
            async with client(standby.address) as stub:
                answer = await refused(stub.SetPolicy(request(min_ranks="1"), timeout=CALL_S))
            assert isinstance(answer, NotLeader)

    run(scenario)


def test_the_command_shows_and_changes(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        async with formed(bench, group_config()) as (leader, _):

            async def ask(*arguments: str) -> tuple[int, str]:
                command = [sys.executable, "-m", "elasticep.cli.main", "policy", "g", *arguments]
                process = await asyncio.create_subprocess_exec(
                    *command,
                    env={**os.environ, "ELASTICEP_CONTROLLERS": leader.address},
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                )
                output, errors = await process.communicate()
                code = process.returncode or 0
                return code, (errors if code else output).decode()

            code, text = await ask()
            assert code == 0, text
            assert ["lost_experts", "refuse"] in [line.split() for line in text.splitlines()]
            change = ["--set", "lost_experts=serve", "--set", "flap_window_ms=5000"]
            code, text = await ask(*change, "--output", "json")
            assert code == 0, text
            told = json.loads(text)
            assert (told["lost_experts"], told["flap_window_ms"]) == ("serve", 5000)
            code, text = await ask("--output", "json")
            assert code == 0, text
            assert json.loads(text) == told
            code, text = await ask("--set", "min_ranks")
            assert code != 0
            assert "write --set name=value" in text

    run(scenario)
