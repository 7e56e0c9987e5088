"""A link between two hosts that is cut and heals: a network namespace, TCP with mutual TLS."""

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticep.group import Timeouts
from elasticep.testing.cluster import CONTROLLER, Cluster, daemon_name
from elasticep.testing.decoding import Fleet, light_config
from elasticep.testing.netns import Namespace, missing

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl makes the certificates"
)
RANKS = range(4)


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def tls(folder: Path, process: str, name: str, address: str) -> dict[str, str]:
    """Variables of a process with a certificate for its name and address."""
    new = ["-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    if not (folder / "ca.pem").exists():
        subject = ["-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.pem"]
        openssl(folder, "req", "-x509", *new, *subject)
    extension = folder / f"{name}.ext"
    extension.write_text(f"subjectAltName=DNS:{name},IP:{address},IP:127.0.0.1\n")
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


@pytest.fixture
def host() -> Iterator[Namespace]:
    if why := missing():
        pytest.skip(why)
    with Namespace() as made:
        yield made


@pytest.fixture
def fleet(host: Namespace, tmp_path: Path) -> Iterator[Fleet]:
    """Node 1 is on the other host; the controller and node 0 are here."""
    controller = f"{host.outside}:{free_port(host.outside)}"
    dial = {"ELASTICEP_DAEMON_CONTROLLERS": controller}
    environment = {
        CONTROLLER: {
            "ELASTICEP_CONTROLLER_LISTEN": controller,
            **tls(tmp_path, "CONTROLLER", "controller", host.outside),
        },
        daemon_name(0): {
            "ELASTICEP_DAEMON_LISTEN": f"{host.outside}:{free_port(host.outside)}",
            **tls(tmp_path, "DAEMON", "node-0", host.outside),
            **dial,
        },
        daemon_name(1): {
            "ELASTICEP_DAEMON_LISTEN": f"{host.inside}:7401",
            **tls(tmp_path, "DAEMON", "node-1", host.inside),
            **dial,
        },
    }
    wrap = {daemon_name(1): host.command}
    cluster = Cluster(group="cut", ranks=4, nodes=2, environment=environment, wrap=wrap)
    config = light_config("cut", 4, timeouts=Timeouts(node_timeout_ms=5_000))
    with cluster, Fleet(cluster, config) as made:
        made.open(RANKS)
        made.members(RANKS)
        yield made
        made.check()


def test_ranks_behind_a_cut_are_left_out_and_complete_nothing_until_it_heals(
    host: Namespace, fleet: Fleet
) -> None:
    here, there = [0, 1], [2, 3]
    host.cut()
    fleet.members(here)
    done = {rank: len(fleet.engine(rank).complete()) for rank in there}
    fleet.progress(here, 20)
    # Memory is shared all the same: what is left behind must not go on beside the others.
    assert {rank: len(fleet.engine(rank).complete()) for rank in there} == done
    host.heal()
    for rank in there:
        fleet.ended(rank, "fenced")
    fleet.open(there)
    fleet.members(RANKS)
    assert [e.incarnation for e in fleet.engines(RANKS)] == [1, 1, 2, 2]


def test_a_short_cut_costs_nothing(host: Namespace, fleet: Fleet) -> None:
    epoch = fleet.engine(0).epoch
    host.cut()
    fleet.progress(RANKS, 20)
    host.heal()
    fleet.progress(RANKS, 20)
    assert {e.epoch for e in fleet.engines(RANKS)} == {epoch}
    assert not any(e.torn() for e in fleet.engines(RANKS))
