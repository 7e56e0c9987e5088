"""Mutual TLS towards etcd: a real one that takes nobody without a certificate of its authority."""

import asyncio
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticep.config import ControllerConfig
from elasticep.control.controller import open_store
from elasticep.errors import ConfigError, Unavailable
from elasticep.testing.etcd import LocalEtcd, find_etcd

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl makes the certificates"
)
# An etcd that listens with TLS, too; the address without is for whoever waits until it is ready.
WRAPPER = """#!/bin/sh
for word in "$@"; do
  [ "$last" = --listen-client-urls ] && urls=$word
  last=$word
done
exec {etcd} "$@" --listen-client-urls "$urls,https://127.0.0.1:{port}" --client-cert-auth \\
  --cert-file {folder}/etcd.crt --key-file {folder}/etcd.key --trusted-ca-file {folder}/ca.crt
"""


def certificate(folder: Path, name: str, authority: str = "") -> None:
    """NAME.crt and NAME.key for this host, signed by an authority or by itself."""
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    subject = ("-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.crt")
    signed = ("-CA", f"{authority}.crt", "-CAkey", f"{authority}.key") if authority else ()
    names = ("-addext", "subjectAltName=IP:127.0.0.1") if authority else ()
    command = ["openssl", "req", "-x509", *new, *subject, *signed, *names]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Where an etcd listens with TLS, and the folder of the certificates."""
    folder = tmp_path_factory.mktemp("tls")
    for name, authority in (("ca", ""), ("other", ""), ("etcd", "ca"), ("me", "ca")):
        certificate(folder, name, authority)
    certificate(folder, "stranger", "other")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    wrapper = folder / "etcd"
    wrapper.write_text(WRAPPER.format(etcd=find_etcd(), port=port, folder=folder))
    wrapper.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELASTICEP_ETCD", str(wrapper))
        with LocalEtcd():
            yield f"127.0.0.1:{port}", folder


def config(address: str, folder: Path, name: str, authority: str = "ca") -> ControllerConfig:
    return ControllerConfig(
        listen="127.0.0.1:0",
        etcd_endpoints=(address,),
        etcd_cert=str(folder / f"{name}.crt"),
        etcd_key=str(folder / f"{name}.key"),
        etcd_ca=str(folder / f"{authority}.crt"),
    )


def put(settings: ControllerConfig, deadline_s: float) -> int:
    """Write something; its revision."""

    async def scenario() -> int:
        store = open_store(settings)
        try:
            return await store.put("/a", b"1", deadline_s=deadline_s)
        finally:
            await store.close()

    return asyncio.run(scenario())


def test_a_controller_with_a_certificate_is_served(guarded: tuple[str, Path]) -> None:
    assert put(config(*guarded, "me"), deadline_s=60.0) > 0


def test_who_has_none_of_its_authority_is_not(guarded: tuple[str, Path]) -> None:
    address, folder = guarded
    plain = ControllerConfig(listen="127.0.0.1:0", etcd_endpoints=(address,))
    other = config(address, folder, "me", authority="other")  # for all it knows a false etcd
    for settings in (config(address, folder, "stranger"), other):
        with pytest.raises(Unavailable, match=f"{address}; .*or takes these certificates"):
            put(settings, deadline_s=1.0)
    with pytest.raises(Unavailable, match=address):
        put(plain, deadline_s=1.0)


def test_files_that_cannot_be_used_are_named_at_the_start(guarded: tuple[str, Path]) -> None:
    address, folder = guarded
    with pytest.raises(ConfigError, match=r"nobody\.key"):
        open_store(config(address, folder, "nobody"))
    with pytest.raises(ConfigError, match="etcd_ca: give all three"):
        ControllerConfig(etcd_endpoints=(address,), etcd_ca=str(folder / "ca.crt"))
