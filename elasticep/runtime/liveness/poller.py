"""Looks at every seat's header ten times a second: who waits too long, and what the steps count."""

import asyncio
import time
from collections import Counter

from elasticep.proto import controller_pb2
from elasticep.runtime.group import Registry
from elasticep.runtime.keeper import SeatKeeper
from elasticep.runtime.liveness.waits import Wait, overdue, should_report
from elasticep.runtime.metrics import STATES, StepCounts
from elasticep.runtime.node import Node
from elasticep.runtime.seats import SeatState


class Poller:
    """Wait records become reports, counters become metrics.

    Args:
        node: the daemon's shared parts.
        registry: its groups.
    """

    def __init__(self, node: Node, registry: Registry) -> None:
        self._node = node
        self._registry = registry
        # (group, rank) -> incarnation and the wait that stands with the controller
        self._reported: dict[tuple[str, int], tuple[int, Wait]] = {}
        self._steps: tuple[StepCounts, ...] = ()
        node.metrics.read_steps(lambda: self._steps)

    async def run(self) -> None:
        """Poll for good."""
        while True:
            self.poll()
            await asyncio.sleep(self._node.limits.poll_s)

    def poll(self) -> None:
        """Look once."""
        now_ns = time.monotonic_ns()
        keepers = self._registry.keepers()
        steps = []
        for keeper in keepers:
            status = keeper.status()
            if status is None:
                continue
            steps.append(
                StepCounts(keeper.group.name, keeper.rank, status.complete_steps, status.torn_steps)
            )
            wait = None
            if keeper.seat.state is SeatState.ATTACHED and status.fenced < status.incarnation:
                timeouts = keeper.group.config.timeouts
                wait = overdue(status, now_ns, timeouts.suspect_after_ms)
            self._compare(keeper, wait, status.progress)
        for group in self._registry.groups.values():
            if group.weights is not None:
                group.weights.count()
        here = {(keeper.group.name, keeper.rank) for keeper in keepers}
        for key in self._reported.keys() - here:  # of a group that was deleted
            del self._reported[key]
        self._steps = tuple(steps)
        self._node.metrics.waits.set(len(self._reported))
        count = Counter(str(keeper.seat.state) for keeper in keepers)
        for state in STATES:
            self._node.metrics.seats.labels(state).set(count[state])

    def again(self) -> None:
        """A controller has just heard the hello: what stands is said again."""
        self._reported.clear()
        self.poll()

    def _compare(self, keeper: SeatKeeper, wait: Wait | None, progress: int) -> None:
        key = (keeper.group.name, keeper.rank)
        incarnation = keeper.seat.incarnation
        known = self._reported.get(key)
        reported = known[1] if known is not None and known[0] == incarnation else None
        if wait is None:
            if self._reported.pop(key, None) is not None and reported is not None:
                self._send(keeper, Wait(reported.waits_for, "", 0, 0, progress))
            return
        # Often enough that the controller judges within its hang timeout, not by stale words.
        again_after_ms = max(1, keeper.group.config.timeouts.hang_timeout_ms // 10)
        if should_report(reported, wait, again_after_ms):
            self._reported[key] = (incarnation, wait)
            self._send(keeper, wait)

    def _send(self, keeper: SeatKeeper, wait: Wait) -> None:
        if wait.waited_ms:
            keeper.log.info(
                "rank.waits",
                waits_for=wait.waits_for,
                phase=wait.phase,
                waited_ms=wait.waited_ms,
            )
        report = controller_pb2.WaitReport(
            group=keeper.group.name,
            rank=keeper.rank,
            incarnation=keeper.seat.incarnation,
            waits_for=wait.waits_for,
            phase=wait.phase,
            waited_ms=wait.waited_ms,
            progress=wait.progress,
        )
        self._node.send(controller_pb2.NodeMessage(wait=report))
