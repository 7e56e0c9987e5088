"""The real controller and fake nodes over gRPC, on the memory store and on a real etcd."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from elasticep.config import ControllerConfig
from elasticep.control import records
from elasticep.control.controller import Controller
from elasticep.control.store import Delete, KeyValue, MemoryBackend, MemoryStore, Store
from elasticep.control.store.etcd import EtcdStore
from elasticep.errors import (
    ConfigError,
    GroupMismatch,
    NotLeader,
    Unavailable,
    UnknownGroup,
    UnknownRank,
    UsageError,
)
from elasticep.group import GroupConfig, Timeouts
from elasticep.proto import controller_pb2, controller_pb2_grpc, types_pb2
from elasticep.rpc import CLIENT_OPTIONS, error_info, typed_error
from elasticep.testing.etcd import LocalEtcd
from elasticep.testing.membership import group_config
from elasticep.testing.nodes import ATTACHED, FakeNodes

LIMIT_S = 40.0
TWO_NODES = {"a": [0, 1], "b": [2, 3]}
Stub = controller_pb2_grpc.ControllerServiceStub


class Bench:
    """Controllers on one store, started and ended by the test."""

    def __init__(self, etcd: LocalEtcd | None) -> None:
        self.etcd = etcd
        self.memory = MemoryBackend()
        self._stack = AsyncExitStack()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def store(self) -> Store:
        return EtcdStore(self.etcd.endpoints) if self.etcd else MemoryStore(self.memory)

    async def controller(self, name: str = "c0", store: Store | None = None) -> Controller:
        """A controller that listens; it may lead or not."""
        config = ControllerConfig(
            listen="127.0.0.1:0", store="memory", metrics_port=0, lease_ttl_s=1, name=name
        )
        controller = Controller(config, store or self.store())
        listening = asyncio.Event()
        task = asyncio.create_task(controller.run(lambda _: listening.set()))
        self._tasks[id(controller)] = task
        waiting = asyncio.ensure_future(listening.wait())
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if task.done():
            task.result()
        return controller

    async def leader(self, name: str = "c0", store: Store | None = None) -> Controller:
        controller = await self.controller(name, store)
        await until(lambda: controller.term is not None, "it leads")
        return controller

    async def stop(self, controller: Controller) -> None:
        task = self._tasks.pop(id(controller), None)
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


async def until(condition: Callable[[], bool], what: str, wait_s: float = 15.0) -> None:
    """Wait for a condition that no event tells of."""
    end = time.monotonic() + wait_s
    turn = asyncio.Event()
    while not condition():
        assert time.monotonic() < end, f"not within {wait_s} s: {what}"
        with suppress(TimeoutError):
            await asyncio.wait_for(turn.wait(), 0.01)


@asynccontextmanager
async def client(address: str) -> AsyncIterator["controller_pb2_grpc.ControllerServiceAsyncStub"]:
    async with grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS) as channel:
        yield Stub(channel)


async def create(address: str, config: GroupConfig) -> bool:
    async with client(address) as stub:
        request = controller_pb2.CreateGroupRequest(config=config.to_proto())
        return (await stub.CreateGroup(request, timeout=10)).created


async def cluster(address: str) -> controller_pb2.GetClusterResponse:
    async with client(address) as stub:
        return await stub.GetCluster(controller_pb2.GetClusterRequest(), timeout=10)


async def refused(call: Awaitable[object]) -> Exception:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return typed_error(caught.value, "the call")


@pytest.fixture(scope="module")
def etcd() -> Iterator[LocalEtcd]:
    with LocalEtcd() as started:
        yield started


Scenario = Callable[[Bench], Awaitable[None]]
Run = Callable[[Scenario], None]


def _run(etcd: LocalEtcd | None, scenario: Scenario) -> None:
    async def limited() -> None:
        bench = Bench(etcd)
        if etcd is not None:
            store = bench.store()
            keys = [item.key for item in (await store.list(records.PREFIX)).items]
            for first in range(0, len(keys), 100):
                await store.transact((), [Delete(key) for key in keys[first : first + 100]])
            await store.close()
        try:
            async with asyncio.timeout(LIMIT_S):
                await scenario(bench)
        finally:
            await bench.close()

    asyncio.run(limited())


@pytest.fixture(params=["memory", "etcd"])
def run(request: pytest.FixtureRequest) -> Run:
    etcd = request.getfixturevalue("etcd") if request.param == "etcd" else None
    return lambda scenario: _run(etcd, scenario)


@pytest.fixture
def run_memory() -> Run:
    return lambda scenario: _run(None, scenario)


@asynccontextmanager
async def formed(
    bench: Bench, config: GroupConfig | None = None, *controllers: Controller
) -> AsyncIterator[tuple[Controller, FakeNodes]]:
    """A leader, and a group of four ranks on two nodes that runs in epoch 1."""
    config = config or group_config(flap_limit=0)
    leader = controllers[0] if controllers else await bench.leader()
    addresses = [c.address for c in controllers] or [leader.address]
    await create(leader.address, config)
    async with FakeNodes(addresses, TWO_NODES, config.name) as nodes:
        await nodes.until(lambda: nodes.epoch == 1, "the first view")
        await nodes.meet()
        await until(lambda: adopted(leader) == 1, "epoch 1 is adopted")
        yield leader, nodes


def adopted(controller: Controller) -> int:
    return controller.term.cluster.groups["g"].adopted_epoch if controller.term else 0


# ---- views


def test_a_group_forms_loses_a_rank_and_takes_it_back(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        async with formed(bench) as (controller, nodes):
            first = nodes.latest
            assert first is not None
            assert nodes.members == [0, 1, 2, 3]
            assert (first.previous_epoch, list(first.expelled)) == (0, [])
            assert [m.incarnation for m in first.members] == [1, 1, 1, 1]

            nodes.of(3).kill(3)
            await nodes.until(lambda: nodes.epoch == 2, "a view without rank 3")
            second = nodes.latest
            assert second is not None
            assert nodes.members == [0, 1, 2]
            assert [(m.rank, m.incarnation) for m in second.expelled] == [(3, 1)]
            assert second.previous_epoch == 1
            assert "worker died" in second.reason

            await nodes.until(lambda: nodes.of(3).seats[3].state == ATTACHED, "a new incarnation")
            assert nodes.of(3).seats[3].incarnation == 2
            await nodes.meet()
            await nodes.until(lambda: nodes.epoch == 3, "a view with the new incarnation")
            await nodes.meet()
            assert nodes.members == [0, 1, 2, 3]
            await until(lambda: adopted(controller) == 3, "epoch 3 is adopted")

            status = await cluster(controller.address)
            group = status.groups[0]
            assert [(r.state, r.incarnation) for r in group.ranks] == [
                ("active", 1),
                ("active", 1),
                ("active", 1),
                ("active", 2),
            ]
            assert [line.split(":")[0] for line in group.history] == [
                "epoch 1",
                "epoch 2",
                "epoch 3",
            ]
            assert group.waiting == ""
            assert len(status.nodes) == 2

    run(scenario)


def test_a_joiner_stages_before_anyone_else_hears_of_its_view(run_memory: Run) -> None:
    async def scenario(bench: Bench) -> None:
        async with formed(bench) as (_, nodes):
            node = nodes.of(3)
            node.attach = False  # the next incarnation comes up when the test says so
            node.kill(3)
            await nodes.until(lambda: orders(nodes, 3, "grant")[-1].grant.incarnation == 2)
            await nodes.meet()
            node.auto = False
            node.grant(orders(nodes, 3, "grant")[-1].grant)
            await nodes.until(lambda: 3 in nodes.of(3).views, "the joiner hears of epoch 3")
            assert 3 not in nodes.of(0).views
            told = orders(nodes, 3, "proposal")[-1].proposal
            assert list(told.stage_ranks) == [3]  # not rank 2, though it is on the same node
            nodes.of(3).stage(3, 3)
            await nodes.until(lambda: 3 in nodes.of(0).views, "the others hear of epoch 3")
            await nodes.until(
                lambda: list(orders(nodes, 3, "proposal")[-1].proposal.stage_ranks) == [2]
            )

    run_memory(scenario)


def orders(nodes: FakeNodes, rank: int, kind: str) -> list[controller_pb2.ControllerMessage]:
    return [order for order in nodes.of(rank).orders if order.WhichOneof("body") == kind]


def test_case_23_a_rank_that_dies_while_the_group_is_idle_is_noticed_when_it_dies(
    run_memory: Run,
) -> None:
    async def scenario(bench: Bench) -> None:
        async with formed(bench) as (_, nodes):  # nobody meets any more: no step runs
            began = time.monotonic()
            nodes.of(1).kill(1)
            await nodes.until(lambda: nodes.epoch == 2)
            assert nodes.members == [0, 2, 3]
            assert time.monotonic() - began < 1.0  # some milliseconds; the machine may be loaded
            await nodes.until(lambda: bool(orders(nodes, 2, "fence")), "dead words are spread")
            fence = orders(nodes, 2, "fence")[0].fence
            assert (fence.rank, fence.incarnation) == (1, 1)

    run_memory(scenario)


def test_a_node_that_falls_silent_is_left_out_and_fenced_when_it_returns(run_memory: Run) -> None:
    async def scenario(bench: Bench) -> None:
        config = group_config(timeouts=Timeouts(node_timeout_ms=400), flap_limit=0)
        async with formed(bench, config) as (_, nodes):
            node = nodes.nodes["b"]
            node.beats = False
            await nodes.until(lambda: nodes.epoch >= 2, "a view without node b")
            assert nodes.members == [0, 1]
            view = nodes.latest
            assert view is not None
            assert "was not heard of" in view.reason
            assert [(m.rank, m.incarnation) for m in view.expelled] == [(2, 1), (3, 1)]
            node.beats = True
            await nodes.until(lambda: node.seats[2].incarnation == 2, "a new incarnation")
            assert any("not heard of" in order.fence.reason for order in orders(nodes, 2, "fence"))
            while nodes.members != [0, 1, 2, 3]:  # they may come back one by one
                epoch = await nodes.meet()
                await nodes.until(lambda e=epoch: nodes.epoch > e)  # type: ignore[misc]

    run_memory(scenario)


def test_a_daemon_that_restarts_within_the_timeout_keeps_its_ranks(run_memory: Run) -> None:
    async def scenario(bench: Bench) -> None:
        async with formed(bench) as (controller, nodes):
            node = nodes.nodes["b"]
            await node.stop()
            await until(
                lambda: (
                    controller.term is not None and not controller.term.cluster.nodes["b"].connected
                ),
                "the session is gone",
            )
            node.start()
            await nodes.until(lambda: node.connected)
            nodes.of(0).kill(0)
            await nodes.until(lambda: nodes.epoch == 2)
            assert nodes.members == [1, 2, 3]

    run_memory(scenario)


def test_a_hung_rank_is_found_at_the_root_of_the_waits(run_memory: Run) -> None:
    async def scenario(bench: Bench) -> None:
        config = group_config(
            timeouts=Timeouts(suspect_after_ms=50, hang_timeout_ms=300), flap_limit=0
        )
        async with formed(bench, config) as (_, nodes):
            beat(nodes, 2, progress=1_000)
            for rank, target in ((0, 1), (1, 2), (3, 2)):
                waits(nodes, rank, target, waited_ms=60)
            await nodes.until(lambda: nodes.epoch == 2, "the hung rank is left out")
            assert nodes.members == [0, 1, 3]
            view = nodes.latest
            assert view is not None
            assert "rank 2 hangs" in view.reason
            fence = orders(nodes, 2, "fence")[0].fence
            assert (fence.rank, fence.incarnation, fence.epoch) == (2, 1, 2)

    run_memory(scenario)


def beat(nodes: FakeNodes, rank: int, progress: int) -> None:
    progressed = controller_pb2.RankProgress(group="g", rank=rank, incarnation=1, progress=progress)
    heartbeat = controller_pb2.NodeHeartbeat(ranks=[progressed])
    nodes.of(rank).send(controller_pb2.NodeMessage(heartbeat=heartbeat))


def waits(nodes: FakeNodes, rank: int, target: int, waited_ms: int) -> None:
    report = controller_pb2.WaitReport(
        group="g",
        rank=rank,
        incarnation=1,
        waits_for=target,
        phase="dispatch",
        waited_ms=waited_ms,
        progress=1_000,
    )
    nodes.of(rank).send(controller_pb2.NodeMessage(wait=report))


# ---- changes of the leader


def test_a_restarted_controller_goes_on_in_the_middle_of_a_view_change(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        first = await bench.leader("first")
        async with formed(bench, None, first) as (_, nodes):
            for node in nodes.nodes.values():
                node.auto = False
            nodes.of(3).kill(3)
            await nodes.until(lambda: nodes.epoch == 2)
            await bench.stop(first)

            second = await bench.leader("second")
            for node in nodes.nodes.values():
                node.views.clear()
                node.orders.clear()
                node.addresses[:] = [second.address]
                node.auto = True
            await nodes.until(lambda: nodes.epoch == 2, "the half-done view is proposed again")
            assert nodes.members == [0, 1, 2]
            await nodes.meet()
            await nodes.until(lambda: nodes.members == [0, 1, 2, 3], "rank 3 comes back")
            view = nodes.latest
            assert view is not None
            assert (view.epoch, view.previous_epoch) == (3, 2)
            assert [m.incarnation for m in view.members] == [1, 1, 1, 2]
            await nodes.meet()
            history = (await cluster(second.address)).groups[0].history
            assert [line.split(":")[0] for line in history] == ["epoch 1", "epoch 2", "epoch 3"]

    run(scenario)


def test_a_rank_that_dies_while_nobody_leads_is_left_out_by_the_next_leader(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        first = await bench.leader("first")
        async with formed(bench, None, first) as (_, nodes):
            await bench.stop(first)
            await nodes.until(lambda: not any(n.connected for n in nodes.nodes.values()))
            nodes.of(2).kill(2)
            second = await bench.leader("second")
            for node in nodes.nodes.values():
                node.addresses[:] = [second.address]
            await nodes.until(lambda: nodes.epoch == 2)
            assert nodes.members == [0, 1, 3]
            assert "worker died" in (nodes.latest.reason if nodes.latest else "")

    run(scenario)


def test_a_standby_names_the_leader_and_takes_over_when_it_goes(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        first = await bench.leader("first")
        second = await bench.controller("second")
        await until(lambda: second.leader_address == first.address, "the standby knows the leader")
        async with client(second.address) as stub:
            request = controller_pb2.GetClusterRequest()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetCluster(request, timeout=5)
        info = error_info(caught.value)
        assert info is not None
        assert (info.reason, info.metadata["leader"]) == ("NOT_LEADER", first.address)

        async with formed(bench, None, first, second) as (_, nodes):
            await bench.stop(first)
            await until(lambda: second.term is not None, "the standby leads")
            nodes.of(0).kill(0)
            await nodes.until(lambda: nodes.epoch == 2)
            assert nodes.members == [1, 2, 3]

    run(scenario)


class Blinded(MemoryStore):
    """A store that lets a leader write but not see that it was deposed."""

    blind = False

    async def lease_keepalive(self, lease: int, *, deadline_s: float = 5.0) -> float:
        return 60.0 if self.blind else await super().lease_keepalive(lease, deadline_s=deadline_s)

    async def get(self, key: str, *, deadline_s: float = 5.0) -> KeyValue | None:
        item = await super().get(key, deadline_s=deadline_s)
        if self.blind and key == records.LEADER:
            return self.seen
        self.seen = item
        return item


def test_a_deposed_leader_that_did_not_notice_writes_nothing(run_memory: Run) -> None:
    async def scenario(bench: Bench) -> None:
        store = Blinded(bench.memory)
        old = await bench.leader("old", store)
        async with formed(bench, None, old) as (_, nodes):
            store.blind = True
            held = bench.memory.get(records.LEADER)
            assert held is not None
            store.seen = held
            bench.memory.transact((), (Delete(records.LEADER),))
            new = await bench.leader("new")
            assert old.term is not None, "it believes that it still leads"
            before = bench.memory.list(records.PREFIX)

            nodes.of(3).kill(3)  # told to the old leader, whose session is open
            await until(lambda: old.term is None, "the old leader gives up")
            after = bench.memory.list(records.PREFIX)
            assert [i for i in after.items if i.key != records.LEADER] == [
                i for i in before.items if i.key != records.LEADER
            ]
            assert nodes.epoch == 1, "what was not written was not proposed"

            for node in nodes.nodes.values():
                node.addresses[:] = [new.address]
            await nodes.until(lambda: nodes.epoch == 2)
            assert nodes.members == [0, 1, 2]

    run_memory(scenario)


# ---- the store


def test_views_go_on_after_the_store_was_away(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        async with formed(bench) as (_, nodes):
            if bench.etcd:
                bench.etcd.members[0].kill()
            bench.memory.set_available(False)
            nodes.of(3).kill(3)
            nodes.of(3).auto = False
            if bench.etcd:
                bench.etcd.restart(bench.etcd.members[0])
                bench.etcd.wait_ready()
            bench.memory.set_available(True)
            await nodes.until(lambda: nodes.epoch == 2, "a view after the outage")
            assert nodes.members == [0, 1, 2]

    run(scenario)


def test_a_write_that_succeeded_unheard_is_not_taken_for_another_leaders(run_memory: Run) -> None:
    class Deaf(MemoryStore):
        """The next write happens, but its answer is lost."""

        deaf = False

        async def transact(self, compares, operations, *, deadline_s=5.0):  # type: ignore[no-untyped-def]
            done = await super().transact(compares, operations, deadline_s=deadline_s)
            if self.deaf and any(op.key.endswith("/view") for op in operations):
                self.deaf = False
                raise Unavailable("the answer was lost")
            return done

    async def scenario(bench: Bench) -> None:
        store = Deaf(bench.memory)
        leader = await bench.leader("c", store)
        async with formed(bench, None, leader) as (_, nodes):
            term = leader.term
            store.deaf = True
            nodes.of(3).kill(3)
            await nodes.until(lambda: nodes.epoch == 2)
            assert leader.term is term, "it lost its lead over its own write"
            await nodes.meet()
            await nodes.until(lambda: nodes.epoch == 3, "and the next view is written, too")

    run_memory(scenario)


def test_a_view_that_somebody_else_wrote_is_read_and_not_overwritten(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        async with formed(bench) as (controller, nodes):
            term, store = controller.term, bench.store()
            item = await store.get(records.view_key("g"))
            assert item is not None
            written = await store.put(item.key, item.value)  # a restore by hand, say
            nodes.of(3).kill(3)
            await nodes.until(lambda: nodes.epoch == 2)
            assert controller.term is not term, "the state in doubt was not given up"
            history = await store.get(f"{records.PREFIX}groups/g/history/{2:020d}")
            assert history is not None
            assert history.create_revision > written
            await store.close()

    run(scenario)


# ---- operators


def test_drain_takes_ranks_out_and_undrain_lets_them_back(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        async with formed(bench) as (controller, nodes), client(controller.address) as stub:
            request = controller_pb2.DrainRequest(group="g", ranks=[1], reason="a new card")
            drained = await stub.Drain(request, timeout=10)
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

            await stub.Undrain(controller_pb2.UndrainRequest(group="g", ranks=[1]), timeout=10)
            await nodes.until(lambda: nodes.members == [0, 1, 2, 3])

    run(scenario)


def test_a_drain_survives_a_change_of_the_leader(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        first = await bench.leader("first")
        async with formed(bench, None, first) as (_, nodes):
            async with client(first.address) as stub:
                await stub.Drain(controller_pb2.DrainRequest(group="g", ranks=[1]), timeout=10)
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
                error = await refused(stub.Drain(request, timeout=5))
                assert isinstance(error, kind), error
                assert text in str(error)
            request = controller_pb2.DrainRequest(group="g", ranks=[0, 1])
            with pytest.raises(grpc.aio.AioRpcError, match="8 slots for 12 experts"):
                await stub.Drain(request, timeout=5)
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
            error = await refused(stub.CreateGroup(request, timeout=5))
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


# ---- bad input


async def drained(call: AsyncIterator[bytes]) -> None:
    async for _ in call:
        pass


def test_no_message_brings_the_controller_down(run_memory: Run) -> None:
    async def scenario(bench: Bench) -> None:
        async with formed(bench) as (controller, nodes):
            hello = nodes.nodes["a"].hello()
            bad_node = controller_pb2.NodeHello()
            bad_node.CopyFrom(hello)
            bad_node.endpoint.node = "x" * 300
            many = controller_pb2.NodeHello(endpoint=hello.endpoint, session_id="s")
            many.seats.extend(types_pb2.Seat(group="g", rank=r, state=1) for r in range(5_000))
            stateless = controller_pb2.NodeHello(endpoint=hello.endpoint, session_id="s")
            stateless.seats.add(group="g", rank=0)
            streams: list[list[bytes]] = [
                [b"\xff\xfe garbage"],
                [b""],
                [bytes(5 << 20)],
                [controller_pb2.NodeMessage(hello=bad_node).SerializeToString()],
                [controller_pb2.NodeMessage(hello=many).SerializeToString()],
                [controller_pb2.NodeMessage(hello=stateless).SerializeToString()],
                [controller_pb2.NodeMessage(seat=types_pb2.Seat()).SerializeToString()],
            ]
            stray = controller_pb2.NodeHello(
                endpoint=types_pb2.NodeEndpoint(node="stray", domain="d"), session_id="s"
            )
            first = controller_pb2.NodeMessage(hello=stray).SerializeToString()
            streams += [[first, b"\xff\xff"], [first, first], [first, b""]]
            async with grpc.aio.insecure_channel(controller.address) as channel:
                session = channel.stream_stream("/elasticep.v1.ControllerService/Session")
                for stream in streams:
                    call = session(iter(stream), timeout=5)
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await drained(call)
                    assert caught.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED, stream
                for method in ("CreateGroup", "GetCluster", "Drain", "Undrain"):
                    call_once = channel.unary_unary(f"/elasticep.v1.ControllerService/{method}")
                    for content in (b"\xff\xff\xff", bytes(5 << 20)):
                        with pytest.raises(grpc.aio.AioRpcError):
                            await call_once(content, timeout=5)
            assert controller.term is not None, "the lead was lost over a bad message"
            nodes.of(3).kill(3)
            await nodes.until(lambda: nodes.epoch == 2, "and it goes on")

    run_memory(scenario)


def test_a_node_speaks_for_its_own_ranks_only(run_memory: Run) -> None:
    async def scenario(bench: Bench) -> None:
        async with formed(bench) as (controller, nodes):
            dead = types_pb2.Seat(group="g", rank=3, incarnation=1, state=types_pb2.SEAT_STATE_DEAD)
            liar = nodes.nodes["a"]
            liar.send(controller_pb2.NodeMessage(seat=dead))
            staged = controller_pb2.Staged(group="g", epoch=1, rank=3, incarnation=1, error="no")
            liar.send(controller_pb2.NodeMessage(staged=staged))
            liar.kill(0)  # its own; comes after what it made up
            await nodes.until(lambda: nodes.epoch == 2)
            assert nodes.members == [1, 2, 3]
            assert (await cluster(controller.address)).groups[0].ranks[3].state == "active"

    run_memory(scenario)


def test_a_session_takes_the_place_of_the_nodes_earlier_one(run_memory: Run) -> None:
    async def scenario(bench: Bench) -> None:
        async with formed(bench) as (controller, nodes):
            async with client(controller.address) as stub:
                call = stub.Session()
                await call.write(controller_pb2.NodeMessage(hello=nodes.nodes["b"].hello()))
                await call.read()
                await nodes.until(lambda: "another session" in nodes.nodes["b"].error)
            await nodes.until(lambda: nodes.nodes["b"].sessions >= 2)
            nodes.of(0).kill(0)
            await nodes.until(lambda: nodes.members == [1, 2, 3])

    run_memory(scenario)


def test_a_store_that_cannot_be_read_ends_the_controller_with_the_key(run_memory: Run) -> None:
    async def scenario(bench: Bench) -> None:
        store = MemoryStore(bench.memory)
        config = group_config().to_proto().SerializeToString()
        await store.put(f"{records.PREFIX}groups/g/config", config)
        await store.put(records.view_key("g"), b"no view")
        controller = await bench.controller()
        task = bench._tasks[id(controller)]
        with pytest.raises(records.StoreCorrupt, match="groups/g/view"):
            await task

    run_memory(scenario)


# ---- beside the service


def test_health_reflection_and_metrics(run_memory: Run) -> None:
    async def scenario(bench: Bench) -> None:
        async with formed(bench) as (controller, nodes):
            standby = await bench.controller("standby")
            name = "elasticep.v1.ControllerService"
            serving = health_pb2.HealthCheckResponse.SERVING
            not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
            for address, lead in ((controller.address, serving), (standby.address, not_serving)):
                async with grpc.aio.insecure_channel(address) as channel:
                    check = health_pb2_grpc.HealthStub(channel).Check
                    assert (await check(health_pb2.HealthCheckRequest())).status == serving
                    request = health_pb2.HealthCheckRequest(service=name)
                    assert (await check(request)).status == lead
                    info = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
                    ask = reflection_pb2.ServerReflectionRequest(list_services="")
                    async for answer in info(iter([ask])):
                        listed = {s.name for s in answer.list_services_response.service}
                        assert name in listed
            nodes.of(3).kill(3)
            await nodes.until(lambda: nodes.epoch == 2)
            page = await _page(controller.metrics_port)
            for line in (
                "elasticep_controller_leader 1.0",
                'elasticep_controller_views_proposed_total{group="g"} 2.0',
                'elasticep_controller_views_adopted_total{group="g"} 1.0',
                'elasticep_controller_incarnations_ended_total{group="g"} 1.0',
                'elasticep_controller_members{group="g"} 3.0',
                "elasticep_controller_connected_nodes 2.0",
                'elasticep_controller_adopt_seconds_count{group="g"} 1.0',
            ):
                assert line in page, line

    run_memory(scenario)


async def _page(port: int) -> list[str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    return text.splitlines()


def test_history_is_kept_in_the_store(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        async with formed(bench) as (_, nodes):
            nodes.of(3).kill(3)
            await nodes.until(lambda: nodes.epoch == 2)
            store = bench.store()
            entries = (await store.list(f"{records.PREFIX}groups/g/history/")).items
            await store.close()
            told = [json.loads(entry.value) for entry in entries]
            assert [len(entry["members"]) for entry in told] == [4, 3]
            assert told[1]["expelled"] == [[3, 1, "b"]]
            assert told[0]["at_unix_ms"] <= told[1]["at_unix_ms"]
            revisions = [entry.create_revision for entry in entries]
            assert revisions == sorted(revisions)

    run(scenario)


def test_not_leading_is_an_error_of_its_own(run_memory: Run) -> None:
    async def scenario(bench: Bench) -> None:
        bench.memory.set_available(False)
        controller = await bench.controller()
        async with client(controller.address) as stub:
            call = stub.GetCluster(controller_pb2.GetClusterRequest(), timeout=5)
            assert isinstance(await refused(call), NotLeader)

    run_memory(scenario)
