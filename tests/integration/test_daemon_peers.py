"""Daemons of one domain: memory fetched from each other, deaths told to each other."""

import os
import signal

import grpc
import pytest

from elasticep.geometry import MAX_RANKS, GroupGeometry
from elasticep.group import Launch, Timeouts
from elasticep.proto import controller_pb2, node_pb2, types_pb2
from elasticep.spec import ExchangeSpec
from elasticep.testing.lab import Lab, small_config
from elasticep.testing.node import DaemonProcess, EngineProcess, reason_of, view_of, wait_for
from elasticep.testing.processes import descriptors, stop

MEMBERS = {0: (1, "n0"), 1: (1, "n1")}


def two_nodes(lab: Lab, *flags: str) -> tuple[list[DaemonProcess], list[EngineProcess]]:
    """Rank 0 on node n0, rank 1 on node n1, both attached."""
    daemons = [lab.daemon(f"n{i}", f"g:{i}", *flags, start=False) for i in (0, 1)]
    for daemon in daemons:
        daemon.start(wait=False)
    engines = []
    for rank in (0, 1):
        lab.ready(rank)
        engines.append(lab.engine(daemons[rank], "g", rank))
    for rank, engine in enumerate(engines):
        engine.up()
        lab.attached(rank)
    return daemons, engines


def serve(lab: Lab, engines: list[EngineProcess]) -> None:
    config = lab.config
    assert config is not None
    lab.controller.propose(view_of(config, 1, 0, MEMBERS), {"n0": [0], "n1": [1]})
    assert lab.step(engines) == ["stepped 1 1 1"] * 2


@pytest.mark.parametrize("launch", list(Launch))
def test_ranks_of_two_nodes_step_together(launch: Launch) -> None:
    with Lab() as lab:
        lab.create(small_config(launch=launch))
        daemons, engines = two_nodes(lab)
        serve(lab, engines)
        # A death on one node: its daemon tells the other one, whose engines are told by memory.
        engines[0].say("step")
        os.kill(engines[1].pid, signal.SIGKILL)
        assert lab.dead(1).cause == "engine died"
        told = wait_for(lambda: daemons[0].events("peer.dead"), "the other daemon to be told")
        assert (told[0]["rank"], told[0]["incarnation"]) == (1, 1)
        alone = view_of(small_config(launch=launch), 2, 1, {0: (1, "n0")}, expelled={1: 1})
        lab.controller.propose(alone, {"n0": [0]})
        assert engines[0].hear().startswith("stepped 2 ")
        # It returns under a new incarnation, with the memory that n0 still has mapped.
        lab.ready(1, 2)
        back = lab.engine(daemons[1], "g", 1).up()
        both = {0: (1, "n0"), 1: (2, "n1")}
        lab.controller.propose(view_of(small_config(launch=launch), 3, 2, both), {"n1": [1]})
        back.say("step")
        assert lab.staged(1, 3).error == ""
        lab.controller.propose(view_of(small_config(launch=launch), 3, 2, both), {"n0": [0]})
        assert lab.staged(0, 3).error == ""
        engines[0].say("step")
        lab.joined([engines[0], back], 3)
        # Nothing of earlier views is held: one fetched peer, one own seat, two banks at most.
        names = memfds(daemons[0])
        assert sum("view" in name for name in names) <= 2, names
        assert sum("header" in name for name in names) == 2, names


def test_an_expelled_rank_of_another_node_is_dead_here_at_once() -> None:
    with Lab() as lab:
        lab.create(small_config())
        _, engines = two_nodes(lab)
        serve(lab, engines)
        engines[0].say("step")  # waits at the barrier for rank 1, which never comes
        view = view_of(small_config(), 2, 1, {0: (1, "n0")}, expelled={1: 1})
        nodes = list(lab.controller.endpoints.values())
        proposal = controller_pb2.Proposal(view=view, nodes=nodes, stage_ranks=[0])
        lab.controller.order("n0", controller_pb2.ControllerMessage(proposal=proposal))
        assert engines[0].hear().startswith("stepped 2 ")


def test_a_rank_that_detached_is_dead_to_those_that_wait_for_it() -> None:
    inline = small_config(launch=Launch.INLINE)
    with Lab() as lab:
        lab.create(inline)
        daemon = lab.daemon("n0", "g:0-1")
        engines = lab.serve(daemon, [0, 1])
        assert engines[1].ask("close") == "closed"
        lab.empty(1)
        answer = engines[0].ask("step 300")
        assert "is dead and no later view" in answer, answer


def test_a_restarted_daemon_maps_its_peers_again() -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemons, engines = two_nodes(lab)
        serve(lab, engines)
        daemons[0].kill()
        daemons[0].start()
        wait_for(
            lambda: sum("-1-header" in name for name in memfds(daemons[0])) == 1,
            "the header of rank 1 to be mapped again",
        )
        assert lab.step(engines) == ["stepped 1 2 1"] * 2


def memfds(daemon: DaemonProcess) -> list[str]:
    return [name for name in descriptors(daemon.pid) if name.startswith("/memfd:")]


def test_a_daemon_that_does_not_answer_is_named_within_the_deadline() -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemons, engines = two_nodes(lab)
        assert daemons[1].process is not None
        stop(daemons[1].process.pid)
        view = view_of(small_config(), 1, 0, MEMBERS)
        engines[0].say("step 100")
        lab.controller.propose(view, {"n0": [0]})
        error = lab.staged(0, 1).error
        assert "rank 1" in error
        assert "node 'n1'" in error
        assert "no answer within" in error
        assert engines[0].hear().startswith("error StepTimeout")
        daemons[1].process.send_signal(signal.SIGCONT)
        # The same proposal again, and this time it works.
        lab.controller.forget()
        engines[0].say("step")
        lab.controller.propose(view, {"n0": [0], "n1": [1]})
        assert lab.staged(0, 1).error == ""
        engines[1].say("step")
        assert engines[0].hear() == engines[1].hear() == "stepped 1 1 1"


def test_ranks_of_another_domain_are_refused_with_a_reason() -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemons = [
            lab.daemon("n0", "g:0"),
            lab.daemon("n1", "g:1", "--domain", "elsewhere"),
        ]
        for rank in (0, 1):
            lab.ready(rank)
            lab.engine(daemons[rank], "g", rank).up()
        lab.controller.propose(view_of(small_config(), 1, 0, MEMBERS), {"n0": [0]})
        assert "domain 'elsewhere'" in lab.staged(0, 1).error


def test_a_daemon_believes_others_about_their_own_ranks_only() -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0-1")
        engines = lab.serve(daemon, [0, 1])
        for rank, incarnation, group, word in (
            (1, 1, "g", "USAGE"),
            (9, 1, "g", "CONFIG_INVALID"),
            (3, 0, "g", "CONFIG_INVALID"),
            (1, 1, "h", "GROUP_UNKNOWN"),
        ):
            request = node_pb2.ReportDeathRequest(
                group=group, rank=rank, incarnation=incarnation, cause="x" * 10_000
            )
            with pytest.raises(grpc.RpcError) as caught:
                daemon.call("ReportDeath", request)
            assert reason_of(caught.value) == word
        daemon.call("ReportDeath", node_pb2.ReportDeathRequest(group="g", rank=3, incarnation=1))
        assert lab.step(engines) == ["stepped 1 2 1"] * 2
        seats = daemon.status().seats
        assert {s.seat.state for s in seats} == {types_pb2.SEAT_STATE_ATTACHED}


def test_a_group_of_as_many_ranks_as_there_may_be_is_staged() -> None:
    """One message takes the memory of 126 peers."""
    geometry = GroupGeometry(
        layers=1, experts=2, topk=1, hidden=32, slots_per_rank=1, max_ranks=MAX_RANKS
    )
    spec = ExchangeSpec.preset("ROUTED", max_tokens=1, dispatch_dtype="fp32", combine_dtype="fp32")
    config = small_config(
        launch=Launch.INLINE,
        geometry=geometry,
        exchanges=(("decode", spec),),
        timeouts=Timeouts(step_timeout_ms=2_000),
    )
    offers = {"n0": range(2), "n1": range(2, 65), "n2": range(65, MAX_RANKS)}
    with Lab() as lab:
        lab.create(config)
        daemons = [
            lab.daemon(node, f"g:{ranks[0]}-{ranks[-1]}", start=False)
            for node, ranks in offers.items()
        ]
        for daemon in daemons:
            daemon.start(wait=False)
        for rank in range(MAX_RANKS):
            lab.ready(rank)
        engine = lab.engine(daemons[0], "g", 0).up()
        lab.attached(0)
        members = {rank: (1, node) for node, ranks in offers.items() for rank in ranks}
        lab.controller.propose(view_of(config, 1, 0, members), {"n0": [0]})
        answer = engine.ask("step 500")  # it has staged the view, and nobody else comes
        assert answer.startswith("error StepTimeout"), answer
        assert lab.staged(0, 1).error == ""
        # Whom it has by now need not come again.
        lab.controller.propose(view_of(config, 2, 1, members), {"n0": [0]})
        assert lab.staged(0, 2).error == ""
