"""Views of a real controller with fake nodes over gRPC, on the memory store and on a real etcd."""

import pytest

from elasticep.control.views import View
from elasticep.group import Timeouts
from elasticep.proto import controller_pb2, types_pb2
from elasticep.testing.controllers import (
    Bench,
    Run,
    adopted,
    cluster,
    create,
    formed,
    group_config,
    orders,
    until,
)
from elasticep.testing.nodes import ATTACHED, FakeNodes


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
            await nodes.until(lambda: nodes.epoch == 2)
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


def test_case_23_a_rank_that_dies_while_the_group_is_idle_is_noticed_when_it_dies(
    run_memory: Run,
) -> None:
    async def scenario(bench: Bench) -> None:
        # No time-out helps: they are longer than what is waited for below.
        never = Timeouts(hang_timeout_ms=600_000, node_timeout_ms=600_000)
        config = group_config(timeouts=never, flap_limit=0)
        async with formed(bench, config) as (_, nodes):  # nobody meets any more: no step runs
            nodes.of(1).kill(1)
            await nodes.until(lambda: nodes.epoch == 2)
            assert nodes.members == [0, 2, 3]
            await nodes.until(lambda: bool(orders(nodes, 2, "fence")), "dead words are spread")
            fence = orders(nodes, 2, "fence")[0].fence
            assert (fence.rank, fence.incarnation) == (1, 1)

    run_memory(scenario)


def test_a_node_that_falls_silent_is_left_out_and_fenced_when_it_returns(run_memory: Run) -> None:
    async def scenario(bench: Bench) -> None:
        config = group_config(timeouts=Timeouts(node_timeout_ms=1_500), flap_limit=0)
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
            timeouts=Timeouts(suspect_after_ms=50, hang_timeout_ms=1_000), flap_limit=0
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


def test_a_views_tables_are_written_out_once_however_many_nodes_are_told(
    run_memory: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    to_proto = View.to_proto

    def counted(view: View, *, with_placement: bool = True) -> types_pb2.View:
        written.extend([view.epoch] * with_placement)
        return to_proto(view, with_placement=with_placement)

    async def scenario(bench: Bench) -> None:
        leader = await bench.leader()
        await create(leader.address, group_config(flap_limit=0))
        one_each = {f"n{rank}": [rank] for rank in range(4)}
        async with FakeNodes([leader.address], one_each, "g") as nodes:
            await nodes.until(lambda: nodes.epoch == 1)
            await nodes.meet()
            await until(lambda: adopted(leader) == 1, "epoch 1 is adopted")
            monkeypatch.setattr(View, "to_proto", counted)
            nodes.of(3).attach = False
            nodes.of(3).kill(3)
            told = [nodes.of(rank).views for rank in range(3)]
            await nodes.until(lambda: all(2 in views for views in told))
        assert written == [2, 2], "for the store, and for all nodes"

    run_memory(scenario)
