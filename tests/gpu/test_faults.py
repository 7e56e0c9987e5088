"""Ranks that are killed or stopped in the middle of an exchange; on one GPU they take turns."""

import json
import os
import random
import selectors
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from elasticep.bench.fleet_cuda import Fleet, FleetSpec
from elasticep.bench.fleet_cuda_pool import Child
from elasticep.native import abi
from elasticep.native import cuda as native
from tests.gpu.shapes import exchange, geometry, places_apart

pytestmark = pytest.mark.timeout(560)
PROGRAMS = "tests.gpu.programs_faults"
KILLS = int(os.environ.get("ELASTICEP_GPU_KILLS", "8"))
SEED = int(os.environ.get("ELASTICEP_GPU_SEED", "1"))
KILLS_JSON = os.environ.get("ELASTICEP_GPU_KILLS_JSON")
EXCHANGES = int(os.environ.get("ELASTICEP_GPU_EXCHANGES", "5000"))
RETURN_LIMIT_MS = 20.0
DEATH_LIMIT_S = 60.0


def spec(ranks: int, topk: int = 1, experts: int = 8) -> FleetSpec:
    shape = geometry(
        ranks, [exchange(64)], hidden=1024, experts=experts, topk=topk, layers=2, slots=8
    )
    return FleetSpec(
        geometry=shape,
        exchange_timeout_ms=5000,
        **places_apart(ranks),
    )


def kill(fleet: Fleet, rank: int) -> tuple[int, dict[str, float]]:
    """SIGKILL; when it was, and by what a death shows and after how many ms.

    `futex_ms`: the kernel has marked the rank's lock; `socket_ms`: its end of a socket is closed;
    `exit_ms`: the process has ended. The last two come after its CUDA context is taken down.
    """
    child = fleet.children[rank]
    pidfd = os.pidfd_open(child.process.pid)
    found: dict[str, float] = {}
    with selectors.DefaultSelector() as ready:
        ready.register(pidfd, selectors.EVENT_READ, "exit_ms")
        ready.register(child.connection, selectors.EVENT_READ, "socket_ms")
        ready.register(fleet.watcher.fd, selectors.EVENT_READ, "futex_ms")
        killed_ns = time.monotonic_ns()
        child.process.kill()
        while len(found) < 3:
            shown = ready.select(DEATH_LIMIT_S)
            now_ns = time.monotonic_ns()
            assert shown, f"rank {rank} was killed, and after {DEATH_LIMIT_S} s only {found}"
            for key, _ in shown:
                if key.data != "futex_ms":
                    found[key.data] = (now_ns - killed_ns) / 1e6
                    ready.unregister(key.fileobj)
                    fleet.watcher.look()  # as a daemon does
                    continue
                for event in fleet.watcher.events():
                    if event.key == rank and event.kind == abi.EventKind.DIED:
                        found.setdefault("futex_ms", (event.at_ns - killed_ns) / 1e6)
    os.close(pidfd)
    return killed_ns, found


def kill_one_after_another(victims: int, seed: int) -> list[dict[str, Any]]:
    """Each victim joins, serves, and dies at a random moment; times in ms since its death."""
    moments = random.Random(seed)
    deaths: dict[int, tuple[int, dict[str, float]]] = {}
    with Fleet(spec(victims + 1)) as fleet:

        def on_report(_: Child, report: tuple[str, int]) -> None:
            what, rank = report
            if what == "turn":
                fleet.children[rank].connection.send("go")
            elif what == "joined":
                fleet.children[0].connection.send("joined")
            else:
                threading.Event().wait(moments.random() * 0.02)
                deaths[rank] = kill(fleet, rank)

        fleet.start(f"{PROGRAMS}:kills", victims=list(range(1, victims + 1)))
        lines = fleet.finish(200, on_report, may_die=True)[0]
    for line in lines:
        died, shown = deaths[line["victim"]]
        line |= shown
        line["back_ms"] = (line.pop("back_ns") - died) / 1e6
        line["complete_ms"] = (line.pop("complete_ns") - died) / 1e6
    return list(lines)


def test_case_04_survivor_lives_and_replays_the_same_graph() -> None:
    lines = kill_one_after_another(KILLS, seed=SEED)
    if KILLS_JSON:
        Path(KILLS_JSON).write_text(json.dumps(lines))
    for line in lines:
        assert line["why"] == native.Why.PEER_DEAD, line
        assert line["rank"] == line["victim"], line  # case 21: the right one is blamed
        assert line["members"] == [0], line
        assert 0 < line["back_ms"] < RETURN_LIMIT_MS, line


def test_an_expelled_rank_that_goes_on_completes_nothing() -> None:
    with Fleet(spec(2)) as fleet:

        def on_report(_: Child, what: str) -> None:
            if what == "stopping":
                fleet.headers[0].mark_dead(1, 1)
            elif what == "alone":
                os.kill(fleet.children[1].process.pid, signal.SIGCONT)
            else:
                fleet.children[0].connection.send("awake")

        fleet.start(f"{PROGRAMS}:stopped")
        survivor, expelled = fleet.finish(on_report=on_report)
    assert survivor == {"why": native.Why.PEER_DEAD, "complete": 20, "later": True}
    assert not any(expelled["complete"])
    assert native.StepStatus.EXPELLED in expelled["status"]


def test_no_mismatch_under_random_delays() -> None:
    with Fleet(spec(2, topk=4, experts=16)) as fleet:
        arguments = {"exchanges": EXCHANGES, "per_step": 50, "seed": 11}
        for result in fleet.run(f"{PROGRAMS}:soak", 500.0, **arguments):
            assert result == {"wrong": 0, "incomplete": 0, "exchanges": EXCHANGES}
