"""One term of office of a leader: the cluster's state, the nodes' sessions, and the writes.

The order that keeps the promises of `membership`: an outcome's `now` is sent at once; its writes go
through one queue, one transaction at a time, each guarded by the leader key and for `/view` by its
previous revision; its `after` is sent when its transaction succeeded. Whatever goes wrong ends the
term: the state is read anew from the store by whoever leads next.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from structlog.typing import FilteringBoundLogger

from elasticep.control import events as ev
from elasticep.control import messages, records
from elasticep.control.background import Ask, Pause, Resume
from elasticep.control.clocks import AwakeClock, Clocks
from elasticep.control.cluster import Cluster, Outcomes
from elasticep.control.election import Lead
from elasticep.control.events import Outcome, SeatReport
from elasticep.control.metrics import ControllerMetrics
from elasticep.control.planning import PlanJob, Planned
from elasticep.control.rebalance import Rebalancer
from elasticep.control.session import NodeSession
from elasticep.control.store import Delete, KeyValue, Put, Store
from elasticep.control.views import View
from elasticep.control.writes import Commit, Writes, durable
from elasticep.errors import NotLeader, Unavailable
from elasticep.group import GroupConfig
from elasticep.proto import types_pb2
from elasticep.proto.controller_pb2 import ControllerHeartbeat, ControllerMessage

TICK_S: Final = 0.05
_QUIET: Final = frozenset(
    {"view.waiting", "staged.ignored", "load.counted", "load.window", "rebalance.planned"}
)


class Term:
    """What a leader does while it leads.

    Args:
        store: where it writes.
        lead: the term's guard.
        items: what the store holds.
        metrics: counters.
        log: where events go.
        clocks: where time is read.
    """

    def __init__(
        self,
        store: Store,
        lead: Lead,
        items: Iterable[KeyValue],
        metrics: ControllerMetrics,
        log: FilteringBoundLogger,
        clocks: Clocks | None = None,
    ) -> None:
        self._clocks = clocks or Clocks()
        self._clock = self._clocks.monotonic_s
        self._awake = AwakeClock(self._clock)
        self._log = log
        self._metrics = metrics
        loaded = records.load(items, self._moment())
        self.cluster = Cluster(loaded, self.now_ms())
        for name, membership in self.cluster.groups.items():
            metrics.took_over(name, membership.view, membership.adopted_epoch)
        self._sessions: dict[str, NodeSession] = {}
        self._writes = Writes(
            store, lead, loaded.view_revisions, metrics, log, self._clock, self._written
        )
        self._fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._published: dict[str, View] = {
            name: m.view for name, m in self.cluster.groups.items() if m.view is not None
        }
        self._changed = asyncio.Event()
        # One thread: a plan that hangs costs that one, however often it is given up and made anew.
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="plan")
        self._plans: dict[str, asyncio.Task[None]] = {}
        self._deletions: dict[str, Commit] = {}
        self.over = False
        metrics.keep_only(self.cluster.groups)
        self._show_ages()
        for name in sorted(loaded.remains):  # the leader that deleted it was interrupted
            self._deletions[name] = Commit(name, [], sweeps=True)
            self._enqueue(self._deletions[name])
        self._heartbeat = ControllerMessage(
            heartbeat=ControllerHeartbeat(leader_revision=lead.revision)
        )

    def now_ms(self) -> int:
        """The clock of all events; it stands still while this process does."""
        away_ms = self._awake.away_ms
        now_ms = self._awake.look()
        if self._awake.away_ms > away_ms:
            self._log.warning("controller.away", away_ms=self._awake.away_ms - away_ms)
        return now_ms

    def _show_ages(self) -> None:
        """A scrape sees how long a write has waited for the store, and how long ago the background
        made progress, also if ticks have stopped.
        """
        self._metrics.write_waits.set_function(lambda: self._writes.waits_s)
        for name, background in self.cluster.background.items():
            age = partial(self._age_s, background.rebalancer)
            self._metrics.rebalance_age.labels(name).set_function(age)

    def _age_s(self, rebalancer: Rebalancer) -> float:
        return 0.0 if self.over else max(0, self._awake.peek() - rebalancer.progress_ms) / 1_000

    def _moment(self) -> records.Moment:
        return records.Moment(self.now_ms(), int(self._clocks.unix_s() * 1_000))

    async def run(self) -> None:
        """Lead until something ends the term; raises what did."""
        tasks = [
            asyncio.ensure_future(work)
            for work in (self._writes.run(), self._tick(), self._beat(), self._fault)
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._end()

    def _end(self) -> None:
        self.over = True
        for session in list(self._sessions.values()):
            session.close(_deposed())
        self._metrics.nodes.set(0)
        for task in self._plans.values():
            task.cancel()
        self._planner.shutdown(wait=False, cancel_futures=True)
        self._writes.abandon()
        self._changed.set()

    # ---- what is heard

    def open(self, session: NodeSession, seats: Iterable[tuple[str, SeatReport]]) -> None:
        """A node said hello; `ConfigError` when there is no room for it, or it is a namesake, and
        `NotLeader` when the term ended before it had said so.
        """
        if self.over:
            raise _deposed()
        self.cluster.check_node(session.endpoint, self.now_ms())
        seats = list(seats)
        old = self._sessions.get(session.node)
        if old is not None:
            old.close(Unavailable(f"node {session.node} opened another session"))
        self._sessions[session.node] = session
        session.send(self._heartbeat)  # the node takes its hello for heard when something comes
        self._metrics.nodes.set(len(self._sessions))
        endpoint = session.endpoint
        known = self.cluster.nodes.get(session.node)
        if known is None or known.endpoint != endpoint:
            # Written before anything that the hello leads to, so that the next leader can tell
            # members how to reach this node even if it never says hello to it.
            self._enqueue(Commit("", [records.put_node(endpoint)]))
        now_ms = self.now_ms()
        self._guarded(lambda: self.cluster.hello(endpoint, session.session_id, seats, now_ms))
        self._log.info("node.connected", node=session.node, session=session.session_id)
        alive = {group for group, report in seats if report.incarnation}
        for group in sorted(alive.difference(self.cluster.groups, self.cluster.past)):
            # Its ranks go on in the view that they have; the store was emptied, or is another one.
            self._log.error("group.unknown", group=group, node=session.node)

    def closed(self, session: NodeSession, why: str) -> None:
        """A node's stream is over. If another took its place the node is as connected as before."""
        name, now_ms = session.node, self.now_ms()
        if self._sessions.get(name) is session:
            del self._sessions[name]
            if not self.over:
                self._metrics.nodes.set(len(self._sessions))
                self._guarded(lambda: self.cluster.disconnected(name, now_ms))
        self._log.info("node.disconnected", node=name, session=session.session_id, reason=why)

    def heard(self, session: NodeSession, events: Iterable[tuple[str, ev.Event]]) -> None:
        """A message of a node."""
        if self._sessions.get(session.node) is not session:
            return
        now_ms = self.now_ms()
        self.cluster.heard(session.node, now_ms)
        for group, event in events:
            self._guarded(lambda g=group, e=event: self.cluster.report(g, e, now_ms))  # type: ignore[misc]

    # ---- what operators ask

    async def create_group(self, config: GroupConfig) -> bool:
        """Create a group; returns once that is in the store. `GroupMismatch` when it differs."""
        while config.name in self._deletions:
            await durable(self._deletions[config.name])
        now_ms = self.now_ms()
        created, outcomes = self.cluster.create_group(config, now_ms)
        self._show_ages()
        commit = Commit(config.name, [records.put_config(config)] if created else [])
        self._enqueue(commit)
        self._do(outcomes)
        await durable(commit)
        return created

    async def delete_group(
        self, name: str, reason: str, *, force: bool
    ) -> tuple[bool, tuple[int, ...]]:
        """Delete a group; returns once nothing of it is in the store.

        Returns:
            Whether there was one, and the ranks whose engines are ended with it.

        Raises:
            UnknownGroup, UsageError, ConfigError: see `Cluster.delete_group`.
        """
        if name in self._deletions:
            await durable(self._deletions[name])
        why = f"group {name!r} was deleted{reason and f': {reason}'}"
        deleted = self.cluster.delete_group(name, why, force=force)
        if deleted is None:
            return False, ()
        operations = records.delete_group(name, deleted.past, self._moment())
        commit = Commit(name, operations, after=deleted.after, sweeps=True)
        self._deletions[name] = commit
        plan = self._plans.pop(name, None)
        if plan is not None:
            plan.cancel()
        self._enqueue(commit)
        self._log.info("group.deleted", group=name, reason=reason, fenced=deleted.fenced)
        await durable(commit)
        return True, deleted.fenced

    async def operate(self, group: str, event: ev.Drain | ev.Undrain | ev.SetPolicies) -> None:
        """What an operator wants; returns once that is in the store."""
        self.cluster.membership(group)
        await durable(*self._do(self.cluster.report(group, event, self.now_ms())))

    async def node_off(self, name: str, why: str) -> dict[str, list[int]]:
        """A node is off for good; returns the seats that frees once that is in the store."""
        freed, outcomes = self.cluster.node_off(name, why, self.now_ms())
        forgotten = Commit("", [records.delete_node(name)])
        commits = self._do(outcomes)
        self._enqueue(forgotten)
        await durable(*commits, forgotten)
        return freed

    async def plan(self, job: PlanJob) -> Planned:
        """Make a plan that is only looked at."""
        return self._planned(job) if job.small else await self._aside(job)

    def _aside(self, job: PlanJob) -> "asyncio.Future[Planned]":
        return asyncio.get_running_loop().run_in_executor(self._planner, self._planned, job)

    async def rebalance(self, group: str, event: Ask | Pause | Resume) -> None:
        """What an operator wants of the background; returns once that is in the store."""
        self.cluster.membership(group)
        outcomes = self.cluster.background[group].operate(event, self.now_ms())
        await durable(*self._do([(group, outcome) for outcome in outcomes]))

    @property
    def published(self) -> Mapping[str, View]:
        """Group -> its latest view that is in the store."""
        return self._published

    async def wait_view(self, group: str, condition: Callable[[View], bool]) -> View:
        """The first published view of a group for which the condition holds."""
        while True:
            changed = self._changed
            view = self._published.get(group)
            if view is not None and condition(view):
                return view
            if self.over:
                raise NotLeader("this controller does not lead any more; ask the next leader")
            self.cluster.membership(group)  # it may have been deleted
            await changed.wait()

    async def views(self, group: str) -> AsyncGenerator[View, None]:
        """The group's view, then every later one; a slow reader is spared those in between."""
        epoch = 0
        while True:
            view = await self.wait_view(group, lambda v, seen=epoch: v.epoch > seen)  # type: ignore[misc]
            epoch = view.epoch
            yield view

    # ---- what follows

    def _guarded(self, work: Callable[[], Outcomes]) -> None:
        """Do what an event leads to. An error in it is ours: the term ends, the process goes on."""
        try:
            self._do(work())
        except Exception as error:
            self._metrics.faults.inc()
            self._log.exception("controller.fault", error=str(error))
            if not self._fault.done():
                self._fault.set_exception(error)

    def _do(self, outcomes: Outcomes) -> list[Commit]:
        commits = []
        for group, outcome in outcomes:
            self._send(group, outcome.now)
            if outcome.writes or outcome.after:
                commits.append(self._commit_of(group, outcome))
                self._enqueue(commits[-1])
            for notice in outcome.notices:
                self._metrics.count(group, notice)
                write = self._log.debug if notice.event in _QUIET else self._log.info
                write = self._log.error if notice.event.endswith(".fault") else write
                write(notice.event, group=group, **notice.fields)
        return commits

    def _commit_of(self, group: str, outcome: Outcome) -> Commit:
        at = self._moment()
        view = None
        operations: list[Put | Delete] = []
        for write in outcome.writes:
            operations += records.operations(group, write, at)
            if isinstance(write, ev.SaveView):
                view = write.view
        return Commit(group, operations, view, tuple(outcome.after))

    def _enqueue(self, commit: Commit) -> None:
        try:
            self._writes.add(commit)
        except Unavailable as error:
            if not self._fault.done():
                self._fault.set_exception(error)

    def _send(self, group: str, sends: Iterable[ev.Send]) -> None:
        told: dict[int, types_pb2.View] = {}  # epoch -> its message, made once for all nodes
        for send in sends:
            session = self._sessions.get(send.node)
            if session is None:
                continue  # it will say hello and hear it then
            if isinstance(send, ev.Propose):
                epoch = send.view.epoch
                if epoch not in told:
                    told[epoch] = send.view.to_proto()
                message = messages.proposal_message(send, told[epoch], self.cluster.endpoints)
            elif isinstance(send, ev.Grant):
                membership = self.cluster.groups.get(group) or self.cluster.leaving[group]
                message = messages.grant_message(membership.config, send, membership.policies)
            elif isinstance(send, ev.Tell):
                message = messages.policies_message(group, send)
            elif isinstance(send, ev.Forget):
                message = messages.forget_message(group, send)
            else:
                message = messages.fence_message(group, send)
            session.send(message)

    def _written(self, commit: Commit) -> None:
        self._send(commit.group, commit.after)
        told: dict[int, list[int]] = {}
        for send in commit.after:
            if isinstance(send, ev.Propose):
                told.setdefault(send.view.epoch, []).extend(send.ranks)
        for epoch, ranks in told.items():
            event = ev.Told(epoch, tuple(ranks))
            self._guarded(lambda e=event: self.cluster.report(commit.group, e, self.now_ms()))  # type: ignore[misc]
        if commit.view is not None:
            self._published[commit.group] = commit.view
        if commit.sweeps:
            self._deleted(commit.group)
        if commit.view is not None or commit.sweeps:
            self._changed.set()
            self._changed = asyncio.Event()

    def _deleted(self, group: str) -> None:
        """Nothing of a group is in the store, and everything that was before it in the queue."""
        self._deletions.pop(group, None)
        self.cluster.leaving.pop(group, None)
        self._published.pop(group, None)
        self._metrics.keep_only(self.cluster.groups)

    # ---- time

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            outcomes, drop = self.cluster.tick(self.now_ms())
            self._guarded(lambda o=outcomes: o)  # type: ignore[misc]
            self._plan()
            for name in self.cluster.forget(self.now_ms()):
                self._enqueue(Commit("", [records.delete_node(name)]))
                self._log.info("node.forgotten", node=name)
            for name in drop:
                if name in self._sessions:
                    silent = f"node {name} was not heard of; it must say hello again"
                    self._sessions[name].close(Unavailable(silent))

    def _plan(self) -> None:
        """Make the plans that are wanted; what takes long, beside everything else."""
        for job in self.cluster.take_jobs():
            if job.small:
                planned = self._planned(job)
                self._guarded(lambda p=planned: self.cluster.planned(p, self.now_ms()))  # type: ignore[misc]
                continue
            given_up = self._plans.get(job.view.group)
            if given_up is not None:
                given_up.cancel()  # if it did not begin, it never does
            self._plans[job.view.group] = asyncio.ensure_future(self._plan_aside(job))

    async def _plan_aside(self, job: PlanJob) -> None:
        planned = await self._aside(job)
        if not self.over:
            self._guarded(lambda: self.cluster.planned(planned, self.now_ms()))

    def _planned(self, job: PlanJob) -> Planned:
        try:
            return job.run()
        except Exception as error:  # serving goes on without; it is said, and tried again
            self._metrics.faults.inc()
            self._log.exception("rebalance.fault", error=str(error))
            return job.failed(f"{type(error).__name__}: {error}")

    async def _beat(self) -> None:
        while True:
            for session in list(self._sessions.values()):
                session.send(self._heartbeat)
            await asyncio.sleep(self.cluster.heartbeat_ms / 1_000)


def _deposed() -> NotLeader:
    return NotLeader("this controller does not lead any more; connect to the next leader")
