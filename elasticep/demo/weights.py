"""What the logs of the demo's daemons say about expert weights."""

import json
from collections import Counter
from collections.abc import Container, Iterator
from contextlib import suppress
from typing import Any, Final

from elasticep.demo.settings import DemoSettings, Restore
from elasticep.testing.cluster import Cluster, daemon_name

_ROOM: Final = 2  # of what all experts take: slots of a backup come by the layer


def environment(settings: DemoSettings) -> dict[str, dict[str, str]]:
    """Variables of the daemons: room for a backup, if lost experts are to come from there."""
    if settings.restore is not Restore.BACKUP:
        return {}
    layers, experts = settings.sizes.layers, settings.sizes.experts
    room = _ROOM * layers * experts * settings.sizes.weights.unit_bytes
    more = {"ELASTICEP_DAEMON_BACKUP_BYTES": str(room)}
    return {daemon_name(node): more for node in range(settings.nodes)}


def backed_up(cluster: Cluster) -> bool:
    """Whether every node has what it is to keep for the others."""
    return all(any(_events(cluster, node, "backup.complete")) for node in range(cluster.nodes))


def restored(cluster: Cluster, epochs: Container[int]) -> dict[str, int]:
    """Experts that were put in place for `epochs` after the first, by where they came from.

    In others nobody served: as engines leave at the end, what they held may be restored, too.
    """
    found: Counter[str] = Counter()
    for node in range(cluster.nodes):
        for event in _events(cluster, node, "weights.filled"):
            if event["epoch"] > 1 and event["epoch"] in epochs:
                found.update(event["sources"])
    return dict(sorted(found.items()))


def _events(cluster: Cluster, node: int, name: str) -> Iterator[dict[str, Any]]:
    for line in cluster.log(daemon_name(node)).splitlines():
        with suppress(ValueError):  # it may be half written
            event = json.loads(line)
            if isinstance(event, dict) and event.get("event") == name:
                yield event
