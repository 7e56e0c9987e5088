"""The engine's side of the recovery bench: steps of a fixed small work, numpy only.

It tells its parent what happened and when: attached, entered a view, a step torn, the first
complete step of a view, fenced. Times are CLOCK_MONOTONIC, which all processes of a host share.
"""

import ctypes
import os
import select
import socket
import time
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

import numpy as np

from elasticep import errors
from elasticep.bench import ranks
from elasticep.bench.ranks import MAX_BYTES, decode, encode
from elasticep.native import abi
from elasticep.testing import raw

_ATTACH_TIMEOUT_S: Final = 30.0
_SESSION_TIMEOUT_MS: Final = 30_000


@dataclass(frozen=True, slots=True)
class Work:
    """One synthetic forward pass.

    Attributes:
        layers: exchanges of a step.
        tokens: rows that each rank brings to each.
        hidden, experts, topk: of the model.
        elements: float32 values that the fixed work of a layer goes through.
    """

    layers: int = 4
    tokens: int = 8
    hidden: int = 256
    experts: int = 32
    topk: int = 4
    elements: int = 16_384

    def to_dict(self) -> dict[str, Any]:
        """Every field as a plain value."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Self:
        """Read what `to_dict` wrote."""
        return cls(**plain)


class StepSession(raw.RawSession):
    """A session that runs the synthetic forward pass."""

    def prepare(self, work: Work, rank: int) -> None:
        """Make inputs once; steps make no arrays."""
        rng = np.random.default_rng(rank)
        self.work = work
        shape = (work.tokens, work.hidden)
        self.x = rng.integers(-8, 9, shape).astype(np.float32)
        keys = rng.random((work.tokens, work.experts))
        self.ids = np.argsort(keys, axis=1)[:, : work.topk].astype(np.int32)
        self.weight = np.full(self.ids.shape, 1 / work.topk, np.float32)
        self.result = np.zeros(shape, np.float32)
        self.values = np.zeros(work.elements, np.float32)
        self.received = abi.Received()
        self.lost_tokens = np.zeros(work.tokens, np.uint8)

    def forward(self) -> None:
        """All layers of a step. Raises `raw.TornError` when it tears."""
        for layer in range(self.work.layers):
            code = self._api.ep_dispatch(
                *(self._handle, 0, 0, layer, self.x.ctypes.data, int(abi.Dtype.FP32)),
                *(self.ids.ctypes.data, self.ids.itemsize, self.weight.ctypes.data),
                *(self.work.tokens, ctypes.byref(self.received), self.lost_tokens.ctypes.data),
            )
            raw.check(code, "dispatch")
            np.tanh(self.values, out=self.values)
            out = self.result.ctypes.data
            code = self._api.ep_combine(self._handle, 0, 0, out, int(abi.Dtype.FP32))
            raw.check(code, "combine")


def ask_daemon(daemon: str, group: str, rank: int, config: str) -> tuple[str, str]:
    """Take a seat from the daemon behind a gRPC socket; returns its other socket and a ticket.

    `config` is the group's config as a serialised message, in hex; it creates the group.
    """
    import grpc

    from elasticep.client.rpc import typed_error
    from elasticep.proto import node_pb2, node_pb2_grpc, types_pb2

    request = node_pb2.AttachRequest(
        group=group,
        rank=rank,
        pid=os.getpid(),
        config=types_pb2.GroupConfig.FromString(bytes.fromhex(config)),
        abi_version=abi.ABI_VERSION,
        wait_ms=round(_ATTACH_TIMEOUT_S * 1000),
    )
    with grpc.insecure_channel(f"unix:{daemon}") as channel:
        stub = node_pb2_grpc.NodeServiceStub(channel)
        try:
            answer = stub.Attach(request, timeout=_ATTACH_TIMEOUT_S + 2)
        except grpc.RpcError as error:
            raise typed_error(error, daemon, f"attach to rank {rank}") from None
    return answer.fd_socket, answer.ticket


class RecoveryRank:
    """Steps until it is fenced or told to stop."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._epoch = 0
        self._told_complete = 0

    @classmethod
    def start(cls, path: str, rank: int) -> None:
        """Connect and obey."""
        cls(rank, ranks.connect(path, rank)).obey()

    def tell(self, event: str, **values: Any) -> None:
        """Send an event to the parent."""
        self._connection.send(encode({"event": event, "at_ns": time.monotonic_ns(), **values}))

    def obey(self) -> None:
        """Wait for `attach`, step; and again, until end of file."""
        while data := self._connection.recv(MAX_BYTES):
            order = decode(data)
            if order.pop("op") != "attach":
                continue  # `stop` that crossed a fence
            try:
                session = self._attach(**order)
            except errors.ElasticEPError as error:
                self.tell("failed", error=f"{type(error).__name__}: {error}")
                continue
            self._serve(session)

    def _attach(
        self,
        work: dict[str, Any],
        socket: str = "",
        ticket: str = "",
        daemon: str = "",
        group: str = "",
        config: str = "",
    ) -> StepSession:
        if daemon:
            socket, ticket = ask_daemon(daemon, group, self.rank, config)
        session = StepSession(socket, ticket, _SESSION_TIMEOUT_MS)
        session.prepare(Work.from_dict(work), self.rank)
        self._epoch = self._told_complete = 0
        self.tell("attached")
        return session

    def _serve(self, session: StepSession) -> None:
        end: dict[str, str] = {"event": "left"}
        try:
            while not self._poll.poll(0):
                self._step(session)
        except errors.Fenced as error:
            end = {"event": "fenced", "why": error.why}
        except errors.ElasticEPError as error:
            end = {"event": "failed", "error": f"{type(error).__name__}: {error}"}
        finally:
            session.close()
        self.tell(**end)  # after it let go: whoever hears of it grants the seat anew

    def _step(self, session: StepSession) -> None:
        try:
            info = session.begin(session.work.tokens)
        except errors.StepTimeout:
            return  # the same barrier again
        begun_ns = time.monotonic_ns()
        epoch = int(info.epoch)
        if epoch != self._epoch:
            self._epoch = epoch
            self.tell("entered", epoch=epoch, members=int(info.members))
        try:
            session.forward()
        except raw.TornError:
            torn_ns = time.monotonic_ns()
            session.end()
            self.tell("torn", epoch=epoch, torn_ns=torn_ns)
            return
        if session.end() and epoch != self._told_complete:
            self._told_complete = epoch
            worker = session.status.runner_pid  # it has run a step, so it holds its lock
            self.tell("complete", epoch=epoch, begun_ns=begun_ns, worker=worker)
