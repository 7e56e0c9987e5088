"""Daemons fill arenas of expert weights: from checkpoints, replicas and backups, verified."""

import os

import pytest

from elasticep.testing.lab import small_config
from elasticep.testing.node import wait_for
from elasticep.testing.weights import WeightsLab, leave_no_checkpoint
from elasticep.weights import TensorSpec, WeightSpec


def test_a_group_starts_from_the_checkpoint_and_reads_no_more_than_it_needs() -> None:
    with WeightsLab() as lab:
        lab.start({"n0": [0, 1]})
        lab.run(1, {0: [0, 1], 1: [2, 3]})
        lab.check(0, [0, 1])
        lab.check(1, [2, 3])
        assert lab.moved("n0") == {"checkpoint": 8}
        arenas = lab.nodes["n0"].status().arenas
        assert [(a.rank, a.slots, a.valid, a.filling) for a in arenas] == [
            (0, 8, 4, 0),
            (1, 8, 4, 0),
        ]
        filled = lab.nodes["n0"].events("weights.filled")
        assert sorted(event["rank"] for event in filled) == [0, 1]


def test_a_view_moves_experts_between_ranks_of_a_domain_and_within_a_rank() -> None:
    with WeightsLab() as lab:
        lab.start({"n0": [0], "n1": [1]})
        lab.run(1, {0: [0, 1], 1: [2, 3]})
        before = {node: lab.moved(node) for node in lab.nodes}
        lab.run(2, {0: [0, 1, 2, 1], 1: [2, 3, 0]})
        lab.check(0, [0, 1, 2, 1])
        lab.check(1, [2, 3, 0])
        assert before == {"n0": {"checkpoint": 4}, "n1": {"checkpoint": 4}}
        assert lab.moved("n0") == {"checkpoint": 4, "replica": 4}
        assert lab.moved("n1") == {"checkpoint": 4, "replica": 2}


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


def test_an_engine_that_comes_back_finds_its_weights() -> None:
    with WeightsLab() as lab:
        lab.start({"n0": [0], "n1": [1]})
        lab.run(1, {0: [0, 1], 1: [2, 3]})
        lab.ranks.pop(0).close()  # SIGKILL
        lab.dead(0)
        lab.open(0, 2)
        lab.ranks[0].say("step")
        view = {0: [0, 1], 1: [2, 3]}
        lab.propose(2, view, stage=[0])
        assert lab.staged(0, 2).error == ""
        lab.check(0, [0, 1])
        assert lab.moved("n0") == {"checkpoint": 4}


def test_a_lost_expert_comes_from_a_backup_then_from_disk_then_it_is_named() -> None:
    with WeightsLab() as lab:
        lab.start({"n0": [0], "n1": [1], "n2": [2]}, "--backup-bytes", "1000000")
        lab.run(1, {0: [0, 1], 1: [2], 2: [3]})
        lab.backed_up()
        lab.ranks.pop(2).close()
        lab.dead(2)
        # Nobody has expert 3 now but the backup of a node that it did not live on.
        lab.run(2, {0: [0, 1, 3], 1: [2]}, expelled=[2])
        lab.check(0, [0, 1, 3])
        kinds = lab.moved("n0")
        assert kinds["backup"] >= 2, kinds
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


@pytest.mark.parametrize("relabel", [False, True])
def test_a_replica_that_lies_is_found_out(relabel: bool) -> None:
    with WeightsLab() as lab:
        lab.start({"n0": [0], "n1": [1], "n2": [2]})
        lab.run(1, {0: [0, 1], 1: [2, 3], 2: [3, 1]})
        lab.flip(1, 3, relabel=relabel)
        lab.run(2, {0: [0, 1, 3], 1: [2, 3], 2: [3, 1]})
        lab.check(0, [0, 1, 3])
        lied = lab.failures("n0", "lied")
        assert lied
        assert {event["source"] for event in lied} == {"rank 1 on n1"}


def test_backups_cover_every_expert_when_nodes_do_not_divide_them() -> None:
    with WeightsLab(experts=5, slots=5) as lab:
        lab.start({"n0": [0], "n1": [1]}, "--backup-bytes", "1000000")
        lab.run(1, {0: [0, 1, 2], 1: [3, 4]})
        lab.backed_up()
        status = [lab.backup(node) for node in lab.nodes]
        assert sum(s.valid for s in status) == 10
        assert all(s.done_bytes == s.total_bytes for s in status)


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
        assert os.path.exists(f"/proc/{daemon.pid}")
