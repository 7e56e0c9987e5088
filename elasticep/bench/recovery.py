"""`python -m elasticep.bench recovery`: from SIGKILL to the first complete step on all survivors.

Engines run a synthetic forward pass (fixed small work per layer), so that the runtime is measured
and not a model. A random rank's worker or engine is killed at a random moment, the survivors go on,
the rank comes back, and so on. `--plane cluster` runs the real etcd, controller and daemons;
`--plane local` plays the controller's part itself and shows the data plane's share.
"""

import random
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import click

from elasticep.bench import recovery_planes, report
from elasticep.bench.ranks import MAX_BYTES, BenchError, RankSet, decode
from elasticep.bench.recovery_engine import Work
from elasticep.bench.recovery_planes import ClusterPlane, LocalPlane, Plane
from elasticep.geometry import MAX_RANKS
from elasticep.group import Timeouts
from elasticep.testing.processes import alive

ENGINE: Final = "elasticep.bench.recovery_engine:RecoveryRank"
DEADLINE_S: Final = 60.0
_CHECK_S: Final = 1.0
_PHASE_S: Final = 0.02  # the kill falls at a random moment of this
_MS: Final = 1e6
# name -> (p50, p99) in ms; for --kill hang beyond hang_timeout
GOALS: Final = {
    "recovery": (60.0, 200.0),
    "recovery, controller killed too": (2500.0, 5000.0),
    "recovery, beyond hang_timeout": (300.0, 1000.0),
    "recovery, lost experts restored": (300.0, 1000.0),
    "detection": (3.0, 15.0),
}


@dataclass(slots=True)
class Rank:
    """What the parent knows of an engine."""

    worker: int = 0
    epoch: int = 0
    members: int = 0
    complete_epoch: int = 0
    attached: bool = False
    events: list[dict[str, Any]] = field(default_factory=list)


class Fleet:
    """All engines of the bench and the events that they tell."""

    def __init__(self, count: int, plane: Plane, work: Work) -> None:
        self.engines = RankSet(ENGINE, count)
        self.ranks = {rank: Rank() for rank in range(count)}
        self._plane = plane
        self._work = work

    def attach(self, rank: int) -> None:
        """Order an engine to take its seat."""
        order = {"work": self._work.to_dict(), **self._plane.attach_order(rank)}
        self.ranks[rank] = Rank()
        self.engines.send_to(rank, "attach", **order)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Take in events until `condition()` holds; `BenchError` says what did not come."""
        end = time.monotonic() + DEADLINE_S
        while not condition():
            left = end - time.monotonic()
            if left <= 0:
                state = {n: (r.attached, r.epoch, r.complete_epoch) for n, r in self.ranks.items()}
                raise BenchError(
                    f"not within {DEADLINE_S:g} s: {what}; (attached, epoch, complete): {state}"
                )
            if not self.take_in(min(left, _CHECK_S)):
                self._plane.check()

    def take_in(self, timeout_s: float) -> bool:
        """Events of all ranks, waiting up to `timeout_s` for a first one; whether one came."""
        by_connection = {c: rank for rank, c in self.engines.connections.items()}
        readable = select.select(list(by_connection), [], [], timeout_s)[0]
        for connection in readable:
            data = connection.recv(MAX_BYTES)
            rank = by_connection[connection]
            if data:
                self._note(rank, decode(data))
            else:  # killed; its place is taken by `respawn`
                self.ranks[rank].attached = False
                self.engines.connections[rank].close()
                del self.engines.connections[rank]
        return bool(readable)

    def _note(self, number: int, event: dict[str, Any]) -> None:
        rank = self.ranks[number]
        rank.events.append(event)
        match event["event"]:
            case "attached":
                rank.attached = True
            case "entered":
                rank.epoch, rank.members = event["epoch"], event["members"]
            case "complete":
                rank.complete_epoch, rank.worker = event["epoch"], event["worker"]
            case "fenced" | "left":
                rank.attached = False
            case "failed":
                raise BenchError(f"engine of rank {number}: {event['error']}")

    def settled(self) -> bool:
        """All ranks run, and have completed a step of, the same view with all of them."""
        count = len(self.ranks)
        epochs = {rank.complete_epoch for rank in self.ranks.values()}
        return len(epochs) == 1 and all(
            r.attached and r.members == count and r.epoch == r.complete_epoch
            for r in self.ranks.values()
        )


@dataclass(frozen=True, slots=True)
class Recovery:
    """One kill, in ms from the signal.

    Attributes:
        detection: the last survivor's wait for the dead rank ended; None if all were elsewhere.
        recovery: the first complete step was there on the last survivor.
        moments: further moments by name, in the order in which they happen.
    """

    victim: int
    detection: float | None
    recovery: float
    moments: dict[str, float]


def one_kill(fleet: Fleet, plane: Plane, victim: int, what: str, rng: random.Random) -> Recovery:
    """Kill, wait for the survivors, bring the rank back, wait until all is as before."""
    survivors = {rank: r for rank, r in fleet.ranks.items() if rank != victim}
    before = max(r.epoch for r in survivors.values())
    for rank in survivors.values():
        rank.events.clear()
    fleet.take_in(rng.random() * _PHASE_S)
    number = signal.SIGSTOP if what == "hang" else signal.SIGKILL
    worker = fleet.ranks[victim].worker
    pid = fleet.engines.pid(victim) if what == "engine" else worker
    plane.before_kill()
    killed_ns = recovery_planes.kill(pid, number)
    plane.after_kill(victim, killed_ns)
    fleet.wait(
        lambda: all(r.complete_epoch > before for r in survivors.values()),
        f"complete steps of the survivors of rank {victim}'s {what}",
    )
    found = _figures(plane, victim, before, killed_ns, survivors)
    if what == "hang" and alive(worker):
        recovery_planes.kill(worker, signal.SIGCONT)  # it finds that it is fenced
    if what == "engine":
        fleet.wait(lambda: victim not in fleet.engines.connections, "the end of the engine")
        fleet.engines.respawn(victim)
    else:
        fleet.wait(lambda: not fleet.ranks[victim].attached, f"rank {victim} to be fenced")
    plane.reopen(victim)
    fleet.attach(victim)
    fleet.wait(lambda: fleet.ranks[victim].attached, f"rank {victim} to attach again")
    plane.let_in(victim)
    fleet.wait(fleet.settled, "a view with all ranks")
    return found


def _figures(
    plane: Plane, victim: int, before: int, killed_ns: int, survivors: dict[int, Rank]
) -> Recovery:
    def first(rank: Rank, kind: str, value: str = "at_ns") -> int | None:
        times = [
            e[value]
            for e in rank.events
            if e["event"] == kind
            and e["at_ns"] >= killed_ns
            and (kind == "torn" or e["epoch"] > before)
        ]
        return min(times, default=None)

    def ms(at_ns: int) -> float:
        return round((at_ns - killed_ns) / _MS, 3)

    torn = [t for r in survivors.values() if (t := first(r, "torn", "torn_ns")) is not None]
    entered = [t for r in survivors.values() if (t := first(r, "entered")) is not None]
    complete = [t for r in survivors.values() if (t := first(r, "complete")) is not None]
    epoch = min(r.complete_epoch for r in survivors.values())
    moments = dict(plane.trace(victim, epoch, killed_ns).moments)
    if entered:
        moments["adopted by the first"] = min(entered)
        moments["adopted by the last"] = max(entered)
    ordered = dict(sorted(moments.items(), key=lambda item: item[1]))
    return Recovery(
        victim,
        ms(max(torn)) if torn else None,
        ms(max(complete)),
        {name: ms(at_ns) for name, at_ns in ordered.items()},
    )


@contextmanager
def running(plane: Plane, work: Work, count: int) -> Iterator[Fleet]:
    """A fleet that steps in a first view with all ranks."""
    fleet = Fleet(count, plane, work)
    try:
        for rank in range(count):
            fleet.attach(rank)
        plane.first_view()
        fleet.wait(fleet.settled, "a first view with all ranks")
        yield fleet
    finally:
        fleet.engines.close(kill=True)


def summarise(result: report.Report, found: Sequence[Recovery], title: str, goal: str) -> None:
    """Tables: detection and recovery with their goals, then the moments on the way."""
    table = report.Table(
        title, ["from the kill to", "n", "p50 ms", "p99 ms", "goal p50", "goal p99"]
    )
    detection = [r.detection for r in found if r.detection is not None]
    shift = float(result.figures.get("hang_timeout_ms", 0))
    rows = [("recovery", goal, [r.recovery - shift for r in found])]
    if not shift:
        rows.insert(0, ("detection", "detection", detection))
    for name, goal_name, values in rows:
        if not values:
            table.add(name, 0, "-", "-", "-", "-")
            continue
        p50, p99 = (report.percentile(values, percent) for percent in (50, 99))
        goals = [
            report.verdict(value, limit, at_least=False)
            for value, limit in zip((p50, p99), GOALS[goal_name], strict=True)
        ]
        table.add(goal_name, len(values), f"{p50:.1f}", f"{p99:.1f}", *goals)
    table.notes.append("detection: the last wait for the dead rank ended with a torn step")
    table.notes.append("recovery: the first complete step was there on the last survivor")
    phases = report.Table("moments on the way", ["from the kill to", "n", "p50 ms", "p99 ms"])
    names = sorted(
        {name for r in found for name in r.moments},
        key=lambda name: report.percentile(
            [r.moments[name] for r in found if name in r.moments], 50
        ),
    )
    for name in names:
        values = [r.moments[name] for r in found if name in r.moments]
        phases.add(name, len(values), *(f"{report.percentile(values, p):.1f}" for p in (50, 99)))
    result.tables += [table, phases]
    result.figures["recoveries"] = [
        {"victim": r.victim, "detection": r.detection, "recovery": r.recovery, **r.moments}
        for r in found
    ]


def count_restored(result: report.Report, found: list[Recovery]) -> None:
    """Keep the recoveries that had to restore experts: what a rank held before and still has in a
    free slot needs no restoring.
    """
    restored = [r for r in found if recovery_planes.RESTORED in r.moments]
    result.figures["kills"], result.figures["restored"] = len(found), len(restored)
    found[:] = restored


@click.command(name="recovery", help=__doc__)
@click.option("--kills", type=click.IntRange(min=1), default=10, show_default=True)
@click.option("--kill", "what", type=click.Choice(["worker", "engine", "hang"]), default="worker",
              show_default=True, help="hang: SIGSTOP of a worker.")  # fmt: skip
@click.option("--plane", "plane_name", type=click.Choice(["cluster", "local"]), default="cluster",
              show_default=True)  # fmt: skip
@click.option("--controller-too", is_flag=True, help="Kill the controller at the same moment.")
@click.option("--case", type=click.Choice(["replicas", "lost-experts"]), default="replicas",
              show_default=True, help="lost-experts: one copy of each; those of the dead rank come "
              "from backups in the memory of other nodes.")  # fmt: skip
@click.option("--unit-bytes", default=1 << 20, show_default=True, help="Of an expert that is lost.")
@click.option("--lease-ttl-s", default=2, show_default=True, help="Of the leading controller.")
@click.option("--ranks", "count", type=click.IntRange(2, MAX_RANKS), default=8, show_default=True)
@click.option("--layers", default=4, show_default=True, help="Exchanges of a step.")
@click.option("--hang-timeout-ms", type=click.IntRange(min=2), default=1000, show_default=True)
@click.option("--launch", type=click.Choice(["service", "inline"]), default="service")
@click.option("--seed", default=1, show_default=True)
@report.output_option
def _command(**options: Any) -> None:
    work = Work(layers=options["layers"])
    what, count = options["what"], options["count"]
    if what == "hang" and options["plane_name"] == "local":
        raise BenchError("a local group follows no wait records; use --plane cluster for a hang")
    if what == "worker" and options["launch"] == "inline":
        raise BenchError("with inline launch there is no worker; use --kill engine")
    lost = options["case"] == "lost-experts"
    if lost and options["plane_name"] == "local":
        raise BenchError("a local group keeps no weights; use --plane cluster for lost experts")
    hang_ms = options["hang_timeout_ms"]
    timeouts = Timeouts(
        hang_timeout_ms=hang_ms,
        suspect_after_ms=min(500, hang_ms // 2),
        node_timeout_ms=max(Timeouts().node_timeout_ms, hang_ms),
    )
    config = recovery_planes.group_config(
        work, count, options["launch"], timeouts, unit_bytes=options["unit_bytes"] if lost else 0
    )
    result = report.Report("recovery")
    if what == "hang":
        result.figures["hang_timeout_ms"] = hang_ms
    plane: Plane = (
        LocalPlane(config)
        if options["plane_name"] == "local"
        else ClusterPlane(
            config,
            with_controller=options["controller_too"],
            lease_ttl_s=options["lease_ttl_s"],
        )
    )
    rng = random.Random(options["seed"])
    try:
        with running(plane, work, count) as fleet:
            victims = [rng.randrange(count) for _ in range(options["kills"])]
            found = [one_kill(fleet, plane, victim, what, rng) for victim in victims]
            if lost:
                count_restored(result, found)
    finally:
        plane.close()
    goal = "recovery"
    if what == "hang":
        goal = "recovery, beyond hang_timeout"
    elif lost:
        goal = "recovery, lost experts restored"
    elif options["controller_too"]:
        goal = "recovery, controller killed too"
    title = f"{what} killed, plane {plane.name}, {count} ranks, {options['launch']} launch"
    summarise(result, found, title, goal)
    result.finish(options["output"])


def main(arguments: Sequence[str]) -> int:
    """Run the bench; returns the exit status."""
    return report.run_command(_command, arguments)
