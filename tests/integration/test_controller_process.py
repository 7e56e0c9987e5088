"""`elasticep controller` as a process, and the operator's commands against it."""

import asyncio
import json
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import grpc.aio
import pytest
from click.testing import CliRunner, Result

from elasticep.cli.main import cli
from elasticep.config import ControllerConfig, TlsConfig
from elasticep.control import records
from elasticep.control.controller import Controller
from elasticep.control.store import MemoryStore
from elasticep.control.store.etcd import EtcdStore
from elasticep.errors import ElasticEPError, Unavailable
from elasticep.testing.etcd import LocalEtcd
from elasticep.testing.nodes import FakeNodes
from elasticep.testing.processes import stop

READY_S = 60.0
LEASE_S = 20  # nobody is deposed because the machine is busy
SOON_S = 10.0
GROUP = """
name = "g"
initial_ranks = 4
flap_limit = 0
[geometry]
layers = 2
experts = 8
topk = 2
hidden = 64
slots_per_rank = 4
max_ranks = 4
[exchanges.decode]
preset = "ROUTED"
[timeouts]
node_timeout_ms = 30_000
"""


class Process:
    """A controller process that told its supervisor that it is ready."""

    def __init__(self, folder: Path, name: str, etcd: LocalEtcd, lease_s: int = LEASE_S) -> None:
        self.address = f"unix://{folder}/{name}.sock"
        self.log = folder / f"{name}.log"
        notify = str(folder / f"{name}.notify")
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as told:
            told.bind(notify)
            with self.log.open("wb") as log:
                self.process = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "elasticep.cli.main", "controller"),
                        *("--listen", self.address, "--name", name),
                        *("--lease-ttl-s", str(lease_s)),
                        *("--etcd-endpoints", ",".join(etcd.endpoints), "--log-format", "json"),
                    ],
                    stdout=log,
                    stderr=log,
                    env={**os.environ, "NOTIFY_SOCKET": notify},
                )
            assert select.select([told], [], [], READY_S)[0], self.log.read_text()
            assert told.recv(1000).startswith(b"READY=1\n")

    def events(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def stop(self) -> tuple[int, float]:
        """Exit status and seconds until it was gone."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60), time.monotonic() - began

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def etcd() -> Iterator[LocalEtcd]:
    with LocalEtcd() as started:
        yield started


@pytest.fixture
def controller(tmp_path: Path, etcd: LocalEtcd) -> Iterator[Process]:
    process = Process(tmp_path, "c0", etcd)
    yield process
    process.kill()


def run(address: str, *arguments: str) -> Result:
    return CliRunner().invoke(cli, [*arguments, "--controllers", address, "--timeout", "30"])


def test_operators_create_watch_and_drain_a_group(controller: Process, tmp_path: Path) -> None:
    path = tmp_path / "group.toml"
    path.write_text(GROUP)
    for said in ("created", "exists with this config"):
        result = run(controller.address, "group", "create", str(path))
        assert result.exit_code == 0, result.output
        assert result.output == f"group g {said}\n"
    path.write_text(GROUP.replace("experts = 8", "experts = 6"))
    other = run(controller.address, "group", "create", str(path))
    assert isinstance(other.exception, ElasticEPError)
    assert "geometry.experts is 8 in the group and 6 here" in str(other.exception)
    shown = json.loads(run(controller.address, "group", "show", "g").stdout)
    assert shown["geometry"]["experts"] == 8

    async def scenario() -> None:
        async with FakeNodes([controller.address], {"a": [0, 1], "b": [2, 3]}, "g") as nodes:
            await nodes.until(lambda: nodes.epoch == 1)
            await nodes.meet()
            drained = await asyncio.to_thread(
                run, controller.address, "drain", "g", "1-1", "--reason", "new card"
            )
            said = "drained in group g: rank 1; epoch 2 is the first without\n"
            assert drained.output == said
            await nodes.until(lambda: nodes.epoch == 2)
            await nodes.meet()
            told = await asyncio.to_thread(run, controller.address, "status", "--output", "json")
            status = json.loads(told.stdout)
            assert status["leader"] == "c0"
            assert [node["node"] for node in status["nodes"]] == ["a", "b"]
            (group,) = status["groups"]
            assert group["members"] == [0, 2, 3]
            assert group["ranks"][1]["reason"] == "drained: new card"
            text = (await asyncio.to_thread(run, controller.address, "status", "g")).output
            assert "group g: epoch 2" in text
            assert "drained: new card" in text
            again = await asyncio.to_thread(run, controller.address, "undrain", "g", "1")
            assert again.exit_code == 0, again.output
            await nodes.until(lambda: nodes.members == [0, 1, 2, 3])

    asyncio.run(asyncio.wait_for(scenario(), 150))
    names = [event["event"] for event in controller.events()]
    for name in ("controller.listening", "controller.leads", "view.proposed", "rank.draining"):
        assert name in names


def test_sigterm_gives_the_lead_back_at_once_and_leaves_nothing(
    controller: Process, etcd: LocalEtcd
) -> None:
    path = Path(controller.address.removeprefix("unix://"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert run(controller.address, "status").exit_code == 0  # it leads

    async def held() -> bool:
        store = EtcdStore(etcd.endpoints)
        try:
            return await store.get(records.LEADER) is not None
        finally:
            await store.close()

    assert asyncio.run(held())
    status, seconds = controller.stop()
    assert status == 0, controller.log.read_text()
    assert seconds < SOON_S
    assert not path.exists()
    assert not asyncio.run(held())
    assert controller.events()[-1]["event"] == "controller.stopped"


def test_a_standby_process_takes_over_from_one_that_was_killed(
    controller: Process, etcd: LocalEtcd, tmp_path: Path
) -> None:
    path = tmp_path / "group.toml"
    path.write_text(GROUP.replace('name = "g"', 'name = "h"'))
    assert run(controller.address, "group", "create", str(path)).exit_code == 0
    standby = Process(tmp_path, "c1", etcd)
    try:
        addresses = [controller.address, standby.address]

        async def scenario() -> None:
            async with FakeNodes(addresses, {"a": [0, 1], "b": [2, 3]}, "h") as nodes:
                await nodes.until(lambda: nodes.epoch == 1)
                await nodes.meet()
                controller.process.kill()
                nodes.of(3).kill(3)
                await nodes.until(lambda: nodes.epoch == 2)
                assert nodes.members == [0, 1, 2]

        try:
            asyncio.run(asyncio.wait_for(scenario(), 150))
        except Unavailable as error:
            error.add_note(standby.log.read_text())
            raise
        told = run(",".join(addresses), "status", "h", "--output", "json")
        assert json.loads(told.stdout)["leader"] == "c1"
    finally:
        standby.kill()


def test_a_leader_that_was_stopped_within_its_lease_blames_nobody(
    etcd: LocalEtcd, tmp_path: Path
) -> None:
    # All nodes were silent to it, longer than node_timeout, but it could not have heard them.
    controller = Process(tmp_path, "c0", etcd, lease_s=30)
    path = tmp_path / "group.toml"
    text = GROUP.replace('name = "g"', 'name = "stopped"')
    path.write_text(text.replace("node_timeout_ms = 30_000", "node_timeout_ms = 3_000"))

    async def scenario() -> None:
        ranks = {"a": [0, 1], "b": [2, 3]}
        async with FakeNodes([controller.address], ranks, "stopped") as nodes:
            await nodes.until(lambda: nodes.epoch == 1)
            await nodes.meet()
            stop(controller.process.pid)
            stopped_s = time.monotonic()
            await nodes.until(lambda: time.monotonic() - stopped_s > 4.5)
            controller.process.send_signal(signal.SIGCONT)
            nodes.of(3).kill(3)  # it goes on, and sees what is so
            await nodes.until(lambda: nodes.epoch == 2)
            assert nodes.members == [0, 1, 2]
            assert {node.sessions for node in nodes.nodes.values()} == {1}

    try:
        assert run(controller.address, "group", "create", str(path)).exit_code == 0
        asyncio.run(asyncio.wait_for(scenario(), 150))
        told = [event for event in controller.events() if event["event"] == "rank.fenced"]
        # Tests share the store, and with it groups whose nodes are gone.
        assert [event["rank"] for event in told if event["group"] == "stopped"] == [3]
        assert "controller.away" in {event["event"] for event in controller.events()}
    finally:
        controller.kill()


def test_a_start_that_cannot_be_is_one_line(
    controller: Process, etcd: LocalEtcd, tmp_path: Path
) -> None:
    file = tmp_path / "notes"
    file.write_text("not a socket, and not to be removed")
    for flags, said in (
        (["--listen", controller.address], "another process listens on"),
        (["--listen", "0.0.0.0:0"], "without TLS"),
        (["--listen", f"unix://{file}"], "Address already in use; stop what listens there"),
        (["--listen", "127.0.0.1:0", "--metrics-port", "99999"], "metrics-port is '99999'"),
        (
            ["--listen", "127.0.0.1:0", "--metrics-host", "192.0.2.1", "--metrics-port", "0"],
            "cannot serve metrics on 192.0.2.1:0",
        ),
    ):
        command = [sys.executable, "-m", "elasticep.cli.main", "controller", *flags]
        done = subprocess.run(
            [*command, "--etcd-endpoints", etcd.endpoints[0]],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 2
        (last,) = done.stderr.splitlines()
        assert last.startswith("error: CONFIG_INVALID: ")
        assert said in last
    assert file.exists()


def test_without_a_controller_commands_say_so_soon() -> None:
    began = time.monotonic()
    result = run("127.0.0.1:1", "status")
    assert isinstance(result.exception, Unavailable)
    assert "is `elasticep controller` running?" in str(result.exception)
    assert time.monotonic() - began < SOON_S


# ---- mutual TLS


def make_certificates(folder: Path, *names: str) -> dict[str, TlsConfig]:
    """A small authority and one certificate a name."""
    openssl = shutil.which("openssl")
    assert openssl is not None
    common = ["-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]

    def run_openssl(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], cwd=folder, check=True, capture_output=True)

    run_openssl("req", "-x509", *common, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca")
    made = {}
    for name in names:
        extension = folder / f"{name}.ext"
        extension.write_text(f"subjectAltName=DNS:{name},DNS:localhost,IP:127.0.0.1\n")
        run_openssl(
            "req", *common, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}"
        )
        run_openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key"),
            *("-CAcreateserial", "-out", f"{name}.pem", "-extfile", extension.name),
        )
        made[name] = TlsConfig(
            cert=str(folder / f"{name}.pem"),
            key=str(folder / f"{name}.key"),
            ca=str(folder / "ca.pem"),
        )
    return made


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
def test_with_tls_a_node_needs_a_certificate_that_bears_its_name(tmp_path: Path) -> None:
    tls = make_certificates(tmp_path, "controller", "a", "b")
    config = ControllerConfig(
        listen="127.0.0.1:0", store="memory", tls=tls["controller"], name="c", lease_ttl_s=LEASE_S
    )

    async def scenario() -> None:
        controller = Controller(config, MemoryStore())
        listening = asyncio.Event()
        task = asyncio.create_task(controller.run(lambda _: listening.set()))
        try:
            await listening.wait()
            address = controller.address
            async with FakeNodes([address], {"a": [0]}, "g", tls["a"]) as nodes:
                await nodes.until(lambda: nodes.nodes["a"].connected)
            async with FakeNodes([address], {"a": [0]}, "g", tls["b"]) as nodes:
                await nodes.until(lambda: "not named in the certificate" in nodes.nodes["a"].error)
            async with grpc.aio.insecure_channel(address) as channel:
                call = channel.unary_unary("/elasticep.v1.ControllerService/GetCluster")
                with pytest.raises(grpc.aio.AioRpcError):
                    await call(b"", timeout=READY_S)
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    asyncio.run(asyncio.wait_for(scenario(), 150))
