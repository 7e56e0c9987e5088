"""A group is deleted and created anew with another geometry while one of its nodes is down."""

import os
from collections.abc import Iterator
from contextlib import ExitStack

import grpc
import pytest
from click.testing import CliRunner

from elasticep.cli.main import cli
from elasticep.geometry import GroupGeometry
from elasticep.group import GroupConfig, Timeouts
from elasticep.native import abi
from elasticep.proto import node_pb2, node_pb2_grpc
from elasticep.spec import ExchangeSpec
from elasticep.testing.cluster import CONTROLLER, Cluster, daemon_name
from elasticep.testing.node import EngineProcess
from elasticep.testing.processes import alive

pytestmark = pytest.mark.timeout(400)
ATTACH_MS = 90_000


def config(**sizes: int) -> GroupConfig:
    spec = ExchangeSpec.preset("ROUTED", max_tokens=8, dispatch_dtype="fp32", combine_dtype="fp32")
    plain = {"layers": 1, "experts": 4, "topk": 2, "hidden": 32, "slots_per_rank": 4}
    return GroupConfig(
        name="g",
        geometry=GroupGeometry(**{**plain, "max_ranks": 2, **sizes}),
        exchanges=(("decode", spec),),
        initial_ranks=2,
        # The node that is down stays a member until the group is deleted, on any machine.
        timeouts=Timeouts(node_timeout_ms=60_000, hang_timeout_ms=60_000),
        flap_limit=0,
    )


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(group="g", ranks=2, nodes=2) as running:
        yield running


class Engines(ExitStack):
    """Engine processes by rank, and under which incarnations they came in."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self.cluster = cluster
        self.incarnations: list[int] = []

    def attach(self, rank: int, wanted: GroupConfig) -> EngineProcess:
        request = node_pb2.AttachRequest(
            group="g",
            rank=rank,
            pid=os.getpid(),
            config=wanted.to_proto(),
            abi_version=abi.ABI_VERSION,
            wait_ms=ATTACH_MS,
        )
        with grpc.insecure_channel(f"unix:{self.cluster.socket_of(rank)}") as channel:
            stub = node_pb2_grpc.NodeServiceStub(channel)
            answer = stub.Attach(request, timeout=ATTACH_MS / 1000 + 10)
        assert answer.config == wanted.to_proto()
        self.incarnations.append(answer.incarnation)
        return self.enter_context(EngineProcess(answer.fd_socket, answer.ticket)).up()


def epoch_of(engines: list[EngineProcess]) -> int:
    """A step of all of them together, in one view."""
    for engine in engines:
        engine.say("step 60000")
    answers = [engine.hear(90) for engine in engines]
    words = {tuple(answer.split()[:3]) for answer in answers}
    assert len(words) == 1, answers
    word, epoch, _ = words.pop()
    assert word == "stepped", answers
    return int(epoch)


def test_a_node_that_was_down_meanwhile_ends_its_old_ranks_and_joins_the_new_group(
    cluster: Cluster,
) -> None:
    old, new = config(), config(hidden=64, layers=2)
    controllers = ["--controllers", cluster.controller_address(), "--timeout", "60"]

    def delete(*words: str) -> str:
        return CliRunner().invoke(cli, ["group", "delete", "g", *words, *controllers]).output

    with Engines(cluster) as engines:
        both = [engines.attach(rank, old) for rank in (0, 1)]
        before = epoch_of(both)
        assert engines.incarnations == [1, 1]
        cluster.kill(daemon_name(1), hold=True)
        cluster.wait_for(lambda: daemon_name(1) not in cluster.pids, 60, "the daemon is down")
        said = delete("--force", "--reason", "another geometry")
        assert said == "group g is deleted; ranks 0-1 were fenced\n"
        answer = both[0].ask("step 60000", 90)
        assert answer.startswith("error Fenced")
        assert "group 'g' was deleted: another geometry" in answer
        assert both[0].ask("close") == "closed"
        first = engines.attach(0, new)
        assert alive(both[1].pid), "its daemon has not come back yet"

        # The next leader knows of the old group's numbers, too.
        cluster.kill(CONTROLLER)
        cluster.wait_for(lambda: CONTROLLER not in cluster.pids, 60, "the controller ends")
        cluster.wait_for(lambda: CONTROLLER in cluster.pids, 60, "the controller is back")
        cluster.start_again(daemon_name(1))
        cluster.wait_for(lambda: daemon_name(1) in cluster.pids, 60, "the daemon is back")
        second = engines.attach(1, new)
        assert not alive(both[1].pid) or "Fenced" in both[1].ask("step 60000", 90)
        assert epoch_of([first, second]) > before
        assert min(engines.incarnations[2:]) > max(engines.incarnations[:2])
        assert "group.forgotten" in cluster.log(daemon_name(1))
