"""All nodes and groups that a leader knows: who is heard of, and which group hears what. Pure.

A node has one session for all its groups. It is heard of with every message; a group whose
`node_timeout` passes without one takes the node's ranks for gone. That is judged here and not by
the session's end: a daemon that restarts within the timeout keeps its ranks.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from elasticep.control import events as ev
from elasticep.control.background import Background
from elasticep.control.deletion import Deleted, delete, leftovers
from elasticep.control.events import Outcome, SeatReport
from elasticep.control.membership import Membership
from elasticep.control.planning import PlanJob, Planned
from elasticep.control.records import Endpoint, Loaded, check_room
from elasticep.control.seats import Phase
from elasticep.control.state import Past
from elasticep.errors import ConfigError, UnknownGroup, UsageError
from elasticep.group import GroupConfig

# A new leader gives nodes this much longer to come to it before it misses them: at least as long
# as they take to leave one that was stopped.
TAKEOVER_GRACE_MS: Final = 3_000
# A node that is gone, and of which no seat is left, is kept so long for who looks at the status.
FORGET_MS: Final = 60_000
MAX_NODES: Final = 4_096  # that said hello and are not forgotten; their endpoints are kept
MAX_GROUPS: Final = 256
MAX_SEATS: Final = 4_096  # of one node
MAX_PAST: Final = 1_024  # names of deleted groups, whose numbers are kept
_DEFAULT_HEARTBEAT_MS: Final = 500
_MOST_HEARTBEAT_MS: Final = 500  # a node leaves a controller that it has not heard for 3 s

Outcomes = list[tuple[str, Outcome]]
"""(group, what is to be done for it), in order."""


@dataclass(slots=True)
class Node:
    """A node that said hello to some leader once.

    Attributes:
        endpoint: how to reach its daemon.
        session_id: what its daemon calls its process; empty: no session with this leader yet.
        connected: whether that session is open.
        heard_ms: when it was last heard of; after a change of the leader some time ahead.
        seats: (group, rank) -> what it said last.
    """

    endpoint: Endpoint
    heard_ms: int
    session_id: str = ""
    connected: bool = False
    seats: dict[tuple[str, int], SeatReport] = field(default_factory=dict)


class Cluster:
    """The state of a leader.

    Args:
        loaded: what the store holds.
        now_ms: the time.
    """

    def __init__(self, loaded: Loaded, now_ms: int) -> None:
        later = now_ms + TAKEOVER_GRACE_MS
        self.nodes = {name: Node(endpoint, later) for name, endpoint in loaded.nodes.items()}
        self._deleted = dict(loaded.past)
        # A controller of before that knew no deletions may have created a group anew from 1 on.
        self.past = {
            name: used
            for name, used in loaded.past.items()
            if name not in loaded.groups or used.precedes(loaded.groups[name][1])
        }
        self.groups = {
            name: Membership(config, now_ms, saved, self.past.get(name))
            for name, (config, saved) in loaded.groups.items()
        }
        self.leaving: dict[str, Membership] = {}  # deleted, and that is not written yet
        self.background = {
            name: Background(self.groups[name], saved.rebalance, now_ms)
            for name, (_, saved) in loaded.groups.items()
        }
        self.jobs: list[PlanJob] = []

    def membership(self, group: str) -> Membership:
        """A group; `UnknownGroup` when there is none of that name."""
        if group not in self.groups:
            known = ", ".join(sorted(self.groups)) or "none"
            raise UnknownGroup(f"there is no group {group!r}; known are: {known}")
        return self.groups[group]

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """Node -> how to reach its daemon."""
        return {name: node.endpoint for name, node in self.nodes.items()}

    @property
    def heartbeat_ms(self) -> int:
        """How often nodes get a heartbeat: a third of the shortest node timeout, at most 0.5 s."""
        timeouts = [m.config.timeouts.node_timeout_ms for m in self.groups.values()]
        return min(min(timeouts) // 3, _MOST_HEARTBEAT_MS) if timeouts else _DEFAULT_HEARTBEAT_MS

    # ---- nodes

    def check_node(self, endpoint: Endpoint, now_ms: int) -> None:
        """Raise `ConfigError` when there is no room for a node, or it is another one's namesake.

        A daemon that starts again has the endpoint of before. Another endpoint, while the one known
        under this name is still heard of, is a second daemon; it would end the seats of the first.
        """
        name, known = endpoint.node, self.nodes.get(endpoint.node)
        if known is not None and known.connected and known.endpoint != endpoint:
            silent_ms = now_ms - known.heard_ms
            if silent_ms < 2 * self.heartbeat_ms:
                raise ConfigError(
                    f"node {name!r} is the daemon at {known.endpoint.grpc_address}, heard of "
                    f"{max(0, silent_ms)} ms ago; give this one a name of its own (daemon.node)"
                )
        if name not in self.nodes and len(self.nodes) >= MAX_NODES:
            raise ConfigError(
                f"node {name!r} is new, and {MAX_NODES} nodes are known already; say of those "
                "that are gone that they are: elasticep node off NODE"
            )

    def hello(
        self,
        endpoint: Endpoint,
        session_id: str,
        seats: Iterable[tuple[str, SeatReport]],
        now_ms: int,
    ) -> Outcomes:
        """A node's session begins; it takes the place of an earlier one."""
        node = self.nodes.setdefault(endpoint.node, Node(endpoint, now_ms))
        node.endpoint, node.session_id = endpoint, session_id
        node.connected, node.heard_ms = True, now_ms
        node.seats = {(group, report.rank): report for group, report in seats}
        outcomes: Outcomes = [
            (group, Outcome(after=sends))  # before anything of a group that is new
            for group, sends in leftovers(endpoint.node, node.seats, self.past)
        ]
        for group, membership in self.groups.items():
            reports = _of_group(node.seats, group)
            held = any(s.node == endpoint.node for s in membership.seats.values())
            if reports or held:
                hello = ev.NodeHello(endpoint.node, reports, endpoint.domain)
                outcomes.append((group, membership.handle(hello, now_ms)))
        return outcomes

    def disconnected(self, name: str, now_ms: int) -> Outcomes:
        """A node's session ended, and none took its place."""
        node = self.nodes.get(name)
        if node is None:
            return []
        node.connected = False
        return self._all(ev.NodeDisconnected(name), now_ms)

    def heard(self, name: str, now_ms: int) -> None:
        """A message came from a node."""
        node = self.nodes[name]
        node.heard_ms = max(node.heard_ms, now_ms)

    def node_off(self, name: str, why: str, now_ms: int) -> tuple[dict[str, list[int]], Outcomes]:
        """An operator says that a node is off: group -> ranks whose seats that frees, and outcomes.

        Raises:
            UsageError: there is no such node, or it may be alive.
        """
        node = self.nodes.get(name)
        if node is None:
            known = ", ".join(sorted(self.nodes)) or "none"
            raise UsageError(f"there is no node {name!r}; known are: {known}")
        limit_ms, silent_ms = self._limit_ms(), now_ms - node.heard_ms
        if node.connected or silent_ms < limit_ms:
            heard = "is connected" if node.connected else f"was heard of {max(0, silent_ms)} ms ago"
            raise UsageError(
                f"node {name!r} {heard}, so its processes may live; drain its ranks and stop its "
                f"daemon, and say that it is off when nothing was heard of it for {limit_ms} ms"
            )
        kept = {group: _kept_for(m, name) for group, m in self.groups.items()}
        outcomes = self._all(ev.NodeOff(name, why), now_ms)
        del self.nodes[name]
        return {group: ranks for group, ranks in kept.items() if ranks}, outcomes

    def _limit_ms(self) -> int:
        """After so long a silence a node's ranks are over in every group."""
        timeouts = [m.config.timeouts.node_timeout_ms for m in self.groups.values()]
        return max(timeouts, default=0)

    def state_of(self, name: str, now_ms: int) -> str:
        """A node's state in a word: connected, away, gone."""
        node = self.nodes[name]
        if node.connected:
            return "connected"
        return "gone" if now_ms - node.heard_ms >= self._limit_ms() else "away"

    def forget(self, now_ms: int) -> list[str]:
        """Drop the nodes that are gone for a while and of which no seat is left; their names. One
        that comes again says hello like a new one.
        """
        silent_ms = max(FORGET_MS, self._limit_ms())
        names = [
            name
            for name, node in self.nodes.items()
            if not node.connected
            and now_ms - node.heard_ms >= silent_ms
            and not any(_kept_for(m, name) for m in self.groups.values())
        ]
        for name in names:
            del self.nodes[name]
        return names

    def report(self, group: str, event: ev.Event, now_ms: int) -> Outcomes:
        """What a node says of a rank, or an operator's drain."""
        if isinstance(event, ev.SeatChanged):
            key, seats = (group, event.report.rank), self.nodes[event.node].seats
            if key in seats or len(seats) < MAX_SEATS:
                seats[key] = event.report
        if group not in self.groups:
            return []  # a node may offer seats to a group that is not made yet
        if isinstance(event, ev.LoadReport):
            return [(group, self.background[group].load(event))]
        return [(group, self.groups[group].handle(event, now_ms))]

    def tick(self, now_ms: int) -> tuple[Outcomes, list[str]]:
        """Time has passed. Returns outcomes, and nodes whose sessions are to be dropped.

        A node that is taken for gone must say hello again, so that it hears what it missed.
        """
        outcomes: Outcomes = []
        drop: list[str] = []
        for group, membership in self.groups.items():
            limit_ms = membership.config.timeouts.node_timeout_ms
            for name in sorted({s.node for s in membership.seats.values() if s.live}):
                silent_ms = now_ms - self.nodes[name].heard_ms if name in self.nodes else limit_ms
                if silent_ms >= limit_ms:
                    gone = ev.NodeGone(name, f"node {name} was not heard of for {silent_ms} ms")
                    outcomes.append((group, membership.handle(gone, now_ms)))
                    drop.append(name)
            outcomes.append((group, membership.handle(ev.Tick(), now_ms)))
            more, job = self.background[group].tick(now_ms)
            outcomes += [(group, outcome) for outcome in more]
            self.jobs += [job] if job is not None else []
        return outcomes, drop

    def take_jobs(self) -> list[PlanJob]:
        """Plans that are to be made, each answered by `planned`."""
        jobs, self.jobs = self.jobs, []
        return jobs

    def planned(self, planned: Planned, now_ms: int) -> Outcomes:
        """A plan was made."""
        group = planned.job.view.group
        if group not in self.background:
            return []  # it was deleted meanwhile
        return [(group, self.background[group].planned(planned, now_ms))]

    def _all(self, event: ev.Event, now_ms: int) -> Outcomes:
        return [(group, m.handle(event, now_ms)) for group, m in self.groups.items()]

    # ---- groups

    def create_group(self, config: GroupConfig, now_ms: int) -> tuple[bool, Outcomes]:
        """Create a group, or confirm that it exists with the same config (`GroupMismatch`).

        Raises:
            ConfigError: there are too many, or this one is too large for the store.
        """
        existing = self.groups.get(config.name)
        if existing is not None:
            existing.config.require_same(config)
            return False, []
        if len(self.groups) >= MAX_GROUPS:
            raise ConfigError(
                f"group {config.name!r} is one too many; a controller has {MAX_GROUPS} "
                "at most; serve it by others, on an etcd of their own"
            )
        check_room(config)
        past = self.past.get(config.name)
        membership = self.groups[config.name] = Membership(config, now_ms, past=past)
        self.background[config.name] = Background(membership, None, now_ms)
        outcomes: Outcomes = []
        for name, node in self.nodes.items():
            reports = _of_group(node.seats, config.name)
            if node.connected and reports:
                hello = ev.NodeHello(name, reports, node.endpoint.domain)
                outcomes.append((config.name, membership.handle(hello, now_ms)))
        return True, outcomes

    def delete_group(self, name: str, why: str, *, force: bool) -> Deleted | None:
        """Delete a group. None: there is none, but one of that name was deleted before.

        Raises:
            UnknownGroup: there is no such group, and was none.
            UsageError: engines hold ranks of it, and `force` is not said.
            ConfigError: too many names were used.
        """
        if name not in self.groups and name in self.past:
            return None
        membership = self.membership(name)
        if name not in self._deleted and len(self._deleted) >= MAX_PAST:
            raise ConfigError(
                f"group {name!r} would be one deleted group too many: the numbers of {MAX_PAST} "
                "names are kept; create groups under names that were used before"
            )
        connected = (node.endpoint.node for node in self.nodes.values() if node.connected)
        deleted = delete(membership, connected, why, force=force)
        del self.groups[name], self.background[name]
        self.jobs = [job for job in self.jobs if job.view.group != name]
        past = deleted.past.beyond(self._deleted.get(name, Past()))
        self.past[name] = self._deleted[name] = past
        self.leaving[name] = membership
        return replace(deleted, past=past)


def _kept_for(membership: Membership, node: str) -> list[int]:
    """Ranks whose seats nobody else is given, because something of the node may hold them."""
    seats = membership.seats.values()
    return [s.rank for s in seats if s.node == node and s.phase is not Phase.GONE]


def _of_group(seats: Mapping[tuple[str, int], SeatReport], group: str) -> tuple[SeatReport, ...]:
    return tuple(report for (name, _), report in sorted(seats.items()) if name == group)
