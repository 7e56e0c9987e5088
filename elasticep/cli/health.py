"""`elasticep health`: the standard gRPC health check of a daemon or a controller on this host.

For probes that cannot speak mutual TLS or reach a Unix socket: it reads the config of the process
that it asks, so the same file and variables serve both. Given the address it needs no more.
"""

import os

import click
import grpc
from grpc_health.v1 import health_pb2

from elasticep.config import (
    ControllerConfig,
    DaemonConfig,
    TlsConfig,
    is_loopback,
    load_config,
    split_address,
)
from elasticep.errors import ConfigError, Unavailable

_ANY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104


@click.command("health")
@click.argument("process", type=click.Choice(["daemon", "controller"]))
@click.option("--config", "file", type=click.Path(dir_okay=False), help="Its TOML file.")
@click.option(
    "--address",
    default="",
    metavar="ADDRESS",
    help="Where it listens, host:port or unix:///path; no config is read then.",
)
@click.option("--timeout", type=click.FloatRange(0.1), default=3.0, show_default=True,
              help="Seconds to wait for the answer.")  # fmt: skip
def command(process: str, file: str | None, address: str, timeout: float) -> None:
    """Ask the daemon or controller of this host whether it serves.

    The exit status is 0 if it does, 1 if it says otherwise or does not answer.

    With --address, certificates for mutual TLS are those that ELASTICEP_DAEMON_TLS_CERT, _KEY and
    _CA name, of a controller ELASTICEP_CONTROLLER_TLS_CERT and so on.
    """
    if address and file is not None:
        raise ConfigError("--address and --config do not go together: choose one")
    if address:
        address, tls = _reachable(address), _tls_of(process)
        if not (tls.enabled or address.startswith("unix:") or is_loopback(address)):
            what = f"ELASTICEP_{process.upper()}_TLS_CERT, _KEY and _CA"
            raise ConfigError(f"{address} is beyond this host, which takes mutual TLS: set {what}")
    elif process == "daemon":
        address, tls = f"unix:{load_config(DaemonConfig, file=file).grpc_socket}", TlsConfig()
    else:
        config = load_config(ControllerConfig, file=file)
        address, tls = _dial_address(config), config.tls
    click.echo(check(address, tls, timeout))


def check(address: str, tls: TlsConfig, timeout_s: float) -> str:
    """The word SERVING.

    Args:
        address: "host:port" or "unix:path".
        tls: used for TCP addresses, if enabled.
        timeout_s: deadline of the call.

    Raises:
        Unavailable: it says something else, or does not answer.
        ConfigError: a TLS file cannot be read.
    """
    with _channel(address, tls) as channel:
        ask = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = ask(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise Unavailable(f"no health answer from {address}: {error.details()}") from None
    word = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise Unavailable(f"{address} says {word}; its log says why")
    return word


def _channel(address: str, tls: TlsConfig) -> grpc.Channel:
    if tls.enabled and not address.startswith("unix:"):
        key, cert, ca = tls.read()
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert))
    return grpc.insecure_channel(address)


def _dial_address(config: ControllerConfig) -> str:
    """The name in its certificate, if it has one to tell; else where it listens."""
    return _reachable(config.advertise or config.listen)


def _tls_of(process: str) -> TlsConfig:
    """Certificates that a process's variables name."""
    prefix = f"ELASTICEP_{process.upper()}_TLS"
    key, cert, ca = (os.environ.get(f"{prefix}_{name}", "") for name in ("KEY", "CERT", "CA"))
    return TlsConfig(cert=cert, key=key, ca=ca)


def _reachable(address: str) -> str:
    """An address to dial, of one to listen on; `ConfigError` when it is none."""
    if address.startswith("unix:"):
        return address
    host, port = split_address(address)
    if host in _ANY_INTERFACE:
        return f"{_ANY_INTERFACE[host]}:{port}"
    return address
