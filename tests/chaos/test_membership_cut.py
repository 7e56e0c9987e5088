"""Links between hosts that are cut, both ways or one, and heal: network namespaces, mutual TLS."""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from elasticep.group import Timeouts
from elasticep.testing.cluster import CONTROLLER, Cluster, daemon_name
from elasticep.testing.decoding import Fleet, light_config
from elasticep.testing.netns import BOTH, FROM, TO, Namespace, Wire, missing

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl makes the certificates"
)
RANKS = range(4)
# Longer than a busy machine keeps a daemon from being heard.
TIMEOUTS = Timeouts(node_timeout_ms=5_000, hang_timeout_ms=10_000)


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def tls(folder: Path, process: str, name: str, *addresses: str) -> dict[str, str]:
    """Variables of a process with a certificate for its name and addresses."""
    new = ["-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    if not (folder / "ca.pem").exists():
        subject = ["-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.pem"]
        openssl(folder, "req", "-x509", *new, *subject)
    extension = folder / f"{name}.ext"
    places = ",".join(f"IP:{address}" for address in (*addresses, "127.0.0.1"))
    extension.write_text(f"subjectAltName=DNS:{name},{places}\n")
    openssl(
        folder,
        *("req", *new, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}"),
    )
    openssl(
        folder,
        *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key"),
        *("-CAcreateserial", "-out", f"{name}.pem", "-extfile", extension.name),
    )
    files = {"CERT": f"{name}.pem", "KEY": f"{name}.key", "CA": "ca.pem"}
    return {f"ELASTICEP_{process}_TLS_{k}": str(folder / v) for k, v in files.items()}


def free_port(address: str) -> int:
    with socket.create_server((address, 0)) as probe:
        return int(probe.getsockname()[1])


class Hosts:
    """Two nodes in namespaces of their own, with a wire between them; the controller is here."""

    def __init__(self, stack: ExitStack) -> None:
        self.nodes = [stack.enter_context(Namespace()) for _ in range(2)]
        self.wire = stack.enter_context(Wire(*self.nodes))


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if why := missing():
        pytest.skip(why)
    with ExitStack() as stack:
        yield Hosts(stack)


@pytest.fixture
def fleet(hosts: Hosts, tmp_path: Path) -> Iterator[Fleet]:
    """Nodes dial the controller over their own links, and each other over the wire."""
    port = free_port("0.0.0.0")
    first = hosts.nodes[0].outside
    environment = {
        CONTROLLER: {
            "ELASTICEP_CONTROLLER_LISTEN": f"0.0.0.0:{port}",
            "ELASTICEP_CONTROLLER_ADVERTISE": f"{first}:{port}",
            **tls(tmp_path, "CONTROLLER", "controller", *(node.outside for node in hosts.nodes)),
        },
        **{
            daemon_name(index): {
                "ELASTICEP_DAEMON_CONTROLLERS": f"{node.outside}:{port}",
                "ELASTICEP_DAEMON_LISTEN": f"{hosts.wire.ends[index]}:7401",
                **tls(tmp_path, "DAEMON", f"node-{index}", hosts.wire.ends[index]),
            }
            for index, node in enumerate(hosts.nodes)
        },
    }
    wrap = {daemon_name(index): node.command for index, node in enumerate(hosts.nodes)}
    cluster = Cluster(group="cut", ranks=4, nodes=2, environment=environment, wrap=wrap)
    config = light_config("cut", 4, timeouts=TIMEOUTS)
    with cluster, Fleet(cluster, config) as made:
        made.open(RANKS)
        made.members(RANKS)
        yield made
        made.check()


@pytest.mark.parametrize(
    ("node", "way"),
    [(1, BOTH), *(pytest.param(*cut, marks=pytest.mark.long) for cut in ((0, FROM), (1, TO)))],
)
def test_ranks_behind_a_cut_are_left_out_and_complete_nothing_until_it_heals(
    hosts: Hosts, fleet: Fleet, node: int, way: str
) -> None:
    here, there = [[2, 3], [0, 1]] if node == 0 else [[0, 1], [2, 3]]
    hosts.nodes[node].cut(way)
    fleet.members(here)
    done = {rank: len(fleet.engine(rank).complete()) for rank in there}
    fleet.progress(here, 20)
    # Memory is shared all the same: what is left behind must not go on beside the others.
    assert {rank: len(fleet.engine(rank).complete()) for rank in there} == done
    hosts.nodes[node].heal()
    for rank in there:
        fleet.ended(rank, "fenced")
    fleet.open(there)
    fleet.members(RANKS)
    now = {e.rank: e.incarnation for e in fleet.engines(RANKS)}
    assert now == {rank: 2 if rank in there else 1 for rank in RANKS}


def test_a_short_cut_costs_nothing(hosts: Hosts, fleet: Fleet) -> None:
    epoch = fleet.engine(0).epoch
    hosts.nodes[1].cut()
    fleet.progress(RANKS, 20)
    hosts.nodes[1].heal()
    fleet.progress(RANKS, 20)
    assert {e.epoch for e in fleet.engines(RANKS)} == {epoch}
    assert not any(e.torn() for e in fleet.engines(RANKS))


@pytest.mark.long
@pytest.mark.parametrize("way", [BOTH, FROM, TO])
def test_a_cut_between_two_nodes_expels_nobody_and_deaths_are_told_over_the_controller(
    hosts: Hosts, fleet: Fleet, way: str
) -> None:
    epoch = fleet.engine(0).epoch
    hosts.wire.cut(way)
    fleet.progress(RANKS, 20)
    assert {e.epoch for e in fleet.engines(RANKS)} == {epoch}
    teller, rank = (1, 3) if way == TO else (0, 1)  # on the side that is not heard
    os.kill(fleet.engine(rank).worker, signal.SIGKILL)
    fleet.members(set(RANKS) - {rank})
    log = daemon_name(teller)
    fleet.wait(lambda: "peer.not_told" in fleet.cluster.log(log), "the other daemon is not told")
    fleet.open([rank])
    fleet.members(RANKS)
    hosts.wire.heal()
    fleet.progress(RANKS)
    assert {e.rank: e.incarnation for e in fleet.engines(RANKS) if e.rank != rank} == {
        other: 1 for other in RANKS if other != rank
    }
