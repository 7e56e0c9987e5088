"""The exchange bench at tiny sizes: it measures, checks its results, and says what it cannot do."""

import threading
from pathlib import Path

import pytest

from elasticep.bench import exchange, peers, ranks, report, steady
from elasticep.bench.case import Case
from elasticep.bench.engine import Engine, WrongResult
from elasticep.bench.exchange import group_config
from elasticep.errors import ConfigError
from elasticep.native import abi
from elasticep.native.convert import geometry_struct
from elasticep.native.library import LIBRARY_DIR
from elasticep.testing.local_group import LocalGroup, spread
from elasticep.testing.processes import alive

CASE = Case(ranks=2, tokens=4, hidden=64, experts=8, topk=2)


def run(
    presets: list[str], launch: str = "inline", peer_names: list[str] | None = None
) -> dict[tuple[str, str], dict]:
    result = exchange.run([CASE], presets, [launch], peer_names or [], rounds=2, round_s=0.01)
    return {(one["preset"], one["launch"]): one for one in result.figures["measured"]}


@pytest.mark.parametrize("launch", ["service", "inline"])
def test_every_preset_is_measured_beside_memcpy(launch: str) -> None:
    presets = ["ROUTED", "ALLGATHER", "NORMAL", "LOW_LATENCY", "EXPAND", "EXPAND_SYNC"]
    measured = run(presets, launch)
    places = ["service", "service, in place"] if launch == "service" else ["inline"]
    assert list(measured) == [(preset, place) for preset in presets for place in places]
    for row, figures in measured.items():
        assert figures["why_not"] is None, row
        assert len(figures["rounds_ns"]["elasticep"]) == 2
        assert min(figures["rounds_ns"]["elasticep"]) > 0
        assert "memcpy / elasticep" in figures


def test_a_batch_that_goes_past_the_caches_is_exact() -> None:
    # 10 MiB per rank: rows, and what service launch hands over, are streamed.
    large = Case(ranks=2, tokens=1024, hidden=5120, experts=8, topk=2)
    result = exchange.run([large], ["ROUTED"], ["service"], [], rounds=1, round_s=0.01)
    assert result.figures["measured"][0]["why_not"] is None


def test_peers_run_in_turn_with_us() -> None:
    names = [name for name in ("gloo", "mpi") if peers.absent(name) is None]
    if not names:
        pytest.skip("neither torch nor mpi4py with mpiexec is here")
    measured = run(["ROUTED", "EXPAND"], peer_names=names)
    for figures in measured.values():
        for name in names:
            assert len(figures["rounds_ns"][name]) == 2
            assert f"{name} / elasticep" in figures
    if "mpi" in names:  # only layouts by expert are held against grouped rows
        assert "mpi by expert / elasticep" in measured["EXPAND", "inline"]
        assert "mpi by expert / elasticep" not in measured["ROUTED", "inline"]


def test_what_cannot_be_measured_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConfigError("this preset is not for you")

    monkeypatch.setattr(exchange, "LocalGroup", refuse)
    monkeypatch.setattr(peers, "absent", lambda name: f"{name} is not here")
    result = exchange.run([CASE], ["ROUTED"], ["inline"], ["mpi"], 1, 0.01)
    text = result.tables[0].text()
    assert "not measured: this preset is not for you" in text
    assert "mpi: not measured, mpi is not here" in text


def test_a_wrong_sum_is_not_measured() -> None:
    struct = geometry_struct(group_config("ROUTED", CASE, "inline"))
    other = Case(**{**CASE.to_dict(), "seed": 2})
    with LocalGroup(struct) as group:
        engines = [Engine(group.socket_path, group.ticket(r, abi.Role.ENGINE)) for r in (0, 1)]
        for rank, engine in enumerate(engines):
            engine.prepare(CASE, rank)
        group.stage(1, 0, (0, 1), spread(struct, (0, 1)))
        engines[1].case = other  # what it expects is not what it sends
        raised: list[BaseException | None] = [None, None]

        def verify(rank: int) -> None:
            try:
                engines[rank].verify(rank)
            except WrongResult as error:
                raised[rank] = error

        threads = [threading.Thread(target=verify, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for engine in engines:
            engine.close()
    assert raised[0] is None
    assert isinstance(raised[1], WrongResult)


def test_a_rank_that_fails_is_named_and_leaves_nothing_behind() -> None:
    with ranks.RankSet(exchange.ENGINE, 2) as engines:
        with pytest.raises(ranks.BenchError, match="rank 0: AssertionError"):
            engines.call("run", runs=1, repeat=1)
        pids = [engines.pid(rank) for rank in (0, 1)]
    assert not any(alive(pid) for pid in pids)


def test_a_system_that_does_not_start_is_refused_with_its_last_words() -> None:
    with pytest.raises(ranks.BenchError, match="has no attribute 'NoSuchRank'"):
        ranks.RankSet("elasticep.bench.peers:NoSuchRank", 1)


def test_systems_that_are_stopped_while_they_start_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first is there when Ctrl-C comes in the start of the second."""
    started: list[int] = []
    folders: list[Path] = []

    def peer(name: str, count: int) -> ranks.RankSet:
        first = ranks.RankSet(exchange.ENGINE, count)
        folders.append(first._folder)
        started.append(first.pid(0))
        return first

    def accept(_: ranks.RankSet) -> None:
        if started:
            raise KeyboardInterrupt

    monkeypatch.setattr(peers, "start", peer)
    monkeypatch.setattr(ranks.RankSet, "_accept", accept)
    with pytest.raises(KeyboardInterrupt):
        exchange.Systems.start(1, ["gloo"])
    assert not alive(started[0])
    assert not folders[0].exists()


def test_two_builds_are_compared_pair_by_pair(tmp_path: Path) -> None:
    words = ["--ranks", "2", "--tokens", "4", "--hidden", "64", "--experts", "8", "--topk", "2"]
    output = tmp_path / "steady.json"
    words += ["--sets", "2", "--pairs", "2", "--exchanges", "2", "--output", str(output)]
    assert steady.main(["--against", str(LIBRARY_DIR), *words]) == 0
    assert '"ratio"' in output.read_text()
    assert steady.main(["--against", str(tmp_path), *words]) == 1


def test_a_figure_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "bars.png"
    report.plot(str(path), "title", "ratio", {"a": {"x": 1.0, "y": 2.0}, "b": {"x": 3.0}})
    assert path.read_bytes().startswith(b"\x89PNG")
    report.plot(str(path), "nothing was measured", "ratio", {})
