"""The demo's parent process: owns the journal, forks the engines, kills, and judges the outcome.

It never opens a gRPC channel and runs no thread, because it forks. Engines find out about failures
by themselves; the parent hears what they tell it and moves requests of a dead rank to others.
"""

import itertools
import os
import selectors
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from elasticep.demo import balance, weights
from elasticep.demo.display import Display, Progress, RankLine
from elasticep.demo.drain import Drain
from elasticep.demo.journal import Assignment, Journal
from elasticep.demo.judging import Facts, judge
from elasticep.demo.measure import KillWatch
from elasticep.demo.migration import Migration
from elasticep.demo.report import Report
from elasticep.demo.scenario import Scenario, script
from elasticep.demo.settings import (
    GROUP,
    REQUESTS_PER_RANK,
    DemoSettings,
    Kill,
    Restore,
    Side,
)
from elasticep.demo.spawn import EngineProcess, fork_engine, preload
from elasticep.demo.wire import Message, assignment_fields
from elasticep.errors import ConfigError, Unavailable
from elasticep.testing.cluster import CONTROLLER, Cluster, daemon_name
from elasticep.testing.etcd import find_etcd

# Engines may be a few steps ahead of what was read; they must hear of the last step before it.
_STOP_MARGIN_STEPS: Final = 8
_LEAVE_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.1


class Demo:
    """One run.

    Args:
        settings: what to run.
        display: where to show it.
    """

    def __init__(self, settings: DemoSettings, display: Display) -> None:
        self._settings = settings
        self._display = display
        self._cluster = Cluster(
            group=settings.group_config().name,
            ranks=settings.max_ranks,
            nodes=settings.nodes,
            checkpoint="model",
            environment=(
                balance.environment(settings)
                if settings.scenario is Scenario.REBALANCE
                else weights.environment(settings)
            ),
        )
        self._engines: dict[int, EngineProcess] = {}
        self._model: Any = None
        self._selector = selectors.DefaultSelector()
        self._deadline = time.monotonic() + settings.timeout_s
        ranks = range(settings.ranks)
        early = settings.prompts[: settings.ranks * REQUESTS_PER_RANK]
        self._late = settings.prompts[len(early) :]
        self._further = itertools.cycle(early)
        self._journal = Journal(early, settings.tokens, ranks)
        self._lines = {rank: RankLine(rank, self._cluster.node_of(rank)) for rank in ranks}
        self._progress = Progress(
            list(self._lines.values()), len(settings.prompts) * settings.tokens
        )
        self._watch: KillWatch | None = None
        self._inside: dict[int, int] = {}  # rank -> step that it is in
        self._drain = Drain()
        self._balance = balance.Balance()
        self.victim, self.ranks = settings.victim, settings.ranks
        idle = settings.scenario.kills and settings.kill is Kill.NONE
        kills = settings.kill is not Kill.NONE
        self._script = None if idle else script(settings.scenario, self, kill=kills)
        self._migration = Migration(self._cluster, settings)
        self._recovery_told = False
        self._restarted = False
        self._facts = Facts()

    def run(self) -> Report:
        """Run it from start to end.

        Raises:
            ElasticEPError: a part of the cluster or an engine failed, or the time ran out.
        """
        try:
            self._start()
            begin = time.monotonic()
            while not self._finished():
                self._turn()
            self._facts.served_s = time.monotonic() - begin
            self._stop_engines()
            return self._judge()
        finally:
            self._end()

    # ---- start

    def _start(self) -> None:
        s = self._settings
        find_etcd()  # a missing one is said before torch is loaded
        self._display.event(f"starting etcd, the controller and {s.nodes} node daemons")
        self._cluster.start()
        # torch makes its folder when it is imported; with ours it goes, too.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(self._cluster.folder / "inductor"))
        # Loaded once, here: engines are forked from this process and start at once.
        preload()
        from elasticep.demo.model import build_model, save_model, skew_router

        self._model = build_model(s.sizes, s.seed)
        if s.scenario is Scenario.REBALANCE:
            skew_router(self._model, s.sizes)
        try:
            save_model(self._model, self._cluster.checkpoint)
        except ConfigError:
            self._cluster.events()  # if it ended, that is the error: its folder went, too
            raise
        self._display.event(
            f"built Qwen3MoeForCausalLM: {s.sizes.layers} layers, {s.sizes.experts} experts, "
            f"top-{s.sizes.topk}, fp32, seed {s.seed}"
        )
        self._cluster.wait_up()
        self._display.event("the cluster is up")
        self._selector.register(self._cluster, selectors.EVENT_READ, None)
        for rank in self._lines:
            self._fork(rank, first=True)
        self._display.event(f"forked {s.ranks} engines")

    def _fork(self, rank: int, *, first: bool) -> None:
        s = self._settings
        engine = fork_engine(
            rank,
            self._cluster.socket_of(rank),
            s,
            self._model,
            first=first,
            log=self._cluster.folder / f"engine-{rank}.log",
            inherited=[self._cluster.fileno(), self._selector.fileno()]
            + [other.pipe.fileno() for other in self._engines.values() if other.pipe.open],
        )
        self._engines[rank] = engine
        self._selector.register(engine.pipe, selectors.EVENT_READ, rank)
        self._assign(rank, self._journal.of(rank))

    def _assign(self, rank: int, assignments: list[Assignment]) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # its end is noticed by reading
            for assignment in assignments:
                self._engines[rank].pipe.send("assign", **assignment_fields(assignment))

    # ---- the loop

    def _turn(self) -> None:
        if time.monotonic() > self._deadline:
            states = ", ".join(f"{rank} {line.state}" for rank, line in self._lines.items())
            raise Unavailable(
                f"the demo did not end within {self._settings.timeout_s:g} s (ranks: {states}); "
                "a slow machine may need a larger --timeout"
            )
        for key, _ in self._selector.select(_POLL_S):
            if key.data is None:
                self._hear_cluster()
            else:
                self._hear(key.data)
        self._advance()
        self._progress.ranks = list(self._lines.values())
        self._display.progress(self._progress)

    def _advance(self) -> None:
        if self._script is not None:
            try:
                next(self._script)
            except StopIteration:
                self._script = None
        self._drain.look()

    def _hear_cluster(self) -> None:
        for event in self._cluster.events():
            if event["event"] == "ready" and event["name"] == self._killed_unit:
                self._restarted = True
                self._display.event(f"{event['name']} is back (process {event['pid']})")
            elif event["event"] == "exited":
                self._display.event(f"{event['name']} ended (status {event['status']})")

    def _hear(self, rank: int) -> None:
        engine = self._engines[rank]
        for message in engine.pipe.receive():
            _HANDLERS[message["kind"]](self, rank, message)
        if not engine.pipe.open:
            self._selector.unregister(engine.pipe)
            engine.pipe.close()
            if self._lines[rank].state != "left":
                self._on_dead(rank)

    def _on_attached(self, rank: int, message: Message) -> None:
        self._engines[rank].worker_pid = message["worker_pid"]
        self._lines[rank].state = "serving"
        if all(line.state == "serving" for line in self._lines.values()):
            self._display.event(f"all {len(self._lines)} ranks are attached")

    def _on_view(self, rank: int, message: Message) -> None:
        if message["epoch"] > self._progress.epoch:
            self._display.event(f"epoch {message['epoch']}: members {message['members']}")
        self._lines[rank].epoch = message["epoch"]
        if self._watch is not None:
            self._watch.entered(rank, message["epoch"], message["at_ns"])

    def _on_torn(self, rank: int, message: Message) -> None:
        first = message["step"] not in {step for _, step in self._facts.torn}
        self._facts.torn.append((rank, message["step"]))
        if self._watch is not None:
            self._watch.torn(rank, message["at_ns"])
        if first:
            self._display.event(f"step {message['step']} is torn on rank {rank}; it is repeated")

    def _on_complete(self, rank: int, message: Message) -> None:
        line = self._lines[rank]
        line.step, line.epoch = message["step"], message["epoch"]
        line.requests = message["requests"]
        for answer in message["answers"]:
            self._journal.record(rank, *answer)
        line.tokens += len(message["answers"])
        self._keep_busy(rank)
        self._balance.step(rank, message["at_ns"])
        self._progress.add_tokens(len(message["answers"]))
        self._facts.epochs.add(message["epoch"])
        self._facts.replay_errors[rank] = message["replay_errors"]
        if self._watch is not None:
            self._watch.complete(rank, message["epoch"], message["begun_ns"], message["at_ns"])
            self._tell_recovery()

    def _keep_busy(self, rank: int) -> None:
        """While experts move, or are about to, a new request follows every one that is answered:
        how long that takes is no matter of the answers' length.
        """
        if self._settings.scenario is not Scenario.REBALANCE or self._script is None:
            return
        while len(self._journal.of(rank)) < REQUESTS_PER_RANK:
            prompt = next(self._further)
            self._assign(rank, self._journal.add([prompt], self._settings.tokens, rank))
            self._progress.tokens_wanted += self._settings.tokens

    def _on_inside(self, rank: int, message: Message) -> None:
        self._inside[rank] = message["step"]
        self._advance()  # now: while the step is open

    def _on_fenced(self, rank: int, message: Message) -> None:
        self._display.event(f"rank {rank} is fenced: {message['why']}")

    def _on_failed(self, rank: int, message: Message) -> None:
        raise Unavailable(f"engine {rank} failed: {message['error']}")

    def _on_left(self, rank: int, message: Message) -> None:
        self._lines[rank].state = "left"

    # ---- the kill

    def reached(self) -> bool:
        """Whether decoding is where the scenario begins."""
        awaited = filter(self._settings.starts_scenario, range(self.ranks))
        return all(rank in self._inside for rank in awaited)

    def backed_up(self) -> bool:
        """Whether experts can be restored from where they are to be."""
        return self._settings.restore is not Restore.BACKUP or weights.backed_up(self._cluster)

    def recovered(self) -> bool:
        """Whether every survivor completed a step after the kill, and what was killed is back."""
        watch = self._watch
        back = not self._killed_unit or self._restarted
        return watch is not None and watch.recovered and back

    def open(self, rank: int) -> None:
        """Start a new engine on a rank and give it requests of its own."""
        again = rank in self._engines
        if again:
            self._engines[rank].end()
        self._lines[rank] = RankLine(rank, self._cluster.node_of(rank))
        mine, self._late = self._late[:REQUESTS_PER_RANK], self._late[REQUESTS_PER_RANK:]
        self._journal.add(mine, self._settings.tokens, rank)
        self._fork(rank, first=False)
        self._display.event(f"a new engine takes rank {rank}" + (" again" if again else ""))

    def serves(self, rank: int) -> bool:
        """Whether a rank has completed a step since it was opened."""
        return self._lines[rank].step > 0

    def drain(self, ranks: Sequence[int]) -> None:
        """Ask the controller to take ranks out of service, as an operator would."""
        self._display.event(self._drain.ask(self._controller, GROUP, ranks))

    @property
    def _killed_unit(self) -> str:
        """The part of the cluster that is killed, if it is one."""
        daemon = daemon_name(self._cluster.node_of(self.victim))
        return {Kill.DAEMON: daemon, Kill.CONTROLLER: CONTROLLER}.get(self._settings.kill, "")

    @property
    def _controller(self) -> str:
        return f"unix://{self._cluster.folder}/controller.sock"

    def rebalance(self) -> None:
        """Ask the controller to move experts by their load, as an operator would."""
        self._display.event(self._balance.ask(self._controller, GROUP))

    def moving(self) -> bool:
        """Whether experts move, and a victim was found in the middle of it."""
        flight = self._migration.flight if self._migration.look() else None
        if flight is None:
            return False
        self.victim = flight.source if self._settings.side is Side.SOURCE else flight.target
        return True

    def rebalanced(self) -> bool:
        """Whether that is done, and the load since was looked at."""
        done = self._balance.look(GROUP, self._journal.lost)
        if done:
            self._display.event(self._balance.told)
        return done

    def gone(self, rank: int) -> bool:
        """Whether the rank's engine has left."""
        return self._lines[rank].state == "dead"

    def kill(self) -> None:
        """Kill what was asked for."""
        s, victim = self._settings, self.victim
        engine, step = self._engines[victim], self._lines[victim].step + 1
        losing = s.kill.costs_a_rank
        survivors = frozenset(rank for rank in self._lines if not losing or rank != victim)
        after_epoch = self._lines[victim].epoch if losing else None
        self._migration.kill()
        at_ns = time.monotonic_ns()
        match s.kill:
            case Kill.ENGINE:
                os.kill(engine.pid, signal.SIGKILL)
            case Kill.WORKER:
                os.kill(engine.worker_pid, signal.SIGKILL)
                engine.pipe.send("killed")
            case _:
                self._cluster.kill(self._killed_unit)
        self._watch = KillWatch(at_ns, survivors, after_epoch)
        if losing:
            self._balance.member_killed(victim, at_ns)
        told = self._migration.told or f"in the middle of step {step}"
        self._display.event(f"KILL -9: {self._victim_name()}, {told}")

    def _victim_name(self) -> str:
        match self._settings.kill:
            case Kill.WORKER | Kill.ENGINE:
                return f"{self._settings.kill} of rank {self.victim}"
            case Kill.NONE:
                return "nothing"
        return self._killed_unit

    def _tell_recovery(self) -> None:
        if self._watch is not None and self._watch.recovered and not self._recovery_told:
            self._recovery_told = True
            self._display.event(
                f"a complete step on every survivor {self._watch.recover_ms:.1f} ms after the kill"
            )

    def _on_dead(self, rank: int) -> None:
        self._lines[rank].state = "dead"
        self._lines[rank].requests = 0
        taken = self._journal.take_over(rank)
        for heir, assignments in taken.items():
            self._assign(heir, assignments)
        moved = sum(len(assignments) for assignments in taken.values())
        self._facts.moved += moved
        heirs = ", ".join(str(heir) for heir in sorted(taken))
        self._display.event(
            f"engine {rank} is gone; {moved} requests taken over by ranks {heirs}"
            if moved
            else f"engine {rank} is gone; it had no request"
        )
        if not any(line.state == "serving" for line in self._lines.values()):
            raise Unavailable("no engine is left; the last one's log: " + self._engine_log(rank))

    def _engine_log(self, rank: int) -> str:
        with suppress(OSError):
            return (self._cluster.folder / f"engine-{rank}.log").read_text(errors="replace")[-2000:]
        return ""

    # ---- the end

    def _finished(self) -> bool:
        return self._journal.done and self._script is None and not self._drain.under_way

    def _stop_engines(self) -> None:
        """All leave after the same step, so that nobody waits for one who is gone."""
        last = max(line.step for line in self._lines.values()) + _STOP_MARGIN_STEPS
        for rank, line in self._lines.items():
            if line.state == "serving":
                with suppress(BrokenPipeError, ConnectionResetError):
                    self._engines[rank].pipe.send("stop", step=last)
        self._deadline = min(self._deadline, time.monotonic() + _LEAVE_TIMEOUT_S)
        while any(line.state == "serving" for line in self._lines.values()):
            self._turn()
        self._display.event(f"all answers are whole; engines left after step {last}")

    def _judge(self) -> Report:
        s = self._settings
        details: dict[str, Any] = {
            "victim": self._victim_name(),
            "steps": max(line.step for line in self._lines.values()),
        }
        if s.restore is not None:
            details["restored"] = weights.restored(self._cluster, self._facts.epochs)
        if s.scenario is Scenario.REBALANCE:
            details["rebalance"] = self._balance.details()
        if s.side is not None:
            details["migration"] = self._migration.details(self._facts.epochs)
        facts, ranks = self._facts, frozenset(self._lines)
        return judge(
            s, self._model, self._journal, facts, self._watch, ranks, self._display, details
        )

    def _end(self) -> None:
        for engine in self._engines.values():
            engine.end()
        self._drain.end()
        self._balance.end()
        self._cluster.stop()
        self._selector.close()


_HANDLERS: Final = {
    "attached": Demo._on_attached,
    "view": Demo._on_view,
    "torn": Demo._on_torn,
    "inside": Demo._on_inside,
    "complete": Demo._on_complete,
    "fenced": Demo._on_fenced,
    "failed": Demo._on_failed,
    "left": Demo._on_left,
}
