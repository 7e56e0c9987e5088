"""The controller process: listens, campaigns, and leads while it may. A thin asynchronous shell.

All decisions are made in `membership`; `term` keeps the order of writes and sends; `service` speaks
gRPC. A controller that stands by refuses calls and names the leader.
"""

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final
from wsgiref.simple_server import WSGIServer

import grpc.aio
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import start_http_server
from structlog.typing import FilteringBoundLogger

from elasticep.config import ControllerConfig, is_loopback
from elasticep.control import records
from elasticep.control.clocks import Clocks
from elasticep.control.election import STORE_ERRORS, Candidate, Deposed, Election, Lead
from elasticep.control.metrics import ControllerMetrics
from elasticep.control.service import ControllerService
from elasticep.control.store import MemoryStore, Store
from elasticep.control.term import Term
from elasticep.errors import ConfigError, NotLeader
from elasticep.proto import controller_pb2, controller_pb2_grpc
from elasticep.rpc import CONTROLLER_OPTIONS, bind
from elasticep.signals import stop_signals

_STOP_S: Final = 0.3
_LOAD_S: Final = 20.0  # to read all that there is; a thousand epochs of many groups are some 100 MB
_SERVICE: Final = controller_pb2.DESCRIPTOR.services_by_name["ControllerService"].full_name


def open_store(config: ControllerConfig) -> Store:
    """The store that a config names."""
    if config.store == "memory":
        return MemoryStore()
    from elasticep.control.store.etcd import EtcdStore

    tls = config.etcd_tls
    return EtcdStore(config.etcd_endpoints, tls=tls.read() if tls.enabled else None)


class Controller:
    """One controller replica.

    Args:
        config: its settings.
        store: what it writes to; None opens the one that the config names.
        log: where events go; None: structlog's logger.
        metrics: counters; None makes new ones.
        clocks: where it reads the time; None: those of this host.
    """

    def __init__(
        self,
        config: ControllerConfig,
        store: Store | None = None,
        log: FilteringBoundLogger | None = None,
        metrics: ControllerMetrics | None = None,
        clocks: Clocks | None = None,
    ) -> None:
        self.config = config
        self._clocks = clocks or Clocks()
        self.log: FilteringBoundLogger = log if log is not None else structlog.get_logger()
        self.metrics = metrics or ControllerMetrics()
        self.address = ""  # what it listens on, once it does
        self._listening = False
        self.term: Term | None = None
        self._store = store if store is not None else open_store(config)
        self._election: Election | None = None
        self._server: grpc.aio.Server | None = None
        self._metrics_server: WSGIServer | None = None
        self._health = health.aio.HealthServicer()
        self.metrics_port = 0

    # ---- what the service asks

    def leading(self) -> Term:
        """The term of office; `NotLeader` names who leads when it is another.

        One whose lease may have run out does not answer: another may have written since.
        """
        if self.term is not None and self._election is not None and self._election.overdue:
            raise NotLeader("this controller could not renew its lease; ask the others")
        if self.term is None:
            leader = self._election.leader if self._election else None
            where = f"; {leader.name} leads at {leader.address}" if leader else "; nobody leads now"
            if self._election is not None and self._election.store_lost:
                where += ", as far as it knows: the store does not answer it"
            raise NotLeader(f"this controller does not lead{where}")
        return self.term

    @property
    def leader_address(self) -> str:
        """Where the leader is to be reached, as last seen; empty: not known."""
        leader = self._election.leader if self._election else None
        return leader.address if leader else ""

    @property
    def name(self) -> str:
        """This controller in logs and status."""
        return self.config.name or f"{socket.gethostname()}-{os.getpid()}"

    # ---- its life

    async def run(self, started: Callable[["Controller"], None] | None = None) -> None:
        """Listen and take part in elections until SIGTERM, SIGINT, SIGHUP or a cancel.

        Args:
            started: called once it listens.

        Raises:
            ConfigError: the address cannot be used.
            StoreCorrupt: the store holds what this version cannot read.
        """
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        numbers = stop_signals()
        with suppress(RuntimeError, ValueError):  # not the main thread
            for number in numbers:
                loop.add_signal_handler(number, stop.set)
        try:
            await self._listen()
            if started is not None:
                started(self)
            candidate = Candidate.new(self.name, self.config.advertise or self.address)
            work = asyncio.ensure_future(self.campaign(candidate))
            waiting = asyncio.ensure_future(stop.wait())
            try:
                await asyncio.wait({work, waiting}, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    work.result()
            finally:
                for task in (work, waiting):
                    task.cancel()
                await asyncio.gather(work, waiting, return_exceptions=True)
        finally:
            with suppress(RuntimeError, ValueError):
                for number in numbers:
                    loop.remove_signal_handler(number)
            await self._close()

    async def _listen(self) -> None:
        config = self.config
        server = grpc.aio.server(options=CONTROLLER_OPTIONS)
        controller_pb2_grpc.add_ControllerServiceServicer_to_server(
            ControllerService(self, check_names=config.tls.enabled), server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        path = config.listen.removeprefix("unix://").removeprefix("unix:")
        if config.listen.startswith("unix:"):
            _clear_socket(path)
            mask = os.umask(0o117)  # the socket is made at once: 0660
            try:
                bind(server, config.listen, config.tls)
                await server.start()
            finally:
                os.umask(mask)
            self.address = config.listen
        else:
            port = bind(server, config.listen, config.tls)
            await server.start()
            self.address = f"{config.listen.rsplit(':', 1)[0]}:{port}"
        self._server = server
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self._health.set(_SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
        if config.metrics_port >= 0:
            self._serve_metrics()
        advertised = config.advertise or self.address
        if config.tls.enabled and not config.advertise and is_loopback(advertised):
            self.log.warning("controller.advertises_loopback", address=advertised)
        self._listening = True
        self.log.info("controller.listening", address=self.address, name=self.name)

    def _serve_metrics(self) -> None:
        config = self.config
        try:
            server, _ = start_http_server(
                config.metrics_port, config.metrics_host, registry=self.metrics.registry
            )
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {config.metrics_host}:{config.metrics_port}: "
                f"{error.strerror}; choose another controller.metrics_port, or -1 for none"
            ) from None
        self._metrics_server = server
        self.metrics_port = server.server_port

    async def campaign(self, candidate: Candidate) -> None:
        """Take part in elections, and lead while it may; for good."""
        ttl_s = self.config.lease_ttl_s
        clock, show = self._clocks.monotonic_s, self.metrics.store_up.set
        self._election = Election(self._store, candidate, ttl_s, self.log, clock, show)
        while True:
            lead = await self._election.campaign()
            try:
                await self._lead(lead)
            except (Deposed, *STORE_ERRORS) as error:
                self.log.warning("lead.ended", reason=str(error))
            except records.StoreCorrupt:
                raise
            except Exception as error:
                # The state that led here is dropped; the next term reads it from the store.
                self.log.error("lead.ended", reason=f"{type(error).__name__}: {error}")
                await asyncio.sleep(_STOP_S)
            finally:
                self.term = None
                self.metrics.leader.set(0)
                await self._health.set(_SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
                await self._election.resign(lead)

    async def _lead(self, lead: Lead) -> None:
        """One term; returns when the lead is lost, raises what ended it."""
        assert self._election is not None
        holding = asyncio.ensure_future(self._election.hold(lead))
        leading = asyncio.ensure_future(self._serve(lead))
        try:
            await asyncio.wait({holding, leading}, return_when=asyncio.FIRST_COMPLETED)
            for task in (holding, leading):
                if task.done():
                    task.result()
        finally:
            for task in (holding, leading):
                task.cancel()
            await asyncio.gather(holding, leading, return_exceptions=True)

    async def _serve(self, lead: Lead) -> None:
        snapshot = await self._store.list(records.PREFIX, deadline_s=_LOAD_S)
        term = Term(self._store, lead, snapshot.items, self.metrics, self.log, self._clocks)
        self.term = term
        self.metrics.leader.set(1)
        self.metrics.terms.inc()
        await self._health.set(_SERVICE, health_pb2.HealthCheckResponse.SERVING)
        self.log.info("controller.leads", revision=lead.revision, groups=len(term.cluster.groups))
        try:
            await term.run()
        finally:
            self.term = None

    async def _close(self) -> None:
        if self._server is not None:
            await self._server.stop(_STOP_S)
        if self._metrics_server is not None:
            # Its loop looks for the end twice a second; nobody has to wait for that here.
            await asyncio.to_thread(self._metrics_server.shutdown)
            self._metrics_server.server_close()
        await self._store.close()
        if self._server is not None and self.config.listen.startswith("unix:"):
            path = self.config.listen.removeprefix("unix:").removeprefix("//")
            with suppress(OSError):
                Path(path).unlink()
        if self._listening:  # else the error says it all
            self.log.info("controller.stopped")


def _clear_socket(path: str) -> None:
    """Remove the socket of a controller that is gone; `ConfigError` when one answers there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except FileNotFoundError:
            return
        except OSError:
            if Path(path).is_socket():
                with suppress(OSError):
                    Path(path).unlink()
            return  # any other file is somebody's, and listening fails with the kernel's reason
    raise ConfigError(f"another process listens on {path}; stop it, or set controller.listen")
