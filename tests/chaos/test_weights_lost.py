"""What a whole cluster does about experts that only a dead rank had."""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest

import elasticep
from elasticep.balance import RebalancePolicy
from elasticep.errors import ExpertsLost
from elasticep.geometry import GroupGeometry
from elasticep.group import GroupConfig, Timeouts
from elasticep.proto import node_pb2, node_pb2_grpc
from elasticep.spec import ExchangeSpec
from elasticep.testing.checkpoints import write_checkpoint
from elasticep.testing.clients import on_all
from elasticep.testing.cluster import Cluster, daemon_name
from elasticep.testing.node import wait_for
from elasticep.testing.weights import leave_no_checkpoint, one_tensor

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(400)
RANKS, LAYERS, EXPERTS = 3, 2, 6


def group(family: str = "w") -> GroupConfig:
    return GroupConfig(
        name=family,
        geometry=GroupGeometry(LAYERS, EXPERTS, 2, 32, EXPERTS, RANKS),
        exchanges=(
            (
                "decode",
                ExchangeSpec.preset(
                    "ROUTED", max_tokens=4, dispatch_dtype="fp32", combine_dtype="fp32"
                ),
            ),
        ),
        initial_ranks=RANKS,
        # Whoever is expelled for a machine that is busy is killed, and that is this process.
        timeouts=Timeouts(node_timeout_ms=20_000, hang_timeout_ms=30_000),
        spare_copies=0,
        weights=one_tensor(4096).spec(),
        rebalance=RebalancePolicy(automatic=False),
    )


class Ranks:
    """Engines of this process, which ask for every expert in every layer."""

    def __init__(self, cluster: Cluster, config: GroupConfig) -> None:
        self.sessions = [
            elasticep.attach(rank=r, socket=cluster.socket_of(r), config=config, timeout=60)
            for r in range(RANKS)
        ]
        self.x = torch.ones(3, 32)
        self.ids = torch.arange(EXPERTS, dtype=torch.int32).reshape(3, 2)
        self.weights = torch.ones(3, 2)

    def close(self) -> None:
        """Let go before anything else: a fenced engine that does not is killed, and all of them
        are this process.
        """
        for session in self.sessions:
            session.detach()

    def run(self, ranks: Sequence[int], members: set[int]) -> list[ExpertsLost | None]:
        """Step together until a view of these members runs whose steps are complete, or cannot be
        because of what is lost; what that is for each rank.
        """

        def one(session: elasticep.Session) -> tuple[bool, ExpertsLost | None]:
            exchange = session.exchange("decode")
            lost: ExpertsLost | None = None
            step = session.step(tokens=3)
            try:
                with step:
                    for layer in range(LAYERS):
                        recv = exchange.dispatch(layer, self.x, self.ids, self.weights)
                        recv.out.zero_()
                        session.weights(layer)
                        exchange.combine(layer, recv)
            except ExpertsLost as error:
                lost = error
            there = set(session.view.members) == members
            return there and (step.complete or lost is not None), lost

        end = time.monotonic() + 120
        found: dict[int, ExpertsLost] = {}
        while time.monotonic() < end:
            results = on_all([self.sessions[rank] for rank in ranks], one)
            found |= {rank: lost for rank, (_, lost) in zip(ranks, results, strict=True) if lost}
            complete = all(good and lost is None for good, lost in results)
            if complete or (set(found) == set(ranks) and any(good for good, _ in results)):
                return [None if complete else found[rank] for rank in ranks]
        raise AssertionError(f"no view of {members} within 120 s: {results}")

    def held(self, rank: int) -> list[tuple[int, int]]:
        """(layer, expert) pairs that the view gives to a rank."""
        table = self.sessions[rank].view.placement[:, rank]
        return [(layer, int(e)) for layer in range(LAYERS) for e in table[layer] if e >= 0]


def kill_worker(cluster: Cluster, rank: int) -> None:
    with grpc.insecure_channel(f"unix:{cluster.socket_of(rank)}") as channel:
        stub = node_pb2_grpc.NodeServiceStub(channel)
        seats = stub.GetStatus(node_pb2.GetStatusRequest(), timeout=60).seats
    pid = next(s.worker_pid for s in seats if s.seat.rank == rank)
    assert pid > 1
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("backup", [True, False])
def test_lost_experts_come_back_or_are_named(tmp_path: Path, backup: bool) -> None:
    written = write_checkpoint(
        tmp_path / "model", one_tensor(4096), layers=LAYERS, experts=EXPERTS, shards=1
    )
    more = {"ELASTICEP_DAEMON_BACKUP_BYTES": "1000000"} if backup else {}
    environment = {daemon_name(node): more for node in range(RANKS)}
    with (
        Cluster(
            group="w", ranks=RANKS, nodes=RANKS, environment=environment, checkpoint=written.path
        ) as cluster,
        contextlib.closing(Ranks(cluster, group())) as ranks,
    ):
        assert ranks.run([0, 1, 2], {0, 1, 2}) == [None] * RANKS
        gone = ranks.held(2)
        assert gone
        if backup:
            wait_for(
                lambda: all(
                    '"backup.complete"' in cluster.log(daemon_name(node)) for node in range(RANKS)
                ),
                "the backups",
            )
        leave_no_checkpoint(written.path)
        kill_worker(cluster, 2)
        ranks.sessions[2].detach()
        lost = ranks.run([0, 1], {0, 1})
        if backup:
            assert lost == [None, None]
            assert {*ranks.held(0), *ranks.held(1)} >= set(gone)
        else:
            for error in lost:
                assert error is not None
                assert set(error.lost) == set(gone)
                layer, expert = gone[0]
                assert f"layer {layer} expert {expert}" in str(error)
