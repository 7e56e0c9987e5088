"""Where a daemon's gRPC services listen: its Unix socket, and TCP if the config says so."""

import os
import socket
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection
from structlog.typing import FilteringBoundLogger

from elasticep.config import TlsConfig, split_address
from elasticep.errors import ConfigError
from elasticep.proto import node_pb2, node_pb2_grpc
from elasticep.runtime.limits import MAX_GRPC_MESSAGE_BYTES
from elasticep.runtime.service import NodeService
from elasticep.runtime.transport.server import SOCKET_MODE


async def start_server(
    service: NodeService, socket_path: str, listen: str, tls: TlsConfig, log: FilteringBoundLogger
) -> "tuple[grpc.aio.Server, str]":
    """Serve on the Unix socket and, if asked, on TCP; the server and the address to advertise.

    Raises:
        ConfigError: an address cannot be had.
    """
    server = grpc.aio.server(
        options=(
            ("grpc.max_receive_message_length", MAX_GRPC_MESSAGE_BYTES),
            ("grpc.so_reuseport", 0),
        )
    )
    node_pb2_grpc.add_NodeServiceServicer_to_server(service, server)
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    name = node_pb2.DESCRIPTOR.services_by_name["NodeService"].full_name
    for part in ("", name):
        await health.set(part, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection((name, reflection.SERVICE_NAME), server)
    old_mask = os.umask(0o777 & ~SOCKET_MODE)
    try:
        _bind(server.add_insecure_port, f"unix:{socket_path}")
    finally:
        os.umask(old_mask)
    os.chmod(socket_path, SOCKET_MODE)
    address = f"unix://{socket_path}"
    if listen:
        address = _listen_tcp(server, listen, tls)
    await server.start()
    log.info("grpc.listening", socket=socket_path, tcp=listen and address)
    return server, address


def _listen_tcp(server: grpc.aio.Server, listen: str, tls: TlsConfig) -> str:
    if listen.startswith("unix:"):
        _bind(server.add_insecure_port, listen)
        return listen
    host, _ = split_address(listen)
    if tls.enabled:
        key, cert, ca = tls.read()
        credentials = grpc.ssl_server_credentials(
            [(key, cert)], root_certificates=ca, require_client_auth=True
        )
        port = _bind(lambda where: server.add_secure_port(where, credentials), listen)
    else:
        port = _bind(server.add_insecure_port, listen)
    if host in ("0.0.0.0", "::"):  # noqa: S104  # what others dial is the host's name
        host = socket.gethostname()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bind(add: Callable[[str], int], address: str) -> int:
    try:
        port = add(address)
    except RuntimeError:
        port = 0
    if not port:
        raise ConfigError(f"cannot listen on {address}; is the address in use?")
    return port
