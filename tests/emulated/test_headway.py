"""Copies to a GPU that take longer than a member has for staging a view: a whole cluster."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from elasticep.cli.main import cli
from elasticep.control.decisions import STAGE_TIMEOUT_MS
from elasticep.testing import emulated_cuda
from elasticep.testing.checkpoints import Family, WrittenCheckpoint, write_checkpoint
from elasticep.testing.node import wait_for
from tests.emulated.slow_engine import SLOW_RANK
from tests.gpu import weights_scenes
from tests.gpu.client_cluster import Cluster

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(400)
SLOW_S = 120.0
LAYERS, EXPERTS, HIDDEN = 4, 8, 512
BETWEEN_MS = 450  # two copies
COPIES = 16  # two more experts in each layer, of two tensors


def written(folder: Path) -> WrittenCheckpoint:
    """As the engine's model wants it, with more layers."""
    tensors = {
        "gate_proj.weight": ("w1", "int8", (HIDDEN,)),
        "down_proj.weight": ("w2", "int8", (4, HIDDEN)),
    }
    family = Family("model.layers.{layer}.mlp.experts.{expert}.{tensor}", tensors)
    return write_checkpoint(folder, family, layers=LAYERS, experts=EXPERTS, shards=1)


class SlowCluster(Cluster):
    """Two ranks, one of which has a bus whose pace is set."""

    def __init__(self, folder: Path) -> None:
        checkpoint = written(folder / "model")
        config = weights_scenes.config(2, checkpoint)
        config["geometry"]["layers"] = LAYERS
        self._bus = folder / "bus"
        self._bus.write_text("free")
        super().__init__(
            config,
            gpus=2,
            engine="tests.emulated.slow_engine",
            flags=(
                *("--checkpoint", f"{weights_scenes.NAME}={checkpoint.path}"),
                *("--metrics-port", "0"),
            ),
            environment=emulated_cuda.environment(sms=2),
            attaching={"checkpoint": str(checkpoint.path), "bus": str(self._bus)},
        )

    def bus(self, pace: str) -> None:
        """Set it; see `slow_engine`."""
        self._bus.write_text(pace)
        now = self._bus.with_suffix(".now")
        wait_for(lambda: (now.exists() and now.read_text() == pace) or None, f"the bus: {pace}")

    def ask(self, view: dict[str, Any], more: int) -> None:
        """Ask for `more` further experts on each rank; the view says what the first one has."""
        rows = []
        for row in view["slots"]:
            here = sorted(set(row) - {-1})
            there = [e for e in range(EXPERTS) if e not in here]
            size = len(here) + more
            rows.append([*here, *there][:size] + [*there, *here][:size])
        plan = self.folder / "plan.json"
        plan.write_text(json.dumps({"physical_to_logical_map": rows}))
        command = ["rebalance", "--controllers", self.controllers, weights_scenes.NAME]
        told = CliRunner().invoke(cli, [*command, "--import", str(plan)])
        assert told.exit_code == 0, told.output

    def said(self, event: str) -> list[dict[str, Any]]:
        """The controller's log."""
        lines = self._controller_log.read_text().splitlines()
        events = [json.loads(line) for line in lines if line.startswith("{")]
        return [found for found in events if found["event"] == event]

    def copying(self) -> tuple[int, int, int]:
        """What the daemon says of the slow rank's copies: epoch, bytes done, bytes in all."""
        arenas = self.daemons[0].status().arenas
        (arena,) = [a for a in arenas if a.rank == SLOW_RANK and not a.backup]
        return arena.copying_epoch, arena.copied_bytes, arena.copying_bytes

    def metrics(self) -> str:
        """The daemon's page."""
        port = self.daemons[0].events("daemon.ready")[-1]["metrics_port"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
            text: str = page.read().decode()
        return text


def test_who_copies_to_its_gpu_for_long_is_not_late_and_who_stands_still_is(
    tmp_path: Path,
) -> None:
    with SlowCluster(tmp_path) as running:
        first, second = running.attach(0, 1)
        weights_scenes.serve(first, second, timeout_s=SLOW_S)
        view = first.until(SLOW_S, event="view", members=[0, 1])
        # Slowly, but it goes on.
        running.bus(str(BETWEEN_MS))
        running.ask(view, 2)
        epoch = wait_for(lambda: running.copying()[0], "word of copies")
        before_s, seen = view["copied"]["seconds"], set()

        def over() -> bool:
            view, *sizes = running.copying()
            if view == epoch:
                seen.add(tuple(sizes))
            return view != epoch

        wait_for(over, "the copies to end", SLOW_S)
        view = first.until(SLOW_S, event="view", epoch=epoch, members=[0, 1])
        second.until(SLOW_S, event="view", epoch=epoch, members=[0, 1])
        assert (view["copied"]["seconds"] - before_s) * 1000 > STAGE_TIMEOUT_MS
        (total,) = {total for _, total in seen}
        assert total == COPIES * view["copied"]["bytes"] // view["copied"]["slots"] // 2
        assert len(seen) > 5
        assert not running.said("staging.failed")
        # Now it stands still in the middle.
        running.bus("hold")
        running.ask(view, 2)
        epoch = wait_for(lambda: running.copying()[0], "word of copies")
        what = {"group": weights_scenes.NAME, "rank": str(SLOW_RANK), "state": "wanted"}
        labels = ",".join(f'{name}="{value}"' for name, value in what.items())
        wait_for(
            lambda: (
                f"elasticep_weights_gpu_copy_bytes{{{labels}}} {total:.1f}" in running.metrics()
            ),
            "the daemon's page",
        )
        shown = CliRunner().invoke(cli, ["status", "--daemon", running.daemons[0].grpc_socket])
        assert f"to GPU for epoch {epoch}: 0.0 of" in " ".join(shown.output.split())
        (failed,) = wait_for(lambda: running.said("staging.failed"), "it to be late")
        assert (failed["rank"], failed["epoch"]) == (SLOW_RANK, epoch)
        assert f"did not stage epoch {epoch} within {STAGE_TIMEOUT_MS} ms" in failed["reason"]
        # The next view is without that, also if it was ready at last before word of this one came.
        running.bus("free")
        after = first.until(SLOW_S, event="view", members=[0, 1], slots=view["slots"])
        assert after["epoch"] > epoch
        # Nor does it get anything new, unless nobody else is left to have it.
        second.say("stop")
        assert second.result(SLOW_S)["complete"] > 0
        everything = [list(range(EXPERTS))] * LAYERS
        while view["members"] != [0] or [sorted(set(row)) for row in view["slots"]] != everything:
            view = first.until(SLOW_S, event="view")
        assert any(proposed["lost_experts"] for proposed in running.said("view.proposed"))
        first.say("stop")
        assert first.result(SLOW_S)["complete"] > 0
