"""Forks an engine off the loaded parent."""

import gc
import importlib
import os
import signal
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticep.demo.settings import DemoSettings
from elasticep.demo.wire import Pipe, pipe
from elasticep.testing.units import die_with_parent


@dataclass(slots=True)
class EngineProcess:
    """An engine, as its parent knows it.

    Attributes:
        pid: of the engine; 0 once it is reaped.
        pipe: the parent's end.
        worker_pid: of the worker that serves its rank, once it said so.
    """

    pid: int
    pipe: Pipe
    worker_pid: int = 0

    def end(self) -> None:
        """SIGKILL it if it still runs, and reap it."""
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
        self.pipe.close()


def preload() -> None:
    """Import what engines need, once for all of them, and keep this process fit to be forked.

    gRPC is only imported: a channel would start threads, which a fork does not copy.
    """
    importlib.import_module("elasticep.client.rpc")
    importlib.import_module("elasticep.proto.node_pb2_grpc")
    importlib.import_module("elasticep.demo.engine")
    importlib.import_module("elasticep.demo.model").prepare()


def fork_engine(
    rank: int,
    socket: str,
    settings: DemoSettings,
    model: Any,
    *,
    first: bool,
    log: Path,
    inherited: list[int],
) -> EngineProcess:
    """Fork an engine for `rank`. It dies with this process.

    Args:
        rank: its seat.
        socket: of its daemon.
        settings: of the run.
        model: shared with this process, copied on write.
        first: whether the rank's first engine, which tells when the scenario begins.
        log: gets what it prints.
        inherited: this process's descriptors that are none of the engine's business.
    """
    ours, theirs = pipe()
    gc.freeze()  # a collection in the child would touch, and so copy, the parent's pages
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for fd in (*inherited, ours.fileno()):
                os.close(fd)
            status = _become(parent, rank, socket, settings, model, theirs, first, log)
        except BaseException:  # nothing of the parent's may run on in the child
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(status)
    theirs.close()
    return EngineProcess(pid, ours)


def _become(
    parent: int,
    rank: int,
    socket: str,
    settings: DemoSettings,
    model: Any,
    theirs: Pipe,
    first: bool,
    log: Path,
) -> int:
    from elasticep.demo.engine import EngineSettings, run_engine
    from elasticep.demo.settings import ROWS

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, who ends this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(parent)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    engine = EngineSettings(
        rank=rank,
        socket=socket,
        config=settings.group_config(),
        sizes=settings.sizes,
        rows=ROWS,
        length=settings.length,
        attach_timeout_s=settings.timeout_s / 2,
        tell_at=settings.kill_at if first and settings.starts_scenario(rank) else None,
        wait_for_kill=settings.loses_a_rank and rank == settings.victim,
    )
    return run_engine(engine, model, theirs)
