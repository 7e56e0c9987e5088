"""Engines attached through controller and daemons, on one or two GPUs: ranks of one take turns.

Every engine checks each of its results against the inputs. Recovery times are printed; with
ELASTICEP_GPU_OUT set they also go to a JSON file there.
"""

import functools
import os
import random
import signal
import threading
import time
from statistics import median
from typing import Any

import pytest

from elasticep.native.cuda import Why
from elasticep.testing.node import wait_for
from tests.gpu import client_cluster
from tests.gpu.client_cluster import Cluster, Engine, both

pytest.importorskip("structlog", reason="controller and daemons need the package's dependencies")
pytestmark = pytest.mark.timeout(240)
WHYS = (Why.PASSED_BY, Why.PEER_LEFT, Why.PEER_DEAD)
PHASES = random.Random(5)
SPARES = 4
KILLS = int(os.environ.get("ELASTICEP_GPU_CLIENT_KILLS", "3"))
FP32 = {"dispatch_dtype": "fp32", "combine_dtype": "fp32"}
note = functools.partial(client_cluster.note, "client")
EXCHANGES: dict[str, dict[str, Any]] = {
    "decode": {"preset": "ROUTED", "max_tokens": 32, **FP32},
    "latency": {"preset": "LOW_LATENCY", "max_tokens": 16},
    "expand": {"preset": "EXPAND", "max_tokens": 16},
    "prefill": {"preset": "EXPAND_SYNC", "max_tokens": 128},
    "normal": {"preset": "NORMAL", "max_tokens": 64},
    "gather": {"preset": "ALLGATHER", "max_tokens": 16},
    "sums8": {"preset": "ROUTED", "max_tokens": 16, "combine_dtype": "fp8"},
    "exact": {"preset": "ROUTED", "max_tokens": 16, "reduce": "per_expert", **FP32},
}


def config(name: str, ranks: int, *exchanges: str, **changes: Any) -> dict[str, Any]:
    """A group's file; any rank can hold all experts."""
    return {
        "name": name,
        "device": "cuda",
        "initial_ranks": ranks,
        "flap_limit": 0,
        "spare_copies": min(1, ranks - 1),
        "geometry": {
            "layers": 2,
            "experts": 8,
            "topk": 2,
            "hidden": 512,
            "slots_per_rank": 8,
            "max_ranks": ranks,
        },
        "exchanges": {exchange: EXCHANGES[exchange] for exchange in exchanges or ("decode",)},
        "timeouts": {"hang_timeout_ms": 3000},
        **changes,
    }


def test_every_way_to_exchange_through_daemons() -> None:
    with Cluster(config("ways", 2, *EXCHANGES), nodes=2) as cluster:
        engines = cluster.attach(0, 1)
        for name, plain in EXCHANGES.items():
            tokens = min(12, plain["max_tokens"])
            results = both(engines, "steps", exchange=name, tokens=tokens, count=2)
            for result in results:
                assert result["members"] == {"0": 1, "1": 1}, (name, result)
        # 2 steps x 2 layers x 12 tokens x 2 choices, of each exchange and rank: case 12 and 13.
        assert both(engines, "load") == [2 * 2 * 12 * 2 * len(EXCHANGES)] * 2
        for engine, result in zip(engines, both(engines, "misuse", exchange="decode"), strict=True):
            note(f"misuse of rank {engine.rank}", result)
            assert "outside a step" in result["outside"]
            assert "needs cuda:" in result["cpu"]
            assert "cap" in result["cap"]
            assert result["complete"] == "True"
        both(engines, "detach")


def test_coupled_ranks_agree_on_works() -> None:
    with Cluster(config("coupled", 2, completion="agreed")) as cluster:
        engines = cluster.attach(0, 1)
        assert both(engines, "works", exchange="decode", tokens=8, last=5) == [[1, 2, 3, 4, 5]] * 2


def test_case_22_everything_is_allocated_when_the_exchange_is_made() -> None:
    with Cluster(config("capture", 1)) as cluster:
        engines = cluster.attach(0)
        both(engines, "steps", exchange="decode", tokens=16, count=1)
        (result,) = both(engines, "capture_allocates_nothing", exchange="decode", tokens=16)
        assert result["step"] == result["empty"], result


def test_counts_and_sources_are_there_for_a_captured_step() -> None:
    with Cluster(config("received", 2, "decode", "gather")) as cluster:
        engines = cluster.attach(0, 1)
        for name in ("decode", "gather"):
            for result in both(engines, "received", exchange=name, tokens=12):
                assert result == {"same": True, "tokens": [12, 12], "scales": [1.0, 1.0]}


def test_a_view_is_staged_while_the_engine_captures() -> None:
    with Cluster(config("staging", 2, initial_ranks=1)) as cluster:
        (first,) = cluster.attach(0)
        both([first], "steps", exchange="decode", tokens=8, count=1)
        first.order("capture_while_staging", exchange="decode", tokens=8)
        first.until(event="capturing")
        (second,) = cluster.attach(1)
        second.order("steps", exchange="decode", tokens=8, count=1)
        result = first.result()
        assert result["epoch"] > result["first"]
        assert result["members"] == [0, 1]
        second.result()


def serve(engines: list[Engine]) -> None:
    """All replay their graph."""
    for engine in engines:
        engine.order("serve", exchange="decode", tokens=16)
    for engine in engines:
        engine.until(event="serving")


def kill_and_rejoin(cluster: Cluster, engines: dict[int, Engine], victim: int) -> dict[str, float]:
    """SIGKILL somewhere in a step or between two; times in ms on the survivors since then.

    `complete_ms`: until the last one has a complete step without the victim. `returned_ms`: until
    the last broken step had returned; absent if the view was there before anybody was in a step.
    """
    survivors = [engine for rank, engine in engines.items() if rank != victim]
    for engine in engines.values():
        engine.until(event="steady", members=sorted(engines))
    threading.Event().wait(PHASES.random() * 0.05)
    heard = {engine.rank: len(engine.events) for engine in survivors}
    killed = engines[victim].kill()
    returned, complete = [], []
    for engine in survivors:
        view = engine.until(event="view", members=sorted(set(engines) - {victim}))
        complete.append((view["at"] - killed) / 1e6)
        for event in engine.events[heard[engine.rank] :]:
            if event.get("event") == "torn" and event["at"] > killed:
                assert event["why"] in WHYS, event
                returned.append((event["at"] - killed) / 1e6)
                break
    (again,) = cluster.attach(victim)
    serve([again])
    engines[victim] = again
    found = {"complete_ms": max(complete)}
    if returned:
        found["returned_ms"] = max(returned)
    note(f"{len(engines)} ranks, killed {victim}", found)
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_case_04_survivors_go_on_with_the_same_graph(ranks: int) -> None:
    with Cluster(config(f"kills{ranks}", ranks), nodes=ranks - 1) as cluster:
        engines = dict(enumerate(cluster.attach(*range(ranks))))
        serve(list(engines.values()))
        victims = [1 + i % (ranks - 1) for i in range(KILLS)]
        for rank in victims[:SPARES]:
            cluster.spare(rank)
        lines = []
        for victim, later in zip(victims, [*victims[SPARES:], *[0] * SPARES], strict=False):
            if later:
                cluster.spare(later)
            lines.append(kill_and_rejoin(cluster, engines, victim))
        for engine in engines.values():
            engine.until(event="steady", members=list(range(ranks)))
        assert any("returned_ms" in line for line in lines), "no kill fell into a step"
        for name in ("returned_ms", "complete_ms"):
            values = sorted(round(line[name], 1) for line in lines if name in line)
            note(f"{ranks} ranks, {name}", values)
            note(f"{ranks} ranks, {name}, median and worst", [median(values), values[-1]])
        for engine in engines.values():
            engine.say("stop")
        for engine in engines.values():
            result = engine.result()
            assert result["complete"] > 0, result


def test_a_stopped_engine_is_expelled_and_completes_nothing_more() -> None:
    with Cluster(config("stopped", 2)) as cluster:
        engines = cluster.attach(0, 1)
        serve(engines)
        for engine in engines:
            engine.until(event="view", members=[0, 1])
        stopped = engines[1].process.pid
        os.kill(stopped, signal.SIGSTOP)
        began = time.monotonic_ns()
        view = engines[0].until(event="view", members=[0])
        os.kill(stopped, signal.SIGCONT)
        note("SIGSTOP to complete step, hang_timeout 3000 ms", round((view["at"] - began) / 1e6))
        try:
            result = engines[1].result()
        except AssertionError:  # its daemon ended it before it could say so
            assert engines[1].process.wait(30) != 0
        else:
            assert result["fenced"], result
        engines[0].say("stop")
        assert engines[0].result()["complete"] > 0


def test_case_21_a_device_error_names_the_rank_and_the_others_go_on() -> None:
    with Cluster(config("broken", 2)) as cluster:
        engines = cluster.attach(0, 1)
        engines[0].order("serve", exchange="decode", tokens=4)
        engines[1].order("break_device", exchange="decode")
        engines[0].until(event="view", members=[0, 1])
        text = engines[1].result()
        note("case 21", text)
        assert text.startswith("DeviceFailed"), text
        assert "rank 1" in text
        engines[1].kill()
        engines[0].until(event="view", members=[0])
        engines[0].say("stop")
        assert engines[0].result()["complete"] > 0


def test_torch_compile_and_opcheck() -> None:
    with Cluster(config("compiled", 1)) as cluster:
        (engine,) = cluster.attach(0)
        (result,) = both([engine], "compiled", exchange="decode", tokens=8)
        note("torch.compile", result)
        assert result["error"] < 1e-5


def test_a_daemon_is_restarted_under_engines_that_go_on() -> None:
    with Cluster(config("restart", 2)) as cluster:
        engines = cluster.attach(0, 1)
        serve(engines)
        for engine in engines:
            engine.until(event="view", members=[0, 1])
        (daemon,) = cluster.daemons
        daemon.kill()
        daemon.start()
        wait_for(lambda: len(daemon.events("seat.reattached")) == 2, "both seats to come back")
        killed = engines[1].kill()
        view = engines[0].until(event="view", members=[0])
        note("after a restart of the daemon, complete_ms", round((view["at"] - killed) / 1e6, 1))
        (again,) = cluster.attach(1)
        serve([again])
        engines[0].until(event="view", members=[0, 1])
        assert len(daemon.events("memory.taken")) == 2  # it has the memory that engines brought
        for engine in (engines[0], again):
            engine.say("stop")
            assert engine.result()["complete"] > 0


def test_a_rank_that_comes_back_with_other_memory_is_mapped_where_it_was() -> None:
    with Cluster(config("renewed", 2), nodes=2) as cluster:
        engines = cluster.attach(0, 1)
        serve(engines)
        for engine in engines:
            engine.until(event="view", members=[0, 1])
        daemon = cluster.daemons[1]
        daemon.kill()
        engines[1].kill()
        engines[0].until(event="view", members=[0])
        daemon.start()
        (again,) = cluster.attach(1)
        assert len(daemon.events("memory.taken")) == 2
        serve([again])
        engines[0].until(event="view", members=[0, 1])
        for engine in (engines[0], again):
            engine.say("stop")
            assert engine.result()["complete"] > 0


def test_pace_of_steps() -> None:
    with Cluster(config("pace", 2)) as cluster:
        engines = cluster.attach(0, 1)
        for result in both(engines, "pace", exchange="decode", tokens=16, count=200):
            note("us per step of two layers with toy experts", result)
