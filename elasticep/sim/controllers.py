"""Controller processes: the real `Controller`, its elections and terms, without gRPC."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, cast

from structlog.typing import FilteringBoundLogger

from elasticep.config import ControllerConfig
from elasticep.control import events as ev
from elasticep.control.clocks import Clocks
from elasticep.control.controller import Controller
from elasticep.control.election import Candidate
from elasticep.control.events import SeatReport
from elasticep.control.metrics import ControllerMetrics
from elasticep.control.records import Endpoint
from elasticep.control.session import NodeSession
from elasticep.control.term import Term
from elasticep.errors import ElasticEPError, Unavailable
from elasticep.proto.controller_pb2 import ControllerMessage
from elasticep.sim.checks import Checker
from elasticep.sim.loop import Process, VirtualLoop
from elasticep.sim.net import Net, Stream
from elasticep.sim.store import SimStore, StoreServer

if TYPE_CHECKING:
    from elasticep.sim.nodes import SimNode

_LEASE_S: Final = 1
_TOLD: Final = frozenset(
    {"controller.leads", "lead.lost", "lead.ended", "rank.fenced", "view.adopted", "view.waiting",
     "staging.failed", "rank.suspected", "node.disconnected", "rebalance.began",
     "rebalance.done", "rebalance.abandoned", "rebalance.stuck", "experts.unrestorable"}
)  # fmt: skip


class _Log:
    """Takes log events into the trace; an unexpected error is a broken invariant."""

    def __init__(self, name: str, checker: Checker) -> None:
        self._name = name
        self._checker = checker

    def _note(self, event: str, **fields: Any) -> None:
        if event in _TOLD:
            told = ", ".join(f"{key} {value}" for key, value in fields.items() if value != "")
            self._checker.trace(f"{self._name}: {event} {told}")

    debug = info = warning = _note

    def error(self, event: str, **fields: Any) -> None:
        """An error that is not one of a store or of another leader."""
        self._checker.fail("I6", f"{self._name}: {event} {fields}")

    exception = error


class SimSession(NodeSession):
    """A node's stream: what is sent goes to the simulated network at once."""

    def __init__(
        self, endpoint: Endpoint, session_id: str, stream: Stream, node: "SimNode"
    ) -> None:
        super().__init__(endpoint, session_id)
        self._stream = stream
        self._to = node

    def send(self, message: ControllerMessage) -> None:
        """See `NodeSession.send`."""
        if not self._closed.done():
            self._stream.send(self._to.order, self.session_id, message)

    def close(self, why: ElasticEPError) -> None:
        """See `NodeSession.close`."""
        if not self._closed.done():
            super().close(why)
            self._stream.send(self._to.ended, self.session_id)


class SimController:
    """One controller process.

    Args:
        name: its name in the trace and on the network.
        loop: time.
        server: the store.
        net: the network.
        checker: hears what it logs.
        metrics: shared by all; making them costs more than a schedule.
    """

    def __init__(
        self,
        name: str,
        loop: VirtualLoop,
        server: StoreServer,
        net: Net,
        checker: Checker,
        metrics: ControllerMetrics,
    ) -> None:
        self.name = name
        self._loop = loop
        self._server = server
        self._net = net
        self._checker = checker
        self._metrics = metrics
        self._starts = 0
        self._sessions: dict[str, SimSession] = {}
        self.process = Process(name)
        self._task: asyncio.Task[None] | None = None
        self.controller: Controller | None = None

    # ---- its life

    def start(self) -> None:
        """A new process."""
        self._starts += 1
        self.process = process = Process(self.name)
        self._sessions = {}
        loop = self._loop
        self.controller = process.context.run(
            Controller,
            ControllerConfig(name=self.name, store="memory", lease_ttl_s=_LEASE_S),
            cast(Any, SimStore(self._server, process)),
            cast(FilteringBoundLogger, _Log(self.name, self._checker)),
            self._metrics,
            Clocks(lambda: loop.now_s + process.ahead_s, lambda: loop.now_s),
        )
        candidate = Candidate(self.name, self.name, f"{self.name}#{self._starts}")
        self._task = loop.create_task(
            self.controller.campaign(candidate), context=process.context.copy()
        )

    def kill(self) -> None:
        """SIGKILL: nothing that it still does has an effect."""
        if self.controller is None:
            return
        self._loop.continue_process(self.process)
        self.process.alive = False
        for session in list(self._sessions.values()):
            session._stream.open = False
            self._to_node(session)
        if self._task is not None:
            self._task.cancel()
        self.controller = self._task = None

    def _to_node(self, session: SimSession) -> None:
        node, session_id = session._to, session.session_id
        stream = Stream(self._net, self._loop, self.name, session.node)
        stream.send(node.ended, session_id)

    def pause(self) -> None:
        """SIGSTOP."""
        self._loop.stop_process(self.process)

    def cont(self) -> None:
        """SIGCONT."""
        self._loop.continue_process(self.process)

    @property
    def term(self) -> Term | None:
        """Its term of office, if it leads and runs."""
        return self.controller.term if self.controller is not None else None

    # ---- what comes over the network

    def call(self, work: Callable[[], None]) -> None:
        """Do something in this process, when it gets a turn."""
        process = self.process

        def guarded() -> None:
            if process.alive and process is self.process:
                work()

        self._loop.call_soon(guarded, context=process.context)

    def hello(
        self,
        endpoint: Endpoint,
        session_id: str,
        seats: list[tuple[str, SeatReport]],
        node: "SimNode",
    ) -> None:
        """A node wants a session; one that does not lead refuses."""

        def work() -> None:
            stream = Stream(self._net, self._loop, self.name, endpoint.node)
            session = SimSession(endpoint, session_id, stream, node)
            term = self.term
            if term is None or term.over:
                session.close(Unavailable("not leading"))
                return
            self._sessions[session_id] = session
            term.open(session, seats)
            session._closed.add_done_callback(lambda _: self._closed(term, session))

        self.call(work)

    def _closed(self, term: Term, session: SimSession) -> None:
        self._sessions.pop(session.session_id, None)
        if not term.over:
            term.closed(session, str(session.why))

    def hear(self, session_id: str, events: Iterable[tuple[str, ev.Event]]) -> None:
        """A message of a node."""

        def work() -> None:
            session = self._sessions.get(session_id)
            term = self.term
            if session is not None and term is not None and not term.over:
                term.heard(session, events)

        self.call(work)

    def broke(self, session_id: str) -> None:
        """A node's stream is over."""

        def work() -> None:
            session = self._sessions.get(session_id)
            if session is not None:
                session.close(Unavailable("the stream broke"))

        self.call(work)

    async def ended(self) -> None:
        """Wait until nothing of it runs any more."""
        task = self._task
        self.kill()
        if task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await task
