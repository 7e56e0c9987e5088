"""No input ends a controller; what it serves beside its service."""

import asyncio
import json
from collections.abc import AsyncIterator

import grpc.aio
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from elasticep.control import records
from elasticep.control.store import MemoryStore
from elasticep.errors import (
    NotLeader,
)
from elasticep.proto import controller_pb2, types_pb2
from elasticep.proto.controller_pb2 import NodeMessage
from elasticep.testing.controllers import (
    CALL_S,
    Bench,
    Run,
    client,
    cluster,
    formed,
    group_config,
    refused,
    until,
)
from elasticep.testing.nodes import FakeNode, FakeSeat


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
                    call = session(iter(stream), timeout=CALL_S)
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await drained(call)
                    assert caught.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED, stream
                for method in ("CreateGroup", "GetCluster", "Drain", "Undrain"):
                    call_once = channel.unary_unary(f"/elasticep.v1.ControllerService/{method}")
                    for content in (b"\xff\xff\xff", bytes(5 << 20)):
                        with pytest.raises(grpc.aio.AioRpcError):
                            await call_once(content, timeout=CALL_S)
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


def test_numbers_that_nothing_could_follow_are_refused(run_memory: Run) -> None:
    async def scenario(bench: Bench) -> None:
        async with formed(bench) as (controller, nodes):
            term, liar, b = controller.term, nodes.nodes["b"], {"group": "g", "rank": 3}
            last, ever = {"incarnation": 2**32 - 1}, {"epoch": 2**64 - 1}
            dead = types_pb2.Seat(**b, **last, state=types_pb2.SEAT_STATE_DEAD)
            gone = types_pb2.Seat(**b, **last, state=types_pb2.SEAT_STATE_EMPTY, cause="it ended")
            runs = types_pb2.Seat(**b, **ever, incarnation=1, state=types_pb2.SEAT_STATE_ATTACHED)
            adopted = controller_pb2.Adopted(**b, **ever, incarnation=1)
            for seat in (dead, gone, runs):
                liar.send(NodeMessage(seat=seat))
            liar.send(NodeMessage(adopted=adopted))
            await until(lambda: controller.metrics.refused._value.get() == 4, "all are refused")
            assert controller.term is term, "the lead was lost over a number"
            nodes.of(3).kill(3)
            await nodes.until(lambda: nodes.epoch == 2, "and it goes on")
            assert nodes.members == [0, 1, 2]

    run_memory(scenario)


def test_what_a_later_version_says_is_passed_over(run_memory: Run) -> None:
    async def scenario(bench: Bench) -> None:
        async with formed(bench) as (_, nodes):
            later = NodeMessage()
            later.MergeFromString(b"\xfa\x07\x03new")  # field 127, which there is none of yet
            assert later.WhichOneof("body") is None
            nodes.nodes["b"].send(later)
            nodes.of(3).kill(3)
            await nodes.until(lambda: nodes.epoch == 2)
            assert nodes.nodes["b"].sessions == 1, nodes.nodes["b"].error

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


def test_the_end_of_an_earlier_session_is_not_that_of_the_one_that_took_its_place(
    run_memory: Run,
) -> None:
    async def scenario(bench: Bench) -> None:
        async with formed(bench) as (controller, nodes):
            away = nodes.nodes["b"]
            away.addresses.clear()  # it says hello once more, below, while its stream still stands
            with structlog.testing.capture_logs() as logs:
                async with client(controller.address) as stub:
                    call = stub.Session()
                    await call.write(controller_pb2.NodeMessage(hello=away.hello()))
                    await until(
                        lambda: any(e["event"] == "node.disconnected" for e in logs),
                        "the earlier session ends",
                    )
                    nodes.of(0).kill(0)
                    async for order in call:  # stage_ranks is what the node waits for
                        if list(order.proposal.stage_ranks) == [2, 3]:
                            break
                    told = {
                        n.endpoint.node: n.state for n in (await cluster(controller.address)).nodes
                    }
                    assert told == {"a": "connected", "b": "connected"}

    run_memory(scenario)


class Namesake(FakeNode):
    """A daemon elsewhere that was given the name of another."""

    def hello(self) -> controller_pb2.NodeHello:
        message = super().hello()
        message.endpoint.grpc_address = "10.0.0.9:7401"
        return message


def test_a_second_daemon_of_the_same_name_does_not_take_the_first_ones_ranks(
    run_memory: Run,
) -> None:
    async def scenario(bench: Bench) -> None:
        async with formed(bench) as (controller, nodes):
            first = nodes.nodes["b"]
            second = Namesake("b", [FakeSeat("g", 2), FakeSeat("g", 3)], [controller.address])
            second.start()
            try:
                await nodes.until(lambda: "a name of its own" in second.error)
                assert "is the daemon at unix:///tmp/b.sock, heard of " in second.error
                assert (first.sessions, second.sessions, nodes.epoch) == (1, 0, 1)
                await first.stop()  # now it moved, and nobody else answers to the name
                await nodes.until(lambda: second.sessions == 1)
            finally:
                await second.stop()

    run_memory(scenario)


def test_nodes_that_serve_a_group_which_the_store_does_not_know_are_told_of(
    run_memory: Run,
) -> None:
    async def scenario(bench: Bench) -> None:
        async with formed(bench) as (controller, nodes):
            away = FakeNode("z", [FakeSeat("lost", 0, incarnation=2)], [controller.address])
            new = FakeNode("y", [FakeSeat("later", 0)], [controller.address])
            with structlog.testing.capture_logs() as logs:
                for node in (away, new):
                    node.start()
                await nodes.until(lambda: away.connected and new.connected)
                for node in (away, new):
                    await node.stop()
            told = [(e["group"], e["node"]) for e in logs if e["event"] == "group.unknown"]
            assert told == [("lost", "z")]

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
            call = stub.GetCluster(controller_pb2.GetClusterRequest(), timeout=CALL_S)
            assert isinstance(await refused(call), NotLeader)

    run_memory(scenario)
