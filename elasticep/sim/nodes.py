"""Simulated node daemons: seats and their processes, the session, staging, dead words."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from elasticep.control import events as ev
from elasticep.control.events import SeatState
from elasticep.control.records import Endpoint
from elasticep.control.views import View
from elasticep.proto.controller_pb2 import ControllerMessage
from elasticep.sim import loads, reports
from elasticep.sim.cluster import Cluster, SimSeat
from elasticep.sim.net import Stream
from elasticep.sim.plants import Plant
from elasticep.sim.ranks import SimRank

if TYPE_CHECKING:
    from elasticep.sim.controllers import SimController

_POLL_S: Final = 0.1
_CONNECT_S: Final = 0.5
_SILENCE_S: Final = 2.0
_GRACE_S: Final = 0.2
_DETECT_S: Final = 0.0003
_MAX_LAG: Final = 4


class SimNode:
    """A machine with its daemon and ranks.

    Args:
        cluster: everything else.
        name: its own.
        seats: (group, rank) that it offers.
    """

    def __init__(self, cluster: Cluster, name: str, seats: list[tuple[str, int]]) -> None:
        self.c = cluster
        self.name = name
        self.endpoint = Endpoint(name, "rack", f"{name}:1", f"/run/{name}")
        self.seats = {key: SimSeat(*key) for key in seats}
        self.powered = False
        self.up = False  # the daemon runs
        self.frozen = False  # the daemon is stopped
        self.slow_staging = False
        self.bad_staging = 0  # so many views fail to be staged
        self.unrestorable: tuple[tuple[int, int], ...] = ()  # what such an answer names
        self.bad_attach = 0  # so many engines die as they attach
        self._life = 0  # of the daemon
        self._sessions = 0
        self._session = ""
        self._connected = False
        self._to: SimController | None = None
        self._stream: Stream | None = None
        self._heard_s = 0.0
        self._beat_s = 0.0
        self._backoff_s = 0.05
        self._turn = 0
        self._kept: list[Callable[[], None]] = []
        self._views: dict[tuple[str, int], View] = {}

    # ---- power and daemon

    def boot(self) -> None:
        """The machine comes up; of what ran before nothing is left."""
        self.powered = True
        for key in self.seats:
            self.seats[key] = SimSeat(*key)
            group, rank = key
            self.c.groups[group].memory_of(self.name, rank)
        self.start()

    def lose(self) -> None:
        """The machine is gone, with its memory."""
        self.stop()
        self.powered = False
        for (group, rank), seat in self.seats.items():
            if seat.process is not None:
                seat.process.kill()
                seat.process = None
            self.c.groups[group].memories.pop((self.name, rank), None)

    def start(self) -> None:
        """The daemon starts; it finds the processes that are there."""
        if self.up or not self.powered:
            return
        self._life += 1
        self.up, self.frozen, self._connected = True, False, False
        for seat in self.seats.values():
            process = seat.process
            if process is not None and process.alive and seat.state is not SeatState.ATTACHED:
                process.kill()  # it was coming up or ending; nobody waits for it any more
            if process is not None and not process.alive:
                self._died(seat, process, "it died while the daemon was away")
            elif seat.process is None and seat.state is not SeatState.EMPTY:
                seat.state = SeatState.EMPTY
        self._later(self.c.rng.uniform(0, 0.02), self._connect)
        self._later(self.c.rng.uniform(0, _POLL_S), self._poll)

    def stop(self) -> None:
        """SIGKILL of the daemon; ranks go on."""
        if self.up:
            self.up = False
            self._kept.clear()
            self._drop()

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.c.loop.call_later(delay_s, self._fire, self._life, action)

    def _fire(self, life: int, action: Callable[[], None]) -> None:
        if life == self._life and self.up:
            if self.frozen:
                self._kept.append(action)
            else:
                action()

    def cont(self) -> None:
        """SIGCONT of the daemon."""
        self.frozen = False
        kept, self._kept = self._kept, []
        for action in kept:
            self._fire(self._life, action)

    # ---- the session

    def _connect(self) -> None:
        if self._connected or self._session:
            return
        controllers = self.c.controllers
        self._to = controllers[self._turn % len(controllers)]
        self._turn += 1
        self._sessions += 1
        self._session = f"{self.name}:{self._life}:{self._sessions}"
        self._stream = Stream(self.c.net, self.c.loop, self.name, self._to.name)
        seats = [(seat.group, seat.report()) for seat in self.seats.values()]
        self._stream.send(self._to.hello, self.endpoint, self._session, seats, self)
        session = self._session
        self._later(_CONNECT_S, lambda: self._give_up(session))

    def _give_up(self, session: str) -> None:
        if session == self._session and not self._connected:
            self._drop()
            self._again()

    def _again(self) -> None:
        self._later(self._backoff_s * self.c.rng.uniform(0.5, 1.0), self._connect)
        self._backoff_s = min(2 * self._backoff_s, 1.0)

    def _drop(self) -> None:
        """The stream ends here; the other side hears of it if it can."""
        if self._stream is not None and self._to is not None:
            self._stream.send(self._to.broke, self._session)
        self._stream, self._session, self._connected = None, "", False

    def ended(self, session: str) -> None:
        """The other side ended the stream."""

        def work() -> None:
            if session == self._session:
                self._stream, self._session, self._connected = None, "", False
                self._again()

        self._fire(self._life, work)

    def _say(self, group: str, event: ev.Event) -> None:
        if self._connected and self._stream is not None and self._to is not None:
            self._stream.send(self._to.hear, self._session, ((group, event),))

    def order(self, session: str, message: ControllerMessage) -> None:
        """Something comes from a controller."""
        self._fire(self._life, lambda: self._obey(session, message))

    def _obey(self, session: str, message: ControllerMessage) -> None:
        if session != self._session:
            return
        self._heard_s = self.c.loop.now_s
        if not self._connected:
            self._connected, self._backoff_s = True, 0.05
            self._resend()
        body = message.WhichOneof("body")
        if body == "grant":
            self._grant(message)
        elif body == "proposal":
            self._proposal(message)
        elif body == "fence":
            fence = message.fence
            self._dead_word(fence.group, fence.rank, fence.incarnation)
            seat = self.seats.get((fence.group, fence.rank))
            if seat is not None and 1 <= seat.incarnation <= fence.incarnation:
                self._end(seat, fence.reason)

    def _resend(self) -> None:
        for seat in self.seats.values():
            self._tell(seat)  # it may have changed since the hello left
            seat.told.clear()
            seat.waits = None
            if seat.process is not None and seat.process.epoch:
                self._tell_adopted(seat, seat.process)
        self._tell_staged()

    # ---- seats

    def _tell(self, seat: SimSeat) -> None:
        self._say(seat.group, ev.SeatChanged(self.name, seat.report()))

    def _grant(self, message: ControllerMessage) -> None:
        grant = message.grant
        seat = self.seats[grant.config.name, grant.rank]
        reused = self.c.plant is Plant.REUSED_INCARNATION and seat.state is SeatState.EMPTY
        if grant.incarnation == seat.incarnation and not reused:
            self._tell(seat)
            return
        if grant.incarnation < seat.incarnation or seat.state is not SeatState.EMPTY:
            return
        seat.incarnation, seat.state, seat.cause = grant.incarnation, SeatState.EMPTY, ""
        seat.told.clear()
        seat.waits = None
        shared = self.c.groups[seat.group]
        memory = shared.memories[self.name, seat.rank]
        process = SimRank(shared, self, seat.rank, seat.incarnation, memory)
        seat.process = process
        rng = self.c.rng
        self._later(rng.uniform(0.02, 0.1), lambda: self._ready(seat, process))

    def _ready(self, seat: SimSeat, process: SimRank) -> None:
        if seat.process is process and process.alive:
            seat.state = SeatState.READY
            self._tell(seat)
            self._later(self.c.rng.uniform(0.02, 0.2), lambda: self._attach(seat, process))

    def _attach(self, seat: SimSeat, process: SimRank) -> None:
        if seat.process is process and process.alive and seat.state is SeatState.READY:
            if self.bad_attach:
                self.bad_attach -= 1
                self.kill(seat, "engine died")
                return
            seat.state = SeatState.ATTACHED
            self._tell(seat)
            process.later(self.c.rng.uniform(0.0, 0.2), process.enter)

    def kill(self, seat: SimSeat, cause: str, only: SimRank | None = None) -> None:
        """SIGKILL of a rank's processes, or of `only`; the daemon's futex knows at once."""
        process = seat.process
        if process is not None and process.alive and only in (None, process):
            process.kill()
            self._later(_DETECT_S, lambda: self._died(seat, process, cause))

    def exited(self, process: SimRank, cause: str) -> None:
        """A rank's engine let go."""
        group, rank, _ = process.seat
        self.kill(self.seats[group, rank], cause, process)

    def _died(self, seat: SimSeat, process: SimRank, cause: str) -> None:
        if seat.process is not process:
            return
        if seat.state is not SeatState.DEAD:
            self._over(seat, cause)
        self._later(self.c.rng.uniform(0.01, 0.2), lambda: self._confirm(seat, process))

    def _over(self, seat: SimSeat, cause: str) -> None:
        """The incarnation ends: dead words first, then the controller is told."""
        seat.state, seat.cause = SeatState.DEAD, cause
        self._dead_word(seat.group, seat.rank, seat.incarnation)
        self._announce(seat)
        self._tell(seat)

    def _confirm(self, seat: SimSeat, process: SimRank) -> None:
        if seat.process is process:
            seat.process, seat.state = None, SeatState.EMPTY
            self._tell(seat)

    def _end(self, seat: SimSeat, cause: str, only: SimRank | None = None) -> None:
        """It, or `only`, is expelled: fenced, then killed if it does not let go."""
        process = seat.process
        if process is None or not process.alive or seat.state is SeatState.DEAD:
            return
        if only not in (None, process):
            return
        process.memory.fenced = max(process.memory.fenced, seat.incarnation)
        self._over(seat, cause)
        process.memory.poke()
        self._later(_GRACE_S, lambda: self.kill(seat, cause, process))

    def _dead_word(self, group: str, rank: int, incarnation: int) -> None:
        """Into every header that this node maps: all of the domain."""
        if self.c.plant is Plant.NO_DEAD_WORD:
            return
        shared = self.c.groups[group]
        if shared.marked.get(rank, 0) >= incarnation:
            return
        shared.marked[rank] = incarnation
        for memory in shared.memories.values():
            if memory.dead[rank] < incarnation:
                memory.dead[rank] = incarnation
                memory.poke()

    def _announce(self, seat: SimSeat) -> None:
        told = (seat.group, seat.rank, seat.incarnation)
        for node in self.c.nodes.values():
            if node is not self and self.c.net.arrives(self.name, node.name):
                self.c.loop.call_later(self.c.net.delay_s(), node.heard_death, *told)

    def heard_death(self, group: str, rank: int, incarnation: int) -> None:
        """Another daemon says that an incarnation is dead."""
        self._fire(self._life, lambda: self._dead_word(group, rank, incarnation))

    # ---- views

    def _proposal(self, message: ControllerMessage) -> None:
        proposal = message.proposal
        group, epoch = proposal.view.group, proposal.view.epoch
        for gone in proposal.view.expelled:
            self._dead_word(group, gone.rank, gone.incarnation)
            seat = self.seats.get((group, gone.rank))
            if seat is not None and 1 <= seat.incarnation <= gone.incarnation:
                self._end(seat, f"expelled in epoch {epoch}")
        known = self.c.checker.views.get((group, epoch))
        if known is None or known.digest != proposal.view.digest:
            view = View.from_proto(self.c.configs[group].geometry, proposal.view)
            known = self.c.checker.view(view)
        view = known
        rng = self.c.rng
        for rank in proposal.stage_ranks:
            delay_s = rng.uniform(0.5, 8.0) if self.slow_staging else rng.uniform(0.005, 0.1)
            self._later(delay_s, lambda r=rank: self._stage(self.seats[group, r], view))  # type: ignore[misc]

    def _stage(self, seat: SimSeat, view: View) -> None:
        process = seat.process
        ready = process is not None and process.alive and seat.state is SeatState.ATTACHED
        if process is None or not ready or not view.holds(seat.rank, seat.incarnation):
            self._staged(seat, view.epoch, "the seat is not attached")
        elif process.epoch > view.epoch:
            self._tell_adopted(seat, process)
        elif process.epoch and view.epoch >= process.epoch + _MAX_LAG:
            self._staged(seat, view.epoch, f"the rank runs epoch {process.epoch}")
        elif self.bad_staging:
            self.bad_staging -= 1
            self._staged(seat, view.epoch, "its weights cannot be read", self.unrestorable)
        elif view.epoch in process.views or process.epoch == view.epoch:
            seat.told.discard(view.epoch)
            self._tell_staged()
        else:
            process.later(0.0, lambda: self._bank(seat, process, view))

    def _bank(self, seat: SimSeat, process: SimRank, view: View) -> None:
        if view.epoch <= process.epoch:
            return
        running: dict[int, View] = {}
        for memory in self.c.groups[seat.group].memories.values():
            other = memory.rank
            if other is None or other.view is None:
                continue
            # Whoever is dead to this rank gets nothing of it any more, whatever it still runs.
            over = max(memory.fenced, int(process.memory.dead[other.me]))
            if over < other.incarnation:
                running[other.epoch] = other.view
        used = [
            v
            for epoch, v in running.items()
            if epoch < view.epoch and v.holds(seat.rank, seat.incarnation)
        ]
        self.c.checker.filled(seat.group, seat.rank, view, used)
        process.stage(view)
        self._tell_staged()

    def _staged(
        self, seat: SimSeat, epoch: int, error: str, names: tuple[tuple[int, int], ...] = ()
    ) -> None:
        event = ev.Staged(self.name, seat.rank, seat.incarnation, epoch, error, names)
        self._say(seat.group, event)

    def _tell_staged(self) -> None:
        """A joiner's word waits until its engine is in step()."""
        for seat in self.seats.values():
            process = seat.process
            if process is None or seat.state is not SeatState.ATTACHED or not self.up:
                continue
            if process.epoch or process.state == "barrier":
                for epoch in sorted(set(process.views) - seat.told):
                    seat.told.add(epoch)
                    self._staged(seat, epoch, "")

    def adopted(self, process: SimRank, view: View) -> None:
        """A rank of this node runs in a view: those that it left out have no place any more."""
        group, rank, _ = process.seat
        self._fire(self._life, lambda: self._tell_adopted(self.seats[group, rank], process))
        for seat in self.seats.values():
            other = seat.process
            if seat.group == group and other is not None and other.epoch and not view.holds(
                seat.rank, seat.incarnation
            ) and other.epoch < view.epoch:  # fmt: skip
                self._fire(
                    self._life,
                    lambda s=seat, p=other: self._end(s, f"left out of epoch {view.epoch}", p),  # type: ignore[misc]
                )

    def _tell_adopted(self, seat: SimSeat, process: SimRank) -> None:
        if seat.process is process:
            event = ev.Adopted(self.name, seat.rank, seat.incarnation, process.epoch, process.step)
            self._say(seat.group, event)

    # ---- time

    def _poll(self) -> None:
        """Look at wait records, at silence, and send heartbeats."""
        now_s = self.c.loop.now_s
        self._later(_POLL_S, self._poll)
        if self._connected and now_s - self._heard_s > _SILENCE_S:
            self._drop()
            self._again()
        self._tell_staged()
        beat = reports.tell_waits(self, now_s, self._beat_s)
        if self._connected and (beat or now_s - self._beat_s >= 0.3):
            self._beat_s = now_s
            self.say_all(reports.heartbeat(self) + loads.reports(self))

    def say_all(self, events: tuple[tuple[str, ev.Event], ...]) -> None:
        """One message with several reports."""
        if self._connected and self._stream is not None and self._to is not None:
            self._stream.send(self._to.hear, self._session, events)
