"""Who decides in the recovery bench: a whole cluster, or a local group whose controller we play."""

import json
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Protocol

from elasticep.balance import RebalancePolicy
from elasticep.bench.ranks import BenchError, environment
from elasticep.bench.recovery_engine import Work
from elasticep.geometry import GroupGeometry
from elasticep.group import GroupConfig, Launch, Timeouts
from elasticep.native.convert import geometry_struct, timeouts_struct
from elasticep.spec import ExchangeSpec
from elasticep.testing.checkpoints import write_checkpoint
from elasticep.testing.cluster import CONTROLLER, Cluster, daemon_name
from elasticep.testing.local_group import LocalGroup, spread
from elasticep.testing.weights import one_tensor

GROUP: Final = "bench"
# The supervisor, as systemd would, gives up on what it has to start more often than this.
_STARTS: Final = 3
_START_WINDOW_S: Final = 11.0
_BACKUP_S: Final = 60.0
RESTORED: Final = "lost experts in place"
COPIES: Final = 2  # of every expert: no single death uncovers one


@dataclass(slots=True)
class Trace:
    """Moments of one recovery that only the deciding side knows, CLOCK_MONOTONIC ns by name."""

    moments: dict[str, int] = field(default_factory=dict)


class Plane(Protocol):
    """What the bench asks of the deciding side."""

    name: str

    def attach_order(self, rank: int) -> dict[str, Any]:
        """Fields of an engine's `attach` order."""

    def first_view(self) -> None:
        """Once all engines are attached or attaching."""

    def check(self) -> None:
        """Raise what made the deciding side end, if it did."""

    def before_kill(self) -> None:
        """Kill what is to die with the rank."""

    def after_kill(self, victim: int, killed_ns: int) -> None:
        """Do what a controller does; returns at once where there is one."""

    def trace(self, victim: int, epoch: int, killed_ns: int) -> Trace:
        """The recovery's moments, after it. `epoch`: of the view without the victim."""

    def reopen(self, victim: int) -> None:
        """Make the seat ready to be taken again."""

    def let_in(self, victim: int) -> None:
        """The victim's engine is attached: a view with all ranks."""

    def close(self) -> None:
        """End everything."""


def group_config(
    work: Work, ranks: int, launch: str, timeouts: Timeouts, *, unit_bytes: int = 0
) -> GroupConfig:
    """A group whose slots hold two copies of every expert, also when one rank is away.

    With `unit_bytes` there is one copy of each, of so many bytes, and the daemons keep them: every
    death loses some.
    """
    slots = -(-COPIES * work.experts // (ranks - 1))
    geometry = GroupGeometry(
        layers=work.layers,
        experts=work.experts,
        topk=work.topk,
        hidden=work.hidden,
        slots_per_rank=slots,
        max_ranks=ranks,
    )
    spec = ExchangeSpec.preset(
        "ROUTED", max_tokens=work.tokens, dispatch_dtype="fp32", combine_dtype="fp32"
    )
    return GroupConfig(
        name=GROUP,
        geometry=geometry,
        exchanges=(("bench", spec),),
        initial_ranks=ranks,
        timeouts=timeouts,
        launch=Launch(launch),
        flap_limit=0,  # the same ranks die again and again here
        spare_copies=0 if unit_bytes else COPIES - 1,
        # What moves in the background would be another kind of recovery.
        rebalance=RebalancePolicy(automatic=False),
        weights=one_tensor(unit_bytes).spec() if unit_bytes else None,
    )


class LocalPlane:
    """No daemons, no controller, no store: what the data plane alone needs."""

    name = "local"

    def __init__(self, config: GroupConfig) -> None:
        self._ranks = config.initial_ranks
        struct = geometry_struct(config)
        self._group = LocalGroup(struct, timeouts=timeouts_struct(config.timeouts))
        self._slots = spread(struct, range(self._ranks), copies=COPIES)
        self._epoch = 0
        self._moments: dict[str, int] = {}

    def attach_order(self, rank: int) -> dict[str, Any]:
        """Socket and ticket of the local group."""
        return {"socket": self._group.socket_path, "ticket": self._group.ticket(rank)}

    def first_view(self) -> None:
        """Stage epoch 1 on all."""
        self._stage(range(self._ranks))

    def _stage(self, members: Sequence[int], only: Sequence[int] | None = None) -> None:
        self._epoch += 1
        previous = self._epoch - 1
        self._group.stage(self._epoch, previous, list(members), self._slots, only=only)

    def check(self) -> None:
        """It is this process."""

    def before_kill(self) -> None:
        """Nothing else is there."""

    def after_kill(self, victim: int, killed_ns: int) -> None:
        """Wait for the watcher's event, re-weight the replicas that are left, stage."""
        group = self._group

        def dead() -> list[Any]:
            return [e for e in group.deaths if e.key == victim and e.at_ns >= killed_ns]

        group.wait_for(lambda: bool(dead()), f"the death of rank {victim}")
        self._moments = {"dead word": dead()[0].at_ns, "proposed": time.monotonic_ns()}
        self._stage([rank for rank in range(self._ranks) if rank != victim])
        self._moments["staged by all, as told"] = time.monotonic_ns()

    def trace(self, victim: int, epoch: int, killed_ns: int) -> Trace:
        """What `after_kill` noted."""
        return Trace(dict(self._moments))

    def reopen(self, victim: int) -> None:
        """End what is left of the worker and grant the seat anew."""
        with suppress(AssertionError):  # inline: there is no worker
            self._group.kill_worker(victim)
        self._group.open_seat(victim)

    def let_in(self, victim: int) -> None:
        """Stage on the joiner first: others may see the view only when it waits for them."""
        everyone = range(self._ranks)
        self._stage(everyone, only=[victim])
        self._epoch -= 1
        self._stage(everyone, only=[rank for rank in everyone if rank != victim])

    def close(self) -> None:
        """End the workers."""
        self._group.close()


class ClusterPlane:
    """etcd, a controller and two node daemons, as `elasticep up` runs them."""

    name = "cluster"

    def __init__(
        self,
        config: GroupConfig,
        *,
        nodes: int = 2,
        with_controller: bool = False,
        lease_ttl_s: int = 2,
    ) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._keeps_weights = config.weights is not None
        self._config = config.to_proto().SerializeToString().hex()
        self._kill_controller = with_controller
        self._controller_kills: list[float] = []
        self._nodes = nodes
        self._cluster = Cluster(
            group=GROUP,
            ranks=config.initial_ranks,
            nodes=nodes,
            environment=self._weights(config),
        )
        with environment({"ELASTICEP_CONTROLLER_LEASE_TTL_S": str(lease_ttl_s)}):
            self._cluster.__enter__()
        self._wall_offset_ns = time.time_ns() - time.monotonic_ns()

    def _weights(self, config: GroupConfig) -> dict[str, dict[str, str]]:
        """A checkpoint for the daemons, and room for a backup of all of it."""
        spec, g = config.weights, config.geometry
        if spec is None:
            return {}
        self._folder = tempfile.TemporaryDirectory(prefix="eep-bench-")
        family = one_tensor(spec.unit_bytes)
        written = write_checkpoint(
            Path(self._folder.name), family, layers=g.layers, experts=g.experts, shards=1
        )
        more = {
            "ELASTICEP_DAEMON_CHECKPOINT": str(written.path),
            "ELASTICEP_DAEMON_BACKUP_BYTES": str(2 * g.layers * g.experts * spec.unit_bytes),
        }
        return {daemon_name(node): more for node in range(self._nodes)}

    def attach_order(self, rank: int) -> dict[str, Any]:
        """The daemon that offers the rank."""
        return {"daemon": self._cluster.socket_of(rank), "group": GROUP, "config": self._config}

    def first_view(self) -> None:
        """The controller makes it."""

    def before_kill(self) -> None:
        """Kill the controller if that is asked for, just before, so that it cannot act any more;
        let backups be whole.
        """
        if self._keeps_weights:
            self._await_backups()
        if not self._kill_controller:
            return

        def ready() -> bool:
            since = time.monotonic() - _START_WINDOW_S
            recent = sum(at > since for at in self._controller_kills)
            return recent < _STARTS and CONTROLLER in self._cluster.pids

        while not ready():
            self._cluster.events(0.1)
        self._controller_kills.append(time.monotonic())
        kill(self._cluster.pids.pop(CONTROLLER), signal.SIGKILL)

    def _await_backups(self) -> None:
        def whole() -> bool:
            def last(name: str, event: str) -> int:
                found = [line["epoch"] for line in self._lines(name) if line.get("event") == event]
                return max(found, default=0)

            epoch = last(CONTROLLER, "view.adopted")
            names = [daemon_name(node) for node in range(self._nodes)]
            return epoch > 0 and all(last(name, "backup.complete") >= epoch for name in names)

        end = time.monotonic() + _BACKUP_S
        while not whole():
            if time.monotonic() > end:
                raise BenchError(f"backups are not whole within {_BACKUP_S:g} s")
            self._cluster.events(0.05)

    def check(self) -> None:
        """`Unavailable` with the end of the log of what ended."""
        self._cluster.events()

    def after_kill(self, victim: int, killed_ns: int) -> None:
        """The controller does it."""

    def trace(self, victim: int, epoch: int, killed_ns: int) -> Trace:
        """Moments out of the logs of the daemons and the controller."""
        self._cluster.events()
        moments: dict[str, int] = {}

        def note(name: str, at_ns: int, pick: Any) -> None:
            moments[name] = pick(moments[name], at_ns) if name in moments else at_ns

        for line in self._log_lines():
            at_ns = self._when(line)
            if at_ns < killed_ns:
                continue
            match line.get("event"):
                case "rank.dead" if line.get("rank") == victim:
                    note("daemon knows", at_ns, min)
                case "view.proposed" if line.get("epoch") == epoch:
                    note("proposed", at_ns, min)
                case "weights.filled" if line.get("epoch") == epoch:
                    note(RESTORED, at_ns, max)
                case "view.staged" if line.get("epoch") == epoch:
                    note("staged by all, as told", at_ns, max)
        return Trace(moments)

    def _log_lines(self) -> list[dict[str, Any]]:
        names = (CONTROLLER, *(daemon_name(node) for node in range(self._nodes)))
        return [line for name in names for line in self._lines(name)]

    def _lines(self, name: str) -> list[dict[str, Any]]:
        found = []
        for text in self._cluster.log(name).splitlines():
            with suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict):
                    found.append(line)
        return found

    def _when(self, line: dict[str, Any]) -> int:
        try:
            moment = datetime.fromisoformat(str(line.get("timestamp", "")))
        except ValueError:
            return 0
        return round(moment.timestamp() * 1e6) * 1000 - self._wall_offset_ns

    def reopen(self, victim: int) -> None:
        """The daemon does it."""

    def let_in(self, victim: int) -> None:
        """The controller does it."""

    def close(self) -> None:
        """End it all."""
        self._cluster.stop()
        if self._folder is not None:
            self._folder.cleanup()


def kill(pid: int, number: int) -> int:
    """Send a signal; returns when, read before it was sent.

    Raises:
        BenchError: the process is gone already, or is not known.
    """
    if pid <= 1:  # 0 and below are process groups: our own, or everyone
        raise BenchError(f"process id {pid} is none that a bench may kill")
    at_ns = time.monotonic_ns()
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        raise BenchError(f"process {pid}, which was to be killed, had ended before") from None
    return at_ns
