"""A node's processes around one test: ends them all and fails if anything is left.

with Lab() as lab:
    lab.create(config)
    daemon = lab.daemon("n0", "g:0-1")
    engine = lab.engine(daemon, "g", 0)
"""

import os
import signal
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from elasticep.geometry import GroupGeometry
from elasticep.group import GroupConfig
from elasticep.proto import controller_pb2, types_pb2
from elasticep.spec import ExchangeSpec
from elasticep.testing.fake_controller import FakeController
from elasticep.testing.folders import make_folder, remove_folder
from elasticep.testing.node import DaemonProcess, EngineProcess, view_of, wait_for
from elasticep.testing.processes import stop

_KEPT: Final = (".log", ".sock")


def small_config(name: str = "g", **changes: Any) -> GroupConfig:
    """A group of up to four ranks whose memory is a few pages; `changes` are fields of it."""
    spec = ExchangeSpec.preset("ROUTED", max_tokens=8, dispatch_dtype="fp32", combine_dtype="fp32")
    plain: dict[str, Any] = {
        "name": name,
        "geometry": GroupGeometry(
            layers=1, experts=4, topk=2, hidden=32, slots_per_rank=4, max_ranks=4
        ),
        "exchanges": (("decode", spec),),
        "initial_ranks": 2,
        **changes,
    }
    return GroupConfig(**plain)


class Lab:
    """A folder, a controller double, and whatever a test starts."""

    def __init__(self) -> None:
        self.folder = make_folder("eep-")
        self.controller = FakeController(self.folder)
        self.daemons: list[DaemonProcess] = []
        self.engines: list[EngineProcess] = []
        self.config: GroupConfig | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._end(check=error is None)
        except BaseException:
            self._kill_all()
            raise
        finally:
            self.controller.close()
            if error is not None:
                for daemon in self.daemons:
                    if daemon.log_path.exists():
                        error.add_note(daemon.log_path.read_text()[-6000:])
            remove_folder(self.folder)

    def _end(self, *, check: bool) -> None:
        for engine in self.engines:
            engine.close()
        for daemon in self.daemons:
            if daemon.process is not None and daemon.process.poll() is None:
                daemon.process.send_signal(signal.SIGCONT)
                status = daemon.stop()
                assert not check or status == 0, daemon.log_path.read_text()
        if not check:
            self._kill_all()
            return
        wait_for(lambda: not self.processes(), f"all of {self.processes()} to end")
        left = [p for p in self.folder.rglob("*") if p.suffix not in _KEPT and p.is_file()]
        assert not left, f"left behind: {left}"

    def _kill_all(self) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        """Processes whose command line names this lab's folder."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    line = (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if f"{self.folder}/".encode() in line:
                    found.append(int(entry.name))
        return found

    # ---- what a test starts

    def create(self, config: GroupConfig) -> None:
        """Let the controller know a group."""
        self.config = config
        self.controller.create_group(config.to_proto())

    def daemon(self, node: str, seats: str, *flags: str, start: bool = True) -> DaemonProcess:
        """A daemon of this controller."""
        addresses = [self.controller.address]
        daemon = DaemonProcess(self.folder / node, node, addresses, seats, *flags)
        self.daemons.append(daemon)
        return daemon.start() if start else daemon

    def engine(self, daemon: DaemonProcess, group: str, rank: int) -> EngineProcess:
        """An engine that begins to attach; `up()` waits for it."""
        answer = daemon.attach(group, rank, wait_ms=60_000)
        engine = EngineProcess(answer.fd_socket, answer.ticket)
        self.engines.append(engine)
        return engine

    def clinging(self, daemon: DaemonProcess, rank: int) -> EngineProcess:
        """An engine that is stopped and whose worker is killed: its incarnation is over, and it
        does not let go of the seat.
        """
        engine = self.engine(daemon, "g", rank).up()
        self.attached(rank)
        stop(engine.pid)
        os.kill(daemon.seat("g", rank).worker_pid, signal.SIGKILL)
        self.dead(rank)
        return engine

    def serve(
        self, daemon: DaemonProcess, ranks: list[int], group: str = "g", epoch: int = 1
    ) -> list[EngineProcess]:
        """Engines on all of these ranks, running the first view."""
        assert self.config is not None
        engines = [self.engine(daemon, group, rank) for rank in ranks]
        for engine in engines:
            engine.up()
        view = view_of(self.config, epoch, 0, dict.fromkeys(ranks, (1, daemon.node)))
        self.controller.propose(view, {daemon.node: ranks})
        answers = self.step(engines)
        expected = [f"stepped {epoch} {answers[0].split()[2]} 1"] * len(engines)
        assert answers == expected, answers
        return engines

    @staticmethod
    def step(engines: list[EngineProcess]) -> list[str]:
        """One step of all of them together; their answers."""
        for engine in engines:
            engine.say("step")
        return [engine.hear() for engine in engines]

    def joined(self, engines: list[EngineProcess], epoch: int) -> None:
        """The answers of a first step together, and one more that is complete.

        The first one may be torn by what members left in it before the joiners came.
        """
        answers = {tuple(engine.hear().split()[:3]) for engine in engines}
        assert len(answers) == 1, answers
        word, ran, step = answers.pop()
        assert (word, ran) == ("stepped", str(epoch)), (word, ran, step)
        assert self.step(engines) == [f"stepped {epoch} {int(step) + 1} 1"] * len(engines)

    # ---- what a test waits for

    def ready(self, rank: int, incarnation: int = 1, group: str = "g") -> types_pb2.Seat:
        """Wait until a seat was reported ready."""
        state = types_pb2.SEAT_STATE_READY
        return self.controller.wait_seat(group, rank, state, incarnation)

    def attached(self, rank: int, incarnation: int = 1, group: str = "g") -> types_pb2.Seat:
        """Wait until a seat was reported attached."""
        state = types_pb2.SEAT_STATE_ATTACHED
        return self.controller.wait_seat(group, rank, state, incarnation)

    def dead(self, rank: int, incarnation: int = 1, group: str = "g") -> types_pb2.Seat:
        """Wait until an incarnation was reported dead."""
        return self.controller.wait_seat(group, rank, types_pb2.SEAT_STATE_DEAD, incarnation)

    def empty(self, rank: int, incarnation: int = 1, group: str = "g") -> types_pb2.Seat:
        """Wait until a seat was reported empty."""
        return self.controller.wait_seat(group, rank, types_pb2.SEAT_STATE_EMPTY, incarnation)

    def staged(self, rank: int, epoch: int) -> controller_pb2.Staged:
        """Wait for an answer to a proposal."""
        message = self.controller.wait(
            lambda _, m: (
                m.WhichOneof("body") == "staged"
                and (m.staged.rank, m.staged.epoch) == (rank, epoch)
            ),
            f"rank {rank} to answer epoch {epoch}",
        )
        return message.staged

    def adopted(self, rank: int, epoch: int) -> controller_pb2.Adopted:
        """Wait until a rank runs an epoch."""
        message = self.controller.wait(
            lambda _, m: (
                m.WhichOneof("body") == "adopted"
                and (m.adopted.rank, m.adopted.epoch) == (rank, epoch)
            ),
            f"rank {rank} to adopt epoch {epoch}",
        )
        return message.adopted
