"""Engines on emulated GPUs whose experts lie in memory of the daemons: a whole cluster."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from elasticep.testing import emulated_cuda
from tests.gpu import client_cluster, weights_scenes
from tests.gpu.client_cluster import Cluster, Failed, both

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(400)
SLOW_S = 120.0


def test_one_graph_goes_on_while_experts_move_and_a_rank_dies_and_returns(tmp_path: Path) -> None:
    checkpoint = weights_scenes.written(tmp_path / "model")
    options = {"gpus": 2, "environment": emulated_cuda.environment(sms=2)}
    with weights_scenes.cluster(2, checkpoint, **options) as running:
        views = weights_scenes.one_graph_through_it_all(running, SLOW_S)
    weights_scenes.check_copied(views)


def test_eager_steps_compare_what_they_compute_with_with_their_view(tmp_path: Path) -> None:
    checkpoint = weights_scenes.written(tmp_path / "model")
    options = {"gpus": 1, "environment": emulated_cuda.environment(sms=2)}
    with weights_scenes.cluster(1, checkpoint, **options) as running:
        (engine,) = running.attach(0)
        assert both([engine], "eager", tokens=8, count=3) == [1]
        assert (
            both([engine], "copied")[0]["slots"] == weights_scenes.LAYERS * weights_scenes.EXPERTS
        )


def test_a_cluster_whose_controller_ends_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_cluster, "sys", SimpleNamespace(executable="/bin/false"))
    config = {"name": "none", "geometry": {"max_ranks": 1}}
    with pytest.raises(Failed, match="controller ended with 1"), Cluster(config, gpus=1):
        pass
