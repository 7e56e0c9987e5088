"""Sources, targets and the mover itself die, hang or stop while expert weights are copied."""

import os
import signal
import time

import pytest

from elasticep.testing.node import wait_for
from elasticep.testing.processes import stop
from elasticep.testing.systemd import Systemd
from elasticep.testing.weights import WeightsLab, wrong_labels

MIB = 1 << 20


def test_the_mover_is_replaced_when_it_dies_or_hangs() -> None:
    with WeightsLab(unit=1 << 20) as lab:
        lab.start({"n0": [0], "n1": [1]}, "--weights-rate", "1500000")
        lab.run(1, {0: [0, 1], 1: [2, 3]})
        daemon = lab.nodes["n0"]
        lab.propose(2, {0: [0, 1, 2, 3], 1: [2, 3]})
        for number, word in ((signal.SIGKILL, "ended"), (signal.SIGSTOP, "stuck")):
            pid = wait_for(lambda: daemon.status().mover_pid, "a mover")
            wait_for(
                lambda: any(a.filling and a.done_bytes for a in daemon.status().arenas), "a copy"
            )
            os.kill(pid, number)
            wait_for(lambda word=word: daemon.events(f"weights.mover_{word}"), f"mover {word}")
        for rank in (0, 1):
            assert lab.staged(rank, 2).error == ""
        lab.check(0, [0, 1, 2, 3])
        # The controller heard how far it was: a rank that loads is not late.
        said = [
            (rank.staging_done_bytes, rank.staging_total_bytes)
            for node, message in lab.controller.messages
            if node == "n0" and message.HasField("heartbeat")
            for rank in message.heartbeat.ranks
            if rank.staging_epoch == 2
        ]
        assert any(0 < done <= total == 4 * MIB for done, total in said), said


def test_a_source_that_dies_in_the_middle_is_replaced_by_the_next() -> None:
    with WeightsLab(layers=1, unit=4 * MIB) as lab:
        lab.start({"n0": [0], "n1": [1], "n2": [2]}, "--weights-rate", "2000000")
        lab.run(1, {0: [0], 1: [1, 2], 2: [3]})
        daemon = lab.nodes["n0"]
        lab.propose(2, {0: [0, 1], 1: [1, 2], 2: [3]}, stage=[0])
        wait_for(lambda: any(a.done_bytes for a in daemon.status().arenas), "a copy")
        lab.ranks.pop(1).close()
        lab.dead(1)
        gone = wait_for(lambda: lab.failures("n0", "gone"), "the copy to be called off")
        assert gone[0]["source"] == "rank 1 on n1"
        assert lab.staged(0, 2).error == ""
        lab.check(0, [0, 1])
        assert lab.moved("n0") == {"checkpoint": 2}


def test_a_target_that_dies_in_the_middle_leaves_no_label_over_wrong_bytes() -> None:
    with WeightsLab(layers=1, unit=4 * MIB) as lab:
        lab.start({"n0": [0], "n1": [1]}, "--weights-rate", "8000000")
        lab.run(1, {0: [0, 1], 1: [2, 3]})
        daemon = lab.nodes["n0"]
        lab.propose(2, {0: [0, 1, 2], 1: [2, 3]}, stage=[0])
        wait_for(lambda: any(a.done_bytes for a in daemon.status().arenas), "a copy")
        lab.ranks.pop(0).close()
        lab.dead(0)
        with lab.arena(0) as arena:
            assert not wrong_labels(arena)
        lab.open(0, 2)
        lab.ranks[0].say("step")
        lab.propose(3, {0: [0, 1, 3], 1: [2, 3]}, stage=[0])
        assert lab.staged(0, 3).error == ""
        lab.check(0, [0, 1, 3])


def test_a_source_that_stalls_is_left_for_the_next() -> None:
    """Between domains; views across domains are not staged, but what they want is fetched."""
    with WeightsLab(layers=1, unit=16 * MIB) as lab:
        lab.start(
            {"n0": [0], "n1": [1]},
            *("--weights-rate", "5000000"),
            n1=["--domain", "elsewhere"],
        )
        lab.ranks[1].say("step")
        lab.propose(1, {1: [2, 3]}, stage=[1])
        assert lab.ranks[1].hear().split()[:2] == ["stepped", "1"]
        n0, n1 = lab.nodes["n0"], lab.nodes["n1"]
        lab.propose(2, {0: [0, 2], 1: [2, 3]}, stage=[0])
        wait_for(
            lambda: any(17 * MIB < a.done_bytes < 30 * MIB for a in n0.status().arenas),
            "a copy out of the other domain",
        )
        stop(n1.pid)
        stalled = wait_for(lambda: lab.failures("n0", "stalled"), "the stall to be noticed")
        assert (stalled[0]["kind"], stalled[0]["source"]) == ("remote", "rank 1 on n1")
        assert "no transport between domains" in lab.staged(0, 2).error
        os.kill(n1.pid, signal.SIGCONT)
        lab.check(0, [0, 2])


def test_between_domains_experts_are_streamed() -> None:
    with WeightsLab(layers=2, unit=MIB) as lab:
        path = str(lab.written.path)
        lab.start(
            {"n0": [0], "n1": [1]},
            checkpoint=False,
            n1=["--domain", "elsewhere", "--checkpoint", path],
        )
        lab.ranks[1].say("step")
        lab.propose(1, {1: [2, 3]}, stage=[1])
        assert lab.ranks[1].hear().split()[:2] == ["stepped", "1"]
        lab.propose(2, {0: [3, 2], 1: [2, 3]}, stage=[0])
        assert "no transport between domains" in lab.staged(0, 2).error
        lab.check(0, [3, 2])
        assert lab.moved("n0") == {"remote": 4}


def test_nothing_is_held_back_that_a_view_without_the_dead_waits_for() -> None:
    """What it has from the view before, too: nobody steps until all of it is in place."""
    with WeightsLab(layers=1, unit=4 * MIB) as lab:
        lab.start({"n0": [0], "n1": [1], "n2": [2]}, "--weights-rate", "200000")
        lab.run(1, {0: [0], 1: [1], 2: [2, 3]})
        lab.ranks.pop(1).close()
        lab.dead(1)
        began = time.monotonic()
        lab.propose(2, {0: [0, 1, 2, 3], 2: [2, 3]}, expelled=[1])
        assert lab.staged(0, 2).error == ""
        assert time.monotonic() - began < 20  # two replicas at that rate take 42 s
        assert lab.moved("n0") == {"checkpoint": 2, "replica": 2}


@pytest.mark.long
def test_a_checkpoint_that_is_mounted_nowhere_makes_no_expert_lost() -> None:
    """All nodes see an empty folder where it was: that is said, and when it is back it is read."""
    with WeightsLab(layers=1) as lab:
        lab.start({"n0": [0], "n1": [1]})
        lab.run(1, {0: [0, 1], 1: [2, 3]})
        mounted = lab.written.path
        elsewhere = mounted.with_name("unmounted")
        mounted.rename(elsewhere)
        mounted.mkdir()
        lab.ranks.pop(1).close()
        lab.dead(1)
        lab.propose(2, {0: [0, 1, 2, 3]}, expelled=[1])
        answer = lab.staged(0, 2)
        assert "could not be had within 3 s" in answer.error
        assert not answer.unrestorable
        away = lab.failures("n0", "away")
        assert {event["kind"] for event in away} == {"checkpoint"}
        mounted.rmdir()
        elsewhere.rename(mounted)
        lab.propose(3, {0: [0, 1, 2, 3]}, expelled=[1])
        assert lab.staged(0, 3).error == ""
        lab.check(0, [0, 1, 2, 3])


@pytest.mark.long
@pytest.mark.parametrize("kept", [True, False])
def test_a_daemon_that_comes_back_has_its_arenas_if_somebody_kept_them(kept: bool) -> None:
    with WeightsLab() as lab:
        systemd = Systemd(lab.folder)
        lab.create(lab.group)
        path = str(lab.written.path)
        flags = ("--checkpoint", path, "--backup-bytes", "1000000", "--metrics-port", "0")
        daemon = lab.nodes["n0"] = lab.daemon("n0", "g:0-1", *flags, start=False)
        if kept:
            systemd.wrap(daemon)
        daemon.start()
        for rank in (0, 1):
            lab.open(rank)
        lab.run(1, {0: [0, 1], 1: [2, 3]})
        lab.backed_up()
        daemon.kill()
        if kept:
            systemd.wrap(daemon)
        lab.controller.forget()
        daemon.start()
        lab.controller.wait(lambda _, m: m.HasField("hello"), "a hello")
        wait_for(lambda: len(daemon.events("seat.reattached")) >= 2, "runners to come back")
        if not kept:
            # The engines compute from memory that this daemon has not: nothing new can be put
            # there, and what needs nothing new goes on.
            lab.propose(2, {0: [0, 1, 2], 1: [2, 3]}, stage=[0])
            assert "lost with the daemon before" in lab.staged(0, 2).error
            lab.run(3, {0: [0, -1], 1: [2, 3]}, previous=1)
        else:
            assert lab.backup("n0").valid == 8
            lab.run(2, {0: [0, 1, 2], 1: [2, 3]})
            lab.check(0, [0, 1, 2])
            assert lab.moved("n0") == {"replica": 2}
            # What the last daemon handed to a runner is in use for this one, too.
            lab.propose(3, {0: [3, 1, 2], 1: [2, 3]}, stage=[0])
            wait_for(
                lambda: any(e["epoch"] == 3 for e in daemon.events("weights.filling")), "a fill"
            )
            lab.propose(4, {0: [0, 1, 2], 1: [2, 3, 0]}, previous=2)
            assert lab.staged(1, 4).error == ""
            lab.check(0, [0, 1, 2])
        systemd.close()
