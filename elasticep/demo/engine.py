"""One engine process: decodes its own requests, in lockstep with the other ranks.

It is forked from a parent that has loaded torch, transformers and the model, so it starts at once
and shares what is not of experts; those it computes from its daemon's memory.
"""

import os
import select
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from elasticep.client import Session, Step, attach
from elasticep.demo.batch import Batch, Feed
from elasticep.demo.model import Decoder, logit_sums
from elasticep.demo.settings import EXCHANGE, ModelSizes
from elasticep.demo.wire import Message, Pipe, assignment_from
from elasticep.engines.transformers import MoELayers, replace_moe_blocks
from elasticep.errors import ElasticEPError, Fenced
from elasticep.group import GroupConfig

_KILL_WITHIN_S: Final = 3.0  # below `hang_timeout`: a parent that is gone must not look like a hang


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an engine is told before it is forked.

    Attributes:
        rank: its seat.
        socket: of its node's daemon.
        config: of the group.
        sizes: of the model.
        rows: batch rows, the exchange's cap.
        length: the longest request, in tokens.
        attach_timeout_s: how long the cluster may take to come up.
        tell_at: first step whose begin is told to the parent, who kills something then: in the
            middle of a step, where it hurts.
        wait_for_kill: this rank is the one that dies, and stays inside that step until it does;
            the step could otherwise be over before the parent has read of it.
    """

    rank: int
    socket: str
    config: GroupConfig
    sizes: ModelSizes
    rows: int
    length: int
    attach_timeout_s: float
    tell_at: int | None = None
    wait_for_kill: bool = False


def run_engine(settings: EngineSettings, model: Any, pipe: Pipe) -> int:
    """Serve until told to stop, fenced, or left alone; returns the exit status."""
    try:
        session = attach(
            rank=settings.rank,
            socket=settings.socket,
            config=settings.config,
            timeout=settings.attach_timeout_s,
        )
        with session:
            engine = _Engine(settings, model, pipe, session)
            with suppress(_Stopped):
                engine.serve()
        pipe.send("left")
    except Fenced as error:
        pipe.send("fenced", epoch=error.epoch, why=error.why)
    except ElasticEPError as error:
        pipe.send("failed", error=f"{error.reason}: {error}")
        return 1
    except (BrokenPipeError, ConnectionResetError):
        return 1  # the parent is gone; so is the point of going on
    return 0


class _Stopped(Exception):
    """The last step is over."""


class _Engine:
    def __init__(self, settings: EngineSettings, model: Any, pipe: Pipe, session: Session) -> None:
        self._pipe = pipe
        self._session = session
        self._layers: MoELayers = replace_moe_blocks(model, session, EXCHANGE, rowwise=True)
        self._decoder = Decoder(model, settings.sizes, settings.rows, settings.length)
        self._batch = Batch(settings.rows)
        self._stop_at: int | None = None
        self._tell_at = settings.tell_at
        self._wait_for_kill = settings.wait_for_kill
        self._unread: list[Message] = []
        self._epoch = 0
        self._begun_ns = 0

    def serve(self) -> None:
        status = self._session.status()
        self._pipe.send(
            "attached",
            pid=os.getpid(),
            worker_pid=status.runner_pid,
            incarnation=self._session.incarnation,
        )
        number = 0
        while self._stop_at is None or number < self._stop_at:
            self._take_orders()
            if not self._pipe.open:
                return
            feed = self._batch.feed()
            step, best, sums = self._session.run(
                self._forward, feed, tokens=feed.count, on_torn=self._tell_torn
            )
            number = step.number
            answers = self._batch.advance(best) if best else []
            self._pipe.send(
                "complete",
                step=step.number,
                epoch=step.epoch,
                begun_ns=self._begun_ns,
                at_ns=time.monotonic_ns(),
                answers=[[a.request, a.index, a.token, sums[a.row]] for a in answers],
                requests=self._batch.requests,
                replay_errors=self._batch.replay_errors,
            )

    def _take_orders(self) -> None:
        messages, self._unread = [*self._unread, *self._pipe.receive()], []
        for message in messages:
            if message["kind"] == "assign":
                self._batch.add(assignment_from(message))
            elif message["kind"] == "stop":
                self._stop_at = message["step"]

    def _forward(self, step: Step, feed: Feed) -> tuple[Step, list[int], list[int]]:
        """One pass; called again with the same feed when the step tore. Returns the best token of
        each row and a sum over its logits' bits.
        """
        import torch

        self._begun_ns = time.monotonic_ns()
        if step.epoch != self._epoch:
            self._epoch = step.epoch
            self._pipe.send(
                "view", epoch=step.epoch, members=sorted(step.members), at_ns=self._begun_ns
            )
        if self._tell_at is not None and step.number >= self._tell_at:
            self._tell_at = None
            self._pipe.send("inside", step=step.number)
            if self._wait_for_kill:
                self._until_killed()
        if not feed.count:
            with torch.inference_mode():
                self._layers.idle()
            return step, [], []
        self._layers.active = torch.tensor(feed.active)
        logits = self._decoder.step(feed.tokens, feed.positions)
        best: list[int] = logits.argmax(-1).tolist()
        return step, best, logit_sums(logits)

    def _until_killed(self) -> None:
        """Stay here until the parent says that the worker is dead, or kills this process."""
        deadline = time.monotonic() + _KILL_WITHIN_S
        while self._pipe.open and not any(m["kind"] == "killed" for m in self._unread):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._pipe], [], [], left)[0]:
                return
            self._unread.extend(self._pipe.receive())

    def _tell_torn(self, step: Step) -> None:
        self._pipe.send("torn", step=step.number, epoch=step.epoch, at_ns=time.monotonic_ns())
        if self._stop_at is not None and step.number >= self._stop_at:
            raise _Stopped  # nothing to repeat: whoever tore it has left as all were told to
