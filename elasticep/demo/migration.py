"""The demo's kill while experts move: which copies are under way, as the daemons' logs say it."""

import datetime
import json
import re
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from elasticep.demo.settings import DemoSettings, Kill
from elasticep.testing.cluster import Cluster, daemon_name

RATE: Final = 300_000
"""Bytes of weights per second and node: a copy takes about a third of a second."""
_LOOK_S: Final = 0.02
_RANK: Final = re.compile(r"rank (\d+) o[fn] ")
_TOLD: Final = (
    *("weights.filling", "weights.filled", "weights.copying", "weights.copied"),
    "weights.source_failed",
)

_Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Copy:
    """An expert on its way from rank to rank."""

    layer: int
    expert: int
    source: int
    target: int

    def __str__(self) -> str:
        return f"layer {self.layer} expert {self.expert} from rank {self.source} to {self.target}"


@dataclass(slots=True)
class Migration:
    """Follows copies between ranks through the daemons' logs.

    Args:
        cluster: whose daemons log at level debug.
        settings: of the run.
    """

    cluster: Cluster
    settings: DemoSettings
    events: list[_Event] = field(default_factory=list)
    killed_at: float = 0.0  # seconds since 1970, as the logs say it
    flight: Copy | None = None
    made: int = 0  # copies at the kill
    asked: int = 0  # copies of the view that was being staged
    epoch: int = 0  # of that view
    _read: dict[int, int] = field(default_factory=dict)  # node -> bytes of its log
    _looked: float = 0.0

    def look(self) -> bool:
        """Whether a migration is in its middle: some copies are made, one is under way."""
        if time.monotonic() - self._looked < _LOOK_S:
            return False
        self._take()
        self._looked = time.monotonic()
        under_way = self._under_way()
        self.made = sum(e["kind"] == "replica" for e in self._of("weights.copied"))
        if not (self.made and under_way):
            return False
        self.flight = under_way[0]
        filling = self._of("weights.filling")
        self.epoch = max(e["epoch"] for e in filling if e["rank"] == self.flight.target)
        self.asked = sum(e["experts"] for e in filling if e["epoch"] == self.epoch)
        return True

    def kill(self) -> None:
        """The kill is about to come."""
        self.killed_at = time.time()

    @property
    def told(self) -> str:
        """Part of a line for the timeline; empty if nothing moves."""
        if self.flight is None:
            return ""
        return f"in mid-migration ({self.made} of {self.asked} copies made): {self.flight}"

    def details(self, epochs: Collection[int]) -> dict[str, Any]:
        """Figures for the report.

        Args:
            epochs: in which steps were complete.
        """
        self._take()
        flight = self.flight
        if flight is None:
            return {"in_flight": False}
        ended = [
            e
            for e in self._of("weights.copied")
            if (_target(e), e["layer"], e["expert"]) == (flight.target, flight.layer, flight.expert)
        ] + [
            e
            for e in self._of("weights.filled")
            if (e["rank"], e["epoch"]) == (flight.target, self.epoch)
        ]
        failed = [e for e in self._of("weights.source_failed") if _seconds(e) >= self.killed_at]
        after: Counter[str] = Counter()
        for e in self._of("weights.filled"):
            if _seconds(e) >= self.killed_at and e["epoch"] in epochs:
                after.update(e["sources"])
        return {
            # Neither this expert nor the view's last one had arrived when the kill came.
            "in_flight": all(_seconds(e) >= self.killed_at for e in ended),
            "epoch": self.epoch,
            "source": flight.source,
            "target": flight.target,
            "layer": flight.layer,
            "expert": flight.expert,
            "copies_made": self.made,
            "copies_asked": self.asked,
            "sources_failed": dict(Counter(f"{e['source']}: {e['failure']}" for e in failed)),
            "copied_after": dict(sorted(after.items())),
        }

    def _under_way(self) -> list[Copy]:
        """Copies from rank to rank that have begun and not ended, the latest first."""
        ended = {_key(e) for e in (*self._of("weights.copied"), *self._of("weights.source_failed"))}
        filled = {(e["rank"], e["epoch"]) for e in self._of("weights.filled")}
        open_now = {
            e["rank"]
            for e in self._of("weights.filling")
            if e["epoch"] > 1 and (e["rank"], e["epoch"]) not in filled
        }
        found = []
        for e in self._of("weights.copying"):
            source, target = _RANK.match(e["source"]), _target(e)
            if source is None or target not in open_now or _key(e) in ended:
                continue
            copy = Copy(e["layer"], e["expert"], int(source[1]), target)
            nodes = {self.cluster.node_of(rank) for rank in (copy.source, copy.target)}
            # A daemon that is source and target in one would show nothing of either.
            apart = self.settings.kill is not Kill.DAEMON or self.settings.nodes == 1
            if copy.source != target and (len(nodes) == 2 or apart):
                found.append(copy)
        return found[::-1]

    def _of(self, name: str) -> list[_Event]:
        return [e for e in self.events if e["event"] == name]

    def _take(self) -> None:
        for node in range(self.cluster.nodes):
            path = Path(self.cluster.folder) / f"{daemon_name(node)}.log"
            with path.open("rb") as log:
                log.seek(self._read.get(node, 0))
                data = log.read()
            whole = data[: data.rfind(b"\n") + 1]  # the last line may be half written
            self._read[node] = self._read.get(node, 0) + len(whole)
            for line in whole.splitlines():
                if b'"weights.' in line:
                    event = json.loads(line)
                    if event["event"] in _TOLD:
                        self.events.append(event)


def _target(event: _Event) -> int:
    """The rank that gets the expert; -1: a backup."""
    if "rank" in event:
        return int(event["rank"])
    named = _RANK.match(event.get("into", ""))
    return int(named[1]) if named is not None else -1


def _key(event: _Event) -> tuple[str, int, int, str]:
    return event.get("into", ""), event["layer"], event["expert"], event["source"]


def _seconds(event: _Event) -> float:
    return datetime.datetime.fromisoformat(event["timestamp"]).timestamp()
