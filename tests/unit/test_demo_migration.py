"""Which copies are under way, out of what daemons logged."""

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from elasticep.demo.migration import Migration
from elasticep.demo.scenario import Scenario
from elasticep.demo.settings import DemoSettings, Kill, Side


class Nodes:
    """Two nodes with two ranks each, of which there are only logs."""

    nodes = 2

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for node in range(self.nodes):
            (folder / f"daemon-{node}.log").touch()

    def node_of(self, rank: int) -> int:
        return rank // 2

    def log(self, on: int, event: str, at_s: float, **more: Any) -> None:
        time = datetime.datetime.fromtimestamp(at_s, datetime.UTC).isoformat()
        with (self.folder / f"daemon-{self.node_of(on)}.log").open("a") as log:
            log.write(json.dumps({"event": f"weights.{event}", "timestamp": time, **more}) + "\n")

    def fill(self, rank: int, epoch: int, at_s: float, event: str = "filling") -> None:
        more = {"experts": 3} if event == "filling" else {"sources": {"replica": 3}}
        self.log(rank, event, at_s, rank=rank, epoch=epoch, **more)

    def copy(self, event: str, source: int, to: int, expert: int, at_s: float) -> None:
        self.log(
            to, event, at_s, into=f"rank {to} of group 'demo'", layer=0, expert=expert,
            source=f"rank {source} on node-{self.node_of(source)}", kind="replica", failure="gone",
        )  # fmt: skip


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


def looked(nodes: Nodes, kill: Kill = Kill.WORKER) -> Migration:
    settings = DemoSettings(scenario=Scenario.REBALANCE, kill=kill, side=Side.SOURCE)
    migration = Migration(nodes, settings)  # type: ignore[arg-type]
    migration.look()
    return migration


def test_a_copy_is_in_the_middle_when_another_one_is_made_and_it_has_begun(nodes: Nodes) -> None:
    nodes.fill(2, 1, 1.0)
    nodes.fill(2, 1, 2.0, "filled")
    nodes.copy("copying", 0, 2, 3, 3.0)  # of no view that is being staged
    assert looked(nodes).flight is None
    nodes.fill(2, 2, 4.0)
    nodes.copy("copied", 0, 2, 3, 4.5)
    assert looked(nodes).flight is None
    nodes.copy("copying", 1, 2, 5, 5.0)
    migration = looked(nodes)
    assert str(migration.flight) == "layer 0 expert 5 from rank 1 to 2"
    assert migration.told.startswith("in mid-migration (1 of 3 copies made): layer 0 expert 5")
    nodes.copy("source_failed", 1, 2, 5, 5.5)
    assert looked(nodes).flight is None


def test_a_daemon_is_killed_only_where_it_is_one_end(nodes: Nodes) -> None:
    nodes.fill(2, 2, 4.0)
    nodes.copy("copied", 0, 2, 3, 4.5)
    nodes.copy("copying", 3, 2, 5, 5.0)  # within a node
    assert looked(nodes, Kill.DAEMON).flight is None
    assert looked(nodes).flight is not None


@pytest.mark.parametrize("event", ["copied", "filled", None])
def test_a_kill_that_came_too_late_is_said_to_be(nodes: Nodes, event: str | None) -> None:
    nodes.fill(2, 2, 4.0)
    nodes.copy("copied", 0, 2, 3, 4.5)
    nodes.copy("copying", 1, 2, 5, 5.0)
    migration = looked(nodes)
    migration.killed_at = 6.0
    if event == "copied":
        nodes.copy("copied", 1, 2, 5, 5.9)
    elif event == "filled":
        nodes.fill(2, 2, 5.9, "filled")
    else:
        nodes.copy("source_failed", 1, 2, 5, 6.1)
    nodes.fill(2, 3, 7.0, "filled")
    nodes.fill(3, 4, 8.0, "filled")  # in which nobody served
    told = migration.details({1, 3})
    assert told["in_flight"] is (event is None)
    assert told["copied_after"] == {"replica": 3}
    assert told["sources_failed"] == ({} if event else {"rank 1 on node-0: gone": 1})
    assert (told["copies_made"], told["copies_asked"], told["epoch"]) == (1, 3, 2)
