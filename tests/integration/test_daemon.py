"""A daemon with real workers and engines, ordered about by a controller double."""

import os
import re
import signal
import urllib.request
from typing import Any

import grpc
import pytest

from elasticep.geometry import GroupGeometry
from elasticep.group import GroupConfig, Launch, Timeouts
from elasticep.native import abi
from elasticep.proto import controller_pb2, node_pb2, types_pb2
from elasticep.spec import ExchangeSpec
from elasticep.testing.lab import Lab, small_config
from elasticep.testing.node import DaemonProcess, reason_of, view_of, wait_for


def refused(daemon: DaemonProcess, *arguments: Any, **more: Any) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        daemon.attach(*arguments, **more)
    return reason_of(caught.value), str(caught.value.details())


def test_seats_are_granted_attached_and_step() -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0-1")
        engines = lab.serve(daemon, [0, 1])
        for rank in (0, 1):
            lab.attached(rank)
            lab.adopted(rank, 1)
            seat = daemon.seat("g", rank)
            assert seat.seat.state == types_pb2.SEAT_STATE_ATTACHED
            assert (seat.seat.epoch, list(seat.staged_epochs)) == (1, [1])
            assert seat.engine_pid == engines[rank].pid
            assert seat.worker_pid not in (0, daemon.pid, seat.engine_pid)
        assert lab.step(engines) == ["stepped 1 2 1"] * 2
        status = daemon.status()
        assert (status.node, status.controller_connected) == ("n0", True)


def test_a_joiner_has_staged_only_when_its_engine_waits_in_step() -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0-2")
        engines = lab.serve(daemon, [0, 1])
        joiner = lab.engine(daemon, "g", 2).up()
        members = dict.fromkeys(range(3), (1, "n0"))
        lab.controller.propose(view_of(small_config(), 2, 1, members), {"n0": [2]})
        wait_for(lambda: 2 in daemon.seat("g", 2).staged_epochs, "the worker to stage epoch 2")
        said = [m.staged.rank for _, m in lab.controller.messages if m.HasField("staged")]
        assert 2 not in said
        joiner.say("step")
        assert lab.staged(2, 2).error == ""
        # Now the others stage it, and all three run it together.
        lab.controller.propose(view_of(small_config(), 2, 1, members), {"n0": [0, 1]})
        for rank in (0, 1):
            assert lab.staged(rank, 2).error == ""
        for engine in engines:
            engine.say("step")
        lab.joined([*engines, joiner], 2)


def test_attach_names_what_is_wrong() -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0-1;later:0", "--listen", "127.0.0.1:0")
        answer = daemon.attach("g", 0)
        assert (answer.incarnation, answer.launch) == (1, types_pb2.LAUNCH_SERVICE)
        assert GroupConfig.from_proto(answer.config) == small_config()
        assert refused(daemon, "h", 0)[0] == "GROUP_UNKNOWN"
        word, text = refused(daemon, "g", 7)
        assert word == "RANK_UNKNOWN"
        assert "rank 7" in text
        assert "0, 1" in text
        word, text = refused(daemon, "later", 0, wait_ms=50)
        assert word == "GROUP_UNKNOWN"
        assert "group create" in text
        # Reserved by a living process, then taken for good.
        other = os.getppid()
        word, text = refused(daemon, "g", 0, pid=other)
        assert word == "SEAT_TAKEN"
        assert str(os.getpid()) in text
        engine = lab.engine(daemon, "g", 0).up()
        lab.attached(0)
        word, text = refused(daemon, "g", 0)
        assert word == "SEAT_TAKEN"
        assert str(engine.pid) in text
        changed = small_config(spare_copies=2).to_proto()
        word, text = refused(daemon, "g", 1, config=changed)
        assert word == "GROUP_MISMATCH"
        assert "spare_copies" in text
        assert refused(daemon, "g", 1, layout_digest=12345)[0] == "GROUP_MISMATCH"
        broken = small_config().to_proto()
        broken.geometry.topk = 0
        assert refused(daemon, "g", 1, config=broken)[0] == "GEOMETRY_INVALID"
        request = node_pb2.AttachRequest(group="g", rank=1, abi_version=abi.ABI_VERSION + 1)
        with pytest.raises(grpc.RpcError) as caught:
            daemon.call("Attach", request)
        assert reason_of(caught.value) == "GROUP_MISMATCH"
        assert refused(daemon, "g", 1, pid=(1 << 32) - 1)[0] == "CONFIG_INVALID"
        # Seats are for processes of this host.
        tcp = lab.controller.endpoints["n0"].grpc_address
        with grpc.insecure_channel(tcp) as channel:
            from elasticep.proto import node_pb2_grpc

            stub = node_pb2_grpc.NodeServiceStub(channel)
            assert stub.GetStatus(node_pb2.GetStatusRequest(), timeout=60).node == "n0"
            with pytest.raises(grpc.RpcError) as caught:
                stub.Attach(node_pb2.AttachRequest(group="g", rank=1), timeout=60)
            assert reason_of(caught.value) == "USAGE"
        # A seat whose grant does not come is waited for, not longer than asked.
        lab.controller.auto_grant = False
        daemon.call("Detach", node_pb2.DetachRequest(group="g", rank=0, incarnation=1))
        word, text = refused(daemon, "g", 0, wait_ms=100)
        assert word == "ATTACH_FAILED"
        assert "detached" in text


def test_the_first_engine_creates_the_group() -> None:
    with Lab() as lab:
        daemon = lab.daemon("n0", "g:0")
        wanted = small_config(initial_ranks=1).to_proto()
        answer = daemon.attach("g", 0, config=wanted)
        assert lab.controller.groups["g"] == wanted
        assert answer.incarnation == 1


def test_a_config_that_can_never_fit_leaves_its_name_to_one_that_does() -> None:
    huge = ExchangeSpec.preset("ROUTED", max_tokens=65_536)
    geometry = GroupGeometry(
        layers=1, experts=4, topk=2, hidden=16_384, slots_per_rank=4, max_ranks=128
    )
    with Lab() as lab:
        daemon = lab.daemon("n0", "g:0-1")
        config = small_config(geometry=geometry, exchanges=(("decode", huge),))
        word, text = refused(daemon, "g", 0, config=config.to_proto())
        assert word == "MEMORY_SHORT"
        assert re.search(r"the 2 seats of group 'g' on node 'n0' need \d{13} bytes and", text)
        assert "lower max_tokens" in text
        assert "g" not in lab.controller.groups
        wanted = small_config(initial_ranks=1).to_proto()
        assert daemon.attach("g", 0, config=wanted).incarnation == 1


def test_without_a_controller_attach_says_so_in_time() -> None:
    with Lab() as lab:
        lab.controller.close()
        daemon = lab.daemon("n0", "g:0")
        word, text = refused(daemon, "g", 0, wait_ms=200, config=small_config().to_proto())
        assert word == "UNAVAILABLE"
        assert lab.controller.address in text
        assert refused(daemon, "g", 0, wait_ms=50)[0] == "UNAVAILABLE"


def test_detach_ends_the_incarnation_without_a_fault() -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0")
        engine = lab.engine(daemon, "g", 0).up()
        lab.attached(0)
        daemon.call("Detach", node_pb2.DetachRequest(group="g", rank=0, incarnation=1))
        assert lab.dead(0).cause == "detached"
        assert engine.ask("step").startswith("error Fenced")
        assert engine.ask("close") == "closed"
        lab.ready(0, 2)
        assert engine.ask("close") == "closed"  # it was not killed
        # Closing the session alone is a detach as well.
        second = lab.engine(daemon, "g", 0).up()
        lab.attached(0, 2)
        assert second.ask("close") == "closed"
        assert lab.dead(0, 2).cause == "detached"
        lab.ready(0, 3)
        with pytest.raises(grpc.RpcError) as caught:
            daemon.call("Detach", node_pb2.DetachRequest(group="h", rank=0, incarnation=1))
        assert reason_of(caught.value) == "GROUP_UNKNOWN"


def test_a_ticket_keeps_no_seat_for_an_incarnation_that_is_over() -> None:
    """An engine that asked and never came; the next incarnation is whose who asks for that."""
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0")
        assert daemon.attach("g", 0).incarnation == 1
        other = os.getppid()
        assert refused(daemon, "g", 0, pid=other)[0] == "SEAT_TAKEN"
        os.kill(daemon.seat("g", 0).worker_pid, signal.SIGKILL)
        lab.ready(0, 2)
        assert daemon.attach("g", 0, pid=other).incarnation == 2


def test_a_fence_reaches_the_engine_with_its_reason() -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0-1")
        engines = lab.serve(daemon, [0, 1])
        fence = controller_pb2.Fence(
            group="g", rank=1, incarnation=1, epoch=2, reason="it hung for 5 s"
        )
        lab.controller.fence("n0", fence)
        assert lab.dead(1).cause == "it hung for 5 s"
        assert "it hung for 5 s" in engines[1].ask("step")
        engines[1].ask("close")
        lab.ready(1, 2)
        lab.controller.fence("n0", fence)  # it may come again, and hits nobody
        lab.controller.fence("n0", controller_pb2.Fence(group="none", rank=1, incarnation=1))
        assert lab.engine(daemon, "g", 1).up().pid


def test_an_expelled_rank_is_dead_to_all_whatever_is_staged() -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0-1")
        engines = lab.serve(daemon, [0, 1])
        engines[0].say("step")  # waits at the barrier for rank 1, which never comes
        lab.controller.propose(
            view_of(small_config(), 2, 1, {0: (1, "n0")}, expelled={1: 1}), {"n0": [0]}
        )
        assert re.fullmatch(r"stepped 2 \d+ 1", engines[0].hear())  # doomed steps count
        assert "expelled in epoch 2" in lab.dead(1).cause
        assert engines[1].ask("step").startswith("error Fenced")


def test_views_that_cannot_be_staged_are_answered_with_the_reason() -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0-1")
        engines = lab.serve(daemon, [0, 1])
        members = {0: (1, "n0"), 1: (1, "n0")}
        lab.controller.propose(view_of(small_config(), 5, 1, members), {"n0": [0, 1]})
        assert "runs epoch 1" in lab.staged(0, 5).error
        other = view_of(small_config(), 2, 1, {0: (1, "n0"), 1: (7, "n0")})
        lab.controller.propose(other, {"n0": [1]})
        assert "incarnation 7" in lab.staged(1, 2).error
        away = view_of(small_config(), 3, 1, {**members, 2: (1, "gone")})
        lab.controller.propose(away, {"n0": [0]})
        assert "node 'gone'" in lab.staged(0, 3).error
        short = view_of(small_config(), 4, 1, members)
        short.placement.slot_weight = short.placement.slot_weight[:-4]
        lab.controller.propose(short, {"n0": [0]})
        assert "slot_weight has" in lab.staged(0, 4).error
        assert lab.step(engines) == ["stepped 1 2 1"] * 2


def test_orders_that_make_no_sense_break_nothing() -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0-1")
        engines = lab.serve(daemon, [0, 1])
        order = controller_pb2.ControllerMessage
        good = small_config().to_proto()
        huge = types_pb2.View(group="g", epoch=2**64 - 1)
        huge.members.add(rank=2**32 - 1, incarnation=2**32 - 1, node="n0")
        huge.expelled.add(rank=2**32 - 1, incarnation=2**32 - 1)
        nonsense = [
            order(),
            order(grant=controller_pb2.SeatGrant()),
            order(grant=controller_pb2.SeatGrant(config=good, rank=9, incarnation=1)),
            order(grant=controller_pb2.SeatGrant(config=good, rank=0, incarnation=2)),
            order(grant=controller_pb2.SeatGrant(config=small_config("h").to_proto(), rank=0)),
            order(proposal=controller_pb2.Proposal()),
            order(proposal=controller_pb2.Proposal(view=huge, stage_ranks=[0, 7])),
            order(
                proposal=controller_pb2.Proposal(
                    view=types_pb2.View(group="g", epoch=2), stage_ranks=[0]
                )
            ),
            order(fence=controller_pb2.Fence(group="g", rank=77, incarnation=1)),
            order(fence=controller_pb2.Fence(group="g", rank=0, incarnation=0, reason="x" * 9999)),
        ]
        for message in nonsense:
            lab.controller.order("n0", message)
        assert "slot_expert" in lab.staged(0, 2).error
        assert lab.step(engines) == ["stepped 1 2 1"] * 2
        assert not daemon.events("loop.error")
        assert not daemon.events("controller.session_failed")
        assert not daemon.events("controller.lost")


def test_waits_are_reported_and_withdrawn() -> None:
    quick = small_config(timeouts=Timeouts(suspect_after_ms=60, hang_timeout_ms=600))
    with Lab() as lab:
        lab.create(quick)
        daemon = lab.daemon("n0", "g:0-1")
        engines = lab.serve(daemon, [0, 1])
        engines[0].say("step")
        first = lab.controller.wait(lambda _, m: m.HasField("wait"), "a wait").wait
        assert (first.rank, first.waits_for, first.phase) == (0, 1, "barrier")
        assert first.waited_ms >= 60
        assert "barrier for rank 1" in daemon.seat("g", 0).wait
        later = lab.controller.wait(
            lambda _, m: m.HasField("wait") and m.wait.waited_ms > first.waited_ms,
            "the wait to be said again",
        )
        assert later.wait.waits_for == 1
        engines[1].say("step")
        lab.controller.wait(
            lambda _, m: m.HasField("wait") and m.wait.waited_ms == 0, "its withdrawal"
        )
        assert engines[0].hear() == engines[1].hear() == "stepped 1 2 1"
        lab.controller.wait(
            lambda _, m: m.HasField("heartbeat") and {r.rank for r in m.heartbeat.ranks} == {0, 1},
            "a heartbeat with the progress of both",
        )


def test_several_groups_at_once() -> None:
    inline = small_config("h", launch=Launch.INLINE, initial_ranks=1)
    with Lab() as lab:
        lab.create(small_config(initial_ranks=1))
        lab.create(inline)
        daemon = lab.daemon("n0", "g:0;h:0,2")
        for group in ("g", "h"):
            engine = lab.engine(daemon, group, 0).up()
            lab.attached(0, group=group)
            lab.config = inline if group == "h" else small_config(initial_ranks=1)
            lab.controller.propose(view_of(lab.config, 1, 0, {0: (1, "n0")}), {"n0": [0]})
            assert engine.ask("step") == "stepped 1 1 1"
        assert daemon.seat("h", 0).worker_pid == 0
        assert daemon.seat("g", 0).worker_pid != 0
        lab.engines[0].signal(signal.SIGKILL)
        assert lab.dead(0, group="g").cause == "engine died"
        assert lab.engines[1].ask("step") == "stepped 1 2 1"
        lab.ready(0, 2, "g")
        lab.engines[1].signal(signal.SIGKILL)
        assert lab.dead(0, group="h").cause == "engine died"
        lab.ready(0, 2, "h")
        assert daemon.seat("h", 2).seat.state == types_pb2.SEAT_STATE_READY


def test_health_reflection_and_metrics() -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0-1", "--metrics-port", "0", "--fault-injection")
        engines = lab.serve(daemon, [0, 1])
        with grpc.insecure_channel(f"unix:{daemon.grpc_socket}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for service in ("", "elasticep.v1.NodeService"):
                request = health_pb2.HealthCheckRequest(service=service)
                assert health.Check(request, timeout=60).status == 1
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            ask = reflection_pb2.ServerReflectionRequest(list_services="")
            answer = next(reflection.ServerReflectionInfo(iter([ask]), timeout=60))
            names = {service.name for service in answer.list_services_response.service}
            assert "elasticep.v1.NodeService" in names
        hit = daemon.call(
            "InjectFault", node_pb2.InjectFaultRequest(group="g", rank=1, fault="kill-worker")
        )
        assert hit.pid > 0
        assert lab.dead(1).cause == "worker died"
        engines[1].ask("close")
        lab.ready(1, 2)
        port = daemon.events("daemon.ready")[0]["metrics_port"]

        def page() -> dict[str, float]:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as stream:
                lines = stream.read().decode().splitlines()
            return {k: float(v) for k, v in (x.rsplit(" ", 1) for x in lines if x[0] != "#")}

        wait_for(lambda: page()['elasticep_daemon_seats{state="ready"}'] == 1, "the next poll")
        steps = 'elasticep_steps_complete_total{group="g",rank="0"}'
        wait_for(lambda: page()[steps] == 1, "the next poll of a header")
        values = page()
        assert values['elasticep_daemon_deaths_total{cause="worker died",group="g"}'] == 1
        assert values["elasticep_daemon_detect_seconds_count"] == 1
        assert values["elasticep_daemon_report_seconds_count"] == 1
        assert values['elasticep_daemon_staged_total{group="g",result="staged"}'] == 2
        assert values['elasticep_daemon_adopted_total{group="g"}'] == 2
        assert values['elasticep_steps_torn_total{group="g",rank="0"}'] == 0
        assert values["elasticep_daemon_workers_started_total"] == 3
        for fault, word in (("burn", "USAGE"), ("kill-engine", "USAGE")):
            with pytest.raises(grpc.RpcError) as caught:
                daemon.call(
                    "InjectFault", node_pb2.InjectFaultRequest(group="g", rank=1, fault=fault)
                )
            assert reason_of(caught.value) == word


def test_faults_are_injected_only_where_the_config_says_so() -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0")
        lab.ready(0)
        request = node_pb2.InjectFaultRequest(group="g", rank=0, fault="kill-worker")
        with pytest.raises(grpc.RpcError) as caught:
            daemon.call("InjectFault", request)
        assert reason_of(caught.value) == "USAGE"
        assert "fault_injection" in str(caught.value.details())
        assert daemon.seat("g", 0).seat.incarnation == 1
