"""What operators ask of a controller; fake nodes, both stores."""

import asyncio

import grpc.aio
import pytest
from click.testing import CliRunner, Result

from elasticep.cli.main import cli
from elasticep.control import cluster as cluster_module
from elasticep.control import records
from elasticep.errors import (
    ConfigError,
    GroupMismatch,
    UnknownGroup,
    UnknownRank,
    UsageError,
)
from elasticep.group import Timeouts
from elasticep.proto import controller_pb2
from elasticep.testing.controllers import (
    CALL_S,
    TWO_NODES,
    Bench,
    Run,
    client,
    cluster,
    create,
    formed,
    group_config,
    orders,
    refused,
    until,
)
from elasticep.testing.nodes import FakeNodes


def test_drain_takes_ranks_out_and_undrain_lets_them_back(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        async with formed(bench) as (controller, nodes), client(controller.address) as stub:
            request = controller_pb2.DrainRequest(group="g", ranks=[1], reason="a new card")
            drained = await stub.Drain(request, timeout=CALL_S)
            assert drained.epoch == 2
            await nodes.until(lambda: nodes.epoch == 2)
            view = nodes.latest
            assert view is not None
            assert nodes.members == [0, 2, 3]
            assert list(view.expelled) == [], "it serves until the others leave it behind"
            assert "a new card" in view.reason
            assert not orders(nodes, 1, "fence")
            await nodes.meet()
            await nodes.until(lambda: bool(orders(nodes, 1, "fence")), "it is told to go")
            rank = (await cluster(controller.address)).groups[0].ranks[1]
            assert rank.reason == "drained: a new card"
            await until(
                lambda: (
                    controller.term is not None
                    and controller.term.cluster.groups["g"].seats[1].phase == "gone"
                ),
                "it is gone",
            )
            assert nodes.of(1).seats[1].incarnation == 1, "no new incarnation while drained"

            await stub.Undrain(controller_pb2.UndrainRequest(group="g", ranks=[1]), timeout=CALL_S)
            await nodes.until(lambda: nodes.members == [0, 1, 2, 3])

    run(scenario)


def test_a_drain_survives_a_change_of_the_leader(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        first = await bench.leader("first")
        async with formed(bench, None, first) as (_, nodes):
            async with client(first.address) as stub:
                await stub.Drain(controller_pb2.DrainRequest(group="g", ranks=[1]), timeout=CALL_S)
            await bench.stop(first)
            second = await bench.leader("second")
            for node in nodes.nodes.values():
                node.addresses[:] = [second.address]
            await nodes.until(lambda: all(n.connected for n in nodes.nodes.values()))
            await nodes.until(lambda: nodes.epoch == 2)
            await nodes.meet()
            await nodes.until(lambda: bool(orders(nodes, 1, "fence")), "it is told to go")
            await until(
                lambda: (
                    second.term is not None
                    and second.term.cluster.groups["g"].seats[1].phase == "gone"
                ),
                "it is gone",
            )
            assert nodes.of(1).seats[1].incarnation == 1

    run(scenario)


def test_a_replacement_takes_the_seats_of_a_node_that_is_off(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        config = group_config(flap_limit=0, timeouts=Timeouts(node_timeout_ms=5_000))
        async with formed(bench, config) as (controller, nodes):

            async def command(*arguments: str) -> Result:
                flags = ["--controllers", controller.address, "--timeout", "60"]
                said = ["node", "off", *arguments, *flags]
                return await asyncio.to_thread(CliRunner().invoke, cli, said)

            told = await command("b")
            assert isinstance(told.exception, UsageError)
            assert "node 'b' is connected, so its processes may live" in str(told.exception)
            await nodes.nodes["b"].stop()
            await nodes.until(lambda: nodes.members == [0, 1], "the others go on")
            spare = FakeNodes([controller.address], {"c": (2, 3)}, "g")
            async with spare:
                await spare.until(lambda: spare.nodes["c"].connected)
                await nodes.meet()
                membership = controller.leading().cluster.groups["g"]
                assert [membership.seats[rank].node for rank in (2, 3)] == ["b", "b"]
                told = await command("b", "--reason", "it burned")
                assert told.output.endswith(
                    "group g: ranks 2-3 may be given to other nodes\nnode b is forgotten\n"
                )
                await spare.until(lambda: all(orders(spare, rank, "grant") for rank in (2, 3)))
                answer = await cluster(controller.address)
                assert [node.endpoint.node for node in answer.nodes] == ["a", "c"]
                seats = {rank.rank: rank for rank in answer.groups[0].ranks}
                assert [(seats[r].node, seats[r].incarnation) for r in (2, 3)] == [("c", 2)] * 2
            store = bench.store()
            keys = [item.key for item in (await store.list(f"{records.PREFIX}nodes/")).items]
            await store.close()
            assert [key.rpartition("/")[2] for key in keys] == ["a", "c"], "no leader knows it"

    run(scenario)


def test_a_node_that_was_drained_and_stopped_is_forgotten(
    run_memory: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a minute, and a short one here; one whose ranks may live stays, and says so."""
    monkeypatch.setattr(cluster_module, "FORGET_MS", 100)

    async def scenario(bench: Bench) -> None:
        config = group_config(flap_limit=0, timeouts=Timeouts(node_timeout_ms=5_000))
        async with formed(bench, config) as (controller, nodes):
            async with client(controller.address) as stub:
                request = controller_pb2.DrainRequest(group="g", ranks=[2, 3])
                await stub.Drain(request, timeout=CALL_S)
            await nodes.until(lambda: nodes.epoch == 2)
            await nodes.meet()
            seats = controller.leading().cluster.groups["g"].seats
            await nodes.until(lambda: all(seats[rank].phase == "gone" for rank in (2, 3)))
            await nodes.nodes["b"].stop()
            await nodes.until(lambda: list(controller.leading().cluster.nodes) == ["a"])
            await nodes.nodes["a"].stop()
            flags = ["--controllers", controller.address, "--timeout", "60"]
            said = ""
            while "keeps ranks of g 0, 1 (elasticep node off a)" not in said:
                told = await asyncio.to_thread(CliRunner().invoke, cli, ["status", *flags])
                said = told.output
                assert told.exit_code == 0, said
            store = bench.store()
            keys = [item.key for item in (await store.list(f"{records.PREFIX}nodes/")).items]
            await store.close()
            assert [key.rpartition("/")[2] for key in keys] == ["a"]

    run_memory(scenario)


def test_what_cannot_be_drained_is_refused_with_the_reason(run_memory: Run) -> None:
    async def scenario(bench: Bench) -> None:
        config = group_config(experts=12, min_ranks=2, flap_limit=0)
        async with formed(bench, config) as (controller, nodes), client(controller.address) as stub:
            for group, ranks, kind, text in (
                ("none", [0], UnknownGroup, "known are: g"),
                ("g", [9], UnknownRank, "ranks 0 to 3"),
                ("g", [], ConfigError, "0 ranks are named"),
                ("g", [0, 1, 2], UsageError, "min_ranks is 2"),
            ):
                request = controller_pb2.DrainRequest(group=group, ranks=ranks)
                error = await refused(stub.Drain(request, timeout=CALL_S))
                assert isinstance(error, kind), error
                assert text in str(error)
            request = controller_pb2.DrainRequest(group="g", ranks=[0, 1])
            with pytest.raises(grpc.aio.AioRpcError, match="8 slots for 12 experts"):
                await stub.Drain(request, timeout=CALL_S)
            assert nodes.epoch == 1

    run_memory(scenario)


def test_a_group_exists_once_and_says_in_what_another_config_differs(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        leader = await bench.leader()
        assert await create(leader.address, group_config()) is True
        assert await create(leader.address, group_config()) is False
        async with client(leader.address) as stub:
            other = group_config(experts=4, spare_copies=2)
            request = controller_pb2.CreateGroupRequest(config=other.to_proto())
            error = await refused(stub.CreateGroup(request, timeout=CALL_S))
        assert isinstance(error, GroupMismatch)
        assert "geometry.experts is 8 in the group and 4 here" in str(error)
        assert "spare_copies is 1 in the group and 2 here" in str(error)
        await bench.stop(leader)
        again = await bench.leader("again")
        assert await create(again.address, group_config()) is False

    run(scenario)


def test_nodes_that_come_before_the_group_get_their_seats_when_it_is_made(run_memory: Run) -> None:
    async def scenario(bench: Bench) -> None:
        leader = await bench.leader()
        async with FakeNodes([leader.address], TWO_NODES, "g") as nodes:
            await nodes.until(lambda: all(n.connected for n in nodes.nodes.values()))
            await create(leader.address, group_config())
            await nodes.until(lambda: nodes.epoch == 1)

    run_memory(scenario)


def test_watching_shows_the_present_view_and_every_later_one(run_memory: Run) -> None:
    async def scenario(bench: Bench) -> None:
        async with formed(bench) as (controller, nodes), client(controller.address) as stub:
            call = stub.WatchView(controller_pb2.WatchViewRequest(group="g"))
            views = aiter(call)
            first = await anext(views)
            assert first.epoch == 1
            assert len(first.placement.slot_expert) == 4 * 2 * 4 * 4
            nodes.of(3).kill(3)
            assert (await anext(views)).epoch == 2
            call.cancel()
            unknown = stub.WatchView(controller_pb2.WatchViewRequest(group="none"))
            assert isinstance(await refused(anext(aiter(unknown))), UnknownGroup)

    run_memory(scenario)
