"""Engines on GPUs whose experts lie in memory of the daemons: one graph while experts move, a rank
dies and returns; and how fast weights come to the GPU.

With `ELASTICEP_GPU_OUT` figures also go to `weights.jsonl` there. `ELASTICEP_GPU_WEIGHTS_MIB` is
the size of an expert when that is measured.
"""

import functools
import os
import time
from pathlib import Path

import pytest

from tests.gpu import client_cluster, weights_scenes
from tests.gpu.client_cluster import both

pytest.importorskip("structlog", reason="controller and daemons need the package's dependencies")
pytestmark = pytest.mark.timeout(400)
EXPERT_MIB = int(os.environ.get("ELASTICEP_GPU_WEIGHTS_MIB", "64"))
SLOW_S = 120.0
note = functools.partial(client_cluster.note, "weights")


def test_one_graph_goes_on_while_experts_move_and_a_rank_dies_and_returns(tmp_path: Path) -> None:
    checkpoint = weights_scenes.written(tmp_path / "model")
    with weights_scenes.cluster(2, checkpoint) as running:
        views = weights_scenes.one_graph_through_it_all(running, SLOW_S)
    weights_scenes.check_copied(views)


def test_eager_steps_compare_what_they_compute_with_with_their_view(tmp_path: Path) -> None:
    checkpoint = weights_scenes.written(tmp_path / "model")
    with weights_scenes.cluster(2, checkpoint) as running:
        engines = running.attach(0, 1)
        assert both(engines, "eager", tokens=8, count=20) == [1, 1]


def test_how_fast_weights_come_to_the_gpu(tmp_path: Path) -> None:
    """With large experts: when the first view comes, and again when the engine is started anew."""
    checkpoint = weights_scenes.written(tmp_path / "model", rows=EXPERT_MIB * 2048 - 1)
    with weights_scenes.cluster(1, checkpoint) as running:
        for start in ("first", "again"):
            began = time.monotonic()
            (engine,) = running.attach(0)
            attached = time.monotonic()
            weights_scenes.serve(engine, timeout_s=SLOW_S)
            view = engine.until(SLOW_S, event="view", members=[0])
            copied = view["copied"]
            assert copied["slots"] == weights_scenes.LAYERS * weights_scenes.EXPERTS
            note(
                f"weights, {start}",
                {
                    "expert_mib": EXPERT_MIB,
                    "bytes": copied["bytes"],
                    "gb_s": round(copied["bytes"] / copied["seconds"] / 1e9, 1),
                    "copy_s": round(copied["seconds"], 3),
                    "attach_s": round(attached - began, 2),
                },
            )
            engine.kill()
            engine.close()
