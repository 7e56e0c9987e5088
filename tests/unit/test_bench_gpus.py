"""`bench gpus` without a GPU: in what order it works, and what it leaves when something fails."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticep.bench import __main__ as bench
from elasticep.bench import (
    exchange_cuda,
    exchange_cuda_report,
    gpus,
    gpus_report,
    recovery_cuda,
)
from elasticep.bench.exchange_cuda_cases import VARIANTS, Variant
from elasticep.errors import NativeError
from elasticep.native import cuda_library

Work = Callable[[dict[str, Any]], None]


def line(model: str, variant: str, tokens: int, us: float = 10.0) -> dict[str, Any]:
    spans = {"dispatch_us": us / 2, "combine_us": us / 2, "graph_us": us, "limit_us": us / 3}
    fixed = {"model": model, "variant": variant, "tokens": tokens, "total_us": us}
    return fixed | spans | {"remote_mib": 1.0, "nccl_us": 2 * us}


class Fakes:
    """Stands for the fleets: notes what was asked, and fails where it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.limits: list[float] = []
        self.nccl: list[bool] = []
        self.pools: list[Any] = []
        self.meanwhile: dict[int, Work] = {}

    def exchange(
        self, model: str, together: list[Variant], tokens: list[int], ranks: int, **options: Any
    ) -> list[dict[str, Any]]:
        self.asked.append((model, *(v.name for v in together)))
        self.limits.append(options["limit_s"])
        self.nccl.append(options["nccl"])
        self.pools.append(options["pool"])
        options["on_line"](line(model, together[0].name, tokens[0]))
        self.meanwhile.get(len(self.asked), lambda _: None)(options)
        return []

    def kill(self, ranks: int, killed: int, devices: tuple[int, ...], limit_s: float) -> Any:
        self.asked.append((f"kill {killed} of {ranks} on {devices}",))
        self.meanwhile.get(len(self.asked), lambda _: None)({})
        return recovery_cuda.Line(ranks, killed, back_ms=1.0, complete_ms=2.0, tries=1)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    made = Fakes()
    monkeypatch.setattr(cuda_library, "device_count", lambda: 4)
    monkeypatch.setattr(exchange_cuda, "measure_group", made.exchange)
    monkeypatch.setattr(recovery_cuda, "once", made.kill)
    monkeypatch.setattr(gpus, "machine", lambda: "4 x none")
    monkeypatch.setattr(exchange_cuda_report, "plot", lambda _lines, path: path.write_bytes(b"png"))
    return made


def found(out: Path) -> Any:
    assert {p.name for p in out.iterdir()} <= {"gpus.json", "gpus.md", "gpus.png"}
    return json.loads((out / "gpus.json").read_text())


def fails(text: str) -> Work:
    def work(_: dict[str, Any]) -> None:
        raise NativeError(text)

    return work


def test_both_models_come_before_more_ways_and_kills_of_one_and_two_take_turns(
    fakes: Fakes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpus.main(["--kill-rounds", "2", "--out", str(tmp_path)]) == 0
    models = [asked[0] for asked in fakes.asked[:6]]
    assert models == ["deepseek-v3", "deepseek-v4.1-flash"] * 3
    assert [n for asked in fakes.asked[:6:2] for n in asked[1:]] == [v.name for v in VARIANTS]
    kills = [asked[0] for asked in fakes.asked[6:]]
    assert kills == [f"kill {n} of 4 on (0, 1, 2, 3)" for n in (1, 2, 1, 2)]
    whole = found(tmp_path)
    assert (len(whole["exchange"]), len(whole["kills"])) == (6, 4)
    assert {task["state"] for task in whole["tasks"]} == {"done"}
    assert len({id(pool) for pool in fakes.pools}) == 1
    shown = capsys.readouterr().out
    assert shown.count("| deepseek-v3 | ROUTED | 8 |") == 1
    assert "| 4 | 2 | 2 | 1.00 | 2.00 |" in shown


def test_what_fails_is_noted_with_its_reason_and_the_rest_goes_on(
    fakes: Fakes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def torn(options: dict[str, Any]) -> None:
        options["on_line"]({"failed": "deepseek-v3, NORMAL, 8 tokens: torn"})

    fakes.meanwhile = {2: fails("process of ranks (1,) died"), 3: torn, 7: fails("no survivor")}
    assert gpus.main(["--kill-rounds", "1", "--out", str(tmp_path)]) == 1
    assert len(fakes.asked) == 8
    whole = found(tmp_path)
    failed = {t["name"]: t["why"] for t in whole["tasks"] if t["state"] == "failed"}
    assert list(failed.values()) == ["process of ranks (1,) died", "", "no survivor"]
    assert "deepseek-v3, NORMAL, 8 tokens: torn" in failed
    assert len(whole["exchange"]) == 6, "lines that came before the failure are kept"
    assert len({id(pool) for pool in fakes.pools}) == 2, "after a failure other processes"
    assert "died" in capsys.readouterr().err
    assert "| failed |" in (tmp_path / "gpus.md").read_text()


def test_each_line_is_on_disk_when_a_run_is_cut_off(fakes: Fakes, tmp_path: Path) -> None:
    seen: list[Any] = []

    def cut(_: dict[str, Any]) -> None:
        seen.append(found(tmp_path))
        raise KeyboardInterrupt

    fakes.meanwhile = {2: cut}
    with pytest.raises(KeyboardInterrupt):
        gpus.main(["--out", str(tmp_path)])
    (whole,) = seen
    assert [x["model"] for x in whole["exchange"]] == ["deepseek-v3", "deepseek-v4.1-flash"]
    assert [t["state"] for t in whole["tasks"]] == ["done", "running"]
    assert [t["state"] for t in found(tmp_path)["tasks"]] == ["done", "cut off"]


def test_nothing_is_begun_for_which_no_time_is_left_and_kills_keep_theirs(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(gpus, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def takes_long(_: dict[str, Any]) -> None:
        clock[0] += 45

    # 100 s, of which kills keep 20: 35 are left for the second.
    fakes.meanwhile = {1: takes_long}
    arguments = ["--limit", "100", "--kill-rounds", "1", "--out", str(tmp_path)]
    assert gpus.main(arguments) == gpus.UNFINISHED
    states = [t["state"] for t in found(tmp_path)["tasks"]]
    assert states == ["done", *["not begun"] * 5, "done", "done"]
    assert fakes.limits == [80.0]


def test_where_nccl_does_not_work_it_is_timed_without(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*given: Any, **options: Any) -> list[dict[str, Any]]:
        if options["nccl"]:
            raise NativeError("process of ranks (3,):\nTraceback\nDistBackendError: NCCL error")
        return fakes.exchange(*given, **options)

    monkeypatch.setattr(exchange_cuda, "measure_group", measure)
    assert gpus.main(["--kill-rounds", "0", "--out", str(tmp_path)]) == 1
    assert fakes.nccl == [False] * 6
    names = [t["name"] for t in found(tmp_path)["tasks"]]
    assert names[1] == f"{names[0]}, without NCCL"


def test_without_a_gpu_nothing_is_begun(
    fakes: Fakes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cuda_library, "device_count", lambda: 0)
    assert gpus.main(["--out", str(tmp_path)]) == 1
    monkeypatch.setattr(cuda_library, "device_count", lambda: fails("no library")({}))
    assert gpus.main(["--ranks", "8", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert (
        said.err == "bench gpus needs a CUDA device\nbench gpus needs a CUDA device: no library\n"
    )
    assert not said.out
    assert not fakes.asked
    assert not list(tmp_path.iterdir())


def test_published_times_stand_beside_ours() -> None:
    lines = [
        line("deepseek-v3", "LOW_LATENCY fp8", 128, us=80.0),
        line("deepseek-v3", "NORMAL fp8", 4096, us=1473.0),
        line("deepseek-v3", "ROUTED", 128),
    ]
    eight = gpus_report.beside_peers(lines, 8)
    assert len(eight) == 4
    assert "| 0.92 | 1.68 | 1.30 | 1.3 | no |" in eight[2]
    assert "| 1.00 | 1.2 | no |" in eight[3]
    assert "| 4 ranks |" in gpus_report.beside_peers(lines, 4)[2]
    assert gpus_report.beside_peers(lines[2:], 8) == []


def test_a_bench_says_which_module_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(_: str) -> Any:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(bench.importlib, "import_module", missing)
    assert bench.main(["gpus"]) == 1
    assert capsys.readouterr().err == "bench gpus needs the Python module torch\n"
