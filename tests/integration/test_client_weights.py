"""Expert weights from a checkpoint through a whole local cluster into engines' hands."""

import contextlib
import json
import mmap
import os
import re
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import elasticep
from elasticep.arena import Arena, Label
from elasticep.balance import RebalancePolicy
from elasticep.checkpoint import open_checkpoint
from elasticep.errors import UsageError
from elasticep.geometry import GroupGeometry
from elasticep.group import GroupConfig, Timeouts
from elasticep.handover import fetch_arena
from elasticep.spec import ExchangeSpec
from elasticep.testing.checkpoints import WrittenCheckpoint, write_checkpoint
from elasticep.testing.clients import on_all
from elasticep.testing.cluster import Cluster, daemon_name
from elasticep.testing.weights import wrong_labels

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(400)
RANKS, NODES, LAYERS, EXPERTS, SLOTS = 3, 2, 2, 4, 4
PARTS = {"w13": ("w1", "w3"), "w13_scale_inv": ("w1_scale_inv", "w3_scale_inv")}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> WrittenCheckpoint:
    """fp8 matrices with their block scales, as DeepSeek has them, after one dense layer."""
    folder = tmp_path_factory.mktemp("model")
    return write_checkpoint(folder, "deepseek", layers=LAYERS, experts=EXPERTS)


@pytest.fixture(scope="module")
def cluster(written: WrittenCheckpoint) -> Iterator[Cluster]:
    environment = {
        daemon_name(node): {"ELASTICEP_DAEMON_METRICS_PORT": "0"} for node in range(NODES)
    }
    with Cluster(
        group="w", ranks=RANKS, nodes=NODES, environment=environment, checkpoint=written.path
    ) as running:
        yield running


@pytest.fixture(scope="module")
def config(written: WrittenCheckpoint) -> GroupConfig:
    return GroupConfig(
        name="w",
        geometry=GroupGeometry(LAYERS, EXPERTS, 2, 16, SLOTS, RANKS),
        exchanges=(("decode", ExchangeSpec.preset("ROUTED", max_tokens=4)),),
        initial_ranks=RANKS,
        weights=open_checkpoint(written.path).weight_spec(),
        flap_limit=0,
        # A killed daemon is back before, on any machine: an engine that is expelled is killed, and
        # that is this process.
        timeouts=Timeouts(node_timeout_ms=20_000, hang_timeout_ms=30_000),
        rebalance=RebalancePolicy(automatic=False),
    )


def attach(cluster: Cluster, config: GroupConfig, rank: int) -> elasticep.Session:
    return elasticep.attach(rank=rank, socket=cluster.socket_of(rank), config=config, timeout=60)


def step_until_members_are(sessions: Sequence[elasticep.Session], members: set[int]) -> None:
    """All see the same view at the same step, so they stop together."""

    def one(session: elasticep.Session) -> None:
        for _ in range(1_000_000):
            with session.step() as step:
                pass
            if set(step.members) == members:
                return

    on_all(sessions, one)


def bytes_of(tensors: Any, slot: int) -> dict[str, bytes]:
    return {
        name: tensor[slot].reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in tensors.items()
    }


def check(sessions: Sequence[elasticep.Session], written: WrittenCheckpoint) -> None:
    """Every slot that the view names holds that expert, all tensors of it; all are covered."""
    for layer in range(LAYERS):
        covered = set()
        for session in sessions:
            weights = session.weights(layer)
            for slot, expert in enumerate(session.slots(layer)):
                if expert < 0:
                    continue
                covered.add(expert)
                unit = written.units[layer, expert]
                wanted = {
                    name: b"".join(unit[part] for part in PARTS.get(name, (name,)))
                    for name in weights
                }
                assert bytes_of(weights, slot) == wanted, (session.rank, layer, slot, expert)
        assert covered == set(range(EXPERTS))


def moved(cluster: Cluster, source: str) -> int:
    """Experts that the daemons have put in place from one kind of source."""
    total = 0
    for node in range(NODES):
        lines = cluster.log(daemon_name(node)).splitlines()
        ready = [json.loads(line) for line in lines if '"daemon.ready"' in line]
        port = ready[-1]["metrics_port"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
            text = page.read().decode()
        pattern = rf'^elasticep_weights_experts_moved_total\{{.*source="{source}".*\}} (\S+)$'
        total += sum(int(float(n)) for n in re.findall(pattern, text, re.MULTILINE))
    return total


@contextlib.contextmanager
def arena_of(cluster: Cluster, config: GroupConfig, rank: int) -> Iterator[Arena]:
    layout = config.arena_layout()
    assert layout is not None
    fd_socket = str(Path(cluster.socket_of(rank)).with_name("daemon.fd"))
    fd = fetch_arena(fd_socket, config.name, rank).fd
    with contextlib.closing(mmap.mmap(fd, layout.total_bytes, prot=mmap.PROT_READ)) as memory:
        os.close(fd)
        arena = Arena(memory, layout)
        try:
            yield arena
        finally:
            arena.release()


def labels_of(cluster: Cluster, config: GroupConfig, rank: int) -> dict[tuple[int, int], Label]:
    """Of one rank's arena; and whatever a slot says that it holds, its bytes sum up to."""
    with arena_of(cluster, config, rank) as arena:
        assert wrong_labels(arena) == []
        return {(layer, slot): label for layer, slot, label in arena.all_labels()}


def test_an_engine_has_the_weights_of_its_view_whoever_comes_and_goes(
    cluster: Cluster, config: GroupConfig, written: WrittenCheckpoint
) -> None:
    sessions = on_all(range(RANKS), lambda rank: attach(cluster, config, rank))
    step_until_members_are(sessions, {0, 1, 2})
    check(sessions, written)
    assert moved(cluster, "checkpoint") >= LAYERS * EXPERTS

    # Fewer ranks: what rank 2 held alone is on others before the view without it is adopted.
    sessions.pop().detach()
    step_until_members_are(sessions, {0, 1})
    check(sessions, written)
    before = [labels_of(cluster, config, rank) for rank in range(RANKS)]

    # An engine that is started anew attaches to what lies there: nothing of it is written again.
    read = moved(cluster, "checkpoint")
    sessions.append(attach(cluster, config, 2))
    step_until_members_are(sessions, {0, 1, 2})
    check(sessions, written)
    assert moved(cluster, "checkpoint") == read
    kept = 0
    for rank, session in enumerate(sessions):
        after = labels_of(cluster, config, rank)
        for (layer, slot), label in before[rank].items():
            if label.holds(session.slots(layer)[slot]):
                kept += 1
                assert after[layer, slot] == label, (rank, layer, slot)
    assert kept >= LAYERS * EXPERTS
    for session in sessions:
        session.detach()
    with pytest.raises(UsageError, match="detached"):
        sessions[0].weights(0)


def test_a_restarted_daemon_hands_out_the_same_weights(
    cluster: Cluster, config: GroupConfig, written: WrittenCheckpoint
) -> None:
    """Its arena was in the service manager's keeping: engines map what they had before."""
    sessions = on_all(range(RANKS), lambda rank: attach(cluster, config, rank))
    step_until_members_are(sessions, {0, 1, 2})
    check(sessions, written)
    weights = sessions[0].weights(0)
    before = labels_of(cluster, config, 0)
    unit = daemon_name(cluster.node_of(0))
    first = cluster.pids[unit]
    cluster.kill(unit)
    cluster.wait_for(lambda: cluster.pids.get(unit, first) != first, 30, "the daemon is back")
    step_until_members_are(sessions, {0, 1, 2})
    check(sessions, written)
    assert weights["w2"].data_ptr() == sessions[0].weights(0)["w2"].data_ptr()
    assert labels_of(cluster, config, 0) == before
    for session in sessions:
        session.detach()
