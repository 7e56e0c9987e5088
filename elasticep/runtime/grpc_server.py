"""Where a daemon's gRPC services listen: its Unix socket, and TCP if the config says so."""

import os
import socket

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection
from structlog.typing import FilteringBoundLogger

from elasticep.config import TlsConfig, split_address
from elasticep.proto import node_pb2, node_pb2_grpc
from elasticep.rpc import DAEMON_OPTIONS, bind
from elasticep.runtime.service import NodeService
from elasticep.runtime.transport.server import SOCKET_MODE


async def start_server(
    service: NodeService, socket_path: str, listen: str, tls: TlsConfig, log: FilteringBoundLogger
) -> tuple[grpc.aio.Server, str]:
    """Serve on the Unix socket and, if asked, on another address.

    Args:
        service: the node's service; health and reflection are served beside it.
        socket_path: of the Unix socket, mode 0660.
        listen: "host:port", "unix:///path", or "" for the Unix socket alone.
        tls: for TCP beyond the loopback interface.
        log: where to say so.

    Returns:
        The server, and the address to advertise to other daemons.

    Raises:
        ConfigError: an address cannot be had, or a TLS file cannot be read.
    """
    server = grpc.aio.server(options=DAEMON_OPTIONS)
    node_pb2_grpc.add_NodeServiceServicer_to_server(service, server)
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    name = node_pb2.DESCRIPTOR.services_by_name["NodeService"].full_name
    for part in ("", name):
        await health.set(part, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection((name, reflection.SERVICE_NAME), server)
    old_mask = os.umask(0o777 & ~SOCKET_MODE)
    try:
        bind(server, f"unix://{socket_path}", tls)
    finally:
        os.umask(old_mask)
    address = f"unix://{socket_path}"
    if listen:
        address = _advertised(listen, bind(server, listen, tls))
    await server.start()
    log.info("grpc.listening", socket=socket_path, tcp=address if listen else None)
    return server, address


def _advertised(listen: str, port: int) -> str:
    if listen.startswith("unix:"):
        return listen
    host, _ = split_address(listen)
    if host in ("0.0.0.0", "::"):  # noqa: S104  # what others dial is the host's name
        host = socket.gethostname()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
