"""Light engines on a local cluster, and what they must have done: for tests with real processes.

    with Cluster(group="test", ranks=4, nodes=2) as cluster, Fleet(cluster, config) as fleet:
        fleet.open(range(4))
        fleet.progress(range(4))
        os.kill(fleet.engine(2).worker, signal.SIGKILL)
        fleet.members({0, 1, 3})
        fleet.check()

`check` holds for every engine that ever ran: complete steps are right to the bit (I1), all that
completed a step ran it in one view (I4), epochs grow, and an epoch is the same view to everybody.
"""

import atexit
import functools
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from elasticep.balance import RebalancePolicy
from elasticep.geometry import GroupGeometry
from elasticep.group import GroupConfig, Timeouts
from elasticep.proto import controller_pb2, node_pb2
from elasticep.spec import ExchangeSpec
from elasticep.testing.cluster import Cluster

# Generous: what comes at once on an idle machine takes its time on a busy one.
WAIT_S: Final = 60.0
_LOOK_S: Final = 0.01
_CALL_S: Final = 2.0
_DRAIN_S: Final = 30.0
_numbers = itertools.count()
Record = dict[str, Any]


def light_config(name: str, ranks: int, initial: int | None = None, **more: Any) -> GroupConfig:
    """A group of two small layers whose ranks can each hold every expert, three copies of each.

    Args:
        name: of the group.
        ranks: seats.
        initial: ranks that the first view waits for; None: all.
        more: other fields of the config.
    """
    given: dict[str, Any] = {
        # A killed daemon is back before, and nobody hangs so long on a machine that is busy.
        "timeouts": Timeouts(node_timeout_ms=15_000, hang_timeout_ms=10_000),
        "spare_copies": min(2, ranks - 1),
        "flap_limit": 0,
        # On a slow machine a test lasts long enough for a view that nobody asked for.
        "rebalance": RebalancePolicy(automatic=False),
        **more,
    }
    return GroupConfig(
        name=name,
        geometry=GroupGeometry(
            layers=2, experts=8, topk=2, hidden=16, slots_per_rank=8, max_ranks=ranks
        ),
        exchanges=(
            (
                "decode",
                ExchangeSpec.preset(
                    "ROUTED", dispatch_dtype="fp32", combine_dtype="fp32", max_tokens=8
                ),
            ),
        ),
        initial_ranks=ranks if initial is None else initial,
        **given,
    )


class _Nursery:
    """The process that engines are forked from."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "elasticep.testing.decoding_engine", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._control = ours
        ours.settimeout(60.0)
        atexit.register(self.close)

    def fork(self, order: Record, orders: socket.socket) -> int:
        """Fork an engine; returns its process id."""
        socket.send_fds(self._control, [json.dumps(order).encode()], [orders.fileno()])
        return int(self._control.recv(100))

    def close(self) -> None:
        """End it, and with it its engines."""
        self._control.close()
        self.process.wait(60.0)


@functools.cache
def nursery() -> _Nursery:
    """The one of this process: torch is loaded once for all tests."""
    return _Nursery()


class EngineProcess:
    """An engine, as its owner knows it."""

    def __init__(self, rank: int, order: Record, record: Path) -> None:
        self.rank = rank
        self._record = record
        self._read = 0
        self._partial = b""
        self._records: list[Record] = []
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.pid = nursery().fork(order, theirs)
        self._pidfd = os.pidfd_open(self.pid)

    def records(self, kind: str | None = None) -> list[Record]:
        """What it has recorded so far, all or of one kind."""
        with suppress(FileNotFoundError), self._record.open("rb") as file:
            file.seek(self._read)
            content = file.read()
            self._read += len(content)
            *lines, self._partial = (self._partial + content).split(b"\n")
            self._records += [json.loads(line) for line in lines]
        return [r for r in self._records if kind is None or r["kind"] == kind]

    @property
    def attached(self) -> Record | None:
        """Its record of being attached."""
        return next(iter(self.records("attached")), None)

    @property
    def worker(self) -> int:
        """Process id of the worker of its rank."""
        assert self.attached is not None, f"rank {self.rank} is not attached"
        return int(self.attached["worker"])

    @property
    def incarnation(self) -> int:
        """The incarnation that it runs under."""
        assert self.attached is not None, f"rank {self.rank} is not attached"
        return int(self.attached["incarnation"])

    def complete(self) -> list[Record]:
        """Its complete steps."""
        return [r for r in self.records("step") if r["complete"]]

    def torn(self) -> list[Record]:
        """Its torn steps."""
        return [r for r in self.records("step") if not r["complete"]]

    @property
    def epoch(self) -> int:
        """Epoch of its last complete step, 0 if there is none."""
        done = self.complete()
        return int(done[-1]["epoch"]) if done else 0

    @property
    def view(self) -> dict[int, int]:
        """Members of the view that it saw last, rank -> incarnation."""
        seen = self.records("view")
        return {int(r): i for r, i in seen[-1]["members"].items()} if seen else {}

    @property
    def end(self) -> Record | None:
        """How it ended: its record "left", "fenced" or "failed"; None: it runs, or was killed."""
        return next((r for r in self.records() if r["kind"] in ("left", "fenced", "failed")), None)

    @property
    def gone(self) -> bool:
        """Whether its process has ended."""
        return bool(select.select([self._pidfd], [], [], 0)[0])

    def signal(self, number: int) -> int:
        """Send a signal; returns the clock just before, nanoseconds."""
        at_ns = time.monotonic_ns()
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)
        return at_ns

    def order(self, word: str) -> None:
        """Tell it to "pause" between steps, to "resume", or to "leave"."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._orders.send(word.encode())

    def close(self) -> None:
        """SIGKILL it if it still runs."""
        self.signal(signal.SIGKILL)
        self.signal(signal.SIGCONT)
        os.close(self._pidfd)
        self._orders.close()


class Fleet:
    """All engines of a group, and those that were.

    Args:
        cluster: that they run on.
        config: of their group.
    """

    def __init__(self, cluster: Cluster, config: GroupConfig) -> None:
        self.cluster = cluster
        self.config = config
        self.all: list[EngineProcess] = []

    def open(self, ranks: Iterable[int], **settings: Any) -> list[EngineProcess]:
        """Start an engine on each of these seats, with `decoding_engine.EngineSettings`."""
        opened = []
        for rank in ranks:
            name = f"engine-{next(_numbers)}"
            record = self.cluster.folder / f"{name}.jsonl"
            order = {
                "rank": rank,
                "socket": self.cluster.socket_of(rank),
                "config": self.config.to_dict(),
                "record": str(record),
                **settings,
            }
            self.all.append(EngineProcess(rank, order, record))
            opened.append(self.all[-1])
        return opened

    def engine(self, rank: int) -> EngineProcess:
        """The latest engine of a seat."""
        return next(e for e in reversed(self.all) if e.rank == rank)

    def engines(self, ranks: Iterable[int]) -> list[EngineProcess]:
        """The latest engines of these seats."""
        return [self.engine(rank) for rank in ranks]

    # ---- waiting

    def wait(self, condition: Callable[[], bool], what: str, timeout: float = WAIT_S) -> None:
        """Wait until `condition()` holds; the error says what was waited for and where all stand.

        Raises:
            AssertionError: it does not, within `timeout` seconds.
        """
        end = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"not within {timeout:g} s: {what}\n{self.story()}")
            self.cluster.events(_LOOK_S)

    def progress(self, ranks: Iterable[int], steps: int = 5, timeout: float = WAIT_S) -> None:
        """Wait until each of these ranks has completed `steps` more steps."""
        goal = [(e, len(e.complete()) + steps) for e in self.engines(ranks)]
        self.wait(
            lambda: all(len(e.complete()) >= least for e, least in goal),
            f"{steps} more steps on ranks {[e.rank for e, _ in goal]}",
            timeout,
        )

    def members(self, ranks: Iterable[int], timeout: float = WAIT_S) -> None:
        """Wait until exactly these ranks complete steps together, each with its latest engine."""
        wanted = set(ranks)

        def there() -> bool:
            engines = self.engines(wanted)
            if any(e.attached is None for e in engines):
                return False
            view = {e.rank: e.incarnation for e in engines}
            if any(e.view != view for e in engines):
                return False
            # A view is recorded before its first complete step.
            epochs = {e.epoch for e in engines} | {e.records("view")[-1]["epoch"] for e in engines}
            return len(epochs) == 1

        self.wait(there, f"ranks {sorted(wanted)} serve in one view", timeout)

    def ended(self, rank: int, kind: str, timeout: float = WAIT_S) -> Record:
        """Wait for the latest engine of a seat to end in this way; returns its last record."""
        engine = self.engine(rank)
        self.wait(lambda: engine.end is not None, f"the engine of rank {rank} is {kind}", timeout)
        assert engine.end is not None
        assert engine.end["kind"] == kind, engine.end
        return engine.end

    def story(self) -> str:
        """Where everybody stands."""
        lines = []
        for e in self.all:
            last = e.records()[-3:]
            lines.append(f"rank {e.rank} pid {e.pid} epoch {e.epoch} view {e.view}: {last}")
        units = [p.stem for p in sorted(self.cluster.folder.glob("*.log"))]
        lines += [f"---- {unit}\n{self.cluster.log(unit)[-1500:]}" for unit in units]
        return "\n".join(lines)

    # ---- judging

    def check(self) -> None:
        """Judge all that was recorded; see above."""
        step_epoch: dict[int, tuple[int, int]] = {}
        views: dict[int, tuple[int, Record]] = {}
        for engine in self.all:
            last = 0
            for record in engine.records("view"):
                seen = (record["digest"], record["members"])
                assert views.setdefault(record["epoch"], seen) == seen, f"two views: {record}"
                assert record["epoch"] > last, f"rank {engine.rank} went back: {record}"
                last = record["epoch"]
                assert record["members"].get(str(engine.rank)) == engine.incarnation, record
            for record in engine.complete():
                assert record["right"], f"rank {engine.rank}: a wrong result: {record}"
                ran = step_epoch.setdefault(record["step"], (record["epoch"], engine.rank))
                assert ran[0] == record["epoch"], (
                    f"step {record['step']} was complete in epoch {ran[0]} on rank {ran[1]} and in "
                    f"{record['epoch']} on rank {engine.rank}"
                )
            assert engine.end is None or engine.end["kind"] != "failed", engine.end

    def completed_alone(self, rank: int, since_ns: int, others: Iterable[int]) -> list[Record]:
        """Complete steps that a rank told of since `since_ns` and that one of `others` did not
        complete in the same view. Whoever is stopped between the end of a step and telling of it
        tells of it late; but then all have completed it.
        """
        told = [r for r in self.engine(rank).complete() if r["at_ns"] >= since_ns]
        peers = [{(r["step"], r["epoch"]) for r in e.complete()} for e in self.engines(others)]
        return [r for r in told if not all((r["step"], r["epoch"]) in done for done in peers)]

    # ---- asking

    def status(self) -> controller_pb2.GroupStatus | None:
        """What the leader says of the group; None: nobody leads at the moment."""
        return group_status(self.cluster.controller_addresses(), self.config.name)[1]

    def leader(self) -> str:
        """Unit name of the controller that leads; waits for one, for a slow store deposes it."""
        names: list[str] = []

        def leads() -> bool:
            names.append(group_status(self.cluster.controller_addresses(), self.config.name)[0])
            return names[-1] != ""

        self.wait(leads, "a controller leads")
        return names[-1]

    def seat(self, rank: int) -> node_pb2.SeatStatus:
        """What the daemon says of a seat."""
        import grpc

        from elasticep.proto import node_pb2_grpc

        with grpc.insecure_channel(f"unix:{self.cluster.socket_of(rank)}") as channel:
            answer = node_pb2_grpc.NodeServiceStub(channel).GetStatus(
                node_pb2.GetStatusRequest(), timeout=WAIT_S
            )
        return next(s for s in answer.seats if s.seat.rank == rank)

    def drain(self, ranks: Iterable[int]) -> int:
        """Drain ranks, as an operator would; the epoch that leaves them out."""
        request = controller_pb2.DrainRequest(
            group=self.config.name, ranks=list(ranks), reason="a test"
        )
        answer = self._order(lambda stub: stub.Drain(request, timeout=_DRAIN_S), f"{ranks} drained")
        assert isinstance(answer, controller_pb2.DrainResponse)
        return answer.epoch

    def undrain(self, ranks: Iterable[int]) -> None:
        """Let drained ranks in again."""
        request = controller_pb2.UndrainRequest(group=self.config.name, ranks=list(ranks))
        self._order(lambda stub: stub.Undrain(request, timeout=_CALL_S), f"{ranks} let in")

    def set_policies(self, **settings: str) -> None:
        """Change policies, as `elasticep policy --set` does."""
        from elasticep.policies import change_from_text

        request = controller_pb2.SetPolicyRequest(
            group=self.config.name, policies=change_from_text(settings)
        )
        self._order(lambda stub: stub.SetPolicy(request, timeout=_CALL_S), f"{settings} taken")

    def _order(self, call: Callable[[Any], Any], what: str) -> Any:
        """What a leader answers to a call that may be made again; waits for one that takes it."""
        answers: list[Any] = []

        def taken() -> bool:
            answers.append(ask_leader(self.cluster.controller_addresses(), call))
            return answers[-1] is not None

        self.wait(taken, what)
        return answers[-1]

    def close(self) -> None:
        """End all engines."""
        for engine in self.all:
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def ask_leader(addresses: Iterable[str], call: Callable[[Any], Any]) -> Any:
    """What the first controller that takes the call answers; None: none did."""
    import grpc

    from elasticep.proto import controller_pb2_grpc

    for address in addresses:
        with grpc.insecure_channel(address) as channel, suppress(grpc.RpcError):
            return call(controller_pb2_grpc.ControllerServiceStub(channel))
    return None


def group_status(
    addresses: Iterable[str], group: str
) -> tuple[str, controller_pb2.GroupStatus | None]:
    """The leader's name and what it says of a group; ("", None) when none leads or knows it."""
    request = controller_pb2.GetClusterRequest(group=group)
    answer = ask_leader(addresses, lambda stub: stub.GetCluster(request, timeout=_CALL_S))
    return ("", None) if answer is None else (answer.leader, next(iter(answer.groups), None))
