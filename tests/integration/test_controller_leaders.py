"""Controllers and stores that go away and come back; fake nodes, both stores."""

import os
import time
from pathlib import Path

import grpc.aio
import pytest
import structlog

from elasticep.control import messages, records
from elasticep.control.clocks import Clocks
from elasticep.control.planning import PlanJob, Planned
from elasticep.control.store import Delete, KeyValue, MemoryStore, etcd3_shim
from elasticep.control.store.etcd import EtcdStore, rpc
from elasticep.control.term import Term
from elasticep.errors import NotLeader, Unavailable
from elasticep.proto import controller_pb2
from elasticep.rpc import error_info
from elasticep.testing.controllers import (
    CALL_S,
    Bench,
    Run,
    client,
    cluster,
    formed,
    refused,
    run_scenario,
    until,
)
from elasticep.testing.etcd import LocalEtcd, find_etcd
from elasticep.testing.nodes import FakeNode, FakeSeat


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
                await stub.GetCluster(request, timeout=CALL_S)
        info = error_info(caught.value)
        assert info is not None
        assert (info.reason, info.metadata["leader"]) == ("NOT_LEADER", first.address)

        async with formed(bench, None, first, second) as (_, nodes):
            await bench.stop(first)
            await until(lambda: second.term is not None, "the standby leads")
            metrics = second.metrics

            def told() -> list[float]:
                gauges = (metrics.epoch, metrics.adopted_epoch, metrics.members)
                return [gauge.labels("g")._value.get() for gauge in gauges]

            # Without a view of its own; that the first one was adopted may only come from nodes.
            await until(lambda: told() == [1, 1, 4], "the standby's metrics are right")
            nodes.of(0).kill(0)
            await nodes.until(lambda: nodes.epoch == 2)
            assert nodes.members == [1, 2, 3]

    run(scenario)


def test_a_standby_that_has_lost_the_store_says_so(run_memory: Run) -> None:
    """In its metrics, and to whoever asks it who leads."""

    async def scenario(bench: Bench) -> None:
        await bench.leader("first")
        second = await bench.controller("second")
        store_up = second.metrics.store_up._value
        await until(lambda: store_up.get() == 1, "the store answers")
        bench.memory.set_available(False)
        await until(lambda: store_up.get() == 0, "it has noticed")
        with pytest.raises(NotLeader, match="as far as it knows: the store does not answer it"):
            second.leading()
        bench.memory.set_available(True)
        await until(lambda: store_up.get() == 1, "it has noticed")
        with pytest.raises(NotLeader, match=r"first leads at [^;,]*$"):
            second.leading()

    run_memory(scenario)


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


async def is_full(store: EtcdStore, number: int) -> bool:
    """Write a megabyte more; whether etcd takes it no more."""
    try:
        await store.put(f"/filler/{number}", os.urandom(1_000_000), deadline_s=CALL_S)
    except Unavailable as error:
        return "etcd is full and takes no writes" in str(error)
    return False


async def make_room(store: EtcdStore) -> None:
    """What the error asks an operator to do, after the reason is gone."""
    endpoint = store._endpoint()
    maintenance = etcd3_shim.load()[1].MaintenanceStub(endpoint.channel)
    filler = rpc.DeleteRangeRequest(key=b"/filler/", range_end=b"/filler0")
    done = (await endpoint.kv.DeleteRange(filler)).header
    await endpoint.kv.Compact(rpc.CompactionRequest(revision=done.revision, physical=True))
    await maintenance.Defragment(rpc.DefragmentRequest())
    for alarm in (await maintenance.Alarm(rpc.AlarmRequest())).alarms:
        off = {"memberID": alarm.memberID, "alarm": alarm.alarm}
        await maintenance.Alarm(rpc.AlarmRequest(action=rpc.AlarmRequest.DEACTIVATE, **off))


def test_a_full_store_costs_nobody_the_lead_and_writes_go_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tmp_path / "etcd"
    small.write_text(f'#!/bin/sh\nexec {find_etcd()} --quota-backend-bytes={6 << 20} "$@"\n')
    small.chmod(0o755)
    monkeypatch.setenv("ELASTICEP_ETCD", str(small))

    async def scenario(bench: Bench) -> None:
        store = EtcdStore(bench.etcd.endpoints if bench.etcd else ())
        async with formed(bench) as (controller, nodes):
            term, waits = controller.term, controller.metrics.write_waits
            number = 0
            while not await is_full(store, number):
                number += 1
            with structlog.testing.capture_logs() as logs:
                nodes.of(3).kill(3)
                await until(lambda: waits._child_samples()[0].value > 0.3, "many attempts")
                said = [e for e in logs if e["event"] == "store.unavailable"]
                assert len(said) == 1, "it fills no log"
                assert "etcdctl alarm disarm" in said[0]["error"]
                assert nodes.epoch == 1, "what is not written is not proposed"
                await make_room(store)
                await nodes.until(lambda: nodes.epoch == 2)
                assert any(e["event"] == "store.written" for e in logs)
            assert controller.term is term
            await until(lambda: waits._child_samples()[0].value == 0, "nothing waits")
        await store.close()

    with LocalEtcd() as etcd:
        run_scenario(etcd, scenario)


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


# ---- what is answered


def test_a_view_that_is_not_in_the_store_yet_is_told_to_nobody(run_memory: Run) -> None:
    """The next leader would know nothing of it, and give its number to another."""

    async def scenario(bench: Bench) -> None:
        first = await bench.leader("first")
        async with formed(bench, None, first) as (_, nodes):
            bench.memory.set_available(False)
            nodes.of(3).kill(3)
            term = first.term
            assert term is not None
            membership = term.cluster.groups["g"]
            await until(lambda: membership.view is not None and membership.view.epoch == 2, "it")
            told = (await cluster(first.address)).groups[0]
            assert (told.view.epoch, told.adopted_epoch) == (1, 1)
            bench.memory.set_available(True)
            await nodes.until(lambda: nodes.epoch == 2)
            assert (await cluster(first.address)).groups[0].view.epoch == 2

    run_memory(scenario)


def test_a_leader_whose_lease_may_be_over_answers_nothing(run_memory: Run) -> None:
    """One that was stopped runs again before it hears that another leads."""

    async def scenario(bench: Bench) -> None:
        ahead_s = 0.0
        clocks = Clocks(lambda: time.monotonic() + ahead_s)
        leader = await bench.leader("old", clocks=clocks)
        async with formed(bench, None, leader):
            old = leader.leading()
            ahead_s = 60.0  # it does not know yet: nothing of it has run
            with pytest.raises(NotLeader, match="could not renew its lease"):
                leader.leading()
            ahead_s = 0.0
            assert leader.leading() is old

    run_memory(scenario)


def test_what_an_operator_asked_of_a_term_that_ends_meanwhile_is_refused(
    run_memory: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(bench: Bench) -> None:
        async with formed(bench) as (controller, _), client(controller.address) as stub:

            async def plan(term: Term, job: PlanJob) -> Planned:
                bench.memory.transact((), (Delete(records.LEADER),))
                await until(lambda: term.over, "it notices")
                return job.run()

            monkeypatch.setattr(Term, "plan", plan)
            monkeypatch.setattr(Planned, "verdict", lambda planned: (True, "a test wants it"))
            request = controller_pb2.RebalanceRequest(
                group="g", action=controller_pb2.REBALANCE_ACTION_FORCE
            )
            assert isinstance(await refused(stub.Rebalance(request, timeout=CALL_S)), NotLeader)

    run_memory(scenario)


def test_a_node_that_says_hello_to_a_term_that_ended_is_sent_on(
    run_memory: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(bench: Bench) -> None:
        controller = await bench.leader()
        read, over = messages.read_hello, controller.term

        def late(hello: controller_pb2.NodeHello) -> object:
            assert over is not None
            over._end()  # as when the lead is lost between the call and its first message
            return read(hello)

        monkeypatch.setattr(messages, "read_hello", late)
        async with client(controller.address) as stub:
            call = stub.Session(timeout=CALL_S)
            hello = FakeNode("a", [FakeSeat("g", 0)], []).hello()
            await call.write(controller_pb2.NodeMessage(hello=hello))
            error = await refused(call.read())
        assert isinstance(error, NotLeader), error
        assert controller.metrics.nodes._value.get() == 0, "no node is connected to it"

    run_memory(scenario)
