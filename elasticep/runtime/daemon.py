"""The node daemon: owns memory and seats, watches processes, obeys the controller.

It holds no CUDA context and maps headers only, so nothing that a worker or an engine does can
break it; and since workers are sessions of their own and everybody holds the memory mapped, its own
death disturbs nobody. See `docs/daemon.md`.
"""

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

from structlog.typing import FilteringBoundLogger

from elasticep.config import DaemonConfig
from elasticep.errors import ConfigError, ElasticEPError
from elasticep.native.watcher import Watcher
from elasticep.proto import node_pb2
from elasticep.runtime import seats
from elasticep.runtime.announce import Announcer
from elasticep.runtime.group import Registry
from elasticep.runtime.grpc_server import start_server
from elasticep.runtime.hello import Reception
from elasticep.runtime.limits import Limits
from elasticep.runtime.liveness.locks import Locks
from elasticep.runtime.liveness.poller import Poller
from elasticep.runtime.loads import LoadReporter
from elasticep.runtime.metrics import Metrics, MetricsPage
from elasticep.runtime.node import Node, Signal
from elasticep.runtime.orders import NodeOrders
from elasticep.runtime.regions.keep import FdStore, StateFile
from elasticep.runtime.restore import awaited, end_lost, restore_group
from elasticep.runtime.seats import SeatState
from elasticep.runtime.service import NodeService
from elasticep.runtime.session import Session
from elasticep.runtime.sockets import SocketDir
from elasticep.runtime.systemd import Notifier, take_stored_fds
from elasticep.runtime.tickets import TicketOffice
from elasticep.runtime.transport.server import FdServer
from elasticep.runtime.weights.driver import MoverDriver
from elasticep.runtime.weights.look import CheckpointWatch
from elasticep.signals import stop_signals

if TYPE_CHECKING:
    import grpc

_RESTART_S: Final = 1.0


class Daemon:
    """One node's daemon; `run` is its whole life.

    Args:
        config: the `[daemon]` section.
        log: where events go.
        limits: deadlines and bounds.
    """

    def __init__(
        self, config: DaemonConfig, log: FilteringBoundLogger, limits: Limits | None = None
    ) -> None:
        self._limits = limits or Limits()
        self._log = log
        self._notifier = Notifier(os.environ)
        self._directory = SocketDir(config)
        self._state = StateFile(self._directory.state_path)
        self._save_timer: asyncio.TimerHandle | None = None
        self._unwritten = False  # the state file is older than what it tells of
        self._grpc: grpc.aio.Server | None = None
        self._page: MetricsPage | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._stop: asyncio.Event | None = None
        self._handlers: dict[signal.Signals, Callable[[], None]] = {}
        self._leave = False
        metrics = Metrics()
        self._node = Node(
            config=config,
            limits=self._limits,
            log=log,
            metrics=metrics,
            watcher=Watcher(),
            tickets=TicketOffice(self._limits.ticket_s, time.monotonic),
            fd_store=FdStore(self._notifier, {}),
            send=lambda message: self._session.send(message),
            save=self._save_soon,
            announce=self._announce,
            mover=MoverDriver(config, self._limits, log, metrics.weights),
        )
        self._registry = Registry(self._node)
        self._checkpoints = CheckpointWatch(config, log)
        self._groups_changed = Signal()
        self._poller = Poller(self._node, self._registry)
        self._locks = Locks(self._node, self._registry)
        self._orders = NodeOrders(
            self._node,
            self._registry,
            self._poller,
            self._groups_changed,
            session_id=secrets.token_hex(8),
        )
        self._session = Session(self._node, config.controllers, self._orders)
        self._loads = LoadReporter(self._node, self._registry, self._session)
        self._announcer = Announcer(self._node, self._peer_addresses)
        self._reception = Reception(self._node, self._registry)
        self._fd_server = FdServer(config.fd_socket, self._reception, self._limits)

    async def run(self, started: Callable[["Daemon"], None] | None = None) -> None:
        """Start, serve until told to stop or to leave, and leave nothing behind.

        Args:
            started: called once everything listens.

        Raises:
            ElasticEPError: it could not start; nothing is left behind.
        """
        try:
            await self._start()
        except BaseException:
            self._leave = True  # what a daemon before this one left is still the next one's
            await self._close()
            raise
        if started is not None:
            started(self)
        assert self._stop is not None
        await self._stop.wait()
        self._notifier.stopping()
        if not self._leave:
            await self._end_seats()
        await self._close()
        self._log.info("daemon.stopped", left_running=self._leave or None)

    def stop(self) -> None:
        """End every seat, then leave nothing behind."""
        if self._stop is not None:
            self._stop.set()

    def leave(self) -> None:
        """Go without touching workers and engines; the next daemon takes them over."""
        self._leave = True
        self.stop()

    @property
    def grpc_address(self) -> str:
        """Where other daemons reach this one."""
        return self._orders.grpc_address

    @property
    def metrics_port(self) -> int:
        """Port of `/metrics`, 0 if there is none."""
        return 0 if self._page is None else self._page.port

    # ---- start

    async def _start(self) -> None:
        config, loop = self._node.config, asyncio.get_running_loop()
        self._stop = asyncio.Event()
        loop.set_exception_handler(self._unexpected)
        self._directory.take()
        self._handlers = dict.fromkeys(stop_signals(), self.stop)
        self._handlers[signal.SIGUSR1] = self.leave
        for number, action in self._handlers.items():
            loop.add_signal_handler(number, action)
        self._node.fd_store = FdStore(self._notifier, take_stored_fds(os.environ))
        self._locks.start()
        kept = self._restore()
        await self._checkpoints.start(refuse=not kept)  # engines may need a daemon more than it
        self._fd_server.start()
        if kept:
            await self._await_runners()
        for name in self._node.fd_store.close_rest():
            self._log.warning("memory.unclaimed", name=name)
        service = NodeService(
            self._node, self._registry, self._session, self._groups_changed, self._checkpoints
        )
        self._grpc, self._orders.grpc_address = await start_server(
            service, config.grpc_socket, config.listen, config.tls, self._log
        )
        if config.metrics_port >= 0:
            self._page = MetricsPage(self._node.metrics, config.metrics_host, config.metrics_port)
        self._session.start()
        if not config.controllers:
            self._log.warning("controller.none", remedy="set daemon.controllers")
        for group in self._registry.groups.values():
            if group.weights is not None:
                group.weights.resume()
        self._background("poller", self._poller.run)
        self._background("checkpoints", self._checkpoints.run)
        if config.load_interval_ms:
            self._background("loads", self._loads.run)
        if self._notifier.watchdog_s:
            self._background("watchdog", self._ping)
        self._notifier.ready(f"node {config.node}, {len(self._registry.keepers())} seats restored")
        self._log.info(
            "daemon.ready",
            seats="; ".join(str(s) for s in config.seats),
            grpc=self._orders.grpc_address,
            fd_socket=config.fd_socket,
            metrics_port=self.metrics_port or None,
        )

    def _restore(self) -> bool:
        """Take over what the last daemon knew; whether there was anything."""
        try:
            kept = self._state.read()
        except ConfigError as error:
            self._log.error("state.unusable", error=str(error))
            return False
        for group in kept:
            try:
                restore_group(self._registry.ensure(group.config), group)
            except ElasticEPError as error:
                self._log.error("group.not_restored", group=group.config.name, error=str(error))
        return bool(kept)

    async def _await_runners(self) -> None:
        """Give the runners of restored seats a moment to come back before anybody is told."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.reattach_wait_s
        missing = awaited(self._registry.keepers())
        while missing and loop.time() < deadline:
            one = missing[:1]
            await one[0].changed.until(
                lambda one=one: not awaited(one),  # type: ignore[misc]
                deadline - loop.time(),
            )
            missing = awaited(self._registry.keepers())
        for keeper in missing:
            self._log.warning("seat.awaited", group=keeper.group.name, rank=keeper.rank)
        self._background("reattach", self._give_up_on_lost)
        self._background("peers", self._fetch_peers)

    async def _give_up_on_lost(self) -> None:
        await asyncio.sleep(self._limits.reattach_limit_s)
        end_lost(self._registry.keepers(), self._limits.reattach_limit_s)

    async def _fetch_peers(self) -> None:
        """Map the headers of the other members again, so that deaths here reach them at once."""
        for group in list(self._registry.groups.values()):
            for rank, (incarnation, node) in list(group.members.items()):
                endpoint = group.nodes.get(node)
                if rank in group.keepers or endpoint is None:
                    continue
                try:
                    await group.peers.get(rank, incarnation, endpoint)
                except ElasticEPError as error:
                    self._log.info("peer.not_mapped", group=group.name, error=str(error))

    async def _ping(self) -> None:
        while True:
            self._notifier.alive()
            await asyncio.sleep(self._notifier.watchdog_s / 2)

    def _background(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._tasks.append(asyncio.create_task(self._keep_running(name, work)))

    async def _keep_running(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """What serves in the background does not end silently: it is reported and begun anew."""
        while True:
            try:
                await work()
            except Exception:
                self._log.exception("background.failed", task=name)
                await asyncio.sleep(_RESTART_S)
            else:
                return

    def _unexpected(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback raised: nothing may bring the daemon down, and nothing may go unseen."""
        self._log.error(
            "loop.error", what=context.get("message"), exc_info=context.get("exception")
        )

    # ---- while it runs

    def _announce(self, group: str, rank: int, incarnation: int, cause: str) -> None:
        self._announcer.announce(
            node_pb2.ReportDeathRequest(
                group=group, rank=rank, incarnation=incarnation, cause=cause
            )
        )

    def _peer_addresses(self, group: str) -> list[str]:
        known = self._registry.groups.get(group)
        if known is None:
            return []
        mine = self._node.config.node
        return [e.grpc_address for e in known.nodes.values() if e.node != mine]

    def _save_soon(self) -> None:
        """Write the state file once for all that happens in this turn of the loop."""
        if self._save_timer is None:
            self._save_timer = asyncio.get_running_loop().call_later(0, self._save)

    def _save(self) -> None:
        self._save_timer = None
        try:
            self._state.write(group.kept() for group in self._registry.groups.values())
        except OSError as error:
            if not self._unwritten:
                self._log.error(
                    "state.not_written",
                    path=str(self._directory.state_path),
                    error=error.strerror,
                    remedy="make room; a daemon that starts now does not find what changed since",
                )
            self._unwritten = True
            loop = asyncio.get_running_loop()
            self._save_timer = loop.call_later(self._limits.save_again_s, self._save)
        else:
            if self._unwritten:
                self._log.info("state.written", path=str(self._directory.state_path))
            self._unwritten = False

    # ---- the end

    async def _end_seats(self) -> None:
        """Fence every seat and end its worker; engines are told, and keep running."""
        self._node.stopping = True
        keepers = self._registry.keepers()
        for keeper in keepers:
            keeper.apply(seats.Ended(keeper.seat.incarnation, "the daemon was stopped"))
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.stop_s
        for keeper in keepers:
            await keeper.changed.until(
                lambda k=keeper: k.seat.state is SeatState.EMPTY,  # type: ignore[misc]
                deadline - loop.time(),
            )
            if keeper.seat.state is not SeatState.EMPTY:
                self._log.warning(
                    "seat.not_ended",
                    group=keeper.group.name,
                    rank=keeper.rank,
                    runner=str(keeper.seat.runner),
                    engine=str(keeper.seat.engine),
                )
        await self._session.flush(self._limits.report_s)

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()
        await self._announcer.close()
        if self._grpc is not None:
            await self._grpc.stop(grace=0.1)
        if self._page is not None:
            self._page.close()
        self._fd_server.close()
        if self._save_timer is not None:
            self._save_timer.cancel()
        if self._leave and self._registry.groups:
            self._save()
        for group in self._registry.groups.values():
            if group.weights is not None:
                await group.weights.leave()
            if not self._leave:
                group.drop_memory()
        self._locks.close()
        self._registry.close()
        self._node.mover.close()
        self._node.watcher.close()
        self._directory.release(keep_state=self._leave and self._directory.state_path.exists())
        for number in self._handlers:
            asyncio.get_running_loop().remove_signal_handler(number)
