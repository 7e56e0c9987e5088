"""A controller, daemons and engine processes on the GPUs of this machine, for the client tests."""

import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final, Self

from elasticep.native.cuda_library import device_count
from elasticep.testing.node import DaemonProcess, wait_for

DEADLINE_S: Final = 90.0
_SHOWN: Final = 2000  # characters of a log


def note(file: str, name: str, value: Any) -> None:
    """Print a measurement, and keep it in FILE.jsonl where the caller wants that."""
    sys.stdout.write(f"{name}: {value}\n")
    where = os.environ.get("ELASTICEP_GPU_OUT")
    if where:
        with (Path(where) / f"{file}.jsonl").open("a") as out:
            out.write(json.dumps({name: value}) + "\n")


class Failed(AssertionError):
    """An engine's order failed; carries its traceback."""


class Engine:
    """One engine process; orders go in, events and results come out."""

    def __init__(
        self, rank: int, socket: str, log: Path, module: str, environment: dict[str, str]
    ) -> None:
        self.rank, self.socket = rank, socket
        self.events: list[dict[str, Any]] = []
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **environment},
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self._lines.put(json.loads(line))
        self._lines.put(None)

    def say(self, line: str) -> None:
        """A line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def order(self, do: str, **arguments: Any) -> None:
        """Let it begin something."""
        self.say(json.dumps({"do": do, **arguments}))

    def take(self, deadline: float) -> dict[str, Any]:
        """Its next line."""
        try:
            line = self._lines.get(timeout=max(0.01, deadline - time.monotonic()))
        except queue.Empty:
            raise Failed(f"engine {self.rank} said nothing in time; {self.events[-5:]}") from None
        if line is None:
            raise Failed(f"engine {self.rank} is gone; {self.events[-5:]}")
        if "failed" in line:
            raise Failed(f"engine {self.rank}: {line['failed']}")
        self.events.append(line)
        return line

    def result(self, timeout_s: float = DEADLINE_S) -> Any:
        """What the running order gives."""
        deadline = time.monotonic() + timeout_s
        while True:
            line = self.take(deadline)
            if "done" in line:
                return line["done"]

    def until(self, timeout_s: float = DEADLINE_S, **wanted: Any) -> dict[str, Any]:
        """Its next event with these values."""
        deadline = time.monotonic() + timeout_s
        while True:
            line = self.take(deadline)
            if all(line.get(name) == value for name, value in wanted.items()):
                return line

    def kill(self) -> int:
        """SIGKILL it; CLOCK_MONOTONIC ns of that moment."""
        at = time.monotonic_ns()
        self.process.kill()
        return at

    def close(self) -> None:
        """End and reap it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


class Cluster:
    """Use it with `with`.

    Args:
        config: the group's file as a dictionary.
        nodes: daemons; ranks are split evenly among them, and take the GPUs in turn.
        gpus: how many; None: what there is, at most two.
        engine: the module that engines run.
        flags: further flags of every daemon.
        environment: further variables of daemons and engines.
        attaching: further arguments of the order "attach".
    """

    def __init__(
        self,
        config: dict[str, Any],
        nodes: int = 1,
        *,
        gpus: int | None = None,
        engine: str = "tests.gpu.client_engine",
        flags: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        attaching: dict[str, Any] | None = None,
    ) -> None:
        self.config = config
        self._engine, self._environment = engine, environment or {}
        self._attaching = attaching or {}
        self.ranks = config["geometry"]["max_ranks"]
        self.folder = Path(tempfile.mkdtemp(prefix="eep-"))
        self._log = Path(os.environ.get("ELASTICEP_GPU_LOGS") or self.folder)
        self._log.mkdir(exist_ok=True)
        self.engines: list[Engine] = []
        self._spares: list[Engine] = []
        self.controllers = address = f"unix://{self.folder}/c.sock"
        self._controller_log = self._log / f"{self.folder.name}-controller.log"
        with self._controller_log.open("ab") as log:
            self._controller = subprocess.Popen(
                [
                    *(sys.executable, "-m", "elasticep.cli.main", "controller"),
                    *("--store", "memory", "--listen", address, "--log-format", "json"),
                ],
                stdin=subprocess.DEVNULL,
                stderr=log,
            )
        if gpus is None:
            gpus = min(2, device_count(), int(os.environ.get("ELASTICEP_GPUS", "2")))
        per = -(-self.ranks // nodes)
        self.daemons = []
        for node in range(nodes):
            last = min(self.ranks, (node + 1) * per) - 1
            seats = f"{config['name']}:{node * per}-{last}"
            devices = ",".join(str(rank % gpus) for rank in range(node * per, last + 1))
            daemon = DaemonProcess(
                self.folder / f"n{node}", f"n{node}", [address], seats, "--devices", devices, *flags
            )
            daemon.environment.update(self._environment)
            daemon.log_path = self._log / f"{self.folder.name}-n{node}.log"
            self.daemons.append(daemon)
        self._per = per

    def __enter__(self) -> Self:
        try:
            wait_for(self._listens, "the controller")
            for daemon in self.daemons:
                daemon.start(wait=False)
            for daemon in self.daemons:
                daemon.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def _listens(self) -> bool:
        status = self._controller.poll()
        if status is not None:
            log = self._controller_log.read_text()[-_SHOWN:]
            raise Failed(f"the controller ended with {status}: {log}")
        return (self.folder / "c.sock").exists()

    def engine(self, rank: int) -> Engine:
        """A new process that has not attached yet."""
        daemon = self.daemons[rank // self._per]
        log = self._log / f"{self.folder.name}-engine{rank}.log"
        engine = Engine(rank, daemon.grpc_socket, log, self._engine, self._environment)
        self.engines.append(engine)
        return engine

    def spare(self, rank: int) -> None:
        """A process that has its imports behind it when it is to take this rank."""
        self._spares.append(self.engine(rank))

    def _take(self, rank: int) -> Engine:
        for engine in self._spares:
            if engine.rank == rank:
                self._spares.remove(engine)
                return engine
        return self.engine(rank)

    def attach(self, *ranks: int) -> list[Engine]:
        """Engines that hold these ranks."""
        engines = [self._take(rank) for rank in ranks]
        for engine in engines:
            where = {"rank": engine.rank, "socket": engine.socket, **self._attaching}
            engine.order("attach", config=self.config, **where)
        for engine in engines:
            engine.result()
        return engines

    def close(self) -> None:
        """End everything."""
        for engine in self.engines:
            engine.close()
        for daemon in self.daemons:
            if daemon.process is not None:
                daemon.stop()
        self._controller.terminate()
        self._controller.wait(DEADLINE_S)

    def __exit__(self, kind: object, *_: object) -> None:
        self.close()
        if kind is None:
            shutil.rmtree(self.folder)


def both(engines: list[Engine], do: str, **arguments: Any) -> list[Any]:
    """The same order to all; their results."""
    for engine in engines:
        engine.order(do, **arguments)
    return [engine.result() for engine in engines]
