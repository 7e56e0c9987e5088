"""Daemons fill arenas of expert weights: from checkpoints, replicas and backups, verified."""

import json
import os
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from elasticep.cli.main import cli
from elasticep.errors import Unavailable
from elasticep.handover import fetch_arena
from elasticep.proto import node_pb2, node_pb2_grpc
from elasticep.testing.lab import small_config
from elasticep.testing.node import reason_of, wait_for
from elasticep.testing.weights import WeightsLab, leave_no_checkpoint
from elasticep.weights import TensorSpec, WeightSpec


def test_weights_come_from_the_checkpoint_then_from_replicas_and_outlive_engines() -> None:
    with WeightsLab() as lab:
        lab.start({"n0": [0], "n1": [1]})
        lab.run(1, {0: [0, 1], 1: [2, 3]})
        lab.check(0, [0, 1])
        lab.check(1, [2, 3])
        # No more than each needs.
        assert [lab.moved(node) for node in ("n0", "n1")] == [{"checkpoint": 4}] * 2
        (arena,) = lab.nodes["n1"].status().arenas
        assert (arena.rank, arena.slots, arena.valid, arena.filling) == (1, 8, 4, 0)
        # Between ranks of the domain, and within a rank.
        lab.run(2, {0: [0, 1, 2, 1], 1: [2, 3, 0]})
        lab.check(0, [0, 1, 2, 1])
        lab.check(1, [2, 3, 0])
        assert lab.moved("n0") == {"checkpoint": 4, "replica": 4}
        assert lab.moved("n1") == {"checkpoint": 4, "replica": 2}
        assert lab.nodes["n0"].events("weights.filled")[-1]["sources"] == {"replica": 4}
        # An engine that comes back finds its weights.
        lab.ranks.pop(0).close()  # SIGKILL
        lab.dead(0)
        lab.open(0, 2)
        lab.ranks[0].say("step")
        lab.propose(3, {0: [0, 1, 2, 1], 1: [2, 3, 0]}, stage=[0])
        assert lab.staged(0, 3).error == ""
        lab.check(0, [0, 1, 2, 1])
        assert lab.moved("n0") == {"checkpoint": 4, "replica": 4}


def test_what_others_ask_is_checked_and_answered_with_reasons() -> None:
    with WeightsLab() as lab:
        lab.start({"n0": [0]})
        lab.run(1, {0: [0, 1, 2, 3]})
        daemon = lab.nodes["n0"]

        def find(layers: list[int], experts: list[int], group: str = "g") -> Any:
            request = node_pb2.FindExpertsRequest(group=group, layers=layers, experts=experts)
            return daemon.call("FindExperts", request)

        def read(**where: Any) -> bytes:
            with grpc.insecure_channel(f"unix:{daemon.grpc_socket}") as channel:
                request = node_pb2.ReadExpertRequest(**{"group": "g", "incarnation": 1, **where})
                chunks = node_pb2_grpc.NodeServiceStub(channel).ReadExpert(request, timeout=20)
                return b"".join(chunk.data for chunk in chunks)

        (found,) = find([1], [2]).found
        assert [(r.rank, r.incarnation, r.slot) for r in found.replicas] == [(0, 1, 2)]
        assert len(found.checksum) == 16
        assert read(layer=1, expert=2) == lab.bytes_of(1, 2)
        for call, reason in (
            (lambda: find([0], [0], "other"), "GROUP_UNKNOWN"),
            (lambda: find([0], []), "CONFIG_INVALID"),
            (lambda: find([9], [0]), "CONFIG_INVALID"),
            (lambda: find([0] * 70_000, [0] * 70_000), "CONFIG_INVALID"),
            (lambda: read(layer=0, expert=99), "CONFIG_INVALID"),
            (lambda: read(layer=0, expert=0, incarnation=2), "USAGE"),
            (lambda: read(layer=0, expert=0, backup=True), "USAGE"),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call()
            assert reason_of(refused.value) == reason
        for rank, backup in ((1, False), (7, False), (0, True)):
            with pytest.raises(Unavailable, match="has no"):
                fetch_arena(daemon.fd_socket, "g", rank, backup=backup)


def test_what_a_view_no_longer_names_is_overwritten_only_when_the_rank_runs_it() -> None:
    with WeightsLab() as lab:
        lab.start({"n0": [0], "n1": [1]})
        lab.run(1, {0: [0, 1], 1: [2, 3]})
        # Slot 0 of rank 0 is read by the view that runs: this one must wait.
        lab.propose(2, {0: [2, 1, 0], 1: [2, 3]}, stage=[0])
        wait_for(
            lambda: any(e["epoch"] == 2 for e in lab.nodes["n0"].events("weights.filling")),
            "the fill of view 2",
        )
        lab.propose(3, {0: [-1, 1, 0], 1: [2, 3]}, previous=1)
        for rank in (0, 1):
            assert lab.staged(rank, 3).error == ""
        lab.check(0, [0, 1, 0])  # still readable, whoever waits
        for engine in lab.ranks.values():
            engine.say("step")
        assert {engine.hear().split()[1] for engine in lab.ranks.values()} == {"3"}
        assert "is not wanted any more" in lab.staged(0, 2).error
        lab.run(4, {0: [2, 1, 0], 1: [2, 3]})
        lab.check(0, [2, 1, 0])


def test_case_15_after_a_shrink_every_slot_holds_what_its_label_says() -> None:
    """Also slots that are given anew: the label follows the bytes, never the view alone."""
    with WeightsLab() as lab:
        lab.start({"n0": [0], "n1": [1], "n2": [2]})
        lab.run(1, {0: [0, 1], 1: [2, 0], 2: [3, 1]})
        told = CliRunner().invoke(
            cli, ["status", "--daemon", lab.nodes["n2"].grpc_socket, "--output", "json"]
        )
        assert told.exit_code == 0, told.output
        (arena,) = json.loads(told.stdout)["arenas"]
        assert (arena["rank"], arena["slots"], arena["valid"]) == (2, 8, 4)
        lab.ranks.pop(2).close()
        lab.dead(2)
        for epoch, slots in enumerate(
            (
                {0: [0, 1, 3], 1: [2, 0]},
                {0: [0, -1, 3], 1: [2, 0, 1]},
                {0: [0, 2, 3], 1: [2, -1, 1]},
                {0: [0, 2, 3], 1: [2, 3, 1]},
            ),
            2,
        ):
            lab.run(epoch, slots, expelled=[2] if epoch == 2 else ())
            for rank, experts in slots.items():
                lab.check(rank, experts)


def test_a_lost_expert_comes_from_a_backup_then_from_disk_then_it_is_named() -> None:
    with WeightsLab(experts=5, slots=5) as lab:  # which 3 nodes do not divide
        lab.start({"n0": [0], "n1": [1], "n2": [2]}, "--backup-bytes", "1000000")
        lab.run(1, {0: [0, 1], 1: [2, 4], 2: [3]})
        lab.backed_up()
        status = [lab.backup(node) for node in lab.nodes]
        assert sum(s.valid for s in status) == 10
        assert all(s.done_bytes == s.total_bytes for s in status)
        lab.ranks.pop(2).close()
        lab.dead(2)
        # Nobody has expert 3 now but the backup of a node that it did not live on.
        lab.run(2, {0: [0, 1, 3], 1: [2, 4]}, expelled=[2])
        lab.check(0, [0, 1, 3])
        filled = lab.nodes["n0"].events("weights.filled")[-1]
        assert (filled["epoch"], filled["sources"]) == (2, {"backup": 2})
    with WeightsLab() as lab:
        lab.start({"n0": [0], "n1": [1], "n2": [2]})
        lab.run(1, {0: [0, 1], 1: [2], 2: [3]})
        lab.ranks.pop(2).close()
        lab.dead(2)
        lab.run(2, {0: [0, 1, 3], 1: [2]}, expelled=[2])
        lab.check(0, [0, 1, 3])
        assert lab.moved("n0") == {"checkpoint": 6}
        lab.ranks.pop(1).close()
        lab.dead(1)
        leave_no_checkpoint(lab.written.path)
        lab.propose(3, {0: [0, 1, 3, 2]}, expelled=[1])
        answer = lab.staged(0, 3)
        assert "layer 0 expert 2, layer 1 expert 2" in answer.error
        assert [(e.layer, e.expert) for e in answer.unrestorable] == [(0, 2), (1, 2)]
        lab.check(0, [0, 1, 3])


def test_a_replica_that_lies_is_found_out_also_with_a_label_to_match() -> None:
    with WeightsLab() as lab:
        lab.start({"n0": [0], "n1": [1], "n2": [2]})
        lab.run(1, {0: [0, 1], 1: [2, 3], 2: [3, 2]})
        lab.flip(1, 3)
        lab.flip(1, 2, relabel=True)
        lab.run(2, {0: [0, 1, 3, 2], 1: [2, 3], 2: [3, 2]})
        lab.check(0, [0, 1, 3, 2])
        lied = lab.failures("n0", "lied")
        assert {event["expert"] for event in lied} == {2, 3}
        assert {event["source"] for event in lied} == {"rank 1 on n1"}


def test_a_backup_keeps_to_its_bound() -> None:
    with WeightsLab(unit=65536) as lab:
        lab.start({"n0": [0], "n1": [1]}, "--backup-bytes", "140000")
        lab.run(1, {0: [0, 1], 1: [2, 3]})
        lab.backed_up()
        for node in lab.nodes:
            assert lab.backup(node).bytes <= 140000
            assert lab.backup(node).valid == 2  # one of each layer
            assert lab.nodes[node].events("backup.short")[0]["experts"] == 2


def test_memory_that_is_not_there_is_a_typed_error() -> None:
    with WeightsLab(slots=4, unit=4096) as lab:
        spec = WeightSpec((TensorSpec.of("w2", "int8", (1 << 20, 1 << 15)),))
        lab.create(small_config(geometry=lab.group.geometry, weights=spec))
        daemon = lab.daemon("n0", "g:0")
        event = wait_for(lambda: daemon.events("seat.start_failed"), "the refusal")[0]
        assert "bytes and" in event["error"]
        assert "available" in event["error"]
        with pytest.raises(grpc.RpcError) as caught:
            daemon.attach("g", 0, wait_ms=60_000)
        assert reason_of(caught.value) == "MEMORY_SHORT"
        assert os.path.exists(f"/proc/{daemon.pid}")
