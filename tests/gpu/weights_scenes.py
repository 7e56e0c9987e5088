"""What happens to experts in a group on GPUs whose daemons keep the weights; a rank has an engine.

The same on GPUs (`tests/gpu/test_weights.py`) and on emulated ones (`tests/emulated`).
"""

import json
from pathlib import Path
from typing import Any, Final

from click.testing import CliRunner

from elasticep.cli.main import cli
from elasticep.testing.checkpoints import Family, WrittenCheckpoint, write_checkpoint
from tests.gpu.client_cluster import DEADLINE_S, Cluster, Engine

ENGINE: Final = "tests.gpu.weights_engine"
LAYERS, EXPERTS, HIDDEN, SLOTS = 2, 8, 512, 8
NAME: Final = "weights"


def written(folder: Path, rows: int = 4) -> WrittenCheckpoint:
    """A checkpoint whose experts have a vector and a matrix of `rows` by 512 bytes."""
    tensors = {
        "gate_proj.weight": ("w1", "int8", (HIDDEN,)),
        "down_proj.weight": ("w2", "int8", (rows, HIDDEN)),
    }
    family = Family("model.layers.{layer}.mlp.experts.{expert}.{tensor}", tensors)
    return write_checkpoint(folder, family, layers=LAYERS, experts=EXPERTS, shards=1)


def config(ranks: int, checkpoint: WrittenCheckpoint) -> dict[str, Any]:
    """A group's file: one copy of each expert, and room for all of them on any rank."""
    return {
        "name": NAME,
        "device": "cuda",
        "initial_ranks": ranks,
        "flap_limit": 0,
        "spare_copies": 0,
        "geometry": {
            "layers": LAYERS,
            "experts": EXPERTS,
            "topk": 2,
            "hidden": HIDDEN,
            "slots_per_rank": SLOTS,
            "max_ranks": ranks,
        },
        "exchanges": {
            "decode": {
                "preset": "ROUTED",
                "max_tokens": 16,
                "dispatch_dtype": "fp32",
                "combine_dtype": "fp32",
            }
        },
        "rebalance": {"automatic": False},
        "timeouts": {"hang_timeout_ms": 30_000},
        "weights": checkpoint.family.spec().to_dict(),
    }


def cluster(ranks: int, checkpoint: WrittenCheckpoint, **options: Any) -> Cluster:
    """A node with these ranks, whose daemon reads the checkpoint."""
    return Cluster(
        config(ranks, checkpoint),
        engine=ENGINE,
        flags=("--checkpoint", f"{NAME}={checkpoint.path}"),
        attaching={"checkpoint": str(checkpoint.path)},
        **options,
    )


def serve(*engines: Engine, timeout_s: float = DEADLINE_S) -> None:
    """Capture a step each, and replay it from now on."""
    for engine in engines:
        engine.order("serve", tokens=8)
    for engine in engines:
        engine.until(timeout_s, event="serving")


def move(running: Cluster, rows: list[list[int]]) -> None:
    """Go to a placement: in each layer the experts rank by rank."""
    file = running.folder / "plan.json"
    file.write_text(json.dumps({"physical_to_logical_map": rows}))
    command = ["rebalance", "--controllers", running.controllers, NAME]
    told = CliRunner().invoke(cli, [*command, "--import", str(file), "--watch"])
    assert told.exit_code == 0, told.output


def until_moved(engine: Engine, experts: list[int], timeout_s: float) -> dict[str, Any]:
    """The view in which this rank has these experts in every layer."""
    while True:
        view = engine.until(timeout_s, event="view")
        if all(sorted(set(row) - {-1}) == experts for row in view["slots"]):
            return view


def one_graph_through_it_all(
    running: Cluster, timeout_s: float = DEADLINE_S
) -> list[dict[str, Any]]:
    """Two ranks replay one graph while experts move, a rank dies and comes back.

    Engines check each step, and at each new view all weights. Returns rank 0's views: the first,
    after the move, after the death, after the return.
    """
    first, second = running.attach(0, 1)
    serve(first, second, timeout_s=timeout_s)
    views = [first.until(timeout_s, event="view", members=[0, 1])]
    second.until(timeout_s, event="view", members=[0, 1])
    assert sorted(e for e in views[0]["slots"][0] if e >= 0) != [1, 3, 5, 7]
    move(running, [[1, 3, 5, 7, 0, 2, 4, 6]] * LAYERS)
    views.append(until_moved(first, [1, 3, 5, 7], timeout_s))
    until_moved(second, [0, 2, 4, 6], timeout_s)
    second.kill()
    # What only the dead rank had comes from the checkpoint, before the view without it.
    views.append(first.until(timeout_s, event="view", members=[0]))
    assert all(sorted(set(row)) == list(range(EXPERTS)) for row in views[-1]["slots"])
    (again,) = running.attach(1)
    serve(again, timeout_s=timeout_s)
    views.append(first.until(timeout_s, event="view", members=[0, 1]))
    again.until(timeout_s, event="view", members=[0, 1])
    for engine in (first, again):
        engine.until(timeout_s, event="steady", members=[0, 1])
    for engine in (first, again):
        engine.say("stop")
    for engine in (first, again):
        assert engine.result(timeout_s)["complete"] > 0
    return views


def check_copied(views: list[dict[str, Any]]) -> None:
    """Of those views: rank 0's GPU got what it lacked, and nothing for a view that moves nothing
    of it.
    """
    first, moved, alone, again = (view["copied"]["slots"] for view in views)
    assert first == LAYERS * EXPERTS // 2
    assert first + LAYERS <= moved
    assert moved < alone <= moved + LAYERS * EXPERTS // 2
    assert again == alone
