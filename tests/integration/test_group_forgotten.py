"""A daemon that is told that a group was deleted: what runs ends, memory and metrics go."""

import signal
import threading
import urllib.request

import grpc
import pytest

import elasticep
from elasticep.errors import Fenced
from elasticep.geometry import GroupGeometry
from elasticep.proto import controller_pb2, types_pb2
from elasticep.testing.lab import Lab, small_config
from elasticep.testing.node import DaemonProcess, reason_of, wait_for
from elasticep.testing.processes import descriptors, stop
from elasticep.testing.weights import WeightsLab

WHY = "group 'g' was deleted: too large"


def forget(lab: Lab, node: str, incarnation: int, epoch: int = 40) -> None:
    gone = controller_pb2.GroupForgotten(
        group="g", incarnation=incarnation, epoch=epoch, reason=WHY
    )
    with lab.controller._lock:
        lab.controller.groups.pop("g", None)
    lab.controller.order(node, controller_pb2.ControllerMessage(forgotten=gone))


def memory_of(daemon: DaemonProcess) -> list[str]:
    """The group's memory that the daemon holds, by the names of its descriptors."""
    return [name for name in descriptors(daemon.pid) if "memfd:" in name]


def page(daemon: DaemonProcess) -> str:
    (ready,) = daemon.events("daemon.ready")
    with urllib.request.urlopen(f"http://127.0.0.1:{ready['metrics_port']}/metrics") as answer:
        return str(answer.read().decode())


def test_engines_are_fenced_and_nothing_is_left_of_the_group() -> None:
    with Lab() as lab:
        daemon = lab.daemon("n0", "g:0-3;other:0", "--metrics-port", "0")
        wait_for(lambda: daemon.status().controller_connected, "the daemon to be connected")
        before = len(memory_of(daemon))
        lab.create(small_config())
        session = elasticep.attach("g", 0, daemon.grpc_socket, timeout=60)
        lab.attached(0)
        lab.controller.fence(
            "n0", controller_pb2.Fence(group="g", rank=3, incarnation=1, epoch=1, reason="a test")
        )
        lab.dead(3)
        assert 'group="g"' in page(daemon)
        assert len(memory_of(daemon)) >= before + 8
        forget(lab, "n0", 9)
        assert lab.dead(0).cause == lab.dead(1).cause == WHY
        with pytest.raises(Fenced) as caught:
            session.step(timeout=60).__enter__()
        assert (caught.value.epoch, caught.value.why) == (40, WHY)
        session.detach()
        wait_for(lambda: daemon.events("group.forgotten"), "the group to be let go of")
        assert len(memory_of(daemon)) == before
        wait_for(lambda: 'group="g"' not in page(daemon), "its metrics to go")
        wait_for(lambda: "create it" in daemon.seat("g", 0).attach_waits_for, "the name is free")
        # What the next daemon finds has nothing of it, either.
        daemon.kill()
        daemon.start()
        assert {seat.seat.incarnation for seat in daemon.status().seats} == {0}


def test_arenas_and_backups_go_with_the_group() -> None:
    with WeightsLab() as lab:
        lab.start({"n0": [0], "n1": [1]}, "--backup-bytes", "1000000")
        lab.run(1, {0: [0, 1], 1: [2, 3]})
        for name, daemon in lab.nodes.items():
            wait_for(
                lambda d=daemon: any(a.backup and a.valid for a in d.status().arenas),  # type: ignore[misc]
                "a backup",
            )
            assert any("arena" in held for held in memory_of(daemon)), memory_of(daemon)
            assert "elasticep_weights_slots{" in page(daemon)
            forget(lab, name, 2)
        for engine in lab.ranks.values():
            assert engine.ask("close") == "closed"
        for daemon in lab.nodes.values():
            wait_for(lambda d=daemon: d.events("group.forgotten"), "it is let go of")  # type: ignore[misc]
            wait_for(lambda d=daemon: not memory_of(d), "its memory to go")  # type: ignore[misc]
            wait_for(lambda d=daemon: 'group="g"' not in page(d), "its metrics to go")  # type: ignore[misc]
            assert not daemon.status().arenas


def test_a_group_of_another_geometry_waits_until_the_old_one_has_ended() -> None:
    with Lab() as lab:
        lab.create(small_config(initial_ranks=1))
        daemon = lab.daemon("n0", "g:0-3", "--engine-grace-s", "300")
        engine = lab.engine(daemon, "g", 0).up()
        lab.attached(0)
        stop(engine.pid)
        forget(lab, "n0", 2)
        lab.dead(0)
        waits = daemon.seat("g", 0).attach_waits_for
        assert "the group was deleted" in waits
        smaller = small_config(
            geometry=GroupGeometry(
                layers=2, experts=2, topk=1, hidden=64, slots_per_rank=2, max_ranks=2
            ),
            initial_ranks=1,
        )
        answers: list[object] = []
        waiter = threading.Thread(
            target=lambda: answers.append(
                daemon.attach("g", 0, wait_ms=60_000, config=smaller.to_proto())
            ),
            daemon=True,
        )
        waiter.start()
        wait_for(lambda: daemon.events("attach.waits"), "the engine to wait")
        assert not answers
        assert not daemon.events("group.forgotten"), "an engine of the old group is there"
        engine.signal(signal.SIGKILL)
        waiter.join(60)
        (answer,) = answers
        assert answer.config == smaller.to_proto()  # type: ignore[attr-defined]
        lab.ready(1, 2)
        assert [seat.seat.rank for seat in daemon.status().seats] == [0, 1]
        # What the new group's geometry has no place for is offered all the same, for a later one.
        for rank in (2, 3):
            lab.empty(rank, 0)


def test_an_engine_that_waits_for_a_rank_hears_that_its_group_was_deleted() -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0", "--engine-grace-s", "300")
        engine = lab.clinging(daemon, 0)
        errors: list[grpc.RpcError] = []

        def ask() -> None:
            try:
                daemon.attach("g", 0, wait_ms=60_000)
            except grpc.RpcError as error:
                errors.append(error)

        waiter = threading.Thread(target=ask, daemon=True)
        waiter.start()
        wait_for(lambda: daemon.events("attach.waits"), "the second engine to wait")
        forget(lab, "n0", 5)
        waiter.join(60)
        assert reason_of(errors[0]) == "GROUP_UNKNOWN"
        assert "was deleted" in str(errors[0].details())  # type: ignore[attr-defined]
        engine.signal(signal.SIGKILL)
        wait_for(lambda: daemon.events("group.forgotten"), "the group to be let go of")


def test_an_order_to_forget_leaves_alone_what_was_granted_after_it() -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0-1")
        engine = lab.engine(daemon, "g", 0).up()
        lab.attached(0)
        forget(lab, "n0", 1)
        forget(lab, "n0", 0)
        lab.controller.order("n0", controller_pb2.ControllerMessage())
        wait_for(lambda: len(daemon.events("group.deleted")) == 2, "the orders to be taken")
        assert not daemon.events("group.forgotten")
        assert daemon.seat("g", 0).seat.state == types_pb2.SEAT_STATE_ATTACHED
        assert engine.ask("close") == "closed"
