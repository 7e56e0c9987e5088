"""The process that holds a local cluster: `python -m elasticep.testing.supervisor FD`.

It runs etcd, controller and daemons, restarts what ends, and obeys a SEQPACKET socket (descriptor
number FD). When that socket closes, however its owner ended, everything is stopped and the
cluster's folder deleted; so a crash of the demo or of a test leaves nothing behind. Workers whose
daemon died become this process's children and are ended, too.

First message in: `{"folder", "group", "ranks", "nodes", "fault_injection"}`, and if there are
several `"controllers"` and `"etcd_members"`; `"etcd"`, endpoints of one that runs already;
`"environment"` and `"wrap"` (a command before the unit's own) by unit name. Then
`{"op": "kill" | "start" | "etcd" | "stop", ...}`.
Out: `{"event": "ready" | "exited" | "failed" | "up" | "etcd", ...}`.
"""

import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from elasticep.errors import ElasticEPError
from elasticep.testing.etcd import LocalEtcd
from elasticep.testing.folders import remove_folder
from elasticep.testing.units import Unit, UnitSpec, adopt_orphans, descendants

CONTROLLER: Final = "controller"
MAX_MESSAGE_BYTES: Final = 65_536
_STOP_TIMEOUT_S: Final = 5.0
_RESTART_PAUSE_S: Final = 0.05
_ETCD_PAUSE_S: Final = 1.0


def controller_name(number: int) -> str:
    """Name of the unit of a controller; the first one is plain `controller`."""
    return f"{CONTROLLER}-{number}" if number else CONTROLLER


def controller_address(folder: Path, number: int = 0) -> str:
    """What a controller listens on."""
    return f"unix://{folder}/{controller_name(number)}.sock"


def daemon_name(node: int) -> str:
    """Name of the unit of a node's daemon."""
    return f"daemon-{node}"


def socket_dir(folder: Path, node: int) -> Path:
    """Where the daemon of a node has its sockets."""
    return folder / f"n{node}"


def ranks_of(node: int, nodes: int, ranks: int) -> range:
    """The ranks that a node offers: consecutive, as even as can be."""
    return range(node * ranks // nodes, (node + 1) * ranks // nodes)


def plan(settings: dict[str, Any], etcd_endpoints: tuple[str, ...]) -> list[UnitSpec]:
    """Controller and daemons, in the order in which they are started."""
    folder = Path(settings["folder"])
    command = (sys.executable, "-m", "elasticep.cli.main")
    controllers = [controller_address(folder, n) for n in range(settings.get("controllers", 1))]
    units = [
        UnitSpec(
            name=controller_name(number),
            argv=(*command, "controller"),
            env={
                "ELASTICEP_CONTROLLER_LISTEN": address,
                "ELASTICEP_CONTROLLER_NAME": controller_name(number),
                "ELASTICEP_CONTROLLER_ETCD_ENDPOINTS": ",".join(etcd_endpoints),
            },
            log=folder / f"{controller_name(number)}.log",
        )
        for number, address in enumerate(controllers)
    ]
    for node in range(settings["nodes"]):
        ranks = ranks_of(node, settings["nodes"], settings["ranks"])
        where = socket_dir(folder, node)
        where.mkdir(mode=0o700)
        units.append(
            UnitSpec(
                name=daemon_name(node),
                argv=(*command, "daemon"),
                env={
                    "ELASTICEP_DAEMON_NODE": f"node-{node}",
                    "ELASTICEP_DAEMON_SOCKET_DIR": str(where),
                    "ELASTICEP_DAEMON_CONTROLLERS": ",".join(controllers),
                    "ELASTICEP_DAEMON_SEATS": f"{settings['group']}:{ranks[0]}-{ranks[-1]}",
                    "ELASTICEP_DAEMON_FAULT_INJECTION": str(settings["fault_injection"]).lower(),
                },
                log=folder / f"{daemon_name(node)}.log",
            )
        )
    return [_adjusted(unit, settings) for unit in units]


def _adjusted(unit: UnitSpec, settings: dict[str, Any]) -> UnitSpec:
    more = settings.get("environment", {}).get(unit.name, {})
    before = tuple(settings.get("wrap", {}).get(unit.name, ()))
    return replace(unit, argv=(*before, *unit.argv), env={**unit.env, **more})


class Supervisor:
    """Runs the units of one cluster until it is told to stop or its owner is gone."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._units: dict[str, Unit] = {}
        self._restart_at: dict[str, float] = {}
        self._held: set[str] = set()  # units and members of etcd that are to stay down
        self._etcd: LocalEtcd | None = None
        self._etcd_again_at = 0.0
        self._endpoints: tuple[str, ...] = ()
        self._folder: Path | None = None
        self._up = False

    def run(self) -> None:
        """Serve until stop or end of file; then leave nothing behind."""
        try:
            first = self._control.recv(MAX_MESSAGE_BYTES)
            if not first:
                return
            settings = json.loads(first)
            self._folder = Path(settings["folder"])
            tempfile.tempdir = str(self._folder)  # what etcd leaves goes with the folder
            self._selector.register(self._control, selectors.EVENT_READ, self._on_control)
            self._endpoints = tuple(settings.get("etcd", ()))
            if not self._endpoints:
                self._etcd = LocalEtcd(settings.get("etcd_members", 1))
                self._endpoints = self._etcd.endpoints
            for spec in plan(settings, self._endpoints):
                self._add(spec)
            while self._serve():
                pass
        except ElasticEPError as error:
            self._tell(event="failed", name="etcd", error=str(error))
        finally:
            self._end()

    def _add(self, spec: UnitSpec) -> None:
        assert self._folder is not None
        unit = Unit(spec, self._folder / f"{spec.name}.notify")
        self._units[spec.name] = unit
        self._selector.register(
            unit.notify, selectors.EVENT_READ, lambda: self._on_notify(spec.name)
        )
        self._start(unit)

    def _start(self, unit: Unit) -> None:
        unit.start()
        self._selector.register(
            unit.pidfd, selectors.EVENT_READ, lambda: self._on_exit(unit.spec.name)
        )

    def _serve(self) -> bool:
        """One turn of the loop; False when it is over."""
        now = time.monotonic()
        for name in [name for name, at in self._restart_at.items() if at <= now]:
            del self._restart_at[name]
            self._start(self._units[name])
        timeout = min(self._restart_at.values(), default=now + 1.0) - now
        for key, _ in self._selector.select(max(0.0, timeout)):
            if key.data() is False:
                return False
        self._reap_orphans()
        if time.monotonic() >= self._etcd_again_at:
            self._restart_etcd()
        return True

    def _on_control(self) -> bool:
        message = self._control.recv(MAX_MESSAGE_BYTES)
        if not message:
            return False
        order = json.loads(message)
        if order["op"] == "stop":
            return False
        if order["op"] == "etcd":
            self._on_etcd(order)
            return True
        unit = self._units[order["name"]]
        if order["op"] == "start":
            self._held.discard(unit.spec.name)
            if unit.pidfd < 0:
                self._start(unit)
            return True
        if order.get("hold"):
            self._held.add(unit.spec.name)
            self._restart_at.pop(unit.spec.name, None)
        # The clock is read before the signal: what follows from the kill is never earlier.
        at_ns = time.monotonic_ns()
        unit.signal(order["signal"])
        self._tell(event="signalled", name=unit.spec.name, at_ns=at_ns)
        return True

    def _on_etcd(self, order: dict[str, Any]) -> None:
        """Kill the member that leads or all of them, or start those that were killed."""
        assert self._etcd is not None
        match order["what"]:
            case "kill-leader":
                hit = [self._etcd.leader()]
            case "kill-all":
                hit = [member for member in self._etcd.members if member.pid]
            case _:
                hit = [member for member in self._etcd.members if not member.pid]
        for member in hit:
            if order["what"] == "start":
                self._held.discard(member.name)
                self._etcd.restart(member)
            else:
                self._held.add(member.name)
                member.kill()
        self._tell(event="etcd", what=order["what"], members=[member.name for member in hit])

    def _restart_etcd(self) -> None:
        """Start members again that ended without an order, each once a second at most."""
        for member in self._etcd.members if self._etcd is not None else ():
            if member.pid or member.name in self._held:
                continue
            name, status = f"etcd {member.name}", member.status_of_exit
            self._tell(event="exited", name=name, status=status, at_ns=time.monotonic_ns())
            self._etcd_again_at = time.monotonic() + _ETCD_PAUSE_S
            assert self._etcd is not None
            self._etcd.restart(member)

    def _on_notify(self, name: str) -> bool:
        unit = self._units[name]
        if unit.read_notify():
            self._tell(event="ready", name=name, pid=unit.pid, at_ns=time.monotonic_ns())
            if not self._up and all(unit.ready for unit in self._units.values()):
                self._up = True
                self._tell(event="up", etcd=self._endpoints)
        return True

    def _on_exit(self, name: str) -> bool:
        unit = self._units[name]
        self._selector.unregister(unit.pidfd)
        unit.read_notify()  # descriptors that it stored as its last act
        status = unit.reap()
        now = time.monotonic()
        self._tell(event="exited", name=name, status=status, at_ns=time.monotonic_ns())
        # A first start that fails will fail again; only what once worked is started again.
        if name in self._held:
            return True
        if self._up and unit.spec.restart and unit.may_start(now):
            self._restart_at[name] = now + _RESTART_PAUSE_S
        else:
            self._tell(event="failed", name=name, error=unit.log_tail())
        return True

    def _reap_orphans(self) -> None:
        known = {unit.pid for unit in self._units.values()}
        known |= {member.pid for member in self._etcd.members} if self._etcd else set()
        for pid in descendants(os.getpid()):
            if pid not in known:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def _tell(self, **event: Any) -> None:
        with suppress(OSError):  # the owner may be gone; the loop will see it
            self._control.send(json.dumps(event).encode())

    def _end(self) -> None:
        for unit in reversed(self._units.values()):
            unit.signal(signal.SIGTERM)
        end = time.monotonic() + _STOP_TIMEOUT_S
        for unit in reversed(self._units.values()):
            if unit.pidfd >= 0:
                self._await_exit(unit, end)
            unit.close()
        if self._etcd is not None:
            self._etcd.close()
        self._end_rest()
        if self._folder is not None:
            remove_folder(self._folder)  # with its mark: who made it may be dead
        self._tell(event="stopped")

    @staticmethod
    def _await_exit(unit: Unit, end: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(unit.pidfd, selectors.EVENT_READ)
            if not selector.select(max(0.0, end - time.monotonic())):
                unit.signal(signal.SIGKILL)
        unit.reap()

    @staticmethod
    def _end_rest() -> None:
        """SIGKILL whatever is left below this process, workers of dead daemons above all."""
        while rest := descendants(os.getpid()):
            for pid in rest:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(-1, 0)


def main() -> None:
    """Entry point."""
    control = socket.socket(fileno=int(sys.argv[1]))
    # Ctrl-C is for the owner of the cluster, who says when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: control.shutdown(socket.SHUT_RD))
    adopt_orphans()
    Supervisor(control).run()


if __name__ == "__main__":
    main()
