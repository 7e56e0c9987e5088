"""Small decoding engines, forked from one process that has loaded torch and the client.

    python -m elasticep.testing.decoding_engine FD

FD is a SEQPACKET socket: each message `{"rank", "socket", "config", "record", ...}` comes with the
descriptor of another SEQPACKET socket, for orders, and is answered with the new engine's process
id. When FD closes, the process and all its engines end.

An engine decodes made-up batches, checks every result against what the experts must give, and
appends what happened to the file `record`, one JSON object per line: a file never blocks it, and
what it wrote outlives it. All numbers are small integers and powers of two, so a result is right to
the bit or wrong.
"""

import gc
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from elasticep.client import Session, Step, attach
from elasticep.errors import ElasticEPError, ExpertsLost, Fenced, StepTimeout
from elasticep.group import GroupConfig
from elasticep.testing.units import die_with_parent

EXCHANGE: Final = "decode"
MAX_MESSAGE_BYTES: Final = 65_536
_WEIGHTS: Final = np.array([0.25, 0.5, 1.0, 2.0], np.float32)


def factors(layers: int, experts: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """What expert e of layer l multiplies a row by, float32 [layers, experts], all different."""
    return np.arange(1, layers * experts + 1, dtype=np.float32).reshape(layers, experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an engine is told.

    Attributes:
        rank: its seat.
        socket: of its daemon.
        config: of the group.
        record: file for what happened.
        attach_s: how long its seat may take.
        barrier_s: how long one call waits at a barrier before it is recorded and made again.
        pace_s: pause between steps.
        slow_s: how long the first step takes, before its first exchange.
        warm: whether the first step runs in `session.warmup()`.
    """

    rank: int
    socket: str
    config: GroupConfig
    record: str
    attach_s: float = 60.0
    barrier_s: float = 1.0
    pace_s: float = 0.005
    slow_s: float = 0.0
    warm: bool = False


class Engine:
    """One engine, from attach to its end."""

    def __init__(self, settings: EngineSettings, orders: socket.socket) -> None:
        self._settings = settings
        self._orders = orders
        self._file = os.open(settings.record, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        geometry = settings.config.geometry
        self._factors = factors(geometry.layers, geometry.experts)
        self._cap = dict(settings.config.exchanges)[EXCHANGE].max_tokens
        self._epoch = 0
        self._leaving = False
        self._compiled = False
        self._good = True
        self._flagged = 0

    def _tell(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"kind": kind, "at_ns": time.monotonic_ns(), **fields})
        os.write(self._file, line.encode() + b"\n")

    def run(self) -> None:
        """Decode until told to leave, fenced, or stopped by an error; the last line says which."""
        s = self._settings
        try:
            with attach(
                rank=s.rank, socket=s.socket, config=s.config, timeout=s.attach_s
            ) as session:
                self._attached(session)
                number = 0
                while not self._leaving:
                    number += self._step(session, number)
                    self._wait(s.pace_s)
            self._tell("left")
        except Fenced as error:
            self._tell("fenced", epoch=error.epoch, why=error.why)
        except ElasticEPError as error:
            self._tell("failed", error=f"{type(error).__name__}: {error}")

    def _attached(self, session: Session) -> None:
        self._tell(
            "attached",
            pid=os.getpid(),
            worker=session.status().runner_pid,
            incarnation=session.incarnation,
        )

    def _wait(self, seconds: float) -> None:
        """Let time pass and take orders."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not select.select([self._orders], [], [], left)[0]:
                return
            match self._orders.recv(100).decode():
                case "pause":
                    self._tell("paused")
                    end = time.monotonic() + 3600.0
                case "resume":
                    return
                case _:  # "leave", or whoever gives orders is gone
                    self._leaving = True
                    return

    def _step(self, session: Session, number: int) -> bool:
        """One step; whether it was complete."""
        begun_ns = time.monotonic_ns()
        count = (number * 7 + self._settings.rank * 3) % (self._cap + 1)
        step = session.step(count, timeout=self._settings.barrier_s)
        self._good, self._flagged = True, 0
        try:
            with step:
                self._see(session, step)
                self._layers(session, count, number)
        except StepTimeout as error:
            self._tell("timeout", error=str(error), step=session.status().step)
            return False
        except ExpertsLost as error:
            self._tell("lost", error=str(error))
            return False
        self._tell(
            "step",
            step=step.number,
            epoch=step.epoch,
            complete=step.complete,
            right=self._good,
            flagged=self._flagged,
            begun_ns=begun_ns,
        )
        return step.complete

    def _see(self, session: Session, step: Step) -> None:
        if step.epoch != self._epoch:
            self._epoch = step.epoch
            members = {str(rank): step.members[rank] for rank in sorted(step.members)}
            self._tell("view", epoch=step.epoch, digest=session.view.digest, members=members)

    def _layers(self, session: Session, count: int, number: int) -> None:
        s = self._settings
        first, self._compiled = not self._compiled, True
        with session.warmup() if first and s.warm else nullcontext():
            if first and s.slow_s:
                self._wait(s.slow_s)
            for layer in range(s.config.geometry.layers):
                self._exchange(session, layer, count, number)

    def _exchange(self, session: Session, layer: int, count: int, number: int) -> None:
        g = self._settings.config.geometry
        draw = np.random.default_rng([self._settings.rank, number, layer])
        x = draw.integers(-8, 9, (count, g.hidden)).astype(np.float32)
        order = draw.random((count, g.experts)).argsort(1)
        ids = order[:, : g.topk].astype(np.int64)
        weights = draw.choice(_WEIGHTS, (count, g.topk)).astype(np.float32)
        exchange: Any = session.exchange(EXCHANGE)
        recv = exchange.dispatch(
            layer, torch.from_numpy(x), torch.from_numpy(ids), torch.from_numpy(weights)
        )
        slots = np.array(session.slots(layer))
        local, shares = recv.ids.numpy(), recv.weights.numpy()
        rows = np.flatnonzero((local >= 0).any(1))
        picks = local[rows]
        by = np.where(picks >= 0, self._factors[layer, slots[picks]] * shares[rows], 0).sum(1)
        recv.out.numpy()[rows] = recv.rows.numpy()[rows] * by[:, None]
        got = exchange.combine(layer, recv).numpy()
        want = x * (self._factors[layer, ids] * weights).sum(1)[:, None]
        ok = recv.token_ok.numpy()
        self._flagged += int((~ok).sum())
        self._good = self._good and bool(np.array_equal(got[ok], want[ok]))


def settings_of(order: dict[str, Any]) -> EngineSettings:
    """The settings in a message to this process."""
    return EngineSettings(**{**order, "config": GroupConfig.from_toml_dict(order["config"])})


def _become(parent: int, order: dict[str, Any], orders: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with_parent(parent)
    Engine(settings_of(order), orders).run()


def _fork(order: dict[str, Any], orders: socket.socket, close: Callable[[], None]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        close()
        _become(parent, order, orders)
    except BaseException:  # nothing of this process may run on in the child
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(0)


def main() -> None:
    """Entry point."""
    control = socket.socket(fileno=int(sys.argv[1]))
    # Imported for the children, who then start at once. No channel is opened here: it would start
    # threads, which a fork does not copy.
    import elasticep.client.auto
    import elasticep.client.rpc
    import elasticep.proto.node_pb2_grpc  # noqa: F401

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, these pages
    with suppress(ConnectionError):
        while True:
            data, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 1)
            if not data:
                return
            with socket.socket(fileno=fds[0]) as orders:
                control.send(str(_fork(json.loads(data), orders, control.close)).encode())


if __name__ == "__main__":
    main()
