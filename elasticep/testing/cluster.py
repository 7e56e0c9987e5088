"""A whole cluster on this machine: etcd, controller and node daemons, started and ended together.

    with Cluster(group="test", ranks=4, nodes=2) as cluster:
        session = elasticep.attach(rank=0, socket=cluster.socket_of(0), config=config)

Everything lies in one folder below the temporary directory and is held by a supervisor process of
its own, so nothing is left behind however the owner ends; see `elasticep.testing.supervisor`.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

from elasticep.errors import ConfigError, Unavailable
from elasticep.testing import supervisor
from elasticep.testing.folders import make_folder, remove_folder
from elasticep.testing.supervisor import CONTROLLER, controller_name, daemon_name, ranks_of
from elasticep.testing.units import descendants

START_TIMEOUT_S: Final = 120.0
_STOP_TIMEOUT_S: Final = 60.0


class Cluster:
    """One local cluster. `start` begins it and returns at once, `wait_up` waits.

    Args:
        group: name of the group whose seats the daemons offer. The group itself is created by the
            first engine's config.
        ranks: seats.
        nodes: daemons; the seats are split evenly among them.
        fault_injection: whether the daemons serve `InjectFault`.
        controllers: replicas; one of them leads.
        etcd_members: 1, 3 or 5, started with the rest.
        etcd: endpoints of one that runs already, instead; it is left alone.
        environment: unit -> variables that differ from what it would get.
        wrap: unit -> a command that runs the unit's own, its first word an absolute path.
        checkpoint: where the daemons load expert weights from; a relative path lies below `folder`.
    """

    def __init__(
        self,
        *,
        group: str,
        ranks: int,
        nodes: int = 1,
        fault_injection: bool = False,
        controllers: int = 1,
        etcd_members: int = 1,
        etcd: Sequence[str] = (),
        environment: Mapping[str, Mapping[str, str]] | None = None,
        wrap: Mapping[str, Sequence[str]] | None = None,
        checkpoint: str | Path | None = None,
    ) -> None:
        if not 1 <= nodes <= ranks:
            raise ConfigError(
                f"{nodes} nodes for {ranks} ranks; every node needs at least one rank"
            )
        self.group = group
        self.ranks = ranks
        self.nodes = nodes
        self.controllers = controllers
        self._etcd_members = etcd_members
        self._etcd = tuple(etcd)
        self._environment = {name: dict(more) for name, more in (environment or {}).items()}
        self._wrap = {name: list(words) for name, words in (wrap or {}).items()}
        self._fault_injection = fault_injection
        self._checkpoint = checkpoint
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self.folder = Path()
        self.up = False
        self._etcd_said = 0
        self.etcd_endpoints: tuple[str, ...] = ()
        self.pids: dict[str, int] = {}
        """Process id of each unit that is ready, by name."""

    def start(self) -> None:
        """Start everything, without waiting for it."""
        self.folder = make_folder("eep-")
        if self._checkpoint is not None:
            for node in range(self.nodes):
                more = self._environment.setdefault(daemon_name(node), {})
                more.setdefault("ELASTICEP_DAEMON_CHECKPOINT", str(self.checkpoint))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", supervisor.__name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C on a terminal is not for the cluster
            )
        self._control = ours
        settings = {
            "folder": str(self.folder),
            "group": self.group,
            "ranks": self.ranks,
            "nodes": self.nodes,
            "fault_injection": self._fault_injection,
            "controllers": self.controllers,
            "etcd_members": self._etcd_members,
            "etcd": self._etcd,
            "environment": self._environment,
            "wrap": self._wrap,
        }
        ours.send(json.dumps(settings).encode())

    @property
    def checkpoint(self) -> Path:
        """Where the daemons look for the checkpoint, once `start` has made the folder."""
        return self.folder / (self._checkpoint or "")

    def fileno(self) -> int:
        """Readable when there are events, for a selector."""
        assert self._control is not None, "start() comes first"
        return self._control.fileno()

    def events(self, timeout: float = 0.0) -> list[dict[str, Any]]:
        """Events that came, waiting up to `timeout` seconds for a first one.

        Raises:
            Unavailable: a part of the cluster ended for good; the message has the end of its log.
        """
        assert self._control is not None, "start() comes first"
        events: list[dict[str, Any]] = []
        while select.select([self._control], [], [], 0.0 if events else timeout)[0]:
            message = self._control.recv(supervisor.MAX_MESSAGE_BYTES)
            if not message:
                raise Unavailable("the supervisor of the local cluster ended unexpectedly")
            event = json.loads(message)
            self._note(event)
            events.append(event)
        return events

    def _note(self, event: dict[str, Any]) -> None:
        name = event.get("name", "")
        match event["event"]:
            case "failed":
                raise Unavailable(f"{name} of the local cluster ended: {event['error']}")
            case "ready":
                self.pids[name] = event["pid"]
            case "exited":
                self.pids.pop(name, None)
            case "up":
                self.up = True
                self.etcd_endpoints = tuple(event["etcd"])
            case "etcd":
                self._etcd_said += 1

    def wait_up(self, timeout: float = START_TIMEOUT_S) -> None:
        """Wait until controller and daemons are ready.

        Raises:
            Unavailable: they are not, within `timeout` seconds.
        """
        self.wait_for(lambda: self.up, timeout, "controller and daemons are ready")

    def wait_for(self, condition: Callable[[], bool], timeout: float, what: str) -> None:
        """Take in events until `condition()` holds; `Unavailable` names `what` after `timeout`."""
        end = time.monotonic() + timeout
        while not condition():
            left = end - time.monotonic()
            if left <= 0:
                raise Unavailable(f"local cluster: not within {timeout:g} s: {what}")
            self.events(left)

    def processes(self) -> list[int]:
        """Process ids of all that runs below the supervisor: units, etcd, workers."""
        return descendants(self._process.pid) if self._process is not None else []

    def node_of(self, rank: int) -> int:
        """The node that offers a rank."""
        return next(
            node for node in range(self.nodes) if rank in ranks_of(node, self.nodes, self.ranks)
        )

    def socket_of(self, rank: int) -> str:
        """Path of the daemon's socket that an engine of this rank attaches to."""
        return str(supervisor.socket_dir(self.folder, self.node_of(rank)) / "daemon.sock")

    def controller_address(self, number: int = 0) -> str:
        """What a controller listens on."""
        return supervisor.controller_address(self.folder, number)

    def controller_addresses(self) -> tuple[str, ...]:
        """What the controllers listen on, in order; the one named `controller` is the first."""
        return tuple(self.controller_address(number) for number in range(self.controllers))

    def log(self, name: str) -> str:
        """What a unit (`controller`, `daemon-0`, ...) printed so far."""
        with suppress(FileNotFoundError):
            return (self.folder / f"{name}.log").read_text(errors="replace")
        return ""

    def _order(self, **order: Any) -> None:
        assert self._control is not None, "start() comes first"
        self._control.send(json.dumps(order).encode())

    def kill(self, name: str, number: int = signal.SIGKILL, *, hold: bool = False) -> None:
        """Send a signal to a unit; one that ends is started again, with its stored descriptors.

        Args:
            name: of the unit.
            number: the signal; 0 sends none.
            hold: when it ends, leave it down until `start_again`.
        """
        self._order(op="kill", name=name, signal=number, hold=hold)

    def start_again(self, name: str) -> None:
        """Start a unit that was killed with `hold`."""
        self._order(op="start", name=name)

    def etcd(self, what: Literal["kill-leader", "kill-all", "start"]) -> None:
        """SIGKILL the etcd member that leads, or all; or start those that are down. Waits for it.

        Raises:
            Unavailable: it did not come about in time.
        """
        before = self._etcd_said
        self._order(op="etcd", what=what)
        self.wait_for(lambda: self._etcd_said > before, START_TIMEOUT_S, f"etcd: {what}")

    def stop(self) -> None:
        """End everything and delete the folder. May be called twice."""
        process, self._process = self._process, None
        if process is None:
            return
        assert self._control is not None
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._control.close()
        if self.folder.exists():  # the supervisor was killed: do its work
            end_users_of(self.folder)
        remove_folder(self.folder)  # what keeps it from being swept stays when a supervisor does it

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_up()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def end_users_of(folder: Path) -> None:
    """SIGKILL processes of this user whose environment or command line names the folder."""
    marker = os.fsencode(str(folder))
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            pid = int(process.name)
            told = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
            if pid != os.getpid() and marker in told:
                os.kill(pid, signal.SIGKILL)


__all__ = ["CONTROLLER", "Cluster", "controller_name", "daemon_name", "end_users_of"]
