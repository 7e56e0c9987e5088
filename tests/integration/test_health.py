"""`elasticep health` against the standard health service, by Unix socket and by mutual TLS."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from elasticep.cli.health import command
from elasticep.errors import ConfigError, Unavailable

Status = health_pb2.HealthCheckResponse
Bind = Callable[[grpc.Server], int]


@pytest.fixture
def serve() -> Iterator[Callable[[Bind, int], int]]:
    """Start a server that binds as it is told and says a status; returns the port."""
    with ExitStack() as stack:

        def start(bind: Bind, status: int = Status.SERVING) -> int:
            pool = stack.enter_context(ThreadPoolExecutor(1))
            server = grpc.server(pool)
            servicer = health.HealthServicer()
            servicer.set("", status)
            health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
            port = bind(server)
            server.start()
            stack.callback(lambda: server.stop(None).wait())
            return port

        yield start


def ask(*arguments: str, env: dict[str, str]) -> str:
    """What the command prints; its error is raised."""
    result = CliRunner().invoke(command, [*arguments, "--timeout", "30"], env=env)
    if result.exception is not None:
        raise result.exception
    return result.output.strip()


def test_daemon_is_asked_over_its_socket(serve: Callable[..., int], tmp_path: Path) -> None:
    serve(lambda server: server.add_insecure_port(f"unix:{tmp_path}/daemon.sock"))
    assert ask("daemon", env={"ELASTICEP_DAEMON_SOCKET_DIR": str(tmp_path)}) == "SERVING"


def test_daemon_that_does_not_serve_is_an_error(serve: Callable[..., int], tmp_path: Path) -> None:
    path = f"unix:{tmp_path}/daemon.sock"
    serve(lambda server: server.add_insecure_port(path), Status.NOT_SERVING)
    with pytest.raises(Unavailable, match="says NOT_SERVING"):
        ask("daemon", env={"ELASTICEP_DAEMON_SOCKET_DIR": str(tmp_path)})


def test_daemon_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"no health answer from unix:.*daemon\.sock"):
        ask("daemon", env={"ELASTICEP_DAEMON_SOCKET_DIR": str(tmp_path)})


def test_an_address_is_all_that_a_probe_needs(serve: Callable[..., int], tmp_path: Path) -> None:
    port = serve(lambda server: server.add_insecure_port("127.0.0.1:0"))
    for where in (f"127.0.0.1:{port}", f"localhost:{port}", f"0.0.0.0:{port}"):
        assert ask("controller", "--address", where, env={}) == "SERVING"
    path = f"unix://{tmp_path}/daemon.sock"
    serve(lambda server: server.add_insecure_port(path))
    assert ask("daemon", "--address", path, env={}) == "SERVING"
    with pytest.raises(Unavailable, match="no health answer from unix:///nowhere"):
        ask("daemon", "--address", "unix:///nowhere", env={})
    with pytest.raises(ConfigError, match="'7400' is no address; use host:port"):
        ask("controller", "--address", "7400", env={})
    with pytest.raises(ConfigError, match="ELASTICEP_CONTROLLER_TLS_CERT, _KEY and _CA"):
        ask("controller", "--address", "host.example:7400", env={})
    with pytest.raises(ConfigError, match="do not go together"):
        ask("controller", "--address", path, "--config", "c.toml", env={})


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def make_certificates(folder: Path, name: str) -> None:
    """ca.crt, and tls.crt with tls.key for a host name, as a Secret of cert-manager has them."""
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    ca = ("-keyout", "ca.key", "-out", "ca.crt", "-days", "2", "-subj", "/CN=authority")
    openssl(folder, "req", "-x509", *new, *ca)
    signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-days", "2")
    names = ("-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}")
    openssl(folder, "req", "-x509", *new, *signed, *names, "-keyout", "tls.key", "-out", "tls.crt")


def test_controller_is_asked_by_the_name_in_its_certificate(
    serve: Callable[..., int], tmp_path: Path
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    make_certificates(tmp_path, "localhost")
    key, cert, ca = ((tmp_path / name).read_bytes() for name in ("tls.key", "tls.crt", "ca.crt"))
    credentials = grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True)
    port = serve(lambda server: server.add_secure_port("127.0.0.1:0", credentials))
    env = {
        "ELASTICEP_CONTROLLER_STORE": "memory",
        "ELASTICEP_CONTROLLER_LISTEN": f"0.0.0.0:{port}",
        "ELASTICEP_CONTROLLER_ADVERTISE": f"localhost:{port}",
    }
    paths = {"CERT": "tls.crt", "KEY": "tls.key", "CA": "ca.crt"}
    tls = {f"ELASTICEP_CONTROLLER_TLS_{what}": str(tmp_path / name) for what, name in paths.items()}
    assert ask("controller", env={**env, **tls}) == "SERVING"
    assert ask("controller", "--address", f"localhost:{port}", env=tls) == "SERVING"
    # By the address alone the certificate does not fit, and without one of its own it is refused.
    with pytest.raises(Unavailable, match="no health answer"):
        ask("controller", env={**env, **tls, "ELASTICEP_CONTROLLER_ADVERTISE": ""})
    with pytest.raises(ConfigError, match="without TLS"):
        ask("controller", env=env)
