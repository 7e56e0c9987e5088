"""`elasticep group delete`: fake nodes, both stores, changes of the leader in between."""

import asyncio
import json
import urllib.request

import pytest
from click.testing import CliRunner, Result

from elasticep.cli.main import cli
from elasticep.control import records
from elasticep.control.controller import Controller
from elasticep.control.store import Put
from elasticep.errors import UnknownGroup, UsageError
from elasticep.proto import controller_pb2, controller_pb2_grpc
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
from elasticep.testing.nodes import FakeNode, FakeNodes

SMALL = group_config(ranks=2, experts=4, slots=4, flap_limit=0)


async def command(controller: Controller, *words: str) -> Result:
    flags = ["--controllers", controller.address, "--timeout", "60"]
    said = ["group", "delete", *words, *flags]
    return await asyncio.to_thread(CliRunner().invoke, cli, said)


async def keys_of(bench: Bench, group: str) -> list[str]:
    store = bench.store()
    items = (await store.list(records.group_prefix(group))).items
    await store.close()
    return [item.key for item in items]


def forgotten(node: FakeNode) -> list[controller_pb2.GroupForgotten]:
    """What it was told to forget; other orders may have followed."""
    return [order.forgotten for order in node.orders if order.WhichOneof("body") == "forgotten"]


def page(controller: Controller) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{controller.metrics_port}/metrics") as answer:
        return str(answer.read().decode())


def test_a_group_is_deleted_and_created_anew_with_another_geometry(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        async with formed(bench) as (controller, nodes):
            told = await command(controller, "g")
            assert isinstance(told.exception, UsageError)
            assert "ranks 0-3 of group 'g' are held by engines on a, b" in str(told.exception)
            assert await keys_of(bench, "g")
            assert 'group="g"' in await asyncio.to_thread(page, controller)

            told = await command(controller, "g", "--force", "--reason", "too large")
            assert told.output == "group g is deleted; ranks 0-3 were fenced\n"
            assert await keys_of(bench, "g") == []
            assert 'group="g"' not in await asyncio.to_thread(page, controller)
            assert not (await cluster(controller.address)).groups
            for name in TWO_NODES:
                node = nodes.nodes[name]
                await nodes.until(lambda n=node: bool(forgotten(n)))  # type: ignore[misc]
                gone = forgotten(node)[0]
                assert (gone.incarnation, gone.epoch) == (2, 2)
                assert gone.reason == "group 'g' was deleted: too large"
            fenced = [order.fence for order in orders(nodes, 0, "fence")]
            assert [(fence.rank, fence.incarnation) for fence in fenced] == [(0, 1), (1, 1)]

            again = await command(controller, "g", "--output", "json")
            assert json.loads(again.output) == {"group": "g", "deleted": False, "fenced": []}
            other = await command(controller, "nobody")
            assert isinstance(other.exception, UnknownGroup)

            for node in nodes.nodes.values():
                node.views.clear()
            assert await create(controller.address, SMALL)
            await nodes.until(lambda: nodes.members == [0, 1], "the new group's first view")
            assert nodes.epoch == 2, "the old group's had the first"
            assert [nodes.of(rank).seats[rank].incarnation for rank in (0, 1)] == [3, 3]
            await nodes.meet()
            await until(lambda: 'adopted_epoch{group="g"} 2.0' in page(controller), "it is adopted")

    run(scenario)


def test_a_deletion_survives_a_change_of_the_leader_and_what_it_left_is_cleared(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        first = await bench.leader("first")
        async with formed(bench, None, first) as (_, nodes):
            away = nodes.nodes["b"]
            await away.stop()
            async with client(first.address) as stub:
                request = controller_pb2.DeleteGroupRequest(group="g", force=True)
                answer = await stub.DeleteGroup(request, timeout=CALL_S)
                assert (answer.deleted, list(answer.fenced)) == (True, [0, 1, 2, 3])
            await bench.stop(first)
            # As if it had been interrupted: keys are left of the group.
            store = bench.store()
            left = [Put(f"{records.group_prefix('g')}history/{n:020d}", b"{}") for n in range(150)]
            for at in range(0, len(left), 100):
                await store.transact((), left[at : at + 100])
            second = await bench.leader("second")
            assert await create(second.address, SMALL)
            for node in nodes.nodes.values():
                node.addresses[:] = [second.address]
            # A node that was down all the time has ranks of the old group.
            assert away.seats[2].incarnation == 1
            away.start()
            await nodes.until(lambda: bool(forgotten(away)), "its ranks to be forgotten")
            await nodes.until(lambda: nodes.epoch == 2, "the new group's first view")
            assert nodes.members == [0, 1]
            assert away.seats[2].state == away.seats[3].state == 1, "its old ranks have ended"
            found = await keys_of(bench, "g")
            assert f"{records.group_prefix('g')}history/{2:020d}" in found
            assert len([key for key in found if "/history/" in key]) == 1
            await store.close()

    run(scenario)


def test_who_watches_a_group_or_drains_it_hears_that_it_is_deleted(run_memory: Run) -> None:
    async def scenario(bench: Bench) -> None:
        async with formed(bench) as (controller, _), client(controller.address) as stub:
            views = stub.WatchView(controller_pb2.WatchViewRequest(group="g"))
            await views.read()
            watched = stub.WatchRebalance(controller_pb2.WatchRebalanceRequest(group="g"))
            await watched.read()
            request = controller_pb2.DeleteGroupRequest(group="g", force=True)
            both = await asyncio.gather(
                *(stub.DeleteGroup(request, timeout=CALL_S) for _ in range(3))
            )
            assert sorted(answer.deleted for answer in both) == [False, False, True]
            assert isinstance(await refused(views.read()), UnknownGroup)
            assert isinstance(await refused(watched.read()), UnknownGroup)

    run_memory(scenario)


@pytest.mark.parametrize("rounds", [5])
def test_a_name_is_used_again_at_once(run_memory: Run, rounds: int) -> None:
    """Nothing that is on its way of one group falls to the next, nor ends the leader's term."""

    async def scenario(bench: Bench) -> None:
        controller = await bench.leader()
        term = controller.term
        async with FakeNodes([controller.address], TWO_NODES, "g") as nodes:
            await nodes.until(lambda: all(n.connected for n in nodes.nodes.values()))
            for number in range(rounds):
                sizes = group_config(flap_limit=0) if number % 2 else SMALL
                made = create(controller.address, sizes)
                async with client(controller.address) as stub:
                    await made
                    request = controller_pb2.DeleteGroupRequest(group="g", force=True)
                    await stub.DeleteGroup(request, timeout=CALL_S)
            await create(controller.address, SMALL)
            await nodes.until(lambda: nodes.members == [0, 1], "a view")
            assert controller.term is term, "the term went on"
            incarnations = [nodes.of(rank).seats[rank].incarnation for rank in (0, 1)]
            assert min(incarnations) > rounds

    run_memory(scenario)


def test_grants_that_wait_for_the_store_when_their_group_is_deleted_end_no_term(
    run_memory: Run,
) -> None:
    async def scenario(bench: Bench) -> None:
        controller = await bench.leader()
        term = controller.leading()
        await create(controller.address, SMALL)
        bench.memory.set_available(False)
        async with (
            FakeNodes([controller.address], {"a": [0, 1]}, "g") as nodes,
            client(controller.address) as stub,
        ):
            seats = term.cluster.groups["g"].seats
            await nodes.until(lambda: {seat.incarnation for seat in seats.values()} == {1})
            request = controller_pb2.DeleteGroupRequest(group="g")
            deleting = asyncio.ensure_future(_ask(stub, request))
            await until(lambda: "g" not in term.cluster.groups, "it is deleted")
            assert not deleting.done(), "not before that is in the store"
            bench.memory.set_available(True)
            assert await deleting
            node = nodes.nodes["a"]
            await nodes.until(lambda: bool(orders(nodes, 0, "forgotten")))
            kinds = [order.WhichOneof("body") for order in node.orders]
            assert kinds.count("grant") == 2
            assert kinds.index("forgotten") == len(kinds) - 1
            assert controller.term is term

    run_memory(scenario)


async def _ask(
    stub: "controller_pb2_grpc.ControllerServiceAsyncStub",
    request: controller_pb2.DeleteGroupRequest,
) -> bool:
    return (await stub.DeleteGroup(request, timeout=CALL_S)).deleted
