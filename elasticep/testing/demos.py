"""Runs of `elasticep demo` that share what they import: forked from one process that has it loaded.

    done = run_demo(["--ranks", "4", "--output", "json"], folder, os.environ, timeout_s=380.0)

Importing torch and transformers is most of what a short run costs. A run is the command itself in a
process of its own, which begins where the imports of `python -m elasticep.cli.main demo` end.
"""

import atexit
import functools
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import IO, Any, Final

from elasticep.testing.folders import make_folder, remove_folder

_MESSAGE_BYTES: Final = 1 << 18
_LOADING_S: Final = 120.0


class DemoRun:
    """A run of the demo, as `subprocess.Popen` would show it.

    Attributes:
        pid: its process.
        returncode: how it ended, as of a `Popen`; None as far as is known it runs.
    """

    def __init__(self, pid: int, life: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._life = life
        self._pidfd = os.pidfd_open(pid)

    def send_signal(self, number: int) -> None:
        """Nothing if it has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def wait(self, timeout: float) -> int:
        """How it ended.

        Raises:
            subprocess.TimeoutExpired: it runs after so many seconds.
        """
        if self.returncode is None:
            if not select.select([self._life], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("elasticep demo", timeout)
            self.returncode = int(self._life.recv(100))
        return self.returncode

    def close(self) -> None:
        """SIGKILL it if it still runs."""
        if self.returncode is None:
            self.send_signal(signal.SIGKILL)
            self.wait(60.0)
        self._life.close()
        os.close(self._pidfd)


def run_demo(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], *, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run `elasticep demo` to its end; arguments as of `start_demo`.

    Raises:
        subprocess.TimeoutExpired: it ran for longer than `timeout_s`, and was killed.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        with closing(start_demo(arguments, folder, environment, stdout=out, stderr=errors)) as run:
            status = run.wait(timeout_s)
        for file in (out, errors):
            file.seek(0)
        return subprocess.CompletedProcess(arguments, status, out.read(), errors.read())


def start_demo(
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    *,
    stdout: IO[Any],
    stderr: IO[Any],
) -> DemoRun:
    """Start `elasticep demo`.

    Args:
        arguments: after `elasticep demo`.
        folder: where it runs: the working directory of all its processes.
        environment: its variables.
        stdout: a file that stays the caller's.
        stderr: another.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    order = {
        "arguments": [*arguments],
        "folder": str(folder),
        "environment": dict(environment),
    }
    with theirs:
        control = _loaded()
        fds = [stdout.fileno(), stderr.fileno(), theirs.fileno()]
        socket.send_fds(control, [json.dumps(order).encode()], fds)
        return DemoRun(int(control.recv(100)), ours)


@functools.cache
def _loaded() -> socket.socket:
    """The process that has everything imported, by its socket; it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    folder = make_folder("eep-demos-")
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "elasticep.testing.demos", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # torch makes it when it is imported.
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)},
            start_new_session=True,  # Ctrl-C is for whoever started it
        )
    ours.settimeout(_LOADING_S)

    def end() -> None:
        ours.close()
        process.wait(60.0)
        remove_folder(folder)

    atexit.register(end)
    return ours


# ---- that process


def _become(parent: int, order: dict[str, Any], fds: list[int]) -> int:
    """The demo; its exit status."""
    from elasticep.cli.main import main
    from elasticep.testing.units import die_with_parent

    die_with_parent(parent)
    for number, fd in enumerate(fds, 1):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(order["environment"])
    tempfile.tempdir = None  # which remembers another TMPDIR
    os.chdir(order["folder"])
    sys.argv = ["elasticep", "demo", *order["arguments"]]
    status = 0
    try:
        main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0
    sys.stdout.flush()
    sys.stderr.flush()
    return status


class _Loaded:
    """Forks a demo for each message, and says how it ended."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._runs: dict[int, tuple[int, int]] = {}  # pidfd -> process, where its end is told

    def serve(self) -> None:
        """Until whoever started this process is gone."""
        while True:
            for key, _ in self._selector.select():
                if key.fd in self._runs:
                    self._ended(key.fd)
                    continue
                data, fds, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES, 3)
                if not data:
                    return
                self._start(json.loads(data), fds)

    def _start(self, order: dict[str, Any], fds: list[int]) -> None:
        *outputs, life = fds
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                self._selector.close()
                self._control.close()
                for fd in (
                    life,
                    *(fd for run, (_, told) in self._runs.items() for fd in (run, told)),
                ):
                    os.close(fd)
                status = _become(parent, order, outputs)
            except BaseException:  # nothing of this process may run on in the child
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(status)
        for fd in outputs:
            os.close(fd)
        run = os.pidfd_open(pid)
        self._runs[run] = (pid, life)
        self._selector.register(run, selectors.EVENT_READ)
        self._control.send(str(pid).encode())

    def _ended(self, run: int) -> None:
        pid, life = self._runs.pop(run)
        self._selector.unregister(run)
        os.close(run)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with socket.socket(fileno=life) as told, suppress(BrokenPipeError, ConnectionResetError):
            told.send(str(status).encode())


def main() -> None:
    """Entry point."""
    import elasticep.demo.parent  # noqa: F401
    from elasticep.demo.spawn import preload

    preload()
    with socket.socket(fileno=int(sys.argv[1])) as control:
        _Loaded(control).serve()


if __name__ == "__main__":
    main()
